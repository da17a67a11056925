import subprocess
import sys

PROGRAM = """
import threading
import jax, jax.numpy as jnp
from jgraph.cluster.own_process import settle_process

settle_process()
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: jnp.sin(y @ x), x))
made = slow(jnp.ones((400, 400)))
assert made.is_ready(), "computed after the call had returned"
"""


def test_process_of_a_task_computes_where_it_is_asked_to() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
