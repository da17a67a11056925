"""Functions that are sent to executors whole, with the module that they are in."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

_LOCK: Final = threading.Lock()
"""PySpark notes such modules for the whole process."""


@contextmanager
def by_value(module: ModuleType) -> Iterator[None]:
    """Has PySpark pickle functions of a module by value: executors may not have it."""
    from pyspark import cloudpickle

    with _LOCK:
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)
