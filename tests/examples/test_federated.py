"""Ten clients with two digits each: who has what, and what a momentum mends."""

import json

import numpy as np
import pytest

from jgraph import cli
from jgraph.errors import ConfigError
from jgraph.examples.federated import run, split_by_label
from jgraph.examples.options import Options
from tests.support.servers import connected


def test_each_client_has_half_of_two_digits_and_each_image_is_with_one() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 500)
    clients = split_by_label(labels)
    assert [sorted(set(labels[client])) for client in clients] == [
        sorted({client, (client + 1) % 10}) for client in range(10)
    ]
    assert sorted(np.concatenate(clients)) == list(range(500))


def test_other_than_ten_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="there are 0; give --workers 10"):
        run(None, Options(steps=1))


@pytest.mark.nightly
def test_outer_momentum_mends_what_skewed_data_costs() -> None:
    """As in the papers: to the accuracy of one process with all data, nearly."""
    with connected(ps=1, worker=10) as cluster:
        figures = run(cluster, Options(steps=100))
    assert figures["rounds"] == 100
    assert 0.85 < figures["fedavg_accuracy"] < figures["diloco_accuracy"] - 0.01
    assert figures["diloco_accuracy"] > 0.94
    assert figures["diloco_loss"] < figures["fedavg_loss"] / 2


@pytest.mark.nightly
@pytest.mark.procs
def test_the_command_prints_one_line_of_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "federated", "--steps", "2", "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert (figures["example"], figures["rounds"]) == ("federated", 2)
    assert {"fedavg_accuracy", "diloco_accuracy"} <= set(figures)
