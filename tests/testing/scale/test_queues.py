"""Queues in virtual time: what theory says of them comes out."""

from functools import partial

import pytest

from jgraph.testing.scale.queues import OwnHost, Pipe, SharedHost
from jgraph.testing.virtual_time import Simulation


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_work_that_comes_at_random_waits_as_long_as_an_m_d_1_queue_says(
    load: float,
) -> None:
    sim, service_s, arrivals = Simulation(1), 0.01, 120_000
    ps, waited = OwnHost(sim), []

    def done(asked: float) -> None:
        waited.append(sim.now - asked - service_s)

    def arrive() -> None:
        ps.run(service_s, partial(done, sim.now))
        if len(waited) < arrivals:
            sim.later(sim.chance.expovariate(load / service_s), arrive)

    arrive()
    sim.run()
    expected = load * service_s / (2 * (1 - load))
    assert sum(waited) / len(waited) == pytest.approx(expected, rel=0.02)
    assert ps.busy_s / sim.now == pytest.approx(load, rel=0.02)


def test_work_that_varies_waits_as_long_as_an_m_m_1_queue_says() -> None:
    """Twice as long as work that is always as long as it costs on average."""
    sim, service_s, arrivals, load = Simulation(1), 0.01, 120_000, 0.5
    task = SharedHost(sim, 1, sim.chance).task()
    taken: list[float] = []

    def done(asked: float) -> None:
        taken.append(sim.now - asked)

    def arrive() -> None:
        task.run(service_s, partial(done, sim.now))
        if len(taken) < arrivals:
            sim.later(sim.chance.expovariate(load / service_s), arrive)

    arrive()
    sim.run()
    expected = service_s / (1 - load)
    assert sum(taken) / len(taken) == pytest.approx(expected, rel=0.02)
    assert task.busy_s / sim.now == pytest.approx(load, rel=0.02)


def test_tasks_of_a_host_share_its_cores_and_each_does_one_thing_at_a_time() -> None:
    sim = Simulation(0)
    host = SharedHost(sim, cores=2)
    tasks = [host.task() for _ in range(3)]
    for number, task in enumerate(tasks):
        for piece in range(2):
            task.run(1.0, partial(sim.note, f"{number}.{piece}"))
    sim.run()
    at = {note.split()[1]: float(note.split()[0]) for note in sim.trace}
    assert max(at.values()) == 3.0, "six seconds of work on two cores"
    assert all(at[f"{n}.1"] - at[f"{n}.0"] >= 1.0 for n in range(3))


def test_work_on_a_part_of_a_core_takes_longer() -> None:
    sim = Simulation(0)
    SharedHost(sim, cores=0.5).task().run(1.0, partial(sim.note, "done"))
    sim.run()
    assert sim.trace == ["2.000000 done"]


def test_bytes_share_a_network_and_none_goes_missing() -> None:
    sim = Simulation(3)
    pipe, total = Pipe(sim, bytes_per_s=1e6, most=4e5), 0
    done: list[int] = []

    def send(nbytes: int) -> None:
        pipe.send(nbytes, partial(done.append, nbytes))

    for _ in range(200):
        nbytes = sim.chance.randrange(1, 50_000)
        total += nbytes
        sim.later(sim.chance.random(), partial(send, nbytes))
    sim.run()
    assert sum(done) == pipe.sent == pipe.arrived == total
    assert total / 1e6 <= pipe.busy_s <= sim.now


def test_a_flow_alone_goes_as_fast_as_its_other_end_and_many_as_the_network() -> None:
    sim = Simulation(0)
    pipe = Pipe(sim, bytes_per_s=10.0, most=4.0)
    pipe.send(8.0, partial(sim.note, "alone"))
    sim.run()
    assert sim.trace == ["2.000000 alone"]
    for name in range(5):
        pipe.send(8.0, partial(sim.note, f"{name}"))
    sim.run()
    assert sim.now == pytest.approx(2.0 + 40 / 10)


@pytest.mark.parametrize("rate", [1e9, 1e14])
def test_bytes_arrive_however_late_it_is_and_however_fast_the_network(
    rate: float,
) -> None:
    """Less is left then than moves in the shortest time that there is."""
    sim = Simulation(0)
    pipe = Pipe(sim, bytes_per_s=rate, most=rate)
    for number in range(20):
        sim.at(1e6 + number / 7, partial(pipe.send, 95e6 / 3, lambda: None))
    events = iter(range(1_000))
    sim.run(is_over=lambda: next(events, None) is None)
    assert pipe.arrived == pipe.sent == pytest.approx(20 * 95e6 / 3)
