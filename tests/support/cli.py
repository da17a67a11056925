"""The command ``jgraph``: in this process, and in its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jgraph import cli


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``jgraph ARGS`` in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main(args)
    out, err = capsys.readouterr()
    code = stop.value.code
    return (code if isinstance(code, int) else 0), out, err


class Shell:
    """Runs ``jgraph …`` with a home of its own."""

    def __init__(self, home: Path) -> None:
        inherited = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
        self.environment = {**inherited, "JGRAPH_HOME": str(home)}
        self.token = home / "token"
        self.command = [sys.executable, "-c", "from jgraph.cli import main; main()"]

    def __call__(
        self, *args: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.command, *args],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def here(
        self, capsys: pytest.CaptureFixture[str], *args: str
    ) -> subprocess.CompletedProcess[str]:
        """The same in this process, which need not import everything again."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JGRAPH_HOME", self.environment["JGRAPH_HOME"])
            patch.delenv("JGRAPH_TOKEN_FILE", raising=False)
            code, out, err = run(capsys, *args)
        return subprocess.CompletedProcess(args, code, out, err)

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *args],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
