"""What a Spark task does for a server, and the driver with it, without Spark."""

import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from jgraph.client.spark.failures import reason_of
from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import StartError, VersionError
from jgraph.graph.device import TaskName
from jgraph.launch.spark import control, keeper
from jgraph.launch.spark.control import ControlServer
from jgraph.launch.spark.keeper import serve
from jgraph.launch.spark.task_process import LOST, SparkOrder, SparkProcess
from jgraph.launch.spark.versions import check_versions
from jgraph.rpc.security.certificates import Authority

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("nothing_is_left")]

PS = TaskName("/job:ps/task:0")
NOBODY = ClusterSpec({})
SECRET = "a secret of this test"
WAIT_S = 20.0


class Driver:
    """A driver with one task, and Spark tasks that are threads here."""

    def __init__(self, directory: Path) -> None:
        authority = Authority()
        for name, content in authority.files_of_launcher().items():
            (directory / name).write_bytes(content)
        self.certificate = authority.certificate.decode()
        order = SparkOrder(authority, "the token", "auto", (), 1.0)
        self.wanted = 0
        self.is_over = False
        self.process = SparkProcess(
            PS,
            order,
            {"A_VARIABLE": "1"},
            want=self._want,
            is_over=lambda: self.is_over,
            problem=lambda link: str(link.hello["problem"]),
            on_start=lambda process: NOBODY,
        )
        self.control = ControlServer(directory, SECRET, {PS: self.process})
        self.port = self.control.start("127.0.0.1")
        self.keepers: list[threading.Thread] = []

    def _want(self, task: TaskName) -> None:
        self.wanted += 1

    def keep(self, **changed: Any) -> threading.Thread:
        """Begins a Spark task."""
        order = {
            "task": PS,
            "hosts": ["127.0.0.1"],
            "port": self.port,
            "ca": self.certificate,
            "secret": SECRET,
            "python": sys.executable,
            "driver_python": sys.executable,
            "module": "tests.support.spark_child",
            "echo": False,
            **changed,
        }
        work: Callable[[], Any] = lambda: list(serve([json.dumps(order)]))
        thread = threading.Thread(target=work, name="spark task")
        self.keepers.append(thread)
        thread.start()
        return thread

    def begin(self) -> psutil.Process:
        """Starts the server, and returns its process."""
        self.process.start(NOBODY)
        self.process.wait_started()
        self.process.join(ClusterSpec({"ps": ["127.0.0.1:7"]}))
        return psutil.Process(self.process.pid)

    def close(self) -> None:
        self.process.close()
        self.control.close()
        for one in self.keepers:
            one.join(WAIT_S)
            assert not one.is_alive()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    made = Driver(tmp_path)
    yield made
    made.close()


def test_a_server_is_begun_joined_and_ended_with_its_cluster(driver: Driver) -> None:
    driver.keep()
    assert driver.process.wait_link(WAIT_S) == ""
    server = driver.begin()
    assert driver.process.address == "127.0.0.1:7"
    driver.process.close()
    server.wait(WAIT_S)


def test_a_server_that_is_killed_can_be_started_again_where_it_was(
    driver: Driver,
) -> None:
    driver.keep()
    driver.begin()
    driver.process.kill()
    assert driver.process.wait_dead() == -9
    assert driver.process.how_it_ended() == "SIGKILL"
    assert "'certificate'" in driver.process.tail()
    with pytest.raises(StartError, match="the port is taken"):
        driver.begin()
    assert driver.process.wait_dead() == 3
    # Its port is another's: the next one takes any.
    assert driver.begin().is_running()
    assert driver.wanted == 1


@pytest.mark.row(43)
def test_a_server_ends_with_the_link_of_its_spark_task_and_a_spare_one_takes_over(
    driver: Driver,
) -> None:
    first = driver.keep()
    server = driver.begin()
    spare = driver.keep()
    link = driver.process.link
    assert link is not None
    link.close()
    server.wait(WAIT_S)
    first.join(WAIT_S)
    assert driver.process.wait_dead() == LOST
    assert "the loss of its Spark task on" in driver.process.how_it_ended()
    driver.process._any_port = True
    driver.process._has_joined = False  # at any port
    assert driver.begin().is_running()
    assert spare.is_alive()


def test_a_spark_task_is_heard_of_however_often_the_driver_speaks(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "BEAT_S", 0.1)  # gives up after a second
    monkeypatch.setattr(keeper, "BEAT_S", 0.15)
    spark_task = driver.keep()
    assert driver.process.wait_link(WAIT_S) == ""
    link = driver.process.link
    spark_task.join(1.5)
    assert spark_task.is_alive()
    assert driver.process.link is link is not None


def test_no_server_is_begun_once_the_application_has_ended(driver: Driver) -> None:
    driver.is_over = True
    with pytest.raises(OSError, match="the Spark application has ended"):
        driver.process.start(NOBODY)


def test_a_spark_task_that_fails_says_why_to_who_waits_for_it(driver: Driver) -> None:
    driver.process.failed("no way to the driver")
    why = driver.process.wait_link(WAIT_S)
    assert why == "its Spark task: no way to the driver"


def test_an_executor_without_the_named_python_begins_nothing(driver: Driver) -> None:
    driver.keep(python="/no/such/python")
    driver.process.wait_link(WAIT_S)
    driver.process.start(NOBODY)
    with pytest.raises(StartError, match="there is no program /no/such/python"):
        driver.process.wait_started()


@pytest.mark.parametrize(
    "line",
    [
        b'{"hello": {"task": "/job:ps/task:0", "secret": "guessed"}}\n',
        b'{"hello": {"task": "/job:ps/task:9", "secret": "a secret of this test"}}\n',
        b'{"hello": []}\n',
        b"[]\n",
        b"\xff{\n",
        b"x" * (2 << 20),
    ],
)
def test_a_caller_without_the_secret_gets_no_word(driver: Driver, line: bytes) -> None:
    context = ssl.create_default_context(cadata=driver.certificate)
    with (
        socket.create_connection(("127.0.0.1", driver.port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="launcher.jgraph") as caller,
    ):
        with suppress(ConnectionError, ssl.SSLError):
            caller.sendall(line)
        with suppress(ConnectionError, ssl.SSLError):
            assert caller.recv(100) == b""
    assert driver.process.link is None


def test_a_driver_with_another_certificate_is_told_nothing(driver: Driver) -> None:
    other = Authority().certificate.decode()
    order = {"task": PS, "hosts": ["127.0.0.1"], "port": driver.port, "ca": other}
    with pytest.raises(
        RuntimeError, match=r"does not reach the driver at 127\.0\.0\.1:"
    ):
        list(serve([json.dumps(order)]))


def test_what_spark_says_of_a_job_is_one_line_without_its_stacks() -> None:
    text = (
        "org.apache.spark.SparkException: Job aborted\n\tat org.apache.X(Y.scala:1)\n"
        "Traceback (most recent call last):\n  File x, line 1\n"
        "RuntimeError: /job:ps/task:0 on h does not reach the driver\n\tat org.Z"
    )
    assert reason_of(Exception(text)) == "/job:ps/task:0 on h does not reach the driver"
    assert reason_of(Exception("Job 3 cancelled\n\tat X")) == "Job 3 cancelled"
    assert reason_of(EOFError()) == "EOFError"


def test_versions_that_will_not_do_are_a_table() -> None:
    own = {"python": "3.12.1", "jgraph": "0.1.0", "jax": "0.10.2"}
    there = {"python": "3.11.0", "jgraph": "0.0.9", "jax": "0.10.2"}
    hello = {"host": "a", "python": "/p", "problem": "", "task": PS}
    check_versions([{**hello, "versions": own}], own)
    hellos = [{**hello, "versions": own}, {**hello, "host": "b", "versions": there}]
    with pytest.raises(VersionError) as caught:
        check_versions(hellos, own)
    assert "b: jgraph 0.0.9 is not 0.1.0 of the driver" in str(caught.value)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == [
        *("host", "the", "a", "b")
    ]
