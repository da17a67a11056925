"""Peers in environments of their own, told to run steps over a pipe."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TextIO, final

import numpy as np

from benchmarks import measure

ROOT = Path(__file__).resolve().parent.parent
# Of each peer: the environment that it runs in (`make peers-…`), and its name.
PEERS = {
    "tensorflow_ps": ("tensorflow", "TensorFlow's ps"),
    "tensorflow_strategy": ("tensorflow", "TensorFlow's ParameterServerStrategy"),
    "ray_ps": ("ray", "Ray's actors"),
    "torch_ddp": ("torch", "PyTorch's DDP (gloo)"),
}


def python(peer: str) -> Path:
    """Returns the interpreter that has the peer installed, or would have."""
    return ROOT / f".venv-peers-{PEERS[peer][0]}" / "bin" / "python"


def installed() -> list[str]:
    """Returns the peers that ``make peers`` has installed."""
    return [peer for peer in PEERS if python(peer).exists()]


@final
class Peer:
    """A peer's cluster, started; its first workers run steps when asked.

    Args:
      module: the peer, in ``benchmarks.peers``.
      arguments: what it shall do.

    Raises:
      RuntimeError: it ended; what it said is on standard error.
    """

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        if module not in installed():
            raise RuntimeError(
                f"{module} is not installed; type: make peers-{PEERS[module][0]}"
            )
        command = [str(python(module)), "-m", f"benchmarks.peers.{module}", "--serve"]
        self._process = subprocess.Popen(
            [*command, *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.about: dict[str, Any] = self._hear()
        except BaseException:
            self.close()
            raise

    def run(self, workers: int, steps: int) -> measure.Times:
        """Runs ``steps`` steps on each of the first ``workers`` workers."""
        orders = _open(self._process.stdin)
        orders.write(json.dumps({"workers": workers, "steps": steps}) + "\n")
        orders.flush()
        return [np.asarray(seconds) for seconds in self._hear()]

    def peaks(self) -> dict[str, float]:
        """Returns the peak memory of each task, in MB."""
        tasks = self.about["tasks"]
        return {task: measure.peak_mb(pid) for task, pid in tasks.items()}

    def close(self) -> None:
        """Ends its processes: they watch their input."""
        _open(self._process.stdin).close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            pass  # it has been measured: how it ends is its own affair
        finally:
            self._process.kill()
            self._process.wait()
            _open(self._process.stdout).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _hear(self) -> Any:
        line = _open(self._process.stdout).readline()
        if not line:
            raise RuntimeError("the peer ended; see above")
        return json.loads(line)


def _open(pipe: Any) -> TextIO:
    assert pipe is not None  # asked for
    stream: TextIO = pipe
    return stream
