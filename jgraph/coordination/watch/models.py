"""Served models of a watched cluster: rates, times and refusals of each version."""

from typing import Any, final

from jgraph.coordination.watch.facts import Fact, number, numbers, rows, text
from jgraph.coordination.watch.rates import Window

WINDOW_S = 60.0


@final
class ModelSeen:
    """One version of a model on one server.

    Attributes:
      facts: what the server said last: sums since the version was loaded.
      recent: the same sums over the last minute.
    """

    def __init__(self) -> None:
        self.facts: Fact = {}
        self.recent = Window(WINDOW_S)

    def take(self, fact: Fact, now: float) -> None:
        """Takes what its server says of it."""
        self.facts = fact
        sums = {name: number(fact, name) for name in ("requests", "rows", "executions")}
        parts = numbers(fact, "seconds").items()
        sums |= {f"s:{part}": seconds for part, seconds in parts}
        sums["refused"] = sum(numbers(fact, "refused").values())
        self.recent.add(now, sums)

    @property
    def refused_share(self) -> float:
        """Of the requests of the last minute."""
        sums = self.recent.sums()
        asked = sums.get("requests", 0) + sums.get("refused", 0)
        return sums.get("refused", 0) / asked if asked >= 10 else 0.0

    def view(self) -> dict[str, Any]:
        """Returns it as the page shows it."""
        sums, span = self.recent.sums(), self.recent.span
        requests, runs = sums.get("requests", 0), sums.get("executions", 0)

        def mean_ms(part: str) -> float | None:
            seconds = sums.get(f"s:{part}", 0.0)
            return round(1e3 * seconds / requests, 3) if requests else None

        return {
            "model": text(self.facts, "model"),
            "version": text(self.facts, "version"),
            "per_s": round(requests / span, 3) if span else None,
            "mean_ms": mean_ms("success"),
            "queue_ms": mean_ms("queue"),
            "compute_ms": mean_ms("compute_infer"),
            "batch_rows": round(sums.get("rows", 0) / runs, 2) if runs else None,
            "queued_rows": number(self.facts, "queued_rows"),
            "requests": number(self.facts, "requests"),
            "refused": numbers(self.facts, "refused"),
            "refused_share": round(self.refused_share, 4),
        }


@final
class Models:
    """All model servers that are watched.

    Attributes:
      servers: by address: why it does not answer; empty: it does.
      seen: versions by server, model and number.
    """

    def __init__(self) -> None:
        self.servers: dict[str, str] = {}
        self.seen: dict[str, dict[str, ModelSeen]] = {}

    def take(self, fact: Fact, now: float) -> None:
        """Takes what a server says of its models, or that it does not answer."""
        server = text(fact, "server")
        self.servers[server] = text(fact, "silent")
        if self.servers[server]:
            return
        versions, before = rows(fact, "models"), self.seen.get(server, {})
        self.seen[server] = {name: before.get(name, ModelSeen()) for name in versions}
        for name, version in self.seen[server].items():
            version.take(versions[name], now)

    def view(self) -> dict[str, Any]:
        """Returns servers with their versions, as the page shows them."""
        return {
            server: {
                "silent": silent,
                "versions": {
                    name: version.view()
                    for name, version in sorted(self.seen.get(server, {}).items())
                },
            }
            for server, silent in sorted(self.servers.items())
        }
