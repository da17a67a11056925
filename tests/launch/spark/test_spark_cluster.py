"""Clusters on Spark: a real one on this machine, in a process of its own."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from jgraph.errors import ConfigError
from jgraph.launch.spark.application import check_allocation
from jgraph.launch.spark.cluster import SparkCluster
from tests.support.spark_driver import (
    Facts,
    facts_of,
    spark_home,
    standalone,
    start,
)

DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
}
ODD = ("a`b", " ", "é,{}()=\n\t;", "%20")
"""Names of columns that Spark takes, and few people."""
DAY = ("train", "refusals", "stop_inside")
"""In this order: the last one stops the session."""

pytestmark = [
    pytest.mark.procs,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("nothing_is_left"),
]


def test_without_pyspark_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match=r"pip install 'jgraph\[spark\]'"):
        SparkCluster(None)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    """What was seen in one session of three slots."""
    directory = tmp_path_factory.mktemp("spark")
    process = start(directory, "local[3]", *DAY)
    with process:
        yield facts_of(process, directory)
    left = [str(path) for path in (directory / "temporary").rglob("*jgraph*")]
    assert not left


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """What was seen of DataFrames and of executors, which takes a minute."""
    directory = tmp_path_factory.mktemp("frames")
    with start(directory, "local[3]", "frames", "without_shm") as process:
        return facts_of(process, directory)


def test_a_model_is_trained_on_spark_and_nothing_is_left(day: Facts) -> None:
    found = day["train"]
    assert found["steps"] == 300
    assert found["result"] == pytest.approx(3, abs=0.01)
    assert found["ready_s"] < 60
    assert found["target"].startswith("jgraphs://127.0.0.1:")
    assert "/job:ps/task:0 listens on 127.0.0.1:" in found["log"]
    assert sorted(found["pids"]) == sorted(found["running"])
    assert found["left_s"] < 10
    assert found["jobs_left"] == 0
    assert not found["secrets_left"]


def test_no_private_key_of_a_task_is_on_the_driver(day: Facts) -> None:
    keys = {"client.key", "launcher.key"}
    assert {f for f in day["train"]["files"] if f.endswith(".key")} == keys


@pytest.mark.row(43)
def test_a_server_that_is_killed_is_started_again_in_its_spark_task(
    day: Facts,
) -> None:
    found = day["train"]
    assert found["killed"] == ["/job:worker/task:1"]
    assert found["same_address"]
    assert found["back_s"] < 30
    assert (
        "died: /job:worker/task:1 died (SIGKILL); starting it again"
        in (found["events"])
    )


@pytest.mark.row(43)
def test_a_server_ends_with_its_spark_task_and_gets_another(
    day: Facts,
) -> None:
    found = day["train"]
    assert found["server_outlives_its_spark_task_s"] < 10
    assert found["lost"] == ["/job:worker/task:1"]
    assert any("the loss of its Spark task on " in event for event in found["events"])


@pytest.mark.bad_input_row(30)
def test_what_cannot_be_a_cluster_on_spark_is_refused_in_words(
    day: Facts,
) -> None:
    found = day["refusals"]
    assert found["nobody"].startswith("JG-124 a cluster needs at least one task")
    assert "takes a SparkSession, not 'local[2]'" in found["no_session"]
    assert "the master local[3] has 3; make the session with" in found["too_many"]
    assert "the master local[3] has none" in found["no_executors"]
    assert "resources names 'wroker'" in found["no_such_job"]
    assert "write workers=2" in found["misspelled"]
    assert "../other" in found["unsafe_job"]
    assert 'env={"A": "1"}' in found["env"]
    assert "jobs is 3; write how many tasks" in found["jobs"]
    assert "python is 3; write the path" in found["python"]
    assert "resources is 3; write what each task" in found["resources"]
    assert found["left"] == found["jobs_left"] == 0


@pytest.mark.bad_input_row(30)
def test_executors_without_jgraph_are_named_in_a_table(day: Facts) -> None:
    found = day["refusals"]
    assert found["no_python"].startswith("JG-141 ")
    assert "there is no program /no/such/python" in found["no_python"]
    assert "jax is not installed" in found["bare_python"]
    lines = found["bare_python"].splitlines()
    assert lines[1].split() == ["host", "program", "python", "jgraph", "jax"]
    assert lines[2].split()[:2] == ["the", "driver"]
    assert "/usr/bin/python3" in lines[3]
    assert lines[3].split()[-1] == "none"


@pytest.mark.nightly
def test_a_data_frame_is_written_once_and_read_as_files(night: Facts) -> None:
    found = night["frames"]
    assert found["fields"] == {
        "data['dense']": ["float32", [1000, 2]],
        "data['even']": ["bool", [1000]],
        "data['hashed']": ["int32", [1000]],
        "data['hot']": ["int32", [1000, 3]],
        "data['id']": ["int32", [1000]],
        "data['x.1']": ["float32", [1000]],
        **{f"data[{name!r}]": ["int32", [1000]] for name in ODD},
    }
    assert found["seen"], "each row once"
    assert found["packed"] == {
        "a smallint": ["int16", True],
        "a int": ["int32", True],
        "a bigint": ["int32", True],
        "a float": ["float32", True],
        "a double": ["float32", True],
        "a tinyint": ["int8", True],
        "a boolean": ["bool", True],
    }
    assert ".parquet" in found["kept"]


@pytest.mark.bad_input_row(30)
@pytest.mark.nightly
def test_lists_stay_lists_where_the_python_of_spark_has_no_pyarrow_which_is_said(
    night: Facts,
) -> None:
    found = night["frames"]["bare"]
    (said,) = found["said"]
    assert "the Python of Spark cannot pack them (" in said
    assert "PyArrow" in said
    assert "type: export PYSPARK_PYTHON=" in said
    assert found["where"], "at the line of who wrote jg.Source.spark"
    assert found["read"]


@pytest.mark.bad_input_row(30)
@pytest.mark.nightly
def test_a_data_frame_that_is_no_data_is_refused_with_counts_and_leaves_nothing(
    night: Facts,
) -> None:
    found, said = night["frames"], night["frames"]["wrong"]
    assert not found["refused_left"]
    assert "takes a DataFrame of Spark, not list" in said["no_frame"]
    assert "no column 'densa'; did you mean 'dense'?" in said["no_column"]
    assert "write a list of names: columns=['id']" in said["text"]
    assert "the column 'id' comes twice" in said["twice"]
    assert "the column 'name' is of type string" in said["type"]
    assert 'F.pmod(F.xxhash64("name"), F.lit(1000))' in said["type"]
    assert found["hashed"] == 1000, "no row is made negative by what is said"
    assert "the columns id and ID differ in capital letters" in said["capitals"]
    assert "a DataFrame of a stream, which has no end" in said["stream"]
    assert "'some' has no value in 250 of 1,000 rows" in said["nulls"]
    assert "different lengths, or empty ones (1 in 500, 2 in 500)" in said["ragged"]
    for name in ("holes", "holes_of_bytes"):
        assert "'items' has lists with missing values in 250 of 1,000" in said[name]
    assert "'v' has sparse vectors in 1 of 1 rows" in said["sparse"]
    assert "the DataFrame has no rows" in said["no_rows"]
    assert "there is something in" in said["full"]
    assert "mount hdfs on all hosts" in said["remote"]
    assert 'directory is 3; write a path, for example directory="/' in said["number"]
    assert "Spark could not write the DataFrame to /proc/no/x: " in said["unwritable"]
    assert "Mkdirs failed to create" in said["unwritable"]
    for name in ("pattern", "relative", "upwards"):
        assert "write a whole path from / on" in said[name]


@pytest.mark.nightly
def test_a_model_scores_a_data_frame_where_its_rows_are_in_their_order(
    night: Facts,
) -> None:
    found = night["frames"]
    assert found["scored"][-1] == "('p', 'double')"
    assert found["in_order"]
    assert found["error"] < 1e-5
    assert found["error_of_lists"] < 1e-5
    said = found["wrong_scores"]
    assert "no column 'densa'; did you mean 'dense'?" in said["column"]
    assert "is no list of columns as Spark writes them" in said["out"]
    assert "out names no column; write for example" in said["nothing"]
    assert found["twice"] == ["dense", "id", "p", 4], "columns of one name pass too"
    assert "has a column 'id' already" in said["taken"]
    assert "cannot export a int" in said["model"]
    assert "takes a DataFrame of Spark, not ndarray" in said["no_frame"]


@pytest.mark.row(44)
def test_servers_end_when_spark_is_stopped_and_the_cluster_says_so(
    day: Facts,
) -> None:
    found = day["stop_inside"]
    assert found["there"] == 2
    assert found["left_s"] < 10
    assert found["error"].startswith("JG-131 ")
    assert "the Spark application has ended" in found["error"]
    assert "make a new jg.SparkCluster" in found["error"]
    assert "was given a session that was stopped" in found["stopped"]
    for name in ("frame_of_stopped", "scores_of_stopped"):
        assert "a DataFrame of a session that was stopped" in found[name]
    assert not found["secrets_left"]


@pytest.mark.row(44)
@pytest.mark.nightly
def test_servers_end_when_the_driver_is_killed(tmp_path: Path) -> None:
    with start(tmp_path, "local[2]", "leave_open") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (tmp_path / "errors").read_text()
        found = json.loads(line)
        family = [psutil.Process(pid) for pid in found["servers"] + found["family"]]
        process.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


@pytest.mark.bad_input_row(30)
@pytest.mark.nightly
def test_missing_slots_are_named_and_two_clusters_share_an_application(
    tmp_path: Path,
) -> None:
    with start(tmp_path, "local[3]", "crowded", settings=DYNAMIC) as process:
        found = facts_of(process, tmp_path)["crowded"]
    assert (
        "Spark has started 1 of 2 tasks; it has 3 slots in all within 45 s"
        in (found["missing"])
    )
    assert found["missing"].startswith("JG-134 ")
    assert "has 3, of which another cluster holds 2" in found["third"]
    assert found["took_s"] < 90
    assert "servers of jg.SparkCluster hold all 3" in found["no_slot"]
    assert found["sums"] == pytest.approx([2.2847824, 2.2847824])


@pytest.mark.row(43)
@pytest.mark.nightly
def test_a_run_goes_on_when_its_ps_is_at_another_address(tmp_path: Path) -> None:
    with start(tmp_path, "local[3]", "moved") as process:
        found = facts_of(process, tmp_path)["moved"]
    assert found["moved"]
    assert found["lost"] == [["/job:ps/task:0"]]
    assert found["result"] == pytest.approx(3, abs=0.01)


@pytest.mark.row(43)
@pytest.mark.nightly
@pytest.mark.timeout(900)  # five JVMs take minutes to start on a busy machine
def test_a_run_goes_on_when_executors_are_killed_and_loses_no_update(
    tmp_path: Path,
) -> None:
    home = spark_home(tmp_path)
    master = "local-cluster[4,1,1024]"
    with start(tmp_path, master, "executors", spark_home=home) as process:
        found = facts_of(process, tmp_path)["executors"]
    assert found["lost"] == [["/job:ps/task:1"]]
    assert found["begun_anew"] == ["/job:ps/task:1", "/job:worker/task:1"]
    assert max(found["back_s"].values()) < 60
    assert found["ends_s"] < 10
    assert len(found["events"]) == 2


@pytest.mark.bad_input_row(30)
@pytest.mark.parametrize("said", ["true", " True"])
def test_dynamic_allocation_is_refused_where_there_are_executors(said: str) -> None:
    conf = pytest.importorskip("pyspark", reason="needs jgraph[spark]").SparkConf
    settings = conf(loadDefaults=False)
    check_allocation(settings, "yarn")
    settings.set("spark.dynamicAllocation.enabled", said)
    check_allocation(settings, "local[4]")  # means nothing there
    with pytest.raises(
        ConfigError, match=r'make the session with .config\("spark.dynamicAllocation'
    ):
        check_allocation(settings, "spark://host:7077")


@pytest.mark.bad_input_row(30)
@pytest.mark.nightly
def test_a_session_with_dynamic_allocation_is_refused_before_anything_begins(
    tmp_path: Path,
) -> None:
    home = spark_home(tmp_path)
    master = "local-cluster[1,1,1024]"
    with start(
        tmp_path, master, "dynamic", spark_home=home, settings=DYNAMIC
    ) as process:
        found = facts_of(process, tmp_path)["dynamic"]
    assert found["refused"].startswith("JG-124 ")
    assert '.config("spark.dynamicAllocation.enabled", "false")' in found["refused"]
    assert found["left"] == found["jobs"] == 0


@pytest.mark.nightly
def test_a_task_that_asks_for_more_than_a_slot_gets_it(tmp_path: Path) -> None:
    home = spark_home(tmp_path)
    master = "local-cluster[2,2,1024]"
    with start(tmp_path, master, "profiles", spark_home=home) as process:
        found = facts_of(process, tmp_path)["profiles"]
    first, second, worker = found["places"]
    assert first == second != worker
    assert found["steps"] == 20
    assert all("cpus in whole numbers" in said for said in found["wrong"])


@pytest.mark.nightly
def test_executors_need_no_dev_shm(night: Facts) -> None:
    found = night["without_shm"]
    if "cannot" in found:
        pytest.skip(f"needs the right to mount: {found['cannot']}")
    assert found["shm"].split()[3].startswith("ro")
    assert found["steps"] == 50
    assert "shared memory" in found["ways"]


@pytest.mark.nightly
def test_a_cluster_of_executors_learns_digits_of_a_data_frame_and_scores_others(
    tmp_path: Path,
) -> None:
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.cores": "2",
        "spark.executor.memory": "512m",
    }
    with (
        standalone(tmp_path, 2) as master,
        start(tmp_path, master, "digits", settings=settings) as process,
    ):
        found = facts_of(process, tmp_path)["digits"]
    assert found["accuracy"] >= 0.97
    assert found["executors"] == 2


@pytest.mark.bad_input_row(30)
@pytest.mark.nightly
def test_a_session_of_spark_connect_is_refused_and_may_still_write_data(
    tmp_path: Path,
) -> None:
    pytest.importorskip("grpc_status", reason="needs pip install 'pyspark[connect]'")
    pytest.importorskip("zstandard", reason="needs pip install 'pyspark[connect]'")
    with start(tmp_path, "local[2]", "connect") as process:
        found = facts_of(process, tmp_path)["connect"]
    assert found["kind"].startswith("pyspark.sql.connect")
    assert found["seen"], "each row once"
    assert found["cluster"].startswith("JG-124 ")
    assert "a Spark Connect session, which has no SparkContext" in found["cluster"]
    assert "cannot send a model to executors" in found["scores"]


@pytest.mark.bad_input_row(30)
def test_what_looks_like_a_session_of_spark_connect_is_refused_by_name() -> None:
    pytest.importorskip("pyspark", reason="needs jgraph[spark]")
    kind = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    with pytest.raises(
        ConfigError, match=r"which has no SparkContext .* make a classic"
    ):
        SparkCluster(kind())
