"""Peak memory of a ps beside the bytes it must hold: ``python -m benchmarks.memory``.

One ps, one worker, an MLP of about 100 MB trained with adam. Prints one JSON line:
``ratio`` is (peak - 250 MB) / (bytes of variables and optimizer state).
"""

from collections.abc import Sequence

import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.models.mlp import MLP, loss_fn, make_data

BASE_MB = 250


def run(width: int, steps: int) -> None:
    """Trains an MLP with two hidden layers of ``width``."""
    with jg.LocalCluster(ps=1, workers=1) as cluster:
        (ps,) = cluster.tasks("ps")
        idle = measure.peak_mb(cluster.pid(ps))
        model = MLP((784, width, width, 10), rngs=nnx.Rngs(0))
        trainer = jg.Trainer(model, loss_fn, optax.adam(1e-4), cluster=cluster)
        data = make_data(512)
        trainer.fit(data, steps=steps, batch_size=64, progress=False)
        status = next(t for t in cluster.status().tasks if t.task == ps)
        held = status.variable_bytes / 1e6
        peak = measure.peak_mb(cluster.pid(ps))
        measure.emit(
            "memory",
            variables_mb=round(held, 1),
            ps_idle_mb=idle,
            ps_peak_mb=peak,
            ratio=round((peak - BASE_MB) / held, 2),
            steps=steps,
        )


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--width", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args(args)
    run(arguments.width, arguments.steps)


if __name__ == "__main__":
    main()
