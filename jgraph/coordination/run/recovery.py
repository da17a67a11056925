"""Recovery decision: a run that lost tasks goes back to a checkpoint, or ends."""

from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import (
    ClusterUnreachableError,
    DataError,
    InvalidProgramError,
    JGError,
    TaskLostError,
)
from jgraph.graph.device import TaskName

ATTEMPTS: Final = 3
"""So many losses in a row without a newer checkpoint, and a run ends."""
LOST_DATA: Final = "lost_data"
"""In the details of an error: the data set that a task does not have any more."""


@final
@dataclass(frozen=True, slots=True)
class Recovery:
    """A run lost tasks, and went back to a checkpoint or went on with copies.

    Attributes:
      lost: the tasks; they have been started again, or others have their parts.
      step: updates that were known to be applied then.
      back_to: updates of the state that it goes on from.
      seconds: it took until all ps answered and had that state.
      is_drain: the tasks were told to end.
      by: who has their parts until they are there again; none: they are.
      rest_of: workers gave the parameters that were lost, as they are now, and what
        else was lost, as the optimizer's state, is of so many updates; None: all is
        of the same.

    Example:
      >>> print(Recovery((TaskName("/job:ps/task:0"),), 730, 500, seconds=2.0))
      /job:ps/task:0 was lost at step 730; after 2.0 s all ps answer, and the run goes \
      on from step 500: 230 steps are done again.
    """

    lost: tuple[TaskName, ...]
    step: int
    back_to: int
    seconds: float = 0.0
    is_drain: bool = False
    by: tuple[TaskName, ...] = ()
    rest_of: int | None = None

    def __str__(self) -> str:
        were = "was" if len(self.lost) == 1 else "were"
        how = "told to end" if self.is_drain else "lost"
        then = "all ps answer"
        if self.by:
            have = "has" if len(self.by) == 1 else "have"
            then = f"{', '.join(self.by)} {have} what was held there"
        return (
            f"{', '.join(self.lost)} {were} {how} at step {self.step}; after "
            f"{self.seconds:.1f} s {then}, and the run goes on from step "
            f"{self.back_to}: {self.again} steps are done again.{self._rest}"
        )

    @property
    def _rest(self) -> str:
        if self.rest_of is None:
            return ""
        of = f"of step {self.rest_of}" if self.rest_of else "as at the beginning"
        return (
            " Workers gave the parameters that were lost, as they are now; the state "
            f"of their optimizer is {of}."
        )

    @property
    def again(self) -> int:
        """How many updates are done again."""
        return max(0, self.step - self.back_to)


@final
@dataclass(frozen=True, slots=True)
class GoBack:
    """Wait for all tasks, then restore the newest good checkpoint."""

    step: int


@final
@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the run."""

    why: str


Instruction: TypeAlias = GoBack | GiveUp


@final
class Recoveries:
    """State machine of one run.

    Args:
      first: updates at its beginning. Older checkpoints are none of its.

    Example:
      >>> recoveries = Recoveries(first=0)
      >>> recoveries.lost(newest=500)
      GoBack(step=500)
      >>> recoveries.lost(newest=None)
      GiveUp(why='no checkpoint of this run is there yet')
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._newest: int | None = None
        self._reach = first
        self._times = 0

    def lost(self, newest: int | None, *, is_drain: bool = False) -> Instruction:
        """Says what to do now that tasks are lost.

        Args:
          newest: updates in the newest checkpoint; None: there is none.
          is_drain: they were told to end, so the state is not what ended them.
        """
        if newest is None or newest < self.first:
            return GiveUp("no checkpoint of this run is there yet")
        if newest != self._newest:
            self._newest, self._times = newest, 0
        self._times += not is_drain
        if self._times > ATTEMPTS and not is_drain:
            return GiveUp(f"it went back to step {newest} {ATTEMPTS} times already")
        return GoBack(newest)

    def kept(self, step: int) -> None:
        """Takes note that it does not go back: it has so many updates, all of them.

        Earlier losses count no more if it has come further since the last time.
        """
        if step > self._reach:
            self._reach, self._times = step, 0


def is_loss(error: JGError) -> bool:
    """Whether a task was lost, or has been since it was given a program.

    One that takes nothing for long counts as well: it may be frozen, and another
    process may be started in its place.

    Example:
      >>> is_loss(TaskLostError("It is gone")), is_loss(InvalidProgramError("What?"))
      (True, False)
      >>> is_loss(InvalidProgramError("no program 'add-1'", handle="add-1"))
      True
    """
    has_forgotten = isinstance(error, InvalidProgramError) and "handle" in error.details
    lost = isinstance(error, ClusterUnreachableError | TaskLostError)
    return lost or has_forgotten or has_lost_data(error)


def has_lost_data(error: JGError) -> bool:
    """Whether a worker lost the data of a run: it was started again since it had that.

    Example:
      >>> has_lost_data(DataError("no data set 'a'", **{LOST_DATA: "a"}))
      True
    """
    return isinstance(error, DataError) and LOST_DATA in error.details


def hopeless(error: JGError, why: str, directory: str, newest: int | None) -> JGError:
    """Returns the error of a run that did not go on by itself, with what to do.

    Args:
      error: how the loss showed.
      why: nothing could be done about it; may be empty.
      directory: of the checkpoints; empty: there are none.
      newest: updates in the newest checkpoint; None: there is none.

    Example:
      >>> from jgraph.errors import TaskLostError
      >>> hopeless(TaskLostError("It is gone"), "", "runs", None).message
      'It is gone. The run did not go on by itself: there is no checkpoint in runs'
    """
    if not directory:
        hint = "there is no checkpoint: give fit(checkpoint=…) a directory"
    elif newest is None:
        hint = f"there is no checkpoint in {directory}"
    else:
        hint = (
            f"the newest checkpoint is step {newest}; go on from there with "
            f"trainer.restore('{directory}')"
        )
    text = "; ".join(filter(None, [why, hint]))
    return type(error)(
        f"{error.message.rstrip('.')}. The run did not go on by itself: {text}",
        **error.details,
    )
