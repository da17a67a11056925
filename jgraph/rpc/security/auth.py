"""Authentication and authorization: the token and role of a stream, checked first."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

import grpc

from jgraph.errors import NotAllowedError, TokenError, UnknownMethodError
from jgraph.rpc.security.refusals import RefusalLog
from jgraph.rpc.security.tls import ANY_TASK, CLIENT
from jgraph.rpc.security.token import METADATA_KEY, TOKEN_FILE, Token
from jgraph.rpc.transport import Address

Roles: TypeAlias = Mapping[str, frozenset[str]]
"""Who may call each method: ``"client"``, ``"task"``. What is not there, nobody may."""

_KNOCK: Final = "/jgraph.v1.Task/Knock"
_REFUSED: Final = grpc.StatusCode.UNAUTHENTICATED
_logger = logging.getLogger(__name__)
_Continue: TypeAlias = Callable[
    [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any]"]
]


@final
class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends every stream that does not begin with the token.

    gRPC asks once per stream, when its headers are there; no message is read of one
    that is refused, and frames of the others cost nothing.

    Args:
      token: the one that is asked for.
    """

    def __init__(self, token: Token) -> None:
        ((_, value),) = token.metadata
        self._expected = value.encode()
        self._refuse = grpc.stream_stream_rpc_method_handler(self._abort)
        self._welcome = grpc.unary_unary_rpc_method_handler(_say_yes)
        self._refusals = RefusalLog(
            _logger,
            "Refused a call from %s without the token of this cluster; %d so far.",
        )

    async def intercept_service(
        self, continuation: _Continue, details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        """Lets a stream pass, or not."""
        token = b""
        for key, value in details.invocation_metadata or ():
            if key == METADATA_KEY:
                token = value if isinstance(value, bytes) else value.encode()
        if hmac.compare_digest(token, self._expected):
            is_knock = details.method == _KNOCK
            return self._welcome if is_knock else await continuation(details)
        return self._refuse

    async def _abort(self, requests: object, context: Any) -> None:
        self._refusals.add(context.peer())
        await context.abort(_REFUSED, TokenError.code)


async def _say_yes(request: bytes, context: object) -> bytes:
    return b""


async def check_token(
    channel: grpc.aio.Channel, address: Address, token: Token, timeout_s: float
) -> None:
    """Asks a server, once per channel, whether it takes the token.

    Who sends at once learns of a refusal only by chance: gRPC tells ``INTERNAL`` where
    a stream ends while something is written to it.

    Raises:
      TokenError: it does not. Whatever else is wrong shows when the channel is used.
    """
    asking = channel.unary_unary(_KNOCK, None, None)
    try:
        await asking(b"", timeout=timeout_s, metadata=token.metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() is _REFUSED:
            raise _refused(address, token) from None


def _refused(address: Address, token: Token) -> TokenError:
    return TokenError(
        f"{address} belongs to a cluster with another token than that in {token.path}; "
        f"give the cluster's: copy the file from where the cluster was made, and name "
        f"it with token_file=…, --token-file or {TOKEN_FILE}",
        address=address,
    )


def check_role(roles: Roles | None, method: str, names: Iterable[bytes] | None) -> None:
    """Refuses a call that the caller may not make.

    Args:
      roles: who may call what; None: everybody everything.
      method: what is called.
      names: the alternative names of the caller's certificate; None without TLS: who
        has the token then has every role.

    Raises:
      UnknownMethodError: no role may call it.
      NotAllowedError: not this one.

    Example:
      >>> check_role({"Stop": frozenset({"client"})}, "Stop", [b"task.jgraph"])
      Traceback (most recent call last):
        ...
      jgraph.errors.NotAllowedError: JG-115 role 'task' may not call 'Stop', only client
    """
    if roles is None:
        return
    allowed = roles.get(method)
    if allowed is None:
        raise UnknownMethodError(
            f"this server has no method '{method[:80]}'; the caller may run another "
            "version of jgraph"
        )
    if names is None:
        return
    known = {CLIENT.encode(): "client", ANY_TASK.encode(): "task"}
    caller_roles = {known[name] for name in names if name in known}
    if not caller_roles & allowed:
        raise NotAllowedError(
            f"role '{', '.join(sorted(caller_roles)) or 'nobody'}' may not call "
            f"'{method[:80]}', only {' and '.join(sorted(allowed))}",
            method=method[:80],
        )
