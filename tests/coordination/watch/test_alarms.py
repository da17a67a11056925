"""Each alarm: what it takes for it to come, what it says, and that it goes again."""

from collections.abc import Callable, Sequence

import pytest

from jgraph.coordination.watch.facts import Fact
from tests.support.board_facts import (
    PS,
    PS1,
    START,
    WORKERS,
    board_of,
    report,
    run,
    said,
    status,
    task,
)


def silence() -> list[Fact]:
    return [
        status(0),
        {"kind": "silent", "time": START + 1, "text": "nothing listens at head:8470."},
    ]


def silence_ends() -> list[Fact]:
    return [*silence(), status(2)]


def lost(second: float = 0) -> list[Fact]:
    return [status(second + i, None, WORKERS[0]) for i in range(2)]


def lost_once() -> list[Fact]:
    return [status(0, None, WORKERS[0])]


def lost_in_a_run() -> list[Fact]:
    return [run(0, 5), *lost()]


def found_again() -> list[Fact]:
    return [*lost(), status(3)]


def full() -> list[Fact]:
    tasks = {
        PS: task(address="a:1", memory_free=0.041, disk_free=0.2),
        PS1: task(address="a:2", memory_free=0.04, disk_free=0.2),
        WORKERS[0]: task(address="b:1", memory_free=0.5, disk_free=0.001),
        WORKERS[1]: task(address="b:2"),  # an older one tells nothing
    }
    return [status(0, tasks)]


def empty_again() -> list[Fact]:
    return [*full(), status(1)]


def certificates(days: float) -> list[Fact]:
    ends = START + days * 86_400
    tasks = {
        name: task(certificate_ends_s=ends + i) for i, name in enumerate((PS, PS1))
    }
    return [status(0, {**tasks, WORKERS[0]: task(certificate_ends_s=None)})]


def failed() -> list[Fact]:
    return [run(0, 5), run(1, 3210, state="failed")]


def loss_of(second: float, mean: float) -> Fact:
    value = {"min": mean, "mean": mean, "max": mean}
    return report(second, metrics={"loss": value})


def not_finite() -> list[Fact]:
    return [run(0, 0), loss_of(1, float("nan"))]


def saves(second: float, count: int, failures: int, age_s: float = 0.0) -> Fact:
    told = {"saves": count, "failures": failures, "age_s": age_s}
    return status(second, {PS: task(saves=told)})


def unsaved() -> list[Fact]:
    return [saves(0, 1, 0), saves(1, 1, 1), saves(2, 1, 2)]


def unsaved_long_ago() -> list[Fact]:
    return [*unsaved(), *(saves(s, 1, 2) for s in range(3, 700))]


def steady(seconds: int, per_s: float, first: int = 0) -> list[Fact]:
    return [run(first + s, per_s * (first + s)) for s in range(seconds)]


def still() -> list[Fact]:
    stands = [run(100 + s, 1000) for s in range(0, 120, 5)]
    return [*steady(100, 10), *stands]


def still_for_a_moment() -> list[Fact]:
    return [*steady(100, 10), run(130, 1000)]


def checkpoints(age_s: float) -> list[Fact]:
    kept = {"checkpoints": "runs/mlp"}
    facts = [
        fact
        for i in range(4)
        for fact in (saves(60 * i, i + 1, 0), run(60 * i + 1, 9 + i, **kept))
    ]
    return [*facts, saves(180 + age_s, 4, 0, age_s), run(181 + age_s, 99, **kept)]


def restarted(times: int) -> list[Fact]:
    return [
        status(s, {PS: task(incarnation=f"{min(s, times)}")}) for s in range(times + 2)
    ]


def versions() -> list[Fact]:
    old = task(jgraph="0.0.9")
    return [status(0, {PS: task(), WORKERS[0]: task(), WORKERS[1]: old})]


def stuck(age_s: float) -> list[Fact]:
    step = {"program": "train", "age_s": age_s, "drives": True}
    return [status(0, {WORKERS[0]: task(steps=[step])})]


def slower(share: float) -> list[Fact]:
    facts, step = [], 0.0
    for second in range(100):
        step += 40 if second < 80 else 40 * share
        facts.append(run(second, step))
    return [facts[0], report(0), *facts[1:]]


def loss_grows(last: float, least: float = 0.5) -> list[Fact]:
    means = (2.0, 1.0, least, last)
    return [run(0, 0), *(loss_of(s, m) for s, m in enumerate(means))]


def slow_worker(seconds: float) -> list[Fact]:
    quick = [report(1, worker=w) for w in range(3)]
    return [run(0, 0), *quick, report(1, worker=3, step_s=[seconds] * 10)]


def tables(evicted: Sequence[int]) -> list[Fact]:
    return [
        status(s, {PS: task(hash_tables={"users": {"rows": 5000, "evicted": count}})})
        for s, count in enumerate(evicted)
    ]


def calls(errors: int) -> list[Fact]:
    def told(count: int, bad: int) -> dict[str, object]:
        return {"RunStep": {"buckets": [0, count], "errors": bad, "seconds": 1.0}}

    return [
        status(0, {PS: task(calls=told(5, 5))}),
        status(9, {PS: task(calls=told(105, 5 + errors))}),
    ]


def bounded(at_bound: int) -> list[Fact]:
    def gate(ages: dict[int, int], wait_s: float) -> dict[str, object]:
        told = {"max_staleness": 8, "wait_s": wait_s, "waits": 3}
        return {"g": {**told, "staleness": {WORKERS[0]: ages}}}

    return [
        status(0, {PS: task(gates=gate({0: 900}, 1.0))}),
        status(5, {PS: task(gates=gate({0: 1000 - at_bound, 8: at_bound}, 3.5))}),
    ]


def draining() -> list[Fact]:
    return [status(0, {PS: task(), PS1: task(state="draining")})]


def trouble() -> list[Fact]:
    what = "the journal is not written: no space left on device"
    return [{"kind": "trouble", "time": START, "id": "journal", "text": what}]


def trouble_ends() -> list[Fact]:
    return [*trouble(), {"kind": "trouble", "time": START + 1, "id": "journal"}]


CASES: Sequence[tuple[str, Callable[[], list[Fact]], list[str]]] = (
    (
        "silence",
        silence,
        ["critical: the cluster does not answer: nothing listens at head:8470"],
    ),
    ("silence ends", silence_ends, []),
    ("lost", lost, [f"warning: {WORKERS[0]} does not answer"]),
    ("lost once", lost_once, []),
    (
        "lost in a run",
        lost_in_a_run,
        [f"critical: {WORKERS[0]} does not answer, and a run goes on"],
    ),
    ("found again", found_again, []),
    ("failed", failed, ["critical: run 'mlp' failed at step 3,210"]),
    ("not finite", not_finite, ["critical: run 'mlp': loss is NaN or infinite"]),
    (
        "unsaved",
        unsaved,
        [f"critical: {PS} could not write its part of a checkpoint, 2 times"],
    ),
    ("unsaved long ago", unsaved_long_ago, []),
    ("still", still, ["critical: run 'mlp' goes on and makes no step"]),
    ("still for a moment", still_for_a_moment, []),
    (
        "old checkpoint",
        lambda: checkpoints(400),
        [
            "warning: the newest checkpoint of run 'mlp' is 7 min old; they came every "
            "60 s"
        ],
    ),
    ("young checkpoint", lambda: checkpoints(100), []),
    (
        "restarted",
        lambda: restarted(2),
        [f"warning: {PS} was started again, 2 times in ten minutes"],
    ),
    (
        "restarted long ago",
        lambda: [*restarted(1), status(999, {PS: task(incarnation="1")})],
        [],
    ),
    (
        "versions",
        versions,
        [f"warning: {WORKERS[1]} has jgraph 0.0.9, and others have 0.1.0"],
    ),
    (
        "stuck",
        lambda: stuck(45.0),
        [f"warning: a step of 'train', driven by {WORKERS[0]}, is 45 s old"],
    ),
    ("not stuck", lambda: stuck(5.0), []),
    (
        "slower",
        lambda: slower(0.25),
        [
            "warning: run 'mlp' makes 10 steps/s, and 36.6 in the minutes before; most "
            "of a step goes to 'compute'"
        ],
    ),
    ("not slower", lambda: slower(0.8), []),
    (
        "loss grows",
        lambda: loss_grows(7.0),
        [
            "warning: the loss of run 'mlp' is 7, more than ten times the 0.5 that it "
            "was"
        ],
    ),
    ("loss grows a little", lambda: loss_grows(0.9), []),
    ("loss is noise near zero", lambda: loss_grows(8e-4, 1e-6), []),
    (
        "loss grows from near zero",
        lambda: loss_grows(0.3, 1e-6),
        [
            "warning: the loss of run 'mlp' is 0.3, more than ten times the 1e-06 that "
            "it was"
        ],
    ),
    (
        "slow worker",
        lambda: slow_worker(0.048),
        [f"warning: {WORKERS[3]} takes 2.4 times as long for a step as the median"],
    ),
    ("worker of usual speed", lambda: slow_worker(0.03), []),
    (
        "evictions",
        lambda: tables((0, 40, 100)),
        [
            f"warning: hash table users on {PS} gave up 100 rows in a minute, and "
            "holds 5,000"
        ],
    ),
    ("few evictions", lambda: tables((0, 10, 20)), []),
    (
        "errors",
        lambda: calls(30),
        [f"warning: 30 of 100 calls of RunStep to {PS} failed in a minute"],
    ),
    ("few errors", lambda: calls(3), []),
    (
        "at the bound",
        lambda: bounded(80),
        [
            f"notice: 80% of the updates on {PS} are 8 updates old, the most that "
            "max_staleness=8 allows; workers waited 2.5 s in a minute"
        ],
    ),
    ("seldom at the bound", lambda: bounded(10), []),
    (
        "draining",
        draining,
        [f"notice: {PS1} was told to end and takes no new work"],
    ),
    (
        "trouble",
        trouble,
        ["warning: the journal is not written: no space left on device"],
    ),
    ("trouble ends", trouble_ends, []),
    (
        "full",
        full,
        [
            f"warning: the host of {PS1} and 1 more has 4 % of its memory left",
            f"warning: the host of {WORKERS[0]} has 0 % of its disk of temporary files "
            "and records left",
        ],
    ),
    ("empty again", empty_again, []),
    (
        "certificate",
        lambda: certificates(12),
        [
            f"warning: the certificate of {PS} and 1 more ends in 12 days; no "
            "connection is made then"
        ],
    ),
    (
        "no certificate",
        lambda: certificates(-1),
        [
            f"warning: the certificate of {PS} and 1 more has ended; no connection is "
            "made then"
        ],
    ),
    ("new certificates", lambda: certificates(31), []),
)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [(facts, words) for _, facts, words in CASES],
    ids=[name for name, _, _ in CASES],
)
def test_an_alarm_comes_when_it_should(
    facts: Callable[[], list[Fact]], expected: list[str]
) -> None:
    assert said(board_of(*facts())) == expected


def test_the_worst_comes_first() -> None:
    tasks = {PS: task(state="draining"), PS1: task(jax="0.12.0"), WORKERS[0]: task()}
    looks = [status(second, tasks, WORKERS[0]) for second in range(3)]
    lines = said(board_of(run(0, 5), *looks))
    assert [line.partition(":")[0] for line in lines] == [
        *("critical", "warning", "notice"),
    ]


def test_an_alarm_keeps_the_time_at_which_it_came() -> None:
    board = board_of(*lost(10), *lost(20), *lost(30))
    (alarm,) = board.alarms()
    assert alarm.since == START + 11
    assert alarm.id == f"lost:{WORKERS[0]}"
    assert str(alarm).endswith("; type: jgraph events")
    board.take(status(40))
    assert board.alarms() == []
    for fact in lost(50):
        board.take(fact)
    assert board.alarms()[0].since == START + 51
