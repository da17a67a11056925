"""Live version from its directory: code from files, parameters from a cluster."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from jgraph.client.cluster import Cluster
from jgraph.clock import Clock, SystemClock
from jgraph.coordination.serving.batching import Limits
from jgraph.coordination.serving.lookup_share import LookupShare
from jgraph.errors import ArtifactError
from jgraph.plan.program.program import SegmentCode
from jgraph.runtime.compiled.compile_cache import CompileCache, Executable
from jgraph.serving.answering import WaitingFunction
from jgraph.serving.artifact import (
    ModelManifest,
    checked_program,
    read_example,
    read_program,
)
from jgraph.serving.exported_model import LoadedVersion
from jgraph.serving.live.batch_code import BatchCode
from jgraph.serving.live.live_file import BatchPrograms, LiveDescription
from jgraph.serving.live.live_function import LiveFunction
from jgraph.serving.live.parameters import RemoteParameters, read_first
from jgraph.serving.live.refreshing import Refreshing
from jgraph.serving.signature import Signature


def read_live(
    path: Path,
    manifest: ModelManifest,
    cluster: Cluster,
    cache: CompileCache,
    threads: Executor,
    limits: Limits,
) -> tuple[LoadedVersion[WaitingFunction], Limits]:
    """Reads a live version, takes a first copy of its parameters, and keeps that new.

    Args:
      path: directory of the version.
      manifest: of it.
      cluster: has its parameters.
      cache: compiled code.
      threads: for what blocks.
      limits: what its server takes at a time.

    Returns:
      The version, and the limits with the sizes of batches that it has code for.

    Raises:
      ArtifactError: a file is damaged.
      ClusterError: a parameter server does not answer.
    """
    clock = SystemClock()
    functions: dict[str, WaitingFunction] = {}
    for name, signature in manifest.signatures.items():
        description = LiveDescription.from_bytes(
            checked_program(path, signature.program)
        )
        _check_inputs(path, description, signature)
        code = _codes(path, description, manifest, cache)
        if signature.is_batched:
            sizes = tuple(batch.rows for batch in description.batches)
            limits = replace(limits, buckets=sizes, max_rows=sizes[-1])
        label = f"{path.parent.name}/{path.name}"
        functions[name] = _function(
            label, description, code, signature, cluster, threads, clock
        )
    return LoadedVersion(functions, read_example(path, manifest)), limits


def _check_inputs(
    path: Path, description: LiveDescription, signature: Signature
) -> None:
    tables = (table for batch in description.batches for table in batch.tables)
    most = max((number for table in tables for number in table.inputs), default=-1)
    if most >= len(signature.inputs):
        raise ArtifactError(
            f"{path} has ids of an input {most}, and {len(signature.inputs)} inputs; "
            "export it again"
        )


def _function(
    name: str,
    description: LiveDescription,
    compiled: Callable[[int], BatchCode],
    signature: Signature,
    cluster: Cluster,
    threads: Executor,
    clock: Clock,
) -> LiveFunction:
    options = description.options
    parameters = RemoteParameters(
        cluster,
        description.dense,
        description.count,
        description.tables,
        options.cache_rows if options.on_loss == "stale" else 0,
        threads,
        clock,
    )
    try:
        read_first(parameters)
    except BaseException:
        parameters.close()
        raise
    refreshing = Refreshing(name, parameters, options.refresh_s)
    return LiveFunction(
        compiled,
        [variable.name for variable in description.dense],
        signature,
        parameters,
        LookupShare(options.max_share),
        options.on_loss,
        threads,
        clock,
        refreshing.stop,
    )


def _codes(
    path: Path,
    description: LiveDescription,
    manifest: ModelManifest,
    cache: CompileCache,
) -> Callable[[int], BatchCode]:
    """Returns what gives the code for a number of rows."""
    batches: dict[int, BatchPrograms] = {one.rows: one for one in description.batches}

    def loaded(digest: str, what: str) -> Executable:
        code = read_program(path, digest)
        label = f"{path.parent.name}/{what}"
        return cache.load(SegmentCode(digest, code, manifest.platforms, label))

    def compiled(rows: int) -> BatchCode:
        batch = batches.get(rows)
        if batch is None:
            raise ArtifactError(f"{path} has no code for {rows} rows; export it again")
        ids = loaded(batch.ids, "ids") if batch.ids else None
        return BatchCode(batch.tables, ids, loaded(batch.outputs, "outputs"))

    return compiled
