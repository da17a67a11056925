"""Values of a cluster's variables: initialize, read and write them piece by piece."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax.numpy as jnp
import numpy as np

from jgraph._compat import is_wide, wide_types
from jgraph.client.feeding import as_result, feed_arrays
from jgraph.client.programs import STEP_S, Programs
from jgraph.client.variables import VariableDirectory, shards_of
from jgraph.errors import ConfigError, UninitializedError, VariableMismatchError
from jgraph.graph.graph import Graph
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.graph.tracing.trace import trace
from jgraph.graph.variable import Initializer, Variable
from jgraph.plan.lowering.row_blocks import initial_value
from jgraph.plan.placement.spread import nbytes_of
from jgraph.plan.program.nodes import WriteNode
from jgraph.plan.program.program import Program
from jgraph.plan.program.types import is_key, value_type

# What a task has in hand at once when variables are read or written by a client.
_PIECE_BYTES = 16 << 20

# Smaller ones are not looked at: they may be shards, but never of anything huge.
_SMALL_BYTES = 1 << 20
_LARGE_BYTES = 1 << 30
_LOOK_ELEMENTS = 1 << 16
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

# A run reads its state at each end of a fit, and its step more often.
_KEPT_PLANS = 4

_logger = logging.getLogger(__name__)

# Random numbers are made at 50 MB/s and more by one core, and a table has many.
_SLOW_BYTES_PER_S = 10e6


@final
class VariableValues:
    """Makes, reads and writes values of variables; each piece is a step of its own."""

    def __init__(self, variables: VariableDirectory, programs: Programs) -> None:
        self._variables = variables
        self._programs = programs
        self._reads: dict[Any, tuple[Graph, Program]] = {}

    def initialize(self, variables: Sequence[Variable], *, again: bool = False) -> None:
        """Gives variables their initial values.

        Raises:
          UninitializedError: one has neither a value nor an init function.
        """
        stored_keys = self.initialize_where_possible(variables, again=again)
        for variable in variables:
            keys = {spec.key for spec in variable.spec.shards}
            if variable.init is None and not keys <= stored_keys:
                raise UninitializedError(
                    f"variable '{variable.name}' has no init function; give it a value "
                    f"with session.write({{{variable.name}: array}})",
                    variable=variable.name,
                )

    def initialize_where_possible(
        self, variables: Sequence[Variable], *, again: bool = False
    ) -> set[VariableKey]:
        """Leaves variables without an init function; returns what had values."""
        stored_keys = self._variables.look_up(v.spec for v in variables)
        missing = [
            v
            for v in shards_of(variables)
            if v.init is not None and (again or v.spec.key not in stored_keys)
        ]
        self._variables.choose([v.spec for v in missing])
        # While a value travels its task has it twice: the others come later.
        missing.sort(key=_travels, reverse=True)
        for piece in in_pieces(missing):
            self._make(piece, again=again)
        self._variables.note_initialized(variables)
        return stored_keys

    def lacking(self, variables: Sequence[Variable]) -> list[VariableSpec]:
        """Returns those without a value; of a sharded variable its shards."""
        stored_keys = self._variables.look_up(v.spec for v in variables)
        specs = (spec for variable in variables for spec in variable.spec.shards)
        return [spec for spec in specs if spec.key not in stored_keys]

    def read(self, variables: Sequence[Variable]) -> dict[str, Any]:
        """Returns the values of variables by name.

        Raises:
          ConfigError: two of them have one name, in different containers.
        """
        check_names(variables)
        self._variables.look_up(v.spec for v in variables)
        values: dict[VariableKey, Any] = {}
        for piece in in_pieces(shards_of(variables)):
            new = self._read(piece, self._owner_of_large(piece))
            values |= zip((v.spec.key for v in piece), new, strict=True)
        return {v.name: joined(v, values) for v in variables}

    def write(self, variables: Sequence[Variable], values: Sequence[Any]) -> None:
        """Replaces the values of variables; creates those that have none."""
        self._variables.look_up(v.spec for v in variables)
        pairs = zip(variables, values, strict=True)
        parts = iter([part for pair in pairs for part in split(*pair)])
        self._variables.choose([v.spec for v in variables])
        for piece in in_pieces(shards_of(variables)):
            arrays = [next(parts) for _ in piece]
            self.run_once("write", partial(assign, piece), piece, arrays)
        self._variables.note_initialized(variables)

    def run_once(
        self,
        name: str,
        fn: Callable[..., Any],
        variables: Sequence[Variable],
        *args: Any,
        driver: TaskName | None = None,
    ) -> Any:
        """Runs a function of variables as a step, and forgets it.

        Args:
          name: of the step.
          fn: the function.
          variables: what it uses.
          *args: what it takes.
          driver: is asked to run it; the master if unset.
        """
        graph, program = self._planned(name, fn, variables, *args, driver=driver)
        return self._run(graph, program, variables, *args, driver=driver)

    def _make(self, piece: Sequence[Variable], *, again: bool) -> None:
        """Writes initial values; unless ``again``, not over what others made since."""
        assign = partial(assign_initial, piece)
        graph, program = self._planned("initialize", assign, piece, driver=None)
        if not again:
            program = _of_absent(program)
        self._run(graph, program, piece)

    def _read(self, piece: Sequence[Variable], driver: TaskName | None) -> list[Any]:
        """Returns the values of variables; who reads the same again has its plan."""
        surroundings = self._variables.surroundings(piece)
        key = (surroundings, driver, *(v.spec for v in piece))
        known = self._reads.pop(key, None) if surroundings else None
        planned = known or self._planned(
            "read", partial(values_of, piece), piece, driver=driver
        )
        if surroundings:
            self._reads[key] = planned
            while len(self._reads) > _KEPT_PLANS:
                self._reads.pop(next(iter(self._reads)), None)
        found: list[Any] = self._run(*planned, piece, driver=driver)
        return found

    def _planned(
        self,
        name: str,
        fn: Callable[..., Any],
        variables: Sequence[Variable],
        *args: Any,
        driver: TaskName | None,
    ) -> tuple[Graph, Program]:
        with types_of(variables):
            graph, _ = trace(fn, *args, variables=variables, name=name)
            return graph, self._variables.plan(graph, driver).program

    def _run(
        self,
        graph: Graph,
        program: Program,
        variables: Sequence[Variable],
        *args: Any,
        driver: TaskName | None = None,
    ) -> Any:
        handle = self._programs.register(program)
        try:
            arrays = feed_arrays(graph, args, {}, {}, check_finite=False)
            nbytes = sum(nbytes_of(variable.spec) for variable in variables)
            timeout_s = STEP_S + nbytes / _SLOW_BYTES_PER_S
            fetches = self._programs.run(handle, arrays, timeout_s, driver)
            return as_result(graph, fetches)
        finally:
            self._programs.unregister(handle)

    def _owner_of_large(self, piece: Sequence[Variable]) -> TaskName | None:
        """Returns the task of a variable that is a piece alone, and large.

        From there it comes at once: by way of the master both would need memory for it.
        """
        (variable, *others) = piece
        if others or value_type(variable.spec.aval).nbytes < _PIECE_BYTES:
            return None
        return self._variables.tasks.get(variable.spec.key)

    def run_program(self, program: Program, nbytes: int) -> None:
        """Runs a step that moves ``nbytes``, and forgets it."""
        handle = self._programs.register(program)
        try:
            self._programs.run(handle, (), STEP_S + nbytes / _SLOW_BYTES_PER_S)
        finally:
            self._programs.unregister(handle)

    def prepared(self, program: Program, nbytes: int) -> Callable[[], None]:
        """Compiles a step that moves ``nbytes``; returns what runs it, each time.

        The tasks have its program as long as that is there.
        """
        handle = self._programs.register(program)
        timeout_s = STEP_S + nbytes / _SLOW_BYTES_PER_S

        def run() -> None:
            self._programs.run(handle, (), timeout_s)

        weakref.finalize(run, self._programs.give_up, handle).atexit = False
        return run


def _of_absent(program: Program) -> Program:
    """Returns a program that writes only variables that are not there."""
    return replace(
        program,
        partitions=tuple(
            replace(
                part,
                nodes=tuple(
                    replace(node, absent=True) if isinstance(node, WriteNode) else node
                    for node in part.nodes
                ),
            )
            for part in program.partitions
        ),
    )


def types_of(variables: Iterable[Variable]) -> AbstractContextManager[Any]:
    """Keeps the types of variables inside, as JAX was set where they were made."""
    wide = any(is_wide(variable.dtype) for variable in variables)
    return wide_types() if wide else nullcontext()


def check_names(variables: Sequence[Variable]) -> None:
    """Refuses variables of one name, in different containers.

    Raises:
      ConfigError: names both containers.
    """
    keys: dict[str, VariableKey] = {}
    for variable in variables:
        container, name = variable.spec.key
        other = keys.setdefault(name, (container, name))[0]
        if other != container:
            raise ConfigError(
                f"two variables are called '{name}', in the containers '{other}' and "
                f"'{container}', and values are given by name; read them one after "
                "the other",
                variable=name,
            )


def in_pieces(
    variables: Sequence[Variable], nbytes: int = _PIECE_BYTES
) -> list[list[Variable]]:
    """Cuts variables into runs of at most ``nbytes`` together (a larger one alone)."""
    pieces: list[list[Variable]] = []
    room = 0
    for variable in variables:
        size = value_type(variable.spec.aval).nbytes
        if not pieces or size > room:
            pieces.append([])
            room = nbytes
        pieces[-1].append(variable)
        room -= size
    return pieces


def joined(variable: Variable, values: Mapping[VariableKey, Any]) -> Any:
    """Returns the value of a variable, given those of its shards."""
    sharding = variable.spec.sharding
    parts = [values[spec.key] for spec in variable.spec.shards]
    return parts[0] if sharding is None else sharding.joined(parts)


def split(variable: Variable, value: Any) -> list[Any]:
    """Returns the values of a variable's shards."""
    sharding = variable.spec.sharding
    if sharding is None:
        return [value]
    array = np.asarray(value)
    return [array[sharding.index(array.ndim, n)] for n in range(sharding.shards)]


def checked_values(values: Mapping[Variable, Any]) -> list[Any]:
    """Returns the arrays to write, each of its variable's type.

    Raises:
      VariableMismatchError: a value has another shape or dtype than its variable.
    """
    arrays = []
    for variable, value in values.items():
        array = variable.typed(value)
        array = array if hasattr(array, "dtype") else np.asarray(array)
        if tuple(array.shape) != variable.shape or array.dtype != variable.dtype:
            raise VariableMismatchError(
                f"variable '{variable.name}' is {variable.dtype}"
                f"{list(variable.shape)}, and the value to write is "
                f"{array.dtype}{list(array.shape)}; give an array of that type, for "
                "example with .astype(…)",
                variable=variable.name,
            )
        arrays.append(array)
    return arrays


# What is traced here; the variables are bound, the arrays are fed.


def assign_initial(variables: Sequence[Variable]) -> None:
    """Gives variables what their init functions make, large ones block by block."""
    for variable in variables:
        assert variable.init is not None  # chosen by the caller
        size = value_type(variable.spec.aval).nbytes
        if size < _SMALL_BYTES:
            variable[...] = variable.init()
            continue
        variable[...], largest = initial_value(_without_copies(variable))
        if largest > _LARGE_BYTES:
            _logger.warning(
                "the initial value of '%s' (%.1f GB) is not made row by row; its task "
                "needs memory for several arrays of %.1f GB while it is made",
                variable.name,
                size / 1e9,
                largest / 1e9,
            )


def _travels(variable: Variable) -> bool:
    """Whether a task is sent a large initial value."""
    large = value_type(variable.spec.aval).nbytes >= _PIECE_BYTES
    if not (large and variable.is_given):
        return False
    assert variable.init is not None  # it is given
    return _element_of(variable.init()) is None


def _without_copies(variable: Variable) -> Initializer:
    """Returns what makes a value: one of equal elements from one of them."""
    assert variable.init is not None  # chosen by the caller
    if not variable.is_given:
        return variable.init
    value = variable.init()  # of a shard it is cut each time
    element = _element_of(value)
    if element is None:
        return lambda: value
    return partial(jnp.full, variable.shape, element)


def _element_of(value: Any) -> Any:
    """Returns the one that all elements of an array are, bit by bit; None: they differ.

    Most arrays differ soon: those are not read to their end.
    """
    if is_key(value):
        return None
    array = np.asarray(value)
    if not array.size or array.dtype.itemsize not in _BITS:
        return None
    elements = array.reshape(-1)
    bits = elements.view(_BITS[array.dtype.itemsize])
    for start in range(0, bits.size, _LOOK_ELEMENTS):
        if (bits[start : start + _LOOK_ELEMENTS] != bits[0]).any():
            return None
    return elements[0]


def values_of(variables: Sequence[Variable]) -> list[Any]:
    """Returns the values of variables."""
    return [variable[...] for variable in variables]


def assign(variables: Sequence[Variable], arrays: list[Any]) -> None:
    """Gives variables these values."""
    for variable, array in zip(variables, arrays, strict=True):
        variable[...] = array
