"""Grafana's dashboard of a cluster, made from the table of metrics."""

from typing import Any, Final

from jgraph.dashboard.metrics import METRICS

_PANELS: Final = (
    ("Steps per second", "jgraph_run_steps_per_second", "{{run}}", "none"),
    ("Newest values of metrics", "jgraph_run_metric", "{{run}} {{name}}", "none"),
    ("Tasks that answer", "jgraph_task_up", "{{task}}", "none"),
    ("Alarms", "jgraph_alarm", "{{level}} {{id}}", "none"),
    ("Cores", "jgraph_task_cpu_seconds_total", "{{task}} {{kind}}", "none"),
    ("Memory", "jgraph_task_resident_memory_bytes", "{{task}}", "bytes"),
    ("Sent bytes", "jgraph_transport_sent_bytes_total", "{{task}} {{peer}}", "Bps"),
    ("Calls", "jgraph_calls_total", "{{task}} {{method}}", "ops"),
    ("Calls that failed", "jgraph_call_errors_total", "{{task}} {{method}}", "ops"),
    ("Steps that wait", "jgraph_gate_waiting_steps", "{{task}}", "none"),
    ("Step times", "jgraph_run_worker_step_seconds", "{{worker}} {{quantile}}", "s"),
    ("Parts of a step", "jgraph_run_part_seconds", "{{worker}} {{part}}", "s"),
    ("Age of the newest checkpoint", "jgraph_checkpoint_last_success_time_seconds",
     "{{task}}", "s"),
    ("Rows given up", "jgraph_hash_table_evicted_total", "{{table}}", "ops"),
)  # fmt: skip
_SOURCE: Final = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 12, 8


def dashboard() -> dict[str, Any]:
    """Returns what Grafana imports, with the data source as a variable."""
    return {
        "uid": "jgraph-cluster",
        "title": "jgraph cluster",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, *panel) for number, panel in enumerate(_PANELS)],
    }


def _panel(
    number: int, title: str, name: str, legend: str, unit: str
) -> dict[str, Any]:
    (metric,) = (one for one in METRICS if one.name == name)
    asked = f"rate({name}[1m])" if metric.is_counter else name
    if name.endswith("_time_seconds"):
        asked = f"time() - {name}"
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": metric.help,
        "datasource": _SOURCE,
        "gridPos": {
            "x": number % 2 * _WIDTH,
            "y": number // 2 * _HEIGHT,
            "w": _WIDTH,
            "h": _HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {
                "refId": "A",
                "datasource": _SOURCE,
                "expr": asked,
                "legendFormat": legend,
            }
        ],
    }
