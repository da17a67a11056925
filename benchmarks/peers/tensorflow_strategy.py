"""TensorFlow's ParameterServerStrategy, doing what our benchmarks do.

Run in an environment with TensorFlow (``make peers-tensorflow``):
``.venv-peers-tensorflow/bin/python -m benchmarks.peers.tensorflow_strategy --kind mlp
--workers 4``. One server process per ps and worker; this process is the coordinator,
which sends the workers functions to run. As TensorFlow's guide advises, several steps
are packed into one function, since sending one costs milliseconds.
"""

import argparse
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.peers import tasks

MODULE = "tensorflow_strategy"
PACKED = 10
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors
Update = Callable[[Any], list[Any]]


def serve_task(a: argparse.Namespace) -> None:
    """A server of TensorFlow, until the parent is gone."""
    reply = tasks.take_over_stdout()
    import tensorflow as tf

    job, _, number = a.task.partition(":")
    spec = tf.train.ClusterSpec(json.loads(a.cluster))
    server = tf.distribute.Server(spec, job_name=job, task_index=int(number))
    reply(server.target)
    sys.stdin.read()
    os._exit(0)  # a server of TensorFlow has no other end


class Cluster:
    """Servers, and the coordinator in this process."""

    def __init__(self, a: argparse.Namespace) -> None:
        options = [f"--kind={a.kind}", f"--mb={a.mb}"]
        self._tasks = tasks.Tasks(MODULE, options, a.ps, a.workers)
        try:
            self._connect(a)
        except BaseException:
            self.close()
            raise

    def _connect(self, a: argparse.Namespace) -> None:
        import tensorflow as tf

        spec = tf.train.ClusterSpec(self._tasks.spec)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, rpc_layer="grpc"
        )
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            update = (mlp if a.kind == "mlp" else dense)(tf, a)

        examples = tf.function(lambda: dataset(tf))
        per_worker = self._coordinator.create_per_worker_dataset(examples)
        self._batches = iter(per_worker)

        def steps(batches: Any) -> Any:
            times = tf.TensorArray(tf.float64, PACKED)
            name = tf.constant(0, tf.int64)
            for i in tf.range(PACKED):
                name, picked = next(batches)
                with tf.control_dependencies(update(picked)):
                    times = times.write(i, tf.timestamp())
            return name, times.stack()

        self._steps = tf.function(steps)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by task."""
        return {**self._tasks.pids, "coordinator": os.getpid()}

    def run(self, workers: int, steps: int) -> list[list[float]]:
        """Runs steps, as many as of all workers together, on any of them."""
        count = -(-workers * steps // PACKED)
        done = [
            self._coordinator.schedule(self._steps, args=(self._batches,))
            for _ in range(max(count, 2 * workers))
        ]
        self._coordinator.join()
        seconds: dict[int, list[float]] = defaultdict(list)
        for name, times in self._coordinator.fetch(done):
            seconds[int(name)] += list(map(float, times))
        return [sorted(times) for times in seconds.values()]

    def close(self) -> None:
        """Ends the servers."""
        # The coordinator would say at length that they are gone.
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        self._tasks.close()


def dataset(tf: Any) -> Any:
    """Returns (a number that tells the worker, numbers of examples), without end."""
    made = tf.data.Dataset
    name = made.random().take(1).cache().repeat()
    picked = made.random().batch(tasks.BATCH, drop_remainder=True)
    return made.zip((name, picked.map(lambda x: x % tasks.EXAMPLES)))


def mlp(tf: Any, a: argparse.Namespace) -> Update:
    """A step of Adam on the MLP: gradients on the worker, the update on the ps."""
    images, labels = tasks.random_examples(0)
    weights = []
    for rows, columns in itertools.pairwise(tasks.SIZES):
        scale = (2 / (rows + columns)) ** 0.5
        weights.append(tf.Variable(tf.random.normal([rows, columns]) * scale))
        weights.append(tf.Variable(tf.zeros([columns])))
    means = [tf.Variable(tf.zeros_like(w)) for w in weights]
    squares = [tf.Variable(tf.zeros_like(w)) for w in weights]
    count = tf.Variable(0.0)

    def update(picked: Any) -> list[Any]:
        x = tf.gather(tf.constant(images), picked)
        y = tf.gather(tf.constant(labels), picked)
        with tf.GradientTape() as tape:
            for w, b in zip(weights[::2], weights[1::2], strict=True):
                x = tf.matmul(x, w) + b
                x = x if b is weights[-1] else tf.nn.relu(x)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
            )
        gradients = tape.gradient(loss, weights)
        number = count.assign_add(1.0, read_value=True)
        return [
            adam(tf, w, m, v, g, number)
            for w, m, v, g in zip(weights, means, squares, gradients, strict=True)
        ]

    return update


def adam(tf: Any, w: Any, mean: Any, square: Any, gradient: Any, count: Any) -> Any:
    """TensorFlow's own update, one operation on the ps that has ``w``."""
    with tf.device(w.device):
        return tf.raw_ops.ResourceApplyAdam(
            var=w.handle,
            m=mean.handle,
            v=square.handle,
            beta1_power=0.9**count,
            beta2_power=0.999**count,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-8,
            grad=gradient,
        )


def dense(tf: Any, a: argparse.Namespace) -> Update:
    """Reads all variables on the worker, adds one to each on its ps."""
    size = int(a.mb * 1e6 / 4 / a.ps)
    values = [tf.Variable(tf.zeros([size])) for _ in range(a.ps)]

    def update(picked: Any) -> list[Any]:
        # Trivial, and not to be folded away: the update depends on what was read.
        zero = tf.cast(picked[0] * 0, tf.float32)
        return [
            v.assign_add(v.read_value() * zero + 1.0, read_value=False) for v in values
        ]

    return update


def main() -> None:
    a = tasks.parser(__doc__, ["mlp", "dense"]).parse_args()
    if a.task:
        serve_task(a)
        return
    tasks.serve(MODULE, Cluster(a), a, orders=sys.stdin)
    sys.stdout.flush()
    os._exit(0)  # the coordinator's threads would wait for the servers


if __name__ == "__main__":
    main()
