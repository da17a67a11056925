"""Run saving: the choice between master and client as saver, and halts of the loops."""

import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, final

from jgraph.cluster.methods import reading
from jgraph.errors import CheckpointError, JGError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.server.runs.journal import Journal
from jgraph.server.runs.peers import LoopPeers
from jgraph.server.runs.ps_setup import PsSetup
from jgraph.server.runs.run_client import RunClient
from jgraph.server.runs.saving.checkpointer import RunCheckpointer
from jgraph.server.runs.saving.halts import HaltOrder, RunHalts
from jgraph.server.runs.saving.state_source import (
    ClientSaves,
    MasterSaves,
    StateSource,
)
from jgraph.server.runs.worker_setup import WorkerSetup

_LOG = logging.getLogger("jgraph.recover")


@final
@dataclass(slots=True)
class RunSaving:
    """Has one run saved by whoever can: its master, or its client.

    Args:
      order: what the client says of the run.
      peers: to the tasks.
      record: how the run stands.
      ready: gives workers what they need.
      ps: gives a ps what it needs.
      client: that the run ends with; None: it has none.
      next_name: returns a new name of a kind of program.
      ask: tells a loop something; returns which halt it has ended, None: not told.
      do: does something meanwhile.

    Attributes:
      saver: saves the run; None: the client does, or nobody.
      halts: of its loops; None: they are not halted.
    """

    order: pb.OpenRun
    peers: LoopPeers
    record: Journal
    ready: WorkerSetup
    ps: PsSetup
    client: RunClient | None
    next_name: Callable[[str], str]
    ask: Callable[[str, pb.StopLoop], Awaitable[int | None]]
    do: Callable[[Coroutine[Any, Any, None]], object]
    saver: RunCheckpointer | None = field(init=False, default=None)
    halts: RunHalts | None = field(init=False, default=None)
    _is_unsaved: bool = field(init=False, default=False)

    def begin(self) -> None:
        """Saves the run from now on: now and then, before a ps ends, and at its end.

        Raises:
          CheckpointPathError: this task does not have the directory of the client.
        """
        world = self.peers.task, self.order.saves, self.record, self.peers.call
        saver = RunCheckpointer(*world, self.position)
        saver.start()
        self.saver = saver
        self.prepare_halts()

    async def begin_for_client(self) -> None:
        """Saves the run from now on, if its client did that before and is gone."""
        client, saves = self.client, self.order.saves
        is_gone = client is not None and client.is_gone and client.directory
        if client is None or not is_gone or self.saver is not None or self._is_unsaved:
            return
        try:
            if client.order.client.unsaved:
                raise CheckpointError(client.order.client.unsaved)
            name = self.next_name("saves")
            saves.snapshot = await self.ready.renew(saves.snapshot, name)
            self.begin()
        except JGError as error:
            self._is_unsaved = isinstance(error, CheckpointError)
            what = "run '%s' is not saved any more, as its client is gone: %s"
            _LOG.warning(what, self.order.run, error.message)

    def source(self) -> StateSource | None:
        """Returns who has checkpoints of the run; None: nobody."""
        if self.saver is not None:
            return MasterSaves(self.saver, self.ps)
        client = self.client
        return ClientSaves(client) if client is not None and client.directory else None

    async def rest(self) -> None:
        """Waits until the run is over, and nothing of it is left to save here."""
        if self.saver is not None:
            await self.saver.rest()

    def close(self) -> None:
        """Saves no more."""
        if self.saver is not None:
            self.saver.close()

    def position(self) -> dict[str, Any]:
        """Returns where in its data the run is.

        Raises:
          ConfigError: nobody deals that out here.
        """
        if self.record.position is not None:
            with reading("the position of a run"):
                return dict(json.loads(self.record.position))
        return self.peers.dealers.position(self.record.data_run)

    # ------------------------------------------------------------ halts

    def prepare_halts(self) -> None:
        """Halts loops from now on, where the run is to be saved."""
        order = self.order
        if self.saver is not None:
            wanted = HaltOrder((order.saves.every,), order.saves.halt_s)
            save = self.saver.save_halted
        elif self.client is not None and order.client.halt_every:
            wanted = HaltOrder(tuple(order.client.halt_every), order.client.halt_s)
            save = self._ask_halted
        else:
            return
        with reading("what is said of a run"):
            info = dict(json.loads(order.info))
            first, steps = int(info["first_step"]), int(info["steps"])
        first += self.record.row().steps
        self.halts = RunHalts(wanted, first, steps, save, self.ask, self.do)

    def began(self, order: pb.RunLoop) -> None:
        """Learns of a loop."""
        if self.halts is not None:
            self.halts.began(order)

    async def note(self, order: pb.RunLoop, report: pb.LoopReport) -> None:
        """Learns what a loop reports; lets it go on if it halts and nobody saves."""
        if self.halts is not None:
            self.halts.note(order, report)
        elif report.halted:
            await self.ask(order.loop, pb.StopLoop(go_on=report.halted))

    def over(self, order: pb.RunLoop) -> None:
        """Learns that a loop has ended."""
        if self.halts is not None:
            self.halts.over(order)

    async def _ask_halted(
        self, in_flight: int, go_on: Callable[[], Awaitable[bool]]
    ) -> None:
        """Lets the client save, or evaluate, a run whose loops stand still."""
        assert self.client is not None  # it is asked
        went_on = False

        async def let_go() -> bool:
            nonlocal went_on
            went_on = True
            return await go_on()

        position = self.position()
        position["again"] += in_flight
        try:
            await self.client.ask("halted", position=json.dumps(position), act=let_go)
        except JGError as error:
            _LOG.info("the run is not saved now: %s", error.message)
        finally:
            if not went_on:
                await go_on()
