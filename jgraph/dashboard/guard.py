"""Guard of a dashboard's port: host, origin, method and token of each request.

Pure: what a request says of itself in, why it is refused out. See docs/threat-model.md.
"""

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

DASHBOARD: Final = (
    "the token of this dashboard is missing or another one; open the address "
    "that `jgraph dashboard` printed, with what follows '#'"
)
"""What to do without a token."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_SAME: Final = frozenset({"same-origin", "none"})


@final
@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request is refused.

    Attributes:
      status: of HTTP.
      text: a sentence.
      headers: that belong to it.
    """

    status: int
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class Request:
    """What is looked at.

    Attributes:
      method: of HTTP.
      path: without the query.
      headers: names in small letters, in order, as often as they came.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]

    def all(self, name: str) -> list[str]:
        """Returns the values of a header."""
        return [value for key, value in self.headers if key == name]


@final
class Guard:
    """Lets requests in.

    Args:
      token: what the address of the page has in its fragment.
      port: where it listens.
      allowed_hosts: names by which it is reached, but for those of loopback; with a
        port, or for any port.
      embed_origins: pages that may show it in a frame.
      metrics_token: a second token, which is good for ``/metrics`` alone.
      any_host: it may be reached by every name: all that it answers wants a token.
      advice: what to do without a token.
    """

    def __init__(
        self,
        token: str,
        port: int,
        allowed_hosts: Iterable[str] = (),
        embed_origins: Iterable[str] = (),
        metrics_token: str = "",
        *,
        any_host: bool = False,
        advice: str = DASHBOARD,
    ) -> None:
        self._is_any_host, self._advice = any_host, advice
        self._token = token.encode()
        self._metrics_token = metrics_token.encode()
        self._hosts = {f"{name}:{port}" for name in LOOPBACK}
        if port == 80:
            self._hosts |= set(LOOPBACK)
        self._any_port = {name.lower() for name in allowed_hosts}
        self._frames = " ".join(embed_origins) or "'none'"

    def headers(self) -> dict[str, str]:
        """Returns what every answer says to the browser."""
        framed = self._frames != "'none'"
        return {
            "Content-Security-Policy": (
                "default-src 'none'; script-src 'self'; style-src 'self'; "
                "img-src 'self' data:; connect-src 'self'; base-uri 'none'; "
                f"form-action 'none'; frame-ancestors {self._frames}"
            ),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "cross-origin" if framed else "same-origin",
            "Cache-Control": "no-store",
        }

    def check(self, request: Request) -> Refused | None:
        """Returns why a request is refused; None: it is not."""
        return self._check_host(request) or self._check_sender(request)

    def _check_host(self, request: Request) -> Refused | None:
        hosts = request.all("host")
        if len(hosts) != 1:
            return Refused(400, "a request names one host")
        host = hosts[0].lower()
        name = host.rpartition(":")[0] if _has_port(host) else host
        if self._is_any_host or host in self._hosts or {host, name} & self._any_port:
            return None
        return Refused(
            421,
            "this dashboard is not reached under that host name; open the address that "
            "it printed, or name the host with --allowed-host",
        )

    def _check_sender(self, request: Request) -> Refused | None:
        (host,) = request.all("host")
        for origin in request.all("origin"):
            if origin.lower() not in {
                f"http://{host}".lower(),
                f"https://{host}".lower(),
            }:
                return Refused(403, "pages of another origin may ask nothing here")
        sites = set(request.all("sec-fetch-site"))
        if request.path != "/" and not sites <= _SAME:
            return Refused(403, "pages of another site may ask nothing here")
        if request.method not in {"GET", "HEAD"}:
            text = "a dashboard is only looked at: GET is all that it takes"
            return Refused(405, text, {"Allow": "GET, HEAD"})
        if request.path.startswith("/api/"):
            return self._check_token(request, self._token)
        if request.path == "/metrics":
            return self._check_token(request, self._token, self._metrics_token)
        return None

    def _check_token(self, request: Request, *tokens: bytes) -> Refused | None:
        credentials = [v.partition(" ") for v in request.all("authorization")]
        offered = [
            t.encode() for scheme, _, t in credentials if scheme.lower() == "bearer"
        ]
        # All are compared, whatever the first comparison gave.
        good = [hmac.compare_digest(g, t) for g in offered for t in tokens if t]
        if len(offered) == 1 and any(good):
            return None
        return Refused(
            401,
            self._advice,
            {"WWW-Authenticate": "Bearer"},
        )


def _has_port(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    return bool(colon) and port.isdecimal() and (":" not in name or name.endswith("]"))
