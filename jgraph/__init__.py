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
    from jgraph import errors, testing
    from jgraph.client.cluster import connect
    from jgraph.client.placement.auto import auto
    from jgraph.client.session import Session
    from jgraph.cluster.spec import ClusterSpec
    from jgraph.diagnose import doctor
    from jgraph.errors import JGError
    from jgraph.graph.check import check
    from jgraph.graph.device import DeviceSpec, device
    from jgraph.graph.graph import Graph
    from jgraph.graph.mesh import mesh
    from jgraph.graph.rows.hash_keys import NO_KEY, split_keys
    from jgraph.graph.rows.hash_spec import Admission, Initial
    from jgraph.graph.tracing.function import function
    from jgraph.graph.tracing.taps import tap
    from jgraph.graph.variable import Variable, colocate_with
    from jgraph.launch.local.cluster import LocalCluster
    from jgraph.launch.ray_cluster import RayCluster
    from jgraph.launch.spark.cluster import SparkCluster
    from jgraph.plan.auto.cost_model import CostModel
    from jgraph.plan.placement.spread import GreedyLoadBalancing, RoundRobin
    from jgraph.plan.sharding.partitioner import (
        fixed_size_partitioner,
        min_max_variable_partitioner,
        variable_axis_size_partitioner,
    )
    from jgraph.rpc.security.tls import TLS
    from jgraph.server.server import Server
    from jgraph.serving.exported_model import ExportedModel
    from jgraph.serving.model_server import ModelServer, serve
    from jgraph.train.checkpoint.checkpoints import Checkpoints
    from jgraph.train.data.source import Source
    from jgraph.train.export import export
    from jgraph.train.hash_tables.hash_table import HashTable
    from jgraph.train.pipeline.pipeline import Pipeline
    from jgraph.train.pipeline.towers import towers
    from jgraph.train.privacy.options import Privacy
    from jgraph.train.privacy.secure_sum import SecureSum
    from jgraph.train.run.callbacks import EarlyStopping, NanGuard, StopAtStep
    from jgraph.train.run.trackers import MLflow, TensorBoard, WandB
    from jgraph.train.strategies.async_runner import AsyncPS
    from jgraph.train.strategies.autoscale import AutoScale
    from jgraph.train.strategies.elastic import Elastic
    from jgraph.train.strategies.federated import Federated
    from jgraph.train.strategies.local import Local
    from jgraph.train.strategies.local_sgd import LocalSGD
    from jgraph.train.strategies.sync_runner import SyncPS
    from jgraph.train.tables.bags import embedding_bag
    from jgraph.train.trainer import Trainer

# Where each public name lives. It is imported at first use, so that `import jgraph`
# costs nothing and a server never loads what only a client needs.
_HOMES = {
    "NO_KEY": "jgraph.graph.rows.hash_keys",
    "Admission": "jgraph.graph.rows.hash_spec",
    "AsyncPS": "jgraph.train.strategies.async_runner",
    "AutoScale": "jgraph.train.strategies.autoscale",
    "Elastic": "jgraph.train.strategies.elastic",
    "Checkpoints": "jgraph.train.checkpoint.checkpoints",
    "ClusterSpec": "jgraph.cluster.spec",
    "CostModel": "jgraph.plan.auto.cost_model",
    "DeviceSpec": "jgraph.graph.device",
    "EarlyStopping": "jgraph.train.run.callbacks",
    "ExportedModel": "jgraph.serving.exported_model",
    "Graph": "jgraph.graph.graph",
    "GreedyLoadBalancing": "jgraph.plan.placement.spread",
    "HashTable": "jgraph.train.hash_tables.hash_table",
    "Initial": "jgraph.graph.rows.hash_spec",
    "JGError": "jgraph.errors",
    "Local": "jgraph.train.strategies.local",
    "LocalCluster": "jgraph.launch.local.cluster",
    "LocalSGD": "jgraph.train.strategies.local_sgd",
    "Federated": "jgraph.train.strategies.federated",
    "MLflow": "jgraph.train.run.trackers",
    "ModelServer": "jgraph.serving.model_server",
    "NanGuard": "jgraph.train.run.callbacks",
    "Pipeline": "jgraph.train.pipeline.pipeline",
    "Privacy": "jgraph.train.privacy.options",
    "RayCluster": "jgraph.launch.ray_cluster",
    "RoundRobin": "jgraph.plan.placement.spread",
    "SecureSum": "jgraph.train.privacy.secure_sum",
    "Server": "jgraph.server.server",
    "Session": "jgraph.client.session",
    "Source": "jgraph.train.data.source",
    "SparkCluster": "jgraph.launch.spark.cluster",
    "StopAtStep": "jgraph.train.run.callbacks",
    "SyncPS": "jgraph.train.strategies.sync_runner",
    "TensorBoard": "jgraph.train.run.trackers",
    "TLS": "jgraph.rpc.security.tls",
    "Trainer": "jgraph.train.trainer",
    "Variable": "jgraph.graph.variable",
    "WandB": "jgraph.train.run.trackers",
    "auto": "jgraph.client.placement.auto",
    "check": "jgraph.graph.check",
    "colocate_with": "jgraph.graph.variable",
    "connect": "jgraph.client.cluster",
    "device": "jgraph.graph.device",
    "doctor": "jgraph.diagnose",
    "embedding_bag": "jgraph.train.tables.bags",
    "errors": "jgraph.errors",
    "export": "jgraph.train.export",
    "fixed_size_partitioner": "jgraph.plan.sharding.partitioner",
    "function": "jgraph.graph.tracing.function",
    "mesh": "jgraph.graph.mesh",
    "min_max_variable_partitioner": "jgraph.plan.sharding.partitioner",
    "serve": "jgraph.serving.model_server",
    "spark": "jgraph.train.spark",
    "split_keys": "jgraph.graph.rows.hash_keys",
    "tap": "jgraph.graph.tracing.taps",
    "testing": "jgraph.testing",
    "towers": "jgraph.train.pipeline.towers",
    "variable_axis_size_partitioner": "jgraph.plan.sharding.partitioner",
}

_MODULES = ("errors", "spark", "testing")

__all__ = [
    "NO_KEY",
    "TLS",
    "Admission",
    "AsyncPS",
    "AutoScale",
    "Checkpoints",
    "ClusterSpec",
    "CostModel",
    "DeviceSpec",
    "EarlyStopping",
    "Elastic",
    "ExportedModel",
    "Federated",
    "Graph",
    "GreedyLoadBalancing",
    "HashTable",
    "Initial",
    "JGError",
    "Local",
    "LocalCluster",
    "LocalSGD",
    "MLflow",
    "ModelServer",
    "NanGuard",
    "Pipeline",
    "Privacy",
    "RayCluster",
    "RoundRobin",
    "SecureSum",
    "Server",
    "Session",
    "Source",
    "SparkCluster",
    "StopAtStep",
    "SyncPS",
    "TensorBoard",
    "Trainer",
    "Variable",
    "WandB",
    "__version__",
    "auto",
    "check",
    "colocate_with",
    "connect",
    "device",
    "doctor",
    "embedding_bag",
    "errors",
    "export",
    "fixed_size_partitioner",
    "function",
    "mesh",
    "min_max_variable_partitioner",
    "serve",
    "spark",
    "split_keys",
    "tap",
    "testing",
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
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
