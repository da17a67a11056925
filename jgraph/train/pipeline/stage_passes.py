"""The passes of one stage of a pipeline, as functions that run alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from jgraph import _compat
from jgraph._compat import Equation, Jaxpr, Literal, Var
from jgraph.errors import JGError, PipelineError
from jgraph.graph.tracing.alone import Alone, alone, needed_for
from jgraph.graph.tracing.inline import Flat, inline_calls
from jgraph.train.model.trees import Tree
from jgraph.train.pipeline.stage import does_not_take, types_text

# Residuals of a forward pass: the values kept for its backward pass.
#
# Autodiff names the values that the backward pass takes. Of these only what cannot be
# had otherwise is kept: parameters and the inputs are there, what follows from the
# parameters alone is computed again, and so is what elementwise operations make of what
# is kept anyway (``1 - tanh(x)`` beside ``tanh(x)``).


_CHEAP = {
    *("convert_element_type", "neg", "sub", "add", "mul", "broadcast_in_dim", "iota"),
    *("reshape", "squeeze", "transpose", "copy", "copy_p", "stop_gradient", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not", "and", "or", "select_n", "max", "min"),
    *("square", "sign"),
}


@final
@dataclass(frozen=True, slots=True)
class Residuals:
    """A forward pass, and what of it is kept.

    Attributes:
      forward: a jaxpr that gives the outputs, and then what else is kept.
      indices: which of its results are kept.
      again: a jaxpr over the same inputs and what was kept, that gives all that the
        backward pass takes.
      consts: values of the ``constvars`` of both.
    """

    forward: Jaxpr
    indices: tuple[int, ...]
    again: Jaxpr
    consts: tuple[Any, ...]


def residuals(flat: Flat, num_outputs: int, num_params: int) -> Residuals:
    """Returns what to keep.

    Args:
      flat: gives the outputs, then what the backward pass takes.
      num_outputs: how many are outputs.
      num_params: how many of its inputs are parameters; the others change.

    Example:
      >>> import jax.numpy as jnp
      >>> from jgraph.graph.tracing.inline import inline_calls
      >>> def forward(w, x):
      ...     y = jnp.tanh(w.T * x)
      ...     return y, w.T, x, y, 1 - y
      >>> jaxpr, consts, _ = _compat.make_jaxpr(forward, jnp.ones(3), jnp.ones(3))
      >>> found = residuals(inline_calls(jaxpr, consts), 1, 1)
      >>> len(found.forward.outvars), found.indices, len(found.again.outvars)
      (1, (0,), 4)
    """
    jaxpr = flat.jaxpr
    outputs, backward_vars = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    stored_vars = _stored_values(jaxpr, set(_vars(backward_vars)), num_params)
    again_equations = [e for e in jaxpr.eqns if not stored_vars.intersection(e.outvars)]
    stored_order = [v for v in dict.fromkeys(_vars(backward_vars)) if v in stored_vars]
    results = [*outputs, *(v for v in stored_order if v not in _vars(outputs))]
    forward = _compat.build_jaxpr(
        constvars=jaxpr.constvars,
        consts=flat.consts,
        invars=jaxpr.invars,
        outvars=results,
        equations=needed_for(results, jaxpr.eqns),
    )
    again = _compat.build_jaxpr(
        constvars=jaxpr.constvars,
        consts=flat.consts,
        invars=[*jaxpr.invars, *stored_order],
        outvars=backward_vars,
        equations=needed_for(backward_vars, again_equations),
    )
    places = tuple(results.index(v) for v in stored_order)
    return Residuals(forward, places, again, flat.consts)


def _stored_values(jaxpr: Jaxpr, backward_vars: set[Var], num_params: int) -> set[Var]:
    constant = {*jaxpr.constvars, *jaxpr.invars[:num_params]}
    at_hand = constant | backward_vars.intersection(jaxpr.invars)
    stored_vars = set()
    for equation in jaxpr.eqns:
        needs = _vars(equation.invars)
        if constant.issuperset(needs) and not equation.effects:
            constant.update(equation.outvars)
            at_hand.update(equation.outvars)
        elif _is_cheap(equation) and at_hand.issuperset(needs):
            at_hand.update(equation.outvars)
        else:
            new_vars = backward_vars.intersection(equation.outvars)
            stored_vars |= new_vars
            at_hand |= new_vars
    return stored_vars


def _is_cheap(equation: Equation) -> bool:
    return equation.primitive.name in _CHEAP and not equation.effects


def _vars(atoms: Sequence[Any]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]


Leaves: TypeAlias = list[Any]


@final
class StagePasses:
    """The passes of one stage over microbatches of one type, traced once.

    They take and give flat lists: the leaves of parameters, inputs and outputs.

    Args:
      what: the stage, for messages.
      fn: the stage: ``fn(params, inputs, targets)`` gives what the next stage takes;
        that of the last stage gives the loss.
      params: types of the parameters.
      inputs: types of what it takes from the stage before.
      targets: types of what it takes besides.
      input_gradients: whether gradients of the inputs are wanted.
      share: of the last stage: how much a microbatch counts. None for the others.

    Attributes:
      outputs: types of what it gives.

    Raises:
      PipelineError: the stage does not take this, or what it gives has no gradient.
    """

    def __init__(
        self,
        what: str,
        fn: Callable[[Tree, Tree, Tree], Tree],
        params: Tree,
        inputs: Tree,
        targets: Tree,
        *,
        input_gradients: bool,
        share: float | None = None,
    ) -> None:
        self._fn, self._what, self._share = fn, what, share
        self._types, self._tree = jax.tree.flatten((params, inputs, targets))
        self._num_params = len(jax.tree.leaves(params))
        primals = params, inputs if input_gradients else ()
        self._primal_places = [
            n for n, leaf in enumerate(jax.tree.leaves(primals)) if is_float(leaf)
        ]
        self.outputs: Tree = None
        self._back: Any = None
        self._residuals = self._trace()
        self._ahead = Alone(
            "forward pass", self._residuals.forward, self._residuals.consts
        )
        self._alone: dict[tuple[str, bool], Alone] = {}

    def forward(
        self, params: Leaves, inputs: Leaves, label: str = ""
    ) -> tuple[Leaves, Leaves]:
        """Returns (outputs, what is kept for ``backward``)."""
        results = self._ahead([*params, *inputs], label)
        count = len(jax.tree.leaves(self.outputs))
        return results[:count], [results[n] for n in self._residuals.indices]

    def backward(
        self,
        params: Leaves,
        inputs: Leaves,
        stored_values: Leaves,
        gradients: Leaves,
        sums: Leaves,
        label: str = "",
    ) -> tuple[Leaves, Leaves]:
        """Returns (new sums of the parameters' gradients, gradients of the inputs).

        Args:
          params: as for ``forward``.
          inputs: as for ``forward``.
          stored_values: from ``forward``.
          gradients: of the outputs that are floats; none for the last stage.
          sums: so far; empty at first.
          label: names the pass, for people.
        """
        args = [*params, *inputs, *stored_values, *gradients, *sums]

        def run(*args: Any) -> Leaves:
            count = len(self._types) + len(stored_values)
            back_leaves = _evaluate(self._residuals, args[:count])
            back = jax.tree.unflatten(self._back, back_leaves)
            new_gradients = self._gradients(back, args[count : count + len(gradients)])
            return self._added(new_gradients, args[count + len(gradients) :])

        return self._split(self._run("backward pass", run, args, bool(sums), label))

    def both(
        self, params: Leaves, inputs: Leaves, sums: Leaves, label: str = ""
    ) -> tuple[Leaves, Leaves, Leaves]:
        """Returns (outputs, *backward(…)) of the last stage, as one pass."""
        args = [*params, *inputs, *sums]

        def run(*args: Any) -> Leaves:
            count = len(self._types)
            outputs, back = self._vjp(args[:count])
            gradients = self._gradients(back, [])
            return [*outputs, *self._added(gradients, args[count:])]

        loss, *gradients = self._run(
            "forward and backward pass", run, args, bool(sums), label
        )
        return [loss], *self._split(gradients)

    # ------------------------------------------------------------ inside

    def _trace(self) -> Residuals:
        def run(*args: Any) -> Leaves:
            outputs, back = self._vjp(args)
            leaves, self._back = jax.tree.flatten(back)
            return [*outputs, *leaves]

        jaxpr, consts, _ = _compat.make_jaxpr(run, *self._types)
        self._refuse_refs(consts)
        count = len(jax.tree.leaves(self.outputs))
        return residuals(inline_calls(jaxpr, consts), count, self._num_params)

    def _vjp(self, args: Sequence[Any]) -> tuple[Leaves, Any]:
        """Returns the outputs, and what gives the gradients of what is wanted."""

        def over_wanted(*primals: Any) -> Leaves:
            leaves = list(args)
            for place, value in zip(self._primal_places, primals, strict=True):
                leaves[place] = value
            outputs = self._checked(*jax.tree.unflatten(self._tree, leaves))
            self.outputs = jax.tree.map(type_of, outputs)
            output_leaves: Leaves = jax.tree.leaves(outputs)
            return output_leaves

        outputs, back = jax.vjp(over_wanted, *(args[n] for n in self._primal_places))
        return outputs, back

    def _gradients(self, back: Any, gradients: Sequence[Any]) -> Leaves:
        remaining = iter(gradients)
        cotangents: Leaves = []
        for leaf in jax.tree.leaves(self.outputs):
            if self._share is not None:
                cotangents.append(jnp.full(leaf.shape, self._share, leaf.dtype))
            elif is_float(leaf):
                cotangents.append(next(remaining))
            else:
                cotangents.append(np.zeros(leaf.shape, jax.dtypes.float0))
        return list(back(cotangents))

    def _added(self, gradients: Leaves, sums: Sequence[Any]) -> Leaves:
        count = self._num_params
        new = (
            [s + g for s, g in zip(sums, gradients, strict=False)]
            if sums
            else gradients[:count]
        )
        return [*new, *gradients[count:]]

    def _run(
        self,
        name: str,
        run: Callable[..., Leaves],
        args: Leaves,
        adds: bool,
        label: str,
    ) -> Leaves:
        if (name, adds) not in self._alone:
            self._alone[name, adds] = alone(name, run, *map(type_of, args))
        return self._alone[name, adds](args, label)

    def _split(self, gradients: Leaves) -> tuple[Leaves, Leaves]:
        return gradients[: self._num_params], gradients[self._num_params :]

    def _checked(self, params: Tree, inputs: Tree, targets: Tree) -> Tree:
        try:
            outputs = self._fn(params, inputs, targets)
        except JGError:
            raise
        except Exception as error:
            raise does_not_take(self._what, inputs, error) from error
        for leaf in jax.tree.leaves(outputs):
            if not hasattr(leaf, "dtype"):
                raise PipelineError(
                    f"{self._what} gives a {type(leaf).__name__}; it has to give arrays"
                )
        if self._share is not None and (
            len(jax.tree.leaves(outputs)) != 1 or jnp.shape(outputs)
        ):
            raise PipelineError(
                f"loss gives {types_text(outputs)}; it has to give one number, for "
                "example losses.mean()"
            )
        if not any(is_float(leaf) for leaf in jax.tree.leaves(outputs)):
            raise PipelineError(
                f"{self._what} gives {types_text(outputs)}, which has no gradient; it "
                "has to give an array of floats"
            )
        return outputs

    def _refuse_refs(self, consts: Sequence[Any]) -> None:
        if any(_compat.is_ref(jax.typeof(value)) for value in consts):
            raise PipelineError(
                f"{self._what} reads a variable itself; give its value as one of the "
                "stage's parameters"
            )


def type_of(value: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array."""
    return jax.ShapeDtypeStruct(jnp.shape(value), jnp.result_type(value))


def _evaluate(jaxprs: Residuals, args: Sequence[Any]) -> Leaves:
    results: Leaves = jax.core.eval_jaxpr(jaxprs.again, jaxprs.consts, *args)
    return results


def is_float(leaf: Any) -> bool:
    """Whether an array has a gradient."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
