"""Process setup of a dedicated server: allocator, JAX dispatch, compiler warm-up."""

import jax
import jax.export
import jax.numpy as jnp

from jgraph.server.allocator import keep_memory


def set_up_process() -> None:
    """Makes this process fit to serve a task: its memory, and how it computes.

    JAX's CPU client gives what is not tiny to a thread of its own, so that Python may
    go on meanwhile; a task waits for it anyway, and the two hand-overs cost more than a
    small computation. Before JAX is used, and for processes of ours only.
    """
    keep_memory()
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def load_compiler() -> None:
    """Compiles a program of nothing, as programs of others are compiled.

    With the first one JAX and XLA load half a second's worth of what they need to
    compile. A process does that while its cluster waits for somebody's first step.
    """
    number = jax.ShapeDtypeStruct((), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x: x + 1))(number)
    jax.jit(exported.call).lower(number).compile()
