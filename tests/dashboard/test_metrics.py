"""Names of metrics: by the conventions of Prometheus, and the same everywhere."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jgraph.dashboard.grafana import dashboard
from jgraph.dashboard.metrics import METRICS, exposition
from tests.support.cli import run
from tests.support.dashboards import Imagined, scene

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_follows_the_conventions(metric: Any) -> None:
    assert re.fullmatch(r"jgraph_[a-z]+(_[a-z]+)*", metric.name)
    assert metric.help.endswith(".")
    assert not re.search(r"_(ms|milliseconds|kb|megabytes|percent)(_|$)", metric.name)
    assert all(re.fullmatch(r"[a-z]+", label) for label in metric.labels)


def test_no_two_metrics_have_one_name() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_grafana_asks_for_names_and_labels_that_there_are() -> None:
    known = {metric.name: metric for metric in METRICS}
    panels = dashboard()["panels"]
    assert len(panels) > 10
    for panel in panels:
        (target,) = panel["targets"]
        (name,) = re.findall(r"jgraph_\w+", target["expr"])
        labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
        assert set(labels) <= set(known[name].labels), panel["title"]
        assert ("rate(" in target["expr"]) == known[name].is_counter


def test_the_guide_lists_every_name_and_no_other() -> None:
    page = (ROOT / "docs/dashboard.md").read_text("utf-8")
    listed = re.findall(r"^\| `(jgraph_\w+)` \|", page, re.M)
    assert listed == [metric.name for metric in METRICS]


def test_a_scrape_of_a_large_cluster_is_small() -> None:
    text, kind = exposition(lambda: Imagined(scene()).view(None))()
    assert kind.startswith("text/plain")
    assert 5_000 < len(text) < 60_000


def test_the_command_writes_what_grafana_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grafana.json"
    code, out, _ = run(capsys, "dashboard", "--grafana", str(path))
    assert (code, str(path) in out) == (0, True)
    assert json.loads(path.read_text()) == dashboard()
