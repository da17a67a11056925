"""Errors of users' programs: invalid requests; the call has to be fixed."""

from jgraph.errors.base import UserError


class DeviceSpecError(UserError, ValueError):
    """Not a device string.

    The text given to `jg.device`, `jg.Variable` or `DeviceSpec.from_string` does not
    have the form of a device, has a field twice, or is no text at all.

    What to do: write ``/job:ps/task:0``, or leave parts of that out; TensorFlow's long
    form ``/job:ps/replica:0/task:0/device:CPU:0`` is understood too.
    """

    code = "JG-220"


class UnknownDeviceError(UserError, LookupError):
    """No such job or task in the cluster.

    A device is well written, and no task of this cluster has that name. The message
    lists those that there are, and the one that was likely meant.

    What to do: correct the device, or start a cluster that has the task.
    """

    code = "JG-221"


class PlacementError(UserError):
    """An operation cannot live where it was put.

    Two things pull an operation to different places: a loop or branch whose body names
    several tasks, a variable that is colocated with one of another task, two meshes of
    different sizes in what is compiled together. The message has the line of your code.

    What to do: put all of it under one `jg.device`, or take the scope inside away and
    let jgraph place it.
    """

    code = "JG-222"


class GraphError(UserError):
    """A graph that breaks a rule of graphs.

    `jg.check` found a value that is used before it is made, is made twice or has
    another type than its use; or a variable has no name or one that is taken.

    What to do: for names, choose others. A graph that `jg.function` traced and that
    breaks a rule is a fault of jgraph: please report it with the function.
    """

    code = "JG-223"


class CallbackError(UserError):
    """A function that calls back into Python cannot be shipped.

    Servers run compiled code and have none of your Python: `jax.debug.print`,
    `jax.pure_callback` and `io_callback` have nobody to call there. The message names
    the line.

    What to do: remove the call; to see a value, return it, or name it with
    ``jg.tap("name", value)`` and fetch that.
    """

    code = "JG-202"


class OuterStateError(UserError):
    """A loss changes state that it did not get as an argument.

    It uses a module from outside, such as the one that was given to the Trainer, and
    calls it in a way that changes it: BatchNorm counts, dropout draws. A step that runs
    on other machines has no such object.

    What to do: use what the loss is given, ``def loss(model, batch): model(batch)``;
    all state of that model is kept, wherever it lives.
    """

    code = "JG-201"


class NotExportableError(UserError):
    """JAX cannot export this function.

    Code is sent to the tasks in the form of `jax.export`, which a few operations of JAX
    and custom calls of other libraries do not have for each platform.

    What to do: write the named line with `jax.numpy` or `jax.lax`, or plan for another
    platform: ``cluster.session(platforms=("cpu",))``.
    """

    code = "JG-206"


class DeviceCountError(UserError):
    """A mesh of more devices than its task has.

    A `jg.mesh` spreads over the devices of one task, whose process sees fewer.

    What to do: make the mesh smaller, or give the task more devices; on a CPU, start it
    with ``JAX_NUM_CPU_DEVICES=4`` in its environment.
    """

    code = "JG-207"


class FeedError(UserError, ValueError):
    """A feed of the wrong name, shape or dtype.

    An argument is missing, is one too many, is no array, or differs from what the
    function was traced with. Nothing was run.

    What to do: compare the two types in the message. The common causes are float64 from
    NumPy (``.astype(np.float32)``) and an axis that is missing (``x[..., None]``).
    """

    code = "JG-211"


class FetchError(UserError, ValueError):
    """A fetch that the function does not have.

    `fetches` or `targets` of `session.run` name a value that the function neither
    returns nor taps, or a variable that it does not write.

    What to do: take one of the names in the message, or name the value in the function
    with ``jg.tap("name", value)``.
    """

    code = "JG-213"


class UninitializedError(UserError):
    """A variable was used before initialisation.

    A task has no value for the variable: nobody gave it one, or its process was started
    again since; or it was read outside of a function that a session runs.

    What to do: ``session.initialize([v])``, ``session.write({v: array})``, or restore a
    checkpoint. To read a variable outside of a step: ``session.read(v)``.
    """

    code = "JG-231"


class VariableMismatchError(UserError):
    """One variable name stands for two shapes, dtypes or places.

    Variables of one name are one variable on the servers, also between programs. This
    one is there already with another type, for example from an earlier cell.

    What to do: choose another name or another ``container`` for the session, or drop
    all variables of the cluster with ``cluster.reset()``.
    """

    code = "JG-232"


class ShardingError(UserError, ValueError):
    """A variable that cannot be cut into shards like this.

    A partitioner asks for more shards than the axis has rows, for cuts along two axes,
    or returns something that is no list of counts.

    What to do: use fewer shards, or one of the partitioners of jgraph, such as
    ``jg.fixed_size_partitioner(2)``.
    """

    code = "JG-233"


class PipelineError(UserError, ValueError):
    """A pipeline that cannot be.

    The numbers of stages, tasks and microbatches do not fit together, the schedule has
    another name, or a stage does not take what the one before it gives.

    What to do: follow the message; with as many stages as tasks, ``schedule="1f1b"``
    and any number of microbatches that divides the batch works.
    """

    code = "JG-234"


class MemoryLimitError(UserError, MemoryError):
    """No placement keeps the limits of memory.

    `jg.auto` found no arrangement in which every task stays below its limit; the
    message says by how much the best one is over.

    What to do: more tasks, a larger ``memory_limit``, a smaller batch or an optimizer
    with less state; a large table may be cut with a partitioner.
    """

    code = "JG-235"


class ClusterSpecError(UserError, ValueError):
    """A cluster description that cannot be.

    A cluster file, `TF_CONFIG` or a dict of jobs is not one: an address without a port,
    two tasks at one address, a job without tasks. All problems are listed at once.

    What to do: correct what is listed; ``jgraph doctor --cluster cluster.toml`` checks
    the file without starting anything.
    """

    code = "JG-123"


class ConfigError(UserError, ValueError):
    """An option outside what is allowed.

    An argument has a value that means nothing, or two arguments exclude each other.
    Nothing was changed.

    What to do: the message has the values that are allowed.
    """

    code = "JG-124"


class ClusterBusyError(UserError):
    """Another run is using these variables.

    A second `fit` of a Trainer that is training, a cluster of a name that is up, or
    more calls at a time, or more in bytes, than a server takes.

    What to do: wait for the other one (``run.wait()``), end it (``run.stop()``), or
    give yours another name; give a server more memory (``--max-request-bytes``).
    """

    code = "JG-501"


class HttpRequestError(UserError):
    """A request that a port for HTTP refuses, whatever it asks.

    A path that it does not have, a method that it does not take, a host name that is
    not its own, a page of another site, a content type that it cannot read, or a head
    or body that does not come in time.

    What to do: ask the address that was printed when the server or dashboard started;
    name a further host name of a dashboard with ``--allowed-host``.
    """

    code = "JG-621"


class JournalError(UserError):
    """No journal of a dashboard, or one too large or in use.

    The file is of another program or version, is a link, holds more than is read, or
    is what another dashboard writes.

    What to do: name a file that `jgraph dashboard --journal` wrote.
    """

    code = "JG-622"
