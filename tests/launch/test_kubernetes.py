"""Manifests: what Kubernetes knows, and pods that find each other."""

import base64
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ConfigError
from jgraph.graph.device import TaskName
from jgraph.launch.identity import task_here
from jgraph.launch.kubernetes import Deployment, Manifest, Size, as_yaml
from jgraph.rpc.security.certificates import make_certificates
from tests.support.kubernetes_schema import check

HERE = Path(__file__).parent
OF_TASKS = [*(f"ps-{n}" for n in range(2)), *(f"worker-{n}" for n in range(4))]
SMALL = Deployment("jgraph:0.1", ps=1, workers=2)
ELASTIC = replace(SMALL, elastic=True)
FULL = Deployment(
    "registry.example/jgraph:0.1",
    ps=2,
    workers=4,
    name="wide",
    port=9000,
    sizes={"worker": Size("4", "16Gi", gpus=1)},
    files={
        **dict.fromkeys([f"{task}.crt" for task in OF_TASKS], b"-"),
        **dict.fromkeys([f"{task}.key" for task in OF_TASKS], b"-"),
        "token": b"secret",
        "ca.crt": b"-",
    },
)


def by_kind(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The objects; of two StatefulSets the second has the workers."""
    found: dict[str, Manifest] = {}
    for one in manifests:
        again = one["kind"] in found
        found["Job" if again else one["kind"]] = one
    assert len(found) == len(manifests)
    return found


def pods_of(manifests: list[Manifest]) -> dict[str, Any]:
    """The pod template of each job."""
    found = by_kind(manifests)
    if "JobSet" in found:
        jobs = found["JobSet"]["spec"]["replicatedJobs"]
        return {one["name"]: one["template"]["spec"]["template"] for one in jobs}
    return {
        "ps": found["StatefulSet"]["spec"]["template"],
        "worker": found["Job"]["spec"]["template"],
    }


FORMS = [
    pytest.param(SMALL.plain(), id="plain"),
    pytest.param(SMALL.jobset(), id="jobset"),
    pytest.param(ELASTIC.plain(), id="elastic"),
    pytest.param(FULL.plain(), id="plain, full"),
    pytest.param(FULL.jobset(), id="jobset, full"),
]


@pytest.mark.parametrize("manifests", FORMS)
def test_kubernetes_has_every_field_of_an_object(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        check(manifest)


def test_the_check_finds_a_field_that_is_not_there() -> None:
    stateful_set = by_kind(SMALL.plain())["StatefulSet"]
    stateful_set["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(ValidationError, match="livenesProbe"):
        check(stateful_set)


@pytest.mark.parametrize("form", ["plain", "jobset", "elastic"])
def test_manifests_are_as_they_were(form: str, rewrite: bool) -> None:
    path = HERE / f"{form}.yaml"
    text = as_yaml(ELASTIC.plain() if form == "elastic" else getattr(SMALL, form)())
    if rewrite:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("manifests", FORMS)
def test_yaml_says_what_the_objects_say(manifests: list[Manifest]) -> None:
    assert list(yaml.safe_load_all(as_yaml(manifests))) == manifests


@pytest.mark.parametrize("name", ["y", "N", "1e3", "0o17"])
def test_a_name_that_kubectl_would_take_for_something_else_is_quoted(name: str) -> None:
    assert as_yaml([{"kind": name}]) == f"kind: '{name}'\n"


@pytest.mark.parametrize(
    ("form", "hosts"),
    [
        ("plain", {"ps": "wide-ps-{}.wide:9000", "worker": "wide-worker-{}.wide:9000"}),
        (
            "jobset",
            {"ps": "wide-ps-0-{}.wide:9000", "worker": "wide-worker-0-{}.wide:9000"},
        ),
    ],
)
def test_the_cluster_file_has_the_names_that_pods_get(
    form: str, hosts: dict[str, str], tmp_path: Path
) -> None:
    manifests = getattr(FULL, form)()
    path = tmp_path / "cluster.toml"
    path.write_text(by_kind(manifests)["ConfigMap"]["data"]["cluster.toml"])
    spec = ClusterSpec.from_toml(path)
    for job, count in (("ps", 2), ("worker", 4)):
        assert spec.job_tasks(job) == [hosts[job].format(n) for n in range(count)]
        pod = pods_of(manifests)[job]["spec"]
        assert pod["subdomain"] == "wide"
    # As the pod number 1 of the ps knows itself.
    pod_name = hosts["ps"].format(1).partition(".")[0]
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": pod_name}
    assert task_here(spec, "ps", None, environ) == ("ps", 1)


@pytest.mark.parametrize("manifests", FORMS)
def test_a_pod_is_probed_restricted_and_sized(manifests: list[Manifest]) -> None:
    for job, template in pods_of(manifests).items():
        (container,) = template["spec"]["containers"]
        health = container["args"][container["args"].index("--health-port") + 1]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"] == {"port": int(health)}
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["resources"]["requests"]["cpu"]
        assert container["args"][:3] == ["server", "--job", job]
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        tls = container["args"][container["args"].index("--tls-dir") + 1]
        assert mounted["secret"] == tls


@pytest.mark.parametrize("manifests", FORMS)
def test_a_pod_that_was_told_to_end_has_failed_and_is_made_again(
    manifests: list[Manifest],
) -> None:
    """Kubernetes takes exit code 0 of a pod that it deletes for success, too."""
    for template in pods_of(manifests).values():
        arguments = template["spec"]["containers"][0]["args"]
        given = dict(zip(arguments[1::2], arguments[2::2], strict=True))
        assert given["--sigterm-exit-code"] == "143"
    found = by_kind(manifests)
    jobs = (
        [one["template"]["spec"] for one in found["JobSet"]["spec"]["replicatedJobs"]]
        if "JobSet" in found
        else [found["Job"]["spec"]]
    )
    if found.get("Job", {}).get("kind") == "StatefulSet":
        return  # whose pods are always made again, one of a name at a time
    for job in jobs:
        assert job["podReplacementPolicy"] == "Failed", "one pod of a task at a time"
        assert job["template"]["spec"]["restartPolicy"] == "OnFailure"


def test_elastic_workers_join_under_the_names_that_their_pods_get() -> None:
    found = by_kind(ELASTIC.plain())
    assert found["Job"]["kind"] == "StatefulSet"  # which has the scale subresource
    assert found["Job"]["metadata"]["name"] == "jgraph-worker"
    (container,) = found["Job"]["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert given["--join"] == "jgraphs://jgraph-ps-0.jgraph:8470"
    assert (given["--host"], given["--port"]) == ("$(POD_NAME).jgraph", "8470")
    assert "--cluster" not in given
    assert "POD_NAME" in [one["name"] for one in container["env"]]
    assert "worker" not in found["ConfigMap"]["data"]["cluster.toml"]
    with pytest.raises(ConfigError, match="without --jobset"):
        ELASTIC.jobset()


def test_workers_get_their_gpus_and_ps_none() -> None:
    sizes = {
        job: template["spec"]["containers"][0]["resources"]["limits"]
        for job, template in pods_of(FULL.plain()).items()
    }
    assert sizes["worker"] == {"memory": "16Gi", "nvidia.com/gpu": "1"}
    assert sizes["ps"] == {"memory": "2Gi"}


def test_only_pods_of_the_cluster_and_its_clients_may_call() -> None:
    rules = by_kind(FULL.plain())["NetworkPolicy"]["spec"]["ingress"]
    (rule,) = rules
    assert rule["ports"] == [{"protocol": "TCP", "port": n} for n in (9000, 8472)]
    labels = [one["podSelector"]["matchLabels"] for one in rule["from"]]
    assert labels[1] == {"jgraph-client": "wide"}
    template = pods_of(FULL.plain())["worker"]
    assert labels[0].items() <= template["metadata"]["labels"].items()


def test_children_of_servers_may_listen_for_pods_of_the_cluster_where_asked() -> None:
    """Of those that are clients alone nobody may call them."""
    accepts = replace(FULL, insecure_i_accept=True).plain()
    calls, children = by_kind(accepts)["NetworkPolicy"]["spec"]["ingress"]
    assert children == {"from": calls["from"][:1]}  # at any port
    for template in pods_of(accepts).values():
        (container,) = template["spec"]["containers"]
        assert container["args"][-1] == "--insecure-i-accept"
    for template in pods_of(FULL.plain()).values():
        (container,) = template["spec"]["containers"]
        assert "--insecure-i-accept" not in container["args"]


def test_the_secret_has_what_certs_wrote(tmp_path: Path) -> None:
    tasks = ["/job:ps/task:0", "/job:worker/task:0"]
    files = make_certificates(tmp_path / "c", map(TaskName, tasks))
    content = {path.name: path.read_bytes() for path in files}
    secret = by_kind(Deployment("i", 1, 1, files=content).plain())["Secret"]
    assert {n: base64.b64decode(b) for n, b in secret["data"].items()} == content
    check(secret)


def test_certificates_of_a_smaller_cluster_are_refused(tmp_path: Path) -> None:
    tasks = ["/job:ps/task:0", "/job:worker/task:0"]
    files = make_certificates(tmp_path / "c", map(TaskName, tasks))
    content = {path.name: path.read_bytes() for path in files}
    why = (
        r"worker-1\.crt is not there \(4 files are not\).*certs DIR --ps 1 --workers 3`"
    )
    with pytest.raises(ConfigError, match=why):
        Deployment("i", 1, 3, files=content)


def test_without_files_there_is_no_secret() -> None:
    assert "Secret" not in by_kind(SMALL.plain())


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="a ps and a worker at least"):
        Deployment("i", 1, 0)


def test_the_image_runs_jgraph_as_the_user_of_the_manifests() -> None:
    root = HERE.parents[1]
    lines = (root / "Dockerfile").read_text(encoding="utf-8").splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and line[0].isupper()]
    said = {line[0]: line[1] for line in words}
    pod = pods_of(SMALL.plain())["ps"]["spec"]["securityContext"]
    assert said["USER"] == f"{pod['runAsUser']}:{pod['runAsGroup']}"
    assert (said["ENTRYPOINT"], said["CMD"]) == ('["jgraph"]', '["server"]')
    for word, rest in words:
        if word == "FROM":
            assert re.match(r"[\w/.-]+:\d+\.\d+-slim\b", rest), "a version, and small"
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (root / source).exists()
    assert "ADD" not in said


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("memory is 'viel'", lambda: Size(memory="viel")),
        ("memory is '8 GB'", lambda: Size(memory="8 GB")),
        ("memory is '500m'", lambda: Size(memory="500m")),
        ("memory is '1K'", lambda: Size(memory="1K")),
        ("cpu is '2Gi'", lambda: Size(cpu="2Gi")),
        ("cpu is '-1'", lambda: Size(cpu="-1")),
    ],
)
def test_a_size_that_kubernetes_would_refuse_is_refused_before(
    what: str, size: Callable[[], Size]
) -> None:
    with pytest.raises(ConfigError, match=f"{what}, .* memory 8Gi"):
        size()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "A_B"}, "name is 'A_B', .* such as jgraph"),
        ({"name": "1st"}, "a letter first"),
        ({"name": "a" * 41}, "at most 40"),
        ({"image": ""}, "image is ''; write"),
        ({"image": "my image"}, "image is 'my image'"),
        ({"port": 8471}, "pods answer probes at 8471 .* another port"),
        ({"port": 8472}, "take tensors at 8472"),
        ({"workers": 10_001}, "10,000 tasks of a job at most"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changes)


def test_more_certificates_than_a_secret_has_are_refused() -> None:
    tasks = ["ps-0", *(f"worker-{index}" for index in range(1200))]
    files = {f"{task}.{end}": bytes(500) for task in tasks for end in ("crt", "key")}
    with pytest.raises(ConfigError, match="a Secret of Kubernetes has "):
        Deployment("i", 1, 1200, files={**files, "ca.crt": b"-", "token": b"-"})


def test_the_longest_name_leaves_room_for_what_controllers_add() -> None:
    """The label ``controller-revision-hash`` of a pod has the name of its set in it."""
    names = [one["metadata"]["name"] for one in replace(SMALL, name="a" * 40).plain()]
    assert max(map(len, names)) + len("-0123456789") <= 63
