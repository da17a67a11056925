"""TensorFlow's between-graph parameter servers, doing what our benchmarks do.

Run in an environment with TensorFlow (``make peers``): ``.venv-peers/bin/python -m
benchmarks.peers.tensorflow_ps --kind dense --mb 8 --workers 4``. One process per task,
on loopback. Without ``--serve`` it prints one JSON line; with it, it reads orders
``{"workers": 2, "steps": 100}`` from standard input and answers each with the times of
the steps, so that it can take turns with others.

Written for speed, as an expert would: one session per worker with device filters, a
callable without feeds or fetched values, inputs in the graph, Grappler left on.
``--mode sync`` is ``SyncReplicasOptimizer`` over all workers, without backups.
"""

import argparse
import itertools
import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.peers import tasks

CHIEF = "/job:worker/task:0"
WIDTH, LOOKUPS = 64, 32
# Of TensorFlow's two kinds of variables, the faster one for each work; they differ by
# about 5 %.
FASTEST = {
    "scalar": "ref",
    "dense": "ref",
    "sparse": "resource",
    "mlp": "resource",
    "embedding": "resource",
}
HIDDEN, EMBEDDING_BATCHES = 256, 20


class Cluster(tasks.Tasks):
    """TensorFlow's servers; worker 0 makes the variables before the others start."""

    def __init__(self, options: list[str], ps: int, workers: int) -> None:
        super().__init__("tensorflow_ps", options, ps, workers)
        for i in range(workers):
            self._tell(f"worker:{i}", 0)
            self._hear(f"worker:{i}")


def serve_task(a: argparse.Namespace) -> None:
    """One task: a ps waits for the end, a worker for numbers of steps."""
    reply = tasks.take_over_stdout()
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    if a.variables == "ref":
        v1.disable_resource_variables()
    job, _, number = a.task.partition(":")
    spec = tf.train.ClusterSpec(json.loads(a.cluster))
    server = v1.train.Server(spec, job_name=job, task_index=int(number))
    if job == "worker":
        work = serve_in_step if a.mode == "sync" else serve_worker
        work(tf, a, f"/job:worker/task:{number}", spec, server, reply)
    else:
        reply("up")
        sys.stdin.read()
    os._exit(0)  # a server of TensorFlow has no other end


def open_session(tf: Any, server: Any, worker: str, reply: tasks.Reply) -> Any:
    """A session of one worker, once the first order says that all servers are up."""
    v1 = tf.compat.v1
    config = v1.ConfigProto(device_filters=["/job:ps", worker])
    session = v1.Session(server.target, config=config)
    reply("up")
    sys.stdin.readline()
    if worker == CHIEF:
        session.run(v1.global_variables_initializer())
    return session


def serve_worker(
    tf: Any,
    a: argparse.Namespace,
    worker: str,
    spec: Any,
    server: Any,
    reply: tasks.Reply,
) -> None:
    """The first order makes things ready; each further one is a number of steps."""
    kinds = {"mlp": mlp_step, "sparse": sparse_step, "embedding": embedding_step}
    step = kinds.get(a.kind, whole_step)(tf, a, worker, len(spec.job_tasks("ps")))
    run = open_session(tf, server, worker, reply).make_callable(step)
    for _ in range(3):
        run()
    reply("ready")
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            run()
            seconds.append(time.perf_counter())
        reply(seconds)


def whole_step(tf: Any, a: argparse.Namespace, worker: str, ps: int) -> Any:
    """Reads all variables on the worker, adds one to each on its ps."""
    v1 = tf.compat.v1
    shape = [int(a.mb * 1e6 / 4 / ps)] if a.kind == "dense" else []
    with tf.device(worker):
        # Trivial, and Grappler cannot fold it: the update depends on what was read.
        zero = v1.placeholder_with_default(np.float32(0), [])
    steps = []
    for i in range(ps):
        with tf.device(f"/job:ps/task:{i}"):
            v = v1.get_variable(f"v{i}", shape, initializer=v1.zeros_initializer())
        with tf.device(worker):
            update = v.read_value() * zero + 1.0
        steps.append(v1.assign_add(v, update, use_locking=True).op)
    return tf.group(*steps)


def serve_in_step(
    tf: Any,
    a: argparse.Namespace,
    worker: str,
    spec: Any,
    server: Any,
    reply: tasks.Reply,
) -> None:
    """As ``serve_worker``, for steps that no worker can take alone."""
    optimizer, step = sync_step(tf, a, worker, spec)
    session = open_session(tf, server, worker, reply)
    if worker == CHIEF:
        session.run(optimizer.chief_init_op)
        optimizer.get_chief_queue_runner().create_threads(
            session, daemon=True, start=True
        )
    else:
        session.run(optimizer.local_step_init_op)
    run = session.make_callable(step)
    reply("ready")
    done = 0
    for line in sys.stdin:
        seconds = []
        done += int(line)
        # A quick worker may take two tokens of one update, another then has none: all
        # end with the same update, not after the same number of steps.
        while run() < done:
            seconds.append(time.perf_counter())
        reply([*seconds, time.perf_counter()])


def sync_step(tf: Any, a: argparse.Namespace, worker: str, spec: Any) -> Any:
    """Contributes one to the mean that each variable is updated with."""
    v1 = tf.compat.v1
    ps, workers = len(spec.job_tasks("ps")), len(spec.job_tasks("worker"))
    shape = [int(a.mb * 1e6 / 4 / ps)] if a.kind == "dense" else []
    zeros = v1.zeros_initializer()
    with tf.device("/job:ps/task:0"):
        global_step = v1.get_variable(
            "global_step", [], tf.int64, zeros, trainable=False
        )
    with tf.device(worker):
        zero = v1.placeholder_with_default(np.float32(0), [])
    pairs = []
    for i in range(ps):
        with tf.device(f"/job:ps/task:{i}"):
            v = v1.get_variable(f"v{i}", shape, initializer=zeros)
        with tf.device(worker):
            pairs.append((v.read_value() * zero + 1.0, v))
    optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(-1.0, use_locking=True),
        replicas_to_aggregate=workers,
        total_num_replicas=workers,
    )
    with tf.device(worker):
        return optimizer, optimizer.apply_gradients(pairs, global_step)


def sparse_step(tf: Any, a: argparse.Namespace, worker: str, ps: int) -> Any:
    """Reads random rows on the worker, adds one to each on the ps."""
    v1 = tf.compat.v1
    zeros = v1.zeros_initializer()
    with tf.device("/job:ps/task:0"):
        table = v1.get_variable("table", [a.rows, WIDTH], initializer=zeros)
    with tf.device(worker):
        zero = v1.placeholder_with_default(np.float32(0), [])
        ids = tf.random.uniform([LOOKUPS], maxval=a.rows, dtype=tf.int32)
    with tf.device("/job:ps/task:0"):
        rows = tf.gather(table, ids)
    with tf.device(worker):
        update = rows * zero + 1.0
    return v1.scatter_add(table, ids, update, use_locking=True).op


def mlp_step(tf: Any, a: argparse.Namespace, worker: str, ps: int) -> Any:
    """A step of Adam on the MLP: gradients on the worker, the update on the ps."""
    v1 = tf.compat.v1
    images, labels = tasks.random_examples(0)
    place = v1.train.replica_device_setter(ps_tasks=ps, worker_device=worker)
    with v1.device(place):
        picked = tf.random.uniform([tasks.BATCH], maxval=tasks.EXAMPLES, dtype=tf.int32)
        x = tf.gather(tf.constant(images), picked)
        y = tf.gather(tf.constant(labels.astype(np.int32)), picked)
        last = len(tasks.SIZES) - 2
        for i, (rows, columns) in enumerate(itertools.pairwise(tasks.SIZES)):
            w = v1.get_variable(f"w{i}", [rows, columns])
            b = v1.get_variable(f"b{i}", [columns], initializer=v1.zeros_initializer())
            x = tf.matmul(x, w) + b
            x = x if i == last else tf.nn.relu(x)
        loss = tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=x)
        )
        return v1.train.AdamOptimizer(1e-3).minimize(loss)


def embedding_step(tf: Any, a: argparse.Namespace, worker: str, ps: int) -> Any:
    """A step of Adagrad on an embedding and a small net above it."""
    v1 = tf.compat.v1
    rng = np.random.default_rng(0)
    shape = (EMBEDDING_BATCHES, a.batch, a.ids)
    some_ids = rng.integers(0, a.rows, shape, dtype=np.int32)
    some_labels = rng.integers(0, 2, shape[:2]).astype(np.float32)
    small = v1.random_uniform_initializer(-0.05, 0.05)
    place = v1.train.replica_device_setter(ps_tasks=ps, worker_device=worker)
    with v1.device(place):
        turn = tf.random.uniform([], maxval=EMBEDDING_BATCHES, dtype=tf.int32)
        ids = tf.gather(tf.constant(some_ids), turn)
        labels = tf.gather(tf.constant(some_labels), turn)
        shards = v1.fixed_size_partitioner(ps) if ps > 1 else None
        table = v1.get_variable(
            "table", [a.rows, a.dim], initializer=small, partitioner=shards
        )
        rows = v1.nn.embedding_lookup(table, ids, partition_strategy="div")
        x = tf.reshape(rows, [a.batch, a.ids * a.dim])
        for i, width in enumerate((HIDDEN, 1)):
            w = v1.get_variable(f"w{i}", [x.shape[1], width], initializer=small)
            b = v1.get_variable(f"b{i}", [width], initializer=v1.zeros_initializer())
            x = tf.matmul(x, w) + b
            x = tf.nn.relu(x) if i == 0 else x
        loss = tf.reduce_mean(
            tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=x[:, 0])
        )
        optimizer = v1.train.AdagradOptimizer(0.01, initial_accumulator_value=0.1)
        return optimizer.minimize(loss)


def main() -> None:
    parser = tasks.parser(__doc__, list(FASTEST))
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--ids", type=int, default=26)
    parser.add_argument("--variables", choices=["resource", "ref"])
    parser.add_argument("--mode", choices=["async", "sync"], default="async")
    a = parser.parse_args()
    if a.mode == "sync" and a.kind not in ("scalar", "dense"):
        parser.error("--mode sync takes --kind scalar or dense")
    if a.task:
        serve_task(a)
        return
    a.variables = a.variables or FASTEST[a.kind]
    names = ("kind", "mb", "rows", "dim", "batch", "ids", "variables", "mode")
    options = [f"--{name}={getattr(a, name)}" for name in names]
    tasks.serve("tensorflow_ps", Cluster(options, a.ps, a.workers), a, orders=sys.stdin)


if __name__ == "__main__":
    main()
