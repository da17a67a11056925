"""Refusals of requests: what each error is in gRPC and HTTP, and who may ask."""

import hmac
import logging
from typing import Final, final

import grpc

from jgraph.errors import (
    DeadlineError,
    InternalError,
    JGError,
    MessageTooLargeError,
    ModelInputError,
    ModelNotFoundError,
    ModelNotReadyError,
    NotAllowedError,
    OverloadedError,
    RowIdError,
    TaskLostError,
    TokenError,
)
from jgraph.rpc.security.token import Token

_LOG = logging.getLogger("jgraph.serving")
_CODES: Final[dict[type[JGError], tuple[grpc.StatusCode, int]]] = {
    ModelNotFoundError: (grpc.StatusCode.NOT_FOUND, 404),
    ModelNotReadyError: (grpc.StatusCode.UNAVAILABLE, 503),
    ModelInputError: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    RowIdError: (grpc.StatusCode.INVALID_ARGUMENT, 400),
    TaskLostError: (grpc.StatusCode.UNAVAILABLE, 503),
    OverloadedError: (grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    DeadlineError: (grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    MessageTooLargeError: (grpc.StatusCode.RESOURCE_EXHAUSTED, 413),
    TokenError: (grpc.StatusCode.UNAUTHENTICATED, 401),
    NotAllowedError: (grpc.StatusCode.PERMISSION_DENIED, 403),
}


@final
class Refusal:
    """An error as the two protocols have it.

    What is no error of ours is told without its text, which may hold values and paths.

    Args:
      error: what went wrong.
    """

    def __init__(self, error: BaseException) -> None:
        if not isinstance(error, JGError):
            _LOG.error("A request failed in an unexpected way.", exc_info=error)
            error = InternalError("the server failed; its log has the details")
        self.error = error
        codes = _CODES.get(type(error), (grpc.StatusCode.INTERNAL, 500))
        self.grpc_code, self.http_status = codes
        after = {429: error.details.get("retry_after_s", 1), 503: 1}
        self.retry_after_s: int | None = after.get(self.http_status)

    @property
    def text(self) -> str:
        """Code and sentence."""
        return str(self.error)


def check_token(header: str, token: Token) -> None:
    """Refuses who does not show the token, in the same time whatever is shown.

    Args:
      header: ``Bearer …``; empty if there is none.
      token: of the server.

    Raises:
      TokenError: it is missing or another one.
    """
    offer = header.removeprefix("Bearer ").encode("utf-8", "replace")
    if not hmac.compare_digest(offer, token.value.encode()):
        raise TokenError(
            "this server answers those that show its token: 'Authorization: Bearer "
            "TOKEN', with the content of the file that it names when it starts"
        )
