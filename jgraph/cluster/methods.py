"""Table of methods: the roles that may call each, and the kind of frame it takes.

A task may be the master of others, so it may call what a master calls. With TLS a role
is proved by a certificate; without, who has the token has both.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias, final

from jgraph.errors import JGError, MalformedMessageError
from jgraph.rpc.frames import kind_of
from jgraph.rpc.security.auth import Roles
from jgraph.rpc.transport import Frame

Answer: TypeAlias = Callable[[Frame], AsyncIterator[Frame]]
"""Answers a call of a method."""

_CLIENT: Final = frozenset({"client"})
_TASK: Final = frozenset({"task"})
_BOTH: Final = _CLIENT | _TASK


@final
@dataclass(frozen=True, slots=True)
class Method:
    """What may be called, and how.

    Attributes:
      roles: of those that may call it.
      request: kind of the frame that it takes.
    """

    roles: frozenset[str]
    request: str


METHODS: Final[Mapping[str, Method]] = {
    # What a master asks of the tasks.
    "TaskStatus": Method(_TASK, "empty"),
    "RegisterProgram": Method(_TASK, "register_program"),
    "UnregisterProgram": Method(_TASK, "program_handle"),
    "RunLoop": Method(_TASK, "run_loop"),
    "StopLoop": Method(_TASK, "stop_loop"),
    "OpenGate": Method(_TASK, "open_gate"),
    "GateReport": Method(_TASK, "gate_query"),
    "Variables": Method(_TASK, "variable_query"),
    "ReadTable": Method(_TASK, "hash_table_call"),
    "LoadTable": Method(_TASK, "hash_table_call"),
    "Reset": Method(_TASK, "reset"),
    "MoveVariables": Method(_TASK, "move_variables"),
    "Runs": Method(_TASK, "empty"),
    "InheritRun": Method(_TASK, "open_run"),
    "SucceedRun": Method(_TASK, "run_query"),
    # What the standby of a run asks of its master, and of the other standbys.
    "RunJournal": Method(_TASK, "run_query"),
    "JournalEnd": Method(_TASK, "run_query"),
    "SendData": Method(_TASK, "send_data"),
    # What the registrar of the members asks of the tasks, and who joins of any.
    "Members": Method(_TASK, "members"),
    "Master.Join": Method(_TASK, "join_request"),
    "Master.Leave": Method(_BOTH, "leave_request"),
    # What a client asks of a task: neither training data nor checkpoints pass through
    # the master, which asks for some of it again when a worker is back.
    "RunStep": Method(_BOTH, "run_step"),
    "PutData": Method(_BOTH, "put_data"),
    "FeedData": Method(_CLIENT, "feed_data"),
    "OpenSource": Method(_BOTH, "open_source"),
    "TaskLog": Method(_CLIENT, "log_query"),
    "Flight": Method(_CLIENT, "flight_query"),
    "Profile": Method(_CLIENT, "profile_query"),
    "SaveShards": Method(_BOTH, "shard_files"),
    "LoadShards": Method(_BOTH, "shard_files"),
    "KeepRecords": Method(_BOTH, "keep_records"),
    "TakeRecords": Method(_BOTH, "take_records"),
    "EndRecords": Method(_BOTH, "end_records"),
    "CopyAhead": Method(_TASK, "copy_ahead"),
    "KeepReads": Method(_TASK, "keep_reads"),
    "GiveReads": Method(_TASK, "give_reads"),
    "DrainHold": Method(_BOTH, "empty"),  # a master, for a run whose client is gone
    "Shutdown": Method(_CLIENT, "shutdown"),
    # What a client asks of its master.
    "Master.Connect": Method(_CLIENT, "connect"),
    # A master also asks a worker which ps that reaches.
    "Master.Status": Method(_BOTH, "empty"),
    "Master.RegisterProgram": Method(_CLIENT, "register_program"),
    "Master.UnregisterProgram": Method(_CLIENT, "program_handle"),
    "Master.Variables": Method(_CLIENT, "variable_query"),
    "Master.ReadTable": Method(_CLIENT, "hash_table_call"),
    "Master.LoadTable": Method(_CLIENT, "hash_table_call"),
    "Master.Reset": Method(_CLIENT, "reset"),
    "Master.RunLoop": Method(_CLIENT, "run_loop"),
    "Master.StopLoop": Method(_CLIENT, "stop_loop"),
    "Master.OpenGate": Method(_CLIENT, "open_gate"),
    "Master.GateReport": Method(_CLIENT, "gate_query"),
    "Master.OpenRun": Method(_CLIENT, "open_run"),
    "Master.KeepProgram": Method(_CLIENT, "register_program"),
    "Master.Runs": Method(_CLIENT, "empty"),
    "Master.Attach": Method(_CLIENT, "run_query"),
    "Master.BeginRun": Method(_CLIENT, "run_query"),
    "Master.AnswerRun": Method(_CLIENT, "run_answer"),
    "Master.StopRun": Method(_CLIENT, "run_query"),
    "Master.SucceedRun": Method(_CLIENT, "run_query"),
    "Master.RunSaved": Method(_CLIENT, "run_query"),
    "Master.OpenDataRun": Method(_CLIENT, "open_data_run"),
    "Master.DataPosition": Method(_CLIENT, "data_run"),
    "Master.CloseDataRun": Method(_CLIENT, "data_run"),
    # What a worker asks of the master that deals out the data.
    "Master.AskData": Method(_TASK, "ask_data"),
    "Master.SecureSum": Method(_TASK, "sum_message"),
}

ROLES: Final[Roles] = {name: method.roles for name, method in METHODS.items()}
"""Who may call what; what is not in it, nobody may."""


def check_request(method: str, request: Frame) -> None:
    """Refuses a frame of another kind than a method takes.

    Raises:
      MalformedMessageError: names both kinds.
    """
    wanted, sent = METHODS[method].request, kind_of(request)
    if sent != wanted:
        raise MalformedMessageError(
            f"'{method}' takes a '{wanted}' frame, and '{sent}' was sent; the caller "
            "may run another version of jgraph"
        )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Makes what Python raises over a request's own fields one error.

    Raises:
      MalformedMessageError: says of what.
    """
    try:
        yield
    except JGError:
        raise
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as bad:
        raise MalformedMessageError(f"{what} is none: {bad!r:.80}") from None
