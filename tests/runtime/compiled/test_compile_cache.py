import hashlib
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph._compat import stable_custom_calls
from jgraph.errors import ForbiddenProgramError, InvalidProgramError, PlatformError
from jgraph.plan.program.program import SegmentCode
from jgraph.runtime.compiled import compile_cache
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.compiled.native_calls import ALLOWED


def code(platform: str = "cpu", rows: int = 3) -> SegmentCode:
    exported = jax.export.export(jax.jit(lambda a, b: [a + b]), platforms=[platform])
    blob = bytes(exported(jnp.zeros(rows), jnp.zeros(rows)).serialize())
    return SegmentCode(hashlib.sha256(blob).hexdigest(), blob, (platform,), "add")


def test_same_digest_is_compiled_once_from_many_threads() -> None:
    cache, segment, found = CompileCache(), code(), list[object]()
    threads = [
        threading.Thread(target=lambda: found.append(cache.load(segment, (0,))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert cache.compilations == 1
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_programs_that_come_and_go_leave_no_more_than_so_many_executables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_cache, "MAX_EXECUTABLES", 2)
    cache = CompileCache()
    first, second, third = (code(rows=rows) for rows in (1, 2, 3))
    runs = {rows: cache.load(c) for rows, c in enumerate((first, second), start=1)}
    assert cache.load(first) is runs[1]  # and is now the newest
    cache.load(third)
    assert (cache.load(first), cache.compilations) == (runs[1], 3)
    assert cache.load(second) is not runs[2]
    assert runs[2](jnp.ones(2), jnp.ones(2))[0].tolist() == [2.0] * 2  # still in use


def test_executable_donates_what_it_was_told_to() -> None:
    run = CompileCache().load(code(), (0,))
    a, b = jnp.ones(3), jnp.ones(3)
    assert run(a, b)[0].tolist() == [2.0] * 3
    assert (a.is_deleted(), b.is_deleted()) == (True, False)


@pytest.mark.bad_input_row(18)
def test_changed_byte_is_refused_before_it_is_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def parse(blob: bytearray) -> None:
        raise AssertionError(f"{len(blob)} bytes were parsed")

    segment = code()
    blob = bytearray(segment.exported)
    blob[len(blob) // 2] ^= 1
    monkeypatch.setattr(jax.export, "deserialize", parse)
    with pytest.raises(InvalidProgramError, match="do not match their digest"):
        CompileCache().load(replace(segment, exported=bytes(blob)))


@pytest.mark.bad_input_row(18)
@pytest.mark.parametrize("seed", range(12))
def test_any_garbage_under_a_right_digest_is_one_error(seed: int) -> None:
    blob = np.random.default_rng(seed).bytes(300)
    segment = SegmentCode(hashlib.sha256(blob).hexdigest(), blob, ("cpu",), "noise")
    cache = CompileCache()
    with pytest.raises(InvalidProgramError, match="'noise'"):
        cache.load(segment)
    assert cache.compilations == 0


@pytest.mark.bad_input_row(20)
def test_program_for_another_platform_says_for_which() -> None:
    with pytest.raises(PlatformError, match="exported for tpu and this task has cpu"):
        CompileCache().load(code("tpu"))


@pytest.mark.bad_input_row(20)
@pytest.mark.parametrize(("version", "who"), [(1, "the client"), (1000, "this task")])
def test_a_program_of_a_jax_that_is_too_old_or_too_new_is_refused(
    version: int, who: str
) -> None:
    exported = jax.export.export(jax.jit(lambda a: [a + a]))(jnp.zeros(3))
    other = replace(exported, calling_convention_version=version)
    blob = bytes(other.serialize())
    segment = SegmentCode(hashlib.sha256(blob).hexdigest(), blob, ("cpu",), "add")
    cache = CompileCache()
    with pytest.raises(InvalidProgramError, match=f"upgrade JAX of {who}") as caught:
        cache.load(segment)
    assert caught.value.code == "JG-203"
    assert f"by version {version} of" in caught.value.message
    assert cache.compilations == 0


def code_of(fn: Any, *allow: str) -> SegmentCode:
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in allow]
    exported = jax.export.export(jax.jit(fn), disabled_checks=checks)
    blob = bytes(exported(jnp.eye(3)).serialize())
    return SegmentCode(hashlib.sha256(blob).hexdigest(), blob, ("cpu",), "calls")


def native(name: str) -> Any:
    """Calls native code of this name; nothing has to be registered to export it."""
    return lambda x: [jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((3, 3), x.dtype))(x)]


@pytest.mark.bad_input_row(19)
@pytest.mark.parametrize("name", ["xyz", "a b", "xla_ffi_python_cpu_callback"])
def test_a_program_that_calls_native_code_is_not_compiled(name: str) -> None:
    cache = CompileCache()
    with pytest.raises(ForbiddenProgramError, match=f"native code, '{name}'") as caught:
        cache.load(code_of(native(name), name))
    assert caught.value.code == "JG-204"
    assert cache.compilations == 0


@pytest.mark.bad_input_row(19)
def test_one_call_hidden_among_allowed_ones_is_found() -> None:
    def both(x: Any) -> Any:
        return [jnp.linalg.cholesky(x) + native("xyz")(x)[0]]

    with pytest.raises(ForbiddenProgramError, match="'xyz'"):
        CompileCache().load(code_of(both, "xyz"))


def test_a_program_may_call_what_jax_itself_calls() -> None:
    run = CompileCache().load(code_of(lambda x: [jnp.linalg.cholesky(x)]))
    assert run(jnp.eye(3) * 4)[0].tolist() == (np.eye(3) * 2).tolist()


def test_tensorflow_is_not_called_for_others() -> None:
    assert "tf.call_tf_function" in stable_custom_calls
    assert "tf.call_tf_function" not in ALLOWED


def code_for_any_size() -> SegmentCode:
    n = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct(n, "float32")
    exported = jax.export.export(jax.jit(lambda a, b: [a + b, a * a.shape[0]]))(x, x)
    blob = bytes(exported.serialize())
    return SegmentCode(hashlib.sha256(blob).hexdigest(), blob, ("cpu",), "add")


def test_code_for_any_size_is_compiled_when_a_size_first_comes() -> None:
    cache = CompileCache()
    run = cache.load(code_for_any_size(), (0,))
    assert cache.compilations == 0
    for n, compiled in [(2, 1), (3, 2), (2, 2)]:
        a = jnp.ones(n)
        both = run(a, jnp.ones(n))
        assert [x.tolist() for x in both] == [[2.0] * n, [float(n)] * n]
        assert (cache.compilations, a.is_deleted()) == (compiled, True)


def test_of_many_sizes_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MAX_SIZES", 2)
    cache = CompileCache()
    run = cache.load(code_for_any_size())
    for n in (1, 2, 1, 3):
        run(np.ones(n, np.float32), np.ones(n, np.float32))
    assert cache.compilations == 3
    run(np.ones(1, np.float32), np.ones(1, np.float32))
    assert cache.compilations == 3
    run(np.ones(2, np.float32), np.ones(2, np.float32))
    assert cache.compilations == 4
