"""The transformer in stages: it trains, and the command tells its figures."""

import json
from pathlib import Path

import pytest

from jgraph import cli
from jgraph.errors import ConfigError
from jgraph.examples import pipeline
from jgraph.examples.options import Options
from tests.support.example_data import write_text


def test_without_a_cluster_it_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"jg\.LocalCluster\(workers=4\)"):
        pipeline.run(tmp_path, None, Options(steps=1))


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (4, 1), (4, 2)])
def test_stages_on_workers_of_their_own_learn_which_word_follows(
    workers: int, replicas: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(write_text(tmp_path)), "--replicas", str(replicas)]
    size = ["--workers", str(workers), "--steps", "15", "--microbatches", "4"]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "pipeline", *data, *size, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures["perplexity"] < 0.9 * figures["unigram_perplexity"]
    stages = workers // replicas
    assert figures["bubble"] == pytest.approx((stages - 1) / (stages + 3), abs=1e-3)
    assert (figures["example"], figures["workers"]) == ("pipeline", workers)
    assert figures["replicas"] == replicas
    assert "seconds" in figures
