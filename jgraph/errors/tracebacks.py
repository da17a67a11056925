"""Tracebacks that show the user's lines and one of ours."""

import functools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Final, ParamSpec, TypeVar

from jgraph.errors.base import InternalError, JGError

FULL: Final = "JGRAPH_TRACEBACKS"
"""Set this variable to ``full`` to see all frames."""
_P = ParamSpec("_P")
_R = TypeVar("_R")


def short_traceback(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes the errors of a public function show where the user is, not where we are.

    Of a ``JGError`` stay the frame of ``fn`` and those of the user's own code further
    in (a traced function, a callback); what caused it is shown if that is the user's.

    An assertion of ours that fails is an ``InternalError`` that says what to report.
    """

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            try:
                return fn(*args, **kwargs)
            except AssertionError as error:
                if not _is_ours(error):
                    raise
                raise InternalError.of(_assertion(error)) from error
        except JGError as error:
            if os.environ.get(FULL) != "full":
                error.__traceback__ = _shortened(error.__traceback__)
                cause = error.__cause__
                if cause is None or not _is_users(cause):
                    error.__cause__, error.__suppress_context__ = None, True
                else:
                    cause.__traceback__ = _shortened(cause.__traceback__)
            raise

    return call


def _shortened(traceback: TracebackType | None) -> TracebackType | None:
    """Returns the frames to show; the first is that of the decorator."""
    ours: TracebackType | None = None
    users: list[TracebackType] = []
    for entry in _entries(traceback):
        if entry.tb_frame.f_code.co_filename == __file__:
            continue
        if not _is_inside(entry):
            users.append(entry)
        elif ours is None:
            ours = entry
    excerpt: TracebackType | None = None
    for entry in reversed([*([ours] if ours else []), *users]):
        excerpt = TracebackType(
            excerpt, entry.tb_frame, entry.tb_lasti, entry.tb_lineno
        )
    return excerpt


def _is_users(error: BaseException) -> bool:
    """Whether an error came from a line of the user's."""
    entries = list(_entries(error.__traceback__))
    return bool(entries) and not _is_inside(entries[-1])


def _is_ours(error: BaseException) -> bool:
    """Whether a line of this package raised it."""
    (*_, last) = _entries(error.__traceback__)
    return last.tb_frame.f_code.co_filename.startswith(_package())


def _assertion(error: AssertionError) -> str:
    (*_, last) = _entries(error.__traceback__)
    file = Path(last.tb_frame.f_code.co_filename).relative_to(_package())
    text = f" ({error})" if str(error) else ""
    return f"the assertion at jgraph/{file.as_posix()}:{last.tb_lineno} failed{text}"


def _package() -> str:
    return f"{Path(__file__).parents[1]}{os.sep}"


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_inside(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_inner_folders())


@functools.cache
def _inner_folders() -> tuple[str, ...]:
    """Folders of jgraph and of what carries its work."""
    found = ["<frozen", _package()]
    carriers = ("asyncio", "concurrent", "contextlib", "threading")
    for name in (*carriers, "flax", "grpc", "jax", "optax"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            package = spec.submodule_search_locations is not None
            found.append(
                f"{Path(spec.origin).parent}{os.sep}" if package else spec.origin
            )
    return tuple(found)
