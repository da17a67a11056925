"""A test's other process: spawned, spoken to over a pipe, gone at the end."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any


@contextmanager
def spawned(
    play: Callable[..., None], *args: Any
) -> Iterator[tuple[SpawnProcess, Connection]]:
    """Calls ``play`` with a pipe in a new process; gives that, and what it said.

    The first word of the process, for example where it listens, is waited for and can
    be received.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=play, args=(theirs, *args))
    process.start()
    try:
        assert ours.poll(60)
        yield process, ours
    finally:
        process.kill()
        process.join(10)
        process.close()
        ours.close()
        theirs.close()
