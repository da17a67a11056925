"""Distributed TensorFlow's architecture rebuilt on JAX.

A program is an ordinary JAX function over variables. jgraph traces it to one dataflow
graph, places every operation on a task, cuts the graph into one partition per task,
compiles each with XLA, and runs them over gRPC on ``ps`` and ``worker`` hosts.

Example:
  >>> import jgraph as jg
  >>> import jax.numpy as jnp
  >>> w = jg.Variable("w", jnp.zeros((784, 10)), device="/job:ps/task:0")
  >>> w.shape
  (784, 10)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jgraph.loading import uncollected

__version__ = "0.1.0"

if TYPE_CHECKING:
    from jgraph import errors
    from jgraph.cluster.auto import auto
    from jgraph.cluster.client import connect
    from jgraph.cluster.local import LocalCluster
    from jgraph.cluster.server import Server
    from jgraph.cluster.session import Session
    from jgraph.cluster.spec import ClusterSpec
    from jgraph.diagnose import doctor
    from jgraph.errors import JGError
    from jgraph.graph.check import check
    from jgraph.graph.device import DeviceSpec, device
    from jgraph.graph.function import function
    from jgraph.graph.graph import Graph
    from jgraph.graph.hash_keys import NO_KEY, split_keys
    from jgraph.graph.hash_spec import Admission, Initial
    from jgraph.graph.mesh import mesh
    from jgraph.graph.taps import tap
    from jgraph.graph.variable import Variable, colocate_with
    from jgraph.launch.ray_cluster import RayCluster
    from jgraph.plan.cost_model import CostModel
    from jgraph.plan.partitioner import (
        fixed_size_partitioner,
        min_max_variable_partitioner,
        variable_axis_size_partitioner,
    )
    from jgraph.plan.spread import GreedyLoadBalancing, RoundRobin
    from jgraph.rpc.tls import TLS
    from jgraph.train.async_ps import AsyncPS
    from jgraph.train.bags import embedding_bag
    from jgraph.train.callbacks import EarlyStopping, NanGuard, StopAtStep, TensorBoard
    from jgraph.train.checkpoints import Checkpoints
    from jgraph.train.hash_table import HashTable
    from jgraph.train.local import Local
    from jgraph.train.pipeline import Pipeline
    from jgraph.train.source import Source
    from jgraph.train.sync_ps import SyncPS
    from jgraph.train.towers import towers
    from jgraph.train.trainer import Trainer

# Where each public name lives. It is imported at first use, so that `import jgraph`
# costs nothing and a server never loads what only a client needs.
_HOMES = {
    "NO_KEY": "jgraph.graph.hash_keys",
    "Admission": "jgraph.graph.hash_spec",
    "AsyncPS": "jgraph.train.async_ps",
    "Checkpoints": "jgraph.train.checkpoints",
    "ClusterSpec": "jgraph.cluster.spec",
    "CostModel": "jgraph.plan.cost_model",
    "DeviceSpec": "jgraph.graph.device",
    "EarlyStopping": "jgraph.train.callbacks",
    "Graph": "jgraph.graph.graph",
    "GreedyLoadBalancing": "jgraph.plan.spread",
    "HashTable": "jgraph.train.hash_table",
    "Initial": "jgraph.graph.hash_spec",
    "JGError": "jgraph.errors",
    "Local": "jgraph.train.local",
    "LocalCluster": "jgraph.cluster.local",
    "NanGuard": "jgraph.train.callbacks",
    "Pipeline": "jgraph.train.pipeline",
    "RayCluster": "jgraph.launch.ray_cluster",
    "RoundRobin": "jgraph.plan.spread",
    "Server": "jgraph.cluster.server",
    "Session": "jgraph.cluster.session",
    "Source": "jgraph.train.source",
    "StopAtStep": "jgraph.train.callbacks",
    "SyncPS": "jgraph.train.sync_ps",
    "TensorBoard": "jgraph.train.callbacks",
    "TLS": "jgraph.rpc.tls",
    "Trainer": "jgraph.train.trainer",
    "Variable": "jgraph.graph.variable",
    "auto": "jgraph.cluster.auto",
    "check": "jgraph.graph.check",
    "colocate_with": "jgraph.graph.variable",
    "connect": "jgraph.cluster.client",
    "device": "jgraph.graph.device",
    "doctor": "jgraph.diagnose",
    "embedding_bag": "jgraph.train.bags",
    "errors": "jgraph.errors",
    "fixed_size_partitioner": "jgraph.plan.partitioner",
    "function": "jgraph.graph.function",
    "mesh": "jgraph.graph.mesh",
    "min_max_variable_partitioner": "jgraph.plan.partitioner",
    "split_keys": "jgraph.graph.hash_keys",
    "tap": "jgraph.graph.taps",
    "towers": "jgraph.train.towers",
    "variable_axis_size_partitioner": "jgraph.plan.partitioner",
}

__all__ = [
    "NO_KEY",
    "TLS",
    "Admission",
    "AsyncPS",
    "Checkpoints",
    "ClusterSpec",
    "CostModel",
    "DeviceSpec",
    "EarlyStopping",
    "Graph",
    "GreedyLoadBalancing",
    "HashTable",
    "Initial",
    "JGError",
    "Local",
    "LocalCluster",
    "NanGuard",
    "Pipeline",
    "RayCluster",
    "RoundRobin",
    "Server",
    "Session",
    "Source",
    "StopAtStep",
    "SyncPS",
    "TensorBoard",
    "Trainer",
    "Variable",
    "__version__",
    "auto",
    "check",
    "colocate_with",
    "connect",
    "device",
    "doctor",
    "embedding_bag",
    "errors",
    "fixed_size_partitioner",
    "function",
    "mesh",
    "min_max_variable_partitioner",
    "split_keys",
    "tap",
    "towers",
    "variable_axis_size_partitioner",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        what = f"module 'jgraph' has no attribute '{name}'"
        raise AttributeError(what, name=name, obj=import_module(__name__))
    with uncollected():
        module = import_module(home)
    value = module if home == f"jgraph.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
