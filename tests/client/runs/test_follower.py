"""Reports of a run, and what its master asks meanwhile."""

from jgraph.client.runs.follower import Inbox


def test_a_run_that_is_saved_again_and_again_still_tells_how_far_it_is() -> None:
    inbox = Inbox[int | str]()
    for report in range(20):
        inbox.put(report)
    inbox.put("halted", urgent=True)
    reports = list[int | str]()
    for item in inbox:
        if item == "halted":  # the loops halt again while the run is being saved
            inbox.put(len(reports) + 20)
            inbox.put("halted", urgent=True)
        else:
            reports.append(item)
        if len(reports) == 30:
            break
    assert reports[:21] == list(range(21))


def test_loops_that_stand_still_wait_for_no_report() -> None:
    inbox = Inbox[int | str]()
    for report in range(20):
        inbox.put(report)
    inbox.put("halted", urgent=True)
    assert next(iter(inbox)) == "halted"
