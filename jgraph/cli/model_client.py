"""HTTP client of a model server: asks once, or many times for a benchmark."""

import http.client
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, final
from urllib.parse import quote, urlsplit

import numpy as np

from jgraph.errors import (
    AddressError,
    CertificateError,
    ClusterUnreachableError,
    DeadlineError,
    JGError,
)
from jgraph.errors.base import error_from_code
from jgraph.rpc.security.token import Token

_LABEL: Final = "label:"
_BODY_KEYS: Final = frozenset({"instances", "inputs"})


Ask: TypeAlias = "Callable[[ModelClient], object]"


@final
@dataclass(frozen=True, slots=True)
class Bench:
    """What a benchmark of a model server found.

    Attributes:
      answers: requests that were answered.
      failures: requests that were not, by code.
      seconds: how long requests were sent.
      latencies_s: of each answer.
    """

    answers: int
    failures: dict[str, int]
    seconds: float
    latencies_s: np.ndarray[Any, np.dtype[np.float64]]

    def facts(self) -> dict[str, Any]:
        """Returns rates and latencies for a program to read."""
        p50, p99 = self._ms(50), self._ms(99)
        return {
            "answers_per_s": round(self.answers / self.seconds, 1),
            "p50_ms": p50,
            "p99_ms": p99,
            "answers": self.answers,
            "failures": self.failures,
        }

    def __str__(self) -> str:
        found = self.facts()
        failures = ", ".join(f"{n} of {code}" for code, n in self.failures.items())
        return (
            f"{found['answers_per_s']:,} answers/s, p50 {found['p50_ms']} ms, "
            f"p99 {found['p99_ms']} ms; failures: {failures or 'none'}"
        )

    def _ms(self, percent: float) -> float | None:
        if not self.answers:
            return None
        return round(float(np.percentile(self.latencies_s, percent)) * 1e3, 2)


@final
class ModelClient:
    """Asks a server over TensorFlow Serving's REST calls; one request at a time.

    Args:
      url: where it listens: ``http://127.0.0.1:8000``.
      token: what it wants to see; None: it is not asked for any.
      ca: file of the authority that signed its certificate; the system's if unset.
      timeout_s: of one answer.

    Raises:
      AddressError: ``url`` is none.
      CertificateError: ``ca`` cannot be read.
    """

    def __init__(
        self,
        url: str,
        token: Token | None = None,
        ca: Path | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token.value}"
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme, host, port = "", None, None
        if host is None or scheme not in ("http", "https"):
            raise AddressError(
                f"'{url}' is no URL of a model server; write http://host:8000, as "
                "`jgraph serve` prints it"
            )
        if scheme == "http":
            self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
            return
        try:
            context = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise CertificateError(f"{ca} is no certificate: {error}") from error
        self._connection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=context
        )

    def predict(
        self, model: str, x: object, version: str = "", signature: str = ""
    ) -> Any:
        """Returns the outputs of a model for a batch, as plain lists.

        Args:
          model: its name.
          x: a dict by the names of the inputs, or the one input; or a whole request,
            with "instances" or "inputs".
          version: a number, or ``label:NAME``; the newest if empty.
          signature: which function; the default one if empty.

        Raises:
          JGError: what the server says, by its code.
          ClusterUnreachableError: nobody answers, or it is no model server.
          DeadlineError: no answer came in ``timeout_s``.
        """
        is_request = isinstance(x, dict) and not _BODY_KEYS.isdisjoint(x)
        body: dict[str, Any] = dict(x) if is_request else {"inputs": x}  # type: ignore[call-overload]
        if signature:
            body["signature_name"] = signature
        path = f"/v1/models/{quote(model, safe='')}"
        if version:
            kind = "labels" if version.startswith(_LABEL) else "versions"
            path += f"/{kind}/{quote(version.removeprefix(_LABEL), safe='')}"
        reply = self._ask(f"{path}:predict", json.dumps(body))
        found = reply.get("outputs", reply.get("predictions"))
        if found is None:
            raise ClusterUnreachableError(f"{self.url} is no model server")
        return found

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def _ask(self, path: str, body: str) -> dict[str, Any]:
        try:
            self._connection.request("POST", path, body, self._headers)
            reply = self._connection.getresponse()
            content = reply.read()
        except TimeoutError as error:
            self._connection.close()
            raise DeadlineError(
                f"{self.url} did not answer within {self._timeout_s:g} s"
            ) from error
        except ssl.SSLCertVerificationError as error:
            self._connection.close()
            raise CertificateError(
                f"the certificate of {self.url} is not trusted: "
                f"{error.verify_message.rstrip('.')}; name the file of its authority "
                "with --ca, and the host as the certificate does"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            if not isinstance(error, OSError):  # its text is what came
                raise ClusterUnreachableError(
                    f"what answers at {self.url} speaks no HTTP/1.1; give the port of "
                    "REST, as `jgraph serve` prints it, and not that of gRPC"
                ) from error
            raise ClusterUnreachableError(
                f"nobody answers at {self.url}: {str(error) or type(error).__name__}; "
                "`jgraph serve MODELS` starts a server"
            ) from error
        try:
            found = json.loads(content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ClusterUnreachableError(
                f"{self.url} is no model server; it said {reply.status} {reply.reason}"
            )
        if reply.status == http.HTTPStatus.OK:
            return found
        said = str(found.get("error", f"{reply.status} {reply.reason}"))
        code = str(found.get("code", ""))
        raise error_from_code(code, said.removeprefix(f"{code} "), {})


def bench(clients: list[ModelClient], seconds: float, ask: Ask) -> Bench:
    """Sends requests from all clients at once, each the next after an answer."""
    latencies: list[float] = []
    failures: Counter[str] = Counter()
    began = time.perf_counter()

    def ask_on(client: ModelClient) -> None:
        while (now := time.perf_counter()) < began + seconds:
            try:
                ask(client)
            except JGError as error:
                failures[error.code] += 1
            else:
                latencies.append(time.perf_counter() - now)

    threads = [threading.Thread(target=ask_on, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    return Bench(len(latencies), dict(failures), took, np.asarray(latencies))
