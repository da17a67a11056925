"""A model server beside Seldon's: CPU of the server for a request of a small MLP.

``python -m benchmarks.serving_peer``: 16 callers, a row each, by gRPC and by REST with
JSON, in turns with mlserver in an environment of its own (``make peers-mlserver``). Its
model is of NumPy, and computes in its process, as ours does in its own.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import numpy as np
import psutil

from benchmarks import measure
from benchmarks.peer_process import ROOT
from jgraph.serving._pb import inference_pb2 as pb

PROGRAM: Final = ROOT / ".venv-peers-mlserver" / "bin" / "mlserver"
MODEL: Final = "small"
WIDTH: Final = 16
CALLERS: Final = 16
START_S: Final = 120.0
INFER: Final = "/inference.GRPCInferenceService/ModelInfer"


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    a = parser.parse_args(args)
    if not PROGRAM.exists():
        sys.exit("needs mlserver in an environment of its own: make peers-mlserver")
    with tempfile.TemporaryDirectory() as directory:
        beside(Path(directory), a.seconds, a.rounds)


def beside(directory: Path, seconds: float, rounds: int) -> dict[str, float]:
    """Returns the share of mlserver's CPU for a request that ours takes, by way."""
    shares = {}
    with ours(directory / "models") as own, theirs(directory / "peer") as other:
        for way, cpu in (("grpc", cpu_by_grpc), ("rest", cpu_by_rest)):
            found = measure.take_turns(
                {
                    "serving": partial(cpu, own, seconds),
                    "mlserver": partial(cpu, other, seconds),
                },
                rounds,
            )
            told = measure.ratio("ratio", found["serving"], found["mlserver"])
            us = {
                f"{name}_cpu_us": round(float(np.median(one)) * 1e6)
                for name, one in found.items()
            }
            measure.emit("serving", what="peer", way=way, clients=CALLERS, **told, **us)
            shares[way] = told["ratio"]
    return shares


class Server:
    """A server that answers.

    Attributes:
      pid: of its process.
      grpc: its address.
      url: of REST.
      token: that it asks for, or nothing.
    """

    def __init__(self, pid: int, grpc: str, url: str, token: str = "") -> None:
        self.pid, self.grpc, self.url, self.token = pid, grpc, url, token

    def cpu_s(self) -> float:
        """CPU seconds so far."""
        process = psutil.Process(self.pid)
        return float(sum(process.cpu_times()[:2]))


@contextmanager
def ours(models: Path) -> Iterator[Server]:
    """``jgraph serve``."""
    from benchmarks.serving import mlp

    mlp(models, MODEL, width=WIDTH, layers=2)
    ports = ["--grpc-port", "0", "--http-port", "0", "--drain-s", "0", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "jgraph", "serve", str(models), *ports],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            token = Path(facts["token_file"]).read_text(encoding="ascii").strip()
            yield Server(process.pid, facts["grpc"], facts["http"], token)
        finally:
            process.terminate()


@contextmanager
def theirs(directory: Path) -> Iterator[Server]:
    """mlserver, without worker processes."""
    from tests.support.free_port import free_port

    directory.mkdir(parents=True)
    http, rpc, metrics = free_port(), free_port(), free_port()
    settings = {
        "host": "127.0.0.1",
        "http_port": http,
        "grpc_port": rpc,
        "metrics_port": metrics,
        "parallel_workers": 0,
        "debug": False,
    }
    model = {"name": MODEL, "implementation": "mlserver_model.Mlp"}
    (directory / "settings.json").write_text(json.dumps(settings))
    (directory / "model-settings.json").write_text(json.dumps(model))
    code = Path(__file__).parent / "peers" / "mlserver_model.py"
    (directory / code.name).write_text(code.read_text("utf-8"), "utf-8")
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [str(PROGRAM), "start", "."], cwd=directory, stdout=log, stderr=log
        )
    try:
        url = f"http://127.0.0.1:{http}"
        _wait(f"{url}/v2/models/{MODEL}/ready", process)
        yield Server(process.pid, f"127.0.0.1:{rpc}", url)
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError("mlserver does not answer")


def cpu_by_grpc(server: Server, seconds: float) -> float:
    """CPU seconds of a request by gRPC with raw tensors."""
    request = pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="x", datatype="FP32", shape=[1, WIDTH])
    request.raw_input_contents.append(np.zeros(WIDTH, np.float32).tobytes())
    data = request.SerializeToString()
    metadata = (("authorization", f"Bearer {server.token}"),) if server.token else ()

    async def asked() -> float:
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            method = channel.unary_unary(INFER, None, None)
            ask: Callable[[], Awaitable[Any]] = lambda: method(
                data, metadata=metadata, timeout=60
            )
            return await _cpu_of(server, ask, seconds)

    return asyncio.run(asked())


def cpu_by_rest(server: Server, seconds: float) -> float:
    """CPU seconds of a request by REST with JSON."""
    x = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [0.0] * WIDTH}
    headers = {"Authorization": f"Bearer {server.token}"} if server.token else {}

    async def asked() -> float:
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:

            async def ask() -> None:
                url = f"{server.url}/v2/models/{MODEL}/infer"
                answer = await client.post(url, json={"inputs": [x]})
                answer.raise_for_status()

            return await _cpu_of(server, ask, seconds)

    return asyncio.run(asked())


async def _cpu_of(
    server: Server, ask: Callable[[], Awaitable[Any]], seconds: float
) -> float:
    count = 0

    async def asking(end: float) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await ask()
            count += 1

    for _ in range(20):
        await ask()
    began = server.cpu_s()
    end = time.perf_counter() + seconds
    await asyncio.gather(*(asking(end) for _ in range(CALLERS)))
    return (server.cpu_s() - began) / count


if __name__ == "__main__":
    main()
