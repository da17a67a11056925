"""Code that runs on several devices of a task, over which its values are spread."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jgraph import _compat
from jgraph.errors import DeviceCountError

Layouts: TypeAlias = tuple[Sharding, ...]


def layouts_of(exported: Any, label: str) -> tuple[Layouts, list[Sharding]]:
    """Returns how arguments and results of code lie on the devices of this task.

    Args:
      exported: code for several devices.
      label: of the segment, for the error.

    Raises:
      DeviceCountError: this process has fewer.
    """
    devices, count = jax.local_devices(), exported.nr_devices
    if len(devices) < count:
        kind = devices[0].platform
        advice = (
            f"start it with the environment variable JAX_NUM_CPU_DEVICES={count}, "
            f"as LocalCluster(env={{'JAX_NUM_CPU_DEVICES': '{count}'}}) does"
            if kind == "cpu"
            else "run it on a host that has them"
        )
        raise DeviceCountError(
            f"segment '{label}' spreads over a mesh of {count} devices, and this task "
            f"has {len(devices)} ({kind}); {advice}, or make the mesh smaller",
            needed=count,
            available=len(devices),
        )
    axes = _compat.mesh_axes(exported)
    mesh = Mesh(np.array(devices[:count]).reshape(list(axes.values())), tuple(axes))
    arguments = tuple(exported.in_shardings_jax(mesh))
    return arguments, list(exported.out_shardings_jax(mesh))


def whole(value: jax.Array) -> Any:
    """Returns a spread array in one piece: numpy's, if no device has it whole."""
    if value.is_fully_replicated:
        return value.addressable_data(0)
    joined = np.empty(value.shape, value.dtype)
    for shard in value.addressable_shards:
        joined[shard.index] = np.asarray(shard.data)
    joined.flags.writeable = False
    return joined


@final
class SpreadExecutable:
    """Code over several devices; takes any arrays, and gives spread ones.

    Args:
      run: takes arguments that lie as ``layouts`` says.
      layouts: of the arguments.
    """

    __slots__ = ("_run", "layouts")

    def __init__(
        self, run: Callable[..., Sequence[jax.Array]], layouts: Layouts
    ) -> None:
        self._run = run
        self.layouts = layouts

    def __call__(self, *args: Any) -> Sequence[jax.Array]:
        """Runs the code."""
        with _compat.wide_types():
            return self._run(*jax.device_put(args, self.layouts))
