import os
import subprocess
import sys

import pytest

PROGRAM = """
import threading
import jax, jax.numpy as jnp
from jgraph.server.process_setup import set_up_process

set_up_process()
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y @ x), x))
made = slow(jnp.ones((400, 400)))
assert made.is_ready(), "computed after the call had returned"
"""


def test_process_of_a_task_computes_where_it_is_asked_to() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=100)


COMPILER = """
import gc, sys
import jax, jax.numpy as jnp
from jgraph.server.process_setup import load_compiler

load_compiler()
loaded = set(sys.modules)
assert gc.get_freeze_count() > len(gc.get_objects())
x = jax.ShapeDtypeStruct((3, 3), jnp.float32)
exported = jax.export.export(jax.jit(jax.grad(lambda x: jnp.sin(x @ x).sum())))(x)
jax.jit(exported.call).lower(x).compile()
assert "scipy.linalg" in loaded and set(sys.modules) == loaded
"""


def test_a_loaded_compiler_neither_imports_nor_is_looked_at_for_garbage() -> None:
    subprocess.run([sys.executable, "-c", COMPILER], check=True, timeout=100)


ARROW = """
from jgraph.server.process_setup import keep_memory

kept = keep_memory()
import pyarrow

assert not kept or pyarrow.default_memory_pool().backend_name == "system"
"""


def test_arrow_takes_the_memory_that_a_task_keeps() -> None:
    pytest.importorskip("pyarrow", reason="needs jgraph[data]")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    subprocess.run([sys.executable, "-c", ARROW], check=True, timeout=100, env=clean)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities on Linux")
def test_threads_that_compile_give_way_and_those_that_compute_do_not() -> None:
    code = """if True:
        import os, threading
        import jax, jax.numpy as jnp, numpy as np
        from jgraph.server.process_setup import (
            _ran_ns, compile_behind_others, set_up_process)

        set_up_process()
        assert compile_behind_others(10)
        large = np.zeros((4096, 1024), np.float32)

        def compiled(fn, x):
            return jax.jit(fn).lower(x).compile()

        def run_behind(work):
            before, mine = _ran_ns(), threading.get_native_id()
            work()
            usual = os.getpriority(os.PRIO_PROCESS, mine)
            ran = {False: 0, True: 0}
            for thread, ns in _ran_ns().items():
                if thread != mine:
                    nice = os.getpriority(os.PRIO_PROCESS, thread)
                    ran[nice > usual] += ns - before.get(thread, 0)
            return ran

        program = compiled(lambda x: (x * 2, x.sum(0)), large)
        compiling = run_behind(lambda: compiled(lambda x: jnp.tanh(x @ x.T), large))
        computing = run_behind(lambda: jax.block_until_ready(program(large)))
        assert compiling[True] > 10 * compiling[False], compiling
        assert computing[False] >= computing[True], computing
    """
    finished = subprocess.run([sys.executable, "-c", code], check=False)
    assert finished.returncode == 0
