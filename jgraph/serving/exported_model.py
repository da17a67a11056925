"""Exported model: a version loaded from its directory, that can be asked."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar, final

import jax
import numpy as np

from jgraph._compat import wide_types
from jgraph.errors import ArtifactError, ModelInputError, ModelNotFoundError
from jgraph.plan.program.program import SegmentCode
from jgraph.runtime.compiled.compile_cache import CompileCache, Executable
from jgraph.serving.artifact import (
    ModelManifest,
    checked_program,
    local_directory,
    programs_in,
    read_arrays,
    read_example,
    read_manifest,
    read_program,
    versions_in,
)
from jgraph.serving.signature import (
    DEFAULT,
    Array,
    Signature,
    array_of_numbers,
    listed,
    short,
)
from jgraph.view import markup

F = TypeVar("F")


@final
class LoadedFunction:
    """A signature with its arrays on the device, ready to be called.

    Args:
      signature: what it takes and gives.
      run: its code.
      arrays: its first arguments.
    """

    __slots__ = ("_arrays", "_run", "signature")

    def __init__(
        self, signature: Signature, run: Executable, arrays: Sequence[Any]
    ) -> None:
        self.signature = signature
        self._run = run
        self._arrays = arrays

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        """Returns the outputs; code for another number of rows is compiled first."""
        return [np.asarray(value) for value in self._run(*self._arrays, *inputs)]

    def checked_outputs(self, inputs: Sequence[Array]) -> list[Array]:
        """Returns the outputs, if they are what the signature says.

        Raises:
          ArtifactError: they are not; names both.
        """
        outputs, specs = self(inputs), self.signature.outputs
        types = [(str(value.dtype), value.shape) for value in outputs]
        try:
            for spec, (dtype, shape) in zip(specs, types, strict=True):
                spec.check(dtype, shape)
        except (ModelInputError, ValueError) as error:
            outcome = "; ".join(f"{dtype}{short(shape)}" for dtype, shape in types)
            raise ArtifactError(
                f"the code of the model gives {outcome}, and its manifest says "
                f"{listed(specs)}; export it again"
            ) from error
        return outputs


@final
class LoadedVersion(Generic[F]):
    """A version of a model in memory.

    Args:
      functions: by name.
      examples: inputs of a row for each of them.
    """

    __slots__ = ("examples", "functions")

    def __init__(
        self,
        functions: Mapping[str, F],
        examples: Mapping[str, Mapping[str, Array]],
    ) -> None:
        self.functions = functions
        self.examples = examples

    def function(self, signature: str) -> F:
        """Returns the function of a signature; the default one, if empty.

        Raises:
          ModelNotFoundError: there is none of that name.
        """
        name = signature or self.default
        if name not in self.functions:
            raise no_signature(name, self.functions)
        return self.functions[name]

    @property
    def default(self) -> str:
        """The signature that is meant where none is named."""
        return DEFAULT if DEFAULT in self.functions else next(iter(self.functions))


def no_signature(name: object, known: Iterable[str]) -> ModelNotFoundError:
    """Returns the error of a signature that a model does not have."""
    return ModelNotFoundError(
        f"'{name!s:.80}' is no signature of the model; it has {', '.join(known)}"
    )


def read_version(path: Path, cache: CompileCache) -> LoadedVersion[LoadedFunction]:
    """Reads a version from its directory.

    Args:
      path: the directory.
      cache: has the code of versions that were loaded before: what is called by the
        same digest is not compiled again.

    Raises:
      ArtifactError: a file is damaged.
      ProtocolError: this process cannot run the code.
    """
    manifest = read_manifest(path)
    if manifest.kind != "stablehlo":
        where = "over tasks" if manifest.kind == "program" else "in training"
        raise ArtifactError(
            f"{path} is a model {where}, and this process has no part in it; serve it "
            "by a cluster: jg.serve(path, cluster=…)"
        )
    with wide_types():  # the manifest says what each array is
        arrays = {n: jax.device_put(a) for n, a in read_arrays(path, manifest)}
    functions: dict[str, LoadedFunction] = {}
    for name, one in manifest.signatures.items():
        code = SegmentCode(
            one.program,
            read_program(path, one.program),
            manifest.platforms,
            f"{path.parent.name}/{name}",
        )
        chosen = [arrays[argument] for argument in one.arguments]
        functions[name] = LoadedFunction(one, cache.load(code), chosen)
    return LoadedVersion(functions, read_example(path, manifest))


@lru_cache(4)
def loaded(path: str) -> "ExportedModel":
    """Returns a version of which this process has the arrays and the code already.

    Args:
      path: directory of the version, in which nothing changes.
    """
    return ExportedModel(path)


@final
class ExportedModel:
    """A version of a model as ``jg.export`` wrote it.

    Args:
      path: directory of the version, or of the model: then its newest version.

    Raises:
      ArtifactError: there is none, or its manifest is damaged.

    Example:
      >>> import tempfile
      >>> import jgraph as jg
      >>> import numpy as np
      >>> f, x = lambda x: x / 2 + 3, np.zeros(3, np.float32)
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     exported = jg.export(f, x, f"{directory}/half_plus_three")
      ...     exported.predict([1, 2, 5])["y"].tolist()
      [3.5, 4.0, 5.5]
    """

    def __init__(self, path: str | Path) -> None:
        where = local_directory(path)
        if not where.name.isdecimal():
            if not (numbers := versions_in(where)):
                raise ArtifactError(f"there is no version of a model in {where}")
            where = where / str(numbers[-1])
        self.path = where
        self.manifest: ModelManifest = read_manifest(where)

    @property
    def version(self) -> int:
        """Its number."""
        return int(self.path.name)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.path.parent.name

    @property
    def signatures(self) -> Mapping[str, Signature]:
        """Its functions, by name."""
        return self.manifest.signatures

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        return self.manifest.nbytes

    @cached_property
    def _loaded(self) -> LoadedVersion[LoadedFunction]:
        return read_version(self.path, CompileCache())

    def predict(self, x: Any, *, signature: str = "") -> dict[str, Array]:
        """Returns the outputs for a batch, by name.

        Args:
          x: a dict by the names of the inputs, or the one input.
          signature: which function; the default one if empty.

        Raises:
          ModelInputError: inputs of other names, dtypes or shapes.
          ModelNotFoundError: no such signature.
          ArtifactError: its code and its manifest do not go together.
        """
        function = self._loaded.function(signature)
        one = function.signature
        inputs, rows = one.ordered(named(one, x))
        outputs = [spec.empty() for spec in one.outputs]
        if rows:
            outputs = function.checked_outputs(inputs)
        return {s.name: v for s, v in zip(one.outputs, outputs, strict=True)}

    def example(self, signature: str = "") -> dict[str, Array]:
        """Returns inputs that the model takes, a row of each.

        Raises:
          ModelNotFoundError: no such signature.
        """
        found = read_example(self.path, self.manifest)
        name = signature or (DEFAULT if DEFAULT in found else next(iter(found)))
        if name not in found:
            raise no_signature(name, found)
        return found[name]

    def verify(self) -> "ExportedModel":
        """Reads every byte and compares it with what was exported.

        Raises:
          ArtifactError: names the file that is damaged.
        """
        for _ in read_arrays(self.path, self.manifest):
            pass
        for digest in sorted(self._code().union(programs_in(self.path))):
            checked_program(self.path, digest)
        read_example(self.path, self.manifest)
        return self

    def _code(self) -> set[str]:
        """Returns the digests of its code; that of a live version is named in files.

        Raises:
          ArtifactError: such a file is damaged.
        """
        programs = {one.program for one in self.signatures.values()}
        if self.manifest.kind != "live":
            return programs
        # Who serves no model in training starts without what asks parameter servers.
        from jgraph.serving.live.live_file import LiveDescription

        code = set(programs)
        for digest in sorted(programs):
            description = LiveDescription.from_bytes(checked_program(self.path, digest))
            for one in description.batches:
                code.update(filter(None, (one.ids, one.outputs)))
        return code

    def __repr__(self) -> str:
        return f"ExportedModel({self.name!r}, version={self.version})"

    def _repr_html_(self) -> str:
        facts: dict[str, object] = {
            "version": self.version,
            "arrays": f"{len(self.manifest.arrays)}, {self.nbytes:,} bytes",
            "platforms": ", ".join(self.manifest.platforms),
            "path": self.path,
        }
        for name, one in self.signatures.items():
            facts[name] = f"({listed(one.inputs)}) -> {listed(one.outputs)}"
        return markup.facts(f"ExportedModel {self.name}", facts)


def named(signature: Signature, x: Any) -> dict[str, Array]:
    """Returns inputs by name, as arrays of the dtypes that Python's numbers fit.

    A NumPy or JAX array keeps its dtype; lists of numbers take that of the input.

    Raises:
      ModelInputError: names or types that are not those of the signature.
    """
    if not isinstance(x, Mapping):
        x = {signature.inputs[0].name: x}
    found: dict[str, Array] = {}
    for name, value in x.items():
        spec = signature.input(name)
        if hasattr(value, "dtype"):
            found[name] = np.asarray(value)
        else:
            found[name] = array_of_numbers(spec, value)
    return found
