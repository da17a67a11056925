"""Bugs that are put in on purpose: for each there is a test that turns red.

A bug is a change of one place in a copy of the package, and only the test that should
find it runs: so the tests that guard against lost and repeated updates are tested too.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import jgraph

ROOT: Final = Path(__file__).parents[2]
SIMULATION: Final = "tests/simulation/test_simulation.py::test_no_batch_is_left_out"
SYNCHRONOUS: Final = (
    "tests/simulation/test_sync.py::"
    "test_every_ps_makes_the_same_updates_and_no_batch_counts_twice"
)
SUPERVISED: Final = (
    "tests/simulation/test_runs.py::"
    "test_a_run_goes_on_or_ends_as_it_should_whoever_dies"
)
TAKEN_BACK: Final = (
    "tests/server/runs/test_standby.py::"
    "test_heir_takes_a_run_back_that_its_master_was_lost_before_it_could"
)
MEMBERS: Final = "tests/simulation/test_members.py::"
RESCALED: Final = (
    "tests/simulation/test_rescales.py::"
    "test_no_update_is_lost_or_doubled_whoever_dies_while_variables_move"
)
PS_CORE: Final = "tests/server/test_ps_core.py::TestPsCore"
TRANSCRIPT: Final = (
    "tests/coordination/test_transcripts.py::test_a_machine_does_as_its_transcript_says"
)
SAVER: Final = "tests/server/runs/saving/test_checkpointer.py::"
GROUP: Final = (
    "tests/coordination/sync/test_group.py::"
    "test_each_version_is_summed_once_for_each_member_whatever_dies"
)
ON_HOSTS: Final = (
    "tests/simulation/test_sync.py::"
    "test_sums_of_hosts_have_what_was_decided_whoever_is_lost"
)
SURVIVED: Final = (
    "tests/simulation/test_sync.py::"
    "test_workers_give_a_lost_owner_what_is_of_the_update_told_of_last"
)
INBOUND: Final = "tests/rpc/exchange/test_inbound.py::"
CUTS: Final = "tests/rpc/test_cuts_in_virtual_time.py::"
CALLS: Final = "tests/rpc/test_calls_resume.py::"
OUTBOX: Final = "tests/rpc/resumable/test_outbox.py::"
ROWS: Final = "tests/plan/test_shard_rows.py::"
BAGS: Final = "tests/train/tables/test_bags.py::"
TOGETHER: Final = "tests/serving/test_function_queue.py"
PATHS: Final = (
    "tests/train/test_row_paths.py::test_rows_are_trained_as_a_plain_loop_trains_them"
)


@dataclass(frozen=True, slots=True)
class Bug:
    """A bug.

    Attributes:
      file: where it is, in the package.
      right: the code as it is; at one place.
      wrong: what is there instead.
      found_by: the test that finds it, or how its name begins.
      first: which simulated run that test begins with; after it come as many as by day.
    """

    file: str
    right: str
    wrong: str
    found_by: str
    first: int = 0


BUGS: Final = {
    "a frame that comes twice is taken twice": Bug(
        "rpc/resumable/numbers.py",
        "if number <= self.last:",
        "if number < self.last:",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "a ps that was started again, and is empty, is taken for a lost link": Bug(
        "coordination/run/loop_outcome.py",
        "return named in ready and ready[named] == began.get(named)",
        "return named in ready",
        "tests/coordination/run/test_loop_outcome.py::"
        "test_task_that_master_reaches_as_it_began_is_not_lost",
    ),
    "a worker that holds variables is lost without them": Bug(
        "server/runs/losses.py",
        "if is_gone and not (decides or self._holds(task)):",
        "if is_gone and not decides:",
        "tests/server/runs/test_losses.py::"
        "test_a_worker_that_holds_variables_is_lost_with_them",
    ),
    "a step that reads ahead computes before it is its turn": Bug(
        "runtime/executor.py",
        "if self._held is not None and self._loaded.in_turn[index]:",
        "if False:",
        "tests/runtime/test_task.py::"
        "test_a_step_that_read_ahead_computes_and_writes_after_the_one_before_it",
    ),
    "updates are decided without a master": Bug(
        "coordination/sync/aggregation.py",
        "if self._unsupervised or not self._is_enough(whole):",
        "if not self._is_enough(whole):",
        f"{TRANSCRIPT}[sync/aggregation/silent_master]",
    ),
    "who asks while a run stands still is out of secure rounds": Bug(
        "coordination/sync/secure_rounds.py",
        "self._sum, self._members, self._with_keys = None, frozenset(), set()",
        "self._sum, self._members = None, frozenset()",
        f"{TRANSCRIPT}[sync/aggregation/secure]",
    ),
    "a run goes on to decide without its master": Bug(
        "coordination/sync/aggregation.py",
        "if self._unsupervised or not self._is_enough(whole):",
        "if not self._is_enough(whole):",
        "tests/simulation/test_sync.py::"
        "test_a_run_pauses_without_its_master_and_goes_on_when_the_link_heals",
    ),
    "a worker gives what it read an update before": Bug(
        "coordination/run/survivors.py",
        "if read.get(owner, 0) == updates + 1]",
        "if read.get(owner, 0) == updates]",
        SURVIVED,
    ),
    "workers give beside owners of another update": Bug(
        "coordination/run/survivors.py",
        "        if count != updates:\n",
        "        if count < updates:\n",
        SURVIVED,
    ),
    "batches of an update that is there in part are not dealt again": Bug(
        "coordination/sync/aggregation.py",
        'if state == "failed" and self._applying:',
        "if False:",
        "tests/coordination/sync/test_aggregation.py::"
        "test_batches_of_an_update_that_was_not_applied_come_again",
    ),
    "losses that cost no update end a run": Bug(
        "coordination/run/recovery.py",
        "self._reach, self._times = step, 0",
        "self._reach = step",
        f"{TRANSCRIPT}[run/recovery/back_to_a_checkpoint]",
    ),
    "an index is given to two that join": Bug(
        "coordination/liveness/members.py",
        "held = {*self.arrangement.members, *self._invited}",
        "held = {*self.arrangement.members}",
        f"{MEMBERS}test_no_batch_is_lost_or_comes_twice_whoever_joins_and_leaves",
    ),
    "a registrar that was started again forgets who has joined": Bug(
        "coordination/liveness/members.py",
        "        self.arrangement = newer\n",
        "",
        f"{MEMBERS}test_no_batch_is_lost_or_comes_twice_whoever_joins_and_leaves",
        first=44,
    ),
    "steps of a worker that was given up are still applied": Bug(
        "server/runs/supervisor.py",
        "        await self.ready.drop(order.handle)\n        return LoopLost(",
        "        return LoopLost(",
        f"{MEMBERS}test_a_worker_that_wakes_when_another_has_its_index_adds_nothing",
        first=33,
    ),
    "one that joins takes part before it is ready": Bug(
        "coordination/run/supervisor.py",
        'present = self._of("ready", "idle")',
        'present = self._of("ready", "idle", "joining")',
        f"{MEMBERS}"
        "test_a_worker_that_fails_before_it_is_ready_changes_nothing_for_others",
    ),
    "one that is not ready yet ends a round": Bug(
        "coordination/run/supervisor.py",
        'changes = self._of("ready") or self._is_short(running)',
        'changes = self._of("ready", "joining") or self._is_short(running)',
        f"{MEMBERS}"
        "test_a_worker_that_fails_before_it_is_ready_changes_nothing_for_others",
    ),
    "what a master did before it was replaced is not read": Bug(
        "server/runs/calls.py",
        "known = self._known(run) or self._supervisors.get(run)",
        "known = self._known(run)",
        "tests/server/runs/test_calls.py::"
        "test_a_master_that_was_replaced_says_how_far_it_came",
    ),
    "a task that ends takes a run of which the master is lost": Bug(
        "server/runs/standby.py",
        "takes = not self._retired",
        "takes = True",
        f"{MEMBERS}test_no_batch_is_lost_or_comes_twice_whoever_joins_and_leaves",
        first=1224,
    ),
    "a master forgets that the one before went back": Bug(
        "server/runs/supervisor.py",
        "if lost := list(self._order.goes_back):",
        "if lost := []:",
        "tests/simulation/test_rescales.py::"
        "test_a_master_that_dies_as_a_run_goes_back_leaves_an_heir_that_goes_back",
    ),
    "a ps that is lost while a run is prepared begins anew whatever it had": Bug(
        "train/state/early_losses.py",
        "if state.is_initial:",
        "if tasks:",
        "tests/faults/test_rows_early.py::"
        "test_values_that_nothing_has_are_not_begun_anew",
    ),
    "a run fails if a ps is lost as it has gone back": Bug(
        "server/runs/rollback.py",
        "except (ClusterUnreachableError, TaskLostError) as again:",
        "except CopyLostError as again:",
        f"{MEMBERS}test_no_batch_is_lost_or_comes_twice_whoever_joins_and_leaves",
        first=16,
    ),
    "a run goes on with too few workers": Bug(
        "coordination/run/supervisor.py",
        "return 0 < len(running) < self._least and not self._is_beginning",
        "return False",
        f"{MEMBERS}test_a_run_with_too_few_workers_waits_and_loses_nothing",
    ),
    "a worker that is back has the program of the one before": Bug(
        "server/runs/worker_setup.py",
        'return f"{loop.term}.{number}"',
        'return f"{loop.term}"',
        f"{MEMBERS}test_a_run_with_too_few_workers_waits_and_loses_nothing",
    ),
    "the lease of a client never ends": Bug(
        "server/runs/run_client.py",
        "loop.call_later(limit_s, self._leave)",
        "loop.call_later(1e6, self._leave)",
        SUPERVISED,
    ),
    "a question that has its answer is asked again": Bug(
        "server/runs/run_client.py",
        "return number in self._asked",
        "return True",
        SUPERVISED,
    ),
    "a standby takes over while the master lives": Bug(
        "coordination/run/election.py",
        "return Follow()",
        "pass",
        f"{TRANSCRIPT}[run/election/who_has_it]",
    ),
    "a standby takes over with the part of the journal that it has": Bug(
        "server/runs/standby.py",
        "await self._read_longer(election)",
        "pass",
        "tests/server/runs/test_standby.py::"
        "test_standby_that_is_behind_reads_the_rest_from_another_one",
    ),
    "a standby does not wait for the step of a master that is there": Bug(
        "server/runs/standby.py",
        "if task == self.master and not is_there:",
        "if task == self.master:",
        "tests/server/runs/test_standby.py::"
        "test_a_step_under_way_of_a_master_that_only_its_client_misses_is_waited_for",
    ),
    "a standby does not wait for one that may have read more": Bug(
        "coordination/run/election.py",
        "if now - self._began_s < SILENT_S:",
        "if now < 0.0:",
        f"{TRANSCRIPT}[run/election/who_is_not_reached]",
    ),
    "a write among packed variables changes what a reader holds": Bug(
        "runtime/store/slab.py",
        "stays = not is_seen and on_cpu(self.value)",
        "stays = on_cpu(self.value)",
        "tests/runtime/store/test_slab.py::"
        "test_a_write_never_changes_what_a_reader_holds",
    ),
    "a packed variable is also taken by itself": Bug(
        "plan/lowering/packed.py",
        "if alone.isdisjoint(taken):",
        "if True:",
        "tests/plan/partition/test_packing.py::"
        "test_variable_that_something_else_takes_by_itself_lies_in_no_flat_array",
    ),
    "a packed update forgets that others lie in the array in another order": Bug(
        "runtime/store/groups.py",
        "if self._slab is not None and self._slab.is_whole:",
        "if self._slab is not None:",
        "tests/runtime/store/test_slab.py::"
        "test_another_order_and_another_choice_find_the_same_values",
    ),
    "two standbys take the same term": Bug(
        "coordination/run/election.py",
        "return TakeOver(newest + 1 + (self._number - newest - 1) % count)",
        "return TakeOver(newest + 1 + 0 * count)",
        f"{TRANSCRIPT}[run/election/who_takes_over]",
    ),
    "a standby forgets what it read as soon as the next master invites it": Bug(
        "server/runs/standby.py",
        "self._before = None if before is None else before.reader",
        "self._before = None",
        "tests/server/runs/test_standby.py::"
        "test_standby_whose_next_master_is_lost_unread_has_the_journal_before",
    ),
    "an order to halt that is lost leaves the other loops halted": Bug(
        "server/runs/saving/halts.py",
        "if await self._ask(loop, halt) is None:",
        "if await self._ask(loop, halt) is False:",
        "tests/server/runs/test_masters_lost.py::"
        "test_a_run_one_of_whose_loops_did_not_get_the_order_to_halt_goes_on_and_is_saved",
    ),
    "a run fails for programs that a lost master had dropped": Bug(
        "server/runs/losses.py",
        "return StateLost(replica, error) if goes_back else failed",
        "return failed",
        f"{TAKEN_BACK}[the_programs_were_dropped]",
    ),
    "a ps that was started again is taken for one that holds the state": Bug(
        "server/runs/losses.py",
        "self.known = {TaskName(task): process for task, process in holders}",
        "self.known = {}",
        f"{TAKEN_BACK}[a_ps_was_started_again]",
    ),
    "nobody looks at the end whether a ps has lost its state": Bug(
        "server/runs/supervisor.py",
        "if lost and (client is None or client.is_gone):",
        "if lost and not (client is None or client.is_gone):",
        "tests/server/runs/test_standby.py::"
        "test_run_without_its_client_is_not_done_if_a_ps_holds_nothing[1-failed-invited0]",
    ),
    "a master that was replaced refuses to follow the next one": Bug(
        "server/runs/calls.py",
        "if order.term <= mine.term:",
        "if order.run:",
        SUPERVISED,
    ),
    "a master that began nothing has the number of the next one": Bug(
        "coordination/run/election.py",
        "self._newest = max(self._newest, *(end.term for end in known))",
        "self._newest = max(self._newest, 1)",
        "tests/server/runs/test_standby.py::"
        "test_heir_of_a_master_that_began_nothing_has_the_number_after",
    ),
    "an older process of a task is taken for the newer": Bug(
        "rpc/exchange/inbound.py",
        "if incarnation in sender.retired:",
        "if incarnation == 0:",
        f"{INBOUND}test_new_incarnation_starts_anew_and_retires_the_old",
    ),
    "a process that was away goes on without asking who has its place": Bug(
        "coordination/liveness/self_fencing.py",
        "if away_s >= DOUBT_S:",
        "if away_s < 0:",
        f"{TRANSCRIPT}[liveness/self_fencing/paused_process]",
    ),
    "what comes before the place is known is done": Bug(
        "server/self_fencing.py",
        "return self._is_sure() and self._service.replaced is None",
        "return self._service.replaced is None",
        "tests/server/test_self_fencing.py::"
        "test_what_comes_after_a_pause_waits_until_the_place_is_known",
    ),
    "a process that was replaced writes to its log": Bug(
        "server/replication/wal_thread.py",
        "                self._check_place()\n                number = record.number\n",
        "                number = record.number\n",
        "tests/server/replication/test_wal.py::"
        "test_process_that_was_replaced_writes_nothing_to_its_log",
    ),
    "a log is applied to its end, whatever the other ps have": Bug(
        "coordination/run/same_version.py",
        "return range(self._applied, self._progress.version + 1)",
        "return range(self._progress.version, self._progress.version + 1)",
        "tests/coordination/run/test_same_version.py::"
        "test_no_update_that_all_had_is_lost_whoever_dies_and_whenever",
    ),
    "a ps that lives stays at an update that the others lack": Bug(
        "coordination/run/same_version.py",
        "for task, there in held.items() if version not in there)",
        "for task, there in held.items() if not there)",
        "tests/simulation/test_sync.py::"
        "test_all_ps_go_on_from_one_update_after_two_losses",
    ),
    "a ps goes on to change what another has taken the place of": Bug(
        "runtime/store/change_log.py",
        "            self._is_held = True\n",
        "            self._is_held = False\n",
        "tests/runtime/store/test_change_log.py::"
        "test_nothing_of_an_update_changes_once_a_task_has_told_its_version",
    ),
    "a frame that is missing is not noticed": Bug(
        "rpc/exchange/inbound.py",
        "if sequence > last + 1 and not stream.may_jump:",
        "if sequence > last + 1 and sequence == 0:",
        f"{INBOUND}test_resumed_stream_may_not_jump",
    ),
    "a master that was replaced takes workers back": Bug(
        "server/runs/workers.py",
        "            await check_master(self.joiners.peers, order.run, order.term)\n"
        "            ps, ready",
        "            ps, ready",
        "tests/server/runs/test_supervisor.py::"
        "test_master_that_was_replaced_takes_no_worker_back",
    ),
    "a rescale that is not wanted any more moves the variables": Bug(
        "coordination/run/rescale.py",
        "        if self._wanted != self._to:  # that has changed meanwhile\n",
        "        if False:\n",
        "tests/coordination/test_transcripts.py::"
        "test_a_machine_does_as_its_transcript_says[run/rescale/cancelled]",
    ),
    "who takes a run over begins loops of programs that were dropped": Bug(
        "server/runs/rescaling/migration.py",
        "number + 1)\n        await self._renew()\n",
        "number + 1)\n",
        "tests/faults/test_rows_rescale.py::"
        "test_a_master_that_dies_while_variables_move_costs_no_update"
        "[SyncPS-rescale.moved]",
    ),
    "rows that are written after they were copied are not copied again": Bug(
        "runtime/store/entry.py",
        "        self.rows[ids] = True\n        self.version += 1\n",
        "        self.version += 1\n",
        "tests/runtime/store/test_ahead.py::"
        "test_a_row_is_copied_again_if_it_is_written_after_its_part_was",
    ),
    "what moved to another ps stays where it was as well": Bug(
        "server/runs/rescaling/migration.py",
        "        await self._mover.forget((one.src, one.names) "
        "for one in attempt.transfers)\n",
        "",
        RESCALED,
    ),
    "a row of a hash table that lost its key is not copied again": Bug(
        "runtime/store/hash_shard.py",
        "        self._used[rows] = _NO_ROW\n        self._changed(rows)\n",
        "        self._used[rows] = _NO_ROW\n",
        "tests/runtime/store/test_hash_shard.py::"
        "test_a_copy_has_no_key_that_its_shard_has_given_up_since",
    ),
    "what steps change after a rescale is recorded nowhere": Bug(
        "server/runs/rescaling/migration.py",
        "                await self._copies.admit(handle, "
        'int(loop.HasField("sync")), to)\n',
        "                pass\n",
        "tests/faults/test_rows_rescale_copies.py::"
        "test_a_ps_that_joined_a_run_with_copies_is_killed_and_no_update_is_lost"
        "[SyncPS-replica]",
    ),
    "what was written whole since is taken for copied": Bug(
        "runtime/store/entry.py",
        "return self.marks is not None and self.marks.version == self.version",
        "return self.marks is not None",
        "tests/runtime/store/test_ahead.py::"
        "test_a_variable_that_is_written_whole_meanwhile_is_copied_whole",
    ),
    "a rescale is journalled nowhere": Bug(
        "server/runs/rescaling/rescaler.py",
        '        failpoint("rescale.told")\n        self._record.rescale(switch)\n',
        "",
        "tests/train/strategies/test_elastic_ps.py::"
        "test_synchronous_training_that_is_rescaled_is_that_of_plain_jax",
    ),
    "no ps is told where the variables lie": Bug(
        "server/runs/rescaling/rescaler.py",
        "await check_master(*world, switch=news)",
        "await check_master(*world)",
        "tests/simulation/test_rescales.py::"
        "test_a_standby_that_never_heard_of_a_switch_learns_of_it_from_the_ps",
    ),
    "a client gives values back where it looked last": Bug(
        "server/runs/saving/state_source.py",
        'self._ask("state", self.client.order.ps.now)',
        'self._ask("state")',
        "tests/simulation/test_rescales.py::"
        "test_a_run_whose_client_alone_knows_of_a_switch_goes_back_to_the_ps_before",
    ),
    "updates that are begun are made after the variables have moved": Bug(
        "server/runs/rescaling/migration.py",
        "self._ready.drop(loop.handle, settle=True)",
        "self._ready.drop(loop.handle)",
        "tests/simulation/test_rescales.py::"
        "test_an_update_that_a_dead_worker_left_is_made_before_variables_move",
    ),
    "a master that is a ps ends before the next one holds it": Bug(
        "server/runs/supervisor.py",
        "        if self._is_held:  # the standby lets the master of before go, "
        "which may be a ps\n            self._holds.hold()\n",
        "",
        "tests/simulation/test_rescales.py::"
        "test_a_master_that_is_a_ps_and_leaves_gives_away_what_it_has_first",
    ),
    "a run that no worker trains moves to a ps that takes no program": Bug(
        "server/runs/rescaling/migration.py",
        "if loops and attempt.left_out.issuperset(loop.task for loop in loops):",
        "if False:",
        "tests/simulation/test_rescales.py::"
        "test_a_run_that_no_worker_trains_stays_where_programs_are_taken",
    ),
    "a run that rests for a ps fails if that leaves for good": Bug(
        "server/runs/supervisor.py",
        "        if not (leaving := self._restarting):"
        "  # they leave for good, as is known since\n"
        "            self._rescaled(set())\n            return\n",
        "        leaving = self._restarting\n",
        RESCALED,
        first=1079,
    ),
    "all flows of a simulated network go at its full rate": Bug(
        "testing/scale/queues.py",
        "return min(self._most, self._rate / len(self._flows))",
        "return min(self._most, self._rate)",
        "tests/testing/scale/test_simulate.py::"
        "test_updates_take_as_long_as_the_bytes_of_all_workers_on_the_network_of_the_ps",
    ),
    "the network of a simulated worker is as wide as that of all ps": Bug(
        "testing/scale/cluster.py",
        "Pipe(sim, rate, _part(rate, share.read, self.read)),",
        "Pipe(sim, rate, rate),",
        "tests/testing/scale/test_simulate.py::"
        "test_the_network_of_a_worker_bounds_what_many_ps_send_it",
    ),
    "simulated tasks work on several things at once": Bug(
        "testing/scale/queues.py",
        "self._free_at = max(self._free_at, self._sim.now) + seconds",
        "self._free_at = self._sim.now + seconds",
        "tests/testing/scale/test_queues.py::"
        "test_work_that_comes_at_random_waits_as_long_as_an_m_d_1_queue_says",
    ),
    "what a simulated worker reads costs it nothing": Bug(
        "testing/scale/cluster.py",
        "hears = MessageCost(group.weight * costs.worker_ps_s / 2, each)",
        "hears = MessageCost(group.weight * costs.worker_ps_s / 2, 0.0)",
        "tests/testing/scale/test_simulate.py::"
        "test_a_step_of_one_worker_takes_the_sum_of_its_costs",
    ),
    "a ps that has joined has no gate": Bug(
        "server/runs/rescaling/migration.py",
        "        await self._open_gates(attempt.ps)\n",
        "",
        RESCALED,
    ),
    "a master that was replaced takes its run back": Bug(
        "server/runs/rollback.py",
        "        await check_master(self.peers, self.order.run, self.record.term)\n",
        "        return\n",
        "tests/server/runs/test_supervisor.py::"
        "test_master_that_was_replaced_gives_no_ps_its_state_again",
    ),
    "the batches of a lost worker are forgotten": Bug(
        "coordination/data/batch_book.py",
        "bisect.insort(self.given_back, place)",
        "self._open.discard(place)",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "what was told twice counts twice": Bug(
        "coordination/data/dispatch.py",
        "min(done - worker.done, len(worker.held))",
        "min(done, len(worker.held))",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "a position has no holes": Bug(
        "coordination/data/batch_book.py",
        "sorted(open_)",
        "self.given_back",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "a contribution read at two versions counts": Bug(
        "coordination/sync/aggregation.py",
        "if index in everywhere.mixed:",
        "if not everywhere.places:",
        f"{TRANSCRIPT}[sync/aggregation/several_ps]",
    ),
    "a contribution read at two versions is averaged": Bug(
        "coordination/sync/aggregation.py",
        "if index in everywhere.mixed:",
        "if not everywhere.places:",
        SYNCHRONOUS,
    ),
    "an epoch of children begins with a version that one of them needs no more": Bug(
        "coordination/sync/group.py",
        "return [EpochUp(epoch, min(self._ready.values()))]",
        "return [EpochUp(epoch, max(self._ready.values()))]",
        GROUP,
    ),
    "a child sums again what all have": Bug(
        "coordination/sync/group_member.py",
        "again = self._version is not None and self._version >= first",
        "again = self._version is not None",
        f"{TRANSCRIPT}[sync/group_member/summed_again]",
    ),
    "a sum that is made again is given on again": Bug(
        "coordination/sync/group_member.py",
        "if version < self._needs:",
        "if version < 0:",
        GROUP,
    ),
    "a contribution is told of before its sum": Bug(
        "coordination/sync/sync_gate.py",
        "return [Sum(self.version)] if untold == self._tell_at else _NOTHING",
        "return self._flush()",
        f"{TRANSCRIPT}[sync/sync_gate/together]",
    ),
    "a reader that is not heard of holds up all others": Bug(
        "coordination/sync/read_line.py",
        "if not self._has_moved:",
        "if False:",
        f"{TRANSCRIPT}[sync/sync_gate/line]",
    ),
    "who waits for a turn reads what is not the newest any more": Bug(
        "coordination/sync/sync_gate.py",
        "self._reads.update(dict.fromkeys(self._leave_line(), self.version + 1))",
        "pass",
        f"{TRANSCRIPT}[sync/sync_gate/line]",
    ),
    "values are taken to be there when they have left": Bug(
        "rpc/resumable/outbox.py",
        "return self._is_empty.is_set() and self.sent.nbytes < FEW_BYTES",
        "return self._is_empty.is_set()",
        f"{OUTBOX}test_who_waits_until_all_is_there_is_told_when_it_is_acknowledged",
    ),
    "an owner averages before all sums of hosts are there": Bug(
        "coordination/sync/host_sums.py",
        "if len(found) != len(missing) or missing.difference(found):",
        "if False:",
        ON_HOSTS,
    ),
    "a sum that was lost with its link is not sent again": Bug(
        "coordination/sync/host_sums.py",
        "return [SendAgain(part)] if part in self._awaiting else []",
        "return []",
        ON_HOSTS,
    ),
    "a sum that was overtaken leaves a host after the newer one": Bug(
        "server/gates/host_sums.py",
        "if self._is_closed or self._newest[order.part] is not order:",
        "if self._is_closed:",
        "tests/server/gates/test_host_sums.py::"
        "test_a_sum_that_is_overtaken_by_a_newer_one_does_not_leave",
    ),
    "who is out of a secure sum leaves its masks in it": Bug(
        "coordination/secure/sum_round.py",
        "outside = self._sharing - self._inside",
        "outside = frozenset[str]()",
        "tests/simulation/test_secure.py::"
        "test_each_sum_is_of_who_was_decided_and_no_batch_counts_twice[6]",
    ),
    "a worker that missed an update does not read all fragments": Bug(
        "train/step/fragments.py",
        "return (expected == 0) | (expected != number)",
        "return expected == 0",
        "tests/simulation/test_fragments.py::"
        "test_each_fragment_is_applied_to_what_its_workers_read_of_it[checkpoint-0.0]",
    ),
    "a replica contributes to an update twice": Bug(
        "coordination/sync/sync_gate.py",
        "if self._deciding or step[0] in self._contributed:",
        "if self._deciding:",
        SYNCHRONOUS,
    ),
    "what came too late with others in a turn is kept": Bug(
        "coordination/sync/sync_gate.py",
        "if not takes or read_at.count(self.version) < len(steps):",
        "if not takes:",
        f"{TRANSCRIPT}[sync/sync_gate/turns]",
    ),
    "a gate is told of a turn after what came later": Bug(
        "server/gates/sync_gate.py",
        "            self._end(self._turn)\n        for",
        "            pass\n        for",
        "tests/server/gates/test_gates.py::"
        "test_of_many_replicas_a_gate_takes_at_once_what_comes_in_a_turn",
    ),
    "a batch that counts is dealt again": Bug(
        "coordination/data/batch_book.py",
        "        self.done += len(done)\n",
        "        self.done += len(done)\n        self.given_back.extend(done)\n",
        SYNCHRONOUS,
    ),
    "orders of a master that was replaced are carried out": Bug(
        "coordination/run/succession.py",
        "if term < newest or (",
        "if term < 0 or (",
        f"{TRANSCRIPT}[run/succession/older_master]",
    ),
    "a master that was replaced still begins loops": Bug(
        "coordination/run/succession.py",
        "if term < newest or (",
        "if term < 0 or (",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "another master leaves out what nobody has told of": Bug(
        "coordination/data/batch_book.py",
        "                while self.end <= place:",
        "                self.end = max(self.end, place)\n"
        "                while self.end <= place:",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "another master forgets what was given back before": Bug(
        "coordination/data/batch_book.py",
        "self._open = set(self.given_back)",
        "self._open = set()",
        f"{SIMULATION}_and_no_update_lost_or_applied_twice",
    ),
    "what is on its way is not kept": Bug(
        "rpc/resumable/outbox.py",
        "number = self.sent.add(item, item.nbytes, keep=keep)",
        "number = self.sent.add(item, item.nbytes, keep=False)",
        f"{OUTBOX}test_frames_of_an_outbox_arrive_once_over_streams_that_fail[0]",
    ),
    "more is taken as acknowledged than is": Bug(
        "rpc/resumable/outbox.py",
        "        self.acknowledge(received)\n",
        "        self.acknowledge(received + 1)\n",
        f"{OUTBOX}test_frames_of_an_outbox_arrive_once_over_streams_that_fail[0]",
    ),
    "acknowledgements behind calls are not read": Bug(
        "rpc/resumable/outbox.py",
        "if self.backlog.queued_bytes > FULL_BYTES and not self.sent.is_full:",
        "if self.backlog.queued_bytes > FULL_BYTES:",
        f"{OUTBOX}test_any_number_of_large_replies_at_once_all_arrive",
    ),
    "a caller to whom nothing has come yet does not say that it is back": Bug(
        "rpc/resumable/outbox.py",
        "while self.backlog or self._received is not None:",
        "while self.backlog or self._received:",
        f"{CALLS}test_first_reply_of_a_line_arrives_though_the_connection_was_cut_before_it[stream]",
    ),
    "a stream that ends lets the line end on which another goes on": Bug(
        "rpc/resumable/accepting.py",
        "                if turn == self._turn:\n",
        "                if turn:\n",
        f"{CUTS}test_a_call_goes_on_for_longer_than_a_cut_line_is_waited_for[14]",
    ),
    "a stream that is cancelled while it ends leaves its link to nobody": Bug(
        "rpc/resumable/accepting.py",
        "            try:\n                await cancel_all(self._beside)\n"
        "            finally:  # gRPC may cancel this meanwhile\n",
        "            if turn:\n                await cancel_all(self._beside)\n",
        "tests/rpc/resumable/test_accepting.py::"
        "test_caller_of_a_stream_cancelled_while_it_ends_is_waited_for_and_given_up",
    ),
    "a step that was being replaced is not put back": Bug(
        "runtime/files/step_files.py",
        "            put_back(directory / old[1])\n",
        "            pass\n",
        "tests/runtime/files/test_step_files.py::"
        "test_a_step_that_is_replaced_is_there_before_and_after",
    ),
    "a caller that comes back is taken for a new one": Bug(
        "rpc/calls/sessions.py",
        "            answers = self._lines[key]\n",
        "            answers = self._begin(key, check)\n",
        f"{CALLS}test_a_call_is_made_once_whatever_of_it_was_lost",
    ),
    "a step is told of before its record is kept": Bug(
        "coordination/step/commit_tracker.py",
        "return last <= self._committed",
        "return True",
        PS_CORE,
    ),
    "another loop begins a batch too late": Bug(
        "coordination/data/batch_order.py",
        "return self._first(epoch, index) + first,",
        "return self._first(epoch, index) + first + 1,",
        SYNCHRONOUS,
    ),
    "another loop begins a batch too early": Bug(
        "coordination/data/batch_order.py",
        "return self._first(epoch, index) + first,",
        "return max(0, self._first(epoch, index) + first - 1),",
        SYNCHRONOUS,
    ),
    "a worker may be lost twice": Bug(
        "coordination/sync/aggregation.py",
        "if replica not in self._alive:",
        "if not replica:",
        SYNCHRONOUS,
    ),
    "a gate is opened by a master that was replaced": Bug(
        "coordination/run/succession.py",
        "if term < newest or (",
        "if term < 0 or (",
        "tests/simulation/test_sync.py::"
        "test_gates_are_opened_by_the_newest_master_alone",
    ),
    "a task does not ask which master opens its gate": Bug(
        "server/loops/task_loops.py",
        "        self._terms.check(order.run, order.term)\n        self._gates",
        "        self._gates",
        "tests/client/runs/test_failover.py::"
        "test_order_of_a_master_that_was_replaced_is_refused_by_every_task"
        "[/job:ps/task:0]",
    ),
    "a gate that did not hear of its end is not told again": Bug(
        "server/gates/gates.py",
        "        if tries:\n",
        "        if False:\n",
        "tests/server/gates/test_gates.py::"
        "test_a_gate_that_may_not_have_heard_of_its_end_is_told_again",
    ),
    "a gate takes what was said to the one before": Bug(
        "server/gates/gates.py",
        "if event.opening != self._openings.get(event.gate):",
        "if event.gate not in self._openings:",
        "tests/server/gates/test_gates.py::"
        "test_a_gate_takes_nothing_that_was_said_to_the_one_before",
    ),
    "an update is seen while it is applied": Bug(
        "runtime/store/store.py",
        "with held([*entries, *rest] if rest else entries):",
        "with held([]):",
        "tests/runtime/store/test_store.py::test_readers_never_see_half_an_update",
    ),
    "a wait for a silent master never ends": Bug(
        "coordination/liveness/master_lease.py",
        "case Unanswered(error) if silent_s >= self._end_s:",
        "case Unanswered(error) if silent_s < 0:",
        f"{TRANSCRIPT}[liveness/master_lease/silent_master]",
    ),
    "a wait for contributions never ends": Bug(
        "coordination/sync/aggregation.py",
        'return self._finish("failed", self._late(timeout_s))',
        "return []",
        f"{TRANSCRIPT}[sync/aggregation/end]",
    ),
    "a run that went back uses the variables of before": Bug(
        "train/parts.py",
        "container = container or new_container()",
        'container = container or "train"',
        "tests/train/strategies/test_async_runner.py::"
        "test_variables_made_anew_take_nothing_that_was_meant_for_those_before",
    ),
    "the master saves without a lease": Bug(
        "server/runs/saving/checkpointer.py",
        "while not self._lease.generation:",
        "while False:",
        f"{SAVER}test_nothing_is_saved_before_the_directory_is_the_masters",
    ),
    "the position of a save is taken after its snapshot": Bug(
        "server/runs/saving/checkpointer.py",
        "position={**position, **self.record.privacy(step)},",
        "position=self.position(),",
        f"{SAVER}test_a_position_is_never_after_the_updates_that_it_is_saved_with",
    ),
    "what went on while it was copied is saved": Bug(
        "server/runs/saving/checkpointer.py",
        "if go_on is not None and not await go_on():",
        "if go_on is not None and await go_on() is None:",
        f"{SAVER}test_a_run_that_went_on_while_it_was_copied_is_saved_at_its_end",
    ),
    "updates go on while a run is saved": Bug(
        "coordination/sync/aggregation.py",
        "        if self._halted:\n            return []\n",
        "",
        f"{TRANSCRIPT}[sync/aggregation/halt]",
    ),
    "workers go on while a run is saved": Bug(
        "coordination/step/replica_loop.py",
        "            and not self._halted\n",
        "",
        f"{TRANSCRIPT}[step/replica_loop/halt]",
    ),
    "retention removes the newest": Bug(
        "runtime/files/step_files.py",
        "in beyond(directory, keep, is_whole):",
        "in our_steps(directory)[keep:]:",
        f"{SAVER}test_the_newest_steps_are_kept[1]",
    ),
    "checksums are not compared": Bug(
        "runtime/files/manifest.py",
        "if self.leaves.get(name) != leaves.get(name)",
        "if name not in self.leaves",
        "tests/train/test_checkpoint_damage.py::"
        "test_a_flipped_bit_of_an_array_names_the_leaf",
    ),
    "a writer that was replaced commits": Bug(
        "train/checkpoint/checkpoints.py",
        "        def check() -> None:\n            self._lease.check()\n",
        "        def check() -> None:\n",
        "tests/train/test_failpoints.py::"
        "test_a_writer_that_is_replaced_during_a_save_commits_nothing",
    ),
    "a server writes its token to its log": Bug(
        "server/server.py",
        'f"{self.task} listens on {server.address}"',
        'f"{self.task} listens on {server.address}, {self._token.metadata}"',
        "tests/test_smoke.py::"
        "test_a_graph_over_a_ps_and_a_worker_runs_and_leaves_no_process",
    ),
    "a server writes its key to its log": Bug(
        "rpc/security/tls.py",
        "        return Identity(self, cert, key, ca)",
        "        import logging\n"
        "        logging.getLogger(__name__).warning('%s', key)\n"
        "        return Identity(self, cert, key, ca)",
        "tests/server/test_tls.py::"
        "test_server_and_client_meet_with_the_files_of_one_run",
    ),
    "padding of ids is row 0 where a gradient is spread": Bug(
        "graph/rows/padded_rows.py",
        'return whole.at[ids].set(rows, mode="drop")',
        "return whole.at[jnp.where(ids < size, ids, 0)].set(rows)",
        f"{ROWS}test_rows_are_spread_over_the_whole_table_where_its_shards_are",
    ),
    "a step is counted before ids of a whole table are looked at": Bug(
        "plan/partition/id_checks.py",
        'if op.equation.primitive.name == "checked_ids":\n        return True',
        'if op.equation.primitive.name == "checked_ids":\n        return False',
        "tests/client/test_refused_steps.py::"
        "test_ids_of_a_whole_table_are_looked_at_before_a_step_is_counted",
    ),
    "row 0 loses its gradient where rows are spread": Bug(
        "graph/rows/padded_rows.py",
        'return whole.at[ids].set(rows, mode="drop")',
        "return whole.at[jnp.where(ids < size, ids, 0)].set(rows)",
        f"{PATHS}[index-int32-momentum-exact-async-whole-40]",
    ),
    "no id of a bag is row 0": Bug(
        "train/tables/bags.py",
        "jnp.where(there, ids, NO_ID)",
        "jnp.where(there, ids, 0)",
        f"{PATHS}[bag-int8-adamw-lazy-local-whole-128]",
    ),
    "an unsigned id is padding": Bug(
        "train/tables/bags.py",
        "there = (ids != -1)",
        "there = (ids != 255)",
        f"{PATHS}[bag-uint8-adagrad-auto-async-div-256]",
    ),
    "gradients that wait are lost with rows alone": Bug(
        "train/tables/row_step.py",
        "never_lazy = update.held_back | update.by_size",
        "never_lazy = update.by_size",
        f"{PATHS}[index-uint16-multi_steps-lazy-async-mod-40]",
    ),
    "joined ids of two shards end with row 0": Bug(
        "graph/rows/rows.py",
        "merged = jnp.full_like(rows[0], padding_of(rows[0]))",
        "merged = jnp.zeros_like(rows[0])",
        "tests/plan/test_rows.py::"
        "test_padding_of_merged_ids_is_no_id_in_a_graph_and_on_a_server",
    ),
    "what a few steps show is all that is asked of an optimizer": Bug(
        "train/tables/row_update.py",
        "if others and same[n] and n not in movers)",
        "if others and same[n])",
        "tests/train/tables/test_still_rows.py::"
        "test_an_optimizer_that_changes_other_rows_ever_updates_them_all"
        "[decay that begins later than anybody tries]",
    ),
    "ids are put together as rows are": Bug(
        "plan/sharding/shard.py",
        "if choice.result and self.values.follows_from_ids(equation, choice.result):",
        "if False:",
        f"{ROWS}test_what_follows_from_ids_is_put_together_with_the_padding_of_ids",
    ),
    "padding of ids is an id": Bug(
        "graph/rows/rows.py",
        "    if may_be_ids(type_):\n        return PAST_THE_END\n",
        "",
        "tests/plan/test_rows.py::"
        "test_padding_of_merged_ids_is_no_id_in_a_graph_and_on_a_server",
    ),
    "a bag has no largest id": Bug(
        "train/tables/bags.py",
        "ids = without_no_id(wide_ids(ids))",
        "ids = ids",
        f"{BAGS}test_a_bag_has_its_largest_id_and_its_padding_whatever_the_dtype[uint8]",
    ),
    "padding of a bag is row 0": Bug(
        "train/tables/bags.py",
        "ids = without_no_id(wide_ids(ids))",
        "wide, ids = wide_ids(ids), ids",
        f"{BAGS}test_training_changes_the_rows_of_a_bag_and_not_those_of_its_padding"
        "[int8-lazy]",
    ),
    "what is left over of gradients goes with a late contribution": Bug(
        "train/step/compress.py",
        "residual = jnp.where(has_counted, residual, before[...])",
        "residual += 0 * before[...]",
        "tests/train/step/test_compress.py::"
        "test_rounding_of_contributions_that_are_dropped_is_made_good"
        "[int8-True-200]",
    ),
    "of the pieces of a step that came too late only the first is dealt again": Bug(
        "coordination/data/sync_data.py",
        "replica, places = self._let_go(number)\n        for place in places:",
        "replica, places = self._let_go(number)\n        for place in places[:1]:",
        f"{TRANSCRIPT}[data/sync_data/shares]",
    ),
    "a share counts as much as any other": Bug(
        "train/step/batch_pieces.py",
        "weight = count.astype(jnp.float32)",
        "weight = jnp.ones((), jnp.float32)",
        "tests/train/strategies/test_batch_share.py::"
        "test_shares_by_speed_make_the_update_of_one_process",
    ),
    "a label moves before its version can answer": Bug(
        "coordination/serving/versions.py",
        "label: version if version in ready else self._labels.get(label)",
        "label: version",
        f"{TRANSCRIPT}[serving/versions/labels]",
    ),
    "the deadline of a request that waits is not looked at": Bug(
        "coordination/serving/batching.py",
        "late = self._drop(lambda one: one.deadline <= now)",
        "late = self._drop(lambda one: False)",
        f"{TRANSCRIPT}[serving/batching/refuse]",
    ),
    "the queue of a model has no end": Bug(
        "coordination/serving/batching.py",
        "if self.queued_rows + rows > self._limits.max_queued_rows else None",
        "if rows < 0 else None",
        f"{TRANSCRIPT}[serving/batching/refuse]",
    ),
    "a request gets the rows of another one of its batch": Bug(
        "serving/function_queue.py",
        "outputs = [one[at : at + piece.rows] for one in answered.outputs]",
        "outputs = [one[: piece.rows] for one in answered.outputs]",
        f"{TOGETHER}::test_requests_that_run_together_get_their_own_rows",
    ),
    "rows that were padded are in an answer": Bug(
        "serving/function_queue.py",
        "outputs = [one[at : at + piece.rows] for one in answered.outputs]",
        "outputs = [one[at:] for one in answered.outputs]",
        f"{TOGETHER}::test_requests_that_run_together_get_their_own_rows",
    ),
    "a request to a live model brings keys into its hash tables": Bug(
        "runtime/node_work.py",
        "store.lookup(rows, record, peeks=node.peeks)",
        "store.lookup(rows, record)",
        "tests/train/live/test_live_hash_tables.py::"
        "test_answers_are_those_of_the_trained_model_and_change_no_table",
    ),
    "the digest of an exported program is not compared": Bug(
        "runtime/compiled/compile_cache.py",
        "if hashlib.sha256(code.exported).hexdigest() != code.digest:",
        "if not code.digest:",
        "tests/serving/test_export.py::test_code_is_not_parsed_before_its_digest_fits",
    ),
}
QUICK: Final = ("what is on its way is not kept",)


def run_with(bug: Bug, where: Path) -> subprocess.CompletedProcess[str]:
    """Runs the test that should find a bug on a package that has it."""
    package = Path(jgraph.__file__).parent
    shutil.copytree(package, where / "jgraph", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("tests", "pyproject.toml", "protos"):
        (where / name).symlink_to(ROOT / name)
    file = where / "jgraph" / bug.file
    code = file.read_text(encoding="utf-8")
    assert code.count(bug.right) == 1, f"{bug.file} has changed; write the bug anew"
    file.write_text(code.replace(bug.right, bug.wrong), encoding="utf-8")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "-pno:cacheprovider",
            "--timeout=280",  # a bug may take long to show
            bug.found_by,
        ],
        cwd=where,
        env={
            **os.environ,
            "PYTHONPATH": str(where),
            "JGRAPH_SIMULATION": str(bug.first),
            "JGRAPH_SIMULATIONS": "200",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.procs
@pytest.mark.slow
@pytest.mark.timeout(360)  # the command has 300
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.chaos) for n in BUGS],
)
def test_a_planted_bug_turns_its_test_red(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]
    ended = run_with(bug, tmp_path)
    assert ended.returncode == 1, ended.stdout[-2000:] + ended.stderr[-2000:]
    # Of each of its parameters, where it has some.
    assert re.search(r"\b[123] failed", ended.stdout), ended.stdout


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_still_has_its_place(name: str) -> None:
    bug = BUGS[name]
    code = (Path(jgraph.__file__).parent / bug.file).read_text(encoding="utf-8")
    assert code.count(bug.right) == 1
    test, _, function = bug.found_by.partition("::")
    function, _, script = function.removesuffix("]").partition("[")
    if bug.found_by.startswith(TRANSCRIPT):
        package, machine, name = script.split("/")
        folder = ROOT / "tests/coordination" / package / "testdata" / machine
        assert (folder / f"{name}.txt").is_file()
    code = (ROOT / test).read_text(encoding="utf-8")
    assert f"def {function}(" in code or f"{function} = " in code
