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
    worker, ps, goodput = map(json.loads, lines)
    assert worker["went_on_s"] < worker["process_back_s"]
    assert ps["went_on_s"] > ps["process_back_s"] > 0
    assert len(goodput["killed"]) == 2
    assert 0 < goodput["goodput"] < 1.5
