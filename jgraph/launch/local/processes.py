"""Task processes on this machine, as their parent starts, watches and ends them.

Imports no JAX: a parent need not have loaded what its tasks load at the same time.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TextIO, TypeVar, final

import psutil

from jgraph.clock import Clock, SystemClock
from jgraph.cluster.events import Event
from jgraph.cluster.options import RECORDS_DIR
from jgraph.cluster.spec import ClusterSpec, check_counts, task_named
from jgraph.cluster.transport_choice import TransportChoice
from jgraph.coordination.liveness.freezes import FROZEN_S
from jgraph.errors import ConfigError, JGError, StartError, UnknownDeviceError
from jgraph.graph.device import TaskName
from jgraph.launch.local.exit_codes import how_it_ended, memory_kills
from jgraph.launch.local.freezes import FreezeWatch
from jgraph.launch.local.log_file import last_lines
from jgraph.launch.local.restarts import Process, Restarter, wait_started
from jgraph.view.units import bytes_text

START_S = 60.0
JOINS: Final = "join"
"""In place of the index of a task that gets one from its cluster."""
_END_S = 5.0
_LOG_LINES = 20
_MODEST: Final = ("ps", "evaluator")
_TASK_BYTES: Final = 100_000_000
_FEW: Final = 16
"""So many tasks are started whatever memory is left."""
_Process = TypeVar("_Process", bound=Process)


@final
class TaskProcess:
    """One task's process.

    Args:
      job: its job.
      index: its index in the job; None: it joins a cluster, and gets one.
      directory: where its log goes.
      environment: variables to set for it.
      transport: see ``Server``.
      tls_directory: with its certificate; empty for plain text.
      allow_sources: see ``Server``.
      overdue_s: see ``Server``.
      joins: the cluster that it joins.
    """

    def __init__(
        self,
        job: str,
        index: int | None,
        directory: Path,
        environment: Mapping[str, str],
        transport: TransportChoice = "auto",
        tls_directory: str = "",
        allow_sources: Sequence[str] = (),
        overdue_s: float | None = None,
        joins: ClusterSpec | None = None,
    ) -> None:
        self.joins = index is None
        """Whether it has joined a cluster that was up."""
        number = JOINS if index is None else str(index)
        self.task = TaskName(f"/job:{job}/task:{number}")
        self.address = ""
        self.log = directory / f"{job}-{number}.log"
        if index is None:  # it is called by its index once it has one
            self.log = directory / f"{job}-{JOINS}-{secrets.token_hex(4)}.log"
        try:
            self.log.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.log} cannot be the log of {self.task}: {error.strerror}; "
                "remove it, or give another log_dir"
            ) from error
        self._which = [job, number]
        overdue = "" if overdue_s is None else str(overdue_s)
        self._options = [transport, tls_directory, overdue, *allow_sources]
        self._environment = {**os.environ, **environment}
        self._kills_before = 0
        self._earlier_pids: set[int] = set()
        if joins is None:
            alone = {job: {index or 0: "127.0.0.1:0"}}
            joins = ClusterSpec(alone, port_zero=True)
        self.process = self._started(joins)

    def start(self, spec: ClusterSpec) -> None:
        """Starts it again, after its end, where it is in ``spec``."""
        self.end()
        self._earlier_pids.add(self.process.pid)
        self.process = self._started(spec)

    def had(self, pid: int) -> bool:
        """Whether this was its process id, now or before it was started again."""
        return pid == self.process.pid or pid in self._earlier_pids

    def _started(self, spec: ClusterSpec) -> "subprocess.Popen[str]":
        # Where its parent imports nothing from the current directory, neither does it.
        safe = ["-P"] if sys.flags.safe_path else []
        module = [*safe, "-m", "jgraph.launch.local.child"]
        child = [sys.executable, *module, *self._which]
        self._kills_before = memory_kills()
        with self.log.open("a") as log:
            return subprocess.Popen(
                [*child, spec.to_json(), *self._options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                # Ctrl-C in the client's terminal is for the client alone.
                start_new_session=True,
            )

    def wait_started(self) -> None:
        """Waits for the process to tell its address.

        Raises:
          StartError: it ended instead; the message has the end of its log.
        """
        facts = json.loads(self._line('{"address": '))
        self.address, task = facts["address"], TaskName(facts["task"])
        if task != self.task:
            stem = task.removeprefix("/job:").replace("/task:", "-")
            self.task, self.log = task, self.log.replace(self.log.with_stem(stem))

    def join(self, spec: ClusterSpec) -> None:
        """Gives the process the description of its cluster, and waits till it has it.

        Raises:
          StartError: it ended instead; the message has the end of its log.
        """
        assert self.process.stdin is not None  # a pipe
        with suppress(BrokenPipeError):  # it has ended, which the answer tells
            self.process.stdin.write(spec.to_json() + "\n")
            self.process.stdin.flush()
        self._line("joined")

    def _line(self, beginning: str) -> str:
        assert self.process.stdout is not None  # a pipe
        # Python itself may say something first: a sitecustomize of this machine.
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith(beginning):
                return line
        code = self.process.wait(_END_S)
        raise StartError(
            f"{self.task} ended with exit code {code} while starting. The end of "
            f"its log:\n{self.tail()}",
            task=self.task,
        )

    def tail(self, lines: int = _LOG_LINES) -> str:
        """Returns the last lines of the log."""
        try:
            with self.log.open("rb") as file:
                return "\n".join(last_lines(file, lines))
        except FileNotFoundError:
            return ""

    def end(self) -> None:
        """Asks the process to end by closing its input."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def wait_dead(self) -> int:
        """Waits for the end, however long it takes; returns the exit code."""
        return self.process.wait()

    def how_it_ended(self) -> str:
        """Returns why it ended, as a part of a sentence."""
        return how_it_ended(self.process.wait(_END_S), self._kills_before)

    def wait_ended(self, timeout_s: float) -> None:
        """Waits for the end; kills the process after ``timeout_s``."""
        end_within(self.process, timeout_s)

    def terminate(self, grace_s: float) -> int:
        """Ends the process by SIGTERM, killed after ``grace_s``; returns its code."""
        process = self.process  # another one when this is over, if it is restarted
        process.terminate()
        return end_within(process, grace_s)

    def is_frozen(self) -> bool:
        """Whether the kernel has stopped it (SIGSTOP), and no debugger has."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False  # it has ended

    def kill(self) -> None:
        """Kills the process, as a crash of its host would."""
        process = self.process  # another one when this is over, if it is restarted
        process.send_signal(signal.SIGKILL)
        process.wait(_END_S)


@final
class TaskProcesses:
    """The processes of all tasks of a cluster, started together.

    Their parent holds their inputs open: they end when it ends, however it ends.
    Logs of updates go to a directory that goes with them, unless their environment, or
    that of their parent, names one.

    Args:
      counts: how many tasks each job has.
      directory: where their logs go.
      environment: variables to set for them; a ps and an evaluator get
        ``JAX_PLATFORMS=cpu`` unless told otherwise, since they must not take an
        accelerator from a worker.
      transport: see ``Server``.
      timeout_s: how long to wait until all listen and know each other.
      tls_directory: where certificates of all tasks are; empty for plain text.
      allow_sources: see ``Server``.
      restarts: how often a task that died is started again within a minute.
      frozen_s: a task that is started again is killed when it is frozen for so long,
        and ends when a computation goes on for so long after its step.
      on_start: called after one was, in another thread.
      clock: dates their ends.

    Raises:
      StartError: one ended while starting, or was not ready in time; none is left.
    """

    def __init__(
        self,
        counts: Mapping[str, int],
        directory: Path,
        environment: Mapping[str, str],
        transport: TransportChoice = "auto",
        timeout_s: float = START_S,
        tls_directory: str = "",
        allow_sources: Sequence[str] = (),
        *,
        restarts: int = 0,
        frozen_s: float = FROZEN_S,
        on_start: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        check_room(sum(counts.values()))
        self._processes: list[TaskProcess] = []
        self._restarter: Restarter | None = None
        self._freeze_watch: FreezeWatch | None = None
        self._again: set[TaskName] = set()
        self._on_start = on_start
        self._records = ""
        if RECORDS_DIR not in {**os.environ, **environment}:
            self._records = tempfile.mkdtemp(prefix="jgraph-updates-")
            environment = {**environment, RECORDS_DIR: self._records}
        self._environments = {
            job: environment_of(job, environment) for job in {*counts, "worker", "ps"}
        }
        self._make = partial(
            TaskProcess,
            directory=directory,
            transport=transport,
            tls_directory=tls_directory,
            allow_sources=allow_sources,
            overdue_s=frozen_s if restarts else None,
        )
        try:
            for job, count in counts.items():
                for index in range(count):
                    environment = self._environments[job]
                    process = self._make(job, index, environment=environment)
                    self._processes.append(process)
            each(self._processes, TaskProcess.wait_started, timeout_s)
            self.spec = self._spec()
            # A task that does not know the others yet would call itself the cluster.
            join = lambda process: process.join(self.spec)
            each(self._processes, join, timeout_s)
            if restarts:
                self._restarter = Restarter(
                    list(self._processes),
                    self.spec,
                    restarts,
                    start_s=START_S,
                    clock=clock or SystemClock(),
                    on_start=on_start,
                )
                self._freeze_watch = FreezeWatch(
                    self._processes,
                    self._restarter.events,
                    clock or SystemClock(),
                    frozen_s,
                )
        except BaseException:
            self.end()
            raise

    def __getitem__(self, task: str) -> TaskProcess:
        by_name = {process.task: process for process in self._processes}
        return by_name[task_named(task, list(by_name))]

    def start_joiners(
        self, count: int, job: str = "worker", timeout_s: float = START_S
    ) -> None:
        """Starts tasks that join the cluster, and waits until they serve.

        Args:
          count: how many.
          job: of which they are: workers or ps.
          timeout_s: limit.

        Raises:
          ConfigError: there is no memory for so many.
          StartError: one ended while starting, or was not ready in time; none of them
            is left.
        """
        check_room(count)
        environment = self._environments[job]
        make = partial(self._make, environment=environment, joins=self.spec)
        joiners = [make(job, None) for _ in range(count)]
        each(joiners, TaskProcess.wait_started, timeout_s)
        each(joiners, lambda process: process.join(self.spec), timeout_s)
        for process in joiners:
            with suppress(UnknownDeviceError):  # that was lost, or has left by itself
                self.forget(process.task)
        self._processes += joiners
        if self._restarter is not None:
            for process in joiners:
                self._restarter.watch(process)
        self._on_start()

    def forget_ended(self) -> None:
        """Forgets the tasks that joined and have left again."""
        for process in list(self._processes):
            if process.joins and process.process.poll() == 0:
                self.forget(process.task)

    def forget(self, task: TaskName) -> None:
        """Waits for the end of a task that left the cluster, which is its last."""
        process = self[task]
        self._processes.remove(process)
        if self._restarter is not None:
            self._restarter.forget(process)
        process.end()
        process.wait_ended(_END_S)
        self._on_start()

    @property
    def master(self) -> TaskName:
        """The chief (worker 0) if there is one: it serves no variables to others."""
        chief = TaskName("/job:worker/task:0")
        tasks = [process.task for process in self._processes]
        return chief if chief in tasks else tasks[0]

    def forget_process(self, task: TaskName, pid: int) -> None:
        """Forgets a task that left, unless another process has its name by now.

        Args:
          task: the task that left.
          pid: its process id when it left, or before it was started again last.
        """
        if any(p.task == task and p.had(pid) for p in self._processes):
            self.forget(task)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by task."""
        return {p.task: p.process.pid for p in self._processes}

    def events(self) -> list[Event]:
        """Returns what became of processes that are started again."""
        return [] if self._restarter is None else self._restarter.events.newest()

    @property
    def starts_again(self) -> bool:
        """Whether a task that died is started again."""
        return self._restarter is not None

    def gone(self, members: Collection[TaskName]) -> dict[TaskName, str]:
        """Returns why, by task, for those that ended and are not started again.

        Args:
          members: tasks of the cluster; others that ended in order have left it.
        """
        if self._restarter is not None:
            return dict(self._restarter.final_deaths)
        return {
            process.task: f"{process.task} ended by {process.how_it_ended()}"
            for process in list(self._processes)
            if process.process.poll() is not None
            and process.task not in self._again
            and (process.task in members or process.process.poll() != 0)
        }

    def restart(self, task: str, grace_s: float) -> int:
        """Ends a task by SIGTERM and starts it again where it was.

        Returns:
          The exit code of its process, which is killed after ``grace_s``.

        Raises:
          StartError: it ended while starting.
        """
        process = self[task]
        self._again.add(process.task)  # it is not gone meanwhile
        try:
            code = process.terminate(grace_s)
            restarter = self._restarter  # starts those that died, not too often
            if not (code and restarter) or process.task in restarter.final_deaths:
                process.start(self.spec)
                wait_started(process, self.spec, START_S)
                if self._restarter is not None:
                    self._restarter.watch(process)
        finally:
            self._again.discard(process.task)
        return code

    def end(self) -> None:
        """Ends all processes and waits until they have ended."""
        if self._freeze_watch is not None:
            self._freeze_watch.close()
        if self._restarter is not None:
            self._restarter.close()
        for process in self._processes:
            process.end()
        for process in self._processes:
            process.wait_ended(_END_S)
        if self._restarter is not None:
            self._restarter.join()
        if self._records:
            shutil.rmtree(self._records, ignore_errors=True)

    def _spec(self) -> ClusterSpec:
        jobs: dict[str, list[str]] = {}
        for process in self._processes:
            job = process.task.removeprefix("/job:").partition("/")[0]
            jobs.setdefault(job, []).append(process.address)
        return ClusterSpec(jobs)


def each(
    processes: Sequence[_Process], act: Callable[[_Process], None], timeout_s: float
) -> None:
    """Does something with all processes at once; kills them all if one fails."""
    with ThreadPoolExecutor(len(processes)) as pool:
        waiting = [pool.submit(act, process) for process in processes]
        try:
            for process, future in zip(processes, waiting, strict=True):
                try:
                    future.result(timeout_s)
                except TimeoutError as error:
                    if isinstance(error, JGError):
                        raise
                    raise StartError(
                        f"{process.task} did not start within {timeout_s:g} s. "
                        f"The end of its log:\n{process.tail()}",
                        task=process.task,
                    ) from None
        except BaseException:
            for process in processes:
                process.kill()
            raise


def end_within(process: "subprocess.Popen[str]", timeout_s: float) -> int:
    """Returns the exit code of a process, which is killed after ``timeout_s``."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(_END_S)


def environment_of(job: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a job's tasks: some leave accelerators to the workers.

    Example:
      >>> environment_of("ps", {"A": "1"}), environment_of("worker", {"A": "1"})
      ({'JAX_PLATFORMS': 'cpu', 'A': '1'}, {'A': '1'})
    """
    return {**({"JAX_PLATFORMS": "cpu"} if job in _MODEST else {}), **environment}


def tasks_of(counts: Mapping[str, int]) -> list[TaskName]:
    """Returns the names of so many tasks per job."""
    return [
        TaskName(f"/job:{job}/task:{index}")
        for job, count in counts.items()
        for index in range(count)
    ]


def counts_of(
    ps: int, workers: int, evaluators: int, jobs: Mapping[str, int] | None
) -> dict[str, int]:
    """Returns how many tasks each job has, as a caller has asked for them.

    Raises:
      ConfigError: see ``check_counts``, or jobs that are no dict.

    Example:
      >>> counts_of(1, 2, 0, {"spare": 1})
      {'ps': 1, 'worker': 2, 'spare': 1}
    """
    if not isinstance(jobs, Mapping | None):
        raise ConfigError(
            f"jobs is {jobs!r:.60}; write how many tasks each further job has, for "
            'example jobs={"spare": 1}'
        )
    counts = {"ps": ps, "worker": workers, **(jobs or {})}
    if evaluators:
        counts["evaluator"] = evaluators
    check_counts(counts)
    return {job: int(count) for job, count in counts.items()}


def check_environment(environment: object) -> dict[str, str]:
    """Returns the variables that a caller has given for the processes of tasks.

    Raises:
      ConfigError: they are no dict of texts.

    Example:
      >>> check_environment({"A": 1})
      Traceback (most recent call last):
      jgraph.errors.ConfigError: JG-124 env has 'A': 1; write texts: env={"A": "1"}
    """
    if environment is None:
        return {}
    if not isinstance(environment, Mapping):
        raise ConfigError(
            f"env is {environment!r:.60}; write variables and their values, for "
            'example env={"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}'
        )
    for name, value in environment.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ConfigError(
                f"env has {name!r:.60}: {value!r:.60}; write texts: "
                f'env={{"{name!s:.60}": "{value!s:.60}"}}'
            )
        if not name or "=" in name or "\0" in name + value:
            raise ConfigError(
                f"env has {name!r:.60}: {value!r:.60}, which cannot be: a name has "
                "letters and no '=', and neither has a NUL; write it without"
            )
    return dict(environment)


def check_room(tasks: int, memory: int | None = None) -> None:
    """Refuses more processes than this machine has memory for.

    Each takes about 100 MB when it has begun; a few may always be tried.

    Args:
      tasks: that are to be started.
      memory: bytes that are left; as they are now, unless given.

    Raises:
      ConfigError: they would take the memory of all that runs here.

    Example:
      >>> check_room(16, memory=0)
      >>> check_room(10_000, memory=8 << 30)
      Traceback (most recent call last):
      jgraph.errors.ConfigError: JG-124 10,000 tasks would be as many processes ...
    """
    if tasks <= _FEW:
        return
    from jgraph.server.host_room import memory_left  # with gRPC, which takes a while

    room = memory_left() if memory is None else memory
    most = max(_FEW, room // _TASK_BYTES)
    if tasks > most:
        raise ConfigError(
            f"{tasks:,} tasks would be as many processes of this machine, which take "
            f"about {_TASK_BYTES // 10**6} MB each, and {bytes_text(room)} of memory "
            f"are left; start {most:,} here at most, and others on other hosts"
        )


def hand_over_stdout() -> TextIO:
    """Returns the standard output, and sends later prints to standard error.

    The first line on a child's standard output is for its parent; whatever a library
    prints afterwards belongs into the log.
    """
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return output
