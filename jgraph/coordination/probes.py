"""Benchmark probes: functions that measure task speed and link bandwidth.

``speed_probe`` computes the same on each of its tasks; ``link_probe`` sends, one after
the other, over every link. Both are ordinary functions for
``jgraph.graph.tracing.trace``: what they measure is what steps are made of, and
messages travel as those of any step.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final, TypeAlias, final

import jax
import jax.numpy as jnp

from jgraph.coordination.step.run_metadata import RunMetadata
from jgraph.coordination.timeline.node_times import NodeTime
from jgraph.graph.device import device
from jgraph.graph.ir import TaskName
from jgraph.graph.tracing.alone import Alone, alone
from jgraph.plan.auto.cost_model import Link, TaskSpeed

Pair: TypeAlias = tuple[TaskName, TaskName]

# Of a product: m x k by k x k, as in a layer of a thousand units.
_M, _K = 256, 1024
_ELEMENTS = 1 << 20
_ROUNDS = 16
_IDLE = 12
# Products take long enough that a busy machine treats them as it treats a long step.
_PRODUCTS, _SLOW = 12, 4
_SMALL: Final = 16
_CLEAR: Final = 0.1
"""Of a time: what differs by less is taken for noise."""
_ALIKE: Final = 1.5
"""Tasks of a host of which one takes more times as long as the other are not alike."""
LARGE: Final = 1 << 20
"""Numbers of four bytes in a large message."""


@final
@dataclass(frozen=True, slots=True)
class SpeedProbe:
    """Computes the same on several tasks at once.

    It makes the arrays, multiplies matrices, computes element by element, takes
    exponentials, moves memory, and does nothing a few times.
    """

    tasks: tuple[TaskName, ...]

    def compute(self, x: Any) -> list[Any]:
        """Returns a number of each task."""
        pieces = _pieces()
        results = []
        for task in self.tasks:
            with device(task):
                h, w, v = pieces["make"]([x])
                (h,) = pieces["products"]([h, w])
                (v,) = pieces["link"]([v, h])
                for name in ("elements", "slow", "move"):
                    (v,) = pieces[name]([v])
                (s,) = pieces["end"]([v])
                for _ in range(_IDLE):
                    (s,) = pieces["idle"]([s])
                results.append(s)
        return results


def _pieces() -> dict[str, Alone]:
    x = jax.ShapeDtypeStruct((), jnp.float32)
    h = jax.ShapeDtypeStruct((_M, _K), jnp.float32)
    w = jax.ShapeDtypeStruct((_K, _K), jnp.float32)
    v = jax.ShapeDtypeStruct((_ELEMENTS,), jnp.float32)

    def make(x: Any) -> list[Any]:
        spread = jnp.arange(float(_ELEMENTS), dtype=jnp.float32) / _ELEMENTS + x
        return [spread[: _M * _K].reshape(_M, _K), spread.reshape(_K, _K), spread]

    def elements(v: Any) -> list[Any]:
        for _ in range(_ROUNDS):
            v = v * 0.5 + 0.25
        return [v]

    def slow(v: Any) -> list[Any]:
        for _ in range(_SLOW):
            v = jnp.exp(-v)
        return [v]

    def products(h: Any, w: Any) -> list[Any]:
        for _ in range(_PRODUCTS):
            h = (h @ w) * (1.0 / _K)
        return [h]

    pieces: Mapping[str, tuple[Callable[..., list[Any]], tuple[Any, ...]]] = {
        "make": (make, (x,)),
        "products": (products, (h, w)),
        "link": (lambda v, h: [v + h[0, 0]], (v, h)),
        "elements": (elements, (v,)),
        "slow": (slow, (v,)),
        "move": (lambda v: [v + 1.0], (v,)),
        "end": (lambda v: [v[0]], (v,)),
        "idle": (lambda s: [s + 1.0], (x,)),
    }
    return {name: alone(name, fn, *args) for name, (fn, args) in pieces.items()}


@final
@dataclass(frozen=True, slots=True)
class LinkProbe:
    """Sends a small and a large message over each link in turn."""

    pairs: tuple[Pair, ...]

    def send(self, x: Any) -> Any:
        """Returns a number that has passed everything."""
        number = jax.ShapeDtypeStruct((), jnp.float32)
        sends = {}
        for count in (_SMALL, LARGE):
            array = jax.ShapeDtypeStruct((count,), jnp.float32)

            def make(x: Any, count: int = count) -> list[Any]:
                return [jnp.tanh(x + jnp.arange(float(count), dtype=jnp.float32))]

            take = alone("take", lambda y: [y[0] * 0.5], array)
            sends[count] = alone("make", make, number), take
        back = alone("back", lambda z: [z + 1.0], number)
        for src, dst in self.pairs:
            for make_one, take in sends.values():
                with device(src):
                    (y,) = make_one([x])
                with device(dst):
                    (z,) = take([y])
                with device(src):
                    (x,) = back([z])
        return x


@final
@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds of the pieces of a speed probe on one task."""

    products: float
    elements: float
    slow: float
    move: float
    idle: float

    @property
    def computing(self) -> float:
        """All that uses the processor for long."""
        return self.products + self.elements + self.slow + self.move

    def speed(self, host: str) -> TaskSpeed:
        """Returns the speed of a task that took so long."""
        moved = 8.0 * _ELEMENTS
        return TaskSpeed(
            host=host,
            flops_per_s=_PRODUCTS * 2.0 * _M * _K * _K / self.products,
            elements_per_s=2.0 * _ROUNDS * _ELEMENTS / self.elements,
            slow_per_s=float(_SLOW) * _ELEMENTS / self.slow,
            bytes_per_s=moved / self.move,
            segment_s=self.idle,
        )


def seen(ran: Sequence[RunMetadata], task: TaskName) -> Seen:
    """Returns what runs of a speed probe show of a task: medians."""

    def median(label: str) -> float:
        times = [n.seconds for r in ran for n in r.of(task) if n.label == label]
        return statistics.median(times)

    idle = [
        (times[-1].end_s - times[0].start_s) / len(times)
        for r in ran
        if (times := [n for n in r.of(task) if n.label == "idle"])
    ]
    return Seen(
        products=median("products"),
        elements=median("elements"),
        slow=median("slow"),
        move=median("move"),
        idle=statistics.median(idle),
    )


def typical(times: Sequence[Seen]) -> Seen:
    """Returns the medians of what several tasks took."""
    columns = zip(*(astuple(one) for one in times), strict=True)
    return Seen(*map(statistics.median, columns))


def alike(times: Mapping[TaskName, Seen], task: TaskName) -> list[Seen]:
    """Returns what tasks took that are as fast as one; the others are another kind.

    Tasks of one host may have different shares of it, as by limits of their containers.

    Args:
      times: of tasks that should be as fast as each other.
      task: one of them.

    Example:
      >>> fast, like_it, slow = (Seen(s, s, s, s, s) for s in (1.0, 1.2, 2.0))
      >>> names = [TaskName(f"/job:worker/task:{n}") for n in range(3)]
      >>> times = dict(zip(names, [fast, like_it, slow]))
      >>> [len(alike(times, name)) for name in names]
      [2, 2, 1]
    """
    own = times[task].computing
    return [
        other
        for other in times.values()
        if max(own, other.computing) <= _ALIKE * min(own, other.computing)
    ]


def links_of(
    ran: Sequence[RunMetadata],
    pairs: Iterable[Pair],
    speeds: Mapping[TaskName, TaskSpeed],
) -> dict[Pair, Link]:
    """Returns what runs of a link probe show of each link.

    A message and its answer together take what passes on the sender's clock, less what
    passes on the receiver's: no clock is compared with another.

    Args:
      ran: the runs.
      pairs: the links.
      speeds: of the tasks: none receives faster than it can move memory.
    """
    found = {}
    for src, dst in pairs:
        small = [_round_s(r, src, dst, 4 * _SMALL) for r in ran]
        large = [_round_s(r, src, dst, 4 * LARGE) for r in ran]
        most = min(speeds[src].bytes_per_s, speeds[dst].bytes_per_s)
        found[src, dst] = Link(
            max(statistics.median(small), 0.0) / 2,
            bandwidth(small, large, 4 * (LARGE - _SMALL), most),
        )
    return found


def bandwidth(
    small_s: Sequence[float], large_s: Sequence[float], nbytes: int, most: float
) -> float:
    """Returns how many bytes per second pass, by times that other work made longer.

    Other work only adds to a time, so the least ones are nearest to the truth. Where
    they do not differ clearly, all of the long time counts: what comes out is then too
    slow, and never absurdly fast.

    Args:
      small_s: seconds for next to nothing.
      large_s: seconds for ``nbytes`` more.
      nbytes: how many more.
      most: what is possible at all.

    Example:
      >>> bandwidth([0.001, 0.003], [0.003, 0.002], 1000, most=1e9)
      1000000.0
      >>> bandwidth([0.002], [0.001], 1000, most=1e9)
      1000000.0
    """
    least_s = max(min(large_s), 0.0)
    took_s = least_s - min(small_s)
    if took_s < _CLEAR * least_s:
        took_s = least_s
    return min(nbytes / took_s, most) if took_s else most


def _round_s(ran: RunMetadata, src: TaskName, dst: TaskName, nbytes: int) -> float:
    here, there = ran.of(src), ran.of(dst)
    sent = _first(here, "send", dst, 0.0, nbytes)
    came = next(n for n in there if n.kind == "recv" and n.key == sent.key)
    answer = _first(there, "send", src, came.start_s, 4)
    back = next(n for n in here if n.kind == "recv" and n.key == answer.key)
    return (back.start_s - sent.start_s) - (answer.start_s - came.start_s)


def _first(
    nodes: Sequence[NodeTime], kind: str, peer: TaskName, since_s: float, nbytes: int
) -> NodeTime:
    fitting = (
        n
        for n in nodes
        if (n.kind, n.peer, n.nbytes) == (kind, peer, nbytes) and n.start_s >= since_s
    )
    return min(fitting, key=lambda n: n.start_s)
