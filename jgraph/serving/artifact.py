"""Version directories of an exported model: manifest, programs, arrays, example.

    models/ctr/               a model
      model.toml              options of its server, if there are any
      labels.json             names of versions, if there are any
      7/                      a version; never changed once it is there
        jgraph_model.json     the manifest, written last
        programs/SHA256       what ``jax.export`` made, one per function
        arrays/…              as in checkpoints: raw Zarr blocks with checksums
        example.npz           one row for each input

A version is made under another name and renamed, so whoever finds a directory that is
called by a number finds all of it.
"""

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Final, final

import jax
import numpy as np

from jgraph import __version__
from jgraph.counts import is_count
from jgraph.errors import ArtifactError
from jgraph.failpoints import failpoint
from jgraph.plan.program.nodes import ValueType
from jgraph.runtime.files.local_paths import local_path
from jgraph.runtime.files.manifest import (
    Leaf,
    checked_body,
    directory_of,
    with_checksum,
)
from jgraph.runtime.files.shard_files import (
    Slice,
    make_array,
    read_slice,
    write_slice,
)
from jgraph.serving.signature import DATATYPES, MAX_RANK, Array, Signature, TensorSpec

FILE: Final = "jgraph_model.json"
FORMAT: Final = 1
KINDS: Final = ("stablehlo", "program", "live")
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_PROGRAM_BYTES: Final = 1 << 30
MAX_EXAMPLE_BYTES: Final = 1 << 30
MAX_VERSION: Final = 2**63 - 1
MODEL_NAME: Final = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,127}")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,18}")
_DRAFT: Final = re.compile(r"\.new\.[0-9]+\.[0-9a-f]{8}\.tmp")
_PLAIN: Final = re.compile(r"[^/\0]{1,200}(?:/[^/\0]{1,200})*")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_KEY: Final = re.compile(r"[\w.-]{1,80}")
_ODD: Final = (KeyError, TypeError, ValueError, AttributeError, RecursionError)


@final
@dataclass(frozen=True, slots=True)
class ModelManifest:
    """What a version holds.

    Attributes:
      signatures: its functions, by name.
      arrays: its arrays, by path: ``params/Dense_0/kernel``.
      platforms: what its programs were made for.
      source: where it comes from: time, and step of a training.
      kind: ``"stablehlo"``; ``"program"``: code is that of a program, for tasks;
        ``"live"``: arrays are on the parameter servers of a run.
      jgraph: the version that wrote it.
      jax: likewise.
    """

    signatures: Mapping[str, Signature]
    arrays: Mapping[str, Leaf]
    platforms: tuple[str, ...]
    source: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "stablehlo"
    jgraph: str = __version__
    jax: str = jax.__version__

    @property
    def nbytes(self) -> int:
        """Size of all arrays."""
        return sum(leaf.nbytes for leaf in self.arrays.values())

    def to_json(self) -> str:
        """Returns the manifest as JSON, with a checksum of its own."""
        body = json.loads(json.dumps({"format": FORMAT, **asdict(self)}))
        return with_checksum(body)

    @classmethod
    def from_json(cls, text: str) -> "ModelManifest":
        """Reads what ``to_json`` wrote.

        Raises:
          ValueError, KeyError, TypeError: it is something else.
        """
        body = checked_body(text, FORMAT)
        _check_text(body)
        body["arrays"] = {n: _leaf(n, leaf) for n, leaf in body["arrays"].items()}
        body["signatures"] = {
            name: _signature(one, body["arrays"])
            for name, one in body["signatures"].items()
        }
        if not body["signatures"]:
            raise ValueError("it has no signature")
        body["platforms"] = tuple(body["platforms"])
        if body.get("kind", KINDS[0]) not in KINDS:
            raise ValueError(f"it is of the kind {body['kind']!s:.40}")
        if not isinstance(body.get("source", {}), dict):
            raise ValueError("its source is no object")  # noqa: TRY004  # of a file
        return cls(**body)


def _check_text(body: Mapping[str, Any]) -> None:
    """Refuses half characters, which JSON can say and nobody can be sent."""
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        text = str(error.object)[max(0, error.start - 20) : error.end]
        raise ValueError(f"{text!a} ends in half a character") from error


def _leaf(name: str, entry: Mapping[str, Any]) -> Leaf:
    """Returns the description of an array; what cannot be one is refused."""
    shape, sums = tuple(entry["shape"]), tuple(entry["crc32"])
    if not _PLAIN.fullmatch(name) or directory_of(name).startswith("."):
        raise ValueError(f"'{name:.80}' is no name of an array")
    if len(shape) > MAX_RANK or not all(
        type(n) is int and 0 <= n < 2**48
        for n in (*shape, entry["block_rows"], math.prod(shape))
    ):
        raise ValueError(f"array '{name:.80}' has no shape that can be")
    return Leaf(shape, str(entry["dtype"]), entry["block_rows"], sums)


def _signature(entry: Mapping[str, Any], arrays: Mapping[str, Leaf]) -> Signature:
    specs = {
        kind: tuple(
            TensorSpec(str(one["name"]), str(one["dtype"]), tuple(one["shape"]))
            for one in entry[kind]
        )
        for kind in ("inputs", "outputs")
    }
    if not _DIGEST.fullmatch(entry["program"]):
        raise ValueError("a program is not named by its digest")
    if not specs["inputs"] or any(
        one.dtype not in DATATYPES for one in (*specs["inputs"], *specs["outputs"])
    ):
        raise ValueError("a signature has no input, or one without a datatype")
    if missing := set(entry["arguments"]) - set(arrays):
        raise ValueError(f"a signature takes '{min(missing):.80}', which is no array")
    return Signature(**{**entry, **specs, "arguments": tuple(entry["arguments"])})


def write_version(
    model: Path,
    manifest: ModelManifest,
    arrays: Mapping[str, Array],
    programs: Mapping[str, bytes],
    examples: Mapping[str, Mapping[str, Array]],
    version: int | None = None,
) -> int:
    """Writes a version, and returns its number.

    Args:
      model: directory of the model; it is made if it is not there.
      manifest: what is written; its ``arrays`` are not looked at.
      arrays: the arrays, by path.
      programs: code by digest.
      examples: inputs of each signature, by name.
      version: its number; one more than the newest if unset.

    Raises:
      ArtifactError: the number is taken, the files cannot be written, or a name has
        half a character.
    """
    check_model_name(model.name)
    check_version(version)
    try:
        _check_text(asdict(manifest))
    except ValueError as error:
        raise ArtifactError(
            f"{model} cannot have what it would be told by: {error}; give other names "
            "of signatures, inputs and outputs"
        ) from error
    try:
        with draft_in(model) as draft:
            leaves = _write_arrays(draft / "arrays", arrays)
            failpoint("export.arrays_written")
            (draft / "programs").mkdir()
            for digest, code in programs.items():
                _write(draft / "programs" / digest, code)
            _write(draft / "example.npz", _packed(examples))
            whole = ModelManifest(
                manifest.signatures,
                leaves,
                manifest.platforms,
                manifest.source,
                manifest.kind,
            )
            _write(draft / FILE, whole.to_json().encode())
            for directory in (draft / "arrays", draft / "programs", draft):
                _sync(directory)
            failpoint("export.manifest_written")
            number = _renamed(draft, model, version)
            _sync(model)
            failpoint("export.committed")
    except OSError as error:
        raise ArtifactError(
            f"cannot write a version of {model}: {error.strerror or error}"
        ) from error
    return number


@contextmanager
def draft_in(model: Path) -> Iterator[Path]:
    """Gives a new directory beside the versions of a model; it is gone afterwards.

    Its process has a lock on it. Drafts without one are of processes that were killed,
    and are removed first.

    Raises:
      OSError: what the system says.
    """
    draft = model / f".new.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    model.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with opened(model) as fd:
            # Nobody sees a draft that is not locked yet.
            locked = _lock(fd)
            if locked:
                _remove_drafts(model)
            stack.callback(shutil.rmtree, draft, ignore_errors=True)
            draft.mkdir()
            _lock(stack.enter_context(opened(draft)))
        yield draft


def _remove_drafts(model: Path) -> None:
    with os.scandir(model) as entries:
        drafts = [model / one.name for one in entries if _DRAFT.fullmatch(one.name)]
    for draft in drafts:
        with suppress(OSError), opened(draft) as fd:
            if _lock(fd, wait=False):
                shutil.rmtree(draft, ignore_errors=True)


def _lock(fd: int, *, wait: bool = True) -> bool:
    """Locks an open directory; returns whether it did: not all file systems can."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _renamed(draft: Path, model: Path, version: int | None) -> int:
    """Gives a version its number; of two that want the same, one gets the next.

    What has a number for a name and is no version, as a file, is passed over.
    """
    number = version or max(versions_in(model), default=0) + 1
    while True:
        if number > MAX_VERSION:
            raise ArtifactError(
                f"{model} has a version {MAX_VERSION} already, the last number that "
                "there is; give version= a number that is free"
            )
        try:
            if (model / str(number)).exists():
                raise FileExistsError(errno.EEXIST, "it exists")
            draft.rename(model / str(number))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if version is not None:
                raise ArtifactError(
                    f"{model / str(number)} exists, and versions never change; leave "
                    "version= away to write the next one"
                ) from error
            number = max([number, *versions_in(model)]) + 1
        else:
            return number


def _write_arrays(directory: Path, arrays: Mapping[str, Array]) -> dict[str, Leaf]:
    directory.mkdir()
    leaves: dict[str, Leaf] = {}
    taken: dict[str, str] = {}
    with opened(directory) as fd:
        for name, array in arrays.items():
            place = directory_of(name)
            if not _PLAIN.fullmatch(name) or place.startswith("."):
                raise ArtifactError(f"'{name:.80}' cannot be the name of an array")
            if (other := taken.setdefault(place, name)) != name:
                raise ArtifactError(
                    f"the arrays '{other}' and '{name}' have one place; rename one"
                )
            whole = Slice.whole(place, ValueType(array.shape, array.dtype.name))
            if not whole.type.nbytes:  # such a one needs no file
                leaves[name] = Leaf(array.shape, array.dtype.name, 1, ())
                continue
            make_array(directory, whole)
            sums = write_slice(fd, whole, array)
            _sync(directory / place)
            blocks = whole.blocks
            leaves[name] = Leaf(
                array.shape, array.dtype.name, blocks.block_rows, blocks.joined([sums])
            )
    return leaves


def read_manifest(version: Path) -> ModelManifest:
    """Reads the manifest of a version.

    Raises:
      ArtifactError: there is none, or it is damaged.
    """
    try:
        text = read_file(version, FILE, MAX_MANIFEST_BYTES).decode()
        return ModelManifest.from_json(text)
    except FileNotFoundError:
        raise ArtifactError(
            f"there is no exported model at {version}: it has no {FILE}"
        ) from None
    except OSError as error:
        raise damaged(version, FILE, error.strerror or str(error)) from error
    except _ODD as error:
        raise damaged(version, FILE, _told(error)) from error


def read_program(version: Path, digest: str) -> bytes:
    """Reads the code of a digest; whoever uses it compares.

    Raises:
      ArtifactError: it is not there.
    """
    name = f"programs/{digest}"
    with _naming(version, name):
        return read_file(version / "programs", digest, MAX_PROGRAM_BYTES)


def checked_program(version: Path, digest: str) -> bytes:
    """Reads the code of a digest, and compares it.

    Raises:
      ArtifactError: it is not what was exported.
    """
    code = read_program(version, digest)
    if digest_of(code) != digest:
        what = "its content is not what was exported"
        raise damaged(version, f"programs/{digest}", what)
    return code


def programs_in(version: Path) -> list[str]:
    """Returns the digests by which the code of a version is called.

    Raises:
      ArtifactError: there is no directory of it.
    """
    with _naming(version, "programs"), os.scandir(version / "programs") as entries:
        return [one.name for one in entries if _DIGEST.fullmatch(one.name)]


def read_arrays(version: Path, manifest: ModelManifest) -> Iterator[tuple[str, Array]]:
    """Reads the arrays of a version one by one, and compares their checksums.

    Raises:
      ArtifactError: one is not what was written.
    """
    with _naming(version, "arrays"), opened(version / "arrays") as fd:
        for name, leaf in manifest.arrays.items():
            with _naming(version, f"arrays/{directory_of(name)}"):
                if not leaf.nbytes:
                    yield name, np.zeros(leaf.shape, leaf.type.np_dtype)
                    continue
                whole = Slice.whole(directory_of(name), leaf.type, leaf.block_rows)
                _check_sizes(fd, whole, leaf)
                array, sums = read_slice(fd, whole)
                if whole.blocks.joined([sums]) != leaf.crc32:
                    raise ValueError("its content is not what was exported")
            yield name, array


def _check_sizes(fd: int, whole: Slice, leaf: Leaf) -> None:
    """Refuses an array without files of its size, before memory is taken for it."""
    blocks = whole.blocks
    if len(blocks) != len(leaf.crc32):
        raise ValueError("it has not as many checksums as blocks")
    for block in range(len(blocks)):
        found = os.stat(
            f"{whole.array}/{whole.file(block)}", dir_fd=fd, follow_symlinks=False
        )
        if not stat.S_ISREG(found.st_mode) or found.st_size != blocks.file_nbytes:
            raise ValueError("its files have not the size that the manifest says")


def read_example(version: Path, manifest: ModelManifest) -> dict[str, dict[str, Array]]:
    """Reads the inputs that were kept as an example, by signature and name.

    Raises:
      ArtifactError: they are damaged.
    """
    with _naming(version, "example.npz"):
        data = read_file(version, "example.npz", MAX_EXAMPLE_BYTES)
        found: dict[str, dict[str, Array]] = {}
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                for name, one in manifest.signatures.items():
                    found[name] = {
                        spec.name: _as_spec(file[_key(name, place)], spec)
                        for place, spec in enumerate(one.inputs)
                    }
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(str(error)) from error
        return found


def _as_spec(value: Array, spec: TensorSpec) -> Array:
    if value.dtype != np.uint8 or value.ndim != 1:
        raise ValueError("it has arrays that are no bytes")
    sizes = [1 if size is None else size for size in spec.shape]
    return value.view(spec.np_dtype).reshape(sizes)


def _packed(examples: Mapping[str, Mapping[str, Array]]) -> bytes:
    """Returns examples as bytes of a file, each as bytes: NumPy lacks some dtypes."""
    file = io.BytesIO()
    flat = {
        _key(name, place): np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        for name, values in examples.items()
        for place, value in enumerate(values.values())
    }
    np.savez(file, allow_pickle=False, **flat)
    return file.getvalue()


def _key(signature: str, place: int) -> str:
    return f"{signature}.{place}"


def versions_in(model: Path) -> list[int]:
    """Returns the numbers of the versions of a model, which may be damaged.

    Example:
      >>> versions_in(Path("no/such/model"))
      []
    """
    try:
        with os.scandir(model) as entries:
            return sorted(
                int(entry.name)
                for entry in entries
                if _NUMBER.fullmatch(entry.name)
                and int(entry.name) <= MAX_VERSION
                and entry.is_dir(follow_symlinks=False)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def local_directory(path: str | Path) -> Path:
    """Returns the directory that a user means.

    Raises:
      ArtifactError: it cannot be one of this machine.
    """
    try:
        return local_path(path)
    except ValueError as why:
        raise ArtifactError(
            f"{path!r:.80} cannot be a directory of models: {why}; give one of this "
            "machine, for example 'models/ctr'"
        ) from None


def model_directory(path: str | Path) -> Path:
    """Returns the directory that is to have versions of a model.

    Raises:
      ArtifactError: it cannot be one.
    """
    where = local_directory(path)
    check_model_name(where.name)
    if where.name.isdecimal():
        raise ArtifactError(
            f"{where} cannot be the directory of a model: one that is called by a "
            f"number is a version of the model above it; give {where.parent} and "
            f"version={where.name}, or another name"
        )
    return where


def check_version(version: object) -> None:
    """Refuses what is no number of a version; None, the next one, is fine.

    Raises:
      ArtifactError: it is another value.
    """
    if version is not None and not (is_count(version, 1) and version <= MAX_VERSION):
        raise ArtifactError(f"version={version!r:.40}: give a number from 1 on")


def check_model_name(name: str) -> None:
    """Refuses what cannot be the name of a model.

    Raises:
      ArtifactError: it is none.
    """
    if not MODEL_NAME.fullmatch(name):
        raise ArtifactError(
            f"'{name:.80}' cannot be the name of a model; take letters, digits, '_', "
            "'-' and '.', 128 at most, and no dot first"
        )


def read_file(directory: Path, name: str, limit: int) -> bytes:
    """Returns the content of a regular file, no link.

    Raises:
      OSError: what the system says.
      ValueError: it is no regular file, or larger than it may be.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(directory / name, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
        return file.read(found.st_size)


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Opens a directory, which is no link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def damaged(version: Path, file: str, why: str) -> ArtifactError:
    """Returns the error of a version that is not what was written."""
    return ArtifactError(
        f"{version} is damaged: {file}: {why:.300}; export the model again, or use "
        f"another version (`jgraph model ls {quote(str(version.parent))}`)",
        path=str(version),
        file=file,
    )


@contextmanager
def _naming(version: Path, file: str) -> Iterator[None]:
    """Gives what is wrong with a file of a version its sentence."""
    try:
        yield
    except OSError as error:
        raise damaged(version, file, error.strerror or str(error)) from error
    except _ODD as error:
        raise damaged(version, file, _told(error)) from error


def _told(error: Exception) -> str:
    """Returns what is wrong, in words also where only a key is missing."""
    if isinstance(error, KeyError) and _KEY.fullmatch(key := str(error.args[0])):
        return f"it has no '{key}'"
    return str(error)


def digest_of(code: bytes) -> str:
    """Returns what a program is called."""
    return hashlib.sha256(code).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    with opened(directory) as fd:
        os.fsync(fd)
