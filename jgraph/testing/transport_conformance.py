"""Conformance suite of transports: one suite, run on each of them.

A check is a coroutine function that takes a ``MakeTransport``, which makes transports
of one network. ``CHECKS`` holds all of them by name.

Example:
  >>> import asyncio
  >>> from jgraph.testing.in_process_transport import InProcessNetwork
  >>> check = CHECKS["frames_arrive_in_order"]
  >>> asyncio.run(check(InProcessNetwork().transport))
"""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from jgraph.testing import (
    transport_backlog,
    transport_calls,
    transport_losses,
    transport_posts,
)
from jgraph.testing.transport_harness import MakeTransport

Check: TypeAlias = Callable[[MakeTransport], Awaitable[None]]

_ALL: Final[tuple[Check, ...]] = (
    transport_posts.frames_arrive_in_order,
    transport_posts.both_directions_flow_at_once,
    transport_posts.large_tensors_arrive,
    transport_posts.every_dtype_and_layout_survives,
    transport_posts.received_tensors_are_aligned_and_owned,
    transport_posts.unsendable_tensor_is_refused_at_post,
    transport_calls.call_streams_its_replies,
    transport_calls.call_carries_tensors_both_ways,
    transport_calls.concurrent_calls_do_not_mix,
    transport_calls.hello_is_answered_by_the_transport,
    transport_calls.error_keeps_class_message_and_details,
    transport_calls.crash_of_a_handler_tells_nothing_secret,
    transport_calls.deadline_names_method_and_address,
    transport_calls.abandoned_call_stops_its_handler,
    transport_calls.call_to_nothing_is_unreachable,
    transport_calls.call_ends_when_the_server_closes,
    transport_calls.asked_call_has_one_reply,
    transport_calls.asking_does_not_wait_for_a_slow_answer,
    transport_calls.asking_reaches_a_server_that_was_started_again,
    transport_calls.asking_on_after_close_fails,
    transport_losses.sender_learns_that_the_receiver_closed,
    transport_losses.receiver_learns_that_the_sender_closed,
    transport_losses.frames_posted_before_the_peer_listens_arrive,
    transport_losses.peer_that_never_listens_is_lost_in_seconds,
    transport_losses.peer_without_address_is_lost,
    transport_losses.another_task_at_the_address_gets_nothing,
    transport_losses.posts_reach_a_task_that_was_started_again,
    transport_losses.posts_after_close_are_ignored,
    transport_backlog.withdrawn_values_do_not_leave,
    transport_backlog.peer_that_takes_nothing_is_lost,
    transport_backlog.frames_that_fit_are_not_too_much,
    transport_losses.close_is_idempotent_and_frees_the_address,
)

CHECKS: Final[Mapping[str, Check]] = MappingProxyType(
    {check.__name__: check for check in _ALL}
)
"""Every check by its name, in the order in which to read them."""
