"""Conversion of an exported model to a SavedModel, in a process that has TensorFlow."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from jgraph.errors import ArtifactError
from jgraph.serving.artifact import (
    check_version,
    draft_in,
    model_directory,
    read_arrays,
    read_program,
    versions_in,
)
from jgraph.serving.exported_model import ExportedModel
from jgraph.serving.signature import Array, Signature, TensorSpec

PYTHON: Final = "JGRAPH_TENSORFLOW_PYTHON"
"""Environment variable that names a Python with TensorFlow."""
CONVERT_S: Final = 600.0
_WRITER: Final = Path(__file__).with_name("tensorflow_writer.py")


def write_saved_model(
    model: ExportedModel,
    path: str | Path,
    *,
    version: int | None = None,
    tensorflow: str | Path | None = None,
    rtol: float = 1e-5,
) -> Path:
    """Writes a version of a model as a SavedModel of TensorFlow, and returns where.

    The code is that of the export (StableHLO), called by TensorFlow's
    ``XlaCallModule``; arrays are variables. It is loaded again and asked for the
    example, and its answers are compared, before it is called by its number.

    Args:
      model: what is converted.
      path: directory of the SavedModels, ``saved/ctr``, as TensorFlow Serving wants it.
      version: its number; that of ``model`` if unset.
      tensorflow: a Python that has TensorFlow 2.20 or newer; if unset, this one, or
        that of ``JGRAPH_TENSORFLOW_PYTHON``.
      rtol: how much, relatively, an answer may differ.

    Raises:
      ArtifactError: no TensorFlow, it refuses the code, other answers, or the number
        is taken.
    """
    where = model_directory(path)
    check_version(version)
    number = version or model.version
    if number in versions_in(where):
        raise ArtifactError(
            f"{where / str(number)} exists, and versions never change; give another "
            "version="
        )
    python = _python(tensorflow)
    try:
        with draft_in(where) as draft, tempfile.TemporaryDirectory() as directory:
            parts = Path(directory)
            plan = _parts(model, parts)
            _run(python, parts, draft / "saved")
            _compare(model, plan, parts, rtol)
            (draft / "saved").rename(where / str(number))
    except OSError as error:
        raise ArtifactError(f"cannot write {where}: {error.strerror}") from error
    return where / str(number)


def _python(tensorflow: str | Path | None) -> str:
    """Returns a Python that has TensorFlow, by the look of it."""
    named = tensorflow or os.environ.get(PYTHON)
    if named is not None:
        found = shutil.which(Path(named).expanduser())
        if found is None:
            raise ArtifactError(f"there is no Python at {named}")
        return found
    if importlib.util.find_spec("tensorflow") is None:
        raise ArtifactError(
            "a SavedModel is written by TensorFlow, which is not here: pip install "
            "'jgraph[tf]', or name a Python that has it with tensorflow= (--tensorflow)"
        )
    return sys.executable


def _parts(model: ExportedModel, parts: Path) -> dict[str, Any]:
    """Writes what the other process needs, and returns its plan."""
    manifest = model.manifest
    arrays = [
        {"name": name, **_file(parts, f"array.{n}", value)}
        for n, (name, value) in enumerate(read_arrays(model.path, manifest))
    ]
    example = [
        {"name": name, **_file(parts, f"example.{n}", value)}
        for n, (name, value) in enumerate(model.example().items())
    ]
    functions = {
        name: _function(model, name, one, parts)
        for name, one in manifest.signatures.items()
    }
    plan = {"arrays": arrays, "example": example, "functions": functions}
    (parts / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    return plan


def _function(
    model: ExportedModel, name: str, signature: Signature, parts: Path
) -> dict[str, Any]:
    code = read_program(model.path, signature.program)
    exported = jax.export.deserialize(bytearray(code))
    (parts / f"code.{signature.program}").write_bytes(exported.mlir_module_serialized)
    outputs = [
        {**_spec(one), "answer": f"answer.{name}.{n}"}
        for n, one in enumerate(signature.outputs)
    ]
    return {
        "code": f"code.{signature.program}",
        "version": exported.calling_convention_version,
        "platforms": [platform.upper() for platform in exported.platforms],
        "kept": list(exported.module_kept_var_idx),
        "arguments": signature.arguments,
        "inputs": [_spec(one) for one in signature.inputs],
        "outputs": outputs,
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": spec.shape}


def _file(parts: Path, name: str, value: Array) -> dict[str, Any]:
    (parts / name).write_bytes(np.ascontiguousarray(value).tobytes())
    return {"file": name, "dtype": value.dtype.name, "shape": value.shape}


def _run(python: str, parts: Path, saved: Path) -> None:
    words = [python, str(_WRITER), str(parts), str(saved)]
    environ: Mapping[str, str] = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=CONVERT_S,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            f"TensorFlow did not write the SavedModel within {CONVERT_S:g} s"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ArtifactError(
            f"TensorFlow of {python} did not write the SavedModel: {lines[-1]:.300}"
        )


def _compare(
    model: ExportedModel, plan: Mapping[str, Any], parts: Path, rtol: float
) -> None:
    """Refuses a SavedModel that answers otherwise."""
    for name, one in plan["functions"].items():
        wanted = model.predict(model.example(), signature=name)
        for output in one["outputs"]:
            right = wanted[output["name"]]
            content = (parts / output["answer"]).read_bytes()
            answer = np.frombuffer(content, right.dtype).reshape(right.shape)
            near = partial(np.allclose, rtol=rtol, atol=rtol, equal_nan=True)
            if not near(answer.astype(np.float64), right.astype(np.float64)):
                raise ArtifactError(
                    f"output '{output['name']}' of {name} is another in TensorFlow, "
                    f"by more than {rtol:g}; the SavedModel was not kept"
                )
