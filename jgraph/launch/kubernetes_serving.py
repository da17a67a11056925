"""Manifests for Kubernetes of servers of exported models: a Deployment, a Service."""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from jgraph.errors import ConfigError
from jgraph.launch.kubernetes import (
    CONTAINER_SECURITY,
    GRACE_S,
    POD_SECURITY,
    Manifest,
    Size,
    an_object,
    check_names,
)

DRAIN_S: Final = 5
"""A pod that is told to end is still asked while the news goes around."""
_CLAIM: Final = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_MODELS: Final = "/models"
_TOKEN: Final = "/etc/jgraph/token"  # where it is mounted
_TLS: Final = "/etc/jgraph/tls"


@final
@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """Servers of exported models on Kubernetes.

    Attributes:
      image: that of the Dockerfile, or one of your own with ``jgraph[serve]`` in it.
      claim: name of the PersistentVolumeClaim that the models are in.
      replicas: pods; each serves all models.
      name: all objects are called ``NAME-serve``, and so on.
      http_port: for REST.
      grpc_port: for gRPC.
      size: what a pod asks for.
      tls: whether callers are answered over TLS, from the Secret ``NAME-serve-tls``;
        else in plain text, to pods with the label ``jgraph-client: NAME-serve`` only.
      files: ``token`` for the Secret ``NAME-serve-token``, and with ``tls`` ``tls.crt``
        and ``tls.key``; if empty, the Secrets have to be there.

    Raises:
      ConfigError: no replicas; a name, image or claim that Kubernetes does not take;
        ``files`` that lack one.
    """

    image: str
    claim: str
    replicas: int = 2
    name: str = "jgraph"
    http_port: int = 8000
    grpc_port: int = 8001
    size: Size = field(default_factory=Size)
    tls: bool = True
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("a Deployment of servers needs a replica at least")
        check_names(self.image, self.name)
        if not _CLAIM.fullmatch(self.claim):
            raise ConfigError(
                f"'{self.claim:.60}' is the name of no PersistentVolumeClaim: that has "
                "small letters, digits, '-' and '.'; `kubectl get pvc` lists them"
            )
        lacking = [name for name in self._secret_files() if name not in self.files]
        if self.files and lacking:
            raise ConfigError(
                f"{lacking[0]} is not among the files for the Secrets; a server needs "
                f"{', '.join(self._secret_files())}. `jgraph token new token` makes a "
                "token; certificates are from your own authority, as cert-manager"
            )

    def manifests(self) -> list[Manifest]:
        """Returns Service, Secrets, Deployment, PodDisruptionBudget, NetworkPolicy."""
        spec = {
            "replicas": self.replicas,
            # A version of the image is tried before a pod of the last one goes.
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "selector": {"matchLabels": self._labels()},
            "template": self._template(),
        }
        budget = {"maxUnavailable": 1, "selector": {"matchLabels": self._labels()}}
        return [
            self._service(),
            *(self._secrets() if self.files else ()),
            self._object("apps/v1", "Deployment", self._name, spec),
            self._object("policy/v1", "PodDisruptionBudget", self._name, budget),
            *(() if self.tls else (self._network_policy(),)),
        ]

    # ------------------------------------------------------------ parts

    @property
    def _name(self) -> str:
        return f"{self.name}-serve"

    def _secret_files(self) -> list[str]:
        return ["token", *(["tls.crt", "tls.key"] if self.tls else ())]

    def _secrets(self) -> list[Manifest]:
        coded = {n: base64.b64encode(b).decode() for n, b in self.files.items()}
        parts = [("token", "Opaque", ["token"])]
        if self.tls:
            parts.append(("tls", "kubernetes.io/tls", ["tls.crt", "tls.key"]))
        return [
            {
                **self._object("v1", "Secret", f"{self._name}-{part}"),
                "type": kind,
                "data": {name: coded[name] for name in names},
            }
            for part, kind, names in parts
        ]

    def _service(self) -> Manifest:
        spec = {
            "selector": self._labels(),
            "ports": [
                {"name": "http", "port": self.http_port},
                {"name": "grpc", "port": self.grpc_port},
            ],
        }
        return self._object("v1", "Service", self._name, spec)

    def _network_policy(self) -> Manifest:
        allowed = {"podSelector": {"matchLabels": {"jgraph-client": self._name}}}
        ports = [
            {"protocol": "TCP", "port": port}
            for port in (self.http_port, self.grpc_port)
        ]
        spec = {
            "podSelector": {"matchLabels": self._labels()},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [allowed], "ports": ports}],
        }
        return self._object("networking.k8s.io/v1", "NetworkPolicy", self._name, spec)

    def _template(self) -> Manifest:
        volumes: list[Manifest] = [
            {
                "name": "models",
                "persistentVolumeClaim": {"claimName": self.claim, "readOnly": True},
            },
            {"name": "tmp", "emptyDir": {}},
        ]
        volumes += [
            {
                "name": part,
                "secret": {"secretName": f"{self._name}-{part}", "defaultMode": 0o440},
            }
            for part in self._mounts()
        ]
        spec = {
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            # A node that goes takes one of the pods.
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": self._labels()},
                }
            ],
            "containers": [self._container()],
            "volumes": volumes,
        }
        return {"metadata": {"labels": self._labels()}, "spec": spec}

    def _mounts(self) -> dict[str, str]:
        return {"token": _TOKEN, **({"tls": _TLS} if self.tls else {})}

    def _container(self) -> Manifest:
        arguments = {
            "--bind": "0.0.0.0",
            "--http-port": str(self.http_port),
            "--grpc-port": str(self.grpc_port),
            "--token-file": f"{_TOKEN}/token",
            "--drain-s": "0",  # preStop has waited
        }
        if self.tls:
            arguments["--tls-cert"] = f"{_TLS}/tls.crt"
            arguments["--tls-key"] = f"{_TLS}/tls.key"
        words = [word for pair in arguments.items() for word in pair]
        scheme = "HTTPS" if self.tls else "HTTP"
        live, ready = (
            {"httpGet": {"path": path, "port": self.http_port, "scheme": scheme}}
            for path in ("/v2/health/live", "/v2/health/ready")
        )
        mounts = [("models", _MODELS, True), ("tmp", "/tmp", False)]
        mounts += [(part, path, True) for part, path in self._mounts().items()]
        return {
            "name": "jgraph",
            "image": self.image,
            "args": [
                "serve",
                _MODELS,
                *words,
                *(() if self.tls else ("--insecure-i-accept",)),
            ],
            "env": [{"name": "HOME", "value": "/tmp"}],
            "ports": [
                {"name": "http", "containerPort": self.http_port},
                {"name": "grpc", "containerPort": self.grpc_port},
            ],
            # Large models are read and compiled first; for ten minutes, if it must be.
            "startupProbe": {**live, "periodSeconds": 5, "failureThreshold": 120},
            "readinessProbe": {**ready, "periodSeconds": 2},
            "livenessProbe": {**live, "periodSeconds": 10, "failureThreshold": 3},
            "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_S}}},
            "resources": self.size.resources(),
            "securityContext": CONTAINER_SECURITY,
            "volumeMounts": [
                {"name": name, "mountPath": path, "readOnly": read_only}
                for name, path, read_only in mounts
            ],
        }

    def _labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/name": "jgraph-serve", "jgraph-serve": self._name}

    def _object(
        self, version: str, kind: str, name: str, spec: Manifest | None = None
    ) -> Manifest:
        return an_object(version, kind, name, self._labels(), spec)
