"""Manifests of servers of models: what Kubernetes knows, and what callers need."""

import base64
import inspect
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from jgraph.cli import app
from jgraph.cli.launching import OF_CLUSTER, OF_SERVERS, render_k8s
from jgraph.errors import ConfigError
from jgraph.launch.kubernetes import Manifest, Size
from jgraph.launch.kubernetes_serving import ModelDeployment
from tests.support.kubernetes_schema import check

FILES = {"token": b"secret", "tls.crt": b"-", "tls.key": b"-"}
FORMS = [
    pytest.param(ModelDeployment("jgraph:0.1", "models"), id="TLS"),
    pytest.param(ModelDeployment("i", "models", tls=False), id="plain"),
    pytest.param(
        ModelDeployment("i", "m", 3, "ads", size=Size("4", "8Gi", 1), files=FILES),
        id="full",
    ),
]


def by_kind(servers: ModelDeployment) -> dict[str, Manifest]:
    return {one["kind"]: one for one in servers.manifests() if one["kind"] != "Secret"}


@pytest.mark.parametrize("servers", FORMS)
def test_kubernetes_has_every_field_of_an_object(servers: ModelDeployment) -> None:
    for manifest in servers.manifests():
        check(manifest)


@pytest.mark.parametrize("servers", FORMS)
def test_all_objects_are_about_the_pods_of_the_deployment(
    servers: ModelDeployment,
) -> None:
    found = by_kind(servers)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    budget = found["PodDisruptionBudget"]["spec"]
    for selector in (
        found["Deployment"]["spec"]["selector"]["matchLabels"],
        found["Service"]["spec"]["selector"],
        budget["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert budget["maxUnavailable"] == 1, "a node can be drained"
    assert found["Service"]["metadata"]["name"] == f"{servers.name}-serve"


@pytest.mark.parametrize("servers", FORMS)
def test_a_pod_that_ends_is_asked_until_the_news_is_around(
    servers: ModelDeployment,
) -> None:
    pod = by_kind(servers)["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert 0 < waits < pod["terminationGracePeriodSeconds"]


def test_plain_text_is_for_pods_with_the_label_of_callers_only() -> None:
    assert "NetworkPolicy" not in by_kind(ModelDeployment("i", "m"))
    found = by_kind(ModelDeployment("i", "m", tls=False))
    (rule,) = found["NetworkPolicy"]["spec"]["ingress"]
    (caller,) = rule["from"]
    assert caller["podSelector"]["matchLabels"] == {"jgraph-client": "jgraph-serve"}
    (container,) = found["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "--insecure-i-accept"
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTP"


def test_secrets_have_what_is_mounted() -> None:
    servers = ModelDeployment("i", "m", files=FILES)
    secrets = {
        one["metadata"]["name"]: {
            name: base64.b64decode(code) for name, code in one["data"].items()
        }
        for one in servers.manifests()
        if one["kind"] == "Secret"
    }
    assert secrets == {
        "jgraph-serve-token": {"token": b"secret"},
        "jgraph-serve-tls": {"tls.crt": b"-", "tls.key": b"-"},
    }
    pod = by_kind(servers)["Deployment"]["spec"]["template"]["spec"]
    mounted = [one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one]
    assert sorted(mounted) == sorted(secrets)


def test_files_that_lack_a_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tls\.key is not among .*token, tls\.crt"):
        ModelDeployment("i", "m", files={"token": b"-", "tls.crt": b"-"})


def test_no_replicas_are_refused() -> None:
    with pytest.raises(ConfigError, match="a replica at least"):
        ModelDeployment("i", "m", 0)


def test_a_claim_that_no_object_is_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="'my models' is the name of no"):
        ModelDeployment("i", "my models")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "m", "--jobset"], "leave --jobset or --serve away"),
        (["--serve", "m", "--ps", "1"], "leave --ps or --serve away"),
        (["--replicas", "2"], "write --serve CLAIM too, or leave --replicas away"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: list[str], said: str
) -> None:
    done = CliRunner().invoke(app, ["k8s", "render", "--image", "i", *words])
    assert said in str(done.exception)


def test_each_option_of_what_is_printed_is_of_a_cluster_or_of_servers() -> None:
    of_all = {"context", "image", "name", "certs", "serve", "insecure_i_accept"}
    options = set(inspect.signature(render_k8s).parameters) - of_all - {"as_json"}
    assert options == {*OF_CLUSTER, *OF_SERVERS}


def test_the_command_prints_what_is_to_be_applied(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    words = ["--serve", "models", "--replicas", "3", "--certs", str(tmp_path)]
    done = CliRunner().invoke(app, ["k8s", "render", "--image", "i", *words])
    assert done.exit_code == 0, done.output
    servers = ModelDeployment("i", "models", 3, files=FILES)
    assert list(yaml.safe_load_all(done.output)) == servers.manifests()
