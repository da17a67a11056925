"""Codec of errors: ``JGError`` to ``Status`` and back, for every error class."""

import json
from typing import Any

from jgraph.errors import InternalError, JGError, error_from_code
from jgraph.rpc._pb import jgraph_pb2 as pb

_RESERVED = frozenset({"self", "message", "code", "details"})


def to_status(error: BaseException) -> pb.Status:
    """Returns the error as a message.

    Anything that is not a ``JGError`` becomes an ``InternalError`` without its text,
    which may hold paths or values of the server.

    Example:
      >>> from jgraph.errors import FeedError
      >>> status = to_status(FeedError("x is float64", argument="x"))
      >>> status.code, status.details_json
      ('JG-211', '{"argument": "x"}')
    """
    if not isinstance(error, JGError):
        error = InternalError(
            "the server failed in a way that it did not expect; its log has the "
            "details. Please report it"
        )
    return pb.Status(
        code=error.code,
        message=error.message,
        details_json=json.dumps(error.details, default=_plain),
    )


def from_status(status: pb.Status) -> JGError:
    """Returns the error that a message describes; unknown codes are internal errors.

    Never raises, whatever the message holds.

    Example:
      >>> type(from_status(pb.Status(code="JG-211", message="x is float64"))).__name__
      'FeedError'
    """
    details = _details(status.details_json)
    if status.code and type(error_from_code(status.code, "", {})).code != status.code:
        details["code_received"] = status.code
    return error_from_code(status.code, status.message, details)


def _details(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {key: value for key, value in values.items() if key not in _RESERVED}


def _plain(value: object) -> object:
    item = getattr(value, "item", None)  # numpy scalars
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    if isinstance(value, (set, frozenset, tuple)):
        return sorted(map(str, value))
    return str(value)
