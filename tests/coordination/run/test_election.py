"""Terms of masters: no two tasks take one, whatever each knows of the others."""

from itertools import combinations

from jgraph.coordination.run.election import Election, JournalEnd, TakeOver
from jgraph.graph.ir import TaskName

PS = [TaskName(f"/job:ps/task:{n}") for n in range(2)]
WORKERS = [TaskName(f"/job:worker/task:{n}") for n in range(5)]


def term_of(task: TaskName, known: list[TaskName]) -> int:
    """The term that a standby takes which knows of these tasks."""
    election = Election(task, known, 0.0, elastic=True)
    end = JournalEnd(WORKERS[4], process=1, term=1, frames=3)
    verdict = election.decide(end, {}, [], [task], 0.0)
    assert isinstance(verdict, TakeOver)
    return verdict.term


def test_no_two_tasks_take_one_term_where_one_knows_of_more_that_have_joined() -> None:
    views = [
        [*PS, *some] for count in range(5) for some in combinations(WORKERS[:4], count)
    ]
    terms = {
        task: {term_of(task, view) for view in views if task in view}
        for task in [*PS, *WORKERS[:4]]
    }
    assert {len(taken) for taken in terms.values()} == {1}
    assert len(set.union(*terms.values())) == len(terms)
