"""What a user of Ray does with a cluster; prints what was seen, as JSON lines.

A process of its own: Ray leaves threads, sockets and handlers of signals in a driver.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import ray
from flax import nnx

import jgraph as jg
from jgraph.runtime.files.step_files import steps_in
from tests.support.waiting import wait_until

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


def fit(directory: str) -> None:
    """Trains while the only ps is killed, once there is a checkpoint."""
    rngs = nnx.Rngs(0)
    model = nnx.Linear(2, 1, rngs=rngs)
    x = np.ones((512, 2), np.float32)

    def loss(model: nnx.Linear, batch: Any) -> Any:
        return jnp.mean((model(batch) - 3) ** 2)

    where, over = Path(directory), threading.Event()

    def kill(cluster: jg.RayCluster) -> None:
        while not over.wait(0.1) and not (where.exists() and steps_in(where)):
            continue
        if not over.is_set():
            cluster.kill(PS)

    def stop_when_it_went_on(run: Any, report: Any) -> None:
        if run.recoveries() and report.step >= run.recoveries()[0].back_to + 1000:
            run.stop()

    with jg.RayCluster(ps=1, workers=1) as cluster:
        trainer = jg.Trainer(model, loss, optax.sgd(0.01), cluster=cluster)
        threading.Thread(target=kill, args=(cluster,)).start()
        try:
            saved = jg.Checkpoints(directory, every=100)
            run = trainer.fit(
                x,
                steps=10**6,
                batch_size=64,
                checkpoint=saved,
                callbacks=[stop_when_it_went_on],
            )
        finally:
            over.set()
        lost = [list(one.lost) for one in run.recoveries()]
        tell(lost=lost, result=float(run.model()(x[:1])[0, 0]))


def lose_a_node(directory: str) -> None:
    """Trains over two nodes of Ray, of which the one with a worker and a ps goes."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    other = nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
    with jg.RayCluster(ps=1, workers=1, restarts=3) as cluster:
        tell(tasks=[task.task for task in cluster.status().tasks])
        nodes.remove_node(other)
        try:
            cluster.wait_for_tasks(60)
        except jg.JGError as error:
            tell(lost=str(error))
    ray.shutdown()
    nodes.shutdown()


def scale() -> None:
    """Trains while a worker joins, and leaves."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

    def loss(model: nnx.Linear, batch: Any) -> Any:
        return jnp.mean((model(batch) - 3) ** 2)

    few = {"CPU": 0.5}
    with jg.RayCluster(
        ps=1, workers=1, resources={"ps": few, "worker": few}
    ) as cluster:
        strategy = jg.AsyncPS(elastic=jg.Elastic(workers=(1, 3)))
        trainer = jg.Trainer(
            model, loss, optax.sgd(0.01), cluster=cluster, strategy=strategy
        )
        x = np.ones((512, 2), np.float32)
        run = trainer.fit(x, steps=10**6, block=False, progress=False)
        wait_until(lambda: run.steps > 10, 60)
        tell(grown=cluster.scale(workers=2, timeout_s=120))
        tell(pid=cluster.pid("/job:worker/task:1"))
        tell(free=ray.available_resources().get("CPU", 0))
        wait_until(lambda: len(run.members()) == 2, 60)
        tell(shrunk=cluster.scale(workers=1, timeout_s=120))
        wait_until(lambda: run.members()[-1].state == "left", 60)  # a report tells
        tell(members=[[m.task, m.state] for m in run.members()])
        run.stop()
        run.wait(60)
        tell(again=cluster.scale(workers="+1", timeout_s=120), state=run.state)


def main() -> None:
    if sys.argv[2:] == ["node"]:
        lose_a_node(sys.argv[1])
        return
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=sys.argv[1],
    )
    if sys.argv[2:] == ["scale"]:
        scale()
        return
    if sys.argv[2:]:
        fit(sys.argv[2])
        return
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
