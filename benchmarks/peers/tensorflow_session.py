"""TensorFlow's sessions on graphs that compute next to nothing.

Run in an environment with TensorFlow (``make peers-tensorflow``). Reads lines ``{"way":
"run", "steps": 100}`` from standard input and answers each with the microseconds of one
call, the least of batches of ten. Ways are those of ``benchmarks.session``.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import measure
from benchmarks.peers import tasks

SERVE = """
import json, sys
import tensorflow as tf
spec = tf.train.ClusterSpec(json.loads(sys.argv[1]))
tf.distribute.Server(spec, "worker", int(sys.argv[2])).join()
"""


def ways(target: str) -> dict[str, Callable[[], Any]]:
    """Returns a call for each way; ``target`` is a worker in another process."""
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    with tf.device("/job:worker/task:0"):
        far = v1.placeholder(tf.float32, ())
        far_double = far * 2.0
    with tf.device("/job:worker/task:1"):
        other = tf.sin(far)
    with tf.device("/job:worker/task:0"):
        with_other = other * 2.0
    local = v1.Session(graph=_graph_of(tf))
    near, near_double = local.graph.get_collection("trivial")
    remote = v1.Session(target)
    near_call = local.make_callable(near_double, [near])
    far_call = remote.make_callable(far_double, [far])
    far_two = remote.make_callable(with_other, [far])
    return {
        "run": lambda: local.run(near_double, {near: 1.0}),
        "callable": lambda: near_call(1.0),
        "remote": lambda: far_call(1.0),
        "remote_two": lambda: far_two(1.0),
    }


def _graph_of(tf: Any) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, ())
        for tensor in (x, x * 2.0):
            graph.add_to_collection("trivial", tensor)
    return graph


def main() -> None:
    reply = tasks.take_over_stdout()
    ports = tasks.free_ports(2)
    spec = json.dumps({"worker": [f"127.0.0.1:{port}" for port in ports]})
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE, spec, str(i)], stdout=subprocess.DEVNULL
        )
        for i in range(2)
    ]
    try:
        calls = ways(f"grpc://127.0.0.1:{ports[0]}")
        for line in sys.stdin:
            order = json.loads(line)
            reply(measure.micros(calls[order["way"]], order["steps"]))
    finally:
        for server in servers:
            server.kill()
        os._exit(0)  # sessions would wait for their servers


if __name__ == "__main__":
    main()
