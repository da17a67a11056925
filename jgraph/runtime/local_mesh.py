"""Code that runs on several devices of a task, taking and giving values of one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.errors import DeviceCountError


def replicated(count: int, label: str) -> NamedSharding:
    """Returns what puts a value whole on each of the first ``count`` devices.

    Args:
      count: number of devices that the code was exported for.
      label: of the segment, for the error.

    Raises:
      DeviceCountError: this process has fewer.
    """
    devices = jax.local_devices()
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
    return NamedSharding(Mesh(np.array(devices[:count]), ("all",)), PartitionSpec())


def on_first_device(
    run: Callable[..., Sequence[jax.Array]], whole: NamedSharding
) -> Callable[..., Sequence[jax.Array]]:
    """Returns ``run``, which works on all devices of ``whole``, for values of one."""

    def spread(*args: Any) -> list[jax.Array]:
        results = run(*jax.device_put(args, whole))
        return [result.addressable_data(0) for result in results]

    return spread
