"""Import of Flax checkpoints: found, read, matched with a Trainer's model.

Read are those of Orbax (``StandardCheckpointer``, ``PyTreeCheckpointer``, what a
``CheckpointManager`` saved, with one item or several) and of ``flax.training.
checkpoints``, also its files without Orbax. Names say what goes where: a ``TrainState``
of linen, the state of an ``nnx.Module`` and of an ``nnx.Optimizer``, in a dict, a
tuple, or alone. Nothing here writes, renames or deletes.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import jax
import numpy as np

from jgraph.errors import CheckpointError, CheckpointForeignError
from jgraph.runtime.files.manifest import is_committed, is_ours, looking
from jgraph.train.model.trees import Path as Names, Tree, path_of
from jgraph.view import markup

Stored: TypeAlias = Mapping[Names, np.ndarray[Any, Any]]
"""Arrays of a checkpoint by the names on the way to them."""

_TREE: Final = "_METADATA"
"""Describes a tree of arrays, in Orbax's words."""
_STEP: Final = re.compile(r"(?:.*[_-])?(\d+)")
"""The name of a step: ``500``, ``checkpoint_500``."""
_OPTIMIZER: Final = "opt_state"
_USUAL: Final = {(), ("params",), ("model",), ("0",), ("state",), (_OPTIMIZER,)}
"""Where models and optimizers are, more often than copies such as ``ema_params``."""


@final
@dataclass(frozen=True, slots=True)
class Imported:
    """What went where when a checkpoint of another program was restored.

    Attributes:
      path: of the checkpoint.
      sources: variable of the Trainer -> name in the checkpoint.
      missing: variables that the checkpoint does not have; they stay as they were.
      unused: names in the checkpoint that are of no variable.
    """

    path: Path
    sources: Mapping[str, str]
    missing: Sequence[str]
    unused: Sequence[str]

    def __str__(self) -> str:
        rows = [(name, f"<- {of}") for name, of in self.sources.items()]
        rows += [(name, "is not there, stays as it was") for name in self.missing]
        rows += [("(nothing)", f"<- {of}") for of in self.unused]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([str(self.path), *(f"  {n:{width}}  {t}" for n, t in rows)])

    def _repr_html_(self) -> str:
        return markup.lines(str(self))


def find(path: Path) -> Path | None:
    """Returns the checkpoint that a path means; None: there is none of such programs.

    That is the path itself, or its newest step.

    Raises:
      CheckpointError: the disk does not say.
    """
    with looking(path):
        if path.is_file():
            return path
        if not path.is_dir() or is_ours(path):
            return None
        if is_committed(path) and ((path / _TREE).is_file() or _items(path)):
            return path
        steps = [(_STEP.fullmatch(one.name), one) for one in path.iterdir()]
    newest_first = sorted(((int(m[1]), p) for m, p in steps if m), reverse=True)
    return next((p for _, one in newest_first if (p := find(one)) is not None), None)


def read(path: Path) -> Stored:
    """Reads all arrays of a checkpoint that ``find`` returned.

    Raises:
      CheckpointForeignError: that cannot be done; says why.
    """
    try:
        if path.is_file():
            from flax import serialization

            return _flat(serialization.msgpack_restore(path.read_bytes()))
        if (path / _TREE).is_file():
            return _flat(_read_tree(path))
        return _flat({item.name: _read_tree(item) for item in _items(path)})
    except Exception as error:
        raise CheckpointForeignError(
            f"{path} is a checkpoint of another program, and cannot be read "
            f"({type(error).__name__}: {str(error)[:200]})",
            path=str(path),
        ) from error


def match(
    path: Path, arrays: Stored, leaves: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray[Any, Any]], Imported]:
    """Returns the arrays of a checkpoint by the variables that they belong to.

    A model has all its parameters there. Optimizer state is taken if all of it is
    there, and so is other state of the model.

    Args:
      path: of the checkpoint.
      arrays: what it has.
      leaves: what is to be filled: arrays, or their types, by name.

    Raises:
      CheckpointError: parameters are missing, or have another shape or dtype.
    """
    paths = {name: tuple(name.split("/")) for name in leaves}
    optimizer = {names for names in arrays if _OPTIMIZER in names}
    model = arrays.keys() - optimizer
    places: dict[str, Names] = {}
    for part, among in (("params", model), ("state", model), ("opt", optimizer)):
        mine = {n: names[1:] for n, names in paths.items() if names[0] == part}
        of = _under_one_name(mine, among)
        if part == "params" and len(of) < len(mine):
            raise _lacks(path, arrays, sorted(mine.keys() - of.keys()))
        places |= of if len(of) == len(mine) else {}
    values = {n: _counted(arrays[names], leaves[n]) for n, names in places.items()}
    _check_types(path, values, leaves)
    sources = {name: "/".join(names) for name, names in places.items()}
    if (step := _step_of(path, arrays)) is not None:
        values["global_step"] = np.asarray(step[0], leaves["global_step"].dtype)
        sources["global_step"] = step[1]
    source_names = set(sources.values())
    return values, Imported(
        path,
        sources,
        sorted(leaves.keys() - sources.keys()),
        sorted(
            name for names in arrays if (name := "/".join(names)) not in source_names
        ),
    )


def as_layout(path: Path, arrays: Stored) -> Tree:
    """Returns a state tree without a model's help; see ``checkpoint.save``.

    Raises:
      CheckpointError: parameters cannot be told from other state.
    """
    of_optimizer = [names for names in arrays if _OPTIMIZER in names]
    opt = {n[n.index(_OPTIMIZER) + 1 :]: arrays[n] for n in of_optimizer}
    step = _step_of(path, arrays)
    rest = [
        names
        for names in arrays
        if not (_OPTIMIZER in names or "rngs" in names or _is_step(names, arrays))
    ]
    params = {n[n.index("params") + 1 :]: arrays[n] for n in rest if "params" in n}
    if params:
        at = next(n.index("params") for n in rest if "params" in n)
        state = {n[at:]: arrays[n] for n in rest if "params" not in n}
    else:
        # Optimizer state of a parameter ends with the parameter's own path.
        ends = {names[first:] for names in opt for first in range(len(names))}
        heads = Counter(i for n in rest for i in range(len(n)) if n[i:] in ends)
        at = max(heads, key=lambda i: (heads[i], -i), default=0)
        params = {n[at:]: arrays[n] for n in rest if n[at:] in ends}
        state = {n[at:]: arrays[n] for n in rest if n[at:] not in ends}
    if not params or () in state:
        raise CheckpointError(
            f"{path} does not tell parameters from other state; restore it with its "
            "model: trainer.restore(…), then trainer.save(…)",
            path=str(path),
        )
    return {
        "params": _nested(params),
        "opt": _nested(opt),
        "state": _nested(state),
        "global_step": np.asarray(0 if step is None else step[0], np.int32),
    }


def _items(path: Path) -> list[Path]:
    """Returns the trees that a step of a ``CheckpointManager`` has."""
    return sorted(one for one in path.iterdir() if (one / _TREE).is_file())


def _read_tree(path: Path) -> Tree:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        # As NumPy's: Orbax would put them on the devices that they were saved from.
        arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        args = ocp.args.PyTreeRestore(restore_args=arrays)
        return checkpointer.restore(path, args=args)


def _flat(tree: Tree) -> Stored:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    by_path = {path_of(path): leaf for path, leaf in leaves}
    # nnx.state has an array as the `value` of its variable.
    return {
        names[:-1] if names[-1:] == ("value",) else names: np.asarray(leaf)
        for names, leaf in by_path.items()
        if np.asarray(leaf).dtype.kind not in "OUS"
    }


def _under_one_name(
    leaves: Mapping[str, Names], among: Collection[Names]
) -> dict[str, Names]:
    """Returns what is found below that name under which most of it is."""
    above: Counter[Names] = Counter()
    ends = set(leaves.values())
    for names in among:
        above.update(names[:i] for i in range(len(names) + 1) if names[i:] in ends)
    if not above:
        return {}
    best = max(above, key=lambda head: (above[head], head[-1:] in _USUAL, -len(head)))
    candidates = {name: (*best, *names) for name, names in leaves.items()}
    return {name: names for name, names in candidates.items() if names in among}


def _is_step(names: Names, arrays: Stored) -> bool:
    last, value = names[-1:], arrays[names]
    return last in {("step",), ("global_step",)} and value.shape == ()


def _step_of(path: Path, arrays: Stored) -> tuple[int, str] | None:
    """Returns how many updates there were, and what says so."""
    candidates = [names for names in arrays if _is_step(names, arrays)]
    if candidates:
        names = min(candidates, key=len)
        return int(arrays[names]), "/".join(names)
    number = _STEP.fullmatch(path.name)
    return (int(number[1]), path.name) if number else None


def _counted(value: Any, want: Any) -> Any:
    """Returns a value; a count has the dtype of that which it is for."""
    counts = not value.shape and value.dtype.kind in "iu" and want.dtype.kind in "iu"
    return value.astype(want.dtype) if counts else value


def _check_types(
    path: Path, values: Mapping[str, Any], leaves: Mapping[str, Any]
) -> None:
    for name, value in values.items():
        want = leaves[name]
        if value.shape != tuple(want.shape) or value.dtype != want.dtype:
            raise CheckpointError(
                f"{path} has {name} as {value.dtype}{list(value.shape)}, the model "
                f"wants {want.dtype}{list(want.shape)}; use the model and optimizer "
                "that it was saved with",
                leaves=[name],
            )


def _lacks(path: Path, arrays: Stored, missing: Sequence[str]) -> CheckpointError:
    there = ", ".join("/".join(names) for names in list(arrays)[:4])
    return CheckpointError(
        f"{path} has no '{missing[0]}' under any name: {len(missing)} parameters are "
        f"missing; it has {there}, …. Use the model that it was saved with",
        missing=list(missing),
    )


def _nested(flat: Mapping[Names, Any]) -> Tree:
    tree: Tree = {}
    for names, value in flat.items():
        at = tree
        for name in names[:-1]:
            at = at.setdefault(name, {})
        at[names[-1]] = value
    return tree
