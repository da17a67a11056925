"""The public names: a fixed list, each explained, none loaded before it is used."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import jgraph
from jgraph.train.run.run import Run

PUBLIC = [
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
MODULES = {"errors", "spark", "testing"}
OBJECTS = [n for n in PUBLIC if n not in {"NO_KEY", "__version__", *MODULES}]
# What `import jgraph` must not bring with it.
HEAVY = {"jax", "numpy", "flax", "optax", "orbax", "grpc", "rich", "typer", "asyncio"}


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yields what users call: functions, classes, their methods, those of a run."""
    public = {name: getattr(jgraph, name) for name in OBJECTS}
    public |= {name: getattr(jgraph.testing, name) for name in jgraph.testing.__all__}
    for name, value in (public | {"Run": Run}).items():
        if callable(value):
            yield name, value
        for attribute in dir(value) if inspect.isclass(value) else ():
            method = getattr(value, attribute)
            is_ours = str(getattr(method, "__module__", "")).startswith("jgraph.")
            if callable(method) and not attribute.startswith("_") and is_ours:
                yield f"{name}.{attribute}", method


# A session runs a function only once it is open: tests/client looks at its flags.
FLAGS = [
    pytest.param(call, flag, id=f"{name}({flag})")
    for name, call in callables()
    for flag, parameter in inspect.signature(call).parameters.items()
    if isinstance(parameter.default, bool) and name != "Session.run"
]


def test_the_export_list_is_exactly_this() -> None:
    assert list(jgraph.__all__) == PUBLIC
    assert dir(jgraph) == sorted(PUBLIC)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_has_a_docstring_with_an_example(name: str) -> None:
    public = getattr(jgraph, name)
    doc = inspect.getdoc(public) or ""
    assert doc.splitlines()[0].endswith("."), f"first line of {name} is no sentence"
    assert ">>> " in doc, f"{name} has no example"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_the_same_object_each_time(name: str) -> None:
    assert getattr(jgraph, name) is getattr(jgraph, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'ClusterSpek'"):
        jgraph.__getattr__("ClusterSpek")


@pytest.mark.parametrize(("call", "flag"), FLAGS)
def test_a_flag_is_true_or_false_and_nothing_else(
    call: Callable[..., Any], flag: str
) -> None:
    parameters = inspect.signature(call).parameters.values()
    needed = [p for p in parameters if p.default is p.empty]
    first = [None for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = {p.name: None for p in needed if p.kind is p.KEYWORD_ONLY}
    with pytest.raises(jgraph.errors.ConfigError, match=f" {flag} is 'no'; give "):
        call(*first, **named, **{flag: "no"})


def test_importing_jgraph_loads_nothing_heavy() -> None:
    code = "import sys, jgraph; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = subprocess.run(  # a process of its own: this one has loaded everything
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(loaded.stdout.split())


def test_the_home_of_each_name_is_a_module_of_ours() -> None:
    for home in jgraph._HOMES.values():
        assert importlib.import_module(home).__name__ == home
