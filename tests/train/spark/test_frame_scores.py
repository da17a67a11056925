"""Record batches of Arrow are scored by an exported model, without a JVM."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jgraph as jg
from jgraph.serving.exported_model import ExportedModel, loaded
from jgraph.serving.signature import DEFAULT
from jgraph.train.spark.frame_scores import ROWS, _scores
from jgraph.train.spark.scoring import _check_python, _outputs

pa = pytest.importorskip("pyarrow", reason="needs jgraph[spark]")
types = pytest.importorskip("pyspark.sql.types", reason="needs jgraph[spark]")

DOUBLE = [("y", types.StructField("p", types.DoubleType()))]
LIST = [("y", types.StructField("q", types.ArrayType(types.FloatType())))]
NAMED = [("x", "column_0", "features.dense")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportedModel]:
    directory = tmp_path_factory.mktemp("models")
    x = np.ones((2, 3), np.float32)
    w = np.arange(3, dtype=np.float32)
    one: Any = lambda w, x: x @ w
    two: Any = lambda w, x: jnp.stack([x @ w, x.sum(1)], 1)
    return {
        "one": jg.export(one, x, directory / "one", params=w),
        "two": jg.export(two, x, directory / "two", params=w),
    }


def batch_of(rows: Any) -> Any:
    return pa.record_batch({"column_0": pa.array(rows, pa.list_(pa.float64()))})


@pytest.mark.parametrize("count", [0, 1, 5, ROWS, ROWS + 3])
def test_each_row_has_its_own_score(
    models: dict[str, ExportedModel], count: int
) -> None:
    rows = np.random.default_rng(count).random((count, 3))
    batch = batch_of(rows.tolist())
    model = models["one"]
    (column,), (field,) = _scores(model, batch, DEFAULT, NAMED, DOUBLE)
    assert field.name == "p"
    assert column.type == pa.float64()
    np.testing.assert_allclose(np.array(column), rows @ np.arange(3), rtol=1e-5)


def test_several_numbers_of_a_row_are_a_list(
    models: dict[str, ExportedModel],
) -> None:
    batch = batch_of([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
    (column,), _ = _scores(models["two"], batch, DEFAULT, NAMED, LIST)
    assert column.to_pylist() == [[8.0, 6.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("rows", "model", "out", "complaint"),
    [
        ([[1, 2, 3], None], "one", DOUBLE, "'features.dense' has no value in 1 rows"),
        ([[1, 2, 3], [1]], "one", DOUBLE, "has lists of 1 to 3 values; pad them"),
        ([[1, 2], [1, 2]], "one", DOUBLE, "has 2 values in a row, and the model"),
        ([[1, 2, 3]], "two", DOUBLE, "out says one number for 'p'"),
        ([[1, 2, 3]], "one", LIST, "out says a list for 'q'; write out='q double'"),
        ([[1, None, 3]], "one", DOUBLE, "has lists with missing values; fill them in"),
    ],
)
def test_rows_that_the_model_does_not_take_are_refused_in_words(
    models: dict[str, ExportedModel], rows: Any, model: str, out: Any, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        _scores(models[model], batch_of(rows), DEFAULT, NAMED, out)


def test_a_column_of_another_kind_of_numbers_is_refused(tmp_path: Path) -> None:
    whole: Any = lambda x: x + 1
    model = jg.export(whole, np.ones(2, np.int32), tmp_path / "whole")
    batch = pa.record_batch({"column_0": pa.array([0.5])})
    with pytest.raises(ValueError, match="is float64, and the model takes int32"):
        _scores(model, batch, DEFAULT, [("x", "column_0", "n")], DOUBLE)


def test_a_number_that_the_model_has_no_room_for_is_refused(tmp_path: Path) -> None:
    whole: Any = lambda x: x + 1
    model = jg.export(whole, np.ones(2, np.int32), tmp_path / "whole")
    batch = pa.record_batch({"column_0": pa.array([1, 2**32 + 1])})
    with pytest.raises(ValueError, match="from 1 to 4294967297, too large for the int"):
        _scores(model, batch, DEFAULT, [("x", "column_0", "n")], DOUBLE)


def test_an_answer_that_is_no_value_of_its_column_is_refused_before_a_row_is_read(
    models: dict[str, ExportedModel],
) -> None:
    number, numbers = (types.StructType([of[0][1]]) for of in (DOUBLE, LIST))
    one, two = (models[name].signatures[DEFAULT] for name in ("one", "two"))
    assert [field.name for _, field in _outputs(one, number)] == ["p"]
    assert [field.name for _, field in _outputs(two, numbers)] == ["q"]
    with pytest.raises(
        jg.JGError, match=r"shape \(2,\) .* write out='p array<double>'"
    ):
        _outputs(two, number)
    with pytest.raises(
        jg.JGError, match="one number for each row, and out says a list"
    ):
        _outputs(one, numbers)


def test_a_model_is_loaded_once_in_a_process(models: dict[str, ExportedModel]) -> None:
    path = str(models["one"].path)
    assert loaded(path) is loaded(path)


def test_without_pyspark_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    for use in (
        lambda: jg.spark.predict(None, None, ["x"], "p double"),
        lambda: jg.Source.spark(None),
    ):
        with pytest.raises(jg.JGError, match=r"pip install 'jgraph\[spark\]'"):
            use()


@pytest.mark.bad_input_row(30)
@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ('#!/bin/sh\nexec {python} -I -S "$@"\n', "has no pyarrow, jax, jgraph; "),
        ("#!/bin/sh\nexit 3\n", "has no way to begin: .* exit status 3"),
    ],
)
def test_a_python_of_spark_that_cannot_score_is_refused_before_a_row_is_read(
    tmp_path: Path, program: str, complaint: str
) -> None:
    python = tmp_path / "python"
    python.write_text(program.format(python=sys.executable))
    python.chmod(0o700)
    context = SimpleNamespace(master="local[2]", pythonExec=str(python))
    with pytest.raises(jg.JGError, match=f"(?s){complaint}.*PYSPARK_PYTHON="):
        _check_python(context)
    context.pythonExec = sys.executable
    _check_python(context)
