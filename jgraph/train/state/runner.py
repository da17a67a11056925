"""Runner interface, between a Trainer and the place where its steps run."""

import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import numpy as np

from jgraph.client.runs.questions import Question
from jgraph.cluster.deadlines import CLIENT_S
from jgraph.cluster.loop_messages import Rescaled
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.coordination.data.slots import SlotPlan
from jgraph.coordination.run.recovery import Recovery
from jgraph.coordination.run.supervisor import WAIT_S
from jgraph.graph.ir import TaskName
from jgraph.runtime.data.batches import Array
from jgraph.train.data.data import Dataset
from jgraph.train.hash_tables.hash_state import TableEvent
from jgraph.train.run.members import RunMembers
from jgraph.train.run.rounds import Rounds
from jgraph.train.state.remote_arrays import RunSnapshot

Position: TypeAlias = Mapping[str, Any] | None
"""Plain data; see ``BatchBook.position``. None: as the number of updates says."""

Staleness: TypeAlias = Mapping[TaskName, Mapping[TaskName, Mapping[int, int]]]
"""Updates by worker, by task that applied them, and by how old they were."""

Events: TypeAlias = Sequence[TableEvent]
"""What happened in hash tables: one per table and shard."""


@final
@dataclass(frozen=True, slots=True)
class Order:
    """Train for ``steps`` updates, all replicas together."""

    dataset: Dataset
    steps: int
    batch_size: int
    seed: int
    eval_every: int | None = None
    report_every_s: float = 0.5
    lease_s: float | None = CLIENT_S
    """The run ends when its client is gone for so long; None: it goes on without."""
    checkpoint: Any = None
    """``Checkpoints``: where and how often the run is saved; None: never."""
    evaluates_halted: bool = False
    """Loops stand still for what is to be evaluated: it is kept if it is the best."""
    wait_s: float = WAIT_S
    """For lost tasks without which the run cannot go on."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set from another thread: stop after the current step."""
    at_master: threading.Event = field(default_factory=threading.Event)
    """Set when the master has the run, which goes on from then without its client."""
    first: int = 0
    """Updates applied before."""
    restore: Callable[[Path], object] | None = None
    """Gives the state the values of the newest good checkpoint of a directory."""
    restore_part: Callable[[Path, Collection[TaskName]], int] | None = None
    """Gives some tasks what the newest checkpoint has of it; returns its updates."""
    privacy: Mapping[str, Any] | None = None
    """The account of what it spends, as it begins; None: nobody keeps one."""

    @property
    def save_every(self) -> int | None:
        """Updates between two saves; None: there are none."""
        return None if self.checkpoint is None else int(self.checkpoint.every)

    @property
    def boundaries(self) -> list[int]:
        """Numbers of updates: something is to be done at each multiple of one."""
        return [every for every in (self.eval_every, self.save_every) if every]

    @property
    def halts(self) -> tuple[int, ...]:
        """Numbers of updates: at each multiple of one all loops stand still."""
        eval_every = self.eval_every if self.evaluates_halted else None
        return tuple(every for every in (self.save_every, eval_every) if every)


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """What one replica did since its last chunk: a row per step.

    ``steps`` (int64[n]) and ``seconds`` (float64[n], since the loop began) number and
    date the replica's steps; ``metrics`` are stacked, first axis n; ``times`` are the
    seconds that the n steps took, by part. In synchronous training there is one replica
    that stands for all; ``of_workers`` has what each did meanwhile, without metrics.
    ``batches`` says how many batches the steps were of; None: of one each. ``began`` is
    how much later than others the loop began, in seconds, as far as is known.
    ``dropped`` counts gradients that came too late so far, by worker. With ``question``
    nothing was done: the run asks something, and an answer is wanted before the next
    chunk is. With ``restored`` the run went back to a checkpoint, or goes on with
    copies: all steps after that are done again. With ``rescaled`` its variables have
    moved to more ps, or to fewer.
    """

    replica: int
    steps: Array
    seconds: Array
    metrics: Mapping[str, Array]
    times: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[TaskName, int] = field(default_factory=dict)
    of_workers: Sequence["Chunk"] = ()
    batches: int | None = None
    began: float = 0.0
    question: Question | None = None
    restored: Recovery | None = None
    rescaled: Rescaled | None = None

    def __len__(self) -> int:
        return len(self.steps)

    def first(self, count: int) -> "Chunk":
        """Returns the first ``count`` steps."""
        share = count / max(len(self), 1)
        return replace(
            self,
            steps=self.steps[:count],
            seconds=self.seconds[:count],
            metrics={name: values[:count] for name, values in self.metrics.items()},
            times={name: seconds * share for name, seconds in self.times.items()},
            batches=None if self.batches is None else round(self.batches * share),
        )

    @property
    def batches_per_step(self) -> float:
        """How many batches a step was of, on average."""
        return 1.0 if self.batches is None else self.batches / max(len(self), 1)


def position_in(plan: SlotPlan, position: Position, steps: int) -> dict[str, Any]:
    """Returns where to begin: at ``position``, else after ``steps`` batches."""
    return BatchBook(plan, position, skip=steps).position()


class RunState(Protocol):
    """The variables of a training run, wherever they are.

    Attributes:
      position: where in the data the run was when that was told last.
    """

    position: Position

    def global_step(self) -> int:
        """Returns the number of updates applied so far."""

    def values(
        self, *, model_only: bool = False, halted: bool = False
    ) -> Sequence[Any]:
        """Returns the value of every variable, in the order of the step's.

        With ``model_only`` the optimizer's state is None. With ``halted`` loops stand
        still: all is of one moment without a copy.

        Raises:
          TooLargeError: with ``model_only``: a variable is too large to come here.
        """

    def keep(self, go_on: Callable[[], None] | None = None) -> RunSnapshot:
        """Returns the state as it is now; what tasks have stays there meanwhile.

        Of a run that goes on, what one task has is of one moment, up to a limit.

        Args:
          go_on: set while loops stand still: called as soon as they may go on, unless
            what is returned is live.
        """

    def places(self) -> Sequence[Any]:
        """Returns arrays of the types of the state; those of tasks by where they are.

        Such may be filled there, before ``load`` is given them as they are.
        """

    def nbytes(self) -> int:
        """Returns how many bytes ``values`` would bring to this process."""

    def check_model(self) -> None:
        """Raises ``TooLargeError`` for a model that is too large to come here."""

    def load(self, values: Sequence[Any], position: Position = None) -> None:
        """Replaces the value of every variable, and the position in the data.

        Values that ``places`` returned have been replaced already.

        Without a position it is that of training from the beginning for as many steps.
        """

    def read(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Returns the values of some variables, by name."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Replaces the values of some, by name, between two updates of a run."""

    def events(self) -> Events:
        """Returns what happened in each shard of each hash table so far."""

    def let_go(self) -> None:
        """Lets tasks end that were told to; they wait until a run has been read."""

    def close(self) -> None:
        """Drops the state, wherever it is held."""


class Runner(Protocol):
    """Performs the steps of a training run."""

    @property
    def state(self) -> RunState:
        """What the steps change."""

    def prepare(self, dataset: Dataset, batch_size: int) -> None:
        """Traces, plans and compiles for batches of this data, once per shape."""

    def run(self, order: Order) -> Generator[Chunk, None, None]:
        """Performs the steps; yields what was done until all is done or stopped."""

    def position(self) -> Position:
        """Returns where in the data the training is."""

    def staleness(self) -> Staleness:
        """Returns how old the gradients of the last run were."""

    def members(self) -> RunMembers:
        """Returns who takes part in the last run."""

    def rounds(self) -> Rounds:
        """Returns who took part in each of its rounds, if some were invited."""

    def plan(self) -> Any:
        """Returns what goes where; prints and shows itself in a notebook."""


def stack(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> dict[str, Array]:
    """Returns a row of values per step as one array per name.

    Example:
      >>> stack([[1.0, 2.0], [3.0, 4.0]], ["loss", "norm"])["norm"].tolist()
      [2.0, 4.0]
    """
    columns = zip(*rows, strict=True)
    return {
        name: np.stack([np.asarray(value) for value in column])
        for name, column in zip(names, columns, strict=True)
    }
