"""What a user of Spark does with a cluster; prints what was seen, as JSON lines.

A process of its own: a driver of Spark has a JVM, threads, sockets and handlers of
signals. ``… spark_session.py MASTER SCENARIO…`` runs one scenario after the other in
one session, and prints a line for each.
"""

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import psutil
from flax import nnx
from pyspark.sql import SparkSession

import jgraph as jg
from jgraph.clock import SystemClock
from jgraph.graph.device import TaskName
from jgraph.runtime.files.step_files import steps_in

CLOCK = SystemClock()
PS = "/job:ps/task:0"
WORKER = "/job:worker/task:1"


def servers() -> list[psutil.Process]:
    """Returns the processes of servers, of whatever parent."""
    found = []
    for process in psutil.process_iter():
        try:
            if "jgraph.launch.spark.child" in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_gone(processes: list[psutil.Process], timeout_s: float = 20.0) -> float:
    """Returns the seconds until all have ended, or infinity."""
    began = CLOCK.now()
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return float("inf") if alive else round(CLOCK.now() - began, 3)


def refusal(*arguments: Any, **options: Any) -> str:
    try:
        jg.SparkCluster(*arguments, **options).close()
    except jg.JGError as error:
        return str(error)
    return "nothing"


def starts(cluster: jg.SparkCluster) -> dict[str, str]:
    return {task.task: task.incarnation for task in cluster.status().tasks}


def come_back(cluster: jg.SparkCluster, before: dict[str, str]) -> dict[str, str]:
    """Waits until a task that was killed is another."""
    for _ in range(200):
        cluster.wait_for_tasks(60)
        if (now := starts(cluster)) != before:
            return now
        threading.Event().wait(0.1)
    return before


def keeper_of(cluster: jg.SparkCluster, task: str) -> int:
    """Returns the Python worker of Spark that keeps a task."""
    link = cluster._all[task].link
    assert link is not None
    return int(link.hello["worker"])


def loss(model: nnx.Linear, batch: Any) -> Any:
    return jnp.mean((model(batch) - 3) ** 2)


def trainer_on(cluster: jg.SparkCluster, **options: Any) -> jg.Trainer:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return jg.Trainer(model, loss, optax.sgd(0.01), cluster=cluster, **options)


X = np.ones((512, 2), np.float32)


# ---------------------------------------------------------------- scenarios


def train(spark: SparkSession) -> dict[str, Any]:
    """Up, train, children and Spark tasks that die, down."""
    began = CLOCK.now()
    with jg.SparkCluster(spark, ps=1, workers=2, restarts=3) as cluster:
        ready_s = CLOCK.now() - began
        trainer = trainer_on(cluster)
        run = trainer.fit(X, steps=300, batch_size=64, progress=False)
        result = float(run.model()(X[:1])[0, 0])
        before, there = starts(cluster), servers()
        address = cluster.spec.address(TaskName(WORKER))
        began = CLOCK.now()
        cluster.kill(WORKER)
        after = come_back(cluster, before)
        back_s = CLOCK.now() - began
        same = cluster.spec.address(TaskName(WORKER))
        lost = psutil.Process(cluster.pid(WORKER))
        os.kill(keeper_of(cluster, WORKER), signal.SIGKILL)
        end_s = wait_gone([lost])
        again = come_back(cluster, after)
        trainer.fit(X, steps=100, batch_size=64, progress=False)
        files = sorted(path.name for path in Path(cluster.tls_directory).iterdir())
        facts = {
            "log": cluster.logs(PS, tail=50),
            "target": cluster.target,
            "events": [f"{one.kind}: {one.text}" for one in cluster.events()],
            "pids": [cluster.pid(task) for task in cluster.tasks()],
            "running": [one.pid for one in servers()],
        }
        there += [one for one in servers() if one not in there]
        secrets = cluster.tls_directory
    return {
        **facts,
        "ready_s": ready_s,
        "steps": run.steps,
        "result": result,
        "killed": [task for task in before if before[task] != after[task]],
        "same_address": address == same,
        "back_s": back_s,
        "server_outlives_its_spark_task_s": end_s,
        "lost": [task for task in after if after[task] != again[task]],
        "files": files,
        "left_s": wait_gone(there),
        "secrets_left": Path(secrets).exists(),
        "jobs_left": len(spark.sparkContext.statusTracker().getActiveJobsIds()),
    }


def refusals(spark: SparkSession) -> dict[str, Any]:
    """What cannot be."""
    return {
        "nobody": refusal(spark, ps=0, workers=0),
        "no_session": refusal("local[2]"),
        "too_many": refusal(spark, ps=2, workers=4),
        "misspelled": refusal(spark, num_workers=4),
        "unsafe_job": refusal(spark, ps=1, workers=1, jobs={"../other": 1}),
        "no_python": refusal(spark, ps=1, workers=0, python="/no/such/python"),
        "bare_python": refusal(spark, ps=1, workers=0, python="/usr/bin/python3"),
        "left": len(servers()),
        "jobs_left": len(spark.sparkContext.statusTracker().getActiveJobsIds()),
    }


def crowded(spark: SparkSession) -> dict[str, Any]:
    """Slots that something else has, and two clusters in one application."""
    with jg.SparkCluster(spark, ps=1, workers=1) as one:
        began = CLOCK.now()
        missing = refusal(spark, ps=1, workers=1, timeout_s=8)
        took_s = CLOCK.now() - began
        with jg.SparkCluster(spark, ps=0, workers=1) as other:
            sums = []
            for cluster in (one, other):
                task = cluster.tasks("worker")[0]

                @jg.function
                def step(x: Any, task: str = task) -> Any:
                    with jg.device(task):
                        return jnp.tanh(x).sum()

                with cluster.session() as session:
                    sums.append(float(session.run(step, jnp.ones(3))))
    return {"missing": missing, "took_s": took_s, "sums": sums}


def moved(spark: SparkSession) -> dict[str, Any]:
    """A ps whose port another process takes is started again at another, in a run."""
    directory = os.environ["SCENARIO_DIRECTORY"]
    where, over = Path(directory), threading.Event()
    with jg.SparkCluster(spark, ps=1, workers=1, restarts=4) as cluster:
        trainer = trainer_on(cluster)
        before = cluster.spec.address(TaskName(PS))
        taken = socket.socket()

        def kill() -> None:
            while not over.wait(0.05) and not (where.exists() and steps_in(where)):
                continue
            process = psutil.Process(cluster.pid(PS))
            process.suspend()  # the port is taken as soon as it is free
            host, _, port = before.rpartition(":")
            process.kill()
            for _ in range(500):
                try:
                    taken.bind((host, int(port)))
                    taken.listen()
                except OSError:
                    over.wait(0.01)
                else:
                    return

        def stop(run: Any, report: Any) -> None:
            if run.recoveries() and report.step >= run.recoveries()[0].back_to + 500:
                run.stop()

        threading.Thread(target=kill).start()
        try:
            run = trainer.fit(
                X,
                steps=10**6,
                batch_size=64,
                checkpoint=jg.Checkpoints(directory, every=100),
                callbacks=[stop],
                progress=False,
            )
        finally:
            over.set()
        after = cluster.spec.address(TaskName(PS))
        taken.close()
        return {
            "moved": before != after,
            "lost": [list(one.lost) for one in run.recoveries()],
            "result": float(run.model()(X[:1])[0, 0]),
        }


def stop_inside(spark: SparkSession) -> dict[str, Any]:
    """Spark is stopped while servers run; the last scenario of its session."""
    facts: dict[str, Any] = {}
    with jg.SparkCluster(spark, ps=1, workers=1) as cluster:
        there = servers()
        spark.stop()
        facts["left_s"] = wait_gone(there)
        try:
            cluster.wait_for_tasks(60)
        except jg.JGError as error:
            facts["error"] = str(error)
        secrets = cluster.tls_directory
    return {
        **facts,
        "there": len(there),
        "secrets_left": Path(secrets).exists(),
        "stopped": refusal(spark, ps=1, workers=1),
    }


def leave_open(spark: SparkSession) -> dict[str, Any]:
    """For who kills this process: servers that run."""
    cluster = jg.SparkCluster(spark, ps=1, workers=1)
    tell(
        {
            "scenario": "leave_open",
            "servers": [cluster.pid(task) for task in cluster.tasks()],
            "family": [p.pid for p in psutil.Process().children(recursive=True)],
        }
    )
    sys.stdin.read()
    return {}


SCENARIOS: Mapping[str, Callable[[SparkSession], dict[str, Any]]] = {
    one.__name__: one
    for one in (train, refusals, crowded, moved, stop_inside, leave_open)
}


def tell(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(master: str, *names: str) -> None:
    builder = SparkSession.builder.master(master).appName("jgraph-tests")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **json.loads(os.environ.get("SCENARIO_SETTINGS", "{}")),
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    for name in names:
        try:
            facts = SCENARIOS[name](spark)
        except Exception:  # noqa: BLE001  # told to the test, which fails
            facts = {"failure": traceback.format_exc()}
        tell({"scenario": name, **facts})
    if "stop_inside" not in names:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
