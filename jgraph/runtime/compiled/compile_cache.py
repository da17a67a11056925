"""Compile cache: executables by digest; a program seen before is not compiled."""

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeAlias, final

import jax
import numpy as np

from jgraph._compat import is_wide, wide_types
from jgraph.errors import InvalidProgramError, JGError, PlatformError
from jgraph.graph.sizes import symbols_of
from jgraph.plan.program.program import SegmentCode
from jgraph.runtime.compiled.native_calls import check_custom_calls, check_lapack_calls
from jgraph.runtime.store.local_mesh import Layouts, SpreadExecutable, layouts_of
from jgraph.runtime.store.tables import bits_of

MAX_SIZES: Final = 64
"""Of one segment."""


@final
class SizedExecutable:
    """Code for any size of its arguments, compiled for each size when it first comes.

    The last ``MAX_SIZES`` sizes are kept.

    Args:
      jitted: the code.
      avals: types of its arguments, with names in their shapes.
      check: called with what was compiled, before it is used.
    """

    __slots__ = ("_avals", "_check", "_jitted", "_last", "_lock", "_places", "_runs")

    def __init__(
        self, jitted: Any, avals: Sequence[Any], check: Callable[[Any], None]
    ) -> None:
        self._jitted = jitted
        self._avals = avals
        self._check = check
        self._lock = threading.Lock()
        self._runs: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        self._last: tuple[tuple[int, ...], Any] | None = None
        """The sizes that were asked for last, and what runs for them."""
        # One axis for each expression tells all sizes.
        self._places = {
            text: (position, axis)
            for position, aval in enumerate(avals)
            for axis, text in enumerate(symbols_of(aval.shape))
            if text
        }

    @property
    def sizes(self) -> int:
        """For how many sizes it is compiled now."""
        return len(self._runs)

    def __call__(self, *args: Any) -> Sequence[jax.Array]:
        """Runs the code; a new size is compiled first, one after the other."""
        results: Sequence[jax.Array] = self.of(args)(*args)
        return results

    def of(self, args: Sequence[Any]) -> Any:
        """Returns the executable for arguments of these shapes."""
        sizes = tuple([args[n].shape[axis] for n, axis in self._places.values()])
        last = self._last
        if last is not None and last[0] == sizes:
            return last[1]  # it is the newest already
        with self._lock:
            run = self._runs.get(sizes)
            if run is None:
                run = self._compiled(sizes)
                self._check(run)
                self._runs[sizes] = run
                if len(self._runs) > MAX_SIZES:
                    self._runs.popitem(last=False)
            else:
                self._runs.move_to_end(sizes)
            self._last = sizes, run
        return run

    def _compiled(self, sizes: tuple[int, ...]) -> Any:
        known = dict(zip(self._places, sizes, strict=True))
        structs = [
            jax.ShapeDtypeStruct(
                [known.get(str(size), size) for size in aval.shape], aval.dtype
            )
            for aval in self._avals
        ]
        return self._jitted.lower(*structs).compile()


Executable: TypeAlias = Callable[..., Sequence[jax.Array]]

MAX_EXECUTABLES: Final = 512
"""Of a process, beside those in use; one takes about half a megabyte."""


class CompileCache:
    """Compiles segments once per (digest, donated arguments); safe from threads.

    The ``MAX_EXECUTABLES`` loaded last are kept: a task outlives many programs.

    The digest is checked before the bytes are parsed: an exported program is code, so
    bytes that are not what the sender signed for are never looked at.

    A program says the type of each value, and it is taken at its word: whether this
    process has ``jax_enable_x64`` set does not matter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executables: OrderedDict[
            tuple[str, tuple[int, ...]], Future[Executable]
        ] = OrderedDict()
        self.compilations = 0

    def load(self, code: SegmentCode, donate: tuple[int, ...] = ()) -> Executable:
        """Returns the executable of ``code``, compiling it if it is not kept.

        Args:
          code: the exported segment.
          donate: positions of flat arguments whose buffers the call may reuse.

        Raises:
          InvalidProgramError: the bytes do not match the digest, do not parse, or are
            of a JAX that is too old or too new.
          ForbiddenProgramError: it calls native code that is not allowed.
          PlatformError: exported for other kinds of device than this process has.
        """
        key = code.digest, donate
        with self._lock:
            future = self._executables.get(key)
            mine = future is None
            if future is None:
                future = self._executables[key] = Future()
                if len(self._executables) > MAX_EXECUTABLES:
                    self._executables.popitem(last=False)
            self._executables.move_to_end(key)
        if mine:
            try:
                with wide_types():
                    future.set_result(_compile(code, donate, self._count))
            except BaseException as error:  # noqa: BLE001  # handed to every waiter
                with self._lock:
                    self._executables.pop(key, None)
                future.set_exception(error)
        return future.result()

    def _count(self) -> None:
        with self._lock:
            self.compilations += 1


def _compile(
    code: SegmentCode, donate: tuple[int, ...], count: Callable[[], None]
) -> Executable:
    if hashlib.sha256(code.exported).hexdigest() != code.digest:
        raise InvalidProgramError(
            f"segment '{code.label}': its bytes do not match their digest "
            f"{code.digest[:12]}…; send the program again",
            digest=code.digest,
        )
    exported = _deserialize(code)
    platform = jax.export.default_export_platform()
    if platform not in exported.platforms:
        raise PlatformError(
            f"segment '{code.label}' was exported for {', '.join(exported.platforms)} "
            f"and this task has {platform}; plan it with platforms=('{platform}',)",
            platform=platform,
        )
    options: dict[str, Any] = {"keep_unused": True}
    layouts: Layouts = ()
    if exported.nr_devices > 1:
        layouts, results = layouts_of(exported, code.label)
        options |= {"in_shardings": layouts, "out_shardings": results}
    options["donate_argnums"] = _usable(donate, exported)
    jitted = jax.jit(exported.call, **options)
    calls_lapack = b"lapack_" in exported.mlir_module_serialized

    def check(compiled: Any) -> None:
        if calls_lapack:
            check_lapack_calls(code.label, compiled.as_text())
        count()

    run = _compiled(jitted, exported.in_avals, check)
    packed = [n for n, a in enumerate(exported.in_avals) if bits_of(a.dtype) < 8]
    if packed:
        run = _taking_packed(run, packed)
    if any(is_wide(aval.dtype) for aval in exported.in_avals):
        run = _taking_wide(run)
    return SpreadExecutable(run, layouts) if layouts else run


def _compiled(
    jitted: Any, avals: Sequence[Any], check: Callable[[Any], None]
) -> Executable:
    if any(symbols_of(aval.shape) for aval in avals):
        return SizedExecutable(jitted, avals, check)
    compiled: Executable = jitted.lower(*avals).compile()
    check(compiled)
    return compiled


def _taking_wide(run: Executable) -> Executable:
    def call(*args: Any) -> Sequence[jax.Array]:
        with wide_types():
            return run(*args)

    return call


def _taking_packed(run: Executable, positions: Sequence[int]) -> Executable:
    """Passes arguments of which several share a byte by value.

    JAX forgets how such results lie, and then refuses them as arguments.
    """

    def call(*args: Any) -> Sequence[jax.Array]:
        arguments = list(args)
        for position in positions:
            arguments[position] = np.asarray(args[position])
        return run(*arguments)

    return call


def _deserialize(code: SegmentCode) -> Any:
    try:
        exported = jax.export.deserialize(bytearray(code.exported))
        _check_convention(code, exported.calling_convention_version)
        check_custom_calls(code, exported)
    except JGError:
        raise
    except Exception as error:  # nine types of exception were seen for bad bytes
        raise InvalidProgramError(
            f"segment '{code.label}' is not a program that JAX {jax.__version__} can "
            f"read ({type(error).__name__}); a newer JAX may have made it: install it "
            "here, too",
            digest=code.digest,
        ) from error
    return exported


def _check_convention(code: SegmentCode, version: int) -> None:
    """Refuses code that is called in a way of another JAX; JAX itself does not look."""
    least = jax.export.minimum_supported_calling_convention_version
    most = jax.export.maximum_supported_calling_convention_version
    if not least <= version <= most:
        older = "the client" if version < least else "this task"
        raise InvalidProgramError(
            f"segment '{code.label}' is to be called by version {version} of JAX's "
            f"calling convention, and JAX {jax.__version__} here knows {least} to "
            f"{most}; upgrade JAX of {older}",
            digest=code.digest,
        )


def _usable(donate: tuple[int, ...], exported: Any) -> tuple[int, ...]:
    # Donating a buffer that no result can take over only makes JAX warn.
    free = Counter(_kinds(exported.out_avals, exported.out_shardings_hlo))
    taken = _kinds(exported.in_avals, exported.in_shardings_hlo)
    chosen = []
    for position in donate:
        kind = taken[position]
        if free[kind] > 0:
            free[kind] -= 1
            chosen.append(position)
    return tuple(chosen)


def _kinds(avals: Sequence[Any], layouts: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [
        (a.shape, str(a.dtype), str(layout))
        for a, layout in zip(avals, layouts, strict=True)
    ]
