"""Base classes of all errors: stable codes and details."""

from html import escape
from typing import Any, ClassVar

__all__ = [
    "ClusterError",
    "InternalError",
    "JGError",
    "ProtocolError",
    "UserError",
    "error_from_code",
]

_BY_CODE: dict[str, type["JGError"]] = {}


class JGError(Exception):
    """Base of all errors of jgraph.

    Attributes:
      code: stable identifier, for example ``"JG-211"``.
      message: the sentence for the user, without the code.
      details: plain values (str, int, float, lists of them) about the cause.

    Example:
      >>> from jgraph.errors import FeedError
      >>> try:
      ...     raise FeedError("x is float64", feed="x")
      ... except JGError as error:
      ...     print(error.code, error.message, error.details)
      JG-211 x is float64 {'feed': 'x'}
    """

    code: ClassVar[str] = "JG-900"

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("jgraph.errors."):
            cls.__module__ = "jgraph.errors"  # where users find it
        if "code" in cls.__dict__:
            if cls.code in _BY_CODE:
                raise TypeError(f"{cls.code} names two error classes")
            _BY_CODE[cls.code] = cls

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return f"{self.code} {self.message}"

    def _repr_html_(self) -> str:
        title = escape(f"{self.code} {type(self).__name__}")
        return f"<b>{title}</b><pre>{escape(self.message)}</pre>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(cls: type[JGError], message: str, details: dict[str, Any]) -> JGError:
    return cls(message, **details)


def error_from_code(code: str, message: str, details: dict[str, Any]) -> JGError:
    """Returns the error of ``code``; an unknown code gives ``InternalError``.

    Example:
      >>> import jgraph.errors
      >>> type(error_from_code("JG-211", "x is float64", {})).__name__
      'FeedError'
    """
    return _BY_CODE.get(code, InternalError)(message, **details)


JGError.__module__ = "jgraph.errors"


class UserError(JGError):
    """What was asked cannot be done; fix the call."""


class ClusterError(JGError):
    """The cluster cannot do it now."""


class ProtocolError(JGError):
    """The other side sent what it must not send."""


class InternalError(JGError):
    """A fault of jgraph itself; please report it.

    Something happened that the code holds to be impossible, or a newer server sent an
    error that this version does not know.

    What to do: report it, with ``jgraph version``, the log of the named task, and the
    program that led to it. ``JGRAPH_TRACEBACKS=full`` shows all lines of the traceback.
    """

    code = "JG-900"

    @classmethod
    def of(cls, what: str) -> "InternalError":
        """Returns the error for what the code holds to be impossible.

        Example:
          >>> print(InternalError.of("a cluster of no tasks"))
          JG-900 a cluster of no tasks: a fault of jgraph; please report it with the \
output of `jgraph version` and the program that led to it
        """
        return cls(
            f"{what}: a fault of jgraph; please report it with the output of "
            "`jgraph version` and the program that led to it"
        )
