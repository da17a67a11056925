"""The Chromium of this machine, for tests that look at a page."""

import shutil
from typing import Final

import pytest

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium: Final = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install chromium"
)
