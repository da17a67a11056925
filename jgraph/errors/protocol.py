"""Errors of protocol: the other side sent what it must not send."""

from jgraph.errors.base import ProtocolError


class MalformedMessageError(ProtocolError, ValueError):
    """Bytes that are not a message of ours."""

    code = "JG-401"


class MessageTooLargeError(ProtocolError, ValueError):
    """A message over the limit."""

    code = "JG-402"


class UnknownMethodError(ProtocolError, LookupError):
    """A call that this server does not have."""

    code = "JG-403"


class InvalidProgramError(ProtocolError, ValueError):
    """Program bytes that do not match their digest or do not parse."""

    code = "JG-203"


class ForbiddenProgramError(ProtocolError):
    """A program that may not run on this server."""

    code = "JG-204"


class PlatformError(ProtocolError):
    """A program exported for another kind of device."""

    code = "JG-205"
