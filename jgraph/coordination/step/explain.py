"""Explanation of stuck steps: combines the tasks' step waits into a wait-for list."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from jgraph.graph.device import TaskName

STEPS_TOLD: Final = 4
"""Steps of one program that a task tells of, the oldest."""


@final
@dataclass(frozen=True, slots=True)
class StepWait:
    """What a task's part of a step waits for.

    Attributes:
      handle: of the program.
      step_id: number of the step.
      program: what the user calls it.
      age_s: how long ago this task learned of it.
      state: ``"queued"`` behind earlier steps, or ``"running"``.
      values: what has not come: (key, who sends it).
      drives: whether this task drives the step.
      pending: of the driver: whose parts are not done.
    """

    handle: str
    step_id: int
    program: str
    age_s: float
    state: str = "running"
    values: tuple[tuple[str, TaskName], ...] = ()
    drives: bool = False
    pending: tuple[TaskName, ...] = ()


def explain(
    steps: Mapping[TaskName, Sequence[StepWait]], missing: Sequence[TaskName] = ()
) -> list[str]:
    r"""Returns lines that say which steps are under way, and what each waits for.

    Args:
      steps: what each task that answered has told.
      missing: tasks that did not answer.

    Example:
      >>> ps, worker = TaskName("/job:ps/task:0"), TaskName("/job:worker/task:0")
      >>> waits = StepWait("h", 7, "train", 12.0, drives=True, pending=(ps,))
      >>> print("\n".join(explain({worker: [waits]}, missing=[ps])))
      /job:ps/task:0 does not answer.
      Step 7 of 'train', driven by /job:worker/task:0, is 12.0 s old and waits for
        /job:ps/task:0, which does not answer.
    """
    lines = [f"{task} does not answer." for task in missing]
    driven = [
        (task, s) for task, described in steps.items() for s in described if s.drives
    ]
    driven.sort(key=lambda pair: -pair[1].age_s)
    known = {(step.handle, step.step_id) for _, step in driven}
    for driver, step in driven:
        lines.extend(_of_step(driver, step, steps, missing))
    orphans = Counter(
        (task, step.program)
        for task, described in steps.items()
        for step in described
        if (step.handle, step.step_id) not in known
    )
    lines += [
        f"{task} has {count} step{'s' * (count > 1)} of '{program}' whose driver told "
        "nothing of: over there already, or lost."
        for (task, program), count in sorted(orphans.items())
    ]
    return lines or ["No step is under way, and all tasks answer."]


def _of_step(
    driver: TaskName,
    step: StepWait,
    steps: Mapping[TaskName, Sequence[StepWait]],
    missing: Sequence[TaskName],
) -> Iterator[str]:
    yield (
        f"Step {step.step_id} of '{step.program}', driven by {driver}, is "
        f"{step.age_s:.1f} s old and waits for"
    )
    for task in step.pending:
        if task in missing:
            yield f"  {task}, which does not answer."
            continue
        parts = [
            part
            for part in steps.get(task, ())
            if (part.handle, part.step_id) == (step.handle, step.step_id)
        ]
        yield f"  {task}, which {_of_part(parts)}."


def _of_part(parts: Sequence[StepWait]) -> str:
    if not parts:
        return "has not begun it, or is just done"
    (part, *_) = parts
    if part.state == "queued":
        return "is at earlier steps of this program"
    if not part.values:
        return "computes"
    values = ", ".join(f"{key} from {sender}" for key, sender in part.values)
    return f"waits for message {values}"
