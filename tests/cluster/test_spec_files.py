from pathlib import Path
from typing import Any

import pytest

from jgraph.cluster.options import allowed_sources_in
from jgraph.cluster.spec import ClusterSpec, TFConfig
from jgraph.errors import ClusterSpecError, UnknownDeviceError


def refused(make: Any, *args: Any) -> ClusterSpecError:
    with pytest.raises(ClusterSpecError) as caught:
        make(*args)
    return caught.value


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "# two hosts\n[cluster]\n"
        'ps = ["nodeA:8470"]\nworker = ["nodeA:8471", "nodeB:8471"]\n'
        '[cluster.evaluator]\n3 = "nodeB:8472"\n'
    )
    assert ClusterSpec.from_toml(path) == ClusterSpec(
        {
            "ps": ["nodeA:8470"],
            "worker": ["nodeA:8471", "nodeB:8471"],
            "evaluator": {3: "nodeB:8472"},
        }
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no [cluster] table"),
        ('[clutser]\nps = ["a:1"]\n', "2 problems"),
        ('[clutser]\nps = ["a:1"]\n', "unknown table or key 'clutser'"),
        ('[cluster]\nps = ["a:1"\n', "this is not TOML: Unclosed array"),
        ("ps = " + "[" * 4000, "this is not TOML: maximum recursion depth"),
        ('[cluster]\nps = ["a:1"]\nps = ["b:1"]\n', "line 3"),
        ("cluster = 3\n", "expected a dict from job name"),
        ("[cluster]\nps = []\n", "ps has no tasks"),
        ('[cluster]\nps = ["a:1"]\nworker = ["b"]\n', "worker[0] is 'b', which has no"),
        (
            '[cluster]\nps=["x:1","nodeA:8471"]\nworker=["nodeA:8471"]\n',
            "ps[1] and worker[0] are both nodeA:8471",
        ),
    ],
)
def test_a_wrong_cluster_file_is_named_with_the_place(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(content)
    error = refused(ClusterSpec.from_toml, path)
    assert message in str(error)
    assert str(path) in str(error)


def test_a_missing_cluster_file_is_named(tmp_path: Path) -> None:
    error = refused(ClusterSpec.from_toml, tmp_path / "cluster.tmol")
    assert "cluster.tmol: No such file or directory" in str(error)


def test_a_binary_cluster_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in str(refused(ClusterSpec.from_toml, path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 column 1"),
        ('{"ps": ["a:1"],\n}', "line 2"),
        ('{"ps": ["a:1"], "ps": ["b:1"]}', '"ps" is there twice'),
        ("[" * 100_000, "nested too deep"),
        ("3", "expected a dict"),
    ],
)
def test_json_that_is_no_cluster_is_refused(text: str, message: str) -> None:
    assert message in str(refused(ClusterSpec.from_json, text))


# ----------------------------------------------------------------------- TF_CONFIG

TF_CONFIG = (
    '{"cluster": {"chief": ["host0:2222"], "ps": ["host1:2222"],'
    ' "worker": ["host3:2222", "host4:2222"]},'
    ' "task": {"type": "worker", "index": 1}, "environment": "cloud"}'
)


def test_tf_config_gives_the_cluster_and_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG)
    config = TFConfig.read()
    assert (config.job, config.task) == ("worker", 1)
    assert config.cluster.jobs == ["chief", "ps", "worker"]
    assert ClusterSpec.from_tf_config() == config.cluster
    assert ClusterSpec.from_tf_config(TF_CONFIG) == config.cluster


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ('{"type": "ps", "index": "0"}', ("ps", 0)),
        ('{"type": "ps"}', ("ps", None)),
        ('{"type": "evaluator", "index": 0}', ("evaluator", 0)),
        ('{"type": "evaluator"}', ("evaluator", None)),
        ("{}", (None, None)),
        ("null", (None, None)),
    ],
)
def test_tf_config_task_is_read_as_tensorflow_reads_it(
    task: str, expected: tuple[str | None, int | None]
) -> None:
    config = TFConfig.read(f'{{"cluster": {{"ps": ["a:1"]}}, "task": {task}}}')
    assert (config.job, config.task) == expected


@pytest.mark.bad_input_row(23)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "TF_CONFIG is not set; export it, or"),
        ("{", "TF_CONFIG: this is not JSON"),
        ("[]", '"cluster" must hold an object'),
        ("{}", '"cluster" must hold an object'),
        ('{"cluster": {"ps": ["a"]}}', "TF_CONFIG: ps[0] is 'a', which has no port"),
        ('{"cluster": {"ps": ["a:1"]}, "task": 3}', '"task" is 3, not'),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"index": 1}}', '"task" is {"index"'),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"type":"ps","index":-1}}', '"task" is'),
        ('{"cluster": {"ps": ["a:1"]}, "task": {"type":"ps","index":true}}', '"task"'),
    ],
)
def test_a_wrong_tf_config_is_refused(text: str, message: str) -> None:
    assert message in str(refused(TFConfig.read, text))


def test_no_tf_config_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert "TF_CONFIG is not set" in str(refused(ClusterSpec.from_tf_config))


def test_a_tf_config_task_outside_its_cluster_is_refused() -> None:
    text = '{"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 1}}'
    with pytest.raises(UnknownDeviceError, match="no task 1; its tasks are 0"):
        TFConfig.read(text)


def test_cluster_file_says_which_import_paths_data_may_come_from(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cluster.toml"
    tasks = '[cluster]\nps = ["a:1"]\n'
    path.write_text(tasks)
    assert allowed_sources_in(path) == []
    path.write_text(tasks + '[sources]\nallow = ["mine.data:*"]\n')
    assert ClusterSpec.from_toml(path).jobs == ["ps"]
    assert allowed_sources_in(path) == ["mine.data:*"]
    path.write_text(tasks + '[sources]\nallow = "mine.data:*"\n')
    with pytest.raises(ClusterSpecError, match="a list of patterns of import paths"):
        ClusterSpec.from_toml(path)
