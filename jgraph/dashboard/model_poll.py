"""Poller of model servers: reads the metrics that each tells Prometheus."""

import http
import http.client
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, Final, final
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from jgraph.clock import Clock
from jgraph.coordination.watch.facts import Fact, clean
from jgraph.errors import AddressError

_ANSWER_S: Final = 2.0
_MOST_BYTES: Final = 4 << 20
_SUMS: Final = {
    "jgraph_serve_requests_total": "requests",
    "jgraph_serve_rows_total": "rows",
    "jgraph_serve_executions_total": "executions",
    "jgraph_serve_queued_rows": "queued_rows",
}
_BY_LABEL: Final = {
    "jgraph_serve_refused_total": ("refused", "code"),
    "jgraph_serve_seconds_total": ("seconds", "part"),
}


def check_url(url: str) -> str:
    """Returns the address of a model server without a slash at its end.

    Raises:
      AddressError: it is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AddressError(
            f"'{url}' is no URL of a model server; write http://host:8000, as `jgraph "
            "serve` prints it"
        )
    return url.rstrip("/")


def versions_in(text: str) -> dict[str, Any]:
    """Returns the sums of each version, from Prometheus's text.

    Example:
      >>> versions_in('jgraph_serve_requests_total{model="a",version="3"} 7.0')
      {'a 3': {'model': 'a', 'version': '3', 'requests': 7.0}}
    """
    versions: dict[str, Any] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            if not {"model", "version"} <= labels.keys():
                continue
            name = f"{labels['model']} {labels['version']}"
            row = versions.setdefault(
                name, {"model": labels["model"], "version": labels["version"]}
            )
            if sample.name in _SUMS:
                row[_SUMS[sample.name]] = sample.value
            elif sample.name in _BY_LABEL:
                field, label = _BY_LABEL[sample.name]
                row.setdefault(field, {})[labels.get(label, "")] = sample.value
    return versions


@final
class ModelPoller:
    """Asks model servers again and again, in a thread of its own.

    Args:
      urls: of the servers.
      token: that they want to see; empty: none.
      take: gets what they tell.
      clock: in seconds since 1970.
      every_s: between two looks.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str,
        take: Callable[[Fact], None],
        clock: Clock,
        every_s: float = 1.0,
    ) -> None:
        self._urls = [check_url(url) for url in urls]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._take = take
        self._clock = clock
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._go_on, name="jgraph-models", daemon=True
        )

    def start(self) -> None:
        """Begins to ask, if there is a server to ask."""
        if self._urls:
            self._thread.start()

    def stop(self) -> None:
        """Asks no more; returns when the last look is over."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Asks every server once."""
        for url in self._urls:
            fact: dict[str, Any] = {"kind": "models", "server": url}
            try:
                fact["models"] = versions_in(self._metrics(url))
            except (OSError, ValueError, http.client.HTTPException) as error:
                fact["silent"] = str(error) or type(error).__name__
            self._take(clean({**fact, "time": self._clock.now()}))

    def _metrics(self, url: str) -> str:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=_ANSWER_S)
        with closing(connection):
            connection.request("GET", f"{parts.path}/metrics", headers=self._headers)
            answer = connection.getresponse()  # follows no redirect, which has no token
            content = answer.read(_MOST_BYTES)
        if answer.status != http.HTTPStatus.OK:
            raise ValueError(f"it answered {answer.status} {answer.reason}")
        return content.decode("utf-8", "replace")

    def _go_on(self) -> None:
        wait_s = 0.0
        while not self._stop.wait(wait_s):
            self.look()
            wait_s = self._every_s
