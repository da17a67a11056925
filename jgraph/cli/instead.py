"""Hints for commands that similar tools have and ``jgraph`` does not."""

from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup

from jgraph.cli.options import USAGE

INSTEAD: Final[Mapping[str, str]] = {
    "attach": "a run is attached to in Python: trainer.attach(NAME), of a Trainer of "
    "the same model; `jgraph runs` lists the names",
    "chaos": "tasks are killed on purpose with cluster.kill(TASK) of a "
    "jg.LocalCluster; notebooks/04_break_it_on_purpose.ipynb shows how",
    "export": "a trained model is a Flax model again: run.model(); export that with "
    "jax.export",
    "kill": "`jgraph drain TASK` ends a task gently, `jgraph status` shows its process "
    "id, and a jg.LocalCluster has cluster.kill(TASK)",
    "predict": "predictions are made in Python: trainer.predict(x), or run.model()",
    "serve": "jgraph trains, and serves no models: run.model() is your Flax model",
    "serve-task": "`jgraph server` is what runs on a host",
    "stack": "`jgraph status --explain` says what steps under way wait for",
    "start": "`jgraph up` starts a cluster here, or on --hosts; `jgraph server` one "
    "task",
    "stop": "`jgraph down` ends a cluster, `jgraph drain TASK` one task; a run ends by "
    "run.stop()",
    "submit": "servers run no Python of yours: start the driver beside them, by `ssh "
    "HEAD python train.py` with jg.connect in it, by `jgraph slurm render -- python "
    "train.py`, or as a Job of Kubernetes; fit(detached=True) goes on without it",
    "trace": "steps are traced in Python: session.run(step, x, trace=True), then "
    "session.run_metadata.save_timeline('step.json')",
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
