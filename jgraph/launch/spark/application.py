"""A Spark application as a place for servers: what it has, and why it will not do."""

import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, Final, final

from jgraph.client.spark.failures import has_ended
from jgraph.client.spark.slots import held_slots, is_local, slots_of
from jgraph.errors import ConfigError

_DYNAMIC: Final = "spark.dynamicAllocation"


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


def check_allocation(settings: Any, master: str) -> None:
    """Refuses executors that come and go.

    Args:
      settings: of the application: its ``SparkConf``.
      master: Spark's name of what runs it; ``local[4]`` has no executors, and what is
        set for them means nothing there.

    Raises:
      ConfigError: says what to set.
    """
    setting = f"{_DYNAMIC}.enabled"
    if is_local(master) or settings.get(setting, "false").strip().lower() != "true":
        return
    raise ConfigError(
        "jg.SparkCluster needs a slot for each of its servers as long as it is there, "
        f"and this session has {setting}=true, by which Spark gives away executors "
        "that run no task, and with them the slot of a server that is to start again; "
        f'make the session with .config("{setting}", "false") and as many executors as '
        'the servers need, such as .config("spark.executor.instances", "6")'
    )


def check_python(python: object) -> None:
    """Refuses what is no path of a Python on executors.

    Raises:
      ConfigError: shows what was given.
    """
    if not isinstance(python, str) or "\0" in python:
        raise ConfigError(
            f"python is {python!r:.60}; write the path that it has on executors, for "
            'example python="/opt/train/bin/python", or leave it away for the one of '
            "this process"
        )


@final
class Application:
    """What a session's application can give.

    Args:
      spark: a classic SparkSession.

    Raises:
      ConfigError: it is none, its application has ended, or dynamic allocation is on.
    """

    def __init__(self, spark: Any) -> None:
        needs_pyspark()
        check_session(spark)
        self.context = spark.sparkContext
        if has_ended(self.context):
            raise ConfigError(
                "jg.SparkCluster was given a session that was stopped; make another "
                "one with SparkSession.builder.getOrCreate()"
            )
        check_allocation(self.context.getConf(), self.master)
        self.name = str(self.context.applicationId)

    @property
    def master(self) -> str:
        """Spark's name of what runs it, such as ``local[4]``."""
        return str(self.context.master)

    @property
    def is_one_process(self) -> bool:
        """Whether executors are this driver's JVM."""
        return is_local(self.master)

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
        if not isinstance(resources, Mapping):
            raise ConfigError(
                f"resources is {resources!r:.60}; write what each task of a job asks "
                'for, for example resources={"worker": {"cpus": 4, "gpu": 1}}'
            )
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
          ConfigError: names how many there are, and what to type.
        """
        if not self.is_one_process:
            return
        slots, held = self.slots(), held_slots(self.name)
        if slots is not None and slots < num_tasks + held:
            others = f", of which another cluster holds {held}" if held else ""
            raise ConfigError(
                f"{num_tasks} tasks of the cluster need as many slots, and the "
                f"master {self.master} has {slots}{others}; make the session with "
                f'.master("local[{num_tasks + held}]"), or ask for fewer tasks'
            )


def _profile(job: str, asked: Mapping[str, Any]) -> Any:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    if not isinstance(asked, Mapping):
        raise ConfigError(
            f"resources asks {asked!r:.60} for each {job}; write for example "
            '{"cpus": 4, "gpu": 1}'
        )
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
