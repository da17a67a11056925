"""Batch scripts for Slurm: servers on all nodes, then the user's program; more workers.

The second script is of a job of its own, whose tasks join the cluster of the first.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from jgraph.cluster.spec import check_counts
from jgraph.errors import ConfigError

_SCRIPT: Final = """\
#!/bin/bash
{directives}

# Starts the tasks of ps ({ps}) and worker ({workers}), one process each, and then the
# program, which connects with
#   jg.connect(os.environ["JGRAPH_TARGET"], tls=os.environ["JGRAPH_TLS"])
# The directory that this is submitted from has to be on a disk that all nodes share.
set -euo pipefail
umask 077
# A job that was put back into the queue has its number again.
run="$SLURM_SUBMIT_DIR/{name}-$SLURM_JOB_ID${{SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}}"
mkdir "$run"

# Hosts in the order of SLURM_PROCID, which is the order of the tasks.
mapfile -t hosts < <(srun --label hostname | sort -n | sed 's/^ *[0-9]*: *//')
addresses() {{
  for ((i = $1; i < $2; i++)); do
    printf '"%s:%d", ' "${{hosts[i]}}" $(({port} + i))
  done
}}
{{
  echo "[cluster]"
{jobs}
  echo "[tls]"
  echo 'dir = "certs"'
}} > "$run/cluster.toml"
jgraph certs "$run/certs" --cluster "$run/cluster.toml"{spare} > "$run/certs.txt"

srun --kill-on-bad-exit=0 --output="$run/server-%t.log" \\
  jgraph server --cluster "$run/cluster.toml" --bind 0.0.0.0{insecure} &
servers=$!
trap 'kill "$servers" && wait "$servers" || true' EXIT

export JGRAPH_TLS="$run/certs"
export JGRAPH_TARGET="jgraphs://${{hosts[0]}}:{port}"
echo "$JGRAPH_TARGET" > "$run/target"
for ((attempt = 0; attempt < {attempts}; attempt++)); do
  jgraph status "$JGRAPH_TARGET" --tls-dir "$JGRAPH_TLS" &> "$run/status.txt" && break
  kill -0 "$servers" || {{ cat "$run"/server-*.log >&2; exit 1; }}
  sleep 2
done
cat "$run/status.txt"
{program}
"""
_LAST_PORT: Final = 65535
_NAME: Final = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)


@final
@dataclass(frozen=True, slots=True)
class SlurmJob:
    """What a batch job is to start.

    Attributes:
      program: the user's command and its arguments.
      ps: parameter servers.
      workers: workers.
      name: of the job, and of the directory for files and logs.
      port: the first task's; each other has the next one, so several fit on a node.
      options: further options of ``sbatch``, such as ``--time=1:00:00``.
      wait_s: how long tasks may take to start.
      spare: so many workers may join the cluster later; see ``SlurmWorkers``.
      insecure_i_accept: children of the servers may listen beyond loopback; see
        ``Server``.

    Raises:
      ConfigError: no task or too many, no program, or a name or option that would be
        something else in the script.
    """

    program: Sequence[str]
    ps: int
    workers: int
    name: str = "jgraph"
    port: int = 8470
    options: Sequence[str] = ()
    wait_s: int = 120
    spare: int = 0
    insecure_i_accept: bool = False

    def __post_init__(self) -> None:
        if self.ps + self.workers < 1:
            raise ConfigError("a cluster needs at least one task; give --workers 1")
        if not self.program:
            raise ConfigError("name the program after --, such as -- python train.py")
        check_counts({"ps": self.ps, "worker": self.workers})
        _check_lines(self.name, self.options)
        if (last := self.port + self.ps + self.workers - 1) > _LAST_PORT:
            raise ConfigError(
                f"the last of {self.ps + self.workers:,} tasks would be at port {last},"
                f" as each has the next one; give a port up to "
                f"{_LAST_PORT + self.port - last}"
            )

    def script(self) -> str:
        """Returns the text of the script."""
        count = self.ps + self.workers
        options = [f"--job-name={self.name}", f"--ntasks={count}", *self.options]
        ends = {"ps": (0, self.ps), "worker": (self.ps, count)}
        return _SCRIPT.format(
            directives="\n".join(f"#SBATCH {option}" for option in options),
            jobs="\n".join(
                f'  echo "{job} = [$(addresses {first} {end})]"'
                for job, (first, end) in ends.items()
                if end > first
            ),
            ps=self.ps,
            workers=self.workers,
            name=self.name,
            port=self.port,
            attempts=max(1, self.wait_s // 2),
            program=shlex.join(self.program),
            spare=f" --spare {self.spare}" if self.spare else "",
            insecure=" --insecure-i-accept" if self.insecure_i_accept else "",
        )


_JOINS: Final = """\
#!/bin/bash
{directives}

# Starts {workers} worker(s), one process each, that join the cluster of another job,
# whose directory is on a disk that all nodes share. Each leaves the cluster in order
# when this job is cancelled, and hands over what it has not done.
set -euo pipefail
umask 077
run={directory}
target=$(<"$run/target")
exec srun --kill-on-bad-exit=0 --output="$run/workers-$SLURM_JOB_ID-%t.log" \
  jgraph server --job worker --join "$target" --tls-dir "$run/certs" --bind 0.0.0.0
"""


@final
@dataclass(frozen=True, slots=True)
class SlurmWorkers:
    """What a batch job is to start that gives a cluster more workers.

    Attributes:
      directory: of the job that the cluster is of; it has certificates to spare.
      workers: how many.
      name: of the job.
      options: further options of ``sbatch``.

    Raises:
      ConfigError: no worker.

    Example:
      >>> script = SlurmWorkers("jgraph-1234", 2).script()
      >>> script.splitlines()[1:3]
      ['#SBATCH --job-name=jgraph', '#SBATCH --ntasks=2']
    """

    directory: str
    workers: int
    name: str = "jgraph"
    options: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError("no worker would join; give --workers 1")
        check_counts({"worker": self.workers})
        _check_lines(self.name, self.options)

    def script(self) -> str:
        """Returns the text of the script."""
        first = f"--job-name={self.name}", f"--ntasks={self.workers}"
        return _JOINS.format(
            directives="\n".join(f"#SBATCH {o}" for o in (*first, *self.options)),
            workers=self.workers,
            directory=shlex.quote(self.directory),
        )


def _check_lines(name: str, options: Sequence[str]) -> None:
    """Refuses what would not be one word, or one line, of a script."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name is {name!r:.60}, and is part of a directory and of the script: "
            "write at most 64 letters, digits, '.', '_' and '-', such as jgraph"
        )
    for option in options:
        if not option.startswith("-") or not option.isprintable():
            raise ConfigError(
                f"{option!r:.60} is no option of sbatch; write it with its dashes, "
                "such as --option=--time=1:00:00"
            )
