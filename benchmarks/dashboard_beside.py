"""Processes beside a run that is watched: a dashboard, and those who look at it.

``python -m benchmarks.dashboard_beside dashboard TARGET DIRECTORY`` serves the
dashboard of a cluster, with a journal, from the line ``attach`` on standard input to
the line ``detach``, and knows nothing of the cluster in between; ``… viewers`` reads
three streams of the dashboard whose address is a line, until these end. Each answers a
line when that is so. To import takes a second of a core: done once, it is no part of
what watching costs.
"""

import http.client
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

VIEWERS = 3
ANSWER_S = 60.0
NICE = 19
"""Of who looks: a browser is on another machine, and must take no core from tasks."""


def serve(target: str, directory: Path) -> None:
    """Attaches a dashboard to a cluster, and detaches it, whenever a line says so."""
    for number, _ in enumerate(iter(sys.stdin.readline, "")):
        with attached(target, directory / f"{number}.jsonl") as url:
            print(url, flush=True)
            sys.stdin.readline()
        print("detached", flush=True)


@contextmanager
def attached(target: str, journal: Path) -> Iterator[str]:
    """Serves as ``jgraph dashboard`` does; gives the address."""
    from jgraph.client.inspect import inspecting
    from jgraph.dashboard.serve import DashboardServer, Options
    from jgraph.dashboard.sources import LiveSource

    with inspecting(target, timeout_s=5.0) as visit:
        source = LiveSource(visit, target, journal)
        server = DashboardServer(source, Options(port=0))
        serving = threading.Thread(target=server.run)
        source.start()
        serving.start()
        try:
            yield server.url
        finally:
            server.stop()
            serving.join(ANSWER_S)
            source.close()


def look() -> None:
    """Reads streams of each dashboard whose address is a line, to their end."""
    os.nice(NICE)
    for line in iter(sys.stdin.readline, ""):
        seen = threading.Semaphore(0)
        readers = [
            threading.Thread(target=read, args=(line.strip(), seen), daemon=True)
            for _ in range(VIEWERS)
        ]
        for reader in readers:
            reader.start()
        for _ in readers:
            if not seen.acquire(timeout=ANSWER_S):
                sys.exit("a dashboard shows nothing")
        print("they read", flush=True)
        for reader in readers:
            reader.join(ANSWER_S)


def read(url: str, seen: threading.Semaphore) -> None:
    """Reads a stream to its end, as a browser does; shows nothing."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(str(where.netloc), timeout=ANSWER_S)
    token = where.fragment.removeprefix("token=")
    shown = {"Authorization": f"Bearer {token}"}
    connection.request("GET", "/api/v1/stream", headers=shown)
    events = connection.getresponse()
    assert events.status == 200, events.status
    is_new = True
    with suppress(http.client.HTTPException):  # the dashboard is gone
        while data := events.read1(1 << 16):
            if is_new and b"event: state" in data:
                is_new = False
                seen.release()
    connection.close()


if __name__ == "__main__":
    if sys.argv[1] == "dashboard":
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        look()
