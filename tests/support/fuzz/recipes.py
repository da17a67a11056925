"""Programs made up at random: a recipe is data, and runs on variables or on values.

Floating-point instructions are continuous and keep values small, so that another order
of additions makes a small difference; what chooses (conditions, trips of loops, rows)
depends on integers alone, which are exact.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import jax
import jax.numpy as jnp
import numpy as np

import jgraph as jg

N = 4
ROWS = 6


class Step(NamedTuple):
    """One instruction: its name, choices of operands, and the task of its scope."""

    op: str
    a: int = 0
    b: int = 0
    task: int | None = None


class Recipe(NamedTuple):
    """A program: its instructions, where its variables live, how many tasks there are.

    ``homes`` are the tasks of the variables in the order of ``VARIABLES``; None leaves
    it to the plan. ``sharded`` cuts the table in two.
    """

    tasks: int
    homes: tuple[int | None, ...]
    steps: tuple[Step, ...]
    sharded: bool = False


VARIABLES: dict[str, Any] = {
    "w": np.linspace(-1, 1, N * N, dtype=np.float32).reshape(N, N),
    "v": np.linspace(0.1, 0.9, N, dtype=np.float32),
    "table": np.linspace(-0.5, 0.5, ROWS * N, dtype=np.float32).reshape(ROWS, N),
    "count": np.int32(3),
    "key": np.array([1, 2], np.uint32),
    "other": np.linspace(1, -1, N * N, dtype=np.float32).reshape(N, N),
}


class Store(Protocol):
    """Variables by name: of a cluster, or values of one process."""

    def __getitem__(self, name: str) -> Any:
        """Returns what is read and written by index."""


@final
class Values:
    """The oracle: variables as plain values of one traced function."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.now = {name: _Cell(jnp.asarray(x)) for name, x in values.items()}

    def __getitem__(self, name: str) -> Any:
        return self.now[name]


@final
class _Cell:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        return self.value if index is Ellipsis else self.value[index]

    def __setitem__(self, index: Any, new: Any) -> None:
        self.value = new if index is Ellipsis else self.value.at[index].set(new)


@final
@dataclass(slots=True)
class Machine:
    """Runs a recipe: instructions take values that earlier ones made."""

    store: Store
    floats: list[Any]
    integers: list[Any]
    keys: list[Any] = field(default_factory=list)

    def real(self, n: int) -> Any:
        return self.floats[n % len(self.floats)]

    def whole(self, n: int) -> Any:
        return self.integers[n % len(self.integers)]

    def matrix(self, n: int) -> Any:
        """A value as a matrix, whatever its shape."""
        x = self.real(n)
        return jnp.broadcast_to(x, (N, N)) if x.ndim < 2 else x

    def vector(self, n: int) -> Any:
        x = self.real(n)
        return x.mean(0) if x.ndim == 2 else jnp.broadcast_to(x, (N,))

    def ids(self, n: int) -> Any:
        """Two rows, each once: what writing one row twice gives is not defined."""
        first = self.whole(n) % ROWS
        return jnp.stack([first, (first + 1 + n % 3) % ROWS])

    def key(self) -> Any:
        return jax.random.wrap_key_data(self.store["key"][...], impl="threefry2x32")


Op = Callable[[Machine, int, int], None]


def _float(fn: Callable[[Machine, int, int], Any]) -> Op:
    return lambda m, a, b: m.floats.append(fn(m, a, b))


def _integer(fn: Callable[[Machine, int, int], Any]) -> Op:
    return lambda m, a, b: m.integers.append(fn(m, a, b))


def _scan(m: Machine, a: int, b: int) -> Any:
    weights = m.matrix(b) / N

    def body(carry: Any, x: Any) -> Any:
        new = jnp.tanh(carry @ weights + x)
        return new, new.sum()

    last, sums = jax.lax.scan(body, m.vector(a), m.matrix(b)[: 2 + a % 2])
    return last + sums.mean()


def _while(m: Machine, a: int, b: int) -> Any:
    trips = m.whole(b) % 4
    start = (jnp.int32(0), m.vector(a))
    return jax.lax.while_loop(
        lambda state: state[0] < trips,
        lambda state: (state[0] + 1, jnp.sin(state[1]) + 0.1),
        start,
    )[1]


def _cond(m: Machine, a: int, b: int) -> Any:
    x, y = m.matrix(a), m.matrix(b)
    branches = [lambda x, y: x, lambda x, y: jnp.sin(x - y), lambda x, y: y * 0.5]
    return jax.lax.switch(m.whole(b) % 3, branches, x, y)


def _gradient(m: Machine, a: int, b: int) -> Any:
    def loss(w: Any) -> Any:
        hidden = jnp.tanh(m.matrix(a) @ w / N)
        return (hidden**2).mean() + jax.checkpoint(jnp.cos)(w).mean()

    value, gradient = jax.value_and_grad(loss)(m.matrix(b))
    return gradient + value


def _write_rows(m: Machine, a: int, b: int) -> None:
    ids = m.ids(b)
    m.store["table"][ids] = jnp.sin(m.store["table"][ids] + m.vector(a))


def _write_matrix(m: Machine, a: int, b: int) -> None:
    m.store["w"][...] = jnp.tanh(m.matrix(a))


def _update(m: Machine, a: int, b: int) -> None:
    m.store["w"][...] = 0.5 * m.store["w"][...] - 0.1 * m.matrix(a)


def _write_vector(m: Machine, a: int, b: int) -> None:
    m.store["v"][...] = jnp.sin(m.vector(a)) + 0.5 * m.store["v"][...]


def _write_row(m: Machine, a: int, b: int) -> None:
    m.store["table"][b % ROWS] = jnp.cos(m.vector(a))


def _write_table(m: Machine, a: int, b: int) -> None:
    m.store["table"][...] = 0.9 * m.store["table"][...] + 0.1 * m.vector(a)


def _count(m: Machine, a: int, b: int) -> None:
    m.store["count"][...] = m.store["count"][...] + m.whole(a) % 5


def _swap(m: Machine, a: int, b: int) -> None:
    w, other = m.store["w"][...], m.store["other"][...]
    m.store["w"][...] = other
    m.store["other"][...] = w


def _leap(m: Machine, a: int, b: int) -> None:
    w, other = m.store["w"][...], m.store["other"][...]
    m.store["w"][...] = 0.6 * w + 0.3 * other + 0.1 * m.matrix(a)
    m.store["other"][...] = 0.6 * other - 0.3 * w


def _rotate(m: Machine, a: int, b: int) -> None:
    """Three variables, each made of the next one's old value, the last in part."""
    w, v, row = m.store["w"][b % N], m.store["v"][...], m.store["table"][a % ROWS]
    m.store["table"][a % ROWS] = v
    m.store["v"][...] = w
    m.store["w"][b % N] = row


def _swap_rows(m: Machine, a: int, b: int) -> None:
    w, other = m.store["w"][:2], m.store["other"][2:]
    m.store["other"][2:] = jnp.tanh(w + 0.1 * m.vector(a))
    m.store["w"][:2] = other


def _chain(m: Machine, a: int, b: int) -> None:
    m.store["w"][...] = jnp.tanh(m.store["w"][...] @ m.store["other"][...] / N)
    m.store["other"][...] = jnp.sin(m.store["w"][...] - m.store["other"][...])
    m.store["v"][...] = m.store["other"][0] + 0.1 * m.vector(a)


def _split_key(m: Machine, a: int, b: int) -> None:
    keep, use = jax.random.split(m.key())
    m.store["key"][...] = jax.random.key_data(keep)
    m.floats.append(0.3 * jax.random.normal(use, (N, N)))


def _count_in_loop(m: Machine, a: int, b: int) -> None:
    def body(i: Any, total: Any) -> Any:
        m.store["count"][...] = m.store["count"][...] + i
        return total + m.store["count"][...]

    if isinstance(m.store, Values):
        total = jnp.int32(0)
        for i in range(3):
            total = body(jnp.int32(i), total)
    else:
        total = jax.lax.fori_loop(0, 3, body, jnp.int32(0))
    m.integers.append(total)


OPS: dict[str, Op] = {
    "sin": _float(lambda m, a, b: jnp.sin(m.real(a))),
    "tanh": _float(lambda m, a, b: jnp.tanh(m.real(a) + 0.1 * b)),
    "add": _float(lambda m, a, b: 0.5 * (m.matrix(a) + m.matrix(b))),
    "mul": _float(lambda m, a, b: jnp.tanh(m.matrix(a) * m.vector(b))),
    "matmul": _float(lambda m, a, b: m.matrix(a) @ m.matrix(b) / N),
    "softmax": _float(lambda m, a, b: jax.nn.softmax(m.matrix(a), axis=b % 2)),
    "mean": _float(lambda m, a, b: m.real(a).mean()),
    "max": _float(lambda m, a, b: jnp.maximum(m.matrix(a), m.vector(b)).max(0)),
    "sort": _float(lambda m, a, b: jnp.sort(m.matrix(a), axis=b % 2)),
    "cumsum": _float(lambda m, a, b: jnp.cumsum(m.vector(a)) / N),
    "turn": _float(lambda m, a, b: jnp.roll(m.matrix(a).T, b % N, axis=1)),
    "parts": _float(
        lambda m, a, b: jnp.concatenate([m.matrix(a)[: b % N], m.matrix(b)[b % N :]])
    ),
    "constant": _float(lambda m, a, b: jnp.asarray(np.eye(N, dtype=np.float32)) * a),
    "vmap": _float(
        lambda m, a, b: jax.vmap(lambda x, y: jnp.dot(x, y) / N)(
            m.matrix(a), m.matrix(b)
        )
    ),
    "jit": _float(lambda m, a, b: jax.jit(lambda x: jnp.cos(x) + 0.1)(m.real(a))),
    "row": _float(
        lambda m, a, b: jax.lax.dynamic_slice(m.matrix(a), (m.whole(b) % N, 0), (1, N))[
            0
        ]
    ),
    "from integer": _float(lambda m, a, b: jnp.sin(m.whole(a).astype(jnp.float32))),
    "where": _float(
        lambda m, a, b: jnp.where(m.whole(b) % 2 == 0, m.matrix(a), m.matrix(b))
    ),
    "scan": _float(_scan),
    "while": _float(_while),
    "cond": _float(_cond),
    "gradient": _float(_gradient),
    "random": _float(
        lambda m, a, b: jax.random.uniform(
            jax.random.fold_in(m.key(), m.whole(b)), (N,)
        )
    ),
    "read": _float(lambda m, a, b: m.store["w"][...]),
    "read vector": _float(lambda m, a, b: m.store["v"][...]),
    "read rows": _float(lambda m, a, b: m.store["table"][m.ids(b)].mean(0)),
    "read table": _float(lambda m, a, b: m.store["table"][...].sum(0) / ROWS),
    "plus": _integer(lambda m, a, b: (m.whole(a) + m.whole(b)) % 97),
    "times": _integer(lambda m, a, b: (m.whole(a) * 3 + b) % 89),
    "read count": _integer(lambda m, a, b: m.store["count"][...] % 101),
    "swap": _swap,
    "leap": _leap,
    "rotate": _rotate,
    "swap rows": _swap_rows,
    "chain": _chain,
    "write": _write_matrix,
    "update": _update,
    "write vector": _write_vector,
    "write rows": _write_rows,
    "write row": _write_row,
    "write table": _write_table,
    "count": _count,
    "count in loop": _count_in_loop,
    "split key": _split_key,
}
STATE_OPS = sorted(
    name
    for name in OPS
    if name.startswith(("read", "write", "update", "count", "split key"))
)
"""What reads and writes variables."""


def task_names(count: int) -> list[str]:
    """Returns the tasks of a cluster of this size; the second is a ps."""
    return [
        name
        for _, name in zip(
            range(count),
            (
                "/job:worker/task:0",
                "/job:ps/task:0",
                "/job:worker/task:1",
                "/job:ps/task:1",
            ),
            strict=False,
        )
    ]


def arguments() -> tuple[Any, Any]:
    """Returns what a recipe is run on."""
    x = np.linspace(-0.7, 0.8, N * N, dtype=np.float32).reshape(N, N)
    return x, np.int32(5)


def run(recipe: Recipe, store: Store, x: Any, n: Any, *, placed: bool) -> Any:
    """Runs a recipe; returns what it fetches.

    Args:
      recipe: the program.
      store: the variables.
      x: a matrix.
      n: an integer.
      placed: under the device scopes of the recipe.
    """
    machine = Machine(store, [x], [jnp.asarray(n)])
    names = task_names(recipe.tasks)
    for step in recipe.steps:
        task = None if step.task is None else names[step.task % len(names)]
        # A loop over a variable lives where the variable is; elsewhere it is refused.
        free = task is None or step.op == "count in loop"
        with nullcontext() if free or not placed else jg.device(task):
            OPS[step.op](machine, step.a, step.b)
    return machine.floats[-6:], machine.integers[-2:]
