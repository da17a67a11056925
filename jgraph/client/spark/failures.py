"""Ends and failures of a Spark application, without the stacks of its JVM."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from jgraph.errors import DataError

_WHY: Final = 400


def has_ended(context: Any) -> bool:
    """Whether a SparkContext was stopped, or its JVM is gone."""
    from py4j.protocol import Py4JError

    try:
        java = context._jsc  # noqa: SLF001  # nothing public says it
        return java is None or bool(java.sc().isStopped())
    except (Py4JError, OSError, AttributeError):
        return True


def reason_of(error: Exception) -> str:
    r"""Returns what Spark says of a job that failed, in one line.

    Example:
      >>> reason_of(Exception("Job 3 cancelled\n\tat X"))
      'Job 3 cancelled'
    """
    text = str(getattr(error, "java_exception", None) or error)
    lines = [
        line.strip()
        for line in text.splitlines()
        if line.strip() and not line.lstrip().startswith(("at ", "File ", "Traceback"))
    ]
    ours = [line for line in lines if line.startswith("RuntimeError: ")]
    chosen = ours[-1].removeprefix("RuntimeError: ") if ours else " ".join(lines[:2])
    return chosen[:_WHY] or type(error).__name__


@contextmanager
def writing(where: object) -> Iterator[None]:
    """Says in one sentence why Spark could not write files.

    What the code of a user raised in Spark's Python stays as it is.

    Raises:
      DataError: it could not.
    """
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        raise DataError(
            f"Spark could not write the DataFrame to {where}: {reason_of(error)}; look "
            "whether the executors may write there, and whether there is room"
        ) from error
