"""Remote arrays: what stays on the tasks that train, and what may leave them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from jgraph.client.cluster import Cluster
from jgraph.client.session import Session
from jgraph.client.state.snapshots import SnapshotHandle
from jgraph.cluster.shard_messages import Shard
from jgraph.errors import TooLargeError
from jgraph.graph.variable import Variable
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.program.types import is_key, value_type
from jgraph.runtime.files.shard_files import Slice
from jgraph.train.step.train_step import TrainStep

KEPT_BYTES = 1 << 30
"""A run keeps its last values if they are no more than this, together."""

VARIABLE_BYTES = 2 << 30
"""A larger variable does not come to the client to evaluate a model or to make one."""


def total_nbytes(variables: Sequence[Variable]) -> int:
    """Returns the bytes of all values."""
    return sum(nbytes_of(variable.spec) for variable in variables)


def check_sizes(variables: Sequence[Variable], limit: int = VARIABLE_BYTES) -> None:
    """Refuses to bring variables that are too large to the client.

    Raises:
      TooLargeError: names the first one.
    """
    for variable in variables:
        if (size := nbytes_of(variable.spec)) > limit:
            raise TooLargeError(
                f"variable '{variable.name}' has {size / 1e9:.1f} GB, and model(), "
                "evaluate(…), predict(…) and eval_data need the whole model in this "
                f"process, where a variable may have {limit / 1e9:.1f} GB; for "
                "eval_data start an evaluator, jg.LocalCluster(…, evaluators=1), which "
                "asks the ps for the rows that it looks up; else write the model to "
                "files with save(path)",
                variable=variable.name,
            )


@final
@dataclass(frozen=True, slots=True)
class RemoteArray:
    """An array that tasks have, each some rows of it.

    Attributes:
      cluster: of the tasks.
      snapshot: what they hold.
      variable: which of it.
      shape: of the plain array.
      dtype: likewise.
    """

    cluster: Cluster
    snapshot: SnapshotHandle
    variable: Variable
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size of the array."""
        return value_type(self.variable.spec.aval).nbytes

    def shards(self, whole: Slice) -> list[Shard]:
        """Returns which task has which rows, given how the array lies in files."""
        return self.snapshot.shards(self.variable, whole)


@final
@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run at one moment: arrays, and such as tasks have.

    Attributes:
      values: one per variable, in the order of the step's.
      release: lets go of what tasks hold for it.
      is_live: tasks hold no copy of it: what is read is as it is then.
    """

    values: Sequence[Any]
    release: Callable[[], None] = lambda: None
    is_live: bool = False


def remote_arrays_of(
    cluster: Cluster, snapshot: SnapshotHandle, variables: Sequence[Variable]
) -> dict[str, Any]:
    """Returns the variables that are kept where they are, by name.

    A scalar comes: it is faster moved than named. What is cut along another axis than
    the first comes too, as files have rows; and so do random keys, which files have as
    their data.
    """
    arrays = {}
    for variable in variables:
        type_ = value_type(variable.spec.aval)
        sharding = variable.spec.sharding
        if is_key(variable.spec.aval):
            continue
        if type_.shape and type_.nbytes and not (sharding and sharding.axis):
            arrays[variable.name] = RemoteArray(
                cluster, snapshot, variable, type_.shape, type_.np_dtype
            )
    return arrays


def arrays_of(
    cluster: Cluster, snapshot: SnapshotHandle, variables: Sequence[Variable]
) -> dict[str, Any]:
    """Returns variables as arrays, by name: where they are, or here."""
    remote = remote_arrays_of(cluster, snapshot, variables)
    rest = [v for v in variables if v.name not in remote]
    return {**remote, **(snapshot.read(rest) if rest else {})}


def places_of(cluster: Cluster, session: Session, step: TrainStep) -> list[Any]:
    """Returns arrays of the types of a step's state; see ``Runner.places``."""
    # Which keys of a table are known is stored in another way than in a graph.
    key_names = {table.known for table in step.tables}
    plain = [v for v in step.plain if v.name not in key_names]
    arrays = remote_arrays_of(cluster, session.snapshots.live(plain), plain)
    initial = zip(step.names, step.initial_values, strict=True)
    return [arrays.get(name, value) for name, value in initial]


@contextmanager
def releasing_after_an_error(snapshot: SnapshotHandle) -> Iterator[None]:
    """Lets go of what is held if what follows fails."""
    try:
        yield
    except BaseException:
        snapshot.release()
        raise
