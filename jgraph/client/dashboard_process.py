"""Dashboard process: ``jgraph dashboard``, for as long as its client lives."""

import json
import os
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, final

from jgraph.errors import (
    ClusterUnreachableError,
    ConfigError,
    JGError,
    JournalError,
    PortInUseError,
    StartError,
)
from jgraph.errors.tracebacks import short_traceback
from jgraph.loading import module_command
from jgraph.view import markup

_START_S: Final = 60.0
_END_S: Final = 10.0
_OUTPUT: Final = 4000


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """A page in a notebook.

    Attributes:
      url: of the page.
      height: of the frame, in pixels.
    """

    url: str
    height: int

    def _repr_html_(self) -> str:
        return markup.frame(self.url, self.height)


@final
class Dashboard:
    """A page that shows a cluster, served by a process of its own.

    It ends with ``close()``, and whenever this process ends, however it ends.

    Args:
      options: of ``jgraph dashboard``, the address among them.

    Attributes:
      url: of the page, with its token; it lets nobody run anything.

    Raises:
      ConfigError, JournalError, PortInUseError, StartError: it could not be started;
        says why.
    """

    @short_traceback
    def __init__(self, options: Sequence[str]) -> None:
        command = [*module_command("jgraph"), "dashboard", "--attended", "--json"]
        self._process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A page computes nothing, and must take no accelerator from a worker.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C in our terminal is for us alone
        )
        assert self._process.stdout is not None  # a pipe
        # Read all the time: what it says must not fill the pipe.
        self._output = ""
        self._listening = threading.Thread(
            target=self._listen, name="jgraph-said", daemon=True
        )
        self._listening.start()
        timer = threading.Timer(_START_S, self._process.kill)
        timer.start()
        said = iter(self._process.stdout.readline, "")
        try:  # Python itself may say something first: a sitecustomize of this machine
            line = next((line for line in said if line.startswith("{")), "")
        except BaseException:  # Ctrl-C
            self.close()
            raise
        finally:
            timer.cancel()
        if not line:
            self.close()
            raise _why(self._output.strip())
        self.url: str = json.loads(line)["url"]

    def _listen(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None  # a pipe
        with stderr:
            for line in stderr:
                self._output = (self._output + line)[-_OUTPUT:]

    def close(self) -> None:
        """Ends the process; the cluster goes on."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listening.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def show(self, height: int = 600) -> "Frame":
        """Returns the page in a frame, for the end of a notebook's cell.

        Browsers show it where ``embed_origins`` has the origin of the notebook.
        """
        return Frame(self.url, height)

    def __repr__(self) -> str:
        if self._process.poll() is not None:
            return "<Dashboard closed>"
        return f"<Dashboard {self.url}>"

    def _repr_html_(self) -> str:
        if self._process.poll() is not None:
            return markup.lines(repr(self))
        return markup.link(self.url, "the dashboard of this cluster")


def _why(output: str) -> JGError:
    """Returns the error that a process ended with."""
    code, _, text = output.partition(" ")
    kinds = (ConfigError, ClusterUnreachableError, JournalError, PortInUseError)
    for kind in kinds:
        if code == kind.code:
            return kind(text)
    return StartError(f"the dashboard did not start: {output or 'it was too slow'}")
