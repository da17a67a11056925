"""A model server beside a bare gRPC echo: ``python -m benchmarks.serving``.

Server and callers are processes of their own; callers ask again as soon as they are
answered. What is compared takes turns. ``--rows`` prints the rows of the table of
figures, ``--only 1 4`` those of these numbers:

1. requests of an empty model against an echo of the same bytes, 1 and 16 callers;
2. CPU of the server beside mlserver's, by gRPC and REST (see ``serving_peer``);
3. rows computed together against one by one, a model of 1 ms at least, and a small one;
4. p99 while versions come against before, of the same architecture and of others, and
   failed requests of all;
5. seconds from the commit of a version of 100 MB until it is ready, found by looking
   every 0.2 s, and seconds of reading its files alone;
6. and 7. answers from parameters in training (see ``serving_live``);
8. seconds from nothing to the first answer of a small model; memory for each further
   version of 100 MB beside its arrays, of the same architecture and of others.
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

import jgraph as jg
from benchmarks import measure, serving_live, serving_peer
from benchmarks.peer_process import ROOT
from jgraph.cluster.polling import Polling
from jgraph.serving._pb import inference_pb2 as pb
from jgraph.serving.exported_model import ExportedModel

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
READY: Final = "/inference.GRPCInferenceService/ModelReady"
ECHO: Final = "/echo/Echo"
MEMORY_VERSIONS: Final = 3
"""Further ones, at each of which memory is looked at."""
WIDE: Final = 1024


def main(args: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100_000, help="while they come")
    parser.add_argument("--rows", action="store_true", help="print the table's rows")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="ROW")
    parser.add_argument("--echo", action="store_true", help="used inside")
    a = parser.parse_args(args)
    if a.echo:
        asyncio.run(echo())
        return
    live: dict[str, Any] = {}
    table: list[tuple[Callable[[Path], Any], str]] = [
        (lambda path: noop(path, a), "x"),
        (lambda path: beside(path, a), "x"),
        (lambda path: batchings(path, a), "x"),
        (lambda path: swaps(path, a), "x, requests"),
        (lambda path: large(path, a), "s"),
        (lambda _: answers_in_training(live, a), "ms, x"),
        (lambda _: freshness(live, a), "s"),
        (lambda path: start_and_memory(path, a), "s, x"),
    ]
    rows = []
    for number, (figures, unit) in enumerate(table, 1):
        if a.only and number not in a.only:
            continue
        with tempfile.TemporaryDirectory() as directory:
            rows.append((number, figures(Path(directory)), unit))
    for number, value, unit in rows if a.rows else ():
        why = {} if value is not None else {"failed": ["make peers-mlserver first"]}
        measure.emit_row(number, value, unit, **why)


def beside(directory: Path, a: Any) -> list[float] | None:
    """The share of mlserver's CPU that a request takes; None: it is not installed."""
    if not serving_peer.PROGRAM.exists():
        return None
    shares = serving_peer.beside(directory, a.seconds, a.rounds)
    return [shares["grpc"], shares["rest"]]


def answers_in_training(live: dict[str, Any], a: Any) -> list[float]:
    """Milliseconds of answers from parameters in training, and what training keeps."""
    live |= serving_live.live(a)
    return [*live["p50_ms"], live["kept"]]


def freshness(live: dict[str, Any], a: Any) -> list[float]:
    """Seconds until an update is in an answer: of a row, of a dense parameter."""
    if not live:
        live |= serving_live.live(a)
    return [live["row"], live["dense"]]


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


def noop(models: Path, a: Any) -> list[float]:
    """Rates of an empty model beside those of an echo, for 1 and for 16 callers."""
    jg.export(lambda x: x + 0, np.zeros((1, 16), np.float32), models / "noop")
    ratios = []
    with served(models) as server, echoing() as port:
        for clients in (1, 16):
            empty = calls(f"127.0.0.1:{server.grpc_port}", server, "noop", 16)
            bare = calls(f"127.0.0.1:{port}", server, "noop", 16, method=ECHO)
            ways = {
                "serving": partial(rate, empty, clients, a.seconds),
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
    return ratios


def batchings(models: Path, a: Any) -> list[float]:
    """How much faster rows are answered together than one by one, by model."""
    alone = "[batching]\nmax_rows = 1\n"
    with tempfile.TemporaryDirectory() as drafts:
        layers, row_s = layers_of_a_millisecond(Path(drafts))
    made = {"large": (WIDE, layers), "small": (16, 2)}
    for name, (width, layers) in made.items():
        mlp(models, name, width=width, layers=layers)
        mlp(models, f"{name}_alone", width=width, layers=layers, options=alone)
    ms = {"large": row_s * 1e3, "small": shortest_s(models / "small", 16) * 1e3}
    with served(models) as server:
        return [batching(server, name, a, row_ms=round(ms[name], 3)) for name in made]


def layers_of_a_millisecond(models: Path) -> tuple[int, float]:
    """How many layers make a row of a wide model take as long here; its seconds."""
    for layers in range(2, 64):
        mlp(models, f"of_{layers}", width=WIDE, layers=layers)
        if (row_s := shortest_s(models / f"of_{layers}", WIDE)) >= 1e-3:
            return layers, row_s
    raise RuntimeError("64 layers take less than a millisecond")


def shortest_s(model: Path, width: int) -> float:
    """Seconds of the shortest of many answers for a row."""
    exported, x = ExportedModel(model), np.zeros((1, width), np.float32)
    exported.predict(x)
    took = []
    for _ in range(500):
        began = time.perf_counter()
        exported.predict(x)
        took.append(time.perf_counter() - began)
    return min(took)


def start_and_memory(directory: Path, a: Any) -> list[float]:
    """Seconds to the first answer; memory of a further version beside its arrays."""
    mlp(directory / "cold", "small", width=16, layers=2)
    cold = [cold_start(directory / "cold") for _ in range(a.rounds)]
    told = measure.spread("s", cold, 2)
    measure.emit("serving", what="cold start", **told)
    kinds = {"same": False, "another": True}
    shares = [
        memory(directory / name, a, are_others=are_others)
        for name, are_others in kinds.items()
    ]
    return [told["s"], *shares]


def memory(models: Path, a: Any, *, are_others: bool) -> float:
    """Memory that a server takes for each further version, beside its arrays."""
    rows = a.megabytes * 1_000_000 // 4 // 100
    drafts = models.with_name(f"{models.name} drafts")
    for number in range(MEMORY_VERSIONS + 1):
        w = np.full((rows, 100), number, np.float32)
        fn = wide_sum(1 + number * are_others)
        jg.export(fn, np.zeros((1, 1), np.float32), drafts / "m", params=w)
    (models / "m").mkdir(parents=True)
    (models / "m" / "model.toml").write_text("[versions]\nnewest = 0\n")
    (drafts / "m" / "1").rename(models / "m" / "1")
    held = []
    with served(models) as server:
        for number in range(1, MEMORY_VERSIONS + 2):
            if number > 1:
                (drafts / "m" / f"{number}").rename(models / "m" / f"{number}")
            wait_ready(server, "m", number)
            held.append(measure.share_mb(server.pid))
    # The second version is the first that comes while others are there.
    grown_mb = float(held[-1] - held[0])
    share = float(grown_mb / MEMORY_VERSIONS / (rows * 400 / 1e6))
    told = {"share": round(share, 3), "held_mb": held}
    what = "memory of another" if are_others else "memory of the same"
    measure.emit("serving", what=what, megabytes=a.megabytes, **told)
    return round(share, 3)


def wide_sum(layers: int) -> Callable[[Any, Any], Any]:
    """Returns a model that uses all of its array, of so many operations."""

    def fn(w: Any, x: Any) -> Any:
        for _ in range(layers):
            x = jnp.tanh(x + w[0, :1])
        return x + w[-1, :1]

    return fn


def cold_start(models: Path) -> float:
    """Seconds from the start of a process until it has answered the first request."""
    began = time.perf_counter()
    with served(models) as server:
        call = calls(f"127.0.0.1:{server.grpc_port}", server, "small", 16)
        asyncio.run(latencies(call, 1, 0.0))
        return time.perf_counter() - began


def batching(server: Any, name: str, a: Any, **facts: float) -> float:
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
    measure.emit(
        "serving", what="batching", model=name, clients=64, **facts, **told, **together
    )
    return float(told["ratio"])


def swaps(directory: Path, a: Any) -> list[float]:
    """The 99th percentiles beside before, and how many requests failed."""
    same = swap(directory / "same", a, are_others=False)
    another = swap(directory / "another", a, are_others=True)
    failed = same["failed"] + another["failed"]
    return [same["p99_ratio"], another["p99_ratio"], failed]


def swap(models: Path, a: Any, *, are_others: bool) -> dict[str, Any]:
    """The 99th percentile while versions come, against before; failed requests.

    They are exported beforehand, and renamed into the directory: an export takes one of
    the cores, wherever it is made.
    """
    drafts = models.with_name(f"{models.name} drafts")
    for number in range(a.versions + 1):
        mlp(drafts, "m", width=64, layers=2 + number * are_others)
    (models / "m").mkdir(parents=True)

    def commit(number: int) -> None:
        (drafts / "m" / f"{number}").rename(models / "m" / f"{number}")

    commit(1)
    each = a.requests // 2 // a.versions
    with served(models) as server:
        call = calls(f"127.0.0.1:{server.grpc_port}", server, "m", 64)
        before, failed = asyncio.run(counted(call, 4, each))

        async def rolling() -> tuple[list[float], int]:
            took: list[float] = []
            failed = 0
            for number in range(a.versions):
                asked = asyncio.create_task(counted(call, 4, each))
                await asyncio.sleep(0.1)
                commit(number + 2)
                one, errors = await asked
                took += one
                failed += errors
            return took, failed

        during, errors = asyncio.run(rolling())
        wait_ready(server, "m", a.versions + 1)
    p99 = [float(np.percentile(one, 99)) for one in (before, during)]
    told = {"p99_ratio": round(p99[1] / p99[0], 2), "failed": failed + errors}
    ms = {"before_p99_ms": round(p99[0] * 1e3, 2), "p99_ms": round(p99[1] * 1e3, 2)}
    what = "swap to another" if are_others else "swap to the same"
    count = len(during)
    measure.emit("serving", what=what, versions=a.versions, asked=count, **told, **ms)
    return told


def large(directory: Path, a: Any) -> list[float]:
    """Seconds from the commit of a large version until it is ready; of reading it."""
    rows = a.megabytes * 1_000_000 // 4 // 100
    models, drafts = directory / "models", directory / "drafts"
    for number in range(a.rounds + 1):
        w = np.full((rows, 100), number, np.float32)
        jg.export(wide_sum(1), np.zeros((1, 1), np.float32), drafts / "m", params=w)
    (models / "m").mkdir(parents=True)
    (drafts / "m" / "1").rename(models / "m" / "1")
    took, reading = [], []
    with served(models) as server:
        for number in range(2, a.rounds + 2):
            began = time.perf_counter()
            for file in sorted((drafts / "m" / f"{number}").rglob("*")):
                if file.is_file():
                    file.read_bytes()
            reading.append(time.perf_counter() - began)
            began = time.perf_counter()
            (drafts / "m" / f"{number}").rename(models / "m" / f"{number}")
            wait_ready(server, "m", number)
            took.append(time.perf_counter() - began)
    told = measure.spread("s", took, 3)
    read = measure.spread("reading_s", reading, 3)
    measure.emit("serving", what="large", megabytes=a.megabytes, **told, **read)
    return [told["s"], read["reading_s"]]


def wait_ready(server: "Served", model: str, version: int) -> None:
    """Waits until a version answers."""
    polling = Polling(every_s=0.005, timeout_s=60)
    request = pb.ModelReadyRequest(name=model, version=str(version))
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        method = channel.unary_unary(READY, None, pb.ModelReadyResponse.FromString)
        while True:
            try:
                if method(request.SerializeToString(), timeout=10).ready:
                    return
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    raise
            if not polling.wait():
                raise RuntimeError(f"version {version} of {model} is not ready")


def calls(
    target: str, server: Any, model: str, width: int, *, method: str = INFER
) -> Callable[[], tuple[grpc.aio.Channel, Callable[[], Awaitable[Any]]]]:
    """Returns what makes a channel, and a call that asks with one row."""
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[1, width])
    request.raw_input_contents.append(np.zeros(width, np.float32).tobytes())
    data = request.SerializeToString()

    def made() -> tuple[grpc.aio.Channel, Callable[[], Awaitable[Any]]]:
        channel = grpc.aio.insecure_channel(target)
        ask = channel.unary_unary(method, None, None)
        return channel, lambda: ask(data, metadata=server.metadata, timeout=60)

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


async def counted(made: Any, clients: int, requests: int) -> tuple[list[float], int]:
    """Seconds of so many requests of callers that ask again at once; failed ones."""
    channel, ask = made()
    took: list[float] = []
    failed = 0
    remaining = requests

    async def asking() -> None:
        nonlocal failed, remaining
        while remaining > 0:
            remaining -= 1
            began = time.perf_counter()
            try:
                await ask()
            except grpc.RpcError:
                failed += 1
            took.append(time.perf_counter() - began)

    await ask()
    await asyncio.gather(*(asking() for _ in range(clients)))
    await channel.close()
    return took, failed


class Served:
    """A server in a process of its own.

    Attributes:
      pid: of the process.
      grpc_port: where it listens.
      metadata: what shows its token.
    """

    def __init__(self, facts: dict[str, Any], pid: int) -> None:
        self.pid = pid
        self.grpc_port = int(facts["grpc"].rpartition(":")[2])
        token = Path(facts["token_file"]).read_text(encoding="ascii").strip()
        self.metadata = (("authorization", f"Bearer {token}"),)


@contextmanager
def served(models: Path) -> Iterator[Served]:
    """A server of models, that looks for new versions all the time."""
    ports = ["--grpc-port", "0", "--http-port", "-1", "--drain-s", "0"]
    more = ["--watch-s", "0.2", "--json"]
    words = ["-m", "jgraph", "serve", str(models), *ports, *more]
    with spawned(words) as (line, pid):
        yield Served(json.loads(line), pid)


@contextmanager
def echoing() -> Iterator[int]:
    """A bare server that gives back the bytes that it gets."""
    with spawned(["-m", "benchmarks.serving", "--echo"]) as (line, _):
        yield int(line)


@contextmanager
def spawned(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A process, the line that it printed, and its number."""
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline(), process.pid
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
