"""Who waits for whom, in sentences."""

from jgraph.coordination.step.explain import StepWait, explain
from jgraph.graph.ir import TaskName

PS, WORKER, OTHER = (
    TaskName("/job:ps/task:0"),
    TaskName("/job:worker/task:0"),
    TaskName("/job:worker/task:1"),
)


def driven(*pending: TaskName, step_id: int = 7, age_s: float = 3.0) -> StepWait:
    return StepWait("h", step_id, "train", age_s, drives=True, pending=pending)


def part(**kwargs: object) -> StepWait:
    return StepWait("h", 7, "train", 2.0, **kwargs)  # type: ignore[arg-type]


def test_nothing_under_way_is_said() -> None:
    assert explain({PS: [], WORKER: []}) == [
        "No step is under way, and all tasks answer."
    ]


def test_each_pending_task_says_what_it_does() -> None:
    waiting = part(values=(("g", OTHER), ("h", WORKER)))
    told = {WORKER: [driven(PS, OTHER)], PS: [waiting], OTHER: [part()]}
    assert explain(told) == [
        f"Step 7 of 'train', driven by {WORKER}, is 3.0 s old and waits for",
        f"  {PS}, which waits for message g from {OTHER}, h from {WORKER}.",
        f"  {OTHER}, which computes.",
    ]


def test_queued_parts_and_parts_that_are_not_there_are_told_apart() -> None:
    told = {WORKER: [driven(PS, OTHER)], PS: [part(state="queued")], OTHER: []}
    assert explain(told)[1:] == [
        f"  {PS}, which is at earlier steps of this program.",
        f"  {OTHER}, which has not begun it, or is just done.",
    ]


def test_oldest_step_comes_first() -> None:
    told = {
        WORKER: [driven(WORKER, step_id=8, age_s=1.0)],
        OTHER: [driven(OTHER, step_id=2, age_s=9.0)],
    }
    assert [line for line in explain(told) if line.startswith("Step")] == [
        f"Step 2 of 'train', driven by {OTHER}, is 9.0 s old and waits for",
        f"Step 8 of 'train', driven by {WORKER}, is 1.0 s old and waits for",
    ]


def test_parts_of_steps_that_no_driver_knows_are_counted() -> None:
    (line,) = explain({PS: [part(), StepWait("h", 8, "train", 1.0)], WORKER: []})
    assert line.startswith(f"{PS} has 2 steps of 'train' whose driver told nothing of")
