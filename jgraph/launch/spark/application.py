"""A Spark application as a place for servers: what it has, and why it will not do."""

import os
import re
import sys
from contextlib import suppress
from typing import Any, Final, final

from jgraph.errors import ConfigError

_LOCAL: Final = re.compile(r"local(\[.*\])?")
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

    @property
    def master(self) -> str:
        """Spark's name of what runs it, such as ``local[4]``."""
        return str(self.context.master)

    @property
    def is_one_process(self) -> bool:
        """Whether executors are this driver's JVM."""
        return _LOCAL.fullmatch(self.master) is not None

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
        from py4j.protocol import Py4JError

        with suppress(Py4JError, OSError, AttributeError):
            java = self.context._jsc.sc()  # noqa: SLF001  # nothing public says it
            profile = java.resourceProfileManager().defaultResourceProfile()
            return int(java.maxNumConcurrentTasks(profile))
        return None

    def check_room(self, num_tasks: int) -> None:
        """Refuses more tasks than there can ever be slots for.

        Raises:
          ConfigError: names how many there are, and the setting.
        """
        settings = self.context.getConf()
        if self.is_one_process:
            slots = self.slots()
            if slots is not None and slots < num_tasks:
                raise ConfigError(
                    f"{num_tasks} tasks of the cluster need as many slots, and the "
                    f"master {self.master} has {slots}; make the session with "
                    f'.master("local[{num_tasks}]"), or ask for fewer tasks'
                )
        if settings.get(f"{_DYNAMIC}.enabled", "false") == "true":
            most = settings.get(f"{_DYNAMIC}.maxExecutors", "")
            cores = settings.get("spark.executor.cores", "")
            each = int(settings.get("spark.task.cpus", "1"))
            if most.isdecimal() and cores.isdecimal():
                slots = int(most) * (int(cores) // each)
                if slots < num_tasks:
                    raise ConfigError(
                        f"{num_tasks} tasks of the cluster need as many slots, and "
                        f"{_DYNAMIC}.maxExecutors={most} with "
                        f"spark.executor.cores={cores} and spark.task.cpus={each} "
                        f"gives {slots} at most; raise it, or ask for fewer tasks"
                    )


def driver_python() -> str:
    """Returns the Python of this process, which executors may have, too."""
    return os.path.abspath(sys.executable)  # a link stays one: it is that of a venv
