"""The second leg of the tests: the newest other Python of this machine.

The first leg runs on the default Python. This one makes ``.venv-newest`` from the
newest other Python (3.11 or later), with the newest JAX that this Python gets, and runs
the tests that depend on them most. Where there is no other it says so and succeeds.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-newest"
STAMP = VENV / "installed.stamp"
OLDEST = (3, 11)
LIMIT_S = 600
TESTS = ["tests/graph", "tests/plan", "tests/test_public.py", "tests/test_smoke.py"]
# What these decide is arithmetic on plans that the others have made, or one optimizer
# of Optax after the other, of which the others have a dozen.
WITHOUT = [
    "auto",
    "lowering/test_row_blocks.py",
    "partition/test_overlap.py",
    "test_schedule.py",
    "test_shard_optax.py",
]
PROBE = (
    "import sys, sysconfig as c; v = sys.version_info; print(sys.implementation.name,"
    " v.releaselevel, bool(c.get_config_var('Py_GIL_DISABLED')), v.major, v.minor)"
)


def candidates() -> Iterator[Path]:
    """Every ``python3.N`` on the PATH, and those that pyenv keeps off it."""
    folders = [Path(entry) for entry in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"))
    for folder in folders:
        yield from (
            path
            for path in sorted(folder.glob("python3.*"))
            if re.fullmatch(r"python3\.\d+", path.name) and os.access(path, os.X_OK)
        )


def version_of(python: Path) -> tuple[int, int] | None:
    """The version of a usable interpreter: final, CPython, with a GIL, with venv."""
    command = [str(python), "-c", PROBE + "; import ensurepip, venv"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None  # a shim of pyenv for a version that is not selected, for example
    if told[:3] != ["cpython", "final", "False"]:
        return None
    return int(told[3]), int(told[4])


def others() -> list[tuple[tuple[int, int], Path]]:
    """Other Pythons than this one, the newest first."""
    found: dict[tuple[int, int], Path] = {}
    for python in candidates():
        version = version_of(python)
        if version and version >= OLDEST and version != sys.version_info[:2]:
            found.setdefault(version, python)
    return sorted(found.items(), reverse=True)


def say(text: str) -> None:
    print(f"second Python: {text}", flush=True)


def install(python: Path) -> bool:
    """Makes the environment, unless the one that is there is of now."""
    text = f"{python}\n{(ROOT / 'pyproject.toml').read_text(encoding='utf-8')}"
    if STAMP.exists() and STAMP.read_text(encoding="utf-8") == text:
        return True
    shutil.rmtree(VENV, ignore_errors=True)
    pip = [str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    for command in (
        [str(python), "-m", "venv", str(VENV)],
        [*pip, "install", "--quiet", "--no-compile", "-e", f"{ROOT}[test]"],
    ):
        if subprocess.run(command, check=False, timeout=LIMIT_S).returncode:
            return False
    STAMP.write_text(text, encoding="utf-8")
    return True


def main() -> int:
    found = others()
    if not found:
        say("skipped, this machine has no other Python from 3.11 on")
        return 0
    for version, python in found:
        name = ".".join(map(str, version))
        say(f"{name}, installing into {VENV.name}")
        if install(python):
            break
        # A Python newer than the newest wheels is no fault of ours; try the one before.
        say(f"the packages cannot be installed for {name}")
    else:
        say("failed, no other Python could be given the packages")
        return 1
    versions = "import jax; print('second Python: jax', jax.__version__, flush=True)"
    subprocess.run([VENV / "bin/python", "-c", versions], check=True, timeout=LIMIT_S)
    env = os.environ | {"HYPOTHESIS_PROFILE": "ci"}
    # Nothing here waits, so that there is a worker for each core and no more.
    parallel = ["-n", str(os.cpu_count() or 1), "--dist", "worksteal"]
    chosen = [*TESTS, *(f"--ignore=tests/plan/{path}" for path in WITHOUT)]
    tests = [str(VENV / "bin/python"), "-m", "pytest", *parallel, *chosen]
    tests += ["-m", "not nightly and not chaos"]
    return subprocess.run(
        tests, cwd=ROOT, env=env, check=False, timeout=LIMIT_S
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
