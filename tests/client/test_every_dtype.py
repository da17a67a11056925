"""Every dtype that JAX can export: fed, fetched, stored, read, written, by rows too."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.client.session import Session
from jgraph.errors import GraphError, NotExportableError
from jgraph.graph.variable import Variable
from tests.support.dtypes import DTYPES, WIDE

SOME = ("int4", "float4_e2m1fn", "bfloat16", "float64")

# JAX cannot write these to bytes.
INEXPORTABLE = ("int1", "uint1", "int2", "uint2", "float6_e2m3fn", "float6_e3m2fn")


def _wide(name: str) -> AbstractContextManager[Any]:
    return jax.enable_x64(True) if name in WIDE else nullcontext()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME else pytest.mark.nightly)
        for name in DTYPES
        if name not in INEXPORTABLE
    ],
)
def test_values_keep_their_bits_wherever_they_go(session: Session, name: str) -> None:
    dtype = DTYPES[name]
    value = np.random.default_rng(0).integers(0, 4, (5, 3)).astype(dtype)
    other = value[::-1].copy()
    ids = np.array([1, 3], np.int32)

    def put(at: Any, rows: Any) -> Any:
        w[at] = rows
        return w[at], rows

    with _wide(name):
        w = Variable("w", jnp.asarray(value), device="/job:ps/task:0")
        same, twice = session.run(lambda x: (x, jnp.concatenate([x, x])), value)
        assert same.tobytes() == value.tobytes()
        assert twice.tobytes() == np.concatenate([value, value]).tobytes()
        session.initialize([w])
        assert session.read([w])["w"].tobytes() == value.tobytes()
        assert session.snapshot([w])["w"].tobytes() == value.tobytes()
        session.write({w: other})
        assert session.run(lambda at: w[at], ids).tobytes() == other[ids].tobytes()
        new, rows = session.run(put, ids, value[[0, 4]])
        other[ids] = value[[0, 4]]
        assert new.tobytes() == rows.tobytes() == other[ids].tobytes()
        assert session.read([w])["w"].tobytes() == other.tobytes()
        assert session.read([w])["w"].dtype == dtype


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SOME else pytest.mark.nightly)
        for name in DTYPES
        if name not in INEXPORTABLE
    ],
)
def test_variables_are_updated_in_place_again_and_again(
    session: Session, name: str
) -> None:
    value = np.random.default_rng(0).integers(0, 4, (5, 3)).astype(DTYPES[name])

    def turn() -> None:
        w[...] = w[...][::-1]
        w[0] = w[1]

    with _wide(name):
        w = Variable("w", jnp.asarray(value), device="/job:ps/task:0")
        for _ in range(3):
            session.run(turn)
            value = value[::-1].copy()
            value[0] = value[1]
        assert session.read([w])["w"].tobytes() == value.tobytes()


@pytest.mark.parametrize("name", INEXPORTABLE)
def test_dtype_that_jax_cannot_export_is_refused_in_words(
    session: Session, name: str
) -> None:
    value = np.zeros((2, 2), DTYPES[name])
    with pytest.raises(NotExportableError, match="cannot be exported for cpu"):
        session.run(lambda x: jnp.concatenate([x, x]), value)


@pytest.mark.parametrize("name", ["int1", "float6_e2m3fn"])
def test_variable_of_what_jax_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(GraphError, match="is not an array that JAX can have here"):
        Variable("w", np.zeros((2, 2), DTYPES[name]))
