"""Batch scripts: as they were, as bash reads them, and run by a stand-in for srun."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jgraph.errors import ConfigError
from jgraph.launch.slurm import SlurmJob, SlurmWorkers
from tests.support.cli import run
from tests.support.free_port import free_port

HERE = Path(__file__).parent
SMALL = SlurmJob(["python", "train.py", "--name", "a b"], 1, 2, options=["--time=1:00"])
SRUN = """\
import os, signal, subprocess, sys
label, rest = False, sys.argv[1:]
while rest[0].startswith("-"):
    label |= rest.pop(0) == "--label"
if label:
    print("1: localhost", "0: localhost", sep="\\n")
    sys.exit(0)
tasks = [
    subprocess.Popen(
        [sys.executable, "-m", "jgraph", *rest[1:]],
        env={**os.environ, "SLURM_PROCID": str(rank)},
    )
    for rank in range(2)
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def test_the_script_is_as_it_was(rewrite: bool) -> None:
    path = HERE / "slurm.sh"
    if rewrite:
        path.write_text(SMALL.script(), encoding="utf-8")
    assert SMALL.script() == path.read_text(encoding="utf-8")


def test_children_of_servers_may_listen_beyond_a_node_where_asked() -> None:
    assert "insecure" not in SMALL.script()
    script = replace(SMALL, insecure_i_accept=True).script()
    assert "--bind 0.0.0.0 --insecure-i-accept &" in script


def test_bash_reads_the_script() -> None:
    done = subprocess.run(
        ["bash", "-n"],
        input=SMALL.script(),
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_bash_reads_the_script_of_workers_that_join() -> None:
    script = SlurmWorkers("a b/jgraph-7", 2, options=["--time=1:00"]).script()
    done = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "run='a b/jgraph-7'" in script
    assert "#SBATCH --time=1:00" in script
    with pytest.raises(ConfigError, match="no worker would join"):
        SlurmWorkers("jgraph-7", 0)


def test_a_job_that_is_queued_again_has_a_directory_of_its_own(tmp_path: Path) -> None:
    head, _, _ = SMALL.script().partition("\n# Hosts")
    given = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    for more in ({}, {"SLURM_RESTART_COUNT": "1"}):
        subprocess.run(["bash", "-c", head], env=os.environ | given | more, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"jgraph-7", "jgraph-7-1"}


@pytest.mark.parametrize(
    ("program", "ps", "workers", "said"),
    [([], 1, 1, "name the program"), (["a"], 0, 0, "at least one task")],
)
def test_what_cannot_be_is_refused(
    program: list[str], ps: int, workers: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        SlurmJob(program, ps, workers)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "my job"}, "name is 'my job', .* such as jgraph"),
        ({"name": '"; ls'}, "name is"),
        ({"options": ["time=1:00"]}, "'time=1:00' is no option of sbatch"),
        ({"options": ["--time=1\nls"]}, "is no option of sbatch"),
        ({"port": 65534}, "would be at port 65536, .* up to 65533"),
        ({"workers": 10_001}, "10,000 tasks of a job at most"),
    ],
)
def test_what_would_be_something_else_in_the_script_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(SMALL, **changes)


@pytest.mark.nightly
@pytest.mark.procs
@pytest.mark.timeout(240)
def test_the_scripts_start_servers_let_a_worker_join_and_end_them(
    tmp_path: Path,
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    jgraph = f'#!/bin/sh\nexec "{sys.executable}" -m jgraph "$@"\n'
    srun = f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/srun.py" "$@"\n'
    (tmp_path / "srun.py").write_text(SRUN)
    for name, text in (("jgraph", jgraph), ("srun", srun)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    more = tmp_path / "more.sh"
    more.write_text(SlurmWorkers(str(tmp_path / "jgraph-7"), 2).script())
    (tmp_path / "train.py").write_text(
        "import os, subprocess, jgraph as jg\n"
        "from tests.support.waiting import wait_until\n"
        "target, tls = os.environ['JGRAPH_TARGET'], os.environ['JGRAPH_TLS']\n"
        "with jg.connect(target, tls=tls) as cluster:\n"
        "    print(cluster.tasks(), cluster.session().run(lambda x: x + 1, 1.0))\n"
        f"    second = subprocess.Popen(['bash', '{more}'])\n"
        "    wait_until(lambda: len(cluster.renewed_tasks('worker')) == 3, 60)\n"
        "    second.terminate()\n"
        "    wait_until(lambda: len(cluster.renewed_tasks('worker')) == 1, 60)\n"
        "    print('they left', second.wait(30))\n"
    )
    program = [sys.executable, str(tmp_path / "train.py")]
    port = free_port()
    script = tmp_path / "job.sh"
    script.write_text(SlurmJob(program, 1, 1, port=port, spare=3).script())
    environ = os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(HERE.parents[1]),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        ["bash", str(script)],
        env=environ,
        text=True,
        capture_output=True,
        check=False,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "['/job:ps/task:0', '/job:worker/task:0'] 2.0" in done.stdout
    assert "they left" in done.stdout
    assert "ready" in (tmp_path / "jgraph-7/status.txt").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "python", "train.py"], "does not go with a program"),
        (["--spare", "2"], "does not go with --spare"),
        (["--insecure-i-accept"], "does not go with --insecure-i-accept"),
    ],
)
def test_those_that_join_have_no_program_and_make_no_certificates(
    capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    code, out, err = run(capsys, "slurm", "render", "--join", "jgraph-7", *words)
    assert (code, out) == (1, "")
    assert says in " ".join(err.split())
