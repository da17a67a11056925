"""Settings that hold for every test; made before JAX starts.

Environment variables are only defaults: what the caller sets wins, so that a test run
can be pointed at an accelerator (``JAX_PLATFORMS=cuda pytest -m gpu``).
"""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
# Most of the time of a test is XLA's, for code that runs once; not to optimise it saves
# a fifth of that and more. Child processes inherit this.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    )

# Servers and clients of the tests share a token; not the user's own.
if "JGRAPH_HOME" not in os.environ:
    os.environ["JGRAPH_HOME"] = tempfile.mkdtemp(prefix="jgraph-tests-")
    atexit.register(shutil.rmtree, os.environ["JGRAPH_HOME"], ignore_errors=True)

import pytest
from hypothesis import settings

settings.register_profile("dev", max_examples=25, deadline=None, print_blob=True)
settings.register_profile(
    "ci", max_examples=25, deadline=None, print_blob=True, derandomize=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write golden files from what the code gives now; then read the diff",
    )


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written instead of compared."""
    return bool(request.config.getoption("--rewrite"))
