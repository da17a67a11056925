"""Runs on a cluster: what asynchronous and synchronous training have alike."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, final

from jgraph.client.runs.failover import ask_with_failover
from jgraph.client.runs.follower import Owner, RunFollower
from jgraph.client.runs.runs import RunInfo
from jgraph.client.runs.submission import MakeLoops, submit_run
from jgraph.cluster.loop_messages import ARBITER, DealtData, LoopReport, first_handle
from jgraph.coordination.data.batch_book import BatchBook
from jgraph.errors import ClusterError, ConfigError, JGError
from jgraph.graph.ir import TaskName
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.train.data.data import Dataset
from jgraph.train.run.members import MemberBook
from jgraph.train.run.rounds import RoundBook
from jgraph.train.state.early_losses import EarlyLosses, EarlyWait
from jgraph.train.state.remote_state import RemoteState
from jgraph.train.state.runner import Chunk, Order, Position
from jgraph.train.step.train_step import TrainStep
from jgraph.train.strategies.autoscaling import AutoScaling, scaling_of
from jgraph.train.strategies.elastic import Elastic
from jgraph.train.strategies.messages import about_run
from jgraph.train.strategies.prepared import Prepared, PsCuts, plan_cuts
from jgraph.train.strategies.workers import Workers, chunks_of, end_run

_T = TypeVar("_T")


@final
class RemoteRuns:
    """Prepares runs on a cluster, submits them to their master, and follows them.

    Args:
      state: what they change.
      make: given the types of a batch, and where variables are, traces and plans the
        step.
      elastic: how many workers a run may have; None: those that it begins with.
      orders: what the master is told of that.
    """

    def __init__(
        self,
        state: RemoteState,
        make: Callable[[Any, TrainStep], Prepared],
        elastic: Elastic | None,
        orders: pb.RunElastic | None,
    ) -> None:
        self._state = state
        self._elastic, self._elastic_order = elastic, orders
        self.members = MemberBook()
        """Who takes part in the newest run."""
        self.rounds = RoundBook()
        """Who took part in its rounds."""
        self.workers = Workers(state)
        self._make = make
        self._prepared: dict[str, Prepared] = {}
        self.variant: object = None
        """Of the step, where there are several for such batches."""
        self.last: Prepared | None = None
        """What was prepared last."""
        self._has_replaced = False  # programs, since they were registered
        # Handles of the runs before, of which a detached one may go on.
        self._of_runs: frozenset[str] = frozenset()
        self._follower: RunFollower | None = None
        self._has_gone_back = False
        self._question_position: Position = None
        """Where the run is that asks something."""

    def prepare(self, dataset: Dataset, batch_size: int) -> Prepared:
        """Returns the step for such batches, made once per shape."""
        batch = dataset.step_avals(batch_size)
        key = f"{batch} {dataset.note} {self.variant}"
        if key not in self._prepared:
            step = self._make(batch, self._state.step)
            step.plan = replace(step.plan, graph=dataset.noted(step.plan.graph))
            self._prepared[key] = step
        self.last = self._prepared[key]
        return self.last

    def renew_workers(self) -> None:
        """Takes note of who has joined the cluster since, or left."""
        elastic, cluster = self._elastic is not None, self._state.cluster
        if not (elastic or cluster.arrangement):
            return
        if ask_with_failover(cluster, self.workers.renew_tasks):
            self._has_replaced = True
            self._prepared.clear()  # a mean may be of more contributions

    def _make_all_ready(
        self,
        order: Order,
        cut: Callable[[Order], Order],
        book: Callable[[Order], BatchBook] | None,
    ) -> tuple[Prepared, Order]:
        """Makes ready all that a run needs: variables, programs, copies and data.

        A worker that leaves the cluster meanwhile has no part in it.

        Args:
          order: what to train.
          cut: returns that for the workers that there are, of whom batches may hang.
          book: where the run begins, if its workers train in step.

        Returns:
          The step of the run, and what ``cut`` returned.
        """
        wait = EarlyWait(self._state.cluster, order.wait_s, order.stop)
        while True:
            wait.outlive(self.renew_workers)
            now = cut(order)
            prepared = self.prepare(now.dataset, now.batch_size)
            if self._elastic is not None:
                self._elastic.check_count(len(self.workers.tasks))
            self._check_ps(now)
            self._of_runs = frozenset(prepared.handles)
            self.workers.end_feeding()  # of a run that never began
            begins = None if book is None else partial(book, now)
            make_ready = partial(self._make_ready, prepared, now, begins)
            try:
                self._outlive(prepared, now, make_ready)
            except JGError:
                if not self._has_one_left():
                    raise
            else:
                return prepared, now

    def _has_one_left(self) -> bool:
        """Whether a worker has left the cluster since this run was prepared."""
        cluster = self._state.cluster
        if self._elastic is not None:
            with suppress(JGError):  # nobody says so
                ask = partial(cluster.renewed_tasks, "worker")
                there = ask_with_failover(cluster, ask)
                return not set(self.workers.tasks) <= set(there)
        return False

    def _make_ready(
        self,
        prepared: Prepared,
        order: Order,
        book: Callable[[], BatchBook] | None = None,
    ) -> None:
        """Gives variables their values, and tasks the programs and data of a run.

        Args:
          prepared: its step.
          order: what to train.
          book: where it begins; what feeds the workers has it from the first time.

        Raises:
          TaskLostError: one of them is gone, or another process by now.
        """
        state, workers = self._state, self.workers.tasks
        is_new = not prepared.handles or self._has_replaced
        # Tasks compile while this client makes and sends the initial values.
        with state.lock, ThreadPoolExecutor(1) as thread:
            # First: a worker that was started again since is known by lacking it.
            self.workers.upload(prepared.graph, order, book)
            registration = thread.submit(self._register, prepared) if is_new else None
            state.initialize()
            if order.save_every and order.lease_s is not None:  # this client saves
                state.prepare_to_keep(anew=self._has_replaced)
            if registration is not None:
                registration.result()
            self._keep_copies(prepared)
            if state.copies is not None:
                state.copies.admit(0, prepared.handles[: len(workers)])
                for number, handle in enumerate(prepared.handles[len(workers) :], 1):
                    state.copies.admit(number, [handle])
            state.check_values()
            self._has_replaced = False

    def _register(self, prepared: Prepared) -> None:
        workers = self.workers.tasks
        programs = prepared.programs(workers)
        prepared.handles = self._state.session.register_all(programs)
        prepared.workers = dict(zip(prepared.handles, workers, strict=False))

    def _outlive(self, prepared: Prepared, order: Order, work: Callable[[], _T]) -> _T:
        """Returns what is done before a run begins, which is done again after losses.

        Raises:
          JGError: see ``EarlyLosses.outlive``; no task has the programs any more.
        """
        forget = partial(self._forget, prepared)
        losses = EarlyLosses(self._state, order, forget, self._has_one_left)
        try:
            return losses.outlive(work)
        except JGError:
            self._take_back(prepared)
            raise

    def _forget(self, prepared: Prepared) -> None:
        """Makes all anew next time that tasks have: one of them may have lost it."""
        self._has_replaced = True
        self.workers.renews_data = True
        self._take_back(prepared)
        if self._state.copies is not None:
            self._state.copies.end()

    def _take_back(self, prepared: Prepared) -> None:
        """Makes all tasks forget the programs that were registered for a run."""
        handles, prepared.handles = prepared.handles, []
        with suppress(ClusterError, ConfigError):  # it ends, or the client was closed
            for handle in handles:
                if handle not in self._of_runs:
                    self._state.session.unregister(handle)

    def _keep_copies(self, prepared: Prepared) -> None:
        # First: what counts contributions is copied with all that a ps holds.
        self._state.clear_residuals(prepared.graph)
        if self._state.copies is not None:
            self._state.has_copies = True
            programs = [prepared.plan.program, *prepared.on_ps]
            updates = len(prepared.on_ps) or None
            self._state.copies.open(programs, updates=updates)

    def run(
        self,
        order: Order,
        make: Callable[[Prepared, Order], MakeLoops],
        deal: Callable[[Order], DealtData | None] = lambda order: None,
        *,
        cut: Callable[[Order], Order] = lambda order: order,
        book: Callable[[Order], BatchBook] | None = None,
    ) -> Generator[Chunk, None, None]:
        """Yields what a run does, to its end; unread, it ends.

        Args:
          order: what to train.
          make: given the step and what ``cut`` returned, see ``submit_run``.
          deal: given that, returns what is dealt out; None: training is synchronous,
            and a loop decides.
          cut: see ``_make_all_ready``.
          book: likewise.
        """
        begin_scaling = scaling_of(self._state.cluster, self._elastic)
        try:
            while True:
                while (pair := self._begun(order, make, deal, cut, book)) is None:
                    pass  # for who is left
                prepared, run = pair
                order.at_master.set()
                is_initial, is_told = self._state.is_initial, False
                scaling = begin_scaling(run.info.name) if begin_scaling else None
                try:
                    with closing(self._scaled(run, prepared.names, scaling)) as chunks:
                        for chunk in chunks:
                            is_told = True
                            yield chunk
                except JGError as error:
                    if is_told or not is_initial or run.is_stopped:
                        raise
                    self._begin_anew(prepared, order, error)
                else:
                    return
        except JGError:
            self.workers.forget_data()
            raise
        finally:
            self.workers.end_feeding()
            self._state.has_copies = False

    def _scaled(
        self, run: RunFollower, names: Sequence[str], scaling: AutoScaling | None
    ) -> Generator[Chunk, None, None]:
        """Yields what a run does, and lets it be scaled; unread, it ends."""
        try:
            for chunk in self._follow(run, names):
                if scaling is not None:
                    scaling.take(chunk, self.members.members())
                yield chunk
        except GeneratorExit:
            end_run(run)
            raise
        finally:
            if scaling is not None:
                scaling.close()

    def _begun(
        self,
        order: Order,
        make: Callable[[Prepared, Order], MakeLoops],
        deal: Callable[[Order], DealtData | None],
        cut: Callable[[Order], Order],
        book: Callable[[Order], BatchBook] | None,
    ) -> tuple[Prepared, RunFollower] | None:
        """Prepares a run and lets its master begin it.

        Returns:
          Its step, and who follows it; None: something was lost as it was told of, and
          a worker of it has left since, so that it is to be prepared anew.
        """
        state, owner = self._state, None
        prepared, order = self._make_all_ready(order, cut, book)
        if order.lease_s is not None:
            give = partial(self._give_data, prepared, order.dataset)
            owner = Owner(give, state.hold(), self._move_to, self._look_at)
        wait_s = order.wait_s if self._elastic is None else self._elastic.wait_s
        order, self.members = replace(order, wait_s=wait_s), MemberBook()
        self.rounds = RoundBook()
        state.begin_run()
        self.rounds.nbytes = prepared.plan.nbytes_per_step
        loops = make(prepared, order)
        submit = partial(self._submit, prepared, order, loops, deal(order), owner)
        try:
            return prepared, self._outlive(prepared, order, submit)
        except JGError:
            if not self._has_one_left():
                raise
        self._forget(prepared)
        return None

    def _begin_anew(self, prepared: Prepared, order: Order, error: JGError) -> None:
        """Makes all as it was before a run that ended before its first step.

        A ps was lost as the run was begun: nobody had anything to give it.

        Raises:
          JGError: it ended for another reason, or a lost task does not come back.
        """
        order.stop.clear()  # it was set as the run was over; a stop from now on counts
        self._forget(prepared)
        losses = EarlyLosses(self._state, order, lambda: None, lambda: False)
        losses.begin_anew(error)

    def _submit(
        self,
        prepared: Prepared,
        order: Order,
        make: MakeLoops,
        data: DealtData | None,
        owner: Owner | None,
    ) -> RunFollower:
        """Lets the master begin a run."""
        if self._has_replaced:
            self._make_ready(prepared, order)
        with self._state.lock:
            about = about_run(
                *(self._state, order, prepared),
                synchronous=data is None,
                elastic=self._elastic_order,
                cuts=self._cuts(order, prepared),
            )
            check = self._state.check_values
            world = self._state.cluster, make, about, data, order.stop, owner
            return submit_run(*world, check)

    def attached(
        self, info: RunInfo, stop: threading.Event
    ) -> Generator[Chunk, None, None]:
        """Yields what a run does that another client began, to its end.

        Args:
          info: which run.
          stop: set from another thread: asks the run to stop.
        """
        self._has_gone_back = True  # what it did before is known to its master
        run = RunFollower(self._state.cluster, info, stop)
        try:
            yield from self._follow(run, info.metrics)
        finally:
            run.close()
            self._state.has_copies = False

    def _follow(self, run: RunFollower, names: Sequence[str]) -> Iterator[Chunk]:
        state, together = self._state, run.info.synchronous
        self._follower, state.is_training = run, True
        state.is_initial = False
        try:
            for report, chunk in chunks_of(run, names, together=together):
                if report is not None:
                    self._note(report, run, together=together)
                question = None if chunk is None else chunk.question
                if question is not None:
                    self._question_position = question.position
                    state.is_training = question.kind != "finish"
                if chunk is not None:
                    yield chunk
                self._question_position = None
        finally:
            with suppress(JGError):  # gone, and the run with it
                self._ended(run.position())
            self._follower, state.is_training = None, False

    def _check_ps(self, order: Order) -> None:
        """Refuses a run whose ps join and leave, where that cannot be."""
        elastic, cluster = self._elastic, self._state.cluster
        if elastic is None or elastic.ps is None:
            return
        if order.lease_s is None and order.checkpoint is not None:
            raise ConfigError(
                f"fit(detached=True, checkpoint=…) with jg.Elastic(ps={elastic.ps}): "
                "the master saves a run that is detached, and copies its variables "
                "where they were at the beginning; leave out one of the three"
            )
        if cluster.tasks("evaluator"):
            raise ConfigError(
                f"jg.Elastic(ps={elastic.ps}) on a cluster with evaluators: they look "
                "for parameters where these were; leave out evaluators=, or ps="
            )

    def _cuts(self, order: Order, prepared: Prepared) -> PsCuts | None:
        """Returns the step as it is cut for each number of ps; None: that is fixed."""
        if self._elastic is None or self._elastic.ps is None:
            return None
        batch = order.dataset.avals(order.batch_size)
        make = partial(self._make, batch)
        return plan_cuts(self._state.step, prepared, make, self.workers.tasks)

    def _move_to(self, ps: int) -> None:
        """Looks for the variables on so many ps from now on."""
        state = self._state
        with state.lock:
            if len(state.step.arrangement.ps) != ps:
                with suppress(
                    JGError
                ):  # of one that has joined: it may be unknown here
                    state.cluster.refresh()
                state.move_to(ps)
                self._prepared.clear()
                self._has_replaced = True

    def _look_at(self, number: int, homes: Mapping[TaskName, TaskName]) -> None:
        """Looks for the parts of owners with who has them from now on."""
        with self._state.lock:
            if self._state.look_at(number, homes):
                self._prepared.clear()
                self._has_replaced = True

    def _note(self, report: LoopReport, run: RunFollower, *, together: bool) -> None:
        state, is_restore = self._state, report.restored is not None
        self.members.note(report)
        self.rounds.note(report, together=together)
        if report.rescaled is not None and not report.rescaled.why:
            self._move_to(report.rescaled.ps)
        if report.homes is not None:
            self._look_at(*report.homes)
        if report.handle and self.last is not None:
            handle = first_handle(report.handle)
            self.last.workers.setdefault(handle, report.task)
        state.is_training |= is_restore
        self._has_gone_back |= is_restore
        is_replacement = report.state in {"lost", "left"} or "~" in report.handle
        if report.state in {"lost", "left"}:
            self.workers.forget(report.task)
        self._has_replaced |= is_restore or is_replacement
        if report.replica != ARBITER and not is_restore:
            self.workers.note(report)
            if together and self.workers.ran_out(report):
                run.stop()  # the others would wait for that one

    def _ended(self, position: Position) -> None:
        """Takes note of where in the data a run has come to."""
        if self._has_gone_back:
            self._state.adopt(position)
            self._has_gone_back = False
        else:
            self._state.position = position

    def _give_data(self, prepared: Prepared, dataset: Dataset, task: TaskName) -> None:
        if self._elastic is not None:  # it may have joined since, under an old name
            self._state.cluster.refresh()
        self.workers.renew(task, prepared.graph, dataset)

    def position(self) -> Position:
        """Returns where in its data a run is."""
        if self._question_position is not None:
            return self._question_position
        follower = self._follower
        return self._state.position if follower is None else follower.position()
