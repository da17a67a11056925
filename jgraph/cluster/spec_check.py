"""Validation of a cluster description: all problems at once, each with its field."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeAlias

from jgraph.errors import ClusterSpecError

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
