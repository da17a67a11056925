"""A Spark application as a place for servers: what it has, and why it will not do."""

import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, final

from jgraph.client.spark.slots import DYNAMIC, held_slots, is_one_process, slots_of
from jgraph.errors import ConfigError


def needs_pyspark() -> Any:
    """Imports PySpark.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import pyspark
    except ImportError as error:
        raise ConfigError(
            f"jg.SparkCluster needs PySpark, which cannot be imported here ({error}); "
            "type: pip install 'jgraph[spark]', which needs Java 17 or later, or use "
            "jg.LocalCluster on this machine"
        ) from error
    return pyspark


def check_session(spark: object, what: str = "jg.SparkCluster") -> None:
    """Refuses what is no classic SparkSession.

    Raises:
      ConfigError: says what it is.
    """
    from pyspark.sql import SparkSession

    module = type(spark).__module__
    if module.startswith("pyspark.sql.connect"):
        raise ConfigError(
            f"{what} was given a Spark Connect session, which has no SparkContext to "
            "begin tasks with; make a classic one where the driver runs: "
            'SparkSession.builder.master("spark://host:7077").getOrCreate()'
        )
    if not isinstance(spark, SparkSession):
        raise ConfigError(
            f"{what} takes a SparkSession, not {spark!r:.60}; write for example "
            "jg.SparkCluster(SparkSession.builder.getOrCreate(), ps=2, workers=4)"
        )


@final
class Application:
    """What a session's application can give.

    Args:
      spark: a classic SparkSession.

    Raises:
      ConfigError: it is none, or its application has ended.
    """

    def __init__(self, spark: Any) -> None:
        needs_pyspark()
        check_session(spark)
        self.context = spark.sparkContext
        if self.context._jsc is None:  # noqa: SLF001  # nothing public says it
            raise ConfigError(
                "jg.SparkCluster was given a session that was stopped; make another "
                "one with SparkSession.builder.getOrCreate()"
            )

        self.name = str(self.context.applicationId)

    @property
    def master(self) -> str:
        """Spark's name of what runs it, such as ``local[4]``."""
        return str(self.context.master)

    @property
    def is_one_process(self) -> bool:
        """Whether executors are this driver's JVM."""
        return is_one_process(self.context)

    @property
    def is_here(self) -> bool:
        """Whether all executors are on this machine."""
        return self.is_one_process or self.master.startswith("local-cluster[")

    def control_hosts(self) -> tuple[str, list[str]]:
        """Returns where to listen for tasks, and how they reach this host."""
        if self.is_here:
            return "127.0.0.1", ["127.0.0.1"]
        settings = self.context.getConf()
        named = str(settings.get("spark.driver.host"))
        bound = str(settings.get("spark.driver.bindAddress", named))
        return bound, [named]

    def slots(self) -> int | None:
        """Returns how many tasks Spark can run at once now; None: it does not say."""
        return slots_of(self.context)

    def profiles_of(
        self, resources: Mapping[str, Mapping[str, float]], jobs: Collection[str]
    ) -> dict[str, Any]:
        """Returns what a task of each job asks of Spark.

        Args:
          resources: by job, ``{"worker": {"cpus": 4, "gpu": 1}}``.
          jobs: of the cluster.

        Raises:
          ConfigError: a job that the cluster lacks, no such amount, or executors that
            cannot be asked.
        """
        if unknown := sorted(resources.keys() - set(jobs)):
            raise ConfigError(
                f"resources names '{unknown[0]}', and the cluster has only "
                f"{', '.join(jobs)}; write for example "
                'resources={"worker": {"cpus": 4, "gpu": 1}}'
            )
        if resources and self.is_one_process:
            raise ConfigError(
                f"resources are asked of executors, and the master {self.master} has "
                "none: there each task has one slot; leave resources= away"
            )
        return {job: _profile(job, asked) for job, asked in resources.items()}

    def check_room(self, num_tasks: int) -> None:
        """Refuses more tasks than there can ever be slots for.

        Raises:
          ConfigError: names how many there are, and the setting.
        """
        settings = self.context.getConf()
        if self.is_one_process:
            slots, held = self.slots(), held_slots(self.name)
            if slots is not None and slots < num_tasks + held:
                others = f", of which another cluster holds {held}" if held else ""
                raise ConfigError(
                    f"{num_tasks} tasks of the cluster need as many slots, and the "
                    f"master {self.master} has {slots}{others}; make the session with "
                    f'.master("local[{num_tasks + held}]"), or ask for fewer tasks'
                )
        if settings.get(f"{DYNAMIC}.enabled", "false") == "true":
            most = settings.get(f"{DYNAMIC}.maxExecutors", "")
            cores = settings.get("spark.executor.cores", "")
            each = int(settings.get("spark.task.cpus", "1"))
            if most.isdecimal() and cores.isdecimal():
                slots = int(most) * (int(cores) // each)
                if slots < num_tasks:
                    raise ConfigError(
                        f"{num_tasks} tasks of the cluster need as many slots, and "
                        f"{DYNAMIC}.maxExecutors={most} with "
                        f"spark.executor.cores={cores} and spark.task.cpus={each} "
                        f"gives {slots} at most; raise it, or ask for fewer tasks"
                    )


def _profile(job: str, asked: Mapping[str, Any]) -> Any:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    requests = TaskResourceRequests()
    for name, amount in asked.items():
        is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
        if not is_number or amount <= 0 or (name == "cpus" and amount % 1):
            raise ConfigError(
                f"resources asks {amount!r:.60} {name} for each {job}; write for "
                'example {"cpus": 4, "gpu": 1}, cpus in whole numbers'
            )
        if name == "cpus":
            requests = requests.cpus(int(amount))
        else:
            requests = requests.resource(name, float(amount))
    return ResourceProfileBuilder().require(requests).build


def driver_python() -> str:
    """Returns the Python of this process, which executors may have, too."""
    return os.path.abspath(sys.executable)  # a link stays one: it is that of a venv
