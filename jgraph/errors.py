"""Every exception of jgraph: one tree, a stable code each.

    JGError
    ├── UserError               what was asked cannot be done; fix the call
    │   ├── DeviceSpecError           JG-220  not a device string
    │   ├── UnknownDeviceError        JG-221  no such job or task in the cluster
    │   ├── PlacementError            JG-222  an operation cannot live where it was put
    │   ├── GraphError                JG-223  a graph that breaks a rule of graphs
    │   ├── CallbackError             JG-202  Python callback in a shipped function
    │   ├── NotExportableError        JG-206  JAX cannot export this function
    │   ├── FeedError                 JG-211  a feed of the wrong name, shape or dtype
    │   ├── NonFiniteError            JG-212  NaN or infinity where it was forbidden
    │   ├── FetchError                JG-213  a fetch that the function does not have
    │   ├── DataError                 JG-214  training data that cannot be used
    │   ├── DataSlotError             JG-215  a piece of the data that ends workers
    │   ├── SourceError               JG-216  a data source that cannot be read
    │   ├── ForbiddenSourceError      JG-217  a data source that a server may not import
    │   ├── RowIdError                JG-218  an id that names no row of its table
    │   ├── TooLargeError             JG-219  a value too large to bring to the client
    │   ├── UninitializedError        JG-231  variable used before initialisation
    │   ├── VariableMismatchError     JG-232  one name, two shapes or dtypes or places
    │   ├── ShardingError             JG-233  a variable that cannot be cut like this
    │   ├── PipelineError             JG-234  a pipeline that cannot be
    │   ├── CheckpointError           JG-301  checkpoint missing, damaged or other model
    │   ├── ClusterSpecError          JG-123  a cluster description that cannot be
    │   ├── ConfigError               JG-124  an option outside what is allowed
    │   └── ClusterBusyError          JG-501  another run is using these variables
    ├── ClusterError            the cluster cannot do it now
    │   ├── ClusterUnreachableError   JG-101  nothing listens there
    │   ├── AddressError              JG-102  host name that does not resolve
    │   ├── PlainTextError            JG-111  one side speaks TLS, the other plain text
    │   ├── CertificateError          JG-112  a certificate that proves nothing here
    │   ├── RoleError                 JG-113  a certificate of another task or client
    │   ├── PortInUseError            JG-121  the address is taken
    │   ├── TaskMissingError          JG-131  listed tasks that never answered
    │   ├── TaskLostError             JG-132  a task went away while it was needed
    │   │   └── NotTakingError        JG-138  a task that does not take what is sent
    │   ├── DeadlineError             JG-133  a named wait passed its deadline
    │   ├── StartError                JG-134  a task's process ended while starting
    │   ├── VersionError              JG-141  versions that cannot talk to each other
    │   ├── CancelledStepError        JG-135  the step was stopped from outside
    │   ├── RunOverError              JG-136  the training run needs no more steps
    │   └── StaleGradientError        JG-137  a gradient older than it may be
    ├── ProtocolError           the other side sent what it must not send
    │   ├── MalformedMessageError     JG-401  bytes that are not a message of ours
    │   ├── MessageTooLargeError      JG-402  a message over the limit
    │   ├── UnknownMethodError        JG-403  a call that this server does not have
    │   ├── InvalidProgramError       JG-203  program bytes that do not match or parse
    │   ├── ForbiddenProgramError     JG-204  a program that may not run here
    │   └── PlatformError             JG-205  exported for another kind of device
    └── InternalError           JG-900  a fault of jgraph itself; please report it

The first line of a message says what happened, where, why, and what to type.
"""

from typing import Any, ClassVar

_BY_CODE: dict[str, type["JGError"]] = {}


class JGError(Exception):
    """Base of all errors of jgraph.

    Attributes:
      code: stable identifier, for example ``"JG-211"``.
      message: the sentence for the user, without the code.
      details: plain values (str, int, float, lists of them) about the cause.

    Example:
      >>> try:
      ...     raise FeedError("x is float64", feed="x")
      ... except JGError as error:
      ...     print(error.code, error.message, error.details)
      JG-211 x is float64 {'feed': 'x'}
    """

    code: ClassVar[str] = "JG-900"

    def __init_subclass__(cls) -> None:
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

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.details)


def _rebuild(cls: type[JGError], message: str, details: dict[str, Any]) -> JGError:
    return cls(message, **details)


def error_from_code(code: str, message: str, details: dict[str, Any]) -> JGError:
    """Returns the error of ``code``; an unknown code gives ``InternalError``.

    Example:
      >>> type(error_from_code("JG-211", "x is float64", {})).__name__
      'FeedError'
    """
    return _BY_CODE.get(code, InternalError)(message, **details)


class UserError(JGError):
    """What was asked cannot be done; fix the call."""


class ClusterError(JGError):
    """The cluster cannot do it now."""


class ProtocolError(JGError):
    """The other side sent what it must not send."""


class InternalError(JGError):
    """A fault of jgraph itself; please report it."""

    code = "JG-900"


class DeviceSpecError(UserError, ValueError):
    """Not a device string."""

    code = "JG-220"


class UnknownDeviceError(UserError, LookupError):
    """No such job or task in the cluster."""

    code = "JG-221"


class PlacementError(UserError):
    """An operation cannot live where it was put."""

    code = "JG-222"


class GraphError(UserError):
    """A graph that breaks a rule of graphs."""

    code = "JG-223"


class CallbackError(UserError):
    """A function that calls back into Python cannot be shipped."""

    code = "JG-202"


class NotExportableError(UserError):
    """JAX cannot export this function."""

    code = "JG-206"


class FeedError(UserError, ValueError):
    """A feed of the wrong name, shape or dtype."""

    code = "JG-211"


class NonFiniteError(UserError, ArithmeticError):
    """NaN or infinity where it was forbidden."""

    code = "JG-212"


class FetchError(UserError, ValueError):
    """A fetch that the function does not have."""

    code = "JG-213"


class DataError(UserError, ValueError):
    """Training data that cannot be used."""

    code = "JG-214"


class DataSlotError(UserError):
    """A piece of the data that ends the workers that get it."""

    code = "JG-215"


class SourceError(UserError, ValueError):
    """A data source that cannot be read: missing, damaged, or of another schema."""

    code = "JG-216"


class ForbiddenSourceError(UserError):
    """A data source whose import path a server does not allow."""

    code = "JG-217"


class RowIdError(UserError, IndexError):
    """An id out of the range of its table."""

    code = "JG-218"


class TooLargeError(UserError, MemoryError):
    """A value too large to bring to the client."""

    code = "JG-219"


class UninitializedError(UserError):
    """A variable was used before initialisation."""

    code = "JG-231"


class VariableMismatchError(UserError):
    """One variable name stands for two shapes, dtypes or places."""

    code = "JG-232"


class ShardingError(UserError, ValueError):
    """A variable that cannot be cut into shards like this."""

    code = "JG-233"


class PipelineError(UserError, ValueError):
    """A pipeline that cannot be."""

    code = "JG-234"


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or of another model."""

    code = "JG-301"


class ClusterSpecError(UserError, ValueError):
    """A cluster description that cannot be."""

    code = "JG-123"


class ConfigError(UserError, ValueError):
    """An option outside what is allowed."""

    code = "JG-124"


class ClusterBusyError(UserError):
    """Another run is using these variables."""

    code = "JG-501"


class ClusterUnreachableError(ClusterError, ConnectionError):
    """Nothing of ours listens at the address."""

    code = "JG-101"


class AddressError(ClusterError, ConnectionError):
    """A host name that does not resolve."""

    code = "JG-102"


class PlainTextError(ClusterError, ConnectionError):
    """One side speaks TLS, the other plain text."""

    code = "JG-111"


class CertificateError(ClusterError, ConnectionError):
    """A certificate that is missing, expired, or of another authority."""

    code = "JG-112"


class RoleError(ClusterError, ConnectionError):
    """A certificate of another task or client."""

    code = "JG-113"


class PortInUseError(ClusterError, OSError):
    """The address is taken."""

    code = "JG-121"

    # OSError defines __str__ and __new__ of its own for two arguments and more.
    __str__ = JGError.__str__


class TaskMissingError(ClusterError, TimeoutError):
    """Listed tasks never answered."""

    code = "JG-131"


class TaskLostError(ClusterError, ConnectionError):
    """A task went away while it was needed."""

    code = "JG-132"


class NotTakingError(TaskLostError):
    """A task does not take what is sent to it; too much waits."""

    code = "JG-138"


class DeadlineError(ClusterError, TimeoutError):
    """A named wait passed its deadline."""

    code = "JG-133"


class StartError(ClusterError):
    """A task's process ended while it was starting."""

    code = "JG-134"


class CancelledStepError(ClusterError):
    """The step was stopped from outside."""

    code = "JG-135"


class RunOverError(ClusterError):
    """The training run needs no more steps."""

    code = "JG-136"


class StaleGradientError(ClusterError):
    """A gradient older than it may be; it is computed anew."""

    code = "JG-137"


class VersionError(ClusterError):
    """Versions that cannot talk to each other."""

    code = "JG-141"


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
