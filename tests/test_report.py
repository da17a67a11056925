"""Benchmarks' results become a part of their page."""

import json
from pathlib import Path
from typing import Any

from benchmarks import measure, report


def compared(workers: int, transport: str, ratio: float) -> dict[str, Any]:
    rate = measure.spread("steps_per_s", [100 * ratio])
    peer = measure.spread("peer_steps_per_s", [100])
    what = {"benchmark": "compare", "kind": "dense", "mb": 8.0, "workers": workers}
    ratios = measure.ratio("ratio", [ratio], [1.0])
    sides = {"transport": transport, "beside": "tensorflow_ps"}
    return {**what, **sides, **rate, **peer, **ratios}


def test_report_replaces_its_part_of_the_readme_and_draws(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    lines = [
        compared(4, "auto", 1.5),  # an earlier run of the same
        compared(4, "auto", 2.5),
        compared(4, "grpc", 0.5),
        compared(4, "network", 1.75),  # the same by its newer name
        {**compared(4, "network", 1.25), "tls": True},
        compared(8, "network", 1.125),
        {**compared(4, "auto", 2.25), "mode": "sync"},
        {**compared(4, "auto", 3.5), "beside": "ray_ps"},
        {"benchmark": "memory", "ps_peak_mb": 300.5, "steps": 2},
        {"benchmark": "a_new_one", "kind": "bag", **measure.spread("figure", [7])},
    ]
    results = tmp_path / "one.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.main(["--readme", str(readme), str(results)])
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    peer = "TensorFlow's ps | 100 (100 to 100)"
    ratios = "2.50 (2.50 to 2.50) of 2.0 | 1.75 (1.75 to 1.75) of 1.5 | 1.25"
    assert "| steps/s | beside | its steps/s | one host | between hosts |" in text
    assert f"| dense 8 MB | 4 | 250 (250 to 250) | {peer} | {ratios}" in text
    assert "| sync dense 8 MB | 4 | 225 (225 to 225) |" in text
    assert "|  | 1.12 (1.12 to 1.12) of 1.5 |  |" in text
    assert "Ray's actors | 100 (100 to 100) | 3.50 (3.50 to 3.50) |  |" in text
    assert "| 300.5 |" in text
    assert "### a new one" in text
    assert "| figure | 7 (7 to 7) |" in text
    assert sorted(p.name for p in (tmp_path / "results").iterdir()) == [
        "ratios.png",
        "workers.png",
    ]
    report.main(["--readme", str(readme), str(results)])
    assert readme.read_text() == text


def test_steps_over_workers_are_a_table_and_a_picture(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"{report.BEGIN}\n{report.END}\n")
    what = {"benchmark": "curves", "mb": 4, "wait_ms": 50, "ps": 1}
    rate = measure.spread("steps_per_s", [20])
    lines = [
        {**what, "kind": "measured", "workers": 1, **rate, "simulated_per_s": 25.0},
        {**what, "kind": "emulated", "workers": 1, **rate, "simulated_per_s": 15.0},
        {**what, "kind": "simulated", "workers": 16, "ps": 2, "simulated_per_s": 250},
    ]
    for line, error in zip(lines, (0.25, -0.25), strict=False):
        line["error"] = error
    results = tmp_path / "one.jsonl"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report.main(["--readme", str(readme), str(results)])
    text = readme.read_text()
    assert "| measured | 50 | 1 + 1 | 20 (20 to 20) | 25.0 | +25% |" in text
    assert "| emulated | 50 | 1 + 1 | 20 (20 to 20) | 15.0 | -25% |" in text
    assert "| simulated | 50 | 2 + 16 |  | 250.0 |  |" in text
    assert "![curves.png](results/curves.png)" in text
    assert (tmp_path / "results" / "curves.png").stat().st_size > 5_000
