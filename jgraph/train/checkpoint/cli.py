"""``jgraph ckpt``: list, verify, copy, import and prune checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from jgraph.errors import (
    CheckpointError,
    CheckpointForeignError,
    ConfigError,
    JGError,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Where = Annotated[
    Path, typer.Argument(help="A checkpoint, or a directory of steps.", metavar="PATH")
]
Step = Annotated[
    int | None, typer.Option(help="Which step of the directory; the newest if unset.")
]

app = typer.Typer(
    help="List, verify, copy, import and prune checkpoints.", no_args_is_help=True
)


@app.command()
def ls(path: Where, as_json: Json = False) -> None:
    """List the steps of a directory; reads manifests, not arrays."""
    from jgraph.train.checkpoint.checkpoints import put_aside_in

    rows = [_facts(one) for one in _checkpoints(path)]
    rows += [{"path": str(p), "problem": f"{p} is damaged"} for p in put_aside_in(path)]
    _print(as_json, rows, "\n".join(map(_line, rows)))


@app.command()
def verify(path: Where, as_json: Json = False) -> None:
    """Read checkpoints and compare every array with its checksum; exit 1 if one fails.

    Nothing is renamed or written. Steps of other programs have no checksums.
    """
    from jgraph.train.checkpoint.checkpoint import verify as check

    rows = [_facts(one, check) for one in _checkpoints(path)]
    _print(as_json, rows, "\n".join(map(_line, rows)))
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


@app.command()
def restore(
    path: Where,
    target: Annotated[Path, typer.Argument(help="A directory that is not there yet.")],
    step: Step = None,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint, verified: the newest good step unless one is named."""
    from jgraph.train.checkpoint.checkpoint import absolute, verify as check
    from jgraph.train.checkpoint.checkpoints import copy, is_checkpoint, newest_good

    source = absolute(path)
    if step is not None:
        source = source / str(step)
        check(source)
    elif is_checkpoint(source):
        check(source)
    else:
        number, _ = newest_good(source, check, quarantine=False)
        source = source / str(number)
    facts = _facts(copy(source, absolute(target)))
    _print(as_json, facts, _line(facts))


@app.command(name="import")
def import_(
    path: Annotated[
        Path, typer.Argument(help="What a Flax program saved.", metavar="PATH")
    ],
    target: Annotated[Path, typer.Argument(help="A directory that is not there yet.")],
    as_json: Json = False,
) -> None:
    """Make a checkpoint of jgraph from one of Orbax or Flax, with checksums.

    That of a directory of steps is the newest. Nothing of the original is changed.
    """
    from jgraph.train.checkpoint.checkpoint import absolute, save
    from jgraph.train.checkpoint.flax_checkpoints import as_layout, find, read

    source = absolute(path)
    if (directory := find(source)) is None:
        raise CheckpointError(
            f"there is no checkpoint of Orbax or Flax at {source}",
            path=str(source),
        )
    facts = _facts(save(target, as_layout(directory, read(directory))))
    _print(as_json, facts, _line(facts))


@app.command()
def prune(
    path: Annotated[Path, typer.Argument(help="A directory of steps.", metavar="PATH")],
    keep: Annotated[int, typer.Option(min=1, help="How many good ones to keep.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete all but the newest good steps; refused while a run writes there.

    Reads the steps that are kept. Steps of other programs stay, and so do damaged ones
    that are newer than those.
    """
    from jgraph.runtime.files.step_files import our_steps
    from jgraph.train.checkpoint.checkpoint import absolute
    from jgraph.train.checkpoint.checkpoints import (
        CheckpointWriter,
        is_checkpoint,
        is_good,
        to_prune,
    )

    directory = absolute(path)
    if is_checkpoint(directory):
        raise ConfigError(f"{directory} is not a directory of steps; name one")
    if dry_run or not our_steps(directory):
        steps = to_prune(directory, keep, is_good)
    else:
        with CheckpointWriter(directory, keep) as writer:
            steps = writer.prune(is_good)
    verb = "would delete" if dry_run else "deleted"
    text = ", ".join(map(str, steps)) or "nothing"
    _print(as_json, {"deleted": steps, "dry_run": dry_run}, f"{verb} {text}")


def _checkpoints(path: Path) -> list[Path]:
    from jgraph.runtime.files.step_files import steps_in
    from jgraph.train.checkpoint.checkpoint import absolute
    from jgraph.train.checkpoint.checkpoints import is_checkpoint

    where = absolute(path)
    if is_checkpoint(where):
        return [where]
    return [where / str(step) for step in steps_in(where)]


def _facts(path: Path, read: Callable[[Path], Any] | None = None) -> dict[str, Any]:
    """Returns what is known of a checkpoint; ``problem`` says what is wrong with it."""
    from jgraph.runtime.files.manifest import is_committed, read_manifest

    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        manifest = (read or read_manifest)(path)
    except CheckpointForeignError as error:
        if not is_committed(path):
            return {"path": str(path), "problem": str(error)}
        return {"path": str(path), "of": "another program", "problem": ""}
    except JGError as error:
        return {"path": str(path), "problem": str(error)}
    return {
        "path": str(path),
        "step": manifest.step,
        "nbytes": manifest.nbytes,
        "leaves": len(manifest.leaves),
        "saved": manifest.saved,
        "generation": manifest.generation,
        "jgraph": manifest.jgraph,
        "problem": "",
    }


def _line(facts: dict[str, Any]) -> str:
    if facts["problem"]:
        return f"✗ {facts['problem']}"
    if "of" in facts:
        return f"{facts['path']}  of another program, not checked and left alone"
    return (
        f"{facts['path']}  step {facts['step']}  {facts['nbytes']:,} bytes in "
        f"{facts['leaves']} arrays  {facts['saved']}"
    )


def _print(as_json: bool, facts: object, text: str) -> None:
    typer.echo(json.dumps(facts) if as_json else text)
