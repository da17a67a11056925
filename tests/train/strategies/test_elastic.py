"""Options of elastic training: what cannot be is refused in words."""

from typing import Any

import pytest

import jgraph as jg
from jgraph.errors import ConfigError, RescaleError
from jgraph.launch.local.cluster import LocalCluster


@pytest.mark.bad_input_row(27)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ps": (0, 2)}, r"for example ps=\(1, 4\)"),
        ({"ps": 2}, r"for example ps=\(1, 4\)"),
        ({"ps": (1, None)}, r"for example ps=\(1, 4\)"),
        ({"ps": (1.0, 2)}, r"for example ps=\(1, 4\)"),
        ({"ps": (3, 1)}, r"write ps=\(1, 3\)"),
        ({"ps": (1, 65)}, r"write ps=\(1, 64\)"),
        ({"ps": (1, 2), "vshards_per_ps": 0}, "whole number, 1 or more"),
        ({"workers": (3, 1)}, "the least is more than the most"),
        ({"workers": (0, 2)}, "whole numbers, 1 or more"),
        ({"workers": (1.5, 2)}, "whole numbers, 1 or more"),
        ({"workers": (1, 2.0)}, "whole numbers, 1 or more"),
        ({"workers": (True, 2)}, "whole numbers, 1 or more"),
        ({"workers": 4}, r"for example workers=\(1, 16\)"),
        ({"workers": (1, 2, 3)}, r"for example workers=\(1, 16\)"),
        ({"wait_s": 0}, "above 0"),
        ({"wait_s": "long"}, "above 0"),
    ],
)
def test_what_no_run_can_have_is_refused(options: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        jg.Elastic(**options)


@pytest.mark.bad_input_row(27)
def test_only_an_elastic_is_one() -> None:
    with pytest.raises(ConfigError, match=r"elastic=jg\.Elastic"):
        jg.AsyncPS(elastic=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="none would be left to wait for"):
        jg.SyncPS(backup_workers=1, elastic=jg.Elastic())


@pytest.mark.bad_input_row(27)
@pytest.mark.procs
def test_a_local_cluster_keeps_its_workers_unless_it_is_elastic() -> None:
    with LocalCluster(ps=1, workers=1) as cluster:
        for workers in (2, "+1"):
            with pytest.raises(RescaleError, match="elastic=True"):
                cluster.scale(workers=workers)
        with pytest.raises(RescaleError, match="elastic=True"):
            cluster.scale(ps=2)
        assert cluster.tasks("worker") == ["/job:worker/task:0"]
