"""The board: from what tasks and runs tell to what there is to see."""

import json

import pytest

from jgraph.coordination.watch.board import Board
from jgraph.coordination.watch.facts import Fact, checked, clean
from tests.support.board_facts import (
    PS,
    START,
    WORKERS,
    board_of,
    report,
    run,
    status,
    task,
)


def test_a_run_is_told_of_in_one_sentence() -> None:
    saved = task(saves={"saves": 1, "age_s": 0.0, "failures": 0})
    board = board_of(
        status(0, {PS: saved, WORKERS[0]: task()}),
        run(1, 3169, checkpoints="runs/mlp"),
        run(2, 3210, checkpoints="runs/mlp"),
        status(41, {PS: saved | {"saves": {"saves": 1, "age_s": 41.0}}}, WORKERS[0]),
    )
    assert board.sentence() == (
        "run 'mlp' is at step 3,210 of 10,000, 41 steps/s, newest checkpoint 41 s old, "
        "1 of 2 tasks answer"
    )


def test_rates_are_of_the_time_between_two_looks() -> None:
    def told(sent: int, busy: float) -> dict[str, object]:
        traffic = {"bytes_sent": sent, "frames_sent": sent / 100}
        row = {**traffic, "shared_bytes_sent": 2 * sent}
        busy_s = {"process": busy, "update": busy / 2}
        return task(traffic={WORKERS[0]: row}, busy_s=busy_s)

    board = board_of(status(0, {PS: told(0, 1.0)}), status(2, {PS: told(6000, 2.0)}))
    view = board.view()
    assert view["tasks"][PS]["cores"] == {"process": 0.5, "update": 0.25}
    row = view["traffic"][f"{PS} {WORKERS[0]}"]
    assert (row["from"], row["to"]) == (PS, WORKERS[0])
    assert (row["bytes_per_s"], row["shared_bytes_per_s"]) == (3000, 6000)
    assert (row["frames_per_s"], row["bytes_sent"]) == (30.0, 6000)
    began_anew = told(500, 0.5) | {"incarnation": "02"}
    board.take(status(4, {PS: began_anew}))
    view = board.view()
    assert view["tasks"][PS]["cores"] == {}
    assert view["tasks"][PS]["restarts"] == 1
    (row,) = view["traffic"].values()
    assert (row["bytes_per_s"], row["bytes_sent"]) == (0, 500)


def test_steps_of_workers_have_quantiles_and_parts() -> None:
    board = board_of(
        run(0, 0),
        report(1, 0, steps=4, step_s=[0.02, 0.02, 0.02, 0.08]),
        report(1, 1, dropped={WORKERS[1]: 3}),
        run(1, 14),
    )
    seen = board.view()["runs"]["mlp"]
    assert seen["workers"][WORKERS[0]]["step_ms"] == {
        "p50": 20.0,
        "p95": 80.0,
        "p99": 80.0,
    }
    assert seen["workers"][WORKERS[0]]["parts"] == {"compute": 0.015, "pull": 0.005}
    assert seen["workers"][WORKERS[1]]["dropped"] == 3
    assert (seen["steps_per_s"], seen["examples_per_s"]) == (14.0, 448.0)
    curve = board.curves()["runs"]["mlp"]["metrics"]["loss"]
    assert curve["x"] == [4, 14]
    assert (curve["min"], curve["max"]) == ([0.4, 0.4], [0.6, 0.6])


def test_in_synchronous_training_the_one_that_decides_tells_of_steps() -> None:
    board = board_of(
        run(0, 0, synchronous=True),
        *(report(1, worker) for worker in range(3)),
        report(1, steps=5, task=PS, metrics={"loss": {"min": 1, "mean": 2, "max": 3}}),
    )
    assert board.curves()["runs"]["mlp"]["metrics"]["loss"]["x"] == [5]
    assert set(board.view()["runs"]["mlp"]["workers"]) == set(WORKERS[:3])


def test_rounds_have_who_took_part_and_the_oldest_are_shown_no_more() -> None:
    def over(number: int) -> dict[str, object]:
        dropped = {WORKERS[2]: "late"} if number % 2 else {}
        members = WORKERS[:2]
        return {"number": number, "members": members, "dropped": dropped, "wait_s": 1}

    told = [report(1, steps=1, task=PS, rounds=[over(n)]) for n in range(1, 61)]
    board = board_of(run(0, 0, synchronous=True), *told)
    seen = board.view()["runs"]["mlp"]
    assert [*seen["rounds"]] == [str(n) for n in range(11, 61)]
    assert seen["rounds"]["59"] == {
        "clients": 2,
        "who": WORKERS[:2],
        "dropped": 1,
        "why": {WORKERS[2]: "late"},
        "wait_s": 1,
        "void": [],
    }
    assert seen["clients"][WORKERS[0]] == {"members": 60}
    assert seen["clients"][WORKERS[2]] == {"late": 30}
    board.take(report(2, steps=0, task=PS, back_to=55))
    seen = board.view()["runs"]["mlp"]
    assert max(map(int, seen["rounds"])) == 55
    assert seen["clients"][WORKERS[0]] == {"members": 55}  # five are to come again
    for strange in (7, {"number": -1, "members": 3, "dropped": [], "wait_s": "x"}):
        board.take(report(3, steps=0, task=PS, rounds=[strange]))
    assert "0" in board.view()["runs"]["mlp"]["rounds"]


def test_a_round_that_was_given_up_is_no_round_of_its_clients() -> None:
    void = {"number": 1, "members": [], "dropped": {WORKERS[1]: "lost"}, "void": "few"}
    told = [report(1, steps=0, task=PS, rounds=[void])]
    over = {"number": 1, "members": WORKERS[2:], "dropped": {}}
    told.append(report(2, steps=1, task=PS, rounds=[over]))
    seen = board_of(run(0, 0, synchronous=True), *told).view()["runs"]["mlp"]
    (row,) = seen["rounds"].values()
    assert (row["who"], row["why"], row["void"]) == (WORKERS[2:], {}, ["few"])
    assert seen["clients"][WORKERS[1]] == {"lost": 1}


def test_rounds_of_one_client_each_have_the_order_of_when_they_were_done() -> None:
    def of(worker: int, *seconds: float, finite: bool = True) -> Fact:
        own = [{"seconds": s, "finite": finite} for s in seconds]
        return report(9, worker, steps=len(own), own_rounds=own)

    def shown() -> list[tuple[str, list[str]]]:
        seen = board.view()["runs"]["mlp"]
        return [(number, row["who"]) for number, row in seen["rounds"].items()]

    first, second = [WORKERS[0]], [WORKERS[1]]
    told = [of(0, 1.0, 3.0), of(1, 2.0), of(1, 4.0, finite=False)]
    board = board_of(run(0, 0), *told)
    expected = [("1", first), ("2", second), ("3", first), ("4", [])]
    assert shown() == expected
    assert board.view()["runs"]["mlp"]["clients"] == {
        WORKERS[0]: {"members": 2},
        WORKERS[1]: {"members": 1, "not finite": 1},
    }
    board.take(report(9, steps=0, back_to=2))
    board.take(of(0, 6.0))
    board.take(of(1, 5.0))
    assert shown() == [*expected[:2], ("3", second), ("4", first)]


def test_a_run_that_went_back_is_drawn_from_there() -> None:
    reports = [report(second) for second in range(5)]
    board = board_of(run(0, 0), *reports, report(6, steps=0, back_to=20), report(7))
    seen = board.view()["runs"]["mlp"]
    assert seen["recoveries"] == 1
    assert board.curves()["runs"]["mlp"]["metrics"]["loss"]["x"] == [10, 20, 30]


def test_calls_have_a_rate_and_quantiles_of_the_last_minute() -> None:
    def told(count: int) -> dict[str, object]:
        row = {"buckets": [0, 0, count, *[0] * 10], "errors": 1, "seconds": 1.0}
        return task(calls={"RunStep": row})

    board = board_of(status(0, {PS: told(0)}), status(10, {PS: told(400)}))
    (row,) = board.view()["calls"].values()
    assert (row["per_s"], row["p50_ms"], row["errors"]) == (40.0, 3.5, 1)


def test_a_server_without_the_new_fields_is_shown_all_the_same() -> None:
    board = board_of(*(status(s, {PS: {"incarnation": "1"}}) for s in range(3)))
    view = board.view()
    assert view["tasks"][PS]["jax"] is None
    assert board.alarms() == []


@pytest.mark.parametrize(
    "strange",
    [
        {"tasks": [1, 2]},
        {"tasks": {PS: {"busy_s": {"process": float("nan")}, "calls": {"a": 5}}}},
        {"tasks": {PS: {"gates": {"g": {"staleness": {"w": {"x": "y"}}}}}}},
        {"tasks": {PS: {"traffic": {"b": {"bytes_sent": -1}}, "steps": [1, {}]}}},
        {"tasks": {PS: {"calls": {"a": {"buckets": "no", "errors": 1e400}}}}},
        {"tasks": {PS: {"saves": {"saves": "many", "age_s": -5}}}, "missing": 7},
        {"tasks": {PS: {"gates": {"g": {"max_staleness": "8", "staleness": {
            "w": {"9": 99, "²": 5, "٣": 1}}}}}}},
        {"tasks": {PS: {"gates": {"g": {"max_staleness": 8, "staleness": {
            "w": {"0": 100, "9": 900}}}}}}},
        {"kind": "runs", "runs": {"a": {"step": "ten", "steps": None}, "b": 4}},
        {"kind": "report", "run": "mlp", "steps": 4, "metrics": {"loss": 5}},
        {"kind": "report", "run": "mlp", "steps": 4, "task": WORKERS[0],
         "metrics": {"loss": {"mean": "x"}}, "step_s": ["a", -1, 2], "times": 9},
        {"kind": "events", "events": ["a", {"text": "b"}]},
        {"kind": "variables", "shards": {"t": {"n": 5}}},
    ],
)  # fmt: skip
def test_what_nobody_would_tell_breaks_nothing(strange: dict[str, object]) -> None:
    board = board_of(status(0), run(0, 5))
    for second in (1, 2):
        fact = checked({"kind": "status", "time": START + second, **strange})
        assert fact is not None
        board.take(fact)
    json.dumps([board.view(), board.curves()], allow_nan=False)
    assert all(str(alarm) for alarm in board.alarms())


@pytest.mark.parametrize(
    "no_fact",
    [
        *(None, 5, [], "status", {}, {"kind": "status"}, {"kind": "order", "time": 1}),
        {"kind": "status", "time": "now"},
        {"kind": "status", "time": float("nan")},
        {"kind": "status", "time": -5},
    ],
)
def test_what_is_no_fact_is_refused(no_fact: object) -> None:
    assert checked(no_fact) is None


def test_texts_are_cut_and_have_no_control_characters() -> None:
    evil = "a\x1b[31m\u202eb\x00" + "x" * 10_000
    told = clean({"text": evil, "deep": [[[[[[[[[[1]]]]]]]]]]})
    assert len(told["text"]) < 2100
    assert told["text"].startswith("a�[31m�b�xxx")
    assert told["text"].endswith("… (cut)")


def test_memory_of_a_board_does_not_grow_with_time() -> None:
    board = Board()
    sizes = []
    for second in range(1400):
        board.take(status(second, {PS: task(busy_s={"process": second * 0.5})}))
        board.take(run(second, second * 10))
        board.take(report(second))
        if second in {700, 1399}:
            sizes.append(len(json.dumps([board.view(), board.curves()])))
    assert sizes[1] < 1.2 * sizes[0]
