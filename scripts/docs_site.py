"""What MkDocs needs beyond docs/: pages from elsewhere, notebooks, the reference.

A hook of mkdocs.yml. Pages have the links that work in the repository: those to other
pages of the site are turned into these, and of others only the text stays. Notebooks
have their outputs in the repository; scripts/notebook_outputs.py writes them.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jgraph

ROOT: Final = Path(__file__).resolve().parent.parent
HOMES: Final = jgraph._HOMES  # noqa: SLF001  # griffe reads files, where names live
PAGES: Final = {
    "README.md": "index.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "jgraph/examples/README.md": "examples.md",
}
"""Page of the repository -> page of the site; docs/x.md is x.md."""
GROUPS: Final = {
    "Training": [
        "Trainer",
        "AsyncPS",
        "SyncPS",
        "LocalSGD",
        "Privacy",
        "SecureSum",
        "Federated",
        "Local",
        "Elastic",
        "AutoScale",
        "Checkpoints",
        "Source",
    ],
    "Callbacks": [
        *("EarlyStopping", "NanGuard", "StopAtStep", "TensorBoard", "MLflow", "WandB"),
    ],
    "Serving": ["export", "ExportedModel", "serve", "ModelServer"],
    "Graphs": ["function", "Variable", "device", "colocate_with", "tap", "mesh"],
    "Models on several tasks": ["Pipeline", "towers", "auto", "CostModel"],
    "Tables": [
        *("embedding_bag", "HashTable", "Admission", "Initial", "split_keys", "NO_KEY"),
    ],
    "Where variables go": [
        *("fixed_size_partitioner", "variable_axis_size_partitioner"),
        *("min_max_variable_partitioner", "GreedyLoadBalancing", "RoundRobin"),
    ],
    "Clusters": [
        *("LocalCluster", "RayCluster", "SparkCluster", "connect"),
        *("Session", "ClusterSpec", "Server", "TLS"),
    ],
    "Tests and simulated clusters": [],  # of jgraph.testing
    "Looking": ["Graph", "check", "doctor", "DeviceSpec", "JGError"],
}
BESIDE: Final = {
    "Training": [
        *("jgraph.train.run.run.Run", "jgraph.train.spark.scoring.predict"),
        *(f"jgraph.coordination.run.autoscale.{n}" for n in ("RunSample", "Scale")),
    ],
    "Clusters": ["jgraph.client.cluster.Cluster", "jgraph.client.status.TaskStatus"],
    "Tests and simulated clusters": [
        "jgraph.testing.scale." + name
        for name in (
            "simulate.simulate",
            "simulate.Simulated",
            "simulate.dense_step",
            "computing.Computing",
            "costs.Costs",
            "costs.load_costs",
        )
    ],
}
"""What users hold in their hands and do not make by name."""
LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    made = {PAGES[name]: (ROOT / name).read_text("utf-8") for name in PAGES}
    made["api.md"] = reference()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        made[f"notebooks/{path.stem}.md"] = notebook_page(path)
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turns links of the repository into links of the site."""
    here = repository_path(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        uri = site_path(path)
        if files.get_file_from_path(uri) is None:
            return str(text)
        found = posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({found}{anchor or ''})"

    return LINK.sub(link, markdown)


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    path = PAGES.get(path, path).removeprefix("docs/")
    return re.sub(r"^(notebooks/.*)\.ipynb$", r"\1.md", path)


def repository_path(uri: str) -> str:
    """Which file of the repository a page of the site is."""
    back = {page: path for path, page in PAGES.items()}
    return back.get(uri) or (uri if uri.startswith("notebooks/") else f"docs/{uri}")


def reference() -> str:
    """The page of public names, by group, each rendered from its docstring."""
    lines = ["# Python reference", "", "All are attributes of `jgraph`, except"]
    lines += ["[the errors](errors.md) of `jgraph.errors`.", ""]
    for group, names in GROUPS.items():
        homes = [f"{HOMES[name]}.{name}" for name in names]
        lines += [f"## {group}", ""]
        for home in [*homes, *BESIDE.get(group, ())]:
            lines += [f"::: {home}", "    options: {heading_level: 3}", ""]
    return "\n".join(lines)


class Examples(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Shows what our docstrings call Example as code; griffe knows the plural only."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.M)


# ---------------------------------------------------------------- notebooks


def notebook_page(path: Path) -> str:
    """A notebook as Markdown, with its outputs."""
    notebook = json.loads(path.read_text("utf-8"))
    return "\n\n".join(cell_text(cell) for cell in notebook["cells"]) + "\n"


def cell_text(cell: Any) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    shown = [output_text(output) for output in cell["outputs"]]
    return "\n\n".join([f"```python\n{source}\n```", *filter(None, shown)])


def output_text(output: Any) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).strip()
        return f'<img alt="output" src="data:image/png;base64,{picture}">'
    if "text/html" in data:
        return f"<div>{' '.join(''.join(data['text/html']).split())}</div>"
    return f"```text\n{''.join(data.get('text/plain', ''))}\n```" if data else ""
