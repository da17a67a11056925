"""What a process settles that serves a task and does nothing else."""

import jax

from jgraph.cluster.allocator import keep_memory


def settle_process() -> None:
    """Makes this process fit to serve a task: its memory, and how it computes.

    JAX's CPU client gives what is not tiny to a thread of its own, so that Python may
    go on meanwhile; a task waits for it anyway, and the two hand-overs cost more than a
    small computation. Before JAX is used, and for processes of ours only.
    """
    keep_memory()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
