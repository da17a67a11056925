"""Peak memory of a ps beside the bytes it must hold: ``python -m benchmarks.memory``.

One ps, one worker, an MLP of about 100 MB trained with adam. Prints one JSON line:
``ratio`` is (peak - 250 MB) / (bytes of variables and optimizer state). The peak is of
what is resident, where every page counts that the process maps: all of what it and the
worker have in common too, which are libraries and tensors on their way. In the share,
looked at ten times a second, such a page counts for each as its part of it.
"""

import threading
from collections.abc import Sequence
from typing import Self, final

import optax
from flax import nnx

import jgraph as jg
from benchmarks import measure
from benchmarks.models.mlp import MLP, loss_fn, make_data

BASE_MB = 250
_EVERY_S = 0.1


def run(width: int, steps: int) -> None:
    """Trains an MLP with two hidden layers of ``width``."""
    with jg.LocalCluster(ps=1, workers=1) as cluster:
        (ps,) = cluster.tasks("ps")
        idle = measure.peak_mb(cluster.pid(ps))
        model = MLP((784, width, width, 10), rngs=nnx.Rngs(0))
        trainer = jg.Trainer(model, loss_fn, optax.adam(1e-4), cluster=cluster)
        data = make_data(512)
        with Share(cluster.pid(ps)) as share:
            trainer.fit(data, steps=steps, batch_size=64, progress=False)
        status = next(t for t in cluster.status().tasks if t.task == ps)
        held = status.variable_bytes / 1e6
        peak = measure.peak_mb(cluster.pid(ps))
        measure.emit(
            "memory",
            variables_mb=round(held, 1),
            ps_idle_mb=idle,
            ps_peak_mb=peak,
            ps_peak_share_mb=share.peak_mb,
            ratio=round((peak - BASE_MB) / held, 2),
            share_ratio=round((share.peak_mb - BASE_MB) / held, 2),
            steps=steps,
        )


@final
class Share:
    """Watches the share of memory that a process has, while a block runs.

    Attributes:
      peak_mb: the most that was seen.
    """

    def __init__(self, pid: int) -> None:
        self.peak_mb = 0.0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._ended.wait(_EVERY_S)
            self.peak_mb = max(self.peak_mb, measure.share_mb(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--width", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=6)
    arguments = parser.parse_args(args)
    run(arguments.width, arguments.steps)


if __name__ == "__main__":
    main()
