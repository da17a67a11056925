"""The pages that users read, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/*.md", "*/README.md", "jgraph/*/README.md")
PAGES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
