"""What a user of Spark does with a cluster; prints what was seen, as JSON lines.

A process of its own: a driver of Spark has a JVM, threads, sockets and handlers of
signals. ``… spark_session.py MASTER SCENARIO…`` runs one scenario after the other in
one session, and prints a line for each.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import jax.numpy as jnp
import numpy as np
import optax
import psutil
from flax import nnx
from py4j.protocol import Py4JError
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.linalg import Vectors
from pyspark.sql import SparkSession, functions

import jgraph as jg
from jgraph.clock import SystemClock
from jgraph.examples import demo
from jgraph.graph.device import TaskName
from jgraph.runtime.data.sources import open_source
from jgraph.runtime.files.step_files import steps_in
from tests.support import counting

CLOCK = SystemClock()
PS, OTHER_PS = "/job:ps/task:0", "/job:ps/task:1"
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


def data_refusal(frame: Any, **options: Any) -> str:
    try:
        jg.Source.spark(frame, **options)
    except jg.JGError as error:
        return str(error)
    return "nothing"


def score_refusal(*arguments: Any) -> str:
    try:
        jg.spark.predict(*arguments)
    except jg.JGError as error:
        return str(error)
    return "nothing"


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
        "no_executors": refusal(spark, 1, 1, resources={"worker": {"cpus": 2}}),
        "no_such_job": refusal(spark, 1, 1, resources={"wroker": {"cpus": 2}}),
        "misspelled": refusal(spark, num_workers=4),
        "env": refusal(spark, ps=1, workers=1, env={"A": 1}),
        "jobs": refusal(spark, ps=1, workers=1, jobs=3),
        "python": refusal(spark, ps=1, workers=1, python=3),
        "resources": refusal(spark, ps=1, workers=1, resources=3),
        "unsafe_job": refusal(spark, ps=1, workers=1, jobs={"../other": 1}),
        "no_python": refusal(spark, ps=1, workers=0, python="/no/such/python"),
        "bare_python": refusal(spark, ps=1, workers=0, python="/usr/bin/python3"),
        "left": len(servers()),
        "jobs_left": len(spark.sparkContext.statusTracker().getActiveJobsIds()),
    }


def run_until_cancelled(context: Any, work: Callable[[Any], Any]) -> None:
    """Takes two slots, as other jobs of an application do."""
    with suppress(Py4JError):
        context.parallelize(range(2), 2).foreach(work)


def wait_until_taken(context: Any, slots: int) -> None:
    """Waits until so many tasks of other jobs run: to start them takes a while."""
    tracker = context.statusTracker()
    for _ in range(1200):
        stages = map(tracker.getStageInfo, tracker.getActiveStageIds())
        if sum(stage.numActiveTasks for stage in stages if stage) >= slots:
            return
        threading.Event().wait(0.1)
    raise AssertionError(f"{slots} tasks did not begin")


def crowded(spark: SparkSession) -> dict[str, Any]:
    """Slots that something else has, and two clusters in one application."""
    context = spark.sparkContext
    wait: Callable[[Any], Any] = lambda _: threading.Event().wait(300)
    busy = threading.Thread(target=run_until_cancelled, args=(context, wait))
    busy.start()
    try:
        wait_until_taken(context, 2)
        began = CLOCK.now()
        missing = refusal(spark, ps=1, workers=1, timeout_s=45)
        took_s = CLOCK.now() - began
    finally:
        context.cancelAllJobs()
        busy.join(60)
    with jg.SparkCluster(spark, ps=1, workers=1) as one:
        third = refusal(spark, ps=1, workers=1)
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
            no_slot = data_refusal(spark.range(3))
    return {
        "missing": missing,
        "third": third,
        "took_s": took_s,
        "sums": sums,
        "no_slot": no_slot,
    }


def dynamic(spark: SparkSession) -> dict[str, Any]:
    """Executors that come and go."""
    tracker = spark.sparkContext.statusTracker()
    return {
        "refused": refusal(spark, ps=1, workers=1),
        "left": len(servers()),
        "jobs": len(tracker.getJobIdsForGroup(None)),
    }


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


@final
class Killer:
    """A callback that kills executors: with a worker, and when that is back, a ps.

    Attributes:
      dead: servers that were on them.
      back_s: seconds until the run went on, by task.
    """

    def __init__(self, cluster: jg.SparkCluster) -> None:
        self._cluster = cluster
        self._kills: dict[str, float] = {}
        self._step = 0
        self.dead: list[psutil.Process] = []
        self.back_s: dict[str, float] = {}

    def __call__(self, run: Any, report: Any) -> None:
        if WORKER not in self._kills:
            if report.step >= 200:
                self._step = report.step
                self._kill(WORKER)
        elif WORKER not in self.back_s:
            if report.step > self._step + 100:
                self._note(WORKER)
        elif OTHER_PS not in self._kills:
            worker = self._cluster._all[WORKER]
            if worker._has_joined and worker.pid != self.dead[0].pid:
                self._kill(OTHER_PS)
        elif run.recoveries():
            self._note(OTHER_PS)
            if report.step > run.recoveries()[0].back_to + 300:
                run.stop()

    def _kill(self, task: str) -> None:
        self.dead.append(psutil.Process(self._cluster.pid(task)))
        executor_of(self._cluster, task).kill()
        self._kills[task] = CLOCK.now()

    def _note(self, task: str) -> None:
        self.back_s.setdefault(task, round(CLOCK.now() - self._kills[task], 3))


def executors(spark: SparkSession) -> dict[str, Any]:
    """Executors with a worker, and then with a ps, are killed while a run goes on."""
    with jg.SparkCluster(spark, ps=2, workers=2, restarts=4, timeout_s=300) as cluster:
        there = counting.trainer(cluster, jg.AsyncPS(durability="replica"))
        first, killer, ledger = starts(cluster), Killer(cluster), counting.Ledger()
        run = there.fit(
            counting.IDS,
            steps=10**6,
            batch_size=counting.BATCH,
            callbacks=[killer],
            progress=False,
        )
        ledger.add(run)
        again = ledger.check(there, lost=3)
        last = starts(cluster)
        events = [f"{one.kind}: {one.text}" for one in cluster.events()]
    return {
        "lost": [list(one.lost) for one in run.recoveries()],
        "begun_anew": [task for task in first if first[task] != last[task]],
        "back_s": killer.back_s,
        "again": again,
        "ends_s": wait_gone(killer.dead),
        "events": [event for event in events if "Spark task" in event],
    }


def profiles(spark: SparkSession) -> dict[str, Any]:
    """A worker that asks for both cores of an executor."""
    asked = {"worker": {"cpus": 2}}
    wrong = [{"worker": {"cpus": n}} for n in (0, 1.5, "4", True)]
    with jg.SparkCluster(spark, ps=2, workers=1, resources=asked) as cluster:
        places = [executor_of(cluster, task).pid for task in cluster.tasks()]
        run = trainer_on(cluster).fit(X, steps=20, batch_size=64, progress=False)
    return {
        "places": places,
        "steps": run.steps,
        "wrong": [refusal(spark, 1, 1, resources=one) for one in wrong],
    }


def digits(spark: SparkSession) -> dict[str, Any]:
    """Pictures of digits are trained on, and scored, from DataFrames."""
    train, test = (_pictures(spark, features) for features in demo.load_digits())
    place = Path(os.environ["SCENARIO_DIRECTORY"])
    data = jg.Source.spark(train, directory=place / "digits")
    shaped: Callable[[Any], Any] = lambda x: x.reshape(-1, 8, 8, 1)

    def loss_of(model: demo.CNN, batch: Any) -> Any:
        return demo.loss_fn(model, {**batch, "image": shaped(batch["image"])})

    with jg.SparkCluster(spark, ps=1, workers=2) as cluster:
        model, tx = demo.CNN(rngs=nnx.Rngs(0)), optax.adam(2e-3)
        trainer = jg.Trainer(model, loss_of, tx, cluster=cluster)
        trainer.fit(data, steps=600, batch_size=64, progress=False)
        example = {"image": np.zeros((2, 64), np.float32)}
        scores: Any = lambda model, batch: model(shaped(batch["image"])).argmax(1)
        exported = jg.export(trainer, example, place / "model", fn=scores)
        hosts = {executor_of(cluster, task).pid for task in cluster.tasks()}
    scored = jg.spark.predict(exported, test, ["image"], "digit int")
    right = functions.avg((scored.digit == scored.label).cast("double"))
    return {"accuracy": scored.agg(right).first()[0], "executors": len(hosts)}


def _pictures(spark: SparkSession, features: dict[str, Any]) -> Any:
    images = features["image"].reshape(-1, 64).tolist()
    rows = zip(images, features["label"].tolist(), strict=True)
    return spark.createDataFrame(list(rows), "image array<float>, label int")


def without_shm(spark: SparkSession) -> dict[str, Any]:
    """Servers see no ``/dev/shm``, as in a container that has none."""
    python = Path(os.environ["SCENARIO_DIRECTORY"]) / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(
        "#!/bin/sh\nexec unshare -m sh -c 'mount --make-rprivate / && mount -t tmpfs "
        f'-o ro none /dev/shm && exec {sys.executable} "$@"\' sh "$@"\n'
    )
    python.chmod(0o700)
    try:
        subprocess.run([python, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"cannot": str(error)}
    with jg.SparkCluster(spark, ps=1, workers=2, python=str(python)) as cluster:
        run = trainer_on(cluster).fit(X, steps=50, batch_size=64, progress=False)
        mounts = Path(f"/proc/{cluster.pid(PS)}/mounts").read_text()
        ways = {way for task in cluster.status().tasks for way in task.ways.values()}
    mounted = [line for line in mounts.splitlines() if " /dev/shm " in line]
    return {"steps": run.steps, "shm": mounted[-1], "ways": sorted(ways)}


def connect(spark: SparkSession) -> dict[str, Any]:
    """A session of Spark Connect: DataFrames are written, and nothing else goes."""
    frame = spark.range(1000)
    path = Path(os.environ["SCENARIO_DIRECTORY"]) / "connected"
    source = jg.Source.spark(frame, columns=["id"], directory=path)
    ids = [one["id"] for one in read_all(str(source.spec["path"]))]
    found = {
        "kind": type(spark).__module__,
        "seen": sorted(int(i) for part in ids for i in part) == list(range(1000)),
        "cluster": refusal(spark, ps=1, workers=1),
        "scores": score_refusal(str(path), frame, ["id"], "p double"),
    }
    spark.stop()
    return found


def executor_of(cluster: jg.SparkCluster, task: str) -> psutil.Process:
    """Returns the JVM of the executor on which a task is."""
    keeper = psutil.Process(keeper_of(cluster, task))
    return next(one for one in keeper.parents() if one.name() == "java")


def stop_inside(spark: SparkSession) -> dict[str, Any]:
    """Spark is stopped while servers run; the last scenario of its session."""
    facts: dict[str, Any] = {}
    frame = spark.range(3)
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
        "frame_of_stopped": data_refusal(frame),
        "scores_of_stopped": score_refusal(None, frame, ["id"], "p double"),
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


_INTS = ("bigint", "tinyint")


def frames(spark: SparkSession) -> dict[str, Any]:
    """A DataFrame is written, trained on and scored; and what of it cannot be."""
    ids = spark.range(0, 1000, 1, 4)
    odd = ("a`b", " ", "é,{}()=\n\t;", "%20")
    frame = ids.select(
        functions.col("id"),
        *(functions.col("id").alias(name) for name in odd),
        (functions.col("id") / 1000).cast("float").alias("x.1"),
        functions.array(*(functions.col("id") % n for n in (2, 3, 5))).alias("hot"),
        (functions.col("id") % 2 == 0).alias("even"),
        array_to_vector(functions.array(functions.rand(7), functions.rand(8))).alias(
            "dense"
        ),
        functions.col("id").cast("string").alias("name"),
    )
    hashed = functions.pmod(functions.xxhash64("name"), functions.lit(1000))
    frame = frame.withColumn("hashed", hashed)
    names = ["dense", "even", "hashed", "hot", "id", "x.1", *odd]
    either = ids.select("id", functions.col("id").alias("ID"))
    stream = spark.readStream.format("rate").load().select("value")
    source = jg.Source.spark(frame, columns=names)
    data = source.open(None)
    path = str(source.spec["path"])
    parts = read_all(path, ("id", "hashed"))
    batch = [one["id"] for one in parts]
    kinds = ["smallint", "int", "bigint", "float", "double", "tinyint", "boolean"]
    every: Callable[[str], Any] = lambda kind: functions.array(
        *(((functions.col("id") + n) % 2).cast(kind) for n in (0, 1, 1))
    ).alias(f"a {kind}")
    lists = jg.Source.spark(ids.select("id", *map(every, kinds)))
    read = read_all(str(lists.spec["path"]), None)
    packed = {
        name: [
            str(read[0][name].dtype),
            all(
                (one[name] == (one["id"][:, None] + [0, 1, 1]) % 2).all()
                for one in read
            ),
        ]
        for name in read[0]
        if name != "id"
    }
    bare = without_pyarrow(spark, ids.select("id", every("float")))
    kept = Path(os.environ["SCENARIO_DIRECTORY"]) / "a 50% frame, é #1; k=v"
    jg.Source.spark(frame, columns=["id"], directory=kept)
    there = sorted(file.suffix for file in kept.iterdir())
    two = functions.when(functions.col("id") % 4 > 0, functions.col("id"))
    length = (functions.col("id") % 2 + 1).cast("int")
    ragged = functions.array_repeat(functions.col("id"), length)
    holes, holes_of_bytes = (functions.array((two % 100).cast(kind)) for kind in _INTS)
    sparse = spark.createDataFrame([(Vectors.sparse(3, {1: 1.0}),)], ["v"])
    wrong = {
        "no_frame": data_refusal([1, 2]),
        "no_column": data_refusal(frame, columns=["densa"]),
        "text": data_refusal(frame, columns="id"),
        "twice": data_refusal(frame, columns=["id", "id"]),
        "type": data_refusal(frame),
        "capitals": data_refusal(either),
        "stream": data_refusal(stream),
        "nulls": data_refusal(ids.select("id", two.alias("some"))),
        "ragged": data_refusal(ids.select(ragged.alias("items"))),
        "holes": data_refusal(ids.select(holes.alias("items"))),
        "holes_of_bytes": data_refusal(ids.select(holes_of_bytes.alias("items"))),
        "sparse": data_refusal(sparse),
        "no_rows": data_refusal(frame.where("id < 0"), columns=["id"]),
        "full": data_refusal(frame, columns=["id"], directory=kept),
        "remote": data_refusal(frame, columns=["id"], directory="hdfs:///data/x"),
        "pattern": data_refusal(frame, columns=["id"], directory="/data/*"),
        "relative": data_refusal(frame, columns=["id"], directory="data"),
        "number": data_refusal(frame, columns=["id"], directory=3),
        "unwritable": data_refusal(frame, columns=["id"], directory="/proc/no/x"),
        "upwards": data_refusal(frame, columns=["id"], directory="/data/../x"),
    }
    refused = kept.parent / "refused"
    data_refusal(ids.select(ragged.alias("items")), directory=refused)

    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    columns = {"dense": "dense"}
    call = lambda model, batch: {"p": model(batch["dense"])[:, 0]}
    scored = jg.spark.predict(model, frame, columns, "p double", fn=call)
    rows = scored.select("id", "p").toArrow()
    as_list = frame.select(vector_to_array("dense").alias("v")).toArrow()
    given = np.array(as_list.column("v").to_pylist())
    expected = np.asarray(model(jnp.asarray(given, jnp.float32)))[:, 0]
    by_list = jg.spark.predict(model, frame, ["dense"], "q array<float>")
    alike = frame.select("dense", "id", functions.col("id"))
    twice = jg.spark.predict(model, alike, columns, "p double", fn=call).first()
    lists_of = np.array(by_list.select("q").toArrow().column("q").to_pylist())
    return {
        "fields": {n: [str(a.dtype), list(a.shape)] for n, a in data.fields.items()},
        "seen": sorted(int(i) for ids in batch for i in ids) == list(range(1000)),
        "packed": packed,
        "hashed": sum(int((one["hashed"] >= 0).sum()) for one in parts),
        "bare": bare,
        "kept": there,
        "wrong": wrong,
        "refused_left": refused.exists(),
        "scored": [str(kind) for kind in scored.dtypes],
        "in_order": rows.column("id").to_pylist() == list(range(1000)),
        "error": float(np.abs(np.array(rows.column("p")) - expected).max()),
        "twice": [*twice.asDict(), len(twice)],
        "error_of_lists": float(np.abs(lists_of[:, 0] - expected).max()),
        "wrong_scores": {
            "column": score_refusal(model, frame, ["densa"], "p double"),
            "out": score_refusal(model, frame, ["dense"], "p of doubles"),
            "nothing": score_refusal(model, frame, ["dense"], ""),
            "taken": score_refusal(model, frame, ["dense"], "id double"),
            "model": score_refusal(3, frame, ["dense"], "p double"),
            "no_frame": score_refusal(model, X, ["dense"], "p double"),
        },
    }


def without_pyarrow(spark: SparkSession, frame: Any) -> dict[str, Any]:
    """Writes lists while the Python of Spark has no pyarrow."""
    place = Path(os.environ["SCENARIO_DIRECTORY"]) / "bare"
    place.mkdir(parents=True)
    (place / "pyarrow.py").write_text("raise ImportError('not here')\n")
    python = place / "python"
    run = f'PYTHONPATH={place}:$PYTHONPATH exec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{run}\n")
    python.chmod(0o700)
    context = spark.sparkContext
    usual, context.pythonExec = context.pythonExec, str(python)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            source = jg.Source.spark(frame)
    finally:
        context.pythonExec = usual
    read = read_all(str(source.spec["path"]), None)
    expected: Callable[[Any], Any] = lambda one: (one["id"][:, None] + [0, 1, 1]) % 2
    return {
        "said": [str(one.message) for one in warned if one.category is UserWarning],
        "where": {Path(one.filename).name for one in warned} >= {Path(__file__).name},
        "read": all((one["a float"] == expected(one)).all() for one in read),
    }


def read_all(
    path: str, columns: tuple[str, ...] | None = ("id",)
) -> list[dict[str, Any]]:
    """Reads what a source has, in the way that workers do."""
    reader = open_source({"kind": "parquet", "path": path, "columns": columns}, ())
    return [
        reader.read(number, np.arange(part.examples))
        for number, part in enumerate(reader.parts)
        if part.examples
    ]


_ALL = (
    *(train, refusals, crowded, frames, moved, executors, profiles),
    *(digits, dynamic, without_shm, connect, stop_inside, leave_open),
)
SCENARIOS: Mapping[str, Callable[[SparkSession], dict[str, Any]]] = {
    one.__name__: one for one in _ALL
}


def tell(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main(master: str, *names: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # which has what scores rows
    builder = SparkSession.builder.appName("jgraph-tests")
    if names == (connect.__name__,):
        builder = builder.remote(master)  # begins a server of its own
    else:
        builder = builder.master(master)
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        **json.loads(os.environ.get("SCENARIO_SETTINGS", "{}")),
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    for name in names:
        began = CLOCK.now()
        try:
            facts = SCENARIOS[name](spark)
        except Exception:  # noqa: BLE001  # told to the test, which fails
            facts = {"failure": traceback.format_exc()}
        took_s = round(CLOCK.now() - began, 1)
        tell({"scenario": name, "scenario_s": took_s, **facts})
    if not {"stop_inside", "connect"} & {*names}:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
