"""Optimizer calls of a Trainer: checked arguments, results of unchanging type."""

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jgraph.errors import ConfigError, JGError
from jgraph.train.model.trees import Tree, path_of

_LOG = logging.getLogger("jgraph.train")

Optimizer: TypeAlias = (
    optax.GradientTransformation
    | Mapping[str, optax.GradientTransformation]
    | nnx.Optimizer[Any]
)
"""An optimizer of all parameters, or one for each top-level name of them."""

LossOf: TypeAlias = Callable[[Tree], jax.Array]
"""The loss of a step's batch, of other parameters."""


@final
class CalledOptimizer:
    """An optimizer as a Trainer calls it, with an unchanging state.

    Its state has one tree from the beginning: what only an update adds to it, such as
    the measurements of ``optax.monitor``, is zeros at first.

    Args:
      tx: the optimizer, or one for each top-level name of the parameters.

    Example:
      >>> tx = CalledOptimizer(optax.sgd(0.5))
      >>> params, gradient = jnp.array(0.0), jnp.array(1.0)
      >>> state = tx.init(params)
      >>> updates, _ = tx.update(gradient, state, params, value=jnp.array(2.0))
      >>> float(updates)
      -0.5
    """

    def __init__(self, tx: Optimizer) -> None:
        transform = _by_name(tx) if isinstance(tx, Mapping) else tx
        self._tx = optax.with_extra_args_support(transform)

    def init(self, params: Tree) -> Tree:
        """Returns the state to begin with.

        Raises:
          ConfigError: the optimizer does not go with such parameters.
        """
        try:
            state = self._tx.init(params)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, JGError):
                raise
            raise _failed(error) from error
        return self._whole(state, params) if _has_room(state) else state

    def update(
        self,
        grads: Tree,
        state: Tree,
        params: Tree,
        *,
        value: Any,
        value_fn: LossOf | None = None,
    ) -> tuple[Tree, Tree]:
        """Returns what to add to the parameters, and the new state.

        Args:
          grads: like the parameters.
          state: of the optimizer.
          params: the parameters.
          value: the loss.
          value_fn: the loss of the batch, of other parameters; None: no batch is here.

        Raises:
          ConfigError: it wants more than a step has, or does not go with the
            parameters, or makes another state than it was given.
        """
        results = self._called(grads, state, params, value, value_fn or _no_batch)
        updates, new = jax.tree.map(jnp.asarray, results)
        _check_same("updates", params, updates, "the parameter is")
        _check_same("state", state, new, "before the update it was")
        return updates, new

    def _called(
        self, grads: Tree, state: Tree, params: Tree, value: Any, value_fn: LossOf
    ) -> Any:
        def loss_of(params: Tree, *, obj_fn: object = 0, grad_fn: object = 0) -> Any:
            del obj_fn, grad_fn  # line searches refuse keywords that this does not take
            return value_fn(params)

        extra_args: dict[str, Any] = {
            "value": value,
            "grad": grads,
            "value_fn": loss_of,
            "obj_fn": value_fn,
            "grad_fn": lambda params, *_: jax.grad(value_fn)(params),
        }
        parameters = inspect.signature(self._tx.update).parameters
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            extra_args = {
                name: one for name, one in extra_args.items() if name in parameters
            }
        while True:
            try:
                return self._tx.update(grads, state, params, **extra_args)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                if isinstance(error, JGError):
                    raise
                # A part of a chain may take fewer than the chain.
                if (name := _unexpected(error)) not in extra_args:
                    raise _failed(error) from error
                del extra_args[name]

    def _whole(self, state: Tree, params: Tree) -> Tree:
        """Returns the state with what an update adds to it, as zeros.

        That can be when the update does not read what it adds; else the state stays as
        it is. Booleans and whole numbers that become others are those from the start.
        """
        update = partial(self._called, value=jnp.zeros(()), value_fn=_zero)
        grads = jax.tree.map(jnp.zeros_like, params)
        try:
            _, after = jax.eval_shape(update, grads, state, params)
        except JGError:
            return state  # the update itself will say so, with all that a step has
        types, values = _by_path(after), _by_path(state)
        first: Any = jax.tree.structure(state)
        if jax.tree.structure(after) == first or not _widens(values, types):
            return state
        values = {path: v.astype(types[path].dtype) for path, v in values.items()}

        def of_first(values: Any, *rest: Tree) -> Any:
            return update(rest[0], jax.tree.unflatten(first, values), rest[1])

        def of_grown(values: Any, *rest: Tree) -> Any:
            return update(rest[0], grown(values), rest[1])

        def grown(values: Any) -> Tree:
            old_values = dict(zip(_by_path(state), values, strict=True))
            zeros = {path: np.zeros(t.shape, t.dtype) for path, t in types.items()}
            leaves = {**zeros, **old_values}.values()
            return jax.tree.unflatten(jax.tree.structure(after), leaves)

        arguments = list(values.values()), grads, params
        texts = [str(jax.make_jaxpr(fn)(*arguments)) for fn in (of_first, of_grown)]
        return grown(arguments[0]) if texts[0] == texts[1] else state


def unwrapped(tx: Any, wrt: Any) -> tuple[Any, Any]:
    """Returns the transformation of an ``nnx.Optimizer``, and what that trains.

    Its state stays behind: a Trainer keeps its own. Anything else is as it was.

    Args:
      tx: what the user gave as optimizer.
      wrt: likewise, of the variables to train; that of the optimizer counts if this is
        unset.
    """
    if not isinstance(tx, nnx.Optimizer):
        return tx, wrt
    _LOG.warning(
        "tx is an nnx.Optimizer; the Trainer takes its tx, and keeps the state of the "
        "optimizer itself, which begins anew"
    )
    return tx.tx, getattr(tx, "wrt", wrt) if wrt is nnx.Param else wrt


def check_optimizer(tx: object) -> None:
    """Refuses what is no optimizer, and no dict of them.

    Raises:
      ConfigError: says what to give.
    """
    parts = tx if isinstance(tx, Mapping) and tx else {"": tx}
    for name, part in parts.items():
        if not (hasattr(part, "init") and hasattr(part, "update")):
            raise ConfigError(
                f"tx{f'[{name!r}]' if name else ''} is a {type(part).__name__}; give "
                "an optax optimizer, for example optax.adam(1e-3), or a dict with one "
                "for each top-level name of the parameters"
            )


def _by_name(
    parts: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer that gives each top-level name its own."""

    def labels(params: Tree) -> Tree:
        if set(params) != set(parts):
            raise ConfigError(
                f"tx has optimizers for {sorted(parts)}, and the parameters of the "
                f"model are in {sorted(params)}; give one for each, optax.set_to_zero()"
                " for what is not trained"
            )
        return {name: name for name in params}

    return optax.multi_transform(dict(parts), labels)


def _has_room(state: Tree) -> bool:
    """Whether there are places in a state where an update could put something."""
    empty: tuple[Any, ...] = ((), [], {})
    is_room = lambda part: (
        part is None or any(type(part) is type(one) and part == one for one in empty)
    )
    return any(map(is_room, jax.tree.leaves(state, is_leaf=is_room)))


def _by_path(tree: Tree) -> dict[tuple[str, ...], Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_of(keys): leaf for keys, leaf in leaves}


def _widens(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> bool:
    """Whether each leaf is there later, in a type that has all its values."""
    return all(
        path in new
        and leaf.shape == new[path].shape
        and jnp.promote_types(leaf.dtype, new[path].dtype) == new[path].dtype
        for path, leaf in old.items()
    )


def _check_same(what: str, old: Tree, new: Tree, was: str) -> None:
    """Refuses a tree that has not the paths, shapes and kinds of types of another."""
    before, after = _by_path(old), _by_path(new)
    kinds: list[Any] = [jax.tree.structure(tree) for tree in (old, new)]
    paths = [*before, *(path for path in after if path not in before)]
    types = ((p, _type_of(before.get(p)), _type_of(after.get(p))) for p in paths)
    first = "opt/" if what == "state" else "params/"
    difference = next(
        (f"{first}{'/'.join(p)} is {b}, and {was} {a}" for p, a, b in types if a != b),
        "its containers are of other kinds" if kinds[0] != kinds[1] else "",
    )
    if difference:
        raise ConfigError(
            f"the optimizer tx returns {what} of another form: {difference}; its "
            "update must keep paths, shapes and types, and its init must make the "
            "whole state"
        )


def _type_of(leaf: Any) -> str:
    """Returns shape and kind of type; the number of bits is the variable's own."""
    if leaf is None:
        return "nothing"
    shape = ",".join(map(str, leaf.shape))
    kinds = jnp.floating, jnp.signedinteger, jnp.unsignedinteger, jnp.complexfloating
    kind = next((k.__name__ for k in kinds if jnp.issubdtype(leaf.dtype, k)), None)
    return f"{kind or leaf.dtype}[{shape}]"


def _unexpected(error: Exception) -> str:
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return match[1] if match else ""


def _failed(error: Exception) -> ConfigError:
    first = str(error).partition("\n")[0].rstrip(".;")
    return ConfigError(
        f"the optimizer tx failed: {type(error).__name__}: {first}; a Trainer gives it "
        "parameters and gradients of a batch as nested dicts of arrays, and value, "
        "grad, value_fn, obj_fn, grad_fn by keyword, so that what needs parameters of "
        "its own (optax.lookahead) or gradients of each example (contrib.dpsgd) fails"
    )


def _zero(params: Tree) -> jax.Array:
    del params
    return jnp.zeros(())


def _no_batch(params: Tree) -> NoReturn:
    del params
    raise ConfigError(
        "the optimizer tx evaluates the loss itself (a line search, or another "
        "gradient), which needs the batch where the update is; SyncPS applies the mean "
        "of gradients on parameter servers, where no batch is, and a jg.HashTable has "
        "only rows there: use AsyncPS() or Local(), or an optimizer such as optax.adam"
    )
