"""Child of a server for XLA's collectives: begun, told what to sum, and ended.

``jgraph.runtime.group_child`` is what it runs.
"""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, final

from jgraph.loading import module_command

MODULE: Final = "jgraph.runtime.group_child"


@final
class GroupChild:
    """A child process; it is told of on the event loop that begins it.

    Args:
      setup: what it is told first; ``memory`` is the descriptor that it inherits.
      hear: takes each line that it says.
      over: takes why it is over, once, unless it is ended from here.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        hear: Callable[[str], None],
        over: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hear, self._over = hear, over
        self._is_ended = False
        # On the thread of the event loop: the kernel ends the child with that.
        self._process = subprocess.Popen(
            module_command(MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[setup["memory"]],
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            text=True,
        )
        self._say(json.dumps({**setup, "parent": os.getpid()}))
        threading.Thread(
            target=self._read, name="jgraph-group-child", daemon=True
        ).start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def sum(self, version: int) -> None:
        """Lets it sum what lies in the memory."""
        self._say(f"sum {version}")

    def end(self) -> None:
        """Ends it, however it stands; nothing more is told.

        Who ends it does not wait: its memory, and on a GPU its driver, may take seconds
        to be given back, in which the event loop has others to serve. What it has
        begun to write it may still write.
        """
        self._is_ended = True
        self._process.kill()
        if self._process.stdin is not None:
            with suppress(OSError):  # what was not read
                self._process.stdin.close()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it is over, and will be told of
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._tell(self._hear, line.strip())
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._tell(self._over, f"its child ended ({how})")

    def _tell(self, take: Callable[[str], None], text: str) -> None:
        def told() -> None:
            if not self._is_ended:
                take(text)

        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(told)
