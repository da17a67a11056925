"""Pictures of the pages of a dashboard for its guide, by the Chromium of this machine.

``python scripts/dashboard_pictures.py`` writes ``docs/dashboard-PAGE.png`` where there
is none; with ``--all`` of all. The cluster on them is the imagined one of the tests.
"""

import sys
from pathlib import Path
from typing import Final

from playwright.sync_api import sync_playwright

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from jgraph.clock import WallClock  # noqa: E402
from tests.support.board_facts import PS, START, WORKERS, report  # noqa: E402
from tests.support.chromium import CHROMIUM  # noqa: E402
from tests.support.dashboards import Imagined, scene, serving  # noqa: E402

PAGES: Final = (
    *("overview", "training", "workers", "tasks", "traffic", "parameters"),
    *("timeline", "events", "members", "serving", "rounds", "about"),
)


def imagined() -> Imagined:
    """A cluster that was seen until now, and has rounds."""
    source = Imagined(scene(WallClock().now() - START - 118))
    source.lines = [f"INFO jgraph.events: worker:{n} joined" for n in range(3)]
    over = [
        {"number": n, "members": WORKERS[: 3 - n % 2], "dropped": late, "wait_s": 0.4}
        for n in range(1, 7)
        for late in ({WORKERS[2]: "late"} if n % 2 else {},)
    ]
    now = source.board.view()["time"] - START
    source.board.take(report(now, task=PS, steps=6, rounds=over))
    return source


def main() -> None:
    with sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for name in PAGES:
            path = ROOT / "docs" / f"dashboard-{name}.png"
            if path.exists() and "--all" not in sys.argv:
                continue
            with serving(imagined()) as server:
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                page.goto(server.url)
                page.locator(f"#tabs button[data-tab={name}]").press("Enter")
                page.locator("main section").first.wait_for()
                page.wait_for_timeout(500)
                page.screenshot(path=path)
                page.close()
        browser.close()


if __name__ == "__main__":
    main()
