"""Check of manifests against the fields that Kubernetes has."""

import json
from pathlib import Path

from jsonschema import Draft7Validator

from jgraph.launch.kubernetes import Manifest

SCHEMA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def check(manifest: Manifest) -> None:
    """Refuses fields that Kubernetes does not have, and those of another type."""
    kind = manifest["kind"]
    root = kind if kind == "JobSet" else f"V1{kind}"
    schema = {"$ref": f"#/definitions/{root}", "definitions": SCHEMA["definitions"]}
    Draft7Validator(schema).validate(manifest)
