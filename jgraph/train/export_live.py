"""Export of a model in training: code for servers that ask its parameter servers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from jgraph import _compat
from jgraph.cluster.wait_message import show_wait
from jgraph.errors import ArtifactError
from jgraph.serving.artifact import ModelManifest, digest_of, write_version
from jgraph.serving.live.live_file import BatchPrograms, LiveDescription
from jgraph.serving.live.live_options import LiveOptions
from jgraph.serving.model_options import read_options
from jgraph.serving.signature import DEFAULT
from jgraph.train.live.live_model import LiveSource, TriedModel
from jgraph.train.model.served import Example


def export_live(
    source: LiveSource,
    example: Any,
    where: Path,
    fn: Callable[..., Any] | None,
    *,
    version: int | None,
    batch: str | None,
    rtol: float,
) -> int:
    """Writes a version that is served live, and returns its number.

    Args:
      source: the model.
      example: a batch, as the model takes it.
      where: directory of the model; its ``model.toml`` says the sizes of batches.
      fn: called in place of the model.
      version: as for ``jg.export``.
      batch: likewise.
      rtol: likewise.

    Raises:
      ArtifactError: it cannot be served so; says why.
      ClusterError: a parameter server does not answer.
    """
    if source.cluster is None:
        raise ArtifactError(
            'rows="ps" leaves parameters on parameter servers, and this model is '
            "trained in this process; leave it away, or train with cluster="
        )
    limits, options = read_options(where).limits, LiveOptions(rtol=rtol)
    one = Example.of(example, batch=batch)
    with show_wait(f"exporting {where.name}"):
        trial = TriedModel(where.name, source, one, fn, limits, options)
        try:
            signature, one = trial.function.signature, trial.call.example
        finally:
            trial.close()
        if one.batch is not None and not signature.rows_independent:
            raise ArtifactError(
                "an answer depends on the rows beside it, and live versions have code "
                "for some sizes of batches only; give batch=None and an example of the "
                "size that requests have"
            )
        programs: dict[str, bytes] = {}

        def put(data: bytes) -> str:
            digest = digest_of(data)
            programs[digest] = data
            return digest

        platform = jax.export.default_export_platform()
        batches = []
        for rows in sorted({1, *limits.buckets}) if one.batch is not None else [1]:
            traced = trial.call.traced(rows)
            ids = ""
            if traced.tables:
                ids = put(_code(traced.ids, traced.inputs, platform))
            outputs = put(_code(traced.outputs, traced.taken, platform))
            batches.append(BatchPrograms(rows, traced.tables, ids, outputs))
        dense = [trial.by_name[name] for name in trial.call.dense]
        count = trial.by_name["global_step"]
        tables = trial.tables
        description = LiveDescription(options, count, dense, tables, tuple(batches))
        signature = replace(signature, program=put(description.to_bytes()))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = ModelManifest(
            {DEFAULT: signature}, {}, (platform,), {"time": now}, "live"
        )
        row = one.values if one.batch is None else one.rows(0, 1)
        return write_version(where, manifest, {}, programs, {DEFAULT: row}, version)


def _code(fn: Callable[..., Any], types: Sequence[Any], platform: str) -> bytes:
    def model(*args: Any) -> Any:  # its name is in the code, and so in the digest
        return fn(*args)

    with _compat.no_locations():
        module = jax.export.export(
            jax.jit(model, keep_unused=True), platforms=(platform,)
        )(*types)
        return _compat.portable_code(module)
