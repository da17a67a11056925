"""Lowering of a segment's operations to one exported XLA program.

The program is flat: plain arrays in, plain arrays out. The function is always called
``segment`` and carries no source locations, so equal segments of several tasks, and of
several traces, have equal bytes and one digest.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.export
import jax.numpy as jnp

from jgraph import _compat
from jgraph._compat import Atom, Equation, Jaxpr, Literal, Var
from jgraph.errors import NotExportableError
from jgraph.graph.mesh import mesh_of
from jgraph.graph.sizes import symbols_of
from jgraph.plan.analysis.flow import Flow, Op, row_ids
from jgraph.plan.analysis.row_access import RowAccess, RowValues, row_accesses
from jgraph.plan.analysis.run_each import run_each
from jgraph.plan.lowering import by_count, on_mesh
from jgraph.plan.program.program import SegmentCode
from jgraph.plan.program.types import from_plain, is_key, plain_type, to_plain

_HEAVY = ("dot_general", "conv_general_dilated", "scan", "while", "cond", "gather")
_PYTHON = ("callback", "debug_print")


@final
@dataclass(frozen=True, slots=True)
class Segment:
    """What a segment's executable takes and gives, as ``SegmentNode`` orders it.

    Attributes:
      ops: the operations, in program order.
      updates: variables that are taken and given back.
      reads: variables that are only looked at.
      inputs: values from outside.
      outs: values for outside.
      blind: (variable, position in ``outs``) of what a ``WriteNode`` is to write.
      row_updates: variables of which rows are taken and given back.
      row_reads: variables of which rows are only looked at.
      passed: (variable, value) of what a ``WriteNode`` is to write as it came.
    """

    ops: tuple[Op, ...]
    updates: tuple[int, ...]
    reads: tuple[int, ...]
    inputs: tuple[Var, ...]
    outs: tuple[Atom, ...]
    blind: tuple[tuple[int, int], ...] = ()
    row_updates: tuple[RowAccess, ...] = ()
    row_reads: tuple[RowAccess, ...] = ()
    passed: tuple[tuple[int, Var], ...] = ()


def segment_of(flow: Flow, ops: Sequence[Op], needed: Sequence[Var]) -> Segment:
    """Returns the calling convention of a cluster's operations.

    A variable that nothing in the program reads need not exist to be written: its
    value leaves as a plain result for a ``WriteNode``. All others that are written are
    taken and given back, so that one step's writes show at once.

    Args:
      flow: the graph.
      ops: the operations with their copies, in program order.
      needed: values that others need.
    """
    read_anywhere = {v for op in flow.ops.values() for v, _ in op.reads}
    touched = _touched_by_ref(ops)
    looked_at = {v for op in ops for v, _ in op.reads}
    written = dict.fromkeys(v for op in ops for v in op.writes)
    blind = {v for v in written if v not in read_anywhere and v not in touched}
    results = {v for op in ops for v in op.equation.outvars}
    passed = [op for op in ops if _passes(flow, op, results, blind)]
    left_out = {op.index for op in passed}
    ops = [op for op in ops if op.index not in left_out]
    by_rows = row_accesses(flow, ops)
    updates = sorted(v for v in written if v not in blind)
    reads = sorted(looked_at - set(updates))
    outs: list[Atom] = list(needed)
    positions = []
    for op in ops:
        if op.is_whole_write and op.writes[0] in blind:
            positions.append((op.writes[0], len(outs)))
            outs.append(op.equation.invars[1])
    return Segment(
        ops=tuple(ops),
        updates=tuple(v for v in updates if v not in by_rows),
        reads=tuple(v for v in reads if v not in by_rows),
        inputs=_inputs(flow, ops, by_rows),
        outs=tuple(outs),
        blind=tuple(positions),
        row_updates=tuple((v, by_rows[v]) for v in updates if v in by_rows),
        row_reads=tuple((v, by_rows[v]) for v in reads if v in by_rows),
        passed=tuple((op.writes[0], op.equation.invars[1]) for op in passed),
    )


def _passes(flow: Flow, op: Op, results: Container[Var], blind: Container[int]) -> bool:
    """Whether a value from outside is written as it came: keys of rows are no int32."""
    if not op.is_whole_write or op.writes[0] not in blind:
        return False
    value = op.equation.invars[1]
    return not (
        isinstance(value, Literal) or flow.is_small_const(value) or value in results
    )


def _inputs(
    flow: Flow, ops: Sequence[Op], by_rows: Mapping[int, Var]
) -> tuple[Var, ...]:
    """Returns the values from outside; ids of rows only if anything else takes them."""
    inside = {v for op in ops for v in op.equation.outvars}
    found: dict[Var, None] = {}
    for op in ops:
        ids = op.rows if _variable(op) in by_rows else None
        found.update(dict.fromkeys(v for v in flow.inputs(op) if v is not ids))
    return tuple(v for v in found if v not in inside)


def lower(
    flow: Flow, segment: Segment, code: "SegmentFunction", platforms: tuple[str, ...]
) -> SegmentCode:
    """Returns the exported program of a segment.

    Args:
      flow: the graph that holds the segment's constants and variables.
      segment: what to lower.
      code: the segment as a function.
      platforms: kinds of device that it is to run on, e.g. ``("cpu", "cuda")``.

    Raises:
      NotExportableError: JAX cannot export one of its operations.
    """
    types = by_count.open_types([plain_type(a) for a in code.avals], code.ids)
    mesh = mesh_of(op.equation for op in segment.ops)
    laid = None
    if mesh is not None:
        args, results = (
            on_mesh.laid_out(values, code.jaxpr, mesh, code.alike)
            for values in (code.args, code.results)
        )
        laid = args, results
    try:
        exported = _export(code.function, types, platforms, laid)
    except Exception as error:
        raise _not_exportable(flow, segment, platforms, error) from error
    return SegmentCode(
        digest=hashlib.sha256(exported).hexdigest(),
        exported=exported,
        platforms=platforms,
        label=label_of([op.equation for op in segment.ops]),
    )


def label_of(equations: Sequence[Equation], *, call: bool = False) -> str:
    """Returns what a segment computes, for people: its heaviest, then most frequent.

    Variables' reads and writes are not named. What runs alone has a name.

    Args:
      equations: of the segment.
      call: name that call of what runs alone, not the function.
    """
    for equation in equations:
        if equation.primitive.name == "alone":
            return str(equation.params["label" if call else "name"])
    names = [e.primitive.name for e in equations]
    counts = Counter(n for n in names if n not in {"get", "swap", "addupdate"})
    ranked = sorted(counts, key=lambda n: (n not in _HEAVY, -counts[n], n))
    text = ", ".join(f"{n} x{counts[n]}" for n in ranked[:3])
    rest = sum(counts[n] for n in ranked[3:])
    if rest:
        text += f", {rest} more"
    return text or "copy"


def _touched_by_ref(ops: Sequence[Op]) -> set[int]:
    """Returns the variables that some op uses in part, so that they must be Refs."""
    partial = [op for op in ops if not op.whole]
    return {v for op in partial for v in (*(r for r, _ in op.reads), *op.writes)}


def _export(
    function: Callable[..., Any],
    types: Sequence[jax.ShapeDtypeStruct],
    platforms: tuple[str, ...],
    laid: tuple[Any, Any] | None,
) -> bytes:
    """Returns the function as bytes; ``laid``: how arguments and results lie."""

    def segment(*args: Any) -> Any:
        return function(*args)

    # Of sizes that are names all arguments tell, also those that are used for nothing.
    named = any(symbols_of(t.shape) for t in types)
    options: dict[str, Any] = {"keep_unused": named}
    if laid is not None:  # so the module says how many devices it needs
        arguments, results = laid
        options |= {"in_shardings": arguments, "out_shardings": results}
        options["keep_unused"] = True
    jitted = jax.jit(segment, **options)
    with _compat.no_locations():
        exported = jax.export.export(jitted, platforms=platforms)(*types)
        return _compat.portable_code(exported)


@final
@dataclass(frozen=True, slots=True)
class SegmentFunction:
    """A segment as a function over plain arrays.

    Attributes:
      function: takes and gives lists of them.
      avals: of the arguments.
      ids: per argument, those whose number of rows it may have, see ``by_count``.
      jaxpr: what is computed.
      args: per argument its value in the jaxpr, None for rows and what has several.
      results: likewise.
      alike: old and new values of variables.
    """

    function: Callable[..., list[Any]]
    avals: list[Any]
    ids: list[Var | None]
    jaxpr: Jaxpr
    args: "list[Atom | None]"
    results: "list[Atom | None]"
    alike: list[tuple[Atom, Atom]]


def segment_function(flow: Flow, segment: Segment) -> SegmentFunction:
    """Returns a segment as a function."""
    accesses = [v for v, _ in (*segment.row_updates, *segment.row_reads)]
    refs = _touched_by_ref(segment.ops) - set(accesses)
    variables = [*segment.updates, *segment.reads]
    whole = [op for op in segment.ops if op.whole and _variable(op) not in refs]
    rows, as_whole = RowValues(), {op.index for op in whole}
    for op in segment.ops:
        if op.index not in as_whole:
            rows.add(op, _variable(op) if _variable(op) in accesses else None)
    direct = {v: n for n, v in enumerate(variables) if v not in refs}
    by_ref = {v: n for n, v in enumerate(variables) if v in refs}
    reads = {op.equation.outvars[0]: op.reads[0][0] for op in whole if not op.writes}
    written = {
        _variable(op): rows.renamed(op.equation.invars[1]) for op in whole if op.writes
    }
    new_rows = [rows.outputs[v] for v, _ in segment.row_updates]
    consts = {
        v: flow.consts[v]
        for op in segment.ops
        for v in op.equation.invars
        if not isinstance(v, Literal) and v in flow.consts and flow.is_small_const(v)
    }
    outs = [written[v] for v in segment.updates if v in written]
    outs += [*new_rows, *(rows.renamed(a) for a in segment.outs)]
    for atom in outs:
        if not isinstance(atom, Literal) and flow.is_small_const(atom):
            consts[atom] = flow.consts[atom]
    ref_vars = [flow.graph.jaxpr.invars[v] for v in by_ref]
    jaxpr = _compat.build_jaxpr(
        invars=[
            *(*ref_vars, *consts, *reads),
            *(rows.inputs[v] for v in accesses),
            *segment.inputs,
        ],
        outvars=outs,
        equations=[_compat.without_source(e) for e in rows.equations],
    )
    avals: list[Any] = [flow.graph.variables[v].aval for v in variables]
    avals += [rows.inputs[v].aval for v in accesses]
    avals += [v.aval for v in segment.inputs]
    num_direct = len([v for v in segment.updates if v in written])
    by_rows = (*segment.row_updates, *segment.row_reads)
    ids_of = {rows.inputs[v]: ids for v, ids in by_rows}
    ids_of |= {v: flow.ragged[v] for v in segment.inputs if v in flow.ragged}
    whole_outs = [*outs[:num_direct], *outs[num_direct + len(new_rows) :]]
    counts = by_count.find_counts(jaxpr, ids_of, whole_outs)
    rest = [*(rows.inputs[v] for v in accesses), *segment.inputs]
    ids = [counts[v].ids if v in counts else None for v in rest]

    def function(*args: Any) -> list[Any]:
        values = [from_plain(x, a) for x, a in zip(args, avals, strict=True)]
        refs = {v: jax.new_ref(values[n]) for v, n in by_ref.items()}
        taken = [values[direct[v]] for v in reads.values()]
        flat = *refs.values(), *consts.values(), *taken, *values[len(variables) :]
        if counts:
            results = by_count.run(jaxpr, counts, flat)
        else:
            results = run_by_rows(jaxpr, flat)
        stored = iter(results[:num_direct])
        new = [
            jax.freeze(refs[v]) if v in refs else next(stored) for v in segment.updates
        ]
        return [to_plain(jnp.asarray(x)) for x in new + list(results[num_direct:])]

    values_of = {v: [x for x, of in reads.items() if of == v] for v in variables}
    for v in direct.keys() & written.keys():
        values_of[v].append(written[v])
    alike = [(found[0], x) for found in values_of.values() for x in found[1:]]
    return SegmentFunction(
        function,
        avals,
        [*(None for _ in variables), *ids],
        jaxpr,
        args=[
            *(next(iter(found), None) for found in values_of.values()),
            *(None for _ in accesses),
            *segment.inputs,
        ],
        results=[
            *(written.get(v) for v in segment.updates),
            *(None for _ in new_rows),
            *(rows.renamed(a) for a in segment.outs),
        ],
        alike=alike,
    )


def _variable(op: Op) -> int | None:
    """Returns the variable of an access to one; None if there is none."""
    if op.writes:
        return op.writes[0]
    return op.reads[0][0] if op.reads else None


def _not_exportable(
    flow: Flow, segment: Segment, platforms: tuple[str, ...], error: Exception
) -> NotExportableError:
    culprit = _culprit(segment, platforms)
    if culprit is None:
        return NotExportableError(
            f"a segment of '{flow.graph.name}' cannot be exported for "
            f"{', '.join(platforms)}: {_first_line(error)}"
        )
    name, line = str(culprit.primitive), _compat.user_line(culprit)
    if any(word in name for word in _PYTHON):
        return NotExportableError(
            f"'{name}' at {line} calls back into Python, which a shipped function "
            "cannot; remove it, or fetch the value and use it in the caller",
            primitive=name,
            line=line,
        )
    return NotExportableError(
        f"'{name}' at {line} cannot be exported for {', '.join(platforms)}: "
        f"{_first_line(error)}; write it with jax.numpy or jax.lax operations",
        primitive=name,
        line=line,
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _culprit(segment: Segment, platforms: tuple[str, ...]) -> Equation | None:
    """Returns the first operation that does not export alone."""
    for op in segment.ops:
        if not (op.reads or op.writes) and not _exports_alone(op.equation, platforms):
            return op.equation
    return None


def _exports_alone(equation: Equation, platforms: tuple[str, ...]) -> bool:
    taken = (v for v in equation.invars if not isinstance(v, Literal))
    inputs = list(dict.fromkeys(taken))

    def alone(*args: Any) -> list[Any]:
        values = {v: from_plain(x, v.aval) for v, x in zip(inputs, args, strict=True)}
        operands = [
            None if isinstance(v, Literal) else values[v] for v in equation.invars
        ]
        results = _compat.run_equation(equation, operands)
        return [r if not is_key(r) else to_plain(r) for r in results]

    try:
        types = [plain_type(v.aval) for v in inputs]
        mesh = mesh_of([equation])
        laid = None if mesh is None else (on_mesh.whole(mesh),) * 2
        _export(alone, types, platforms, laid)
    except Exception:  # noqa: BLE001  # any failure of JAX's makes it the culprit
        return False
    return True


# Row accesses to a Ref, lowered as gathers and scatters of whole rows.
#
# JAX turns ``ref[ids]`` into an access to each number by itself; XLA's CPU code for
# that takes two to three times as long as for whole rows.


def run_by_rows(jaxpr: Jaxpr, args: Sequence[Any]) -> list[Any]:
    """Returns what ``jax.core.eval_jaxpr`` does, with rows of Refs taken as rows."""
    if all(row_ids(equation) is None for equation in jaxpr.eqns):
        results: list[Any] = jax.core.eval_jaxpr(jaxpr, (), *args)
        return results
    return run_each(jaxpr, args, _row_results)


def _row_results(equation: Equation, operands: Sequence[Any]) -> list[Any]:
    if row_ids(equation) is None:
        return _compat.run_equation(equation, operands)
    ref, *new, ids = operands
    old = ref[...]
    for rows in new:
        ref[...] = old.at[ids].set(rows)
    return [old[ids]]
