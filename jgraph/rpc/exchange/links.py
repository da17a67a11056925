"""Outgoing links of one task: one per peer, made on first use."""

import asyncio
import logging
from collections.abc import Callable, Hashable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from jgraph.errors import (
    InternalError,
    JGError,
    NotTakingError,
    TaskLostError,
    UnknownDeviceError,
)
from jgraph.graph.device import TaskName
from jgraph.rpc.transport import Address, Handler

CLOSE_GRACE_S: Final = 1.0
"""How long ``close`` waits for posted frames to leave."""

_logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Pushed_contra = TypeVar("_Pushed_contra", contravariant=True)


class Link(Protocol[_Pushed_contra]):
    """Sends items to one task in the order of ``push``."""

    peer: TaskName
    address: Address

    def push(self, item: _Pushed_contra) -> None:
        """Queues an item; never blocks.

        Raises:
          NotTakingError: too much waits already.
        """

    def withdraw(self, step: Hashable) -> int:
        """Drops queued values of a step; returns how many frames."""

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Calls back once nothing is on its way, or the link has ended."""

    def clear(self) -> None:
        """Drops everything, and tells those whom ``when_sent`` has to call back."""

    def finish(self) -> None:
        """Lets ``run`` end when everything queued is sent."""

    async def run(self) -> None:
        """Connects and sends until ``finish``; raises why it cannot."""


class Links(Generic[_Item]):
    """Makes links, watches them, and reports the lost ones to the handler.

    Args:
      make: returns a new link to a task at an address, not running yet.
    """

    def __init__(self, make: Callable[[TaskName, Address], Link[_Item]]) -> None:
        self._make = make
        self._handler: Handler | None = None
        self._peers: dict[TaskName, Address] = {}
        self._links: dict[TaskName, tuple[Link[_Item], asyncio.Task[None]]] = {}
        self._failed: dict[Link[_Item], JGError] = {}
        self._closed = False

    def start(self, handler: Handler) -> None:
        """Begins to take items; losses are told to ``handler``."""
        self._handler = handler

    def set_peers(self, peers: dict[TaskName, Address]) -> None:
        """Tells where other tasks are; links to other addresses are given up."""
        self._peers = dict(peers)
        for peer, (link, running) in self._links.items():
            if self._peers.get(peer) != link.address:
                running.cancel()

    def address_of(self, peer: TaskName) -> Address | None:
        """Returns where a task is, if that is known."""
        return self._peers.get(peer)

    def is_ready(self, dst: TaskName) -> bool:
        """Whether ``dst`` has an address; if not, that is reported as a loss.

        After ``close`` nothing is sent and nobody is told.

        Raises:
          InternalError: a client cannot post, nor a task before ``start``.
        """
        if self._closed:
            return False
        if self._handler is None:
            raise InternalError(
                f"a frame for {dst} was posted by a client, or before start of the "
                f"transport"
            )
        if dst in self._peers:
            return True
        error = UnknownDeviceError(f"no address is known for task {dst}", task=dst)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._handler.peer_lost, dst, error)
        return False

    def push(self, dst: TaskName, item: _Item) -> None:
        """Queues an item for ``dst``, which has an address.

        If too much waits for it already, it is lost, and so is the item.
        """
        address = self._peers[dst]
        if dst not in self._links or self._links[dst][0].address != address:
            link = self._make(dst, address)
            running = asyncio.create_task(link.run(), name=f"link to {dst}")
            self._links[dst] = link, running
            running.add_done_callback(partial(self._ended, link))
        link, running = self._links[dst]
        if link in self._failed:
            return
        try:
            link.push(item)
        except NotTakingError as error:
            self._failed[link] = error
            running.cancel()

    def when_sent(self, dst: TaskName, callback: Callable[[], None]) -> None:
        """Calls back once nothing is on its way, or the link has ended."""
        link, _ = self._links.get(dst, (None, None))
        if link is None:
            asyncio.get_running_loop().call_soon(callback)
        else:
            link.when_sent(callback)

    def withdraw(self, step: Hashable) -> int:
        """Drops the values of a step that wait to be sent; returns how many frames."""
        return sum(link.withdraw(step) for link, _ in self._links.values())

    def _ended(self, link: Link[_Item], running: "asyncio.Task[None]") -> None:
        if self._links.get(link.peer, (None, None))[0] is link:
            del self._links[link.peer]
        link.clear()  # it may have ended before it ran
        error = self._failed.pop(link, None) or _reason(link, running)
        if not self._closed and self._handler is not None:
            self._handler.peer_lost(link.peer, error)

    async def close(self) -> None:
        """Sends what is queued, for 1 s at most, then ends all links."""
        self._closed = True
        running = [task for _, task in self._links.values()]
        for link, _ in self._links.values():
            link.finish()
        if not running:
            return
        _, late = await asyncio.wait(running, timeout=CLOSE_GRACE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def _reason(link: Link[_Item], running: "asyncio.Task[None]") -> JGError:
    """Returns why a link ended."""
    where = {"task": link.peer, "address": link.address}
    if running.cancelled():
        return TaskLostError(f"{link.peer} is no longer at {link.address}", **where)
    error = running.exception()
    if isinstance(error, JGError):
        return error
    if error is not None:
        _logger.error("The link to %s failed.", link.peer, exc_info=error)
    return TaskLostError(
        f"the connection to {link.peer} at {link.address} failed; the log of this "
        f"process has the details",
        **where,
    )
