"""Prepared steps of a session: functions traced, planned and registered once."""

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, Final, TypeAlias, final
from weakref import WeakKeyDictionary

import jax

from jgraph._compat import trace_settings
from jgraph.client.feeding import as_result, leaf_arrays, plain_feeds
from jgraph.client.programs import REGISTER_S, STEP_S, Programs
from jgraph.client.values import VariableValues
from jgraph.client.variables import VariableDirectory
from jgraph.clock import SystemClock
from jgraph.cluster.wait_message import show_wait
from jgraph.coordination.step.run_metadata import RunMetadata, run_metadata
from jgraph.errors import ConfigError, DeadlineError, FeedError
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.device import current_device
from jgraph.graph.graph import Graph
from jgraph.graph.ir import Feed, VariableKey
from jgraph.graph.tracing.function import Function
from jgraph.graph.tracing.select import select_fetches, select_targets
from jgraph.graph.tracing.taps import feed_taps
from jgraph.graph.variable import Variable
from jgraph.plan.plan import Plan
from jgraph.plan.program.program import Program
from jgraph.plan.program.types import is_plain, value_type
from jgraph.view import markup

Targets: TypeAlias = Iterable[Variable | str] | None
"""Variables that a step is to update, or their names; None: all."""

_logger = logging.getLogger(__name__)
_clock = SystemClock()
_RECENT = 100
_LEAST_S: Final = 0.1

MAX_PLAIN: Final = 256
"""Functions that nobody gave to ``jg.function``, of one session."""


@final
class PreparedStep:
    """A function for some types of arguments, registered on its tasks.

    Made by ``session.make_callable``; calling it sends feeds and fetches results, and
    does nothing else: no trace, no plan, no look at what is registered.

    Attributes:
      plan: what goes where.
      timeout_s: limit for one call, in seconds.
      recent_s: seconds of the last calls, where the plan has a prediction.
      check_open: raises an error if its session was closed, which it keeps: programs go
        with their session.

    Example:
      >>> import jax.numpy as jnp
      >>> import jgraph as jg
      >>> server = jg.Server({"worker": ["localhost:0"]})
      >>> with jg.connect(server.target) as cluster, cluster.session() as sess:
      ...     double = sess.make_callable(lambda x: 2 * x, 1.0)
      ...     [float(double(x)) for x in (1.0, 2.0)]
      [2.0, 4.0]
      >>> server.stop()
    """

    __slots__ = (
        "_fits",
        "_graph",
        "_is_flat",
        "_is_plain",
        "_programs",
        "_registration",
        "_tree",
        "check_open",
        "plan",
        "recent_s",
        "timeout_s",
    )

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        registration: "_Registration",
        programs: Programs,
        tree: Any,
    ) -> None:
        self.plan = plan
        self.timeout_s = STEP_S
        self.recent_s: deque[float] = deque(maxlen=_RECENT)
        self.check_open: Callable[[], None] = lambda: None
        self._graph = graph
        self._registration = registration
        self._is_plain = all(is_plain(v.aval) for v in graph.jaxpr.outvars)
        self._programs = programs
        self._tree = tree
        self._fits = plain_feeds(graph)
        flat = jax.tree_util.tree_structure(((0,) * tree.num_leaves, {}))
        self._is_flat = tree == flat

    @short_traceback
    def __call__(
        self, *args: Any, feeds: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Runs one step.

        Args:
          *args: arguments of the types that it was made for.
          feeds: values of the tapped values that it was made to be fed, by name.
          **kwargs: likewise.

        Raises:
          FeedError: arguments of another structure, shape or dtype.
          ConfigError: its session was closed.
          JGError: as ``Session.run``.
        """
        self.check_open()
        if self._is_flat and not kwargs and not feeds and self._fits(args):
            return self._run(args, self.timeout_s)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if tree != self._tree:
            raise FeedError(
                f"'{self._graph.name}' was made callable for arguments of the "
                f"structure {self._tree}, and these are {tree}; make another callable "
                "for them"
            )
        return self.run(leaves, {} if feeds is None else feeds, self.timeout_s)

    def run(
        self,
        leaves: Sequence[Any],
        feeds: Mapping[str, Any],
        timeout_s: float,
        *,
        check_finite: bool = False,
    ) -> Any:
        """Runs one step on the leaves of its arguments."""
        arrays = leaf_arrays(self._graph, leaves, feeds, check_finite=check_finite)
        return self._run(arrays, timeout_s)

    def _run(self, arrays: Sequence[Any], timeout_s: float) -> Any:
        handle, timeout_s = self._registration.current(timeout_s)
        if self.plan.prediction is None:
            results = self._programs.run(handle.name, arrays, timeout_s)
        else:
            start_s = _clock.now()
            results = self._programs.run(handle.name, arrays, timeout_s)
            self.recent_s.append(_clock.now() - start_s)
        if self._is_plain:
            return jax.tree_util.tree_unflatten(self._graph.out_tree, results)
        return as_result(self._graph, results)

    def run_traced(
        self,
        leaves: Sequence[Any],
        feeds: Mapping[str, Any],
        timeout_s: float,
        *,
        check_finite: bool = False,
    ) -> tuple[Any, RunMetadata]:
        """Runs one step as ``run`` does, and tells when its nodes ran."""
        arrays = leaf_arrays(self._graph, leaves, feeds, check_finite=check_finite)
        handle, timeout_s = self._registration.current(timeout_s)
        results, parts = self._programs.run_traced(handle.name, arrays, timeout_s)
        metadata = run_metadata(self.plan.program, parts)
        return as_result(self._graph, results), metadata

    def __repr__(self) -> str:
        return f"<callable {self._graph.name}, {self._registration.handle.name}>"

    def _repr_html_(self) -> str:
        handle = self._registration.handle.name
        facts = {"function": self._graph.name, "handle": handle}
        return markup.facts("Callable", facts) + markup.lines(str(self.plan))


@final
class _Handle:
    """A program on its tasks, given up when no step has it and no run of one.

    A program that is taken back ends its runs: one that another thread began before
    the step was registered anew holds the handle that it began with.

    Args:
      programs: registers it.
      program: which.
      phases: see ``Programs.register``.
      timeout_s: likewise.

    Attributes:
      name: by which the tasks know it.
      losses: those of ``programs`` before it was registered.
    """

    __slots__ = ("__weakref__", "losses", "name")

    def __init__(
        self,
        programs: Programs,
        program: Program,
        phases: Sequence[tuple[str, float, float]] = (),
        timeout_s: float = REGISTER_S,
    ) -> None:
        self.losses = programs.losses
        self.name = programs.register(program, phases=phases, timeout_s=timeout_s)
        weakref.finalize(self, programs.give_up, self.name).atexit = False


@final
class _Registration:
    """The handle of a program, which is another one after a task was lost.

    Args:
      programs: registers it.
      program: which.
      phases: see ``Programs.register``.

    Attributes:
      handle: of the last time that it was registered.
    """

    def __init__(
        self,
        programs: Programs,
        program: Program,
        phases: Sequence[tuple[str, float, float]],
    ) -> None:
        self._programs, self._program = programs, program
        self._lock = threading.Lock()
        self.handle = _Handle(programs, program, phases)

    def current(self, timeout_s: float) -> tuple[_Handle, float]:
        """Registers anew if a task was lost since, with all it had.

        Args:
          timeout_s: of the step; registering is a part of it then.

        Returns:
          What a run holds until it is over, and the seconds that it has left.

        Raises:
          DeadlineError: it takes longer, here or in another thread.
          JGError: a task cannot take it: it is not back yet.
        """
        handle = self.handle
        if handle.losses == self._programs.losses:
            return handle, timeout_s
        deadline = _clock.now() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise DeadlineError(
                f"another thread registers '{self._program.name}' anew, as a task was "
                f"lost, and had not done so after {timeout_s:g} s; call it again, or "
                "give a larger timeout_s"
            )
        try:
            if self.handle.losses != self._programs.losses:
                left_s = max(_LEAST_S, deadline - _clock.now())
                self.handle = _Handle(self._programs, self._program, timeout_s=left_s)
            return self.handle, max(_LEAST_S, deadline - _clock.now())
        finally:
            self._lock.release()


@final
@dataclass(slots=True)
class _FunctionSteps:
    """The steps of one function.

    Attributes:
      steps: by what a run asks for.
      by_graph: by the graph and by what is asked of it.
      graphs: those that it was traced to, in order.
    """

    steps: dict[Any, PreparedStep] = field(default_factory=dict)
    by_graph: dict[Any, PreparedStep] = field(default_factory=dict)
    graphs: list[Graph] = field(default_factory=list)


@final
class Steps:
    """Prepares functions once per types of arguments and per what is asked of them.

    What is prepared is kept as long as its function: a ``jg.function`` as long as
    anybody has it, of other functions and methods the last ``MAX_PLAIN``.

    Args:
      variables: where variables are.
      programs: registers.
      values: gives variables their initial values.
      container: where variables without a container of their own live.
      watch: gets the plan of every new step, and the seconds of its last runs.
    """

    def __init__(
        self,
        variables: VariableDirectory,
        programs: Programs,
        values: VariableValues,
        container: str,
        watch: Callable[[Plan, Sequence[float]], None] | None = None,
    ) -> None:
        self._watch = watch
        self._variables = variables
        self._programs = programs
        self._values = values
        self._container = container
        self._functions: OrderedDict[Any, Function] = OrderedDict()
        self._by_function: WeakKeyDictionary[Function, _FunctionSteps] = (
            WeakKeyDictionary()
        )

    def function(self, fn: Callable[..., Any]) -> Function:
        """Returns what ``jg.function`` gives for ``fn``, the same for the same.

        Raises:
          ConfigError: it cannot be called, or is a variable.
        """
        if isinstance(fn, Function):
            return fn
        if isinstance(fn, Variable):
            raise ConfigError(
                f"run takes a function, and '{fn.name}' is a variable; its value is "
                f"session.read([{fn.name}])['{fn.name}']"
            )
        if not callable(fn):
            raise ConfigError(
                f"run takes a function, not {fn!r:.60}; write for example "
                "session.run(step, x)"
            )
        # Python makes a new object of a method each time that it is named.
        key: Any = id(fn)
        if isinstance(fn, MethodType):
            key = id(fn.__self__), fn.__func__
        function = self._functions.get(key)
        if function is None:
            function = self._functions[key] = Function(fn)
            if len(self._functions) > MAX_PLAIN:
                self._functions.popitem(last=False)
        else:
            self._functions.move_to_end(key)
        return function

    def prepare(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        fetches: Any,
        feeds: Iterable[str],
        targets: Targets,
    ) -> tuple[PreparedStep, list[Any]]:
        """Returns the step, and the leaves of the arguments.

        Raises:
          FeedError, FetchError: the function has no such argument, tap or result.
        """
        if kwargs:
            args, kwargs = function.positional(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        target_keys = None if targets is None else _targets(targets, self._container)
        request = repr(fetches), _names(feeds), target_keys
        kinds = tuple(map(_kind, leaves))
        key = tree, kinds, request, current_device(), trace_settings()
        function_steps = self._by_function.get(function)
        if function_steps is None:
            function_steps = self._by_function[function] = _FunctionSteps()
        step = function_steps.steps.get(key)
        if step is None:
            with show_wait(f"tracing, placing and compiling '{function.name}'"):
                began = _clock.now()
                graph, variables = self._traced(function, function_steps, args, kwargs)
                traced = ("trace", began, _clock.now())
                graph_key = id(graph), request
                if graph_key not in function_steps.by_graph:
                    graph_here = _of_variables(graph, variables)
                    part = _chosen(graph_here, fetches, request[1], target_keys)
                    function_steps.by_graph[graph_key] = self._register(
                        part, variables, tree, traced
                    )
            step = function_steps.steps[key] = function_steps.by_graph[graph_key]
        return step, leaves

    def plan(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        """Returns what goes where when ``function`` runs with such arguments."""
        graph, variables = function.trace(*args, **kwargs)
        variables = in_container(variables, self._container)
        self._variables.look_up(v.spec for v in variables)
        return self._variables.plan(_of_variables(graph, variables))

    def clear(self) -> None:
        """Forgets all steps, also on the tasks."""
        self._by_function.clear()
        self._programs.unregister_all()

    def _traced(
        self,
        function: Function,
        function_steps: _FunctionSteps,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Graph, tuple[Variable, ...]]:
        traces = function.traces
        graph, variables = function.trace(*args, **kwargs)
        own = in_container(variables, self._container)
        if function.traces == traces and self._lacks(own):
            # Names may stand for other variables than when it was traced, and what is
            # made now is the initial value of those that they stand for.
            function.forget()
            function_steps.graphs.clear()
            graph, variables = function.trace(*args, **kwargs)
            own = in_container(variables, self._container)
        if not any(graph is other for other in function_steps.graphs):
            if function_steps.graphs:
                _announce(function, function_steps.graphs[-1].feeds, graph.feeds)
            function_steps.graphs.append(graph)
        return graph, own

    def _lacks(self, variables: Sequence[Variable]) -> bool:
        """Whether one of these has no value on the cluster yet."""
        new = self._variables.unknown(variables)
        stored_keys = self._variables.look_up(v.spec for v in new) if new else set()
        return any(s.key not in stored_keys for v in new for s in v.spec.shards)

    def _register(
        self,
        graph: Graph,
        variables: Sequence[Variable],
        tree: Any,
        traced: tuple[str, float, float],
    ) -> PreparedStep:
        new = self._variables.unknown(variables)
        if new:
            self._variables.look_up(v.spec for v in new)
        began = _clock.now()
        plan = self._variables.plan(_of_variables(graph, variables))
        phases = (traced, ("plan and lower", began, _clock.now()))
        if new:
            self._values.initialize_where_possible(new)
        registration = _Registration(self._programs, plan.program, phases)
        step = PreparedStep(graph, plan, registration, self._programs, tree)
        if self._watch is not None:
            self._watch(plan, step.recent_s)
        return step


def in_container(variables: Iterable[Variable], container: str) -> tuple[Variable, ...]:
    """Returns variables with a container: their own, or this one."""
    return tuple(
        v if v.spec.container or not container else v.with_container(container)
        for v in variables
    )


def _of_variables(graph: Graph, variables: Sequence[Variable]) -> Graph:
    return replace(graph, variables=tuple(v.spec for v in variables))


def _chosen(
    graph: Graph,
    fetches: Any,
    feeds: Sequence[str],
    targets: frozenset[str | VariableKey] | None,
) -> Graph:
    if fetches is not None or targets is not None:
        graph = select_fetches(graph, fetches)
    arguments = {feed.name for feed in graph.feeds}
    graph = feed_taps(graph, [name for name in feeds if name not in arguments])
    return graph if targets is None else select_targets(graph, targets)


def _targets(targets: object, container: str) -> frozenset[str | VariableKey]:
    if isinstance(targets, str | Variable):
        raise ConfigError(f"targets is a list; write targets=[{targets!r:.60}]")
    keys: list[str | VariableKey] = []
    for target in targets if isinstance(targets, Iterable) else [targets]:
        if isinstance(target, str):
            keys.append(target)
        elif isinstance(target, Variable):
            keys.append(in_container([target], container)[0].spec.key)
        else:
            raise ConfigError(
                f"targets has {target!r:.60}, which is no variable and no name of one; "
                "write for example targets=[w] or targets=['w']"
            )
    return frozenset(keys)


def _names(feeds: object) -> tuple[str, ...]:
    entries = list(feeds) if isinstance(feeds, Iterable) else [feeds]
    names = [name for name in entries if isinstance(name, str)]
    if isinstance(feeds, str) or len(names) < len(entries):
        raise FeedError(
            f"feeds of a callable is {feeds!r:.60}; give names, feeds=['x'], and the "
            "arrays when you call it"
        )
    return tuple(sorted(names))


def _kind(leaf: Any) -> Any:
    """Returns what a trace depends on of an argument."""
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or isinstance(leaf, type):
        return type(leaf)
    return tuple(leaf.shape), dtype, getattr(leaf, "weak_type", False)


def _announce(
    function: Function, before: Sequence[Feed], after: Sequence[Feed]
) -> None:
    types = {feed.name: value_type(feed.aval) for feed in before}
    changes = [
        f"{feed.name} is {now} and was {types[feed.name]}"
        for feed in after
        if (now := value_type(feed.aval)) != types.get(feed.name, now)
    ]
    _logger.warning(
        "'%s' is traced, planned and compiled anew%s; each new type of arguments "
        "costs this once",
        function.name,
        f": {', '.join(changes)}" if changes else "",
    )
