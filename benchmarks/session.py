"""Microseconds of a call that computes next to nothing, by how far it goes.

Run: ``python -m benchmarks session``. ``run`` and ``callable`` are ``Session.run`` and
``make_callable`` on a task of this process, ``jit`` is ``jax.jit`` with the result as a
numpy array; ``remote`` is a callable on a task in another process, ``remote_two`` takes
a scalar that a third process computes. ``register`` is making a callable of a graph of
1,000 operations on two tasks that have compiled it before. ``segment`` is what each
more segment of a callable costs, with its compute, and ``segment_jit`` what the same
code costs as a jitted function. Prints one JSON line; ``--peer`` measures the same of
TensorFlow's sessions, in turns (``make peers-tensorflow``).
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np

import jgraph as jg
from benchmarks import measure
from benchmarks.peer_process import ROOT, python
from jgraph.graph.tracing.alone import alone
from jgraph.graph.tracing.function import Function

OPERATIONS, PIECES, SEGMENTS = 1_000, 8, 64
X = np.float32(1.0)


def double(x: Any) -> Any:
    """The trivial graph: of the driver's task."""
    return x * 2.0


def with_other(x: Any) -> Any:
    """The trivial graph with a scalar computed on another task."""
    with jg.device("/job:worker/task:1"):
        y = jnp.sin(x)
    with jg.device("/job:worker/task:0"):
        return y * 2.0


def many_operations(x: Any) -> Any:
    """1,000 operations, in pieces on two tasks by turns."""
    for piece in range(PIECES):
        with jg.device(f"/job:worker/task:{piece % 2}"):
            for _ in range(OPERATIONS // PIECES // 2):
                x = jnp.tanh(x) * 0.5
    return x


def segments(count: int) -> Function:
    """Returns a function of so many segments, each of which takes the one before."""
    body = alone("double", lambda x: [double(x)], X)

    def step(x: Any) -> Any:
        for _ in range(count):
            (x,) = body([x])
        return x

    return Function(step)


def segment_ways(session: Any, jitted: Any) -> dict[str, Callable[[], float]]:
    """Returns what gives the microseconds of a segment, here and as a function."""
    one, many = (session.make_callable(segments(n), X) for n in (1, SEGMENTS + 1))

    def chain() -> None:
        x = jnp.asarray(X)
        for _ in range(SEGMENTS):
            x = jitted(x)
        x.block_until_ready()

    times = [_timed(call, 100) for call in (lambda: one(X), lambda: many(X), chain)]
    return {
        "segment_us": lambda: (times[1]() - times[0]()) / SEGMENTS,
        "segment_jit_us": lambda: times[2]() / SEGMENTS,
    }


def register_s(cluster: Any) -> float:
    """Returns the seconds of making a callable in a session that knows nothing."""
    with cluster.session() as session:
        step = Function(many_operations)
        began = time.perf_counter()
        session.make_callable(step, np.ones(64, np.float32))
        return time.perf_counter() - began


@final
class TensorFlow:
    """TensorFlow's sessions in a process of their own, measured when asked."""

    def __init__(self) -> None:
        command = [str(python("tensorflow_ps")), "-m"]
        command.append("benchmarks.peers.tensorflow_session")
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("callable", 10)

    def ask(self, way: str, steps: int) -> float:
        """Returns the microseconds of one call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"way": way, "steps": steps}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer ended; see above")
        return float(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # it then ends its servers, and itself
        try:
            self._process.wait(20)
        finally:
            self._process.kill()


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true")
    a = parser.parse_args(args)
    with ExitStack() as stack:
        server = stack.enter_context(jg.Server({"worker": ["localhost:0"]}))
        here = stack.enter_context(jg.connect(server.target)).session()
        far = stack.enter_context(jg.LocalCluster(workers=2))
        away = far.session()
        step, jitted = jg.function(double), jax.jit(double)
        near_call = here.make_callable(step, X)
        far_call = away.make_callable(step, X)
        far_two = away.make_callable(with_other, X)
        register_s(far)  # compiles
        calls: dict[str, Callable[[], Any]] = {
            "jit_us": lambda: np.asarray(jitted(X)),
            "run_us": lambda: here.run(step, X),
            "callable_us": lambda: near_call(X),
            "remote_us": lambda: far_call(X),
            "remote_two_us": lambda: far_two(X),
        }
        ways = {name: _timed(call, a.steps) for name, call in calls.items()}
        ways["register_ms"] = lambda: 1e3 * register_s(far)
        ways |= segment_ways(here, jitted)
        if a.peer:
            peer = stack.enter_context(TensorFlow())
            for name in ("run", "callable", "remote", "remote_two"):
                ways[f"tensorflow_{name}_us"] = _asked(peer, name, a.steps)
        found = measure.take_turns(ways, a.rounds)
    figures: dict[str, Any] = {}
    for name, values in found.items():
        figures |= measure.spread(name, values)
    measure.emit("session", steps=a.steps, rounds=a.rounds, **figures)


def _timed(call: Callable[[], Any], steps: int) -> Callable[[], float]:
    measure.micros(call, 50)  # the first ones compile, and teach what they cost
    return lambda: measure.micros(call, steps)


def _asked(peer: TensorFlow, way: str, steps: int) -> Callable[[], float]:
    return lambda: peer.ask(way, steps)


if __name__ == "__main__":
    main()
