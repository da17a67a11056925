"""Errors of clusters: they cannot do it now."""

from jgraph.errors.base import ClusterError, JGError


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


class TokenError(ClusterError, PermissionError):
    """No token was shown, or not that of the cluster."""

    code = "JG-114"

    # OSError defines __str__ and __new__ of its own for two arguments and more.
    __str__ = JGError.__str__


class NotAllowedError(ClusterError, PermissionError):
    """A call that the caller's role may not make."""

    code = "JG-115"

    __str__ = JGError.__str__


class InsecureError(ClusterError, PermissionError):
    """What would let strangers in, and was not asked for by name."""

    code = "JG-116"

    __str__ = JGError.__str__


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
