"""Adapters of Flax models: nested dicts of named arrays and pure functions."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, final

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta, unfreeze
from flax.errors import FlaxError

from jgraph import _compat
from jgraph.errors import ConfigError
from jgraph.train.data.data import Dataset
from jgraph.train.hash_tables.hash_step import ModelTable
from jgraph.train.hash_tables.hash_table import linen_tables, nnx_tables
from jgraph.train.model.losses import Loss, loss_and_scalars, positional, split_result
from jgraph.train.model.metrics import metric_values, named_metrics
from jgraph.train.model.trees import Tree, named_like, named_state, path_of, string_keys

Model: TypeAlias = nnx.Module | nn.Module | Callable[[], nnx.Module]
Metric: TypeAlias = Callable[[Any, Any], Any]
"""``metric(model, batch)`` (nnx) or ``metric(params or variables, batch)`` (linen)."""

Make: TypeAlias = Callable[[], tuple[Tree, Tree]]
"""Makes initial parameters and state; can be traced."""

# With a leaf of so many bytes a model's values are not made where it is defined.
_LARGE_BYTES = 16 << 20

_CANNOT_TAKE = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class Adapter(Protocol):
    """A model as pure functions over two trees: parameters and other state."""

    params: Tree
    """Initial values of what the optimizer changes; with ``make``, their types."""
    state: Tree
    """Likewise what the loss itself changes, e.g. BatchNorm statistics."""
    make: Make | None
    """Makes the initial values of a large model, wherever they shall live."""
    tables: list[ModelTable]
    """Hash tables of the model."""

    def loss(
        self, params: Tree, state: Tree, batch: Any, seeds: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[dict[str, Any], Tree]]:
        """Returns (loss, (metrics, new state)) in training mode.

        ``seeds`` are folded into the random keys, one after the other.
        """

    def evaluate(
        self, params: Tree, state: Tree, batch: Any, metrics: Mapping[str, Metric]
    ) -> dict[str, Any]:
        """Returns ``metrics``, and the loss with its own if it can be evaluated."""

    def predict(
        self, params: Tree, state: Tree, x: Any, fn: Callable[..., Any] | None
    ) -> Any:
        """Returns ``model(x)`` in evaluation mode, or ``fn(model or variables, x)``."""

    def model(self, params: Tree, state: Tree) -> Any:
        """Returns what the user calls the trained model."""


def adapt(
    model: Model,
    loss: Loss,
    *,
    seed: int,
    variables: Tree = None,
    data: Dataset | None = None,
    wrt: Any = nnx.Param,
) -> Adapter:
    """Returns the adapter of a Flax model.

    Args:
      model: an ``nnx.Module`` object, a function that makes one, or a
        ``linen.Module`` definition.
      loss: see ``jgraph.train.model.losses``.
      seed: decides a linen model's initial parameters and all dropout.
      variables: linen only: what ``model.init`` returned.
      data: linen only: what to call ``model.init`` with, for want of ``variables``.
      wrt: nnx only: the filter of what is trained.
    """
    if isinstance(model, nnx.Module):
        return NnxAdapter(model, loss, seed, wrt=wrt)
    if not isinstance(model, nn.Module):
        return _adapt_made(model, loss, seed, wrt)

    if variables is not None:
        return LinenAdapter(model, loss, seed, variables)
    assert data is not None  # who has neither has been told
    init = partial(_initial, model, seed, data)
    if _is_large(jax.eval_shape(init)):
        return LinenAdapter(model, loss, seed, None, init)
    return LinenAdapter(model, loss, seed, init())


def _initial(model: nn.Module, seed: int, data: Dataset) -> Tree:
    """Returns what ``model.init`` makes of an example of the data.

    Of a dict it is given those fields that the model's parameters are called by; else
    the field that is written first.
    """
    keys = jax.random.split(jax.random.key(seed))
    example = data.sample()
    names = positional(model.__call__)
    by_name: dict[str, Any] = {}
    if isinstance(example, Mapping) and set(names) <= set(example):
        by_name = {name: example[name] for name in names}
    inputs = () if by_name else (data.fields[data.first][:1],)
    try:
        return model.init({"params": keys[0], "dropout": keys[1]}, *inputs, **by_name)
    except (*_CANNOT_TAKE, FlaxError) as error:
        name, first = type(model).__name__, str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"{name} cannot be initialized with {', '.join(by_name) or data.first}: "
            f"{type(error).__name__}: {first}; for other inputs than the first field "
            "of the data, or the fields named as the model's parameters, give "
            "Trainer(…, variables=model.init(jax.random.key(0), …))"
        ) from error


def _adapt_made(
    make: Callable[[], nnx.Module], loss: Loss, seed: int, wrt: Any
) -> Adapter:
    try:
        inspect.signature(make).bind()
    except ValueError:  # a function of C tells nothing
        pass
    except TypeError as error:
        raise ConfigError(
            f"model is a function that needs arguments ({error}); give a flax.nnx or "
            "flax.linen module, or a function without arguments that makes one: "
            "lambda: Model(rngs=nnx.Rngs(0))"
        ) from None
    abstract = nnx.eval_shape(make)
    if not isinstance(abstract, nnx.Module):
        raise ConfigError(
            f"model is a function that returned a {type(abstract).__name__}; give a "
            "flax.nnx or flax.linen module, or lambda: Model(rngs=nnx.Rngs(0))"
        )
    if _is_large(nnx.state(abstract)):
        return NnxAdapter(abstract, loss, seed, make, wrt=wrt)
    return NnxAdapter(make(), loss, seed, wrt=wrt)


def _is_large(tree: Any) -> bool:
    return any(
        math.prod(leaf.shape) * leaf.dtype.itemsize >= _LARGE_BYTES
        for leaf in jax.tree.leaves(tree)
    )


@final
class NnxAdapter:
    """An ``nnx`` model: parameters are what ``wrt`` selects, state all else but RNGs.

    RNG streams are not state: their keys are those of the model with the seeds of the
    step folded in, so that a step can be repeated and no replica repeats another.
    """

    def __init__(
        self,
        model: nnx.Module,
        loss: Loss,
        seed: int,
        make: Callable[[], nnx.Module] | None = None,
        *,
        wrt: Any = nnx.Param,
    ) -> None:
        self._loss = loss
        self._seed = seed
        self._takes_rngs = len(positional(loss)) > 2
        self._axes = NamedAxes()
        self.tables = nnx_tables(model)
        self._wrt = wrt
        self._def, params, rngs, state = _split(model, wrt)
        _check_trained(params, wrt)
        self.params, self._params_like = named_state(params)
        _check_not_on_mesh(self.params)
        self.state, self._state_like = named_state(state)
        self.make: Make | None = None
        if make is not None:
            self.make = partial(_made_by, make, wrt)
            rngs = jax.jit(lambda: _split(make(), wrt)[2])()
        # Key arrays would be constants of a special type in the graph; data is plain.
        leaves, self._rng_tree = jax.tree.flatten(rngs)
        self._rngs = [_Key(v) if _is_key(v) else v for v in leaves]

    def _merge(self, params: Tree, state: Tree, seeds: tuple[Any, ...]) -> Any:
        # Copies: nnx keeps Variable objects of a split in the state it returns.
        rngs = [v.fold(seeds) if isinstance(v, _Key) else v for v in self._rngs]
        return nnx.merge(
            self._def,
            self._params_like(params),
            jax.tree.unflatten(self._rng_tree, rngs),
            self._state_like(state),
        )

    def loss(
        self, params: Tree, state: Tree, batch: Any, seeds: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[dict[str, Any], Tree]]:
        """See ``Adapter.loss``."""

        def computed() -> tuple[jax.Array, tuple[dict[str, Any], Tree]]:
            model = self._merge(params, state, (self._seed, *seeds))
            loss, metrics = split_result(
                self._loss(model, batch, *self._rngs_of(seeds))
            )
            _, _, _, new = _split(model, self._wrt)
            return loss, (named_metrics(metrics), named_like(new, state))

        return self._axes.called(computed)

    def evaluate(
        self, params: Tree, state: Tree, batch: Any, metrics: Mapping[str, Metric]
    ) -> dict[str, Any]:
        """See ``Adapter.evaluate``."""

        def computed() -> dict[str, Any]:
            model = self._merge(params, state, ())
            model.eval()
            values = metric_values(metrics, model, batch)
            result = self._loss(model, batch, *self._rngs_of(()))
            return loss_and_scalars(result) | values

        return self._axes.called(computed)

    def _rngs_of(self, seeds: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the third argument of a loss that takes it."""
        if not self._takes_rngs:
            return ()
        return (nnx.Rngs(_Key(jax.random.key(self._seed)).fold(seeds)),)

    def predict(
        self, params: Tree, state: Tree, x: Any, fn: Callable[..., Any] | None
    ) -> Any:
        """See ``Adapter.predict``."""

        def computed() -> Any:
            model = self._merge(params, state, ())
            model.eval()
            return model(x) if fn is None else fn(model, x)

        return self._axes.called(computed)

    def model(self, params: Tree, state: Tree) -> Any:
        """Returns a new ``nnx`` model object with these values."""
        to_jax: Callable[[Tree], Tree] = lambda tree: jax.tree.map(jnp.asarray, tree)
        return self._merge(to_jax(params), to_jax(state), ())


@final
class LinenAdapter:
    """A ``linen`` model: parameters are ``params``, state the other collections."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        seed: int,
        variables: Tree,
        make: Callable[[], Tree] | None = None,
    ) -> None:
        self._module = model
        self._loss = loss
        self._seed = seed
        self._axes = NamedAxes()
        self.make: Make | None = None
        self.tables = linen_tables(jax.eval_shape(make) if make else variables)
        if make is None:
            self.params, self.state = self._parts(variables)
        else:
            self.make = lambda: self._parts(make())
            self.params, self.state = jax.eval_shape(self.make)
        _check_not_on_mesh(self.params)
        names = positional(loss)
        self._takes_rng = len(names) > 2
        self._takes_variables = bool(self.state) or names[0] == "variables"

    def _parts(self, variables: Tree) -> tuple[Tree, Tree]:
        variables = dict(unfreeze(meta.unbox(variables)))
        if "params" not in variables:
            raise ConfigError(
                f"the variables of {type(self._module).__name__} have the collections "
                f"{sorted(variables)}, none is 'params'; give what "
                "model.init returned, or {'params': …} of the parameters alone"
            )
        return string_keys(variables.pop("params")), string_keys(variables)

    def _first(self, params: Tree, state: Tree) -> Any:
        return {"params": params, **state} if self._takes_variables else params

    def loss(
        self, params: Tree, state: Tree, batch: Any, seeds: tuple[Any, ...]
    ) -> tuple[jax.Array, tuple[dict[str, Any], Tree]]:
        """See ``Adapter.loss``."""
        rng: tuple[Any, ...] = ()
        if self._takes_rng:
            rng = (_Key(jax.random.key(self._seed)).fold(seeds),)

        def computed() -> tuple[jax.Array, tuple[dict[str, Any], Tree]]:
            result = self._loss(self._first(params, state), batch, *rng)
            loss, aux = split_result(result)
            new = {name: aux.pop(name, value) for name, value in state.items()}
            metrics = named_metrics(aux)
            return loss, (metrics, named_like(string_keys(unfreeze(new)), state))

        return self._axes.called(computed)

    def evaluate(
        self, params: Tree, state: Tree, batch: Any, metrics: Mapping[str, Metric]
    ) -> dict[str, Any]:
        """See ``Adapter.evaluate``.

        A linen loss that draws random numbers or changes collections is written for
        training only; then just the metrics are evaluated.
        """

        def computed() -> dict[str, Any]:
            first = self._first(params, state)
            values = metric_values(metrics, first, batch)
            if self._takes_rng or self.state:
                return values
            return loss_and_scalars(self._loss(first, batch)) | values

        return self._axes.called(computed)

    def predict(
        self, params: Tree, state: Tree, x: Any, fn: Callable[..., Any] | None
    ) -> Any:
        """See ``Adapter.predict``."""

        def computed() -> Any:
            if fn is not None:
                return fn(self._first(params, state), x)
            return self._module.apply({"params": params, **state}, x)

        return self._axes.called(computed)

    def model(self, params: Tree, state: Tree) -> Any:
        """Returns what the loss takes first: ``params``, or all variables."""
        return jax.tree.map(jnp.asarray, self._first(params, state))


def _made_by(make: Callable[[], nnx.Module], wrt: Any) -> tuple[Tree, Tree]:
    _, params, _, state = _split(make(), wrt)
    return named_state(params)[0], named_state(state)[0]


def _split(model: nnx.Module, wrt: Any) -> tuple[Any, Any, Any, Any]:
    parts: Any = nnx.split(model, wrt, nnx.RngState, ...)
    return tuple(parts)


def _check_not_on_mesh(params: Tree) -> None:
    """Refuses parameters whose types name the axes of a mesh.

    Raises:
      ConfigError: names the first, and what to do.
    """
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        mesh: Any = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
        if jax.sharding.AxisType.Explicit in getattr(mesh, "axis_types", ()):
            raise ConfigError(
                f"params/{'/'.join(path_of(keys))} has the axes of a mesh in its type, "
                f"{jax.typeof(leaf)}, and a Trainer places parameters on tasks; make "
                "the model outside of jax.set_mesh, or the mesh with axis_types="
                f"(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
            )


def _check_trained(params: Any, wrt: Any) -> None:
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ConfigError(
            f"wrt={wrt!r:.80} selects no variable of the model, so there is nothing to "
            "train; give a filter such as nnx.Param or nnx.LoRAParam"
        )
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ConfigError(
                f"wrt={wrt!r:.80} selects a variable of dtype {leaf.dtype}, which has "
                "no gradient; give a filter such as nnx.Param or nnx.LoRAParam"
            )


class _Key:
    """A random key as plain data; folding makes a typed key again."""

    def __init__(self, key: jax.Array) -> None:
        self._impl = jax.random.key_impl(key)
        self._data = jax.random.key_data(key)

    def fold(self, seeds: tuple[Any, ...]) -> jax.Array:
        key: jax.Array = jax.random.wrap_key_data(self._data, impl=self._impl)
        fold: Callable[..., jax.Array] = jax.random.fold_in
        for _ in key.shape:
            fold = jax.vmap(fold, in_axes=(0, None))
        for seed in seeds:
            key = fold(key, seed)
        return key


def _is_key(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


_T = TypeVar("_T")


@final
class NamedAxes:
    """Calls functions so that each axis exists that their collectives name, of size 1.

    A mean over such an axis is that of the batch of one worker: workers exchange
    nothing within a step but parameters and gradients. Which names there are is found
    by the first call.

    Example:
      >>> axes = NamedAxes()
      >>> axes.called(lambda x: jax.lax.pmean(x, "batch"), jnp.arange(2.0)).tolist()
      [0.0, 1.0]
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def called(self, fn: Callable[..., _T], *args: Any) -> _T:
        """Returns ``fn(*args)``, a tree of arrays."""
        while True:
            call: Callable[[], _T] = lambda: fn(*args)
            for name in self._names:
                call = _with_axis(call, name)
            try:
                return call()
            except NameError as error:
                name = _compat.unbound_axis(error)
                if not name or name in self._names:
                    raise
                self._names.append(name)


def _with_axis(call: Callable[[], _T], name: str) -> Callable[[], _T]:
    def inner() -> _T:
        batch_call = jax.vmap(call, in_axes=(), axis_size=1, axis_name=name)
        one: _T = jax.tree.map(lambda x: jnp.squeeze(x, 0), batch_call())
        return one

    return inner
