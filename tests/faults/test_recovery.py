"""The benchmark of recovery runs, and says what it promises."""

import json

import pytest

from benchmarks import recovery


@pytest.mark.procs
@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_recovery_says_what_faults_cost(capsys: pytest.CaptureFixture[str]) -> None:
    recovery.main(
        ["--mb", "1", "--every", "20", "--seconds", "12", "--kill-every-s", "5"]
    )
    lines = capsys.readouterr().out.splitlines()
    *losses, goodput = map(json.loads, lines)
    worker, master, *of_a_ps = losses
    assert [loss["case"] for loss in losses] == list(recovery.LOSSES)
    for loss in (worker, master):
        assert loss["went_on_s"] >= 0
        assert loss["process_back_s"] > 0
    for loss in of_a_ps:
        assert loss["went_on_s"] > loss["process_back_s"] > 0
    assert len(goodput["killed"]) == 2
    assert 0 < goodput["goodput"] < 1.5
