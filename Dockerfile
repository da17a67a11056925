# One task of a cluster: `docker run IMAGE server --job ps --task 0 --cluster …`.
# It has jgraph and no compiler, runs as user 1000, and writes to /tmp alone.
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY jgraph ./jgraph
RUN python -m venv /opt/jgraph && /opt/jgraph/bin/pip install --no-cache-dir '.[serve]'

FROM python:3.13-slim
COPY --from=build /opt/jgraph /opt/jgraph
ENV PATH=/opt/jgraph/bin:$PATH PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8470 8471
ENTRYPOINT ["jgraph"]
CMD ["server"]
