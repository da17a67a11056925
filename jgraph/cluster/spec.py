"""ClusterSpec: the tasks of a cluster, by job, and the address of each.

TensorFlow's class with TensorFlow's accessors, so that a spec moves over unchanged.
Two differences, both on purpose: a spec is checked when it is made, and an unknown job
or task raises ``UnknownDeviceError`` (a ``LookupError``), where TensorFlow raises
``ValueError``.

Source: tensorflow/python/training/server_lib.py (ClusterSpec).
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias, final

from jgraph.counts import check_flags, is_count
from jgraph.errors import (
    ClusterSpecError,
    ConfigError,
    DeviceSpecError,
    UnknownDeviceError,
)
from jgraph.graph.device import DeviceSpec, TaskName
from jgraph.view import markup

MOST_TASKS: Final = 10_000
"""Of one job: what decides is known to keep up with so many (docs/scale.md)."""
_SHOWN: Final = 8
"""Tasks of a large cluster that an error names."""

ClusterDict: TypeAlias = Mapping[str, Sequence[str] | Mapping[int, str]]
"""Addresses of each job: a list, or a dict by task index where some are not listed."""


@final
class ClusterSpec:
    """The tasks of a cluster, by job, and the address of each.

    Args:
      cluster: another spec, or a dict from job name to its tasks: a list of
        ``"host:port"``, or a dict from task index to ``"host:port"`` (sparse: a
        worker may list only itself and every ps).
      port_zero: whether port 0 ("the system picks one") is allowed; only a cluster
        that learns the real ports afterwards can use that.
      source: what error messages call this spec, for example its file.

    Raises:
      ClusterSpecError: it cannot be a cluster; the message lists every problem.

    Example:
      >>> spec = ClusterSpec({"ps": ["nodeA:8470"], "worker": {1: "nodeB:8470"}})
      >>> spec.jobs
      ['ps', 'worker']
      >>> spec.task_address("worker", 1)
      'nodeB:8470'
      >>> spec.job_tasks("worker")
      [None, 'nodeB:8470']
      >>> spec.tasks()
      ['/job:ps/task:0', '/job:worker/task:1']
    """

    __slots__ = ("_jobs",)

    def __init__(
        self,
        cluster: "ClusterSpec | ClusterDict",
        *,
        port_zero: bool = False,
        source: str = "cluster spec",
    ) -> None:
        check_flags(port_zero=port_zero)
        if isinstance(cluster, ClusterSpec):
            cluster, port_zero = cluster.as_dict(), True  # it was checked once
        self._jobs: Jobs = read_jobs(cluster, source, port_zero=port_zero)

    # ------------------------------------------------------------ other forms

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "ClusterSpec":
        """Reads a cluster file.

        The file has one table, ``[cluster]``, with a list of addresses per job, or a
        table per job where only some task indices are listed::

            [cluster]
            ps = ["nodeA:8470", "nodeB:8470"]
            worker = ["nodeC:8470", "nodeD:8470"]

            [cluster.evaluator]
            3 = "nodeE:8470"

        A table ``[tls]`` with ``dir = "certs"`` says where certificates are; it is for
        ``tls_directory_in``. A table ``[sources]`` with ``allow = ["package.data:*"]``
        says which import paths data may come from; it is for ``allowed_sources_in``.

        Args:
          path: the file.

        Raises:
          ClusterSpecError: the file cannot be read or describes no cluster; the
            message names the file, and the line or the field.
        """
        source = os.fspath(path)
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ClusterSpecError(
                f"cannot read the cluster file {source}: {reason}; give the path of a "
                'TOML file with a [cluster] table, such as ps = ["nodeA:8470"]',
                source=source,
            ) from error
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            refuse([f"this is not TOML: {error}; correct it there"], source)
        problems = [
            f"unknown table or key '{key}'; the tasks go under [cluster]"
            for key in content
            if key not in {"cluster", "tls", "sources"}
        ]
        problems += tls_problems(content.get("tls"))
        problems += source_problems(content.get("sources"))
        if "cluster" not in content:
            problems.append(
                "there is no [cluster] table; write for example\n"
                '[cluster]\nps = ["nodeA:8470"]\nworker = ["nodeB:8470"]'
            )
        if problems:
            refuse(problems, source)
        return cls(content["cluster"], source=source)

    @classmethod
    def from_json(cls, text: str) -> "ClusterSpec":
        """Reads what ``to_json`` wrote.

        Raises:
          ClusterSpecError: the text is not JSON or describes no cluster.

        Example:
          >>> ClusterSpec.from_json('{"ps": ["nodeA:8470"]}')
          ClusterSpec({'ps': ['nodeA:8470']})
        """
        return cls(_parse_json(text, "cluster JSON"), source="cluster JSON")

    def to_json(self) -> str:
        """Returns the spec as JSON on one line, jobs sorted by name."""
        return json.dumps(self.as_dict(), sort_keys=True)

    @classmethod
    def from_tf_config(cls, text: str | None = None) -> "ClusterSpec":
        """Reads the cluster in a ``TF_CONFIG``; see ``TFConfig.read`` for the task.

        Args:
          text: the JSON; the environment variable ``TF_CONFIG`` if unset.

        Raises:
          ClusterSpecError: there is none, it is not JSON, or it is no cluster.

        Example:
          >>> ClusterSpec.from_tf_config('{"cluster": {"ps": ["nodeA:8470"]}}')
          ClusterSpec({'ps': ['nodeA:8470']})
        """
        return TFConfig.read(text).cluster

    # -------------------------------------------------- TensorFlow's accessors

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def num_tasks(self, job: str) -> int:
        """Returns how many tasks of ``job`` are listed (holes do not count).

        Raises:
          UnknownDeviceError: there is no such job.
        """
        return len(self._job(job))

    def task_indices(self, job: str) -> list[int]:
        """Returns the listed task indices of ``job`` in ascending order.

        Raises:
          UnknownDeviceError: there is no such job.
        """
        return list(self._job(job))

    def task_address(self, job: str, index: int) -> str:
        """Returns the ``host:port`` of one task.

        Raises:
          UnknownDeviceError: there is no such job or task.
        """
        tasks = self._job(job)
        if index not in tasks:
            listed = ", ".join(map(str, tasks))
            raise UnknownDeviceError(
                f"job '{job}' has no task {index}; its tasks are {listed}",
                job=job,
                task=index,
            )
        return tasks[index]

    def job_tasks(self, job: str) -> list[str | None]:
        """Returns the addresses of ``job`` by task index, None where none is listed.

        Raises:
          UnknownDeviceError: there is no such job.
        """
        tasks = self._job(job)
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    @property
    def is_on_one_host(self) -> bool:
        """Whether all addresses have the same host.

        Example:
          >>> ClusterSpec({"ps": ["a:8470"], "worker": ["a:8471"]}).is_on_one_host
          True
          >>> ClusterSpec({"ps": ["a:8470"], "worker": ["b:8470"]}).is_on_one_host
          False
        """
        return len(set(self.hosts.values())) == 1

    @property
    def hosts(self) -> dict[TaskName, str]:
        """The host of each task, as its address says.

        Example:
          >>> ClusterSpec({"worker": ["A:8470", "localhost:8471"]}).hosts
          {'/job:worker/task:0': 'a', '/job:worker/task:1': '127.0.0.1'}
        """
        hosts = {
            TaskName(f"/job:{job}/task:{index}"): address.lower().rpartition(":")[0]
            for job, tasks in self._jobs.items()
            for index, address in tasks.items()
        }
        return {task: _LOOPBACK.get(host, host) for task, host in hosts.items()}

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Returns each job's tasks: a list if no index is missing, else a dict."""
        return {
            job: list(tasks.values()) if max(tasks) == len(tasks) - 1 else dict(tasks)
            for job, tasks in self._jobs.items()
        }

    # ------------------------------------------------------------ task names

    def tasks(self) -> list[TaskName]:
        """Returns the names of all tasks, by job and then by index."""
        return [
            TaskName(f"/job:{job}/task:{index}")
            for job, tasks in self._jobs.items()
            for index in tasks
        ]

    def address(self, task: TaskName | str) -> str:
        """Returns the ``host:port`` of a task given by its name.

        Args:
          task: a device string that sets job and task, as ``"/job:ps/task:0"``.

        Raises:
          UnknownDeviceError: the cluster has no such task.

        Example:
          >>> ClusterSpec({"ps": ["nodeA:8470"]}).address("/job:ps/task:0")
          'nodeA:8470'
        """
        with suppress(DeviceSpecError):
            spec = DeviceSpec.from_string(str(task))
            if spec.job is not None and spec.task is not None:
                return self.task_address(spec.job, spec.task)
        raise _no_task(task, self.tasks())

    def _job(self, job: str) -> dict[int, str]:
        tasks = self._jobs.get(job)
        if tasks is None:
            close = difflib.get_close_matches(str(job), self._jobs, n=1)
            hint = f"did you mean '{close[0]}'? " if close else ""
            jobs = ", ".join(self._jobs) or "none"
            raise UnknownDeviceError(
                f"the cluster has no job '{job}'; {hint}its jobs are: {jobs}", job=job
            )
        return tasks

    # ------------------------------------------------------------ as an object

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._jobs == other._jobs

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"

    def _repr_html_(self) -> str:
        rows = [
            (job, index, address)
            for job, tasks in self._jobs.items()
            for index, address in tasks.items()
        ]
        return markup.table(("job", "task", "address"), rows)


def check_counts(counts: Mapping[str, object]) -> None:
    """Refuses a cluster of no tasks or too many, counts of other kinds, and odd names.

    Before anything is written: logs and certificates are called as the jobs are.

    Raises:
      ConfigError: shows what was given.
    """
    text = ", ".join(f"{count!r} {job}" for job, count in counts.items())
    if not all(is_count(count, 0) for count in counts.values()):
        raise ConfigError(
            f"counts of tasks are whole numbers, not {text}; write for example "
            "ps=2, workers=2"
        )
    if not any(counts.values()):
        raise ConfigError(
            f"a cluster needs at least one task, and this has {text}; write for "
            "example ps=2, workers=2"
        )
    for job, count in counts.items():
        if is_count(count, MOST_TASKS + 1):
            raise ConfigError(
                f"a cluster has {MOST_TASKS:,} tasks of a job at most, and this would "
                f"have more of '{job}'"
            )
    ClusterSpec({job: {0: "127.0.0.1:0"} for job in counts}, port_zero=True)


def task_named(task: str, tasks: Sequence[TaskName]) -> TaskName:
    """Returns which of some tasks a device string names, also written short.

    Raises:
      UnknownDeviceError: none of them.

    Example:
      >>> task_named("worker:1", ClusterSpec({"worker": ["a:1", "b:1"]}).tasks())
      '/job:worker/task:1'
    """
    with suppress(DeviceSpecError):
        name = DeviceSpec.from_string(str(task)).task_name
        if name is not None and name in tasks:
            return TaskName(name)
    raise _no_task(task, tasks)


def _no_task(task: str, tasks: Sequence[TaskName]) -> UnknownDeviceError:
    more = f" and {len(tasks) - _SHOWN} more" if len(tasks) > _SHOWN else ""
    return UnknownDeviceError(
        f"{task!r} does not name one task of this cluster, which has "
        f"{', '.join(tasks[:_SHOWN]) or 'none'}{more}",
        task=str(task),
    )


@final
@dataclass(frozen=True, slots=True)
class TFConfig:
    """What a ``TF_CONFIG`` says: the cluster, and which of its tasks this is.

    Attributes:
      cluster: all tasks.
      job: job of this task (TensorFlow's ``task.type``); None if not told. An
        ``evaluator`` need not be in the cluster, as TensorFlow writes it.
      task: index of this task in its job; None if not told.
    """

    cluster: ClusterSpec
    job: str | None = None
    task: int | None = None

    @classmethod
    def read(cls, text: str | None = None) -> "TFConfig":
        """Reads the JSON of a ``TF_CONFIG``.

        Args:
          text: the JSON; the environment variable ``TF_CONFIG`` if unset.

        Raises:
          ClusterSpecError: there is none, it is not JSON, or it is no cluster.
          UnknownDeviceError: its task is not in its cluster.

        Example:
          >>> config = TFConfig.read(
          ...     '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]},'
          ...     ' "task": {"type": "worker", "index": 0}}')
          >>> config.job, config.task
          ('worker', 0)
        """
        text = os.environ.get("TF_CONFIG") if text is None else text
        if not text:
            raise ClusterSpecError(
                "the environment variable TF_CONFIG is not set; export it, or give "
                "the cluster as a file: --cluster cluster.toml"
            )
        content = _parse_json(text, "TF_CONFIG")
        cluster = content.get("cluster") if isinstance(content, dict) else None
        if not isinstance(cluster, dict):
            refuse(['"cluster" must hold an object from job to addresses'], "TF_CONFIG")
        spec = ClusterSpec(cluster, source="TF_CONFIG")
        job, task = _task_of(content.get("task"))
        # TensorFlow leaves the evaluator out of the cluster.
        is_beside = job == "evaluator" and job not in spec.jobs
        if job is not None and task is not None and not is_beside:
            spec.task_address(job, task)
        return cls(spec, job, task)


def _task_of(raw: Any) -> tuple[str | None, int | None]:
    if not raw:
        return None, None
    job = raw.get("type") if isinstance(raw, dict) else None
    index = raw.get("index") if isinstance(raw, dict) else None
    # Launchers write the index as a number or as text; TensorFlow takes both.
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    is_index = index is None or (type(index) is int and index >= 0)
    if not isinstance(job, str) or not is_index:
        refuse(
            [f'"task" is {json.dumps(raw)}, not {{"type": "worker", "index": 0}}'],
            "TF_CONFIG",
        )
    return job, index


def _parse_json(text: str, source: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = [key for n, key in enumerate(keys) if key in keys[:n]]
        if twice:
            refuse([f'"{key}" is there twice' for key in twice], source)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        refuse([f"this is not JSON: {error}; correct it there"], source)
    except RecursionError:
        refuse(["this is not a cluster: it is nested too deep"], source)


Jobs: TypeAlias = dict[str, dict[int, str]]
"""Address by job and by task index, indices ascending."""
_JOB = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*\Z")
_MAX_INDEX = 1_000_000
# Every interface of a host, or none: fine to bind, impossible to dial.
_NOWHERE = {"0.0.0.0", "[::]", "*"}  # named here to be refused
_LOOPBACK = {"localhost": "127.0.0.1", "[::1]": "127.0.0.1"}


def read_jobs(raw: Any, source: str, *, port_zero: bool) -> Jobs:
    """Returns the tasks in ``raw``, or raises one error with all that is wrong.

    Args:
      raw: what the user gave; should be a dict from job to list or dict of addresses.
      source: what messages call it: a file name, ``TF_CONFIG``.
      port_zero: whether port 0 is allowed.

    Raises:
      ClusterSpecError: something is wrong with it.
    """
    if not isinstance(raw, Mapping):
        refuse([f"expected a dict from job name to addresses, not {raw!r}"], source)
    problems: list[str] = []
    jobs: Jobs = {}
    for job, tasks in raw.items():
        if not isinstance(job, str) or not _JOB.match(job):
            problems.append(
                f"job name {job!r} must be letters, digits and _, starting with a "
                "letter, as 'worker'"
            )
        else:
            jobs[job] = _read_tasks(job, tasks, problems)
    for job, index, address in _each_task(jobs):
        problem = _address_problem(address, port_zero)
        if problem:
            problems.append(f"{job}[{index}] {problem}")
    problems += _duplicates(jobs)
    if problems:
        refuse(problems, source)
    return jobs


def tls_problems(table: Any) -> list[str]:
    """Returns what is wrong with the table ``[tls]`` of a cluster file."""
    right = isinstance(table, Mapping) and isinstance(table.get("dir"), str)
    if table is None or (right and len(table) == 1):
        return []
    return [
        f"[tls] is {table!r:.80}; it has one key, the directory that `jgraph certs` "
        'wrote: dir = "certs"'
    ]


def source_problems(table: Any) -> list[str]:
    """Returns what is wrong with the table ``[sources]`` of a cluster file."""
    allow = table.get("allow") if isinstance(table, Mapping) else None
    right = isinstance(allow, list) and all(isinstance(each, str) for each in allow)
    if table is None or (right and len(table) == 1):
        return []
    return [
        f"[sources] is {table!r:.80}; it has one key, a list of patterns of import "
        'paths: allow = ["package.data:*"]'
    ]


def refuse(problems: list[str], source: str) -> NoReturn:
    """Raises one ClusterSpecError that tells all ``problems`` of ``source``."""
    if len(problems) == 1:
        text = f"{source}: {problems[0]}"
    else:
        lines = "".join(f"\n  {n}. {p}" for n, p in enumerate(problems, 1))
        text = f"{source} has {len(problems)} problems; correct them:{lines}"
    raise ClusterSpecError(text, source=source, problems=list(problems))


def _read_tasks(job: str, tasks: Any, problems: list[str]) -> dict[int, str]:
    if isinstance(tasks, list | tuple):
        items: list[tuple[Any, Any]] = list(enumerate(tasks))
    elif isinstance(tasks, Mapping):
        items = list(tasks.items())
    else:
        problems.append(
            f"{job} must be a list of addresses, or a dict from task index to "
            f"address, not {tasks!r}"
        )
        return {}
    if not items:
        problems.append(f"{job} has no tasks; list an address or remove the job")
    found: dict[int, str] = {}
    for key, address in items:
        index = _index(key)
        if index is None:
            problems.append(
                f"{job}[{key}] is not a task index; use whole numbers from 0 to "
                f"{_MAX_INDEX}"
            )
        elif not isinstance(address, str):
            problems.append(f"{job}[{index}] is {address!r}, not a 'host:port' string")
        elif index in found:
            problems.append(f"{job}[{index}] is listed twice")
        else:
            found[index] = address
    return dict(sorted(found.items()))


def _index(key: Any) -> int | None:
    """The task index that a key stands for; TOML and JSON keys are text."""
    if isinstance(key, str) and key.isascii() and key.isdecimal():
        key = int(key[:9])
    if isinstance(key, bool) or not isinstance(key, int):
        return None
    return key if 0 <= key <= _MAX_INDEX else None


def _address_problem(address: str, port_zero: bool) -> str | None:
    host, colon, port = address.rpartition(":")
    if not colon or not port or port.endswith("]"):
        return f"is '{address}', which has no port; write '{address or 'host'}:8470'"
    if "://" in address or "/" in address:
        return f"is '{address}'; write only 'host:port', without scheme or path"
    if not host or any(c.isspace() for c in address):
        return f"is '{address}', which has no host name before ':{port}'"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"is '{address}'; write an IPv6 host in brackets, as '[::1]:8470'"
    if not (port.isascii() and port.isdecimal()) or int(port[:9]) > 65535:
        return f"is '{address}'; a port is a number from 1 to 65535"
    if int(port) == 0 and not port_zero:
        return f"is '{address}'; port 0 works only in a local cluster, choose a port"
    if host in _NOWHERE:
        return f"is '{address}', which other tasks cannot dial; write the host's name"
    return None


def _duplicates(jobs: Jobs) -> Iterator[str]:
    seen: dict[str, str] = {}
    for job, index, address in _each_task(jobs):
        host, _, port = address.lower().rpartition(":")
        if not port.isdecimal() or int(port[:9]) == 0:
            continue
        task, place = f"{job}[{index}]", f"{_LOOPBACK.get(host, host)}:{int(port[:9])}"
        first = seen.setdefault(place, task)
        if first != task:
            yield (
                f"{first} and {task} are both {address}; give each task a "
                "port of its own"
            )


def _each_task(jobs: Jobs) -> Iterator[tuple[str, int, str]]:
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            yield job, index, address
