"""Answers of a client to the master of its run: saves, evaluations, saved states."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, final

from jgraph.client.runs.questions import Question
from jgraph.errors import (
    ClusterError,
    InternalError,
    JGError,
    ProtocolError,
    UninitializedError,
)
from jgraph.runtime.files.step_files import our_steps
from jgraph.train.attempt import Attempt
from jgraph.train.run.progress import Display

LOSS_ERRORS: Final = (ClusterError, ProtocolError, InternalError, UninitializedError)
"""What may fail so where a task is gone, or was started again meanwhile.

None of these alone is a loss: the master goes back only if a task is another process
by now, or a connection ended. ``InternalError`` is among them because what a survivor
was doing with a lost task may end in any exception (see ``failed.as_error``); its
message is in the log, and ``Recoveries`` bounds how often.
"""


@final
@dataclass(slots=True)
class Asked:
    """Does what the master of a run asks of its client.

    Attributes:
      attempt: the run.
      display: says what goes on.
    """

    attempt: Attempt
    display: Display
    _halted_at: int = field(init=False)

    def __post_init__(self) -> None:
        self._halted_at = self.attempt.first

    def answer(self, question: Question) -> None:
        """Does it, and answers; what is asked else is left to who asks."""
        match question.kind:
            case "halted":
                self._at_halt(question.answer)
            case "rest" if self.attempt.saving is not None:
                self.display.say("saving, as tasks are about to end")
                self.attempt.saving.save()
            case "newest":
                question.answer(step=self._newest())
            case "state":
                self._give_state(question)
            case "part":
                self._give_part(question)

    def _newest(self) -> int | None:
        saving = self.attempt.saving
        if saving is None:
            return None
        self.display.say("waiting for all tasks to be back")
        saving.wait()
        steps = our_steps(saving.directory)
        return steps[-1] if steps else None

    def _give_state(self, question: Question) -> None:
        """Gives all ps the values of the newest good checkpoint."""
        saving, order = self.attempt.saving, self.attempt.order
        assert saving is not None  # it has one
        assert order is not None
        assert order.restore is not None
        try:
            order.restore(saving.directory)
        except JGError as error:
            question.answer(error=error)
            return
        state = self.attempt.runner.state
        step = state.global_step()
        saving.go_back(step)
        self._halted_at = step
        question.answer(step=step, position=state.position)

    def _give_part(self, question: Question) -> None:
        """Gives tasks that hold nothing what the newest checkpoint has of it."""
        saving, order = self.attempt.saving, self.attempt.order
        assert saving is not None  # it has one
        assert order is not None
        assert order.restore_part is not None
        try:
            step = order.restore_part(saving.directory, question.tasks)
        except JGError as error:
            question.answer(error=error)
        else:
            question.answer(step=step)

    def _at_halt(self, go_on: Callable[[], bool]) -> None:
        """Evaluates, and saves, while loops stand still, if that is due."""
        attempt, last = self.attempt, self._halted_at
        saving, order = attempt.saving, attempt.order
        assert order is not None  # this client asks for halts
        if not order.evaluates_halted:
            if saving is not None:
                saving.save_halted(go_on)
            return
        try:
            step = attempt.runner.state.global_step()
        except ClusterError:
            return  # the run finds out by itself what was lost

        def is_due(every: int | None) -> bool:
            return every is not None and step // every != last // every

        def save_and_go_on() -> bool:
            halts: list[bool] = []

            def is_told() -> bool:
                halts.append(go_on())
                return halts[-1]

            if saving is not None and is_due(order.save_every):
                saving.save_halted(is_told)
            return all(halts) if halts else go_on()

        if attempt.evaluations is not None and is_due(order.eval_every):
            attempt.evaluations.begin_halted(save_and_go_on)
        else:
            save_and_go_on()
        self._halted_at = step
