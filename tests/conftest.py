"""Settings that hold for every test; made before JAX starts.

Environment variables are only defaults: what the caller sets wins, so that a test run
can be pointed at an accelerator (``JAX_PLATFORMS=cuda pytest -m gpu``).
"""

import atexit
import gc
import hashlib
import os
import platform
import shutil
import tempfile
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
# Most of the time of a test is XLA's, for code that runs once. These take a fifth of
# XLA's time: less is optimised, a module stays in one piece, and fusions, the same ones
# (D13), are written without MLIR, which later versions cannot. Children inherit them.
if os.environ["JAX_PLATFORMS"] == "cpu":
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

# Servers and clients of the tests share a token; not the user's own.
if "JGRAPH_HOME" not in os.environ:
    os.environ["JGRAPH_HOME"] = tempfile.mkdtemp(prefix="jgraph-tests-")
    atexit.register(shutil.rmtree, os.environ["JGRAPH_HOME"], ignore_errors=True)

from collections.abc import Generator, Iterator
from datetime import datetime
from pathlib import Path

import jax
import pytest
from hypothesis import settings

from tests.support.covering import covering
from tests.support.leaks import Leaks
from tests.support.left import nothing_left
from tests.support.stacks import told_when_late

settings.register_profile("dev", max_examples=25, deadline=None, print_blob=True)
# The same few examples in each run; others come in each night.
settings.register_profile(
    "ci", max_examples=12, deadline=None, print_blob=True, derandomize=True
)
settings.register_profile("nightly", max_examples=100, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# JAX and the tests make a million objects that stay: looking at them for garbage again
# and again is a tenth of the time. What is there once tests are collected is let be,
# and of what comes later, a hundred times as much as usual is waited for.
gc.disable()


SCREEN = pytest.StashKey[int]()
"""The standard error that tests do not have, of whoever started this process."""


def this_cpu() -> str:
    """Tells CPUs apart for which XLA makes other code."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else platform.processor()
    known = sorted({line for line in text.splitlines() if line.startswith("flags")})
    return hashlib.sha256("".join(known or [text]).encode()).hexdigest()[:12]


def forget_unused(compiled: Path, days: int = 7) -> None:
    """Removes what no run of the tests has read for so long."""
    longest_ago = datetime.now().timestamp() - days * 24 * 3600
    for entry in compiled.iterdir():
        if entry.stat().st_atime < longest_ago:
            entry.unlink(missing_ok=True)


def pytest_configure(config: pytest.Config) -> None:
    """Keeps what XLA compiles, for other workers of pytest and for the next run.

    A fifth of the time of a second run, and a twentieth of a first one: tests of one
    model compile the same programs. An entry that a worker is still writing, or was
    killed while writing, cannot be read: it is compiled, and the warning is ignored.
    Processes that tests start compile as those of users do.
    """
    config.stash[SCREEN] = os.dup(2)  # nothing is captured yet
    cache = getattr(config, "cache", None)
    if cache is None or os.environ["JAX_PLATFORMS"] != "cpu":
        return
    compiled = Path(cache.mkdir(f"compiled-{this_cpu()}"))
    if not hasattr(config, "workerinput"):  # before there are others that read
        forget_unused(compiled)
    jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write golden files from what the code gives now; then read the diff",
    )
    for option, table in (("--row", "faults"), ("--bad-input-row", "bad inputs")):
        parser.addoption(
            option,
            action="append",
            type=int,
            default=[],
            metavar="NUMBER",
            help=f"run the tests of this row of the {table} in docs/reliability.md",
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores: one waits for processes while the others compute."""
    return (os.cpu_count() or 1) + 1


def _select_rows(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what carries no marker of the rows that were asked for, if any were."""
    asked = {name: config.getoption(name) for name in ("row", "bad_input_row")}
    if not any(asked.values()):
        return
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        shown = any(
            set(mark.args) & set(numbers)
            for name, numbers in asked.items()
            for mark in item.iter_markers(name)
        )
        (kept if shown else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def _leave_combinations_to_the_night(items: list[pytest.Item]) -> None:
    """Marks variants of tests that are ``combined`` as nightly, most of them.

    Those that stay have each value of each parameter at least once.
    """
    variants: dict[str, list[pytest.Function]] = {}
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        is_one = "combined" in markers and markers.isdisjoint({"nightly", "chaos"})
        if is_one and isinstance(item, pytest.Function):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_one in variants.values():
        # Each variant has the same objects: a value need not be hashable.
        by_day = covering(
            [{(k, id(v)) for k, v in item.callspec.params.items()} for item in of_one]
        )
        for place in set(range(len(of_one))) - by_day:
            of_one[place].add_marker("nightly")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Puts what takes long first, so that no worker has it left at the end.

    Tests with processes of their own are then one worker's, which waits much, while the
    other computes; two of them at once would slow each other down.
    """
    _leave_combinations_to_the_night(items)  # before markers are chosen by
    yield
    _select_rows(config, items)
    first = ("procs", "slow")
    items.sort(key=lambda item: [not item.get_closest_marker(name) for name in first])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(70_000, 10, 10)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Says where a test is that is about to be ended for want of time."""
    marker = item.get_closest_marker("timeout")
    options = item.config.getoption("timeout"), item.config.getini("timeout")
    limit = marker.args[0] if marker else next(filter(None, options))
    with told_when_late(item.nodeid, float(limit), item.config.stash[SCREEN]):
        return (yield)


LEAKS = Leaks()
LEAKS.watch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fails a test that left a token or a private key in a log or on the screen."""
    report = yield
    LEAKS.look(report.sections)
    path = getattr(item, "funcargs", {}).get("tmp_path")
    if path is not None and report.when == "teardown":
        LEAKS.look_into(path)
    if told := LEAKS.told():
        report.outcome, report.longrepr = "failed", told
    return report


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--rewrite"))


@pytest.fixture(scope="module")
def little_garbage() -> None:
    """For a file whose tests collect garbage: of what was there before, none is theirs.

    JAX has hundreds of thousands of objects by then, at which each collection would
    look: a second, after all the tests of before.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For a file whose tests begin processes, servers or threads: when they ended."""
    with nothing_left(tmp_path_factory.mktemp("left") / "temporary"):
        yield
