"""The doctor: can this machine run jgraph, and is a cluster there?"""

import asyncio
import contextlib
import importlib.metadata
import os
import platform
import socket
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, final

from jgraph.errors import JGError
from jgraph.runtime.cost import available_cores
from jgraph.view import markup

if TYPE_CHECKING:
    from jgraph.client.status import TaskStatus
    from jgraph.rpc.security.tls import Identity

State: TypeAlias = Literal["ok", "note", "problem"]
_MARKS: dict[State, str] = {"ok": "✓", "note": "!", "problem": "✗"}
_DIAL_S = 3.0
_STATUS_S = 10.0
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found: ``state``, a line of ``text``, and what to type."""

    name: str
    state: State
    text: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"; fix: {self.fix}" if self.fix else ""
        return f"{_MARKS[self.state]} {self.name}: {self.text}{fix}"


@final
@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of the checks; prints as one line each."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that keep jgraph from working."""
        return tuple(f for f in self.findings if f.state == "problem")

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as ``jgraph doctor --json`` prints them."""
        return {"ok": not self.problems, "checks": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        numbered = [
            f"  {n}. {f.name}: {f.text}" for n, f in enumerate(self.problems, 1)
        ]
        count = len(numbered)
        if count:
            lines += [f"{count} problem{'s' if count > 1 else ''}:", *numbered]
        else:
            lines.append("no problems")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return markup.lines(str(self))


def doctor(
    cluster: str | os.PathLike[str] | None = None,
    tls: str | os.PathLike[str] | None = None,
) -> Report:
    """Checks this machine, and the cluster of a file if one is named.

    Args:
      cluster: path of a cluster file; each of its tasks is dialled once, and its data
        port too if the cluster runs.
      tls: directory that ``jgraph certs`` wrote; that of the file unless given. Each
        task is then asked whether both sides take the other's certificate.

    Returns:
      A report that prints as one line per check. Nothing is changed on the machine.

    Example:
      >>> report = doctor()
      >>> report.findings[0].name
      'python'
    """
    findings = [finding for check in _CHECKS for finding in _run(check)]
    if cluster is not None:
        findings += _check_cluster(Path(cluster), Path(tls) if tls else None)
    return Report(tuple(findings))


Check: TypeAlias = Callable[[], Iterator[Finding]]


def _run(check: Check) -> list[Finding]:
    """A check that itself breaks is a problem of its subject, not of the doctor."""
    name = check.__name__.removeprefix("_check_").replace("_", " ")
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001  # told to the user as a finding
        what = " ".join(str(error).split())[:300]
        return [Finding(name, "problem", f"{type(error).__name__}: {what}", _REINSTALL)]


_REINSTALL = "pip install --upgrade --force-reinstall jgraph"


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return "missing"


def _check_python() -> Iterator[Finding]:
    gil = "" if not sysconfig.get_config_var("Py_GIL_DISABLED") else ", free-threaded"
    text = f"{platform.python_version()}{gil} on {platform.system()}"
    yield Finding("python", "ok", text)


def _check_jax() -> Iterator[Finding]:
    import jax

    devices = jax.devices()
    kinds = sorted({f"{d.platform}:{d.device_kind}" for d in devices})
    where = f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
    yield Finding("jax", "ok", f"{jax.__version__}, {where} ({', '.join(kinds)})")


def _check_flatbuffers() -> Iterator[Finding]:
    version = _version("flatbuffers")
    if version == "missing":
        text = "missing; jax.export needs it and does not install it"
        yield Finding("flatbuffers", "problem", text, "pip install flatbuffers")
    else:
        yield Finding("flatbuffers", "ok", version)


def _check_grpc() -> Iterator[Finding]:
    import grpc

    # Generated code refuses a protobuf runtime older than the one that made it.
    from jgraph.rpc._pb import jgraph_pb2

    text = f"grpcio {grpc.__version__}, protobuf {_version('protobuf')}"
    yield Finding("grpc", "ok", f"{text}, wire {jgraph_pb2.DESCRIPTOR.package}")


def _check_cpus() -> Iterator[Finding]:
    yield Finding("cpus", "ok", f"{available_cores()} usable of {os.cpu_count()}")


def _check_loopback() -> Iterator[Finding]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_DIAL_S)
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=_DIAL_S):
            server.accept()[0].close()
    yield Finding("loopback", "ok", f"a port can be opened and dialled (tried {port})")


def _check_proxies() -> Iterator[Finding]:
    found = [name for p in _PROXIES for name in (p, p.upper()) if os.environ.get(name)]
    if found:
        text = f"{', '.join(found)} set; jgraph ignores it, jax.distributed may not"
        yield Finding("proxies", "note", text, f"unset {' '.join(found)}")
    else:
        yield Finding("proxies", "ok", "none set")


def _check_shared_memory() -> Iterator[Finding]:
    from jgraph.rpc.shared_memory.memory_files import MemoryFile

    try:
        MemoryFile(1 << 20, b"").close()
    except OSError as error:
        text = "tasks of one host will talk through gRPC alone, which is slower"
        yield Finding("shared memory", "note", f"{text} ({error.strerror or error})")
    else:
        yield Finding("shared memory", "ok", "tasks of one host can share tensors")


def _check_export() -> Iterator[Finding]:
    import jax
    import jax.export
    import jax.numpy as jnp

    x = jnp.arange(4.0)
    code = jax.export.export(jax.jit(lambda a: jnp.tanh(a) @ a))(x).serialize()
    result = jax.jit(jax.export.deserialize(code).call)(x)
    text = f"exported ({len(code)} bytes), read back, compiled"
    if not jnp.allclose(result, jnp.tanh(x) @ x):
        yield Finding("export", "problem", f"{text}, and wrong: {result}", _REINSTALL)
    yield Finding("export", "ok", f"{text} and ran")


_CHECKS: tuple[Check, ...] = (
    _check_python,
    _check_jax,
    _check_flatbuffers,
    _check_grpc,
    _check_cpus,
    _check_loopback,
    _check_proxies,
    _check_shared_memory,
    _check_export,
)


def _check_cluster(path: Path, tls: Path | None) -> list[Finding]:
    from jgraph.cluster.spec import ClusterSpec
    from jgraph.cluster.transport_choice import tls_directory_in

    try:
        spec = ClusterSpec.from_toml(path)
    except JGError as error:
        problems = error.details.get("problems")
        if problems is None:  # there is no such file to edit
            fix = "jgraph doctor --cluster cluster.toml"
            return [Finding("cluster", "problem", error.message, fix)]
        return [Finding("cluster", "problem", p, f"edit {path}") for p in problems]
    text = ", ".join(f"{spec.num_tasks(job)} {job}" for job in spec.jobs)
    found = [Finding("cluster", "ok", f"{path} lists {text}")]
    identity = None
    if directory := tls or tls_directory_in(path):
        certificates, identity = _check_certificates(directory)
        found.append(certificates)
    targets = [
        (job, index, spec.task_address(job, index))
        for job in spec.jobs
        for index in spec.task_indices(job)
    ]
    with ThreadPoolExecutor(max_workers=32) as pool:
        dialled = [
            *pool.map(
                lambda target: _dial(*target, path=path, identity=identity), targets
            )
        ]
    found += dialled
    answering = [
        address
        for (*_, address), finding in zip(targets, dialled, strict=True)
        if finding.state == "ok"
    ]
    if answering:
        found += _check_data_ports(answering[0], tls or tls_directory_in(path))
    return found


def _check_data_ports(address: str, certificates: Path | None) -> list[Finding]:
    """Asks a cluster where frames from other hosts arrive, and dials these ports."""
    from jgraph.client.inspect import inspecting
    from jgraph.rpc.security.token import has_token

    if not has_token(certificates):
        return [Finding("data ports", "note", "not tried: there is no token here")]
    where = f"{'jgraphs' if certificates else 'jgraph'}://{address}"
    try:
        with inspecting(where, timeout_s=_STATUS_S, tls=certificates) as visit:
            tasks = visit.status().tasks
    except JGError as error:
        return [Finding("data ports", "note", f"not tried: {error.message}")]
    with ThreadPoolExecutor(max_workers=32) as pool:
        return [*pool.map(_dial_data_port, tasks)]


def _dial_data_port(task: "TaskStatus") -> Finding:
    name, port = f"{task.task} data port", task.data_port
    host = task.address.rpartition(":")[0].strip("[]")
    if not port:
        return Finding(name, "ok", "off; frames from other hosts take gRPC's stream")
    text = f"port {port} of {host}"
    try:
        socket.create_connection((host, port), timeout=_DIAL_S).close()
    except TimeoutError:
        why = f"does not answer within {_DIAL_S:.0f} s, as where a firewall drops it"
    except OSError as error:
        why = f"is out of reach ({error.strerror or error})"
    else:
        return Finding(name, "ok", f"{text} accepts connections")
    text = f"{text} {why}; frames from here take gRPC's stream, which is slower"
    fix = f"open port {port} on {host}; jgraph server --data-port keeps it the same"
    return Finding(name, "note", text, fix)


def _check_certificates(directory: Path) -> "tuple[Finding, Identity | None]":
    """Returns what the certificate of a client is worth, and the certificate."""
    from jgraph.rpc.security.tls import TLS

    try:
        identity = TLS.of(directory, None).load(None)
    except JGError as error:
        return Finding("certificates", "problem", error.message), None
    return Finding("certificates", "ok", f"{identity.files.cert} is valid"), identity


def _dial(
    job: str, index: int, address: str, *, path: Path, identity: "Identity | None"
) -> Finding:
    name = f"/job:{job}/task:{index}"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    start = f"on {host}: jgraph server --job {job} --task {index} --cluster {path}"
    try:
        socket.create_connection((host, int(port)), timeout=_DIAL_S).close()
    except socket.gaierror:
        fix = f"edit {path}, or add {host} to your DNS"
        return Finding(name, "problem", f"cannot resolve '{host}'", fix)
    except TimeoutError:
        text = f"no answer from {address} within {_DIAL_S:.0f} s"
        return Finding(
            name, "problem", text, f"open port {port} on {host}, then {start}"
        )
    except OSError as error:
        reason = error.strerror or str(error)
        return Finding(name, "problem", f"{address}: {reason}", start)
    if identity is None:
        return Finding(name, "ok", f"{address} accepts connections")
    from jgraph.rpc.security.tls_probe import encryption_problem

    problem = asyncio.run(encryption_problem(host, int(port), identity, name))
    if problem is not None:
        return Finding(name, "problem", problem.message)
    return Finding(name, "ok", f"{address} accepts connections with this certificate")
