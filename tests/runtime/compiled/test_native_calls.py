"""Calls of LAPACK by hand: with results of another size they would write elsewhere."""

import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.errors import ForbiddenProgramError
from jgraph.plan.program.program import SegmentCode
from jgraph.runtime.compiled.compile_cache import CompileCache
from jgraph.runtime.compiled.native_calls import ALLOWED, ROUTINES, check_lapack_calls

SQUARE, WIDE, TALL, RIGHT = (2, 5, 5), (2, 4, 7), (2, 7, 4), (2, 5, 3)
LINALG = jax.lax.linalg
CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "cholesky": (jnp.linalg.cholesky, [SQUARE]),
    "lu": (LINALG.lu, [TALL]),
    "qr": (jnp.linalg.qr, [TALL]),
    "qr complete": (lambda x: jnp.linalg.qr(x, mode="complete"), [WIDE]),
    "svd": (jnp.linalg.svd, [TALL]),
    "svd reduced": (lambda x: jnp.linalg.svd(x, full_matrices=False), [WIDE]),
    "svd values": (lambda x: jnp.linalg.svd(x, compute_uv=False), [TALL]),
    "eigh": (lambda x: jnp.linalg.eigh(x + x.mT), [SQUARE]),
    "eig": (jnp.linalg.eig, [SQUARE]),
    "schur": (LINALG.schur, [SQUARE]),
    "hessenberg": (LINALG.hessenberg, [SQUARE]),
    "tridiagonal": (LINALG.tridiagonal, [SQUARE]),
    "left": (
        lambda a, b: LINALG.triangular_solve(a, b, left_side=True),
        [SQUARE, RIGHT],
    ),
    "right": (
        lambda a, b: LINALG.triangular_solve(a, b.mT, left_side=False),
        [SQUARE, RIGHT],
    ),
    "bands": (LINALG.tridiagonal_solve, [(5,), (5,), (5,), (5, 2)]),
}


def arguments(shapes: list[tuple[int, ...]], dtype: str) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(dtype) for shape in shapes]


def loaded(fn: Callable[..., Any], args: list[Any]) -> Any:
    exported = jax.export.export(jax.jit(lambda *a: jax.tree.leaves(fn(*a))))(*args)
    blob = bytes(exported.serialize())
    digest = hashlib.sha256(blob).hexdigest()
    return CompileCache().load(SegmentCode(digest, blob, ("cpu",), "calls"))


def compiled_lines(fn: Callable[..., Any], args: list[Any]) -> list[str]:
    text = str(jax.jit(fn).lower(*args).compile().as_text())
    return [line for line in text.splitlines() if 'target="lapack_' in line]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("name", CALLS)
def test_what_jax_calls_is_allowed_and_every_other_size_of_a_result_is_not(
    name: str, dtype: str
) -> None:
    fn, shapes = CALLS[name]
    args = arguments(shapes, dtype)
    lines = compiled_lines(fn, args)
    assert lines
    check_lapack_calls("calls", "\n".join(lines))
    for line in lines:
        head, call = line.split(" custom-call(", 1)
        if "mode = 78" in call:  # of which nothing is written
            continue
        for size in re.finditer(r"\d+(?=[\d,]*\])", head):
            smaller = str(int(size[0]) - 1)
            wrong = head[: size.start()] + smaller + head[size.end() :]
            with pytest.raises(ForbiddenProgramError, match="do not fit"):
                check_lapack_calls("calls", f"{wrong} custom-call({call}")


def test_every_routine_that_is_allowed_has_a_rule() -> None:
    names = [re.fullmatch(r"lapack_[sdcz](\w+)_ffi", name) for name in ALLOWED]
    found = {name[1] for name in names if name is not None}
    assert len(found) > 10
    assert found <= ROUTINES


def test_a_program_that_was_written_by_hand_is_refused_before_it_runs() -> None:
    small = [jax.ShapeDtypeStruct((2, 2), "float32"), jax.ShapeDtypeStruct((), "int32")]

    def call(a: Any) -> Any:
        return jax.ffi.ffi_call("lapack_spotrf_ffi", small)(a, uplo=np.uint8(ord("L")))

    with pytest.raises(ForbiddenProgramError, match="'lapack_spotrf_ffi', with arrays"):
        loaded(call, [np.eye(64, dtype=np.float32)])


def test_code_for_any_size_is_checked_for_each_size() -> None:
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: [jnp.linalg.cholesky(x)]))(
        jax.ShapeDtypeStruct((n, 3, 3), "float32")
    )
    blob = bytes(exported.serialize())
    digest = hashlib.sha256(blob).hexdigest()
    run = CompileCache().load(SegmentCode(digest, blob, ("cpu",), "calls"))
    for count in (1, 4):
        x = jnp.stack([jnp.eye(3) * 4] * count)
        np.testing.assert_allclose(run(x)[0], x / 2)
