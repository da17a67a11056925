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
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


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
    subprocess.run([sys.executable, "-c", COMPILER], check=True, timeout=120)


ARROW = """
from jgraph.server.process_setup import keep_memory

kept = keep_memory()
import pyarrow

assert not kept or pyarrow.default_memory_pool().backend_name == "system"
"""


def test_arrow_takes_the_memory_that_a_task_keeps() -> None:
    pytest.importorskip("pyarrow", reason="needs jgraph[data]")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    subprocess.run([sys.executable, "-c", ARROW], check=True, timeout=120, env=clean)
