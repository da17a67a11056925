"""What a user of Ray does with a cluster; prints what was seen, as JSON lines.

A process of its own: Ray leaves threads, sockets and handlers of signals in a driver.
"""

import json
import sys
import threading
from typing import Any

import jax.numpy as jnp
import ray

import jgraph as jg

PS = "/job:ps/task:0"


def tell(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def refusal(**arguments: Any) -> str:
    try:
        jg.RayCluster(**arguments).close()
    except jg.JGError as error:
        return str(error)
    return "nothing"


def starts(cluster: jg.RayCluster) -> dict[str, str]:
    return {task.task: task.incarnation for task in cluster.status().tasks}


def come_back(cluster: jg.RayCluster, before: dict[str, str]) -> dict[str, str]:
    """Waits until a task that was killed is another; Ray kills when it likes to."""
    for _ in range(100):
        cluster.wait_for_tasks(30)
        if (now := starts(cluster)) != before:
            return now
        threading.Event().wait(0.1)
    return before


def main() -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=sys.argv[1],
    )
    w = jg.Variable("w", jnp.zeros(3), device=PS)

    @jg.function
    def step(x: Any) -> Any:
        with jg.device("/job:worker/task:0"):
            y = jnp.tanh(x + w[...])
        w[...] = w[...] + y
        return y.sum()

    tell(
        shortage=refusal(ps=2, workers=2, timeout_s=2.5),
        no_such_job=refusal(ps=1, workers=1, resources={"wroker": {"CPU": 1}}),
    )
    with jg.RayCluster(ps=1, workers=1, restarts=1) as cluster:
        before, pid = starts(cluster), cluster.pid(PS)
        with cluster.session() as session:
            tell(sum=float(session.run(step, jnp.ones(3))), target=cluster.target)
        cluster.kill(PS)
        after = come_back(cluster, before)
        with cluster.session() as session:
            again = float(session.run(step, jnp.ones(3)))
        tell(
            again=again,
            other=[task for task in before if before[task] != after[task]],
            same_process=pid == cluster.pid(PS),
            log=cluster.logs(PS, tail=1),
            free=ray.available_resources().get("CPU", 0),
        )
        cluster.kill(PS)
        try:
            come_back(cluster, after)
        except jg.JGError as error:
            tell(over=str(error))
    cluster = jg.RayCluster(ps=1, workers=1)
    tell(pids=[cluster.pid(task) for task in cluster.tasks()])
    sys.stdin.read()  # until this process is killed


if __name__ == "__main__":
    main()
