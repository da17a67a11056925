"""The page behind a real Jupyter server, under a path, in the browser."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from jgraph.clock import SystemClock, WallClock
from tests.support.board_facts import START, run
from tests.support.chromium import CHROMIUM, needs_chromium
from tests.support.dashboards import Imagined, scene, serving
from tests.support.free_port import free_port

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs jgraph[browser]", exc_type=ImportError
)
pytest.importorskip("jupyter_server_proxy", reason="needs jgraph[browser]")
pytestmark = [pytest.mark.nightly, pytest.mark.procs, needs_chromium]
START_S = 60.0


@contextmanager
def jupyter(directory: Path) -> Iterator[str]:
    """A notebook server with the proxy; yields its address."""
    port = free_port()
    options = {
        "ServerApp.port": port,
        "ServerApp.open_browser": False,
        "ServerApp.root_dir": directory,
        "ServerApp.allow_root": True,
        "IdentityProvider.token": "of-the-notebook",
    }
    homes = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", *arguments],
            env={**os.environ, **dict.fromkeys(homes, str(directory))},
            stdout=log,
            stderr=log,
        )
    url, clock = f"http://127.0.0.1:{port}", SystemClock()
    try:
        deadline = clock.now() + START_S
        while clock.now() < deadline and process.poll() is None:
            try:
                urlopen(f"{url}/api", timeout=5).close()
                break
            except URLError:
                threading.Event().wait(0.1)
        else:
            raise AssertionError((directory / "log").read_text())
        yield url
    finally:
        process.terminate()
        process.wait(20)


def test_the_page_and_its_events_pass_the_proxy_of_a_notebook(tmp_path: Path) -> None:
    source = Imagined(scene(WallClock().now() - START - 118))
    with (
        jupyter(tmp_path) as url,
        serving(source, allowed_hosts=[url.removeprefix("http://")]) as server,
        playwright.sync_playwright() as started,
    ):
        token = server.url.partition("#token=")[2]
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page()
        page.set_default_timeout(15_000)
        refused: list[Any] = []
        page.on("response", lambda a: refused.append(a.url) if a.status > 399 else None)
        page.goto(f"{url}/login?token=of-the-notebook")
        page.goto(f"{url}/proxy/{server.port}/#token={token}")
        sentence = page.locator("#sentence")
        playwright.expect(sentence).to_contain_text("run 'mlp' is at step 4,860")
        source.board.take(run(WallClock().now() - START, 4999))
        playwright.expect(sentence).to_contain_text("is at step 4,999")
        assert not [at for at in refused if "/proxy/" in at]
        browser.close()
