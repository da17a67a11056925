"""Training that talks seldom: ``python -m benchmarks apart --kind diloco``.

``diloco``: the transformer of characters of ``jgraph examples diloco``: by how much its
loss is above that of ``SyncPS`` after as many steps, with an exchange each 50 and each
500 steps. Needs ``--data``, a directory with ``input.txt``.

``digits``: ten clients with two digits each, by FedAvg and DiLoCo, as ``jgraph examples
federated``: accuracy and loss.

``link``: four workers, each behind a line of 10 Mbit/s and 100 ms each way, and a
transformer of 8 MB. Rounds of ``--every`` steps over these lines and without, in turns,
give what an exchange costs and a step takes; from both follows the part of the speed
that workers alone have, at 500 steps a round. Steps of ``SyncPS`` are measured beside.

``turns``: six workers and a ps whose line, 32 Mbit/s each way, all of them share, and a
parameter of 4 MB: seconds of an update of ``SyncPS``, all workers reading at once, and
two at a time (``max_readers=2``), in turns.

``privacy``: digits for an epsilon of 8 at a delta of 1e-5: accuracy, and how far
epsilon is from what the accountant says of that noise, rate and number of updates.

Prints a JSON line for each. ``python -m benchmarks collectives --rows`` has them in its
table.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from jgraph.cluster import event_loop
from jgraph.cluster.spec import ClusterSpec
from jgraph.examples import diloco, federated
from jgraph.examples.options import Options
from jgraph.testing.tcp_proxy import TcpProxy

WORKERS, LINE_BYTES_PER_S, LINE_DELAY_S = 4, 10e6 / 8, 0.1
MANY, NARROW_BYTES_PER_S = 6, 32e6 / 8
"""Workers that share the line of a ps."""
ROUND_STEPS: Final = 500
"""Of the figure that is wanted."""
CHARACTERS, LENGTH, WIDTH, LAYERS = 96, 64, 256, 2
BATCH = 16
EPSILON, DELTA, NOISE, UPDATES = 8.0, 1e-5, 1.6, 600
EXAMPLES, SAMPLE = 1500, 128
"""Of digits to train on, and of one update on average."""


def of_characters(a: Any) -> dict[str, Any]:
    """Losses after equal steps; see ``jgraph.examples.diloco``."""
    options = Options(steps=a.steps or 1000)
    with jg.LocalCluster(ps=1, workers=WORKERS) as cluster:
        return dict(diloco.run(_data(a), cluster, options))


def of_digits(a: Any) -> dict[str, Any]:
    """Accuracies of clients with two digits each; see ``jgraph.examples.federated``."""
    options = Options(steps=a.steps or 100)
    with jg.LocalCluster(ps=1, workers=federated.CLIENTS) as cluster:
        return dict(federated.run(cluster, options))


def _data(a: Any) -> Path:
    home = Path(os.environ.get("JGRAPH_DATA", "../shared/data"))
    return Path(a.data) if a.data else home / "tinyshakespeare"


class Block(nnx.Module):
    """Attention to the characters before, and a layer of two."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        before = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norms[0](x), mask=before)
        return x + self.out(nnx.gelu(self.hidden(self.norms[1](x))))


class Text(nnx.Module):
    """A transformer of 8 MB without its tables, which are small."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Param(jnp.zeros((CHARACTERS, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.widest = nnx.Linear(WIDTH, 6 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(6 * WIDTH, CHARACTERS, rngs=rngs)

    def __call__(self, text: Any) -> Any:
        x = jnp.eye(CHARACTERS)[text] @ self.embed[...]
        for block in self.blocks:
            x = block(x)
        return self.out(nnx.relu(self.widest(x)))


def text_loss(model: Any, text: Any) -> Any:
    logits = model(text[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:])
    return losses.mean()


@contextmanager
def behind_lines(*, slow: bool) -> Iterator[str]:
    """A ps and workers in this process; gives what a client connects to.

    Args:
      slow: each worker is behind a line of its own; else nothing is between them.
    """
    jobs = {"ps": 1, "worker": WORKERS}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                jg.Server({job: {n: "127.0.0.1:0"}}, job, n, transport="network")
            )
            for job, count in jobs.items()
            for n in range(count)
        ]
        ps, *workers = servers
        direct = [worker.address for worker in workers]
        there = [_line(stack, address) for address in direct] if slow else direct
        ps.set_cluster(ClusterSpec({"ps": [ps.address], "worker": there}))
        for n, worker in enumerate(workers):
            towards = _line(stack, ps.address) if slow else ps.address
            own = [*there[:n], direct[n], *there[n + 1 :]]
            worker.set_cluster(ClusterSpec({"ps": [towards], "worker": own}))
        yield ps.target


@final
class End(dict[bool, float]):
    """When the line of a ps is free, as a proxy towards it, or away from it, sees it.

    Args:
      free: by whether it is the way from the ps.
      away: whether what goes through the proxy begins at the ps.
    """

    def __init__(self, free: dict[bool, float], *, away: bool) -> None:
        super().__init__()
        self._free, self._away = free, away

    def __getitem__(self, is_back: bool) -> float:
        return self._free[is_back != self._away]

    def __setitem__(self, is_back: bool, value: float) -> None:
        self._free[is_back != self._away] = value


@contextmanager
def behind_one_line() -> Iterator[str]:
    """A ps on a line and workers beside it; gives what a client connects to."""
    jobs, free = {"ps": 1, "worker": MANY}, {True: 0.0, False: 0.0}
    with ExitStack() as stack:

        def line(address: str, *, away: bool) -> str:
            return _line(stack, address, NARROW_BYTES_PER_S, 0.0, End(free, away=away))

        ps, *workers = [
            stack.enter_context(
                jg.Server({job: {n: "127.0.0.1:0"}}, job, n, transport="network")
            )
            for job, count in jobs.items()
            for n in range(count)
        ]
        direct = [worker.address for worker in workers]
        there = [line(address, away=True) for address in direct]
        ps.set_cluster(ClusterSpec({"ps": [ps.address], "worker": there}))
        towards = line(ps.address, away=False)
        for worker in workers:
            worker.set_cluster(ClusterSpec({"ps": [towards], "worker": direct}))
        yield ps.target


def _line(
    stack: ExitStack,
    address: str,
    bytes_per_s: float = LINE_BYTES_PER_S,
    delay_s: float = LINE_DELAY_S,
    free_at: dict[bool, float] | None = None,
) -> str:
    """Returns an address that leads to another over a slow line."""
    proxy = TcpProxy(address)
    proxy.bytes_per_s, proxy.delay_s = bytes_per_s, delay_s
    if free_at is not None:
        proxy.free_at = free_at
    event_loop.run(proxy.__aenter__())
    stack.callback(lambda: event_loop.run(proxy.__aexit__()))
    return proxy.address


def _seconds(there: jg.Trainer, text: Any, updates: int) -> float:
    """Returns the seconds of an update, the first one left out."""
    run = there.fit(text, steps=updates + 1, batch_size=BATCH, progress=False)
    when = run.metrics("loss")["seconds"]
    return float(when[-1] - when[0]) / updates


def over_lines(a: Any) -> dict[str, Any]:
    """Rounds over slow lines and without, in turns, and steps of ``SyncPS``."""
    rng = np.random.default_rng(0)
    text = rng.integers(0, CHARACTERS, (4096, LENGTH + 1)).astype(np.int32)
    strategies: dict[str, Callable[[], Any]] = {
        "rounds": lambda: jg.LocalSGD(sync_every=a.every),
        "sync": jg.SyncPS,
    }
    ways: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        for place in ("slow", "direct"):
            target = stack.enter_context(behind_lines(slow=place == "slow"))
            cluster = stack.enter_context(jg.connect(target))
            for name, strategy in strategies.items():
                there = jg.Trainer(
                    Text(),
                    text_loss,
                    optax.adamw(1e-3),
                    cluster=cluster,
                    strategy=strategy(),
                    sparse="off",
                )
                there.fit(text, steps=1, batch_size=BATCH, progress=False)
                ways[f"{name}_{place}"] = partial(_seconds, there, text, 1)
        found = measure.take_turns(ways, a.rounds)
    slow, direct = found["rounds_slow"], found["rounds_direct"]
    pauses = [max(s - d, 0.0) for s, d in zip(slow, direct, strict=True)]
    step_s = statistics.median(direct) / a.every
    alone_s = ROUND_STEPS * step_s
    parts = [alone_s / (alone_s + pause) for pause in pauses]
    sync = zip(found["sync_direct"], found["sync_slow"], strict=True)
    return {
        "every": a.every,
        "step_s": round(step_s, 4),
        **measure.spread("exchange_s", pauses, 2),
        **measure.spread("speed_at_500", parts, 3),
        **measure.spread("sync_speed", [alone / over for alone, over in sync], 3),
    }


class Wide(nnx.Module):
    """A parameter of 4 MB, of which each step takes hardly any time."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros((8, 125_000)))

    def __call__(self, x: Any) -> Any:
        return x @ self.w[...]


def _square(model: Any, x: Any) -> Any:
    return jnp.mean((model(x) - 1) ** 2)


def in_turn(a: Any) -> dict[str, Any]:
    """Updates whose workers read at once, and two at a time, in turns."""
    x = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    ways: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(
            jg.connect(stack.enter_context(behind_one_line()))
        )
        for name, readers in (("at_once", None), ("in_turn", 2)):
            strategy = jg.SyncPS(max_readers=readers)
            there = jg.Trainer(
                Wide(), _square, optax.sgd(0.1), cluster=cluster, strategy=strategy
            )
            ways[name] = partial(_seconds, there, x, a.steps or 3)
        found = measure.take_turns(ways, a.rounds)
    both = zip(found["in_turn"], found["at_once"], strict=True)
    return {
        "workers": MANY,
        **measure.spread("at_once_s", found["at_once"], 2),
        **measure.spread("in_turn_s", found["in_turn"], 2),
        **measure.spread("ratio", [turn / once for turn, once in both], 3),
    }


def privately(a: Any) -> dict[str, Any]:
    """Digits with examples hidden; see ``docs/privacy.md``."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    figures = dict[str, Any]()
    accuracies = list[float]()
    for seed in range(a.rounds):
        order = np.random.default_rng(seed).permutation(len(labels))
        x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
        hidden = jg.Privacy(
            noise_multiplier=NOISE, clip=1.0, delta=DELTA, target_epsilon=EPSILON
        )
        with jg.Trainer(
            federated.Network(nnx.Rngs(seed)),
            _digit_loss,
            optax.adam(5e-3),
            strategy=jg.Local(privacy=hidden),
        ) as there:
            run = there.fit(
                {"x": x[:EXAMPLES], "y": y[:EXAMPLES]},
                steps=a.steps or UPDATES,
                batch_size=SAMPLE,
                progress=False,
            )
            rest = {"x": x[EXAMPLES:], "y": y[EXAMPLES:]}
            accuracies.append(there.evaluate(rest)["accuracy"])
        assert run.epsilon is not None
        due = accounted(run.steps)
        figures["epsilon"] = round(run.epsilon, 4)
        off = abs(run.epsilon - due)
        figures["epsilon_off"] = max(figures.get("epsilon_off", 0.0), off)
    return {**figures, **measure.spread("accuracy", accuracies, 4)}


def _digit_loss(model: Any, batch: Any) -> Any:
    return federated.loss_fn(model, batch)


def accounted(updates: int) -> float:
    """Returns the epsilon that dp-accounting itself says of these updates."""
    import dp_accounting
    from dp_accounting import pld

    sampled = dp_accounting.PoissonSampledDpEvent(
        SAMPLE / EXAMPLES, dp_accounting.GaussianDpEvent(NOISE)
    )
    accountant = pld.PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, updates))
    return float(accountant.get_epsilon(DELTA))


KINDS: Final[Mapping[str, Callable[[Any], dict[str, Any]]]] = {
    "diloco": of_characters,
    "digits": of_digits,
    "link": over_lines,
    "turns": in_turn,
    "privacy": privately,
}


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--kind", choices=list(KINDS), default="digits")
    parser.add_argument("--steps", type=int, help="of a run; less says less")
    parser.add_argument("--every", type=int, default=4, help="steps of a round: link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", help="directory with input.txt")
    a = parser.parse_args(args)
    # Those of a federated run are a figure of their own.
    figures = {"rounds": a.rounds, **KINDS[a.kind](a)}
    measure.emit("apart", kind=a.kind, **figures)


if __name__ == "__main__":
    main()
