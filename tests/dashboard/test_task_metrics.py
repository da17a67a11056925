"""The metrics port of one task: what Prometheus gets, and what nobody gets."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jgraph.dashboard.metrics import METRICS
from jgraph.dashboard.task_metrics import TaskMetrics
from jgraph.errors import PortInUseError
from jgraph.graph.ir import TaskName
from jgraph.rpc.security.certificates import make_certificates
from tests.support.cli import run
from tests.support.servers import Servers

TASK, PS = TaskName("/job:worker/task:0"), TaskName("/job:ps/task:0")
TOKEN = "a-token-of-a-scrape"


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers(ps=1, worker=1)
    yield servers
    servers.stop()


@pytest.fixture
def metrics(servers: Servers) -> Iterator[TaskMetrics]:
    metrics = TaskMetrics(servers.server(TASK), "127.0.0.1", 0, TOKEN)
    metrics.start()
    yield metrics
    metrics.stop()


def scrape(url: str, token: str = TOKEN, /, **headers: str) -> httpx.Response:
    shown = {"Authorization": f"Bearer {token}", **headers}
    return httpx.get(url, headers=shown, timeout=20)


def test_a_scrape_gets_the_names_of_a_dashboard_with_what_is_so_now(
    metrics: TaskMetrics,
) -> None:
    for _ in range(2):
        answer = scrape(metrics.url)
        assert answer.headers["content-type"].startswith("text/plain")
        families = {f.name: f for f in text_string_to_metric_families(answer.text)}
        assert families.keys() <= {m.name.removesuffix("_total") for m in METRICS}
        (up,) = families["jgraph_task_up"].samples
        assert (up.labels, up.value) == ({"task": TASK}, 1.0)
        assert families["jgraph_task_resident_memory_bytes"].samples[0].value > 1e6


def test_who_shows_no_token_or_another_gets_nothing(metrics: TaskMetrics) -> None:
    for answer in (httpx.get(metrics.url), scrape(metrics.url, "another-token-of-16")):
        assert answer.status_code == 401
        assert "--metrics-token-file" in answer.text
    assert scrape(metrics.url.replace("/metrics", "/api/v1/state")).status_code == 401
    assert scrape(metrics.url.removesuffix("metrics")).status_code == 404
    assert scrape(metrics.url, Origin="http://elsewhere").status_code == 403
    posted = httpx.post(metrics.url, headers={"Authorization": f"Bearer {TOKEN}"})
    assert posted.status_code == 405


def test_a_task_is_scraped_by_any_name_of_its_host(metrics: TaskMetrics) -> None:
    assert scrape(metrics.url, Host="pod-7.cluster.internal:9000").is_success


def test_with_a_certificate_the_port_speaks_tls(tmp_path: Path) -> None:
    make_certificates(tmp_path, [TASK, PS])
    servers = Servers(ps=1, worker=1, tls=tmp_path)
    metrics = TaskMetrics(servers.server(TASK), "127.0.0.1", 0, TOKEN)
    metrics.start()
    trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    trusted.check_hostname = False
    shown = {"Authorization": f"Bearer {TOKEN}"}
    assert metrics.url.startswith("https://")
    assert httpx.get(metrics.url, headers=shown, verify=trusted).is_success
    with pytest.raises(httpx.TransportError):
        scrape(metrics.url.replace("https:", "http:"))
    metrics.stop()
    servers.stop()


def test_a_port_that_is_taken_is_named(servers: Servers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match="--metrics-port"):
            TaskMetrics(servers.server(TASK), "127.0.0.1", port, TOKEN)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--metrics-port", "0"], "--metrics-token-file go together"),
        (["--metrics-token-file", "FILE"], "--metrics-token-file go together"),
        (["--metrics-port", "0", "--metrics-token-file", "FILE"], "16 characters"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_a_task_is_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    file = tmp_path / "token"
    file.write_text("short\n")
    typed = [str(file) if one == "FILE" else one for one in options]
    code, _, told = run(capsys, "server", "--job", "worker", *typed)
    assert code == 1
    assert said in " ".join(told.split())
