"""Errors of users: what was asked cannot be done; fix the call."""

from jgraph.errors.base import UserError


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


class DeviceCountError(UserError):
    """A mesh of more devices than its task has."""

    code = "JG-207"


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


class MemoryLimitError(UserError, MemoryError):
    """No placement keeps the limits of memory."""

    code = "JG-235"


class CheckpointError(UserError):
    """A checkpoint is missing, cannot be used, or is of another model."""

    code = "JG-301"


class CheckpointCorruptError(CheckpointError):
    """A checkpoint that is not what was written; names the leaf."""

    code = "JG-302"


class CheckpointWriterError(CheckpointError):
    """Another process writes checkpoints into the same directory."""

    code = "JG-303"


class CheckpointSpaceError(CheckpointError):
    """The disk has no room for a checkpoint; those that are there are intact."""

    code = "JG-304"


class ClusterSpecError(UserError, ValueError):
    """A cluster description that cannot be."""

    code = "JG-123"


class ConfigError(UserError, ValueError):
    """An option outside what is allowed."""

    code = "JG-124"


class ClusterBusyError(UserError):
    """Another run is using these variables."""

    code = "JG-501"
