"""Model servers beside a cluster: rates of versions, and what is wrong with them."""

from typing import Any

from jgraph.coordination.watch.board import Board

SERVER = "http://127.0.0.1:8000"


def told(second: int, refused: int = 0, **more: Any) -> dict[str, Any]:
    version = {
        "model": "ctr",
        "version": "3",
        "requests": 100 * second,
        "rows": 800 * second,
        "executions": 50 * second,
        "seconds": {"success": 0.4 * second, "queue": 0.1 * second},
        "refused": {"JG-902": refused},
    }
    fact = {"kind": "models", "server": SERVER, "time": float(second)}
    return {**fact, "models": {"ctr 3": version}, **more}


def board_of(*facts: dict[str, Any]) -> Board:
    board = Board()
    for fact in facts:
        board.take(fact)
    return board


def test_a_version_has_rates_of_the_last_minute() -> None:
    view = board_of(told(10), told(20)).view()["models"][SERVER]
    version = view["versions"]["ctr 3"]
    assert version["per_s"] == 100
    assert (version["mean_ms"], version["queue_ms"]) == (4.0, 1.0)
    assert version["batch_rows"] == 16


def test_refusals_of_more_than_a_hundredth_are_an_alarm() -> None:
    assert not board_of(told(10), told(20, refused=5)).alarms()
    (alarm,) = board_of(told(10), told(20, refused=100)).alarms()
    assert alarm.level == "warning"
    assert "refused 9 % of the requests" in alarm.text


def test_a_server_that_does_not_answer_is_an_alarm_until_it_does() -> None:
    board = board_of(told(10), {**told(11), "silent": "connection refused"})
    (alarm,) = board.alarms()
    assert alarm.level == "critical"
    assert alarm.text == (
        f"the model server {SERVER} does not answer: connection refused"
    )
    board.take(told(12))
    assert not board.alarms()


def test_a_version_that_is_served_no_more_is_shown_no_more() -> None:
    board = board_of(told(10), {**told(11), "models": {}})
    assert board.view()["models"][SERVER]["versions"] == {}
