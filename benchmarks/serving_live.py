"""Answers from parameters in training: latencies, and what training keeps.

``python -m benchmarks.serving_live`` is used by ``benchmarks.serving``: it trains a model
with two tables on a local cluster, serves it, prints where, and then does what its lines
of input say: ``train SECONDS`` trains for so long and prints the steps of a second.
"""

import json
import sys
import threading
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph as jg

ROWS: Final = 100_000
WIDTH: Final = 16
IDS: Final = 8


class Ranking(nnx.Module):
    """Two tables, of which eight rows each are looked up, and three dense layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tables = nnx.List([nnx.Embed(ROWS, WIDTH, rngs=rngs) for _ in range(2)])
        sizes = [(2 * WIDTH + 13, 64), (64, 64), (64, 1)]
        self.layers = nnx.List([nnx.Linear(*size, rngs=rngs) for size in sizes])

    def __call__(self, batch: Any) -> Any:
        rows = [t(batch[n]).mean(1) for t, n in zip(self.tables, "ab", strict=True)]
        x = jnp.concatenate([*rows, batch["dense"]], -1)
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)[:, 0]


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch) - batch["y"]) ** 2)


def examples(count: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    ids = lambda: rng.integers(0, ROWS, (count, IDS)).astype(np.int32)
    dense = rng.standard_normal((count, 13)).astype(np.float32)
    return {"a": ids(), "b": ids(), "dense": dense}


def main() -> None:
    data = examples(8192)
    data["y"] = data["dense"].sum(1)
    with jg.LocalCluster(ps=2, workers=1) as cluster:
        trainer = jg.Trainer(
            Ranking(nnx.Rngs(0)), loss, optax.adagrad(0.01), cluster=cluster
        )
        fit = lambda steps, **options: trainer.fit(
            data, steps=steps, batch_size=64, progress=False, **options
        )
        fit(20)
        with trainer.serve("ranking", examples(2), http_port=None) as live:
            told = {"grpc": live.grpc_target, "token_file": str(live.server.token.path)}
            print(json.dumps(told), flush=True)
            for line in sys.stdin:
                command, _, seconds = line.partition(" ")
                if command == "train":
                    print(rate(fit(10**7, block=False), float(seconds)), flush=True)


def rate(run: Any, seconds: float) -> float:
    """Steps a second of a run, which is ended; its first half second does not count."""
    threading.Event().wait(seconds + 0.5)
    run.stop()
    times = run.wait().metrics("loss")["seconds"]
    times = times[times > 0.5]
    return float((len(times) - 1) / (times[-1] - times[0]))


if __name__ == "__main__":
    main()
