"""Frame kinds of methods; a frame of the wrong kind is refused before it is read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from jgraph.errors import JGError, MalformedMessageError
from jgraph.rpc.frames import kind_of
from jgraph.rpc.transport import Frame

REQUESTS: Final[Mapping[str, str]] = {
    "TaskStatus": "empty",
    "RegisterProgram": "register_program",
    "UnregisterProgram": "program_handle",
    "RunStep": "run_step",
    "RunLoop": "run_loop",
    "StopLoop": "stop_loop",
    "OpenGate": "open_gate",
    "GateReport": "gate_query",
    "Variables": "variable_query",
    "ReadTable": "hash_table_call",
    "LoadTable": "hash_table_call",
    "SaveShards": "shard_files",
    "LoadShards": "shard_files",
    "Reset": "reset",
    "Runs": "empty",
    "InheritRun": "open_run",
    "RunJournal": "run_query",
    "KeepRecords": "keep_records",
    "TakeRecords": "take_records",
    "EndRecords": "end_records",
    "PutData": "put_data",
    "SendData": "send_data",
    "OpenSource": "open_source",
    "FeedData": "feed_data",
    "TaskLog": "log_query",
    "Farewell": "empty",
    "Shutdown": "shutdown",
    "Master.Connect": "connect",
    "Master.Status": "empty",
    "Master.RegisterProgram": "register_program",
    "Master.UnregisterProgram": "program_handle",
    "Master.Variables": "variable_query",
    "Master.ReadTable": "hash_table_call",
    "Master.LoadTable": "hash_table_call",
    "Master.Reset": "reset",
    "Master.RunLoop": "run_loop",
    "Master.StopLoop": "stop_loop",
    "Master.OpenGate": "open_gate",
    "Master.GateReport": "gate_query",
    "Master.OpenRun": "open_run",
    "Master.KeepProgram": "register_program",
    "Master.Runs": "empty",
    "Master.Attach": "run_query",
    "Master.StopRun": "run_query",
    "Master.RunSaved": "run_query",
    "Master.OpenDataRun": "open_data_run",
    "Master.AskData": "ask_data",
    "Master.DataPosition": "data_run",
    "Master.CloseDataRun": "data_run",
}


def check_request(method: str, request: Frame) -> None:
    """Refuses a frame of another kind than a method takes.

    Raises:
      MalformedMessageError: names both kinds.
    """
    wanted, sent = REQUESTS[method], kind_of(request)
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
