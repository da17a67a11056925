"""Session: runs functions over a cluster's variables on behalf of a client."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self, final

import numpy as np

from jgraph.client.connection import Connection
from jgraph.client.feeding import check_by_name
from jgraph.client.prepared_step import PreparedStep, Steps, Targets, in_container
from jgraph.client.programs import STEP_S, Programs
from jgraph.client.runs.loops import LoopHandle
from jgraph.client.state.holdings import ClusterResources
from jgraph.client.state.snapshots import Snapshots
from jgraph.client.values import VariableValues, checked_values
from jgraph.client.variables import VariableDirectory, as_variables
from jgraph.cluster.deadlines import bulk_timeout_s
from jgraph.cluster.loop_messages import LoopRequest
from jgraph.cluster.options import check_options, check_platforms
from jgraph.coordination.step.run_metadata import RunMetadata
from jgraph.counts import check_flags, is_duration
from jgraph.errors import ConfigError
from jgraph.errors.tracebacks import short_traceback
from jgraph.graph.ir import TaskName, VariableKey, VariableSpec
from jgraph.graph.variable import Variable
from jgraph.plan.plan import Plan
from jgraph.plan.program.program import Program
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.view import markup

if TYPE_CHECKING:
    from jgraph.client.placement.auto import AutoPlacement


@final
class Session:
    """Runs functions over variables on a cluster.

    A function is traced, planned, compiled and registered on its tasks at its first
    run for some types of arguments; later runs only send feeds and fetch results.
    Variables that have no value yet get their initial one before the first run that
    uses them.

    Args:
      cluster: a ``LocalCluster`` or what ``jg.connect`` gave.
      container: where variables live that have no container of their own. Sessions
        of one container share variables by name; those of two never do.
      soft_placement: an operation that asks for a kind of device that its task does not
        have (``jg.device("/gpu:0")``) runs on a device that the task has. Else it is an
        error, which names the operation and its line.
      platforms: kinds of device, ``("cpu", "cuda")``, for which all code is compiled
        beside the kind of its task, so that the program also runs on another task. For
        a task that has not answered yet it is compiled for both.
      placement: what ``jg.auto`` gave: it places operations and variables without a
        device by predicted time and memory. If unset, they are placed by bytes on the
        wire.

    Example:
      >>> import jax.numpy as jnp
      >>> import jgraph as jg
      >>> server = jg.Server({"worker": ["localhost:0"]})
      >>> w = jg.Variable("w", jnp.arange(3.0), device="/job:worker/task:0")
      >>> @jg.function
      ... def scale(x):
      ...     w[...] = w[...] * x
      ...     return w[...].sum()
      >>> with jg.connect(server.target) as cluster, cluster.session() as sess:
      ...     float(sess.run(scale, 2.0))
      6.0
      >>> server.stop()
    """

    def __init__(
        self,
        cluster: Connection,
        *,
        container: str = "",
        soft_placement: bool = False,
        platforms: Sequence[str] = (),
        placement: "AutoPlacement | None" = None,
    ) -> None:
        check_flags(soft_placement=soft_placement)
        check_platforms(platforms)
        if not isinstance(container, str):
            raise ConfigError(
                f"container is {container!r:.60}; give a name, or leave it out"
            )
        if placement is not None and not hasattr(placement, "planner"):
            raise ConfigError(
                f"placement is {placement!r:.60}; give what jg.auto(cluster) returns"
            )
        self._cluster = cluster
        self.container = container
        self._variables = VariableDirectory(
            cluster,
            soft_placement=soft_placement,
            platforms=platforms,
            auto=None if placement is None else placement.planner,
        )
        self._programs = Programs(cluster)
        self._values = VariableValues(self._variables, self._programs)
        self.snapshots = Snapshots(cluster, self._variables, self._values)
        self._steps = Steps(
            self._variables,
            self._programs,
            self._values,
            container,
            watch=None if placement is None else placement.watch,
        )
        self._run_metadata: RunMetadata | None = None
        self._closed = False
        self._holdings = ClusterResources(cluster)
        self._holdings.hold(self._programs.unregister_all)
        weakref.finalize(self, self._holdings.drop_soon).atexit = False

    # ------------------------------------------------------------ running

    @short_traceback
    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        fetches: Any = None,
        feeds: Mapping[str, Any] | None = None,
        targets: Targets = None,
        timeout_s: float = STEP_S,
        check_finite: bool = False,
        trace: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs one step of a function and returns its results as numpy arrays.

        Args:
          fn: what ``jg.function`` gave, or any JAX-traceable function.
          *args: arguments of ``fn``, arrays in pytrees.
          fetches: which results and tapped values (``jg.tap``) to fetch, as a pytree
            of names (``"loss"``, ``0``); what they do not need is not computed. If
            unset, all results; or nothing, if there are targets.
          feeds: values by name for single arguments, such as ``"batch['image']"``, in
            place of those in ``args``, and for tapped values.
          targets: variables (or their names) that the step is to update, and no
            others; with ``[]`` it updates none. All that ``fn`` writes if unset.
          timeout_s: limit for the step, in seconds.
          check_finite: refuse feeds with NaN or infinity.
          trace: note when every node of the step runs, see ``run_metadata``.
          **kwargs: keyword arguments of ``fn``. A parameter of it that is called like
            one of the options above can be given by position only.

        Raises:
          FeedError: a feed of the wrong name, shape or dtype.
          FetchError: no such result, tapped value or target; or it depends on an
            update that is no target.
          ConfigError: ``fn`` is no function, ``timeout_s`` no time, or an option is
            also a parameter of ``fn``.
          DeadlineError: the step was not done in time; it names the tasks.
          ClusterBusyError: its task had too many calls, for all of ``timeout_s``.
          TaskLostError: a task went away.
          JGError: anything else that went wrong, on whichever task.
        """
        self._check_open()
        _check_timeout(timeout_s)
        function = self._steps.function(fn)
        options = {
            "fetches": fetches is not None,
            "feeds": feeds is not None,
            "targets": targets is not None,
            "timeout_s": timeout_s != STEP_S,
            "check_finite": check_finite,
            "trace": trace,
        }
        check_options(function, len(args), options)
        check_flags(check_finite=check_finite, trace=trace)
        feeds = {} if feeds is None else feeds
        check_by_name(feeds)
        step, leaves = self._steps.prepare(
            function, args, kwargs, fetches=fetches, feeds=feeds, targets=targets
        )
        if not trace:
            return step.run(leaves, feeds, timeout_s, check_finite=check_finite)
        result, self._run_metadata = step.run_traced(
            leaves, feeds, timeout_s, check_finite=check_finite
        )
        return result

    @short_traceback
    def make_callable(
        self,
        fn: Callable[..., Any],
        *args: Any,
        fetches: Any = None,
        feeds: Iterable[str] = (),
        targets: Targets = None,
        timeout_s: float = STEP_S,
        **kwargs: Any,
    ) -> PreparedStep:
        """Prepares a step now; calling what it returns only runs it.

        Args:
          fn: as in ``run``.
          *args: arguments, or ``jax.ShapeDtypeStruct`` in their place.
          fetches: as in ``run``.
          feeds: names of tapped values that each call is to give (``feeds={…}``).
          targets: as in ``run``.
          timeout_s: limit for each call, in seconds.
          **kwargs: like ``args``.

        Raises:
          JGError: as ``run``.
        """
        self._check_open()
        _check_timeout(timeout_s)
        function = self._steps.function(fn)
        options = {"fetches": fetches is not None, "timeout_s": timeout_s != STEP_S}
        options |= {"feeds": bool(feeds), "targets": targets is not None}
        check_options(function, len(args), options)
        step, _ = self._steps.prepare(
            function, args, kwargs, fetches=fetches, feeds=feeds, targets=targets
        )
        step = copy(step)
        step.timeout_s, step.check_open = timeout_s, self._check_open
        return step

    @property
    def run_metadata(self) -> RunMetadata:
        """When every node of the last step with ``trace=True`` ran, on all tasks.

        Raises:
          ConfigError: no step was traced yet.
        """
        if self._run_metadata is None:
            raise ConfigError(
                "no step of this session was traced yet; write "
                "session.run(step, …, trace=True)"
            )
        return self._run_metadata

    @short_traceback
    def plan(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
        """Returns what goes where when ``fn`` runs with such arguments."""
        self._check_open()
        return self._steps.plan(self._steps.function(fn), args, kwargs)

    # ------------------------------------------------------------ variables

    @short_traceback
    def initialize(
        self, variables: Variable | Iterable[Variable], *, again: bool = False
    ) -> None:
        """Gives variables their initial values, on the tasks that hold them.

        Args:
          variables: those to initialise, or one.
          again: also those that have a value already.

        Raises:
          UninitializedError: one has neither a value nor an init function.
          VariableMismatchError: the cluster has a variable of that name with another
            shape or dtype.
        """
        check_flags(again=again)
        self._check_open()
        self._values.initialize(self._own(variables, "initialize"), again=again)

    @short_traceback
    def read(self, variables: Variable | Iterable[Variable]) -> dict[str, Any]:
        """Returns the values of variables by name, as numpy arrays.

        Those of one task that make up to 16 MB together are read at one moment; more
        are read piece by piece, so that no task needs memory for all at once.

        Raises:
          ConfigError: two of them have one name, in different containers.
        """
        self._check_open()
        return self._values.read(self._own(variables, "read"))

    @short_traceback
    def snapshot(self, variables: Variable | Iterable[Variable]) -> dict[str, Any]:
        """Returns the values of variables by name, those of each task at one moment.

        Other steps may update the variables meanwhile, without waiting. Until the
        values are read each task needs twice the memory of its variables.

        Raises:
          ConfigError: two of them have one name, in different containers.
        """
        self._check_open()
        own = self._own(variables, "snapshot")
        with self.snapshots.take(own) as handle:
            return handle.read(own)

    @short_traceback
    def write(self, values: Mapping[Variable, Any]) -> None:
        """Replaces the values of variables; creates those that have none.

        Args:
          values: arrays of the variables' types, or Python numbers, also in lists.

        Raises:
          VariableMismatchError: a value, or what is stored under the name, has
            another shape or dtype than the variable.
        """
        self._check_open()
        self._values.write(self._own(values, "write"), checked_values(values))

    @short_traceback
    def reset(self, *containers: str) -> None:
        """Drops the variables of these containers on all tasks.

        None named: those of this session's container. Its steps are prepared anew when
        they are run again; other sessions that used the variables must write or
        initialise them before they do.

        Args:
          *containers: names; ``""`` is the container of whatever has none.
        """
        self._check_open()
        self._cluster.reset(*(containers or (self.container,)))
        self._steps.clear()
        self._variables.forget()

    # ------------------------------------------------------------ for trainers

    def register(self, program: Program, name: str | None = None) -> str:
        """Compiles a program on its tasks and returns its handle."""
        self._check_open()
        return self._programs.register(program, name)

    def register_all(self, programs: Sequence[Program]) -> list[str]:
        """Compiles programs side by side and returns their handles."""
        self._check_open()
        return self._programs.register_all(programs)

    def unregister(self, handle: str) -> None:
        """Makes all tasks forget a program."""
        self._programs.unregister(handle)

    def put_data(self, task: TaskName, name: str, data: Mapping[str, Any]) -> None:
        """Uploads a data set to one task: arrays by feed name."""
        self._check_open()
        tensors = [np.ascontiguousarray(array) for array in data.values()]
        self._cluster.call(
            "PutData",
            frame(put_data=pb.PutData(name=name, fields=list(data)), tensors=tensors),
            timeout_s=bulk_timeout_s(sum(t.nbytes for t in tensors)),
            to=self._cluster.spec.address(task),
        )

    def run_loops(self, requests: Sequence[LoopRequest]) -> LoopHandle:
        """Sets replica loops going on their tasks; iterate over it for reports."""
        self._check_open()
        return LoopHandle(self._cluster, requests, self)

    def lacking(self, variables: Sequence[Variable]) -> list[VariableSpec]:
        """Returns those without a value; of a sharded variable its shards."""
        self._check_open()
        return self._values.lacking(in_container(variables, self.container))

    def variable_tasks(
        self, variables: Sequence[Variable]
    ) -> dict[VariableKey, TaskName]:
        """Returns the tasks by (container, name), choosing where that is free.

        Of a sharded variable, those of its shards.
        """
        self._check_open()
        specs = [v.spec for v in in_container(variables, self.container)]
        self._variables.look_up(specs)
        return self._variables.choose(specs)

    # ------------------------------------------------------------ end

    def let_go(self) -> None:
        """Leaves its programs on the tasks when it goes: a run needs them."""
        self._holdings.let_go()

    def close(self) -> None:
        """Makes the tasks forget this session's programs; variables stay."""
        if self._closed:
            return
        self._closed = True
        self._steps.clear()
        self.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._programs)} programs"
        return f"<Session on {self._cluster!r}: {state}>"

    def _repr_html_(self) -> str:
        facts = {
            "cluster": repr(self._cluster),
            "container": self.container or "(the common one)",
            "state": "closed" if self._closed else "open",
            "programs": len(self._programs),
        }
        return markup.facts("Session", facts)

    # ------------------------------------------------------------ inside

    def _own(self, argument: object, method: str) -> tuple[Variable, ...]:
        return in_container(as_variables(argument, method), self.container)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError(
                "this session is closed; open another with cluster.session()"
            )
        self._cluster.check_open()


def _check_timeout(timeout_s: object) -> None:
    if not is_duration(timeout_s):
        raise ConfigError(
            f"timeout_s is {timeout_s!r:.60}; give the seconds that a step may take, "
            f"for example {STEP_S:g}"
        )
