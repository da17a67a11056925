"""``jgraph model``: list, show, verify, label and prune exported models."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from jgraph.errors import ArtifactError, JGError

_GONE: Final = re.compile(r"\.\d+(\.[0-9a-f]+)?\.gone")
"""What was to be deleted, by this process or one that was killed meanwhile."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
Model = Annotated[
    Path, typer.Argument(help="Directory of a model, or of a version.", metavar="PATH")
]

app = typer.Typer(
    help="List, show, verify, label and prune exported models.", no_args_is_help=True
)


@app.command()
def ls(
    path: Annotated[
        Path, typer.Argument(help="A model, or a directory of models.", metavar="PATH")
    ],
    as_json: Json = False,
) -> None:
    """List versions and labels; reads manifests, not arrays."""
    rows = [_facts(one) for model in _models(path) for one in _versions(model)]
    _print(as_json, rows, "\n".join(map(_line, rows)) or f"no models in {path}")


@app.command()
def show(path: Model, as_json: Json = False) -> None:
    """Show the signatures of the newest version, or of the one that is named."""
    from jgraph.serving.exported_model import ExportedModel
    from jgraph.serving.signature import listed

    model = ExportedModel(path)
    lines = [_line(_facts(model.path))]
    for name, one in model.signatures.items():
        together = "computed together" if one.rows_independent else "computed alone"
        lines.append(f"  {name}: ({listed(one.inputs)}) -> {listed(one.outputs)}")
        lines.append(f"    requests are {together}; program {one.program[:12]}")
    body = json.loads(model.manifest.to_json())
    _print(as_json, {"path": str(model.path), **body}, "\n".join(lines))


@app.command()
def verify(path: Model, as_json: Json = False) -> None:
    """Read every byte of a version, or of all; exit 1 if one is damaged."""
    from jgraph.serving.exported_model import ExportedModel

    found = [path] if path.name.isdecimal() else _some_versions(path)
    rows = []
    for version in found:
        facts = _facts(version)
        try:
            ExportedModel(version).verify()
        except JGError as error:
            facts["problem"] = str(error)
        rows.append(facts)
    _print(as_json, rows, "\n".join(map(_line, rows)))
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


@app.command()
def label(
    path: Annotated[
        Path, typer.Argument(help="Directory of a model.", metavar="MODEL")
    ],
    name: Annotated[str, typer.Argument(help="The label.", metavar="LABEL")],
    version: Annotated[
        int | None, typer.Argument(help="The version; none: take the label away.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Call a version by a name; servers see it within seconds."""
    from jgraph.serving.labels import set_label

    labels = set_label(path, name, version)
    text = ", ".join(f"{n} = {v}" for n, v in labels.targets.items()) or "no labels"
    _print(as_json, {"labels": labels.targets, "split": labels.split}, text)


@app.command("saved-model")
def saved_model(
    path: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the SavedModels.")
    ],
    tensorflow: Annotated[
        str | None,
        typer.Option(
            help="A Python that has TensorFlow. If unset: this one, or that of "
            "JGRAPH_TENSORFLOW_PYTHON."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a version as a SavedModel, for TensorFlow and TensorFlow Serving."""
    from jgraph.serving.exported_model import ExportedModel
    from jgraph.serving.saved_model.convert import write_saved_model

    saved = write_saved_model(ExportedModel(path), output, tensorflow=tensorflow)
    _print(as_json, {"path": str(saved)}, str(saved))


@app.command()
def prune(
    path: Annotated[
        Path, typer.Argument(help="Directory of a model.", metavar="MODEL")
    ],
    keep: Annotated[int, typer.Option(min=1, help="How many versions to keep.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be deleted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Delete all but the newest versions, and those that have a label.

    What cannot be read counts for none, and is deleted if it is older than they are.
    """
    from jgraph.serving.labels import one_at_a_time, read_labels

    with one_at_a_time(path):
        labelled = set(read_labels(path).targets.values())
        goners = [one for one in _old(path, keep) if int(one.name) not in labelled]
        for version in [] if dry_run else goners:
            # What is renamed first is not found in part by a server.
            version.rename(path / f".{version.name}.{os.urandom(4).hex()}.gone")
    for rest in [] if dry_run else filter(_GONE.fullmatch, os.listdir(path)):
        with suppress(FileNotFoundError):  # somebody else deletes it
            shutil.rmtree(path / rest)
    old = [int(version.name) for version in goners]
    verb = "would delete" if dry_run else "deleted"
    text = ", ".join(map(str, old)) or "nothing"
    _print(as_json, {"deleted": old, "dry_run": dry_run}, f"{verb} {text}")


def _old(model: Path, keep: int) -> list[Path]:
    """Returns the versions that are older than the newest ones that can be read."""
    versions = _some_versions(model)
    whole = [one for one in versions if not _facts(one)["problem"]]
    if len(whole) <= keep:
        return []
    return versions[: versions.index(whole[-keep])]


def _models(path: Path) -> list[Path]:
    from jgraph.serving.artifact import MODEL_NAME

    if _versions(path):
        return [path]
    if not path.is_dir():
        raise ArtifactError(f"there is no directory {path}")
    return sorted(
        one for one in path.iterdir() if one.is_dir() and MODEL_NAME.fullmatch(one.name)
    )


def _versions(model: Path) -> list[Path]:
    from jgraph.serving.artifact import versions_in

    return [model / str(version) for version in versions_in(model)]


def _some_versions(model: Path) -> list[Path]:
    """Returns the versions of a model that has some, the oldest first."""
    if not (versions := _versions(model)):
        raise ArtifactError(f"there is no version of a model in {model.absolute()}")
    return versions


def _facts(path: Path) -> dict[str, Any]:
    """Returns what is known of a version; ``problem`` says what is wrong with it."""
    from jgraph.serving.artifact import read_manifest
    from jgraph.serving.labels import read_labels

    path = path.absolute()
    try:
        manifest = read_manifest(path)
        targets = read_labels(path.parent).targets.items()
    except JGError as error:
        return {"path": str(path), "problem": str(error)}
    return {
        "path": str(path),
        "model": path.parent.name,
        "version": int(path.name),
        "labels": [label for label, version in targets if version == int(path.name)],
        "signatures": list(manifest.signatures),
        "nbytes": manifest.nbytes,
        "platforms": list(manifest.platforms),
        "time": manifest.source.get("time", ""),
        "problem": "",
    }


def _line(facts: dict[str, Any]) -> str:
    if facts["problem"]:
        return f"✗ {facts['problem']}"
    labels = f"  [{', '.join(facts['labels'])}]" if facts["labels"] else ""
    return (
        f"{facts['model']}  {facts['version']}{labels}  {facts['nbytes']:,} bytes  "
        f"{', '.join(facts['signatures'])}  {facts['time']}"
    )


def _print(as_json: bool, facts: object, text: str) -> None:
    typer.echo(json.dumps(facts) if as_json else text)
