"""Manifests for Kubernetes: plain objects, and the same as a JobSet.

Parameter servers are a StatefulSet, so that one that died comes back under its name,
and workers an Indexed Job. Workers that may be more or fewer are a StatefulSet as well:
an Indexed Job cannot have more pods than it is to complete. A JobSet
(jobset.sigs.k8s.io) has both as Indexed Jobs.
"""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, final

from jgraph.cluster.spec import check_counts
from jgraph.errors import ConfigError
from jgraph.view.units import bytes_text

Manifest: TypeAlias = dict[str, Any]

USER: Final = 1000
"""User and group of the image."""
GRACE_S: Final = 40
"""A server that is told to end lets steps in flight end for 30 s."""
TOLD: Final = 143
"""Exit code of a server after SIGTERM. Its pod has failed then, and is made again; 0
would complete its index of a Job for good when a node is drained, or a probe fails."""
POD_SECURITY: Final[Manifest] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Manifest] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_CPU: Final = re.compile(r"\d+(\.\d+)?m?")
_MEMORY: Final = re.compile(r"\d+(\.\d+)?(k|[MGTPE]|[KMGTPE]i)?")
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""Of a Service; pods and what a controller keeps of them have longer ones, up to 63."""
_SECRET_BYTES: Final = 1 << 20
"""Kubernetes takes no more in one Secret."""
_SECRET: Final = "/etc/jgraph/secret"  # where it is mounted
_CLUSTER: Final = "/etc/jgraph/cluster"


@final
@dataclass(frozen=True, slots=True)
class Size:
    """What a pod asks for: ``cpu`` and ``memory`` as Kubernetes writes them."""

    cpu: str = "1"
    memory: str = "2Gi"
    gpus: int = 0

    def __post_init__(self) -> None:
        asked = (("cpu", self.cpu, _CPU), ("memory", self.memory, _MEMORY))
        for what, quantity, form in asked:
            if not form.fullmatch(quantity):
                raise ConfigError(
                    f"{what} is '{quantity}', which is no quantity of Kubernetes; "
                    "write for example cpu 500m or 2, memory 8Gi"
                )

    def resources(self) -> Manifest:
        """Returns requests and limits; memory and devices are not shared out twice."""
        limits: Manifest = {"memory": self.memory}
        if self.gpus:
            limits["nvidia.com/gpu"] = str(self.gpus)
        return {"requests": {"cpu": self.cpu, **limits}, "limits": limits}


@final
@dataclass(frozen=True, slots=True)
class Deployment:
    """A cluster on Kubernetes.

    Attributes:
      image: that of the Dockerfile, or one of your own with jgraph in it.
      ps: parameter servers.
      workers: workers.
      name: of all objects, and of the host names.
      port: of the tasks.
      health_port: of their health service.
      data_port: of the tasks, for tensors.
      sizes: what a pod of each job asks for.
      elastic: workers join the cluster by themselves; see ``plain``.
      files: of the Secret, as ``jgraph certs`` wrote them; if empty, a Secret of that
        name has to be there.
      insecure_i_accept: children of the workers' servers may listen, at any port, for
        pods of this cluster; see ``Server``.

    Raises:
      ConfigError: no ps or no worker, or too many; a name, image or ports that
        Kubernetes does not take; ``files`` of another cluster, or more than a Secret
        has.
    """

    image: str
    ps: int
    workers: int
    name: str = "jgraph"
    port: int = 8470
    health_port: int = 8471
    data_port: int = 8472
    sizes: Mapping[str, Size] = field(default_factory=dict)
    elastic: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    insecure_i_accept: bool = False

    def __post_init__(self) -> None:
        if self.ps < 1 or self.workers < 1:
            raise ConfigError(
                "a cluster on Kubernetes needs a ps and a worker at least"
            )
        counts = {"ps": self.ps, "worker": self.workers}
        check_counts(counts)
        check_names(self.image, self.name)
        if len({self.port, self.health_port, self.data_port}) < 3:
            raise ConfigError(
                f"port is {self.port}, and pods answer probes at {self.health_port} "
                f"and take tensors at {self.data_port}; give another port"
            )
        tasks = [f"{job}-{n}" for job, count in counts.items() for n in range(count)]
        needed = [
            "ca.crt",
            "token",
            *(f"{t}.{end}" for t in tasks for end in ("crt", "key")),
        ]
        lacking = [name for name in needed if name not in self.files]
        if self.files and lacking:
            raise ConfigError(
                f"the certificates are not those of this cluster: {lacking[0]} is not "
                f"there ({len(lacking)} files are not); make them by `jgraph certs DIR "
                f"--ps {self.ps} --workers {self.workers}`"
            )
        if (nbytes := sum(map(len, self.files.values()))) > _SECRET_BYTES:
            raise ConfigError(
                f"{len(self.files):,} files of certificates are {bytes_text(nbytes)}, "
                f"and a Secret of Kubernetes has {bytes_text(_SECRET_BYTES)} at most; "
                "make them for fewer tasks, or leave out files= (--certs) and let the "
                "volume 'secret' of the pods be one of your own with these files"
            )

    def plain(self) -> list[Manifest]:
        """Returns Service, ConfigMap, Secret, NetworkPolicy, StatefulSet and Job.

        With ``elastic`` the workers are a StatefulSet too, which has the scale
        subresource: ``kubectl scale`` and autoscalers change how many there are. Each
        pod joins the cluster, under an index that need not be that of the pod.
        """
        name = f"{self.name}-worker"
        if self.elastic:
            workers = self._stateful_set("worker", self.workers)
        else:
            indexed = self._indexed_job("worker")
            workers = self._object("batch/v1", "Job", name, indexed)
        return [
            self._service(),
            *self._around("{name}-{job}-{task}"),
            self._stateful_set("ps", self.ps),
            workers,
        ]

    def _stateful_set(self, job: str, count: int) -> Manifest:
        spec = {
            "serviceName": self.name,
            "replicas": count,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self._labels(job)},
            "template": self._template(job),
        }
        return self._object("apps/v1", "StatefulSet", f"{self.name}-{job}", spec)

    def jobset(self) -> list[Manifest]:
        """Returns ConfigMap, Secret, NetworkPolicy and a JobSet with its Service."""
        if self.elastic:
            raise ConfigError(
                "a JobSet has as many workers as it began with; render elastic workers "
                "without --jobset"
            )
        jobs = [
            {"name": job, "replicas": 1, "template": {"spec": self._indexed_job(job)}}
            for job in ("ps", "worker")
        ]
        spec = {
            "network": {"enableDNSHostnames": True, "subdomain": self.name},
            # Workers end when a client says so (cluster.shutdown()); then all is done.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["worker"]},
            "replicatedJobs": jobs,
        }
        return [
            *self._around("{name}-{job}-0-{task}"),
            self._object("jobset.x-k8s.io/v1alpha2", "JobSet", self.name, spec),
        ]

    # ------------------------------------------------------------ parts

    def _around(self, host: str) -> list[Manifest]:
        """What both forms have; ``host`` is how pods are called."""
        secret = self._object("v1", "Secret", f"{self.name}-secret")
        content = {n: base64.b64encode(b).decode() for n, b in self.files.items()}
        secrets = [{**secret, "type": "Opaque", "data": content}] if content else []
        cluster = {"cluster.toml": self._cluster_file(host)}
        return [
            {
                **self._object("v1", "ConfigMap", f"{self.name}-cluster"),
                "data": cluster,
            },
            *secrets,
            self._network_policy(),
        ]

    def _cluster_file(self, host: str) -> str:
        lines = ["[cluster]"]
        described = [("ps", self.ps), ("worker", self.workers)]
        for job, count in described[:1] if self.elastic else described:
            names = [host.format(name=self.name, job=job, task=n) for n in range(count)]
            addresses = [f"{name}.{self.name}:{self.port}" for name in names]
            lines.append(f"{job} = {json.dumps(addresses)}")
        return "\n".join([*lines, ""])

    def _service(self) -> Manifest:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # tasks find each other while they start
            "selector": self._labels(),
            "ports": [
                {"name": "jgraph", "port": self.port},
                {"name": "data", "port": self.data_port},
            ],
        }
        return self._object("v1", "Service", self.name, spec)

    def _network_policy(self) -> Manifest:
        """Tasks and pods with the label of clients may call; nobody else."""
        allowed = [self._labels(), {"jgraph-client": self.name}]
        rule: Manifest = {
            "from": [{"podSelector": {"matchLabels": labels}} for labels in allowed],
            "ports": [
                {"protocol": "TCP", "port": port}
                for port in (self.port, self.data_port)
            ],
        }
        rules: list[Manifest] = [rule]
        if self.insecure_i_accept:
            rules.append({"from": rule["from"][:1]})
        spec = {
            "podSelector": {"matchLabels": self._labels()},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", self.name, spec)

    def _indexed_job(self, job: str) -> Manifest:
        count = self.workers if job == "worker" else self.ps
        pods = self._template(job)
        pods["spec"] = {"restartPolicy": "OnFailure", **pods["spec"]}
        return {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": 1000,  # containers that die are started again, as a ps is
            # Two pods of one name would be two processes of one task.
            "podReplacementPolicy": "Failed",
            "template": pods,
        }

    def _template(self, job: str) -> Manifest:
        spec = {
            "subdomain": self.name,
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "containers": [self._container(job)],
            "volumes": [
                {"name": "cluster", "configMap": {"name": f"{self.name}-cluster"}},
                {
                    "name": "secret",
                    "secret": {
                        "secretName": f"{self.name}-secret",
                        "defaultMode": 0o440,
                    },
                },
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        return {"metadata": {"labels": self._labels(job)}, "spec": spec}

    def _container(self, job: str) -> Manifest:
        joins = self.elastic and job == "worker"
        arguments = {
            "--job": job,
            **(self._join() if joins else {"--cluster": f"{_CLUSTER}/cluster.toml"}),
            "--tls-dir": _SECRET,
            "--bind": "0.0.0.0",
            "--health-port": str(self.health_port),
            "--data-port": str(self.data_port),
            "--sigterm-exit-code": str(TOLD),
            "--overdue-s": "10",
        }
        environment: list[Manifest] = [{"name": "HOME", "value": "/tmp"}]
        if joins:
            source = {"fieldRef": {"fieldPath": "metadata.name"}}
            environment.append({"name": "POD_NAME", "valueFrom": source})
        probe: Manifest = {"grpc": {"port": self.health_port}}
        mounts = {"cluster": _CLUSTER, "secret": _SECRET}
        return {
            "name": "jgraph",
            "image": self.image,
            "args": [
                "server",
                *(word for pair in arguments.items() for word in pair),
                *(["--insecure-i-accept"] if self.insecure_i_accept else []),
            ],
            "env": environment,
            "ports": [
                {"name": "jgraph", "containerPort": self.port},
                {"name": "health", "containerPort": self.health_port},
                {"name": "data", "containerPort": self.data_port},
            ],
            # It may take long to start, and then says within half a minute if it hangs.
            "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 60},
            "readinessProbe": {**probe, "periodSeconds": 5},
            "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 3},
            "resources": self.sizes.get(job, Size()).resources(),
            "securityContext": CONTAINER_SECURITY,
            "volumeMounts": [
                *(
                    {"name": name, "mountPath": path, "readOnly": True}
                    for name, path in mounts.items()
                ),
                {"name": "tmp", "mountPath": "/tmp"},
            ],
        }

    def _join(self) -> dict[str, str]:
        """Returns the options by which a pod joins, reached under its own name."""
        return {
            "--join": f"jgraphs://{self.name}-ps-0.{self.name}:{self.port}",
            "--host": f"$(POD_NAME).{self.name}",
            "--port": str(self.port),
        }

    def _labels(self, job: str | None = None) -> dict[str, str]:
        labels = {"app.kubernetes.io/name": "jgraph", "jgraph-cluster": self.name}
        return labels if job is None else {**labels, "jgraph-job": job}

    def _object(
        self, version: str, kind: str, name: str, spec: Manifest | None = None
    ) -> Manifest:
        return an_object(version, kind, name, self._labels(), spec)


def check_names(image: str, name: str) -> None:
    """Refuses what ``kubectl apply`` would, or pods that never start.

    Args:
      image: of the pods.
      name: of the cluster; objects and pods have it with something behind it.

    Raises:
      ConfigError: it is neither an image nor a name.
    """
    if not image or not image.isprintable() or " " in image:
        raise ConfigError(
            f"image is {image!r:.60}; write that of the tasks, such as "
            "registry.example.com/jgraph:1.0, see the Dockerfile"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name!r:.60}, and is part of names of Kubernetes and of hosts: "
            "write at most 40 small letters, digits and '-', a letter first, such as "
            "jgraph"
        )


def an_object(
    version: str,
    kind: str,
    name: str,
    labels: Mapping[str, str],
    spec: Manifest | None = None,
) -> Manifest:
    """Returns an object of Kubernetes; without ``spec`` its caller adds what it has."""
    metadata = {"name": name, "labels": dict(labels)}
    found: Manifest = {"apiVersion": version, "kind": kind, "metadata": metadata}
    return found if spec is None else {**found, "spec": spec}


_ELSEWHERE: Final = re.compile(r"[yYnN]|[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+|0o[0-7_]+")
"""Text that is a truth value or a number for kubectl, and for PyYAML is none."""


def as_yaml(manifests: Sequence[Manifest]) -> str:
    """Returns YAML documents, one for each object; text of several lines as such."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Of its own, since representers are added to a class; repeats equal parts."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else "'" if _ELSEWHERE.fullmatch(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return "---\n".join(
        yaml.dump(one, Dumper=Dumper, sort_keys=False, width=1000) for one in manifests
    )
