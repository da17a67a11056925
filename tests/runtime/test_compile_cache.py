import hashlib
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import InvalidProgramError, PlatformError
from jgraph.plan.program import SegmentCode
from jgraph.runtime import sized
from jgraph.runtime.compile_cache import CompileCache


def code(platform: str = "cpu") -> SegmentCode:
    exported = jax.export.export(jax.jit(lambda a, b: [a + b]), platforms=[platform])
    blob = bytes(exported(jnp.zeros(3), jnp.zeros(3)).serialize())
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


def test_executable_donates_what_it_was_told_to() -> None:
    run = CompileCache().load(code(), (0,))
    a, b = jnp.ones(3), jnp.ones(3)
    assert run(a, b)[0].tolist() == [2.0] * 3
    assert (a.is_deleted(), b.is_deleted()) == (True, False)


def test_changed_byte_is_refused_before_it_is_parsed() -> None:
    segment = code()
    blob = bytearray(segment.exported)
    blob[len(blob) // 2] ^= 1
    with pytest.raises(InvalidProgramError, match="do not match their digest"):
        CompileCache().load(replace(segment, exported=bytes(blob)))


@pytest.mark.parametrize("seed", range(12))
def test_any_garbage_under_a_right_digest_is_one_error(seed: int) -> None:
    blob = np.random.default_rng(seed).bytes(300)
    segment = SegmentCode(hashlib.sha256(blob).hexdigest(), blob, ("cpu",), "noise")
    cache = CompileCache()
    with pytest.raises(InvalidProgramError, match="'noise'"):
        cache.load(segment)
    assert cache.compilations == 0


def test_program_for_another_platform_says_for_which() -> None:
    with pytest.raises(PlatformError, match="exported for tpu and this task has cpu"):
        CompileCache().load(code("tpu"))


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
    monkeypatch.setattr(sized, "MAX_SIZES", 2)
    cache = CompileCache()
    run = cache.load(code_for_any_size())
    for n in (1, 2, 1, 3):
        run(np.ones(n, np.float32), np.ones(n, np.float32))
    assert cache.compilations == 3
    run(np.ones(1, np.float32), np.ones(1, np.float32))
    assert cache.compilations == 3
    run(np.ones(2, np.float32), np.ones(2, np.float32))
    assert cache.compilations == 4
