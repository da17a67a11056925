"""The transformer in stages: it trains, and the command tells its figures."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jgraph import cli
from jgraph.cluster.client import Cluster, connect
from jgraph.errors import ConfigError
from jgraph.examples import pipeline
from jgraph.examples.options import Options
from tests.cluster.conftest import Servers
from tests.examples.data import real, write_text


@pytest.fixture(scope="module")
def stages() -> Iterator[Cluster]:
    """Four workers, as servers of this process."""
    servers = Servers(worker=4)
    with connect(servers.servers[0].target, timeout_s=20) as cluster:
        yield cluster
    servers.stop()


def test_without_a_cluster_it_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"jg\.LocalCluster\(workers=4\)"):
        pipeline.run(tmp_path, None, Options(steps=1))


@pytest.mark.slow
def test_four_stages_learn_which_word_follows(tmp_path: Path, stages: Cluster) -> None:
    said: list[str] = []
    options = Options(steps=30, say=said.append)
    figures = pipeline.run(write_text(tmp_path), stages, options, microbatches=4)
    assert figures["perplexity"] < 0.9 * figures["unigram_perplexity"]
    assert figures["bubble"] == pytest.approx(3 / 7, abs=1e-3)
    assert "4 stages on 4 tasks" in said[0]


@pytest.mark.slow
@pytest.mark.procs
def test_the_command_prints_one_line_of_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = ["--workers", "4", "--steps", "2", "--schedule", "gpipe"]
    data = ["--data", str(real("tinyshakespeare"))]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "pipeline", *data, *size, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert {"perplexity", "unigram_perplexity", "bubble", "seconds"} <= set(figures)
    assert (figures["example"], figures["workers"]) == ("pipeline", 4)
