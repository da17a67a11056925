"""Report of a cluster in one file: the page with all that it shows, and no server."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from jgraph.dashboard.sources import ReplaySource

_MODULES: Final = ("dom.js", "charts.js", "pages.js", "main.js")
"""In the order in which they need one another."""
_STYLES: Final = ("vendor/uPlot.min.css", "style.css")
_CHARTS: Final = "vendor/uPlot.iife.min.js"


def report(source: ReplaySource) -> str:
    """Returns a page of HTML that shows a journal at one time, from a file.

    Its scripts and styles are in it, and nothing else may run there: the browser has
    their digests. What others wrote is data in it, as on the page that is served.

    Args:
      source: of the journal.
    """
    at = source.config()["at"]
    answers = {
        "api/v1/config": {**source.config(), "kind": "report", "at": at},
        "api/v1/state": source.view(at),
        "api/v1/curves": source.curves(at),
    }
    return page_with(answers)


def page_with(answers: Mapping[str, Any]) -> str:
    """Returns the page with what it would ask for."""
    root = files("jgraph.dashboard") / "page"
    text = {
        name: (root / name).read_text("utf-8")
        for name in (*_MODULES, *_STYLES, _CHARTS, "index.html")
    }
    styles = "\n".join(text[name] for name in _STYLES)
    modules = "\n".join(_alone(text[name]) for name in _MODULES)
    scripts = (text[_CHARTS], modules)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; "
        f"style-src {_digest(styles)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    # No text of others can end the element, or begin one.
    data = json.dumps(answers, allow_nan=False).replace("<", "\\u003c")
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{styles}</style>"
    )
    body = (
        f'<script type="application/json" id="report">{data}</script>\n'
        f"<script>{scripts[0]}</script>\n"
        f'<script type="module">{modules}</script>\n</body>'
    )
    of_files = r'<(?:link rel="stylesheet"|script)[^\n]*\n'
    page = re.sub(of_files, "", text["index.html"])
    page = page.replace("<title>", head + "\n<title>", 1)
    return page.replace("</body>", body, 1)


def _alone(module: str) -> str:
    """Returns a module without its imports and exports: all are in one script."""
    without = re.sub(r"^import .*?;\n", "", module, flags=re.M)
    return re.sub(r"^export ", "", without, flags=re.M)


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
