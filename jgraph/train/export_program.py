"""Export of a function over the tasks of a cluster: its program and its variables."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgraph.client.session import Session
from jgraph.client.values import split
from jgraph.cluster.wait_message import show_wait
from jgraph.errors import ArtifactError
from jgraph.graph.tracing.function import Function
from jgraph.graph.variable import Variable
from jgraph.plan.program.program import Program
from jgraph.serving.artifact import ModelManifest, digest_of, write_version
from jgraph.serving.signature import (
    DEFAULT,
    Array,
    Signature,
    TensorSpec,
)
from jgraph.serving.tasks.program_file import program_bytes
from jgraph.train.model.losses import positional
from jgraph.train.model.served import Example, output_spec, outputs_of, rows_independent


def refuse_for_tasks(**options: Any) -> None:
    """Refuses options that a function over tasks does not have.

    Raises:
      ArtifactError: names the first that is set.
    """
    for name, value in options.items():
        if value is not None:
            raise ArtifactError(
                f"a function over the tasks of a session has no {name}=; leave it away"
            )


def export_program(
    fn: Any,
    example: Any,
    where: Path,
    session: Session,
    *,
    version: int | None,
    batch: str | None,
    rtol: float,
) -> int:
    """Writes a version that a cluster computes, and returns its number.

    Args:
      fn: what ``jg.function`` gave, or a function, over variables of the session.
      example: a batch, as ``fn`` takes it.
      where: directory of the model.
      session: has the values of the variables.
      version: as for ``jg.export``.
      batch: likewise.
      rtol: likewise.

    Raises:
      ArtifactError: it cannot be served by other tasks.
      UserError: it cannot be traced; with ``batch`` for any number of rows.
    """
    if not callable(fn):
        raise ArtifactError(
            f"session= goes with a function over its variables, not with a "
            f"{type(fn).__name__}; give for example step.forward"
        )
    with show_wait(f"exporting {where.name}"):
        one = Example.of(example, batch=batch)
        one = one.called(positional(fn) if one.kind == "tuple" else ())
        names: list[str] = []
        call = Function(
            partial(_outputs, fn, one, names),
            where.name,
            symbolic=None if batch is None else "b, ...",
        )
        inputs = list(one.values.values())
        graph, variables = call.trace(*inputs)
        specs = [
            output_spec(name, var.aval, batch)
            for name, var in zip(names, graph.jaxpr.outvars, strict=True)
        ]
        program = session.plan(call, *inputs).program
        arrays = _values(session, variables, program)
        code = program_bytes(program)
        signature = Signature(
            digest_of(code),
            tuple(
                TensorSpec(
                    name,
                    value.dtype.name,
                    value.shape if batch is None else (None, *value.shape[1:]),
                )
                for name, value in one.values.items()
            ),
            tuple(specs),
            tuple(arrays),
            is_batched=batch is not None,
        )
        run = lambda rows: [np.asarray(v) for v in session.run(call, *rows)]
        independent = rows_independent(run, signature, one, rtol, where.name)
        signature = replace(signature, rows_independent=independent, rtol=rtol)
        platforms = {p for code in program.segments for p in code.platforms}
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = ModelManifest(
            {DEFAULT: signature}, {}, tuple(sorted(platforms)), {"time": now}, "program"
        )
        row = one.values if batch is None else one.rows(0, 1)
        programs = {signature.program: code}
        return write_version(where, manifest, arrays, programs, {DEFAULT: row}, version)


def _outputs(
    fn: Callable[..., Any], example: Example, names: list[str], *inputs: Any
) -> list[Any]:
    x = example.passed(inputs)
    outputs = outputs_of(fn(*x) if isinstance(x, tuple) else fn(x))
    names[:] = outputs
    return list(outputs.values())


def _values(
    session: Session, variables: Sequence[Variable], program: Program
) -> dict[str, Array]:
    """Returns the values of the shards that a program has, by their names."""
    stored = [one for part in program.partitions for one in part.variables]
    for one in stored:
        if one.table is not None:
            raise ArtifactError(
                f"the function uses the hash table {one.name}, whose rows are found "
                "by keys on parameter servers; such a model cannot be exported"
            )
    names = [one.name for one in stored]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArtifactError(
            f"two variables are called '{twice}', in containers of their own, and a "
            "version has one place for that name; rename one"
        )
    values = session.read(variables)
    found: dict[str, Array] = {}
    for variable in variables:
        parts = split(variable, jax.device_get(values[variable.name]))
        shards = zip(variable.spec.shards, parts, strict=True)
        found |= {spec.name: np.asarray(part) for spec, part in shards}
    return {name: found[name] for name in names}
