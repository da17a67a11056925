"""Scores of a DataFrame by a trained model, computed where its rows are."""

import atexit
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from jgraph.client.spark.by_value import by_value
from jgraph.client.spark.slots import check_slot, is_local
from jgraph.errors import ConfigError
from jgraph.errors.tracebacks import short_traceback
from jgraph.serving.exported_model import ExportedModel
from jgraph.serving.signature import DEFAULT, Signature, listed
from jgraph.train.export import export
from jgraph.train.spark.frame_files import (
    check_columns,
    check_frame,
    is_vector,
    numbers_of,
    quoted,
)
from jgraph.train.spark.frame_scores import mismatch, scorer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_EXAMPLES: Final = 2
_WHAT: Final = "jg.spark.predict"
_PYTHON_S: Final = 30.0
_MISSING: Final = """
from importlib.util import find_spec
print(*(name for name in ("pyarrow", "jax", "jgraph") if find_spec(name) is None))
"""


@short_traceback
def predict(
    model: Any,
    frame: "DataFrame",
    columns: Sequence[str] | Mapping[str, str],
    out: str,
    *,
    fn: Any = None,
    signature: str = "",
) -> "DataFrame":
    """Returns a DataFrame with the answers of a model behind its columns.

    Each Python worker of Spark loads the model once, and gets record batches of Arrow;
    the order of the rows stays. Needs jgraph and JAX in the Python of Spark
    (``PYSPARK_PYTHON``), ``pip install 'jgraph[spark]'`` here, and a classic session.
    As all of Spark is, it is lazy: an error of a row comes when the rows are asked for.

    Args:
      model: what ``jg.export`` takes, such as a Trainer or a Run; an ``ExportedModel``;
        or the path of one.
      frame: the DataFrame. It has numbers, booleans, or lists of them of one length.
      columns: what the model takes: one name for a model of one array; several for one
        of a dict with these keys; ``{"key": "column"}`` where they have other names.
      out: name and type of each column of answers, as Spark writes them: ``"p
        double"``, ``"p array<float>, label int"``. One is of whatever the model gives;
        more are of the outputs of those names.
      fn: see ``jg.export``; of a model that is none yet.
      signature: which function of an exported model; the default one if empty.

    Raises:
      ArtifactError, NotExportableError: see ``jg.export``.
      ConfigError: no such column or output, a column that is there already, or a
        Python of Spark on this machine that has no jgraph.

    Example:
      >>> scored = predict(trainer, df, ["dense", "ids"], "p double")  # doctest: +SKIP
    """
    check_frame(frame, _WHAT)
    from pyspark.sql.types import StructType

    session: Any = frame.sparkSession
    if type(session).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            f"{_WHAT} was given a DataFrame of Spark Connect, which cannot send a "
            "model to executors; make a classic session where the driver runs"
        )
    _check_python(session.sparkContext)
    pairs = (
        dict(columns)
        if isinstance(columns, Mapping)
        else {name: name for name in check_columns(frame, columns)}
    )
    check_columns(frame, list(dict.fromkeys(pairs.values())))
    named = pairs
    prepared, pairs = _prepared(frame, named)
    names_of = {pairs[name]: named[name] for name in named}
    try:
        declared = StructType.fromDDL(out)
    except Exception as error:
        raise ConfigError(
            f"out={out!r} is no list of columns as Spark writes them; write for "
            'example out="p double"'
        ) from error
    if not len(declared):
        raise ConfigError("out names no column; write for example out='p double'")
    for field in declared:
        if field.name in frame.columns:
            raise ConfigError(
                f"the DataFrame has a column '{field.name}' already; call the answers "
                "otherwise"
            )
    is_dict = isinstance(columns, Mapping) or len(pairs) > 1
    with tempfile.TemporaryDirectory(prefix="jgraph-score-") as directory:
        where = Path(directory)
        exported = _exported(model, prepared, pairs, fn, where, is_dict=is_dict)
        name = signature or _default(exported)
        if name not in exported.signatures:
            raise ConfigError(
                f"the model has no signature '{name}'; it has "
                f"{', '.join(exported.signatures)}"
            )
        one = exported.signatures[name]
        inputs = _inputs(one, pairs)
        outputs = _outputs(one, declared)
        archive = _sent(session.sparkContext, exported, where)
    # PySpark maps no columns with dots in their names: they have others meanwhile.
    places = {column: place for place, column in enumerate(prepared.columns)}
    triples = [(n, f"column_{places[c]}", names_of[c]) for n, c in inputs]
    renamed = prepared.toDF(*(f"column_{at}" for at in range(len(prepared.columns))))
    count = len(frame.columns)
    facts = (archive, _place(exported), name, triples, outputs, count)
    schema = StructType([*renamed.schema.fields[:count], *declared.fields])
    scored = _mapped(renamed, facts, schema)
    return scored.toDF(*frame.columns, *declared.names)


def _check_python(context: Any) -> None:
    """Refuses a Python of Spark that cannot score, where it is on this machine.

    Raises:
      ConfigError: names what it lacks, and how another is chosen.
    """
    python = str(context.pythonExec)
    if not is_local(context.master) or python == sys.executable:
        return
    try:
        asked = subprocess.run(
            [python, "-c", _MISSING],
            capture_output=True,
            text=True,
            timeout=_PYTHON_S,
            check=True,
        )
        missing = ", ".join(asked.stdout.split())
    except (OSError, subprocess.SubprocessError) as error:
        missing = f"way to begin: {error}"
    if missing:
        raise ConfigError(
            f"{_WHAT} scores rows in the Python of Spark, '{python}', which has no "
            f"{missing}; before the session is made, type: "
            f"export PYSPARK_PYTHON={sys.executable}"
        )


def _prepared(frame: Any, pairs: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """Returns the DataFrame with what vectors hold as lists behind its columns."""
    from pyspark.ml.functions import vector_to_array

    lists: dict[str, Any] = {}
    found: dict[str, str] = {}
    for name, column in pairs.items():
        if is_vector(frame, column):
            found[name] = f"{column} as a list"
            lists[found[name]] = vector_to_array(frame[quoted(column)])
        else:
            numbers_of(frame, column)  # refuses what are none
            found[name] = column
    return (frame.withColumns(lists) if lists else frame), found


def _place(exported: ExportedModel) -> str:
    """Returns where a version is in its archive."""
    return f"{exported.path.parent.name}/{exported.path.name}"


def _default(exported: ExportedModel) -> str:
    names = list(exported.signatures)
    return DEFAULT if DEFAULT in names else names[0]


def _exported(
    model: Any,
    frame: Any,
    pairs: Mapping[str, str],
    fn: Any,
    directory: Path,
    *,
    is_dict: bool,
) -> ExportedModel:
    if isinstance(model, ExportedModel):
        return model
    if isinstance(model, str | Path):
        return ExportedModel(model)
    check_slot(frame.sparkSession, _WHAT)
    rows = frame.select(*{quoted(column) for column in pairs.values()})
    table = rows.limit(_EXAMPLES).toArrow()
    if not table.num_rows:
        raise ConfigError(
            "the DataFrame has no rows, and the model is exported with a few of them; "
            "give an ExportedModel: jg.export(trainer, example, 'models/name')"
        )
    arrays = {name: _example(table, column) for name, column in pairs.items()}
    example: Any = arrays if is_dict else next(iter(arrays.values()))
    return export(model, example, directory / "model", fn=fn, platforms=("cpu",))


def _example(table: Any, column: str) -> np.ndarray[Any, Any]:
    """Returns a few values as JAX has them: 64 bits only where that is on."""
    values = np.asarray(table.column(column).to_pylist())
    if values.dtype == object:
        raise ConfigError(
            f"the first rows of '{column}' have no value, or lists of different "
            "lengths; fill them in"
        )
    as_jax: np.dtype[Any] = jax.dtypes.canonicalize_dtype(values.dtype)
    return values.astype(as_jax)


def _inputs(one: Signature, pairs: Mapping[str, str]) -> list[tuple[str, str]]:
    names = [spec.name for spec in one.inputs]
    if len(names) == len(pairs) == 1:
        return [(names[0], next(iter(pairs.values())))]
    if set(names) != pairs.keys():
        raise ConfigError(
            f"the model takes ({listed(one.inputs)}), and the columns are "
            f"{', '.join(pairs)}; name one for each: columns={{'{names[0]}': …}}"
        )
    return [(name, pairs[name]) for name in names]


def _outputs(one: Signature, declared: Any) -> list[tuple[str, Any]]:
    from pyspark.sql.types import ArrayType

    specs = {spec.name: spec for spec in one.outputs}
    if len(specs) == len(declared) == 1:
        pairs = [(next(iter(specs)), declared[0])]
    else:
        pairs = [(field.name, field) for field in declared]
    for name, field in pairs:
        if name not in specs:
            raise ConfigError(
                f"the model gives {listed(one.outputs)}, and no '{field.name}'; out= "
                "names columns as the outputs are called"
            )
        is_list = isinstance(field.dataType, ArrayType)
        shape = specs[name].shape[1:]
        if problem := mismatch(shape, field.name, is_list=is_list):
            raise ConfigError(problem)
    return pairs


def _sent(context: Any, exported: ExportedModel, directory: Path) -> str:
    """Sends a version to all executors; returns what ``SparkFiles`` calls it."""
    parent = exported.path.parent
    root = directory / "archive"
    shutil.copytree(exported.path, root / parent.name / exported.path.name)
    # Executors fetch it when they score, and later ones of the application, too.
    sent = tempfile.mkdtemp(prefix="jgraph-sent-")
    atexit.register(shutil.rmtree, sent, ignore_errors=True)
    name = f"jgraph-model-{secrets.token_hex(6)}"
    path = shutil.make_archive(f"{sent}/{name}", "zip", root)
    context.addArchive(f"{path}#{name}")
    return name


def _mapped(frame: Any, facts: Sequence[Any], schema: Any) -> "DataFrame":
    with by_value(sys.modules[scorer.__module__]):  # it is pickled when it is mapped
        scored: DataFrame = frame.mapInArrow(scorer(*facts), schema)
    return scored
