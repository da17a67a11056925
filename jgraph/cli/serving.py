"""``jgraph export``: makes a version of a model from a checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from jgraph.cli.options import Json, say


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a directory of steps.")
    ],
    where: Annotated[
        str,
        typer.Argument(
            help="The Trainer, or a function that makes it, as train.py:trainer.",
            metavar="FILE.py:TRAINER",
        ),
    ],
    example: Annotated[
        str, typer.Option(help="Name of a batch in the same file, for names and types.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the model: models/ctr.")
    ],
    fn: Annotated[
        str, typer.Option(help="Name of a function in the file: fn(model, x).")
    ] = "",
    label: Annotated[
        str | None, typer.Option(help="What the version is to be called.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a model from a checkpoint. Runs the file; nothing is trained."""
    from jgraph.cli.show import object_at
    from jgraph.errors import ConfigError
    from jgraph.train.export import export as write
    from jgraph.train.trainer import Trainer

    file = where.rpartition(":")[0]
    trainer = object_at(where)[1]
    if not isinstance(trainer, Trainer) and callable(trainer):
        trainer = trainer()
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"'{where}' is a {type(trainer).__name__}; name a Trainer")
    trainer.restore(checkpoint)
    batch = object_at(f"{file}:{example}")[1]
    function = object_at(f"{file}:{fn}")[1] if fn else None
    model = write(trainer, batch, output, fn=function, label=label)
    facts = {"path": str(model.path), "version": model.version, "nbytes": model.nbytes}
    say(facts, f"{model.path}: {model.nbytes:,} bytes", as_json=as_json)
