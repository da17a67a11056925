"""Simulated clusters: the limits that have a closed form, the ledger, the seed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jgraph as jg
from jgraph.coordination.sync.read_line import STUCK_S
from jgraph.errors import ConfigError
from jgraph.plan.auto.cost_model import Link
from jgraph.plan.auto.work import Work
from jgraph.plan.traffic import Piece, StepTraffic
from jgraph.testing import Computing, Costs, dense_step, load_costs, simulate
from jgraph.testing.scale.costs import MEASURED, save_costs

COSTS = load_costs()
NOTHING: Any = {name: 0.0 for name in COSTS.seconds() if "crowd" not in name}
FREE = replace(COSTS, **NOTHING, link=Link(0.0, 1e9))
"""Nothing costs CPU or waits; only bytes take time."""


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_of_one_worker_takes_the_sum_of_its_costs(mode: Any) -> None:
    nbytes, c = 1_000_000, replace(COSTS, link=Link(0.0, 1e9))
    found = simulate(
        dense_step(nbytes, variables=1),
        workers=1,
        ps=1,
        mode=mode,
        steps=6,
        computing=Computing(0.5),
        costs=c,
    )
    worker = c.worker_step_s + c.worker_ps_s + 2 * nbytes * c.worker_byte_s
    ps = {
        "async": c.push_s + 2 * nbytes * c.push_byte_s,
        "sync": c.contribution_s
        + 2 * nbytes * c.contribution_byte_s
        + c.update_s
        + nbytes * c.update_byte_s
        + c.gate_event_s
        + c.step_id_s,
    }
    expected = 0.5 + worker + ps[mode] + 2 * nbytes / 1e9
    assert found.step_s["p50"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_values_travel_while_the_pieces_before_and_after_them_compute(
    mode: Any,
) -> None:
    """Only half of what is read comes before computing, and half of the rest after."""
    half = Piece(4_000_000, Work(flops=1e9), 4_000_000)
    step = replace(dense_step(8_000_000), pieces=(half, half))
    found = simulate(
        step,
        workers=1,
        ps=1,
        mode=mode,
        steps=4,
        computing=Computing(0.5),
        costs=FREE,
    )
    assert found.step_s["p50"] == pytest.approx(0.004 + 0.5 + 0.004, rel=1e-3)
    for way in ("to ps", "from ps"):
        assert found.ledger[f"sent {way}"] == found.ledger[f"arrived {way}"]


@pytest.mark.parametrize("ps", [1, 4])
def test_updates_take_as_long_as_the_bytes_of_all_workers_on_the_network_of_the_ps(
    ps: int,
) -> None:
    workers, nbytes, rate = 32, 8_000_000, 1e9
    found = simulate(dense_step(nbytes), workers=workers, ps=ps, costs=FREE, steps=5)
    there_and_back = 2 * workers * nbytes / (ps * rate)
    assert found.step_s["p50"] == pytest.approx(there_and_back, rel=0.01)
    assert found.busy["network of a ps"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("ps", [1, 4])
def test_of_workers_that_read_in_turn_only_the_last_write_when_nobody_reads(
    ps: int,
) -> None:
    """As many read at a time as fill the network of the ps: the last ones write alone.

    All ps take them in one order, so that a worker has all that it reads at once.
    """
    workers, nbytes, rate = 32, 8_000_000, 1e9
    found = simulate(
        dense_step(nbytes),
        workers=workers,
        ps=ps,
        costs=FREE,
        steps=5,
        max_readers=ps,
    )
    there, back = workers * nbytes / (ps * rate), nbytes / rate
    assert found.step_s["p50"] == pytest.approx(there + back, rel=0.02)
    assert found.seconds < STUCK_S  # what is looked at after that is not of it


def test_asynchronous_steps_share_the_network_of_the_ps() -> None:
    workers, nbytes, rate = 32, 8_000_000, 1e9
    found = simulate(
        dense_step(nbytes), workers=workers, ps=2, mode="async", costs=FREE, steps=50
    )
    # They begin together and stay so: one direction is full while the other is empty.
    assert found.steps_per_s == pytest.approx(2 * rate / (2 * nbytes), rel=0.01)


def test_the_network_of_a_worker_bounds_what_many_ps_send_it() -> None:
    found = simulate(dense_step(8_000_000), workers=1, ps=8, costs=FREE, steps=4)
    assert found.step_s["p50"] == pytest.approx(2 * 8e6 / 1e9, rel=0.01)


def run(seed: int, mode: Any, **options: Any) -> Any:
    return simulate(
        dense_step(100_000),
        workers=12,
        ps=3,
        mode=mode,
        computing=Computing(0.05, sigma=0.2, straggling=0.1, delay_s=0.1),
        seed=seed,
        **options,
    )


KINDS: list[tuple[Any, Any]] = [("sync", {}), ("sync", {"backup_workers": 3})]
KINDS += [("async", {}), ("sync", {"backup_workers": 3, "max_readers": 2})]
KINDS += [("async", {"max_staleness": 8})]
KINDS += [("sync", {"cores": 2.0}), ("async", {"cores": 2.0})]


@pytest.mark.parametrize(("mode", "options"), KINDS)
def test_same_seed_is_the_same_run_and_another_seed_another(
    mode: Any, options: Any
) -> None:
    first = run(3, mode, **options)
    assert first.trace == run(3, mode, **options).trace
    assert first.trace != run(4, mode, **options).trace


@pytest.mark.parametrize(("mode", "options"), KINDS)
def test_every_byte_arrives_and_every_batch_counts_once(
    mode: Any, options: Any
) -> None:
    ledger = run(5, mode, **options).ledger
    for way in ("to ps", "from ps"):
        assert ledger[f"sent {way}"] == ledger[f"arrived {way}"] > 0
    wanted = 12 - options.get("backup_workers", 0)
    assert ledger["counted"] == 20 * (wanted if mode == "sync" else 12)
    assert ledger["computed"] >= ledger["counted"]
    assert ledger.get("again", 0) == 0


def test_backup_workers_leave_out_stragglers() -> None:
    plain, backed = run(7, "sync"), run(7, "sync", backup_workers=3)
    assert backed.step_s["p50"] < 0.8 * plain.step_s["p50"]
    assert backed.dropped > 0
    assert plain.dropped == 0


def test_a_ps_tells_of_workers_that_come_one_after_the_other_in_few_frames() -> None:
    """However they are spread: a frame for each of them would fill the first ps."""
    found = simulate(
        dense_step(1_000),
        workers=200,
        ps=4,
        steps=6,
        computing=Computing(1.0, sigma=0.1),
        costs=FREE,
    )
    spread_s = max(found.trace[i] - found.trace[i - 1] for i in range(1, 6))
    # The first update is told one by one: a gate cannot know how many it takes.
    later = (found.ledger["frames of contributions"] - 200 * 3) / 5
    assert later <= 3 * (spread_s / 0.02 + 2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_tasks_of_one_host_take_the_cores_that_there_are(mode: Any) -> None:
    """Of two cores they make no more steps than the CPU time of all allows."""

    def rate(workers: int, cores: float) -> float:
        return simulate(
            dense_step(1_000_000), workers=workers, ps=1, mode=mode, cores=cores
        ).steps_per_s

    cpu_s = COSTS.worker_step_s + COSTS.worker_ps_s + 2e6 * COSTS.worker_byte_s
    cpu_s += COSTS.contribution_s if mode == "sync" else COSTS.push_s
    assert rate(8, 100) > 1.5 * rate(1, 100)
    assert rate(8, 1) < 1 / cpu_s
    assert rate(8, 2) == pytest.approx(2 * rate(8, 1), rel=0.3)


def test_who_deals_batches_takes_its_part_of_the_cores_of_one_host() -> None:
    def rate(dispatch_event_s: float) -> float:
        return simulate(
            dense_step(4, variables=1),
            workers=4,
            ps=1,
            mode="async",
            steps=200,
            computing=Computing(0.0),
            costs=replace(FREE, worker_step_s=0.1, dispatch_event_s=dispatch_event_s),
            cores=1,
        ).steps_per_s

    assert rate(0.0) == pytest.approx(10, rel=0.1)
    assert rate(0.05) < 8


@pytest.mark.parametrize("workers", [1, 2, 6])
def test_workers_of_one_host_wait_for_the_ps_as_a_closed_queue_says(
    workers: int,
) -> None:
    """Mean value analysis: a step finds at the ps what one worker less leaves there.

    Steps that were all as long as each other would never meet there, of two workers.
    """
    costs = replace(FREE, worker_step_s=0.5, push_s=0.4)
    found = simulate(
        dense_step(4, variables=1),
        workers=workers,
        ps=1,
        mode="async",
        steps=12_000 // workers,
        computing=Computing(0.0),
        costs=costs,
        cores=workers + 1,
    )
    there, rate = 0.0, 0.0
    for count in range(1, workers + 1):
        at_ps_s = costs.push_s * (1 + there)
        rate = count / (costs.worker_step_s + at_ps_s)
        there = rate * at_ps_s
    assert found.steps_per_s == pytest.approx(rate, rel=0.02)
    assert found.busy["first ps"] == pytest.approx(rate * costs.push_s, rel=0.02)


def test_bytes_cost_the_more_the_more_tasks_wait_for_a_core_of_their_host() -> None:
    """As measured with four workers and a ps on two cores; one each costs nothing."""
    costs = replace(COSTS, cores=2, crowding_bytes=1.6, crowding_async=1.0)
    none = Computing(0.0)

    def times(workers: int) -> float:
        found = simulate(
            dense_step(1_000),
            workers=workers,
            ps=1,
            mode="async",
            steps=2,
            computing=none,
            costs=costs,
            cores=2,
        )
        assert found.costs.push_s == costs.push_s
        return found.costs.push_byte_s / costs.push_byte_s

    assert times(1) == 1.0
    assert times(4) == pytest.approx(1.6)
    assert times(2) == pytest.approx(1 + 0.6 * (1 / 3) / (3 / 5))
    assert times(8) == pytest.approx(1 + 0.6 * (7 / 9) / (3 / 5))
    assert times(300) < 1 + 0.6 / (3 / 5), "no more than where all others wait"


def test_more_ps_than_variables_is_told() -> None:
    found = simulate(dense_step(100, variables=2), workers=1, ps=5, steps=2)
    assert found.ps == 2
    said = "3 of 5 ps have no variable and do nothing: the plan has 2 variables; take 2"
    assert said in str(found)
    assert "jg.min_max_variable_partitioner(5)" in str(found)


def test_large_variables_are_cut_so_that_all_ps_have_a_part() -> None:
    step = dense_step(8_000_000, variables=2)
    found = simulate(step, workers=1, ps=5, steps=2, sharded=True)
    assert found.ps == 5
    assert "do nothing" not in str(found)
    assert found.step_s["p50"] < simulate(step, workers=1, ps=5, steps=2).step_s["p50"]
    small = simulate(dense_step(100, 2), workers=1, ps=5, steps=2, sharded=True)
    assert small.ps == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_fewest_ps_are_taken_that_are_nearly_as_fast_as_any(mode: Any) -> None:
    options: Any = {
        "workers": 16,
        "mode": mode,
        "costs": FREE,
        "computing": Computing(1.0),
        "steps": 6,
    }
    step = dense_step(200_000_000, variables=96)
    found = simulate(step, **options)
    rates = {n: simulate(step, ps=n, **options).steps_per_s for n in (1, 2, 4, 8, 96)}
    assert f"{found.ps} ps are the fewest" in str(found)
    assert found.steps_per_s > max(rates.values()) / 1.06
    fewer = simulate(step, ps=found.ps // 2, **options)
    assert fewer.steps_per_s < found.steps_per_s


def test_no_more_ps_are_taken_than_have_a_part() -> None:
    found = simulate(dense_step(9_000_000_000, variables=3), workers=50, costs=FREE)
    assert found.ps == 3


def test_what_is_shown_says_that_it_is_simulated_of_what_and_what_is_left_out() -> None:
    text = str(simulate(dense_step(100), workers=2, ps=1, steps=2))
    assert text.startswith("simulated: sync, 2 workers, 1 ps")
    assert f"measured {COSTS.date} on {COSTS.machine}" in text
    for name in COSTS.seconds():
        assert name in text
    assert "not modelled: packets that are lost" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers is 0; give 1 or more"),
        ({"ps": 0}, "ps is 0; give 1 or more"),
        ({"steps": 0}, "steps is 0; give 1 or more"),
        ({"mode": "both"}, "mode is 'both'; give 'sync' or 'async'"),
        ({"backup_workers": 2}, "at least one worker is no backup"),
        ({"mode": "async", "backup_workers": 1}, "waits for nobody"),
        ({"max_staleness": 1}, "of mode 'async'"),
        ({"max_readers": 0}, "max_readers is 0"),
        ({"max_readers": 1, "mode": "async"}, "of mode 'sync'"),
        ({"cores": 0.0}, "cores is 0.0; give a number above 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(options: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulate(dense_step(100), **{"workers": 2, "ps": 1, **options})


def test_a_plan_without_ps_is_refused() -> None:
    step = dense_step(100)
    with pytest.raises(ConfigError, match="sends nothing between a ps and a worker"):
        simulate(replace(step, messages=()), workers=2, ps=1)


@pytest.mark.parametrize("wrong", [{"seconds": -1.0}, {"straggling": 2.0}])
def test_times_below_zero_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="computing takes seconds from 0 on"):
        Computing(**wrong)


def changed(path: Path, **of_network: Any) -> Path:
    values = json.loads(MEASURED.read_text())
    row = values["transports"]["network"]
    for name, value in of_network.items():
        if value is None:
            del row[name]
        else:
            row[name] = value
    path.write_text(json.dumps(values))
    return path


def test_costs_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match=r"push_s is -1.*benchmarks calibrate"):
        load_costs(changed(path, push_s=-1.0))
    with pytest.raises(ConfigError, match="have no link, so bytes would take no time"):
        load_costs(changed(path, link=None))
    with pytest.raises(ConfigError, match="has no costs"):
        load_costs(changed(path, cores=None))
    with pytest.raises(ConfigError, match="no costs of the transport 'pigeon'"):
        load_costs(MEASURED, "pigeon")
    path.write_text('{"format": 9}')
    with pytest.raises(ConfigError, match="have format 9, and this jgraph reads 1"):
        load_costs(path)
    with pytest.raises(ConfigError, match="cannot read costs from"):
        load_costs(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write the costs to"):
        save_costs({}, tmp_path)


def test_costs_come_back_as_they_were_written(tmp_path: Path) -> None:
    save_costs({"network": COSTS}, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == COSTS


def test_the_simulator_is_found_where_the_pages_say() -> None:
    assert jg.testing.simulate is simulate
    assert jg.testing.Costs is Costs
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        jg.testing.__getattr__("simulat")


def test_a_thousand_workers_and_sixteen_ps_are_simulated_in_seconds() -> None:
    found = simulate(
        dense_step(4_000_000), workers=1_000, ps=16, steps=3, computing=Computing(1.0)
    )
    assert found.ledger["counted"] == 3_000


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    step = dense_step(1_000)
    step.save(tmp_path / "plan.json")
    assert StepTraffic.load(tmp_path / "plan.json") == step


ONE_BYTE = json.dumps(dense_step(64).to_dict())
NEGATIVE = ONE_BYTE.replace('"nbytes": 1}', '"nbytes": -1}')


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "cannot read a plan from"),
        ("[]", "this is no plan"),
        ('{"format": 7}', "has format 7, and this jgraph reads 1"),
        ('{"format": 1}', r"this is no plan \(KeyError: 'name'\)"),
        (NEGATIVE, r"the plan has Held\(.*nbytes=-1\), and bytes are 0 or more"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(
    text: str, sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        StepTraffic.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="cannot write the plan"):
        dense_step(100).save(tmp_path)
