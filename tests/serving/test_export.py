"""Exported models are what the model was, on disk and back, and refuse what is not."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph as jg
from jgraph.errors import (
    ArtifactError,
    CallbackError,
    InvalidProgramError,
    JGError,
    ModelInputError,
    ModelNotFoundError,
    NotExportableError,
)
from jgraph.failpoints import CRASHED
from jgraph.runtime.files.manifest import checksum
from jgraph.serving.artifact import FILE, ModelManifest, draft_in, versions_in
from jgraph.serving.labels import read_labels, set_label
from tests.support.exported import half_plus_three
from tests.support.other_jax import run_there

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.drop(self.norm(self.first(x)))


def test_an_nnx_module_answers_as_in_evaluation_mode(tmp_path: Path) -> None:
    model = Net()
    exported = jg.export(model, X, tmp_path / "net")
    model.eval()  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(exported.predict(X)["y"], model(X), rtol=1e-6)
    one = exported.signatures["serving_default"]
    assert one.rows_independent
    assert str(one.inputs[0]) == "x: float32[b,3]"


def test_a_linen_module_with_a_function_names_its_inputs_and_outputs(
    tmp_path: Path,
) -> None:
    dense = nn.Dense(2)
    variables = dense.init(jax.random.key(0), X)
    fn = lambda v, x: {"score": dense.apply(v, x["dense"]), "user": x["user"] * 2}
    batch = {"dense": X, "user": np.arange(4, dtype=np.int32)}
    exported = jg.export((dense, variables), batch, tmp_path / "ctr", fn=fn)
    found = exported.predict(batch)
    wanted: Any = dense.apply(variables, X)
    np.testing.assert_allclose(found["score"], wanted, rtol=1e-6)
    assert found["user"].tolist() == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_trainer_and_its_run_export_what_was_trained(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Any:
        return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    trainer = jg.Trainer(model, loss, optax.sgd(0.1))
    run = trainer.fit({"x": X, "y": X.sum(1)}, steps=5, batch_size=4).wait()
    wanted = trainer.predict(X)
    for number, one in enumerate((trainer, run), 1):
        exported = jg.export(one, X, tmp_path / "line", label="stable")
        assert exported.version == number
        np.testing.assert_allclose(exported.predict(X)["y"], wanted, rtol=1e-6)
    assert read_labels(tmp_path / "line").targets == {"stable": 2}


def test_arguments_and_signatures_have_the_names_of_functions(tmp_path: Path) -> None:
    w = {"w": np.ones((3, 1), np.float32), "none": np.zeros((0, 2), np.float32)}
    exported = jg.export(
        lambda p, dense, bias: dense @ p["w"] + bias,
        (X, X[:, :1]),
        tmp_path / "m",
        params=w,
        signatures={"double": lambda p, dense, bias: (dense * 2, bias)},
    )
    assert [s.name for s in exported.signatures["double"].outputs] == ["y_0", "y_1"]
    found = exported.predict({"dense": X, "bias": X[:, :1]}, signature="double")
    np.testing.assert_array_equal(found["y_0"], X * 2)
    assert exported.verify().example()["dense"].tolist() == X[:1].tolist()


def test_bfloat16_and_no_batch_and_no_rows(tmp_path: Path) -> None:
    x = np.ones((2, 2), ml_dtypes.bfloat16)
    exported = jg.export(lambda x: x * 2, x, tmp_path / "half", batch=None)
    assert exported.predict(x)["y"].dtype == ml_dtypes.bfloat16
    with pytest.raises(ModelInputError, match=r"shape \[1,2\]"):
        exported.predict(x[:1])
    half = half_plus_three(tmp_path)
    assert half.predict(np.zeros(0, np.float32))["y"].shape == (0,)


def test_rows_that_depend_on_each_other_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exported = jg.export(lambda x: x - x.mean(0), X, tmp_path / "mean")
    assert not exported.signatures["serving_default"].rows_independent
    assert "'y' of a row depends on the rows beside it" in caplog.text


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (lambda x: x.sum(), ArtifactError, r"shape \(\) for b examples"),
        (
            lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
            ArtifactError,
            r"random numbers at .*test_export",
        ),
        (lambda x: (jax.debug.print("{}", x), x)[1], CallbackError, "test_export"),
        (
            lambda x: x.reshape(2, -1),
            NotExportableError,
            r"not of any, at .*test_export.*batch=None",
        ),
        (
            lambda x: x / math.sqrt(x.shape[0]),
            NotExportableError,
            r"not of any, at .*test_export.*batch=None",
        ),
        (
            lambda x: x if x.sum() > 0 else -x,
            NotExportableError,
            r"condition of Python .* at .*test_export.*jnp\.where",
        ),
        (lambda x: x[x > 0], NotExportableError, "by a mask.*test_export"),
        (lambda x: np.asarray(x) + 1, NotExportableError, "to NumPy.*test_export"),
        (lambda x: x.astype("complex64"), ArtifactError, "complex64"),
        (lambda x: "y", ArtifactError, "no array"),
        (lambda x: {}, ArtifactError, "the function returns no array"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_line(
    fn: Any, error: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        jg.export(fn, X, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda x: {"score": x}["scores"], KeyError),
        (lambda x: x.scores, AttributeError),
        (lambda x: x @ np.ones((5, 2), np.float32), TypeError),
    ],
)
def test_a_mistake_in_the_function_is_told_as_it_is(
    fn: Any, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error) as raised:
        jg.export(fn, X, tmp_path / "bad")
    assert not isinstance(raised.value, JGError)
    files = [entry.path for entry in raised.traceback]
    assert Path(__file__) in files


@pytest.mark.parametrize("params", [np.array([1.0, 2.0]), [1, 2.0]], ids=["f8", "py"])
def test_parameters_are_kept_as_the_code_was_made_for(
    tmp_path: Path, params: Any
) -> None:
    exported = jg.export(lambda p, x: x * p[0] + p[1], X, tmp_path / "m", params=params)
    np.testing.assert_allclose(exported.predict(X)["y"], X + 2, rtol=1e-6)


def test_numbers_of_the_other_byte_order_mean_the_same(tmp_path: Path) -> None:
    other = X.astype(X.dtype.newbyteorder())
    exported = jg.export(lambda p, x: x @ p.T, other, tmp_path / "m", params=other)
    for x in (X, other):
        np.testing.assert_allclose(exported.predict(x)["y"], X @ X.T, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"params": {"w": np.array(["a"])}}, "'params/w' is no array of numbers"),
        ({"params": 10**30}, "'params' is no array of numbers"),
        ({"version": "3"}, "version='3': give a number from 1 on"),
        ({"version": 3.5}, "version=3.5: give a number from 1 on"),
        ({"label": "3"}, "'3' is no label"),
        ({"label": "split"}, "'split' is no label"),
        ({"platforms": "cpu"}, "platforms='cpu': give a list of some of cpu, cuda"),
        ({"platforms": ["gpuu"]}, "give a list of some of cpu, cuda"),
        ({"batch": 3}, "batch=3: leave it away for any number of rows"),
        ({"rtol": math.nan}, "rtol=nan: give a number from 0 to 1"),
        ({"fn": 3}, "'fn' is 3; give a function"),
        ({"signatures": {"embed": None}}, "'embed' is None; give a function"),
        ({"signatures": ["embed"]}, "give a dict of functions by name"),
        ({"path": ""}, "cannot be a directory of models: it is empty"),
        ({"path": "gs://b/m"}, "it is an address of an object store"),
        (
            {"path": "m/7"},
            "is a version of the model above it; give .*/m and version=7",
        ),
    ],
)
def test_options_that_cannot_be_leave_nothing_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    fn = (lambda p, x: x) if "params" in options else (lambda x: x)
    with pytest.raises(ArtifactError, match=said):
        jg.export(fn, X, **{"path": "m", **options})
    assert not list(tmp_path.iterdir())


def test_a_signature_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path,
) -> None:
    half: Any = half_plus_three(tmp_path)
    for name in ("nope", 3):
        with pytest.raises(ModelNotFoundError, match=f"'{name}' is no signature .* s"):
            half.example(name)
        with pytest.raises(ModelNotFoundError, match=f"'{name}' is no signature .* s"):
            half.predict(X[0], signature=name)
    with pytest.raises(ModelInputError, match="'1' is no input"):
        half.predict({1: X[0]})


def test_a_number_is_never_written_twice(tmp_path: Path) -> None:
    half_plus_three(tmp_path, version=7)
    with pytest.raises(ArtifactError, match="versions never change"):
        half_plus_three(tmp_path, version=7)
    assert half_plus_three(tmp_path).version == 8
    with pytest.raises(ArtifactError, match="cannot be the name"):
        jg.export(lambda x: x, X, tmp_path / ".hidden")


def test_what_has_a_number_for_a_name_and_is_no_version_is_passed_over(
    tmp_path: Path,
) -> None:
    assert half_plus_three(tmp_path).version == 1
    model = tmp_path / "half_plus_three"
    (model / "2").write_text("notes of somebody")
    (model / "3").symlink_to(model / "1")
    assert half_plus_three(tmp_path).version == 4
    with pytest.raises(ArtifactError, match="versions never change"):
        half_plus_three(tmp_path, version=2)
    assert (model / "2").read_text() == "notes of somebody"


def test_after_the_last_number_there_is_none(tmp_path: Path) -> None:
    half_plus_three(tmp_path, version=2**63 - 1)
    with pytest.raises(ArtifactError, match="the last number that there is"):
        half_plus_three(tmp_path)
    assert half_plus_three(tmp_path, version=1).version == 1


def test_new_weights_of_one_model_have_one_program(tmp_path: Path) -> None:
    def digest(value: float) -> str:
        w = np.full((3, 1), value, np.float32)
        exported = jg.export(lambda w, x: x @ w, X, tmp_path / "m", params=w)
        return exported.signatures["serving_default"].program

    assert digest(1.0) == digest(2.0)


def flip(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


BREAK = {
    "flipped array": (flip, "arrays/params/0.0"),
    "cut array": (cut, "arrays/params/0.0"),
    "linked array": (link, "arrays/params/0.0"),
    "device": (pipe, "arrays/params/0.0"),
    "no program": (Path.unlink, "programs/*"),
    "flipped program": (flip, "programs/*"),
    "cut manifest": (cut, FILE),
    "edited manifest": (lambda f: f.write_text(f.read_text() + " 1"), FILE),
    "deep manifest": (lambda f: f.write_text("[" * 100_000), FILE),
    "no manifest": (Path.unlink, FILE),
    "no example": (lambda f: f.write_bytes(b"PK no zip"), "example.npz"),
}
CHANGE: dict[str, Any] = {
    "outside": {"arrays": {"../params": {}}},
    "absolute": {"arrays": {"/etc/passwd": {}}},
    "negative shape": {"arrays": {"params": {"shape": [-3, 1]}}},
    "huge shape": {"arrays": {"params": {"shape": [2**40, 2**40]}}},
    "large shape": {"arrays": {"params": {"shape": [2**40, 1]}}},
    "other format": {"format": 99},
    "other digest": {"signatures": {"serving_default": {"program": "../../x"}}},
}


def changed(body: dict[str, Any], how: dict[str, Any]) -> None:
    """Puts other values into nested dicts; a new array is like the old one."""
    for name, value in how.items():
        if isinstance(value, dict):
            inner = body.setdefault(name, dict(body.pop("params", {})))
            changed(inner, value)
        else:
            body[name] = value


def broken(version: Path, how: str) -> None:
    if how in BREAK:
        act, where = BREAK[how]
        act(next(version.glob(where)))  # type: ignore[operator]
        return
    manifest = version / FILE
    body = json.loads(manifest.read_text())
    del body["crc32"]
    changed(body, CHANGE[how])
    manifest.write_text(json.dumps({**body, "crc32": checksum(body)}))


@pytest.mark.parametrize("how", [*BREAK, *CHANGE])
def test_a_damaged_version_is_named_and_not_loaded(
    how: str, written: Path, tmp_path: Path
) -> None:
    version = shutil.copytree(written, tmp_path / "m" / "1")
    broken(version, how)
    with pytest.raises(ArtifactError, match=r"m/1\b"):
        jg.ExportedModel(version).verify()
    if how != "flipped program":
        with pytest.raises(ArtifactError, match=r"m/1\b"):
            jg.ExportedModel(version).predict(X)


def test_code_is_not_parsed_before_its_digest_fits(
    written: Path, tmp_path: Path
) -> None:
    version = shutil.copytree(written, tmp_path / "m" / "1")
    broken(version, "flipped program")
    with pytest.raises(InvalidProgramError, match="do not match their digest"):
        jg.ExportedModel(version).predict(X)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "m"
    w = np.ones((3, 1), np.float32)
    return jg.export(lambda w, x: x @ w, X, path, params=w).path


def test_a_manifest_comes_back_as_it_was(written: Path) -> None:
    manifest = jg.ExportedModel(written).manifest
    assert ModelManifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"7": 1}', '{"a": "1"}', '{"a": -1}', "[" * 100_000),
        '{"a": 1, "split": {"a": 101}}',
        '{"a": 1, "split": {"b": 100}}',
    ],
)
def test_labels_that_mean_nothing_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(ArtifactError, match="correct it"):
        read_labels(tmp_path)


def test_a_label_names_a_version_that_is_there(tmp_path: Path) -> None:
    half_plus_three(tmp_path)
    model = tmp_path / "half_plus_three"
    with pytest.raises(ArtifactError, match="no version 2; it has 1"):
        set_label(model, "canary", 2)
    assert set_label(model, "canary", 1).targets == {"canary": 1}
    assert set_label(model, "canary", None).targets == {}
    assert set_label(tmp_path, "canary", None).targets == {}
    assert not (tmp_path / "labels.json").exists()  # no directory of a model
    with pytest.raises(ArtifactError, match="'split' is no label"):
        set_label(model, "split", 1)


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize(
    ("point", "versions"),
    [
        ("export.manifest_written", []),
        pytest.param("export.arrays_written", [], marks=pytest.mark.nightly),
        pytest.param("export.committed", [1], marks=pytest.mark.nightly),
    ],
)
def test_a_process_that_is_killed_leaves_a_whole_version_or_none(
    point: str, versions: list[int], tmp_path: Path
) -> None:
    code = (
        "from tests.support.exported import half_plus_three; from pathlib import Path"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; half_plus_three(Path({str(tmp_path)!r}))"],
        env={**os.environ, "JGRAPH_FAILPOINTS": f"{point}=crash"},
        check=False,
        timeout=60,
    )
    assert done.returncode == CRASHED
    assert versions_in(tmp_path / "half_plus_three") == versions
    assert half_plus_three(tmp_path).verify().version == len(versions) + 1
    assert not [*(tmp_path / "half_plus_three").glob(".new.*")]


def test_drafts_of_processes_that_were_killed_are_removed_and_no_others(
    tmp_path: Path,
) -> None:
    of_others = tmp_path / ".new.of_others.tmp"
    of_others.mkdir()
    (tmp_path / ".new.99.0123abcd.tmp" / "arrays").mkdir(parents=True)
    with draft_in(tmp_path) as one, draft_in(tmp_path) as another:
        assert {*tmp_path.iterdir()} == {one, another, of_others}
    assert [*tmp_path.iterdir()] == [of_others]


@pytest.mark.slow
@pytest.mark.procs
def test_what_one_jax_exports_the_other_serves(tmp_path: Path) -> None:
    half_plus_three(tmp_path)
    code = (
        "import sys; from pathlib import Path;"
        "from tests.support.exported import half_plus_three, ask;"
        "print(ask(Path(sys.argv[1]))); half_plus_three(Path(sys.argv[1]))"
    )
    assert run_there(code, tmp_path, home=tmp_path)[0] == "[3.5, 4.0, 5.5]"
    theirs = jg.ExportedModel(tmp_path / "half_plus_three" / "2")
    assert theirs.manifest.jax != jax.__version__
    assert theirs.predict([1, 2, 5])["y"].tolist() == [3.5, 4.0, 5.5]


def test_a_model_with_a_hash_table_is_refused_by_its_name(tmp_path: Path) -> None:
    table = jg.HashTable(4, capacity_bytes=1 << 20)
    keys = np.zeros((2, 2), np.uint32)
    with pytest.raises(ArtifactError, match=r"hash table params/rows, .* rows=\"ps\""):
        jg.export(table, keys, tmp_path / "ads")
