"""Options that several commands share, and the exit codes of all."""

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

OK, FAILURE, USAGE, UNREACHABLE, FORBIDDEN = range(5)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Name = Annotated[str, typer.Option(help="Name of a cluster on this machine.")]
Target = Annotated[
    str | None,
    typer.Argument(help="Address of any server of the cluster: jgraph://host:port."),
]
Certificates = Annotated[
    Path | None,
    typer.Option(help="Directory of certificates, for a jgraphs:// address."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the token of the cluster. If unset: JGRAPH_TOKEN_FILE, the "
        "token beside the certificates, or ~/.jgraph/token."
    ),
]


Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds to wait before giving up.")
]


def task_of(typed: str) -> str:
    """Returns the name of a task, which may be typed short.

    Example:
      >>> task_of("ps:0"), task_of("/job:ps/task:0")
      ('/job:ps/task:0', '/job:ps/task:0')
    """
    short = re.fullmatch(r"(\w+):(\d+)", typed)
    return f"/job:{short[1]}/task:{short[2]}" if short else typed


def target_of(target: str | None, name: str) -> str:
    """Returns the address of a cluster: as told, or that of one of this machine."""
    from jgraph.launch.local.daemon import named_cluster

    return named_cluster(name).target if target is None else target


@contextmanager
def until_interrupted() -> Iterator[threading.Event]:
    """Lets Ctrl-C end a block, quietly; it also sets the event that is given.

    Where Python drops the interrupt, as in a destructor that happens to run, the block
    still sees the event.
    """
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        stop.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with suppress(KeyboardInterrupt):
            yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def say(facts: object, text: str | Callable[[], str], *, as_json: bool) -> None:
    """Prints what a command found: for a program, or for people."""
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        typer.echo(text if isinstance(text, str) else text())


INSTEAD: Final[Mapping[str, str]] = {
    "attach": "a run is attached to in Python: trainer.attach(NAME), of a Trainer of "
    "the same model; `jgraph runs` lists the names",
    "check": "`jgraph doctor` checks this machine or a cluster",
    "checkpoint": "`jgraph ckpt` lists, verifies and copies checkpoints",
    "chaos": "tasks are killed on purpose with cluster.kill(TASK) of a "
    "jg.LocalCluster; notebooks/04_break_it_on_purpose.ipynb shows how",
    "kill": "`jgraph drain TASK` ends a task gently, `jgraph status` shows its process "
    "id, and a jg.LocalCluster has cluster.kill(TASK)",
    "models": "`jgraph model ls DIRECTORY` lists exported models",
    "ps": "`jgraph status` shows the tasks of a cluster",
    "run": "`jgraph up` starts a cluster, to which train.py connects by jg.connect; "
    "`jgraph demo` trains one of its own",
    "serve-task": "`jgraph server` is what runs on a host",
    "stack": "`jgraph status --explain` says what steps under way wait for",
    "start": "`jgraph up` starts a cluster here, or on --hosts; `jgraph server` one "
    "task",
    "stop": "`jgraph down` ends a cluster, `jgraph drain TASK` one task; a run ends by "
    "run.stop()",
    "submit": "servers run no Python of yours: start the driver beside them, by `ssh "
    "HEAD python train.py` with jg.connect in it, by `jgraph slurm render -- python "
    "train.py`, or as a Job of Kubernetes; fit(detached=True) goes on without it",
}


class Commands(TyperGroup):
    """The commands, and a sentence for those that there are not."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of that name.

        Raises:
          typer.Exit: there is none; says what is typed instead.
        """
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in INSTEAD and not ctx.resilient_parsing:
            sentence = f"there is no `jgraph {cmd_name}`: {INSTEAD[cmd_name]}"
            typer.echo(sentence, err=True)
            raise typer.Exit(USAGE)
        return found


def metrics_token(path: Path | None) -> str:
    """Returns the token that a scrape of Prometheus shows; empty: none does.

    Raises:
      ConfigError: it is short.
    """
    if path is None:
        return ""
    from jgraph.errors import ConfigError

    token = path.read_text("ascii", "replace").strip()
    if len(token) < 16:
        raise ConfigError(
            f"the token in {path} is shorter than 16 characters; write a longer one, "
            "for example by `jgraph token new`"
        )
    return token
