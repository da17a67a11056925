"""Model as servers call it: example, outputs, and whether rows are independent."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

import jax.numpy as jnp
import numpy as np

from jgraph.errors import ArtifactError
from jgraph.serving.signature import (
    Array,
    Signature,
    TensorSpec,
    check_dtype,
    is_close,
    short,
)
from jgraph.train.model.losses import positional

_LOG = logging.getLogger("jgraph.export")
_ROWS: Final = (1, 4, 64)
"""In how many rows' company a row is tried."""
Run: TypeAlias = Callable[[Sequence[Array]], Sequence[Array]]


@final
@dataclass(frozen=True, slots=True)
class Example:
    """A batch by names of inputs.

    Attributes:
      values: the arrays; without names yet, if it was a tuple.
      batch: name of the size of axis 0; None: it is fixed.
      kind: ``dict``, ``tuple`` or ``array``.
    """

    values: dict[str, Array]
    batch: str | None
    kind: str

    @classmethod
    def of(cls, example: Any, batch: str | None) -> "Example":
        """Returns the batch that a user gave.

        Raises:
          ArtifactError: it is none.
        """
        kind, by_name = "array", {"x": example}
        if isinstance(example, Mapping):
            kind, by_name = "dict", dict(example)
        elif isinstance(example, tuple | list):
            kind, by_name = "tuple", {str(n): one for n, one in enumerate(example)}
        if not by_name or not all(isinstance(name, str) for name in by_name):
            raise ArtifactError("the example has no inputs with names; give a batch")
        if not (batch is None or isinstance(batch, str)):
            raise ArtifactError(
                f"batch={batch!r:.40}: leave it away for any number of rows, or give "
                "batch=None for as many as the example has"
            )
        values = {
            name: as_array(f"'{name}' of the example", one)
            for name, one in by_name.items()
        }
        for name, value in values.items():
            check_dtype(f"input {name}", value.dtype.name)
        if batch is not None:
            sizes = {name: one.shape[:1] for name, one in values.items()}
            if len(set(sizes.values())) > 1 or () in sizes.values():
                counts = ", ".join(f"{n}: {values[n].shape}" for n in sizes)
                raise ArtifactError(
                    "the inputs of the example have different numbers of rows "
                    f"({counts}); give examples along axis 0, equally many, or "
                    "batch=None"
                )
            if (0,) in sizes.values():
                raise ArtifactError("the example has no rows; give one at least")
        return cls(values, batch, kind)

    def called(self, names: Sequence[str]) -> "Example":
        """Returns it with names for the arguments of a tuple."""
        if self.kind != "tuple":
            return self
        if len(names) < len(self.values):
            raise ArtifactError(
                f"the example has {len(self.values)} arguments and the function takes "
                f"{len(names)}"
            )
        return replace(
            self, values=dict(zip(names, self.values.values(), strict=False))
        )

    def rows(self, first: int, count: int) -> dict[str, Array]:
        """Returns so many rows, from the beginning again where they end."""
        places = np.arange(first, first + count)
        return {name: one[places % len(one)] for name, one in self.values.items()}

    def passed(self, inputs: Sequence[Any]) -> Any:
        """Returns inputs in the form that the model takes."""
        if self.kind == "dict":
            return dict(zip(self.values, inputs, strict=True))
        return tuple(inputs) if self.kind == "tuple" else inputs[0]


def as_array(what: str, value: Any) -> Array:
    """Returns a value as an array of the dtype that it has in JAX.

    Args:
      what: what it is, for people.
      value: numbers of Python, NumPy or JAX.

    Raises:
      ArtifactError: it is no array of numbers.

    Example:
      >>> as_array("a scale", 2.5).dtype
      dtype('float32')
    """
    try:
        if isinstance(value, np.ndarray):  # JAX takes this machine's byte order only
            value = value.astype(value.dtype.newbyteorder("="), copy=False)
        return np.asarray(jnp.asarray(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ArtifactError(
            f"{what} is no array of numbers ({error!s:.100})"
        ) from error


def called(
    predict: Callable[..., Any],
    params: Any,
    state: Any,
    x: Any,
    fn: Callable[..., Any] | None,
) -> Any:
    """Returns what a trained model gives for inputs.

    Args:
      predict: as ``Adapter.predict``.
      params: its first argument.
      state: its second.
      x: the inputs; a tuple of several.
      fn: called in place of the model.
    """
    if not isinstance(x, tuple):
        return predict(params, state, x, fn)
    spread: Callable[..., Any] = lambda first, inputs: (
        first(*inputs) if fn is None else fn(first, *inputs)
    )
    return predict(params, state, x, spread)


def outputs_of(result: Any) -> dict[str, Any]:
    """Returns what a function gave, by names of outputs.

    Raises:
      ArtifactError: there is something that is no array, or nothing.
    """
    if isinstance(result, Mapping):
        outputs = {str(name): value for name, value in result.items()}
    elif isinstance(result, tuple | list):
        outputs = {f"y_{n}": value for n, value in enumerate(result)}
    else:
        outputs = {"y": result}
    if not outputs:
        raise ArtifactError(
            "the function returns no array; return an array, a tuple of arrays, or a "
            "dict of them"
        )
    try:
        return {name: jnp.asarray(value) for name, value in outputs.items()}
    except (TypeError, ValueError) as error:
        raise ArtifactError(
            "the function returns what is no array; return an array, a tuple of "
            "arrays, or a dict of them"
        ) from error


def output_spec(name: str, aval: Any, batch: str | None) -> TensorSpec:
    """Returns what an output is, of a function for ``b`` examples.

    Raises:
      ArtifactError: it has not a row for each, or no dtype of a protocol.
    """
    check_dtype(f"output {name}", aval.dtype.name)
    sizes = [str(size) for size in aval.shape]
    if batch is not None and (sizes[:1] != ["b"] or "b" in "".join(sizes[1:])):
        raise ArtifactError(
            f"output '{name}' has the shape ({', '.join(sizes)}) for b examples; "
            "return a row for each example along axis 0, or export with batch=None"
        )
    shape = tuple(None if s == "b" else int(s) for s in sizes)
    return TensorSpec(name, aval.dtype.name, shape)


def names_after_first(fn: Callable[..., Any] | None) -> Sequence[str]:
    """Returns what the inputs of ``fn(model, …)`` are called.

    Raises:
      ArtifactError: there is no such function.
    """
    if fn is None:
        raise ArtifactError(
            "an example of several arguments needs fn=, which names them: "
            "fn=lambda model, user, item: model(user, item)"
        )
    return positional(fn)[1:]


def check_no_tables(tables: Sequence[str]) -> None:
    """Refuses hash tables.

    Raises:
      ArtifactError: there are some.
    """
    if tables:
        raise ArtifactError(
            f"the model has the hash table {tables[0]:.80}, whose rows are found by "
            "keys on parameter servers; such a model is exported without its arrays: "
            'jg.export(trainer, …, rows="ps"); or serve it with run.serve(…), or '
            "export a function of dense parameters"
        )


def rows_independent(
    run: Run, signature: Signature, example: Example, rtol: float, name: str
) -> bool:
    """Tries whether rows have the same answers among others; says so if not.

    Args:
      run: the function.
      signature: of it.
      example: rows to try.
      rtol: how much an answer may differ, relatively.
      name: of the function, for people.
    """
    if example.batch is None:
        run(list(example.values.values()))
        return False
    rng = np.random.default_rng(0)
    rows = example.rows(0, 3)
    alone = [run([one[row : row + 1] for one in rows.values()]) for row in range(3)]
    for count in _ROWS[1:]:
        among = [_among(one, count, rng) for one in rows.values()]
        for row in range(3):
            place = int(rng.integers(count))
            for array, one in zip(among, rows.values(), strict=True):
                array[place] = one[row]
            for spec, answer, reference in zip(
                signature.outputs, run(among), alone[row], strict=True
            ):
                if not is_close(answer[place], reference[0], rtol):
                    _LOG.warning(
                        "%s: '%s' of a row depends on the rows beside it (%s alone, %s "
                        "among %d), so servers will compute each request alone.",
                        name,
                        spec.name,
                        short(np.ravel(reference[0]).tolist()),
                        short(np.ravel(answer[place]).tolist()),
                        count,
                    )
                    return False
    return True


def _among(values: Array, count: int, rng: np.random.Generator) -> Array:
    """Returns rows to try others among: copies, zeros, and noise where it is allowed.

    Whole numbers may be ids, of which only those of the example are known to be good.
    """
    rows = values[rng.integers(len(values), size=count)].copy()
    if np.issubdtype(values.dtype, np.floating):
        rows[::3] = 0
        rows[1::3] += rng.standard_normal(rows[1::3].shape).astype(values.dtype)
    return rows
