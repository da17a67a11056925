"""A model server beside a bare gRPC echo: ``python -m benchmarks.serving``.

Server and callers are processes of their own; callers ask again as soon as they are
answered. What is compared takes turns. ``--rows``: the rows of the table of figures
that there are: requests of an empty model against an echo of the same bytes (1), CPU
of the server beside mlserver's where that is installed (2, see ``serving_peer``), rows
computed together against one by one on a model of 1 ms and on a small one (3), p99 and
failed requests while versions come, against before (4), seconds from the commit of a
version of 100 MB to its first answer (5), answers from parameters in training (6 and 7,
see ``serving_live``), and from nothing to the first answer of a small model (8).
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
import jax.numpy as jnp
import numpy as np
import psutil

import jgraph as jg
from benchmarks import measure, serving_live, serving_peer
from benchmarks.peer_process import ROOT
from jgraph.serving._pb import inference_pb2 as pb

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
ECHO: Final = "/echo/Echo"
WIDE: Final = 1024


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--rows", action="store_true", help="print the table's rows")
    parser.add_argument("--echo", action="store_true", help="used inside")
    a = parser.parse_args(args)
    if a.echo:
        asyncio.run(echo())
        return
    with tempfile.TemporaryDirectory() as directory:
        models = Path(directory)
        rates = noop_and_batching(models / "rates", a)
        rolled = swap(models / "swap", a)
        loaded_s = large(models / "large", a)
        live = serving_live.live(a)
        peer: dict[str, float] = {}
        if serving_peer.PROGRAM.exists():
            peer = serving_peer.beside(Path(directory) / "beside", a.seconds, a.rounds)
    if not a.rows:
        return
    measure.emit_row(1, rates["noop"], "x")
    if peer:
        measure.emit_row(2, [peer["grpc"], peer["rest"]], "x")
    measure.emit_row(3, rates["batched"], "x")
    measure.emit_row(4, [rolled["p99_ratio"], rolled["failed"]], "x, requests")
    measure.emit_row(5, loaded_s, "s")
    measure.emit_row(6, [*live["p50_ms"], live["kept"]], "ms, x")
    measure.emit_row(7, [live["row"], live["dense"]], "s")
    measure.emit_row(8, rates["cold_s"], "s")


def mlp(models: Path, name: str, *, width: int, layers: int, options: str = "") -> None:
    """Exports a model of so many layers."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((layers, width, width)).astype(np.float32) / width**0.5

    def fn(w: Any, x: Any) -> Any:
        for layer in range(layers):
            x = jnp.tanh(x @ w[layer])
        return x[:, :16]

    x = np.zeros((1, width), np.float32)
    jg.export(fn, x, models / name, params=w, rtol=1e-4)
    if options:
        (models / name / "model.toml").write_text(options)


def noop_and_batching(models: Path, a: Any) -> dict[str, Any]:
    """Rates of an empty model, and of models whose rows are computed together."""
    alone = "[batching]\nmax_rows = 1\n"
    jg.export(lambda x: x + 0, np.zeros((1, 16), np.float32), models / "noop")
    for name, width, layers in (("small", 16, 2), ("large", WIDE, 2)):
        mlp(models, name, width=width, layers=layers)
        mlp(models, f"{name}_alone", width=width, layers=layers, options=alone)
    mlp(models.with_name("cold"), "small", width=16, layers=2)
    cold = [cold_start(models.with_name("cold")) for _ in range(a.rounds)]
    told = measure.spread("s", cold, 2)
    measure.emit("serving", what="cold start", **told)
    cold_s = told["s"]
    with served(models) as server, echoing() as port:
        ratios = []
        for clients in (1, 16):
            noop = calls(f"127.0.0.1:{server.grpc_port}", server, "noop", 16)
            bare = calls(f"127.0.0.1:{port}", None, "noop", 16)
            ways = {
                "serving": partial(rate, noop, clients, a.seconds),
                "echo": partial(rate, bare, clients, a.seconds),
            }
            found = measure.take_turns(ways, a.rounds)
            told = measure.ratio("ratio", found["serving"], found["echo"])
            measure.emit(
                "serving",
                what="noop",
                clients=clients,
                **told,
                **measure.spread("per_s", found["serving"]),
                **measure.spread("echo_per_s", found["echo"]),
            )
            ratios.append(told["ratio"])
        batched = [batching(server, name, a) for name in ("large", "small")]
    return {"cold_s": cold_s, "noop": ratios, "batched": batched}


def cold_start(models: Path) -> float:
    """Seconds from the start of a process until it has answered the first request."""
    began = time.perf_counter()
    with served(models) as server:
        call = calls(f"127.0.0.1:{server.grpc_port}", server, "small", 16)
        asyncio.run(latencies(call, 1, 0.0))
        return time.perf_counter() - began


def batching(server: Any, name: str, a: Any) -> float:
    """How much faster 64 callers are answered together than one by one."""
    width = WIDE if name == "large" else 16
    target = f"127.0.0.1:{server.grpc_port}"
    ways = {
        one: partial(rate, calls(target, server, one, width), 64, a.seconds)
        for one in (name, f"{name}_alone")
    }
    found = measure.take_turns(ways, a.rounds)
    told = measure.ratio("ratio", found[name], found[f"{name}_alone"])
    together = measure.spread("per_s", found[name])
    measure.emit("serving", what="batching", model=name, clients=64, **told, **together)
    return told["ratio"]


def swap(models: Path, a: Any) -> dict[str, Any]:
    """The 99th percentile while new weights come, against before; failed requests.

    They are exported beforehand, and renamed into the directory: an export takes one of
    the cores, wherever it is made.
    """
    drafts = models.with_name("drafts")
    for _ in range(a.versions + 1):
        mlp(drafts, "m", width=64, layers=2)
    (models / "m").mkdir(parents=True)

    def commit(number: int) -> None:
        (drafts / "m" / f"{number}").rename(models / "m" / f"{number}")

    commit(1)
    with served(models) as server:
        call = calls(f"127.0.0.1:{server.grpc_port}", server, "m", 64)
        before = asyncio.run(latencies(call, 4, a.seconds * a.versions))

        async def rolling() -> list[float]:
            asked = asyncio.create_task(latencies(call, 4, a.seconds * a.versions))
            for number in range(a.versions):
                commit(number + 2)
                await asyncio.sleep(a.seconds * 0.9)
            return await asked

        during = asyncio.run(rolling())
    p99 = [float(np.percentile(one, 99)) for one in (before, during)]
    told = {"p99_ratio": round(p99[1] / p99[0], 2), "failed": 0}
    ms = {"before_p99_ms": round(p99[0] * 1e3, 2), "p99_ms": round(p99[1] * 1e3, 2)}
    count = len(during)
    measure.emit("serving", what="swap", versions=a.versions, asked=count, **told, **ms)
    return told


def large(models: Path, a: Any) -> float:
    """Seconds from the commit of a large version to its answer; memory beside."""
    rows = a.megabytes * 1_000_000 // 4 // 100

    def export(value: float) -> None:
        w = np.full((rows, 100), value, np.float32)
        x = np.zeros((1, 1), np.float32)
        jg.export(lambda w, x: x + w[0, :1], x, models / "big", params=w)

    export(1)
    with jg.serve(models, http_port=None, watch_s=3600) as server:
        process = psutil.Process()
        server.predict("big", np.zeros((1, 1), np.float32))
        export(2)
        began, held = time.perf_counter(), process.memory_info().rss
        server.refresh()
        took = round(time.perf_counter() - began, 3)
        found = server.predict("big", np.zeros((1, 1), np.float32))["y"]
        if found[0, 0] != 2:
            raise RuntimeError(f"the new version does not answer: {found}")
        more = round((process.memory_info().rss - held) / 1e6)
    measure.emit("serving", what="large", megabytes=a.megabytes, s=took, more_mb=more)
    return took


def calls(
    target: str, server: Any, model: str, width: int
) -> Callable[[], tuple[grpc.aio.Channel, Callable[[], Awaitable[Any]]]]:
    """Returns what makes a channel, and a call that asks with one row."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, width])
    request.raw_input_contents.append(np.zeros(width, np.float32).tobytes())
    data = request.SerializeToString()

    def made() -> tuple[grpc.aio.Channel, Callable[[], Awaitable[Any]]]:
        channel = grpc.aio.insecure_channel(target)
        method = channel.unary_unary(ECHO if server is None else INFER, None, None)
        metadata = () if server is None else server.metadata
        return channel, lambda: method(data, metadata=metadata, timeout=60)

    return made


def rate(made: Any, clients: int, seconds: float) -> float:
    """Requests per second."""
    return len(asyncio.run(latencies(made, clients, seconds))) / seconds


async def latencies(made: Any, clients: int, seconds: float) -> list[float]:
    """Seconds of each request of callers that ask again at once; all are answered."""
    channel, ask = made()
    took: list[float] = []

    async def asking(end: float) -> None:
        while (began := time.perf_counter()) < end:
            await ask()
            took.append(time.perf_counter() - began)

    await ask()
    end = time.perf_counter() + seconds
    await asyncio.gather(*(asking(end) for _ in range(clients)))
    await channel.close()
    return took


class Served:
    """A server in a process of its own.

    Attributes:
      grpc_port: where it listens.
      metadata: what shows its token.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.grpc_port = int(facts["grpc"].rpartition(":")[2])
        token = Path(facts["token_file"]).read_text(encoding="ascii").strip()
        self.metadata = (("authorization", f"Bearer {token}"),)


@contextmanager
def served(models: Path) -> Iterator[Served]:
    """A server of models, that looks for new versions all the time."""
    ports = ["--grpc-port", "0", "--http-port", "-1", "--drain-s", "0"]
    more = ["--watch-s", "0.2", "--json"]
    words = ["-m", "jgraph", "serve", str(models), *ports, *more]
    with spawned(words) as line:
        yield Served(json.loads(line))


@contextmanager
def echoing() -> Iterator[int]:
    """A bare server that gives back the bytes that it gets."""
    with spawned(["-m", "benchmarks.serving", "--echo"]) as line:
        yield int(line)


@contextmanager
def spawned(words: Sequence[str]) -> Iterator[str]:
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline()
        finally:
            process.terminate()


async def echo() -> None:
    """Serves until it is ended."""

    async def back(request: bytes, _: Any) -> bytes:
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(back)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("echo", {"Echo": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    main()
