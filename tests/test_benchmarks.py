"""Every benchmark runs in a tiny configuration and prints what it promises."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import pytest
from flax import nnx

import jgraph
from benchmarks import (
    apart,
    auto,
    collectives,
    compare,
    curves,
    dashboard,
    embedding,
    guarantees,
    imports,
    measure,
    memory,
    models,
    network,
    null_step,
    overhead,
    peer_process,
    pipeline,
    rows,
    scale,
    secure_sum,
    selection,
    serving,
    session,
    simulated,
    split,
    startup,
    straggler,
    tables,
    train,
    transport,
    variables,
)
from benchmarks.models import resnet50

Lines = list[dict[str, Any]]
Bench = Callable[..., Lines]


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs a benchmark's ``main`` and returns the lines that it printed."""

    def run(main: Callable[[Sequence[str]], None], words: str) -> Lines:
        main(words.split())
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


class PeerThatCounts:
    """Takes the orders of a peer, and says that each step took 10 ms."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self.about = {"ray": "0.0"}
        assert arguments[0] == "--kind=dense"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def run(self, workers: int, steps: int) -> measure.Times:
        return [np.arange(steps) / 100 for _ in range(workers)]

    def peaks(self) -> dict[str, float]:
        return {"/job:ps/task:0": 1.0}


def test_rates_count_only_while_all_workers_run() -> None:
    quick, slow = np.arange(0.0, 5.0, 0.5), np.arange(0.0, 100.0, 1.0)
    rates = measure.rates([quick, slow])
    assert rates.steps_per_s == pytest.approx(10 / 3.5)
    assert (rates.p50, rates.p99) == (1000, 1000)


def test_rounds_in_which_workers_do_not_meet_have_no_rate() -> None:
    with pytest.raises(RuntimeError, match="run more steps"):
        measure.rates([np.arange(5.0), 10 + np.arange(5.0)])


def test_rounds_are_made_longer_until_workers_meet() -> None:
    asked = []

    def run(workers: int, steps: int) -> measure.Times:
        asked.append(steps)
        ends = [np.arange(float(steps)) for _ in range(workers)]
        ends[0] = ends[0] + 10  # begins late
        return ends if steps > 5 else [*ends[1:], np.array([])]

    assert measure.rates_of(run, 2, 5).steps_per_s == 2
    assert asked == [5, 10, 20]


def test_turns_are_made_long_enough() -> None:
    asked = []

    def run(steps: int) -> measure.Times:
        asked.append(steps)
        return [np.arange(steps) / 1000]

    assert measure.steps_for(run, 1.0, 6) == pytest.approx(1000, rel=0.01)
    assert asked == [6, 24, 96, 384]


def test_sides_take_turns_and_the_order_changes() -> None:
    calls: list[str] = []

    def way(name: str) -> Callable[[], float]:
        def call() -> float:
            calls.append(name)
            return float(len(calls))

        return call

    found = measure.take_turns({"a": way("a"), "b": way("b")}, 3)
    assert "".join(calls) == "abbaab"
    assert found == {"a": [1, 4, 5], "b": [2, 3, 6]}
    assert measure.ratio("r", found["a"], found["b"])["r"] == pytest.approx(0.833)


@pytest.mark.procs
@pytest.mark.slow
def test_null_step_of_a_sparse_table_sends_rows_only(bench: Bench) -> None:
    words = "--kind sparse --rows 200 --workers 1 --steps 6 --rounds 2"
    (line,) = bench(null_step.main, words)
    assert line["bytes_per_step"] < 200 * 64 * 4
    assert line["steps_per_s_min"] <= line["steps_per_s"] <= line["steps_per_s_max"]
    assert set(line["peak_rss_mb"]) == {"/job:ps/task:0", "/job:worker/task:0"}


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.slow
def test_null_steps_of_two_namespaces_take_the_data_socket() -> None:
    """In a process of its own, which moves to one of them."""
    words = ["--namespaces", "--mb", "1", "--steps", "6", "--rounds", "1"]
    command = [sys.executable, "-m", "benchmarks.null_step", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode and "skipped: two network namespaces need" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    line = json.loads(run.stdout)
    assert line["ways"] == ["data socket (records)"]
    assert line["namespaces"]


@pytest.mark.procs
@pytest.mark.nightly
def test_null_steps_in_step_lose_no_update_of_rows(bench: Bench) -> None:
    words = "--kind sparse --rows 200 --mode sync --workers 2 --steps 6 --rounds 1"
    (line,) = bench(null_step.main, words)
    assert line["mode"] == "sync"
    assert line["bytes_per_step"] < 200 * 64 * 4


@pytest.mark.procs
@pytest.mark.nightly
def test_automatic_placement_is_measured_beside_one_task(bench: Bench) -> None:
    words = "--only mlp towers --width 16 --batch 8 --steps 2 --rounds 1"
    lines = bench(auto.main, words)
    assert [line["example"] for line in lines] == ["mlp", "towers"]
    ways = "auto_predicted", "one_predicted", "split_predicted"
    assert all(line[way] > 0 for line in lines for way in ways)


@pytest.mark.procs
@pytest.mark.nightly
def test_a_pipeline_takes_turns_with_one_process(bench: Bench) -> None:
    words = "--width 16 --layers 2 --batch 8 --microbatches 2 --steps 1 --rounds 1"
    (line,) = bench(pipeline.main, f"{words} --schedule 1f1b")
    assert (line["schedule"], line["workers"], line["bubble"]) == ("1f1b", 2, 0.333)
    assert line["ratio"] > 0
    assert 0 < line["bubble_measured"] < 1


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="gives processes a core each")
def test_a_cut_by_speed_takes_turns_with_halves_where_a_worker_is_slow(
    bench: Bench,
) -> None:
    words = "--width 16 --layers 4 --batch 8 --microbatches 2 --steps 1 --rounds 1"
    (line,) = bench(pipeline.main, f"{words} --slowed")
    assert line["case"] == "slowed"
    assert (len(line["layers"]), sum(line["layers"])) == (2, 4)
    assert line["gain"] == pytest.approx(line["halves_ms"] / line["ms"], rel=0.2)


@pytest.mark.procs
@pytest.mark.nightly
def test_halves_on_two_workers_take_turns_with_one_process(bench: Bench) -> None:
    words = "--width 256 --batch 64 --layers 2 --steps 2 --rounds 1"
    (line,) = bench(split.main, words)
    assert line["ratio"] == pytest.approx(line["ms"] / line["one_ms"], rel=0.2)
    assert line["transit_ms"] > 0
    assert line["cpu_ms"] > 0


@pytest.mark.procs
@pytest.mark.nightly
def test_two_workers_that_mostly_wait_do_more_than_one(bench: Bench) -> None:
    words = "--workers 1 2 --wait-ms 100 --mb 0.1 --ps 2 --mode sync --steps 6"
    one, two = bench(scale.main, f"{words} --rounds 1")
    assert (one["workers"], two["workers"]) == (1, 2)
    assert one["bytes_per_step"] == pytest.approx(2 * 0.1e6, rel=0.01)
    assert one["steps_per_s"] < 1000 / 100
    assert two["speedup"] > 1.2


@pytest.mark.procs
@pytest.mark.nightly
def test_points_that_were_run_are_simulated_too_and_those_of_more_workers(
    bench: Bench,
) -> None:
    words = "--workers 1 2 --more 16 --mb 0.1 --wait-ms 100 --steps 6 --rounds 1"
    *run, more = bench(curves.main, words)
    kinds = [(line["kind"], line["workers"]) for line in run]
    assert kinds == [(k, n) for k in ("measured", "emulated") for n in (1, 2)]
    for line in run:
        error = line["simulated_per_s"] / line["steps_per_s"] - 1
        assert line["error"] == pytest.approx(error, abs=0.02)
    emulated = run[2:]
    assert all(line["steps_per_s"] < 10 * line["workers"] for line in emulated)
    # A worker waits for 100 ms in each of its steps, wherever it is.
    assert 8 * 16 < more["simulated_per_s"] < 10 * 16
    assert (more["kind"], more["workers"], more["ps"]) == ("simulated", 16, 2)


@pytest.mark.procs
@pytest.mark.nightly
def test_embedding_moves_no_more_than_the_rows_of_its_ids(bench: Bench) -> None:
    words = "--rows 5000 9000 --dim 8 --batch 16 --ids 2 --steps 6 --rounds 1"
    line, larger = bench(embedding.main, words)
    assert (larger["rows"], larger["bytes_per_step"]) == (9000, line["bytes_per_step"])
    assert larger["step_ms_ratio"] > 0
    net = 4 * (16 * 256 + 256 + 256 + 1)
    rows = 4 * 32 * (1 + 8 + 8)
    assert line["bytes_per_step"] == pytest.approx(2 * net + rows, rel=0.01)
    assert line["examples_per_s"] == pytest.approx(16 * line["steps_per_s"], rel=0.1)
    assert set(line["cpu_ms_per_step"]) == {"/job:ps/task:0", "/job:worker/task:0"}
    assert set(line["ps_busy_ms"]) == {"gather", "update", "bytes", "rest"}
    spent = sum(line["ps_busy_ms"].values())
    assert spent == pytest.approx(line["cpu_ms_per_step"]["/job:ps/task:0"], abs=0.05)
    assert 0 < line["ps_busy_share"] < 1


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.slow
def test_comparison_prints_a_line_for_each_peer_that_can_do_the_work(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "Peer", PeerThatCounts)
    words = "--only sparse dense8 --workers 1 --rounds 2 --seconds 0.01 --least 5"
    lines = bench(compare.main, f"{words} --transport auto --peer ray_ps torch_ddp")
    assert [line["beside"] for line in lines] == ["ray_ps", "torch_ddp"]
    for line in lines:
        assert line["peer"] == "ray 0.0"
        assert line["peer_steps_per_s"] == pytest.approx(100)
        assert line["ratio"] == pytest.approx(line["steps_per_s"] / 100, rel=0.01)


@pytest.mark.parametrize("name", models.NAMES)
def test_every_model_has_a_loss_of_its_data(name: str) -> None:
    work = models.get(name)
    data = work.make_data(8)
    assert {len(field) for field in data} == {8}
    loss = nnx.eval_shape(lambda: work.loss_fn(work.make_model(), data))
    assert (loss.shape, loss.dtype) == ((), "float32")


def test_data_of_a_model_can_come_from_a_file(tmp_path: Path) -> None:
    census = "39, Private, 77516, B, 13, N, A, O, W, M, 2174, 0, 40, US, {}\n"
    heading = ",".join("abcdefghijklmno")
    rows = tmp_path / "census.csv"
    rows.write_text(heading + "\n" + census.format("<=50K") + census.format(">50K."))
    words, numbers, label = models.get("wide_deep").make_data(10, rows)
    assert words.shape == (2, 8)
    assert numbers[0, 0] == pytest.approx(np.log(40))
    assert label.tolist() == [0, 1]

    text = tmp_path / "text.txt"
    text.write_text("ab" * 65)
    (pieces,) = models.get("lstm").make_data(10, text)
    assert pieces.shape == (2, 65)
    assert pieces[1, :2].tolist() == [ord("b"), ord("a")]

    np.savez(tmp_path / "x.npz", x=np.ones((3, 784)), y=np.arange(3))
    x, y = models.get("cnn").make_data(2, tmp_path / "x.npz")
    assert (x.shape, y.tolist()) == ((2, 28, 28, 1), [0, 1])


@pytest.mark.parametrize("chosen", [selection.SHORT, selection.ALL])
def test_selection_runs_each_comparison_once_with_the_peers_there_are(
    chosen: selection.Selection,
) -> None:
    compared = [w for w in chosen.commands(["ray_ps", "torch_ddp"]) if "peer" in w]
    assert len(compared) == 1
    assert compared[0].endswith("--peer ray_ps torch_ddp")
    assert not any("--peer" in words for words in chosen.commands([]))


@pytest.mark.parametrize("peers", [[], list(peer_process.PEERS)])
@pytest.mark.parametrize("chosen", [selection.SHORT, selection.ALL])
def test_commands_of_a_selection_are_understood(
    chosen: selection.Selection, peers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class UnderstoodError(Exception):
        """The words are right; nothing shall run."""

    def parse(parser: argparse.ArgumentParser, args: Sequence[str]) -> None:
        _, unknown = parser.parse_known_args(args)
        assert not unknown
        raise UnderstoodError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    tables = [*network.ROWS, *collectives.TABLE]
    of_rows = [command for row in tables for command in row.commands]
    for words in [*chosen.commands(peers), *of_rows]:
        name, *options = words.split()
        module = importlib.import_module(f"benchmarks.{name}")
        with pytest.raises(UnderstoodError):
            module.main(options)


def test_a_row_has_the_figures_of_its_lines_or_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: str, lines: list[rows.Line]) -> bool:
        way, _, ratio = command.partition(" ")
        if ratio:
            lines.append({"way": way, "ratio": float(ratio)})
        return bool(ratio)

    monkeypatch.setattr(rows, "run", run)
    table = [
        rows.Row(["post 0.5", "tcp 1.0", "post 2.0"], rows.each("ratio", way="post")),
        rows.Row(["post 0.5", "broken"], rows.each("ratio")),
        rows.Row(["post 3.0"], rows.each("ratio"), "ms"),
    ]
    rows.print_rows(table)
    rows.print_rows(table, only=[3])
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"row": 1, "value": [0.5, 2.0], "unit": "x"},
        {"row": 2, "value": None, "unit": "x", "failed": ["broken"]},
        {"row": 3, "value": 3.0, "unit": "ms"},
        {"row": 3, "value": 3.0, "unit": "ms"},
    ]


@pytest.mark.procs
@pytest.mark.nightly
def test_selection_keeps_what_is_printed_and_names_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "day.jsonl"
    failing = "imports --repeats none"
    assert selection.select([failing, "report --help"], results) == [failing]
    printed = capsys.readouterr().out
    assert "Tables and plots" in printed
    assert results.read_text() == printed


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.parametrize("option", ["", "--tls"])
def test_ways_of_the_transport_take_turns(bench: Bench, option: str) -> None:
    lines = bench(transport.main, f"--largest 64 {option}")
    wanted = {"tls", "call_tls"} if option else {"shm"}
    assert {line["way"] for line in lines} >= {"post", "call", "tcp", *wanted}
    assert "\n| post | 64 |" in tables.TABLES[lines[0]["benchmark"]].text(lines)


@pytest.mark.procs
@pytest.mark.nightly
def test_training_on_a_cluster_stands_beside_plain_jax(bench: Bench) -> None:
    words = "--model mlp --ps 1 --workers 1 --baseline --steps 5 --rounds 1"
    (line,) = bench(train.main, f"{words} --transport network")
    assert line["ratio_to_plain_jax"] > 0
    assert line["examples_per_s"] == pytest.approx(line["steps_per_s"] * 128, rel=0.1)


@pytest.mark.slow
def test_training_here_stands_beside_a_loop_by_hand(bench: Bench) -> None:
    (line,) = bench(train.main, "--model mlp --steps 3 --rounds 1")
    assert line["ratio_min"] <= line["ratio"] <= line["ratio_max"]


@pytest.mark.procs
@pytest.mark.nightly
def test_overhead_has_every_part(bench: Bench) -> None:
    (line,) = bench(overhead.main, "--steps 5 --rounds 1")
    assert min(line[f"{p}_us"] for p in ("jit", "one_task", "step", "run")) > 0
    assert set(line["cpu_us"]) == {"/job:ps/task:0", "/job:worker/task:0"}


@pytest.mark.procs
@pytest.mark.nightly
def test_overhead_says_what_a_further_variable_costs(bench: Bench) -> None:
    words = "--variables 40 4 --steps 20 --rounds 1"
    (line,) = bench(overhead.main, words)
    slope = (line["step_us_40"] - line["step_us_4"]) / 36
    assert line["variable_us"] == pytest.approx(slope, abs=0.02)
    (row,) = bench(overhead.main, words + " --rows")
    assert (row["row"], row["unit"]) == (1, "us per further variable of 1 kB")


@pytest.mark.procs
@pytest.mark.nightly
def test_steps_of_many_variables_stand_beside_plain_jax(bench: Bench) -> None:
    (line,) = bench(variables.main, "--layers 1 --steps 5 --rounds 1 --ps 1")
    assert (line["layers"], line["variables"]) == (1, 53)
    for way in ("local", "cluster"):
        ratio = line[f"{way}_steps_per_s"] / line["plain_steps_per_s"]
        assert line[f"{way}_ratio"] == pytest.approx(ratio, rel=0.1)


@pytest.mark.procs
def test_an_update_of_many_workers_is_simulated_beside_that_of_one(
    bench: Bench,
) -> None:
    (line,) = bench(simulated.main, "--rows --only 4")
    one_ms, many_ms = line["ms"]
    assert line["value"] == pytest.approx(many_ms / one_ms, abs=0.01)
    # A hundred workers cost the first ps more, and by far not a hundred times as much.
    assert 1 < line["value"] < 10


@pytest.mark.nightly
def test_session_calls_have_every_way(bench: Bench) -> None:
    (line,) = bench(session.main, "--steps 10 --rounds 1")
    ways = ("jit", "run", "callable", "remote", "remote_two", "segment", "segment_jit")
    assert min(line[f"{way}_us"] for way in ways) > 0
    assert line["register_ms"] > 0


@pytest.mark.procs
@pytest.mark.nightly
def test_startup_goes_from_nothing_to_a_step_and_leaves_nothing(bench: Bench) -> None:
    (line,) = bench(startup.main, "--ps 1 --workers 1 --rounds 1")
    assert line["up_to_first_step_s"] > line["first_step_s"] > 0


@pytest.mark.procs
@pytest.mark.nightly
def test_backup_worker_hides_a_slow_one(bench: Bench) -> None:
    words = "--workers 2 --wait-ms 5 --slow-ms 100 --steps 6 --rounds 1"
    (line,) = bench(straggler.main, words)
    assert line["waited_for_ms"] > 100
    assert line["backup_ms"] < line["waited_for_ms"]


@pytest.mark.procs
@pytest.mark.nightly
@pytest.mark.parametrize("model", ["dense", "wide_deep"])
def test_steps_with_dense_parameters_on_workers_and_on_ps_take_turns(
    bench: Bench, model: str
) -> None:
    words = f"--model {model} --mb 0.2 --steps 3 --rounds 2"
    (line,) = bench(collectives.main, words)
    assert min(line["ps_ms"], line["workers_ms"], line["ps_over_workers"]) > 0


@pytest.mark.procs
@pytest.mark.nightly
def test_idle_workers_are_connected_and_cost_a_ps_little(bench: Bench) -> None:
    (line,) = bench(scale.main, "--idle --connections 4 --seconds 1")
    assert (line["workers"], line["idle"]) == (4, True)
    assert line["files_of_ps"] > 4 * 2  # there is a connection each way
    assert line["percent_of_a_core"] < 50


@pytest.mark.procs
@pytest.mark.nightly
def test_memory_counts_the_bytes_of_a_ps(bench: Bench) -> None:
    (line,) = bench(memory.main, "--width 8 --steps 2")
    assert line["variables_mb"] == 0.1  # 6,442 parameters, each 4 bytes and thrice
    assert 0 < line["ps_peak_share_mb"] < line["ps_peak_mb"]


@pytest.mark.procs
@pytest.mark.nightly
def test_imports_are_measured_in_fresh_processes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"empty": "pass", "reference": "import json", "jgraph": "import jgraph"}
    monkeypatch.setattr(imports, "STATEMENTS", few)
    lines = bench(imports.main, "--repeats 1")
    assert [line["what"] for line in lines] == list(few.values())


@pytest.mark.procs
@pytest.mark.nightly
def test_guarantees_are_cut_out_of_one_of_two_clusters(bench: Bench) -> None:
    (line,) = bench(guarantees.main, "--workers 1 --rounds 1 --seconds 0.2")
    assert line["transport"] == "network"
    assert line["steps_per_s"] > 0
    assert line["of_without"] > 0


def test_what_is_cut_out_to_measure_guarantees_is_there() -> None:
    package = Path(jgraph.__file__).parent
    for name, code, _ in guarantees.CUTS:
        assert (package / name).read_text(encoding="utf-8").count(code) == 1


@pytest.mark.nightly  # smaller: tests/serving
@pytest.mark.slow
@pytest.mark.procs
def test_a_model_server_is_compared_with_an_echo(bench: Bench) -> None:
    tiny = "--seconds 0.2 --rounds 1 --megabytes 1 --versions 2 --requests 200 --rows"
    lines = bench(serving.main, tiny)
    assert [line["row"] for line in lines if "row" in line] == [*range(1, 9)]
    swaps = [line for line in lines if line.get("what", "").startswith("swap")]
    assert [swap["failed"] for swap in swaps] == [0, 0]
    assert all(swap["asked"] > 0 for swap in swaps)


def test_a_dashboard_is_measured_by_what_it_holds(bench: Bench) -> None:
    (line,) = bench(dashboard.main, "--part board --simulated 20 --tasks 4")
    assert (line["facts"], line["tasks"]) == (120, 4)
    assert line["board_mb"] >= line["halfway_mb"] >= 0
    assert line["fact_us"] > 0


@pytest.mark.procs
@pytest.mark.nightly
def test_a_run_is_watched_in_turns_with_nobody_who_watches(bench: Bench) -> None:
    words = "--part cost --alternations 2 --window 1.7 --dashboards 2"
    (line,) = bench(dashboard.main, words)
    assert (line["viewers"], line["alternations"], line["dashboards"]) == (3, 2, 2)
    assert 0 < line["ratio_low"] <= line["ratio"] <= line["ratio_high"]
    assert 0 < line["ratio_control_low"] <= line["ratio_control_high"]
    assert line["board_cores"] > line["viewers_cores"] >= 0
    assert set(line["cores_more_at_rest"]) == set(line["task_cores"])
    assert line["steps_per_s"] > 10
    assert line["rss_mb"] > 20


@pytest.mark.nightly
def test_resnet_50_has_as_many_parameters_as_published() -> None:
    model = nnx.eval_shape(lambda: resnet50.ResNet50(rngs=nnx.Rngs(0)))
    parameters = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert sum(math.prod(one.shape) for one in parameters) == 25_557_032


@pytest.mark.nightly
def test_epsilon_of_digits_is_that_of_the_accountant(bench: Bench) -> None:
    (line,) = bench(apart.main, "--kind privacy --steps 3 --rounds 1")
    assert 0 < line["epsilon"] < 8
    assert line["epsilon_off"] <= 1e-9
    assert line["accuracy"] > 0.05


@pytest.mark.procs
@pytest.mark.nightly
def test_clients_with_two_digits_each_train_by_both_ways(bench: Bench) -> None:
    (line,) = bench(apart.main, "--kind digits --steps 1")
    assert {"fedavg_accuracy", "diloco_accuracy"} <= set(line)


def test_a_secure_sum_is_exact(bench: Bench) -> None:
    lines = bench(secure_sum.main, "--members 12 --nbytes 4000 --rounds 2")
    assert [line["in the sum"] for line in lines] == [11, 11]
    assert all(line["exact"] for line in lines)
    assert lines[0]["member_s"] > 0
