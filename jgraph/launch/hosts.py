"""Tasks on hosts of a file: who gets which, and what starts one there. Pure."""

import io
import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from jgraph.cluster.spec import ClusterSpec
from jgraph.errors import ClusterSpecError
from jgraph.graph.device import TaskName

# Waits for its files on standard input, which then stays open: its end is the server's.
_REMOTE: Final = (
    'umask 077; dir=$(mktemp -d "${{TMPDIR:-/tmp}}/{run}.XXXXXX") || exit 1; '
    "trap 'rm -rf \"$dir\"' EXIT; "
    'head -c {nbytes} | tar -x -C "$dir" || exit 1; '
    "{jgraph} server --job {job} {which} "
    '--tls-dir "$dir" --bind 0.0.0.0 --end-with-input --overdue-s 10{insecure}'
)

# Processes whose command names the cluster, as this one does not, literally. What a
# shell that was killed could not remove is removed.
_LOOK: Final = (
    "if [ -d /proc/self ]; then grep -ls '[{first}]{rest}' /proc/[0-9]*/cmdline "
    "| cut -d/ -f3; else pgrep -f '[{first}]{rest}'; fi; "
    'rm -rf "${{TMPDIR:-/tmp}}/{first}"{rest}.*'
)


@final
@dataclass(frozen=True, slots=True)
class Host:
    """A line of a hosts file.

    Attributes:
      login: what ``ssh`` takes: a name, ``user@name``, or an alias of its settings.
      address: what the other tasks dial.
    """

    login: str
    address: str


def read_hosts(text: str, source: str) -> list[Host]:
    r"""Reads a hosts file: a host a line, and what others dial if that differs.

    Empty lines, and what follows a ``#``, are left out.

    Raises:
      ClusterSpecError: no host, or a line with more words; names file and line.

    Example:
      >>> for host in read_hosts("ada@nodeA  # fast\nlab2 10.0.0.2", "hosts.txt"):
      ...     print(host)
      Host(login='ada@nodeA', address='nodeA')
      Host(login='lab2', address='10.0.0.2')
    """
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if len(words) > 2 or (words and words[0].startswith("-")):
            raise ClusterSpecError(
                f"{source}:{number} is '{line.strip()}'; write a host that ssh knows, "
                "and after it what other hosts dial if that differs"
            )
        if words:
            found.append(Host(words[0], words[-1].rpartition("@")[2]))
    if not found:
        raise ClusterSpecError(f"{source} names no host; write one on each line")
    return found


@final
@dataclass(frozen=True, slots=True)
class RemoteTask:
    """A task, and on which host it goes.

    Attributes:
      task: its name.
      host: where.
      joins: a cluster that is up, which it joins; empty: it is one of the first tasks.
      port: then, that it listens at.
      insecure_i_accept: its children may listen beyond loopback; see ``Server``.
    """

    task: TaskName
    host: Host
    joins: str = ""
    port: int = 0
    insecure_i_accept: bool = False

    @property
    def stem(self) -> str:
        """How its files are called: ``ps-0``."""
        return self.task.removeprefix("/job:").replace("/task:", "-")


def deal(
    hosts: Sequence[Host], counts: Mapping[str, int], port: int
) -> tuple[list[RemoteTask], ClusterSpec]:
    r"""Deals tasks to hosts in turn; each has a port of its own, from ``port`` on.

    Example:
      >>> hosts = read_hosts("a\nb", "hosts.txt")
      >>> tasks, spec = deal(hosts, {"ps": 1, "worker": 2}, 8470)
      >>> spec.as_dict()
      {'ps': ['a:8470'], 'worker': ['b:8471', 'a:8472']}
    """
    names = [(job, index) for job, count in counts.items() for index in range(count)]
    tasks, jobs = [], dict[str, list[str]]()
    for number, (job, index) in enumerate(names):
        host = hosts[number % len(hosts)]
        tasks.append(RemoteTask(TaskName(f"/job:{job}/task:{index}"), host))
        jobs.setdefault(job, []).append(f"{host.address}:{port + number}")
    return tasks, ClusterSpec(jobs)


def cluster_file(spec: ClusterSpec) -> bytes:
    """Returns a cluster file of a cluster whose jobs are lists."""
    lines = [f"{job} = {addresses}" for job, addresses in spec.as_dict().items()]
    return "\n".join(["[cluster]", *lines, ""]).replace("'", '"').encode()


def packed(files: Mapping[str, bytes]) -> bytes:
    """Returns files as a tar archive, for their owner alone."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def remote_command(task: RemoteTask, nbytes: int, run: str, jgraph: str) -> str:
    """Returns what a shell on the host runs.

    Args:
      task: which.
      nbytes: size of the archive that it reads first.
      run: in the command line of each process of this cluster.
      jgraph: the command there, with its arguments.
    """
    job, _, index = task.task.removeprefix("/job:").partition("/task:")
    command, *arguments = shlex.split(jgraph)
    home, slash, path = command.partition("/")
    if slash and re.fullmatch(
        r"~[\w.-]*", home
    ):  # of the host, so its shell must see it
        command = f"{home}/{shlex.quote(path)}"
    else:
        command = shlex.quote(command)
    words = " ".join([command, *map(shlex.quote, arguments)])
    which = f'--task {index} --cluster "$dir/cluster.toml"'
    if task.joins:
        here = shlex.quote(task.host.address)
        which = f"--join {shlex.quote(task.joins)} --host {here} --port {task.port}"
    insecure = " --insecure-i-accept" if task.insecure_i_accept else ""
    return _REMOTE.format(
        nbytes=nbytes, job=job, which=which, run=run, jgraph=words, insecure=insecure
    )


def changed_hosts(
    before: Sequence[Host], after: Sequence[Host]
) -> tuple[list[Host], list[Host]]:
    r"""Returns the lines of a hosts file that are new, and those that are gone.

    Example:
      >>> before = read_hosts("a\nb", "hosts.txt")
      >>> after = read_hosts("a\na\nc", "hosts.txt")
      >>> [[host.login for host in lines] for lines in changed_hosts(before, after)]
      [['a', 'c'], ['b']]
    """
    old, new = Counter(before), Counter(after)
    return list((new - old).elements()), list((old - new).elements())


def look_command(run: str) -> str:
    """Returns what a shell runs to tell the processes of a cluster that are left.

    Args:
      run: as ``remote_command`` got it.
    """
    return _LOOK.format(first=run[0], rest=run[1:])
