"""New versions, labels and the end of a server cost no request."""

import errno
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jgraph as jg
from jgraph.clock import SystemClock
from jgraph.cluster import event_loop
from jgraph.errors import ArtifactError, ConfigError, ModelNotReadyError
from jgraph.runtime.files.manifest import checksum
from jgraph.serving.artifact import FILE
from jgraph.serving.signature import DEFAULT
from tests.support.exported import half_plus_three
from tests.support.free_port import free_port
from tests.support.http_calls import call
from tests.support.waiting import wait_until

X = np.zeros((1, 4), np.float32)


def constant(models: Path, value: float, **options: Any) -> jg.ExportedModel:
    w = np.full(4, value, np.float32)
    path = models / "m"
    exported: jg.ExportedModel = jg.export(
        lambda w, x: x + w, X, path, params=w, **options
    )
    return exported


class Load:
    """Requests without an end, from several threads."""

    def __init__(self, server: jg.ModelServer, threads: int = 3) -> None:
        self.server = server
        self.stop = threading.Event()
        self.failed: list[object] = []
        self.answers: set[float] = set()
        self.count = itertools.count()
        self.threads = [threading.Thread(target=self.ask) for _ in range(threads)]

    def ask(self) -> None:
        try:
            while not self.stop.is_set():
                found = self.server.predict("m", X)["y"]
                self.answers.add(float(found[0, 0]))
                next(self.count)
        except Exception as error:  # noqa: BLE001  # is shown by the test
            self.failed.append(error)


@contextmanager
def load_on(server: jg.ModelServer) -> Iterator[Load]:
    load = Load(server)
    for thread in load.threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in load.threads:
            thread.join(60)


@pytest.mark.slow
@pytest.mark.parametrize("versions", [7, pytest.param(21, marks=pytest.mark.nightly)])
def test_versions_that_come_under_load_fail_no_request_and_compile_nothing(
    versions: int, tmp_path: Path
) -> None:
    constant(tmp_path, 1)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        compiled = server.compilations
        assert compiled > 0
        with load_on(server) as load:
            for version in range(2, versions + 1):
                constant(tmp_path, version)
                server.refresh()
                found = server.predict("m", X)["y"][0, 0]
                assert found == version
        assert not load.failed
        assert next(load.count) > 20
        assert server.compilations == compiled
        states = [row["state"] for row in server.status()]
        assert states == ["UNLOADED"] * (versions - 1) + ["READY"]


def test_a_version_that_is_damaged_or_half_there_changes_nothing(
    tmp_path: Path,
) -> None:
    first = constant(tmp_path, 1)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        (tmp_path / "m" / "2" / "arrays").mkdir(parents=True)  # being copied
        server.refresh()
        assert [row["version"] for row in server.status()] == ["1"]
        shutil.copytree(first.path, tmp_path / "m" / "3")
        (tmp_path / "m" / "3" / "arrays" / "params" / "0").write_bytes(bytes(16))
        server.refresh()
        assert server.predict("m", X)["y"][0, 0] == 1
        (row,) = [row for row in server.status() if row["version"] == "3"]
        assert row["state"] == "FAILED"
        assert "is not what was exported" in row["reason"]
        shutil.rmtree(first.path)
        shutil.rmtree(tmp_path / "m" / "3")
        server.refresh()
        assert server.predict("m", X)["y"][0, 0] == 1  # from memory


def test_a_version_whose_manifest_tells_of_other_outputs_is_not_served(
    tmp_path: Path,
) -> None:
    path = constant(tmp_path, 1).path
    body = json.loads((path / FILE).read_text())
    del body["crc32"]
    outputs = body["signatures"][DEFAULT]["outputs"]
    outputs.append({**outputs[0], "name": "z"})
    (path / FILE).write_text(json.dumps({**body, "crc32": checksum(body)}))
    with pytest.raises(ArtifactError, match=r"gives float32\[1,4\], and its manifest"):
        jg.ExportedModel(path).predict(X)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        (row,) = server.status()
    assert row["state"] == "FAILED"
    assert "export it again" in row["reason"]


def test_a_version_that_is_replaced_is_not_loaded_under_its_number(
    tmp_path: Path,
) -> None:
    constant(tmp_path, 1)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        shutil.rmtree(tmp_path / "m" / "1")
        constant(tmp_path, 7, version=1)
        server.refresh()
        assert server.predict("m", X)["y"][0, 0] == 1  # from memory
        model = server._models.model("m")
        event_loop.run(model.unload())
        with pytest.raises(ModelNotReadyError, match="versions never change"):
            event_loop.run(model.load())


def _completed(whole: Path, there: Path) -> None:
    shutil.copytree(whole / "programs", there / "programs")


def _replaced(whole: Path, there: Path) -> None:
    shutil.rmtree(there)
    shutil.copytree(whole, there)


def _with_good_options(whole: Path, there: Path) -> None:
    _completed(whole, there)
    (there.parent / "model.toml").write_text("[batching]\nmax_rows = 8\n")


@pytest.mark.parametrize("mend", [_completed, _replaced, _with_good_options])
def test_a_version_that_failed_is_tried_again_when_its_files_are_others(
    tmp_path: Path, mend: Callable[[Path, Path], None]
) -> None:
    whole = constant(tmp_path / "elsewhere", 2).path
    models = tmp_path / "models"
    constant(models, 1)
    with jg.serve(models, http_port=None, watch_s=3600) as server:
        if mend is _with_good_options:
            (models / "m" / "model.toml").write_text("[batching]\nmax_rows = 'a'\n")
        no_code = shutil.ignore_patterns("programs")
        shutil.copytree(whole, models / "m" / "2", ignore=no_code)
        for _ in range(2):
            server.refresh()
            assert [row["state"] for row in server.status()] == ["READY", "FAILED"]
        mend(whole, models / "m" / "2")
        server.refresh()
        assert server.predict("m", X)["y"][0, 0] == 2


def test_how_many_versions_answer_is_read_again_with_the_next_one(
    tmp_path: Path,
) -> None:
    constant(tmp_path, 1)
    constant(tmp_path, 2)
    with jg.serve(tmp_path, http_port=None, watch_s=3600) as server:
        (tmp_path / "m" / "model.toml").write_text("[versions]\nnewest = 0\n")
        constant(tmp_path, 3)
        server.refresh()
        assert [row["state"] for row in server.status()] == ["READY"] * 3


def is_ready(server: jg.ModelServer) -> bool:
    return call(server, "GET", "/v2/health/ready")[0] == 200


def test_a_model_that_came_later_and_is_broken_takes_no_server_from_its_callers(
    tmp_path: Path,
) -> None:
    whole = constant(tmp_path / "models", 1).path
    broken = tmp_path / "models" / "broken" / "1"
    no_code = shutil.ignore_patterns("programs")
    with jg.serve(tmp_path / "models", watch_s=3600) as server:
        shutil.copytree(whole, broken, ignore=no_code)
        server.refresh()
        assert call(server, "GET", "/v2/models/broken/ready")[0] == 503
        assert is_ready(server)
    with jg.serve(tmp_path / "models", watch_s=3600) as server:
        assert not is_ready(server)  # what it was started for is not there
        shutil.rmtree(broken.parent)
        server.refresh()
        assert is_ready(server)
        assert call(server, "GET", "/v2/models/broken/ready")[0] == 404


def test_a_model_that_a_caller_unloaded_is_not_missed(tmp_path: Path) -> None:
    constant(tmp_path, 1)
    half_plus_three(tmp_path)
    with jg.serve(tmp_path, allow_control=True, watch_s=3600) as server:
        assert is_ready(server)
        call(server, "POST", "/v2/repository/models/m/unload", {})
        assert call(server, "GET", "/v2/models/m/ready")[0] == 503
        assert is_ready(server)


class Unreadable:
    """A model whose directory cannot be read."""

    name = "away"
    newest = 1

    def look(self) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    def load(self, version: int) -> Any:
        raise AssertionError("nothing was found that could be loaded")

    def set_label(self, label: str, version: int | None) -> None:
        raise AssertionError("there is no version that could have it")


def test_a_directory_that_cannot_be_read_keeps_no_other_model_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    constant(tmp_path, 1)
    with jg.ModelServer(
        tmp_path, models=[Unreadable()], http_port=None, watch_s=3600
    ) as server:
        constant(tmp_path, 2)
        server.refresh()
        assert server.predict("m", X)["y"][0, 0] == 2
    told = [one for one in caplog.messages if "away: Permission denied" in one]
    assert len(told) == 1


def test_a_link_to_a_model_is_told_and_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    constant(tmp_path / "elsewhere", 1)
    models = tmp_path / "models"
    models.mkdir()
    (models / "linked").symlink_to(tmp_path / "elsewhere" / "m")
    with pytest.raises(ConfigError, match="linked: it is a link"):
        jg.serve(models)
    constant(models, 1)
    with jg.serve(models, http_port=None, watch_s=3600) as server:
        assert [row["name"] for row in server.status()] == ["m"]
    assert any("linked: it is a link" in one for one in caplog.messages)


def test_labels_move_by_file_and_a_bad_file_moves_nothing(tmp_path: Path) -> None:
    constant(tmp_path, 1, label="stable")
    constant(tmp_path, 2)
    with jg.serve(tmp_path, watch_s=3600) as server:
        assert server.predict("m", X, version="label:stable")["y"][0, 0] == 1
        assert server.predict("m", X)["y"][0, 0] == 2
        for text in ("{", '{"7": 1}', '{"stable": 2, "split": {"stable": 101}}'):
            (tmp_path / "m" / "labels.json").write_text(text)
            server.refresh()
            assert server.predict("m", X, version="label:stable")["y"][0, 0] == 1
        (tmp_path / "m" / "labels.json").write_text('{"stable": 1}')
        server.set_label("m", "stable", 2)
        assert server.predict("m", X, version="label:stable")["y"][0, 0] == 2
        (tmp_path / "m" / "labels.json").write_text('{"stable": 2, "next": 9}')
        server.refresh()
        with pytest.raises(ModelNotReadyError, match="version 9"):
            server.predict("m", X, version="label:next")
        assert server.labels("m") == {"stable": 2}


def test_a_split_sends_a_key_to_the_same_version_each_time(tmp_path: Path) -> None:
    constant(tmp_path, 1)
    constant(tmp_path, 2)
    labels = {"a": 1, "b": 2, "split": {"a": 50, "b": 50}}
    (tmp_path / "m" / "labels.json").write_text(json.dumps(labels))
    with jg.serve(tmp_path, watch_s=3600) as server:

        def version_for(key: str) -> str:
            one = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0] * 4}
            body = {"id": key, "inputs": [one]}
            answer = call(server, "POST", "/v2/models/m/infer", body)[1]
            return str(answer["model_version"])

        found = {key: version_for(key) for key in map(str, range(40))}
        assert set(found.values()) == {"1", "2"}
        assert all(version_for(key) == found[key] for key in list(found)[:5])


def asked(port: int, token: str) -> int:
    with closing(
        http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    ) as connection:
        return _asked(connection, token)


def _asked(connection: http.client.HTTPConnection, token: str) -> int:
    body = b'{"instances": [1.0]}'
    headers = {"Authorization": f"Bearer {token}"}
    headers["Content-Type"] = "application/json"
    connection.request("POST", "/v1/models/half_plus_three:predict", body, headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.slow
@pytest.mark.procs
def test_a_server_that_is_told_to_end_answers_what_it_has(tmp_path: Path) -> None:
    half_plus_three(tmp_path / "models")
    command = [sys.executable, "-m", "jgraph", "serve", str(tmp_path / "models")]
    ports = ["--http-port", "0", "--grpc-port", "0", "--drain-s", "1", "--json"]
    home = {**os.environ, "JGRAPH_HOME": str(tmp_path)}
    process = subprocess.Popen(
        [*command, *ports], stdout=subprocess.PIPE, text=True, env=home
    )
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        port = int(facts["http"].rpartition(":")[2])
        token = Path(facts["token_file"]).read_text().strip()
        told: list[int] = []
        refused, clock = threading.Event(), SystemClock()
        ended: list[float] = []

        def ask() -> None:
            while not refused.is_set():
                try:
                    told.append(asked(port, token))
                except ConnectionError:  # it listens no more, or it read nothing
                    ended.append(clock.now())
                    refused.set()

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while len(told) < 30 and not refused.is_set():
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGTERM)
        told_to_end = clock.now()
        assert process.wait(60) == 0
        for thread in threads:
            thread.join(30)
        # While it drains it answers as before; then it says 503, or listens no more.
        assert min(ended) - told_to_end > 0.9
        assert set(told) <= {200, 503}
        assert told.count(200) >= 30
    finally:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.procs
def test_a_server_that_is_killed_under_load_answers_again_where_it_was(
    tmp_path: Path,
) -> None:
    half_plus_three(tmp_path / "models")
    port = free_port()
    command = [sys.executable, "-m", "jgraph", "serve", str(tmp_path / "models")]
    ports = ["--http-port", str(port), "--grpc-port", "-1", "--json"]
    home = {**os.environ, "JGRAPH_HOME": str(tmp_path)}

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*command, *ports], stdout=subprocess.PIPE, text=True, env=home
        )

    answers: list[int] = []
    lost, over = [0], threading.Event()
    process = start()
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        token = Path(facts["token_file"]).read_text().strip()

        def ask() -> None:
            while not over.is_set():
                try:
                    answers.append(asked(port, token))
                except (OSError, http.client.HTTPException):
                    lost[0] += 1
                    over.wait(0.02)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) >= 30)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
        wait_until(lambda: lost[0] > 0)
        before = len(answers)
        process.stdout.close()
        process = start()  # as a supervisor does: the same port, token and versions
        # Callers that ask again at once take their part of it while it starts.
        wait_until(lambda: answers[before:].count(200) >= 30, timeout_s=120)
        over.set()
        for thread in threads:
            thread.join(30)
        assert set(answers[:before]) == {200}
        assert set(answers[before:]) <= {200, 503}  # it loads its versions first
    finally:
        over.set()
        process.kill()
        process.communicate(timeout=10)
