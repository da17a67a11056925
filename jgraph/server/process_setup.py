"""Process setup of a dedicated server: allocator, sockets, JAX dispatch, compiler."""

import ctypes
import gc
import logging
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

import jax
import jax.export
import jax.numpy as jnp

from jgraph.rpc.frames import installed_version

# Allocator settings (glibc malloc) of a server process.
#
# A step takes and returns the same large blocks. By default glibc gets each from the
# kernel and gives it back, and every page is cleared and mapped anew: measured, most of
# the time of a step of 100 MB, and half of that of a gRPC stream.


# Names and numbers of glibc's malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_ARENA_MAX: Final = -8
_NEVER: Final = 2**31 - 1

_COMPILING_NS: Final = 1_000_000
"""A thread that has run for longer while a program was compiled is of the compiler."""
EXPERIMENTS: Final = "GRPC_EXPERIMENTS"
"""A variable of gRPC; says which of its newer parts a process uses."""
_NEWEST_GRPC: Final = (1, 85)
"""Version of grpcio that is known to have the other way still."""

_KEPT: Final = threading.Event()
"""Set once this process keeps what it frees."""

_logger = logging.getLogger(__name__)


def keep_memory() -> bool:
    """Makes this process keep the memory that it frees, for its next allocation.

    For processes of ours only, and before they start threads: it holds for all of the
    process. With another C library than glibc it changes nothing, nor where somebody
    set one of glibc's own variables (``MALLOC_MMAP_THRESHOLD_``, …).

    Arrow, which reads Parquet files, takes its memory from there too, unless its own
    variable (``ARROW_DEFAULT_MEMORY_POOL``) says otherwise.

    Returns:
      Whether it holds.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        _logger.debug("this C library has no mallopt; freed memory is not kept")
        return False
    options = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
    if not all(mallopt(option, value) == 1 for option, value in options):
        return False
    # Arrow's own allocator gives back, after 10 ms, what each row group takes anew.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    _KEPT.set()
    return True


def give_back_memory() -> None:
    """Gives free memory to the kernel, wherever it lies between what is used.

    For when work is over that comes once: the values with which a variable began, in a
    block of their size, would be kept for ever where nothing of that size follows.
    Where memory is not kept no such block is: a program with a server of its own would
    have all of its memory looked through for nothing.

    JAX lets go of NumPy's memory that it took without a copy, as of a variable that was
    filled by rows, when Python collects garbage, however little of it.
    """
    gc.collect(0)
    if _KEPT.is_set():
        ctypes.CDLL(None).malloc_trim(0)


def set_up_process() -> None:
    """Makes this process fit to serve a task: its memory, and how it computes.

    JAX's CPU client gives what is not tiny to a thread of its own, so that Python may
    go on meanwhile; a task waits for it anyway, and the two hand-overs cost more than a
    small computation. Before JAX is used, and for processes of ours only.
    """
    keep_memory()
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def wait_where_asked() -> bool:
    """Has the thread that waits for requests read their sockets itself.

    Otherwise threads of gRPC's event engine read, and each request goes through two of
    them on its way: a sixth of the CPU of a small one. Before gRPC is loaded, and for
    processes of ours only. What somebody has set is left alone.

    Returns:
      Whether it holds.
    """
    if EXPERIMENTS in os.environ or not _has_other_way():
        return False
    os.environ[EXPERIMENTS] = "-event_engine_listener"
    return True


def _has_other_way() -> bool:
    found = re.match(r"(\d+)\.(\d+)", installed_version("grpcio"))
    return found is not None and (int(found[1]), int(found[2])) <= _NEWEST_GRPC


def load_compiler() -> None:
    """Compiles a program of nothing, as programs of others are compiled.

    With the first one JAX and XLA load half a second's worth of what they need to
    compile. A process does that while its cluster waits for somebody's first step.
    """
    number = jax.ShapeDtypeStruct((), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: x + 1))(number)
    jax.jit(exported.call).lower(number).compile()
    gc.freeze()  # what is loaded stays, and is not looked at for garbage again


def compile_behind_others(nice: int) -> bool:
    """Lets whatever else this process does go before what it compiles.

    Whoever waits for it, XLA compiles in threads of its own, which JAX does not name:
    those that begin, or run, while the first programs are compiled. Before anything
    else runs here, and for processes of ours only. What computes keeps its priority.

    Args:
      nice: by how much these threads are nicer than this one from now on.

    Returns:
      Whether they were found: on Linux, where CPUs compute.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return False
    before = _ran_ns()
    load_compiler()
    _compile_on_all_threads()
    mine, found = threading.get_native_id(), False
    nice += os.getpriority(os.PRIO_PROCESS, 0)  # of one begun with `nice`
    for thread, ran_ns in _ran_ns().items():
        is_new = thread not in before
        if thread != mine and (is_new or ran_ns - before[thread] > _COMPILING_NS):
            with suppress(OSError):  # it is over
                os.setpriority(os.PRIO_PROCESS, thread, nice)
                found = True
    return found


def _compile_on_all_threads() -> None:
    """Compiles programs at once, so that each of XLA's threads has one."""
    count = os.cpu_count() or 1

    def compile_one(size: int) -> None:
        x = jax.ShapeDtypeStruct((size, size), jnp.float32)
        jax.jit(jnp.tanh).lower(x).compile()

    with ThreadPoolExecutor(count) as threads:
        list(threads.map(compile_one, range(8, 8 + count)))


def _ran_ns() -> dict[int, int]:
    """Returns for how long each thread of this process has run; {}: Linux is silent."""
    ran = {}
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError, IndexError):
            line = Path(f"/proc/self/task/{thread}/schedstat").read_text("ascii")
            ran[int(thread)] = int(line.split()[0])
    return ran
