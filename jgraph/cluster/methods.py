"""Access control: the table of methods and the role that may call each.

A task may be the master of others, so it may call what a master calls. With TLS a role
is proved by a certificate; without, who has the token has both.
"""

from collections.abc import AsyncIterator, Callable
from typing import Final, TypeAlias

from jgraph.rpc.security.auth import Roles
from jgraph.rpc.transport import Frame

_CLIENT: Final = frozenset({"client"})
_TASK: Final = frozenset({"task"})
_BOTH: Final = _CLIENT | _TASK

ROLES: Final[Roles] = {
    # What a master asks of the tasks.
    "TaskStatus": _TASK,
    "RegisterProgram": _TASK,
    "UnregisterProgram": _TASK,
    "RunLoop": _TASK,
    "StopLoop": _TASK,
    "OpenGate": _TASK,
    "GateReport": _TASK,
    "Variables": _TASK,
    "ReadTable": _TASK,
    "LoadTable": _TASK,
    "Reset": _TASK,
    "Runs": _TASK,
    "InheritRun": _TASK,
    # What the heir of a run asks of its master.
    "RunJournal": _TASK,
    "SendData": _TASK,
    # What a client asks of a task: neither training data nor checkpoints pass through
    # the master, which asks for some of it again when a worker is back.
    "RunStep": _BOTH,
    "PutData": _BOTH,
    "FeedData": _CLIENT,
    "OpenSource": _BOTH,
    "TaskLog": _CLIENT,
    "SaveShards": _BOTH,
    "LoadShards": _BOTH,
    "KeepRecords": _BOTH,
    "TakeRecords": _CLIENT,
    "EndRecords": _CLIENT,
    "Farewell": _BOTH,  # a master, for a run whose client is gone
    "Shutdown": _CLIENT,
    # What a client asks of its master.
    "Master.Connect": _CLIENT,
    "Master.Status": _BOTH,  # a master asks a worker which ps that reaches
    "Master.RegisterProgram": _CLIENT,
    "Master.UnregisterProgram": _CLIENT,
    "Master.Variables": _CLIENT,
    "Master.ReadTable": _CLIENT,
    "Master.LoadTable": _CLIENT,
    "Master.Reset": _CLIENT,
    "Master.RunLoop": _CLIENT,
    "Master.StopLoop": _CLIENT,
    "Master.OpenGate": _CLIENT,
    "Master.GateReport": _CLIENT,
    "Master.OpenRun": _CLIENT,
    "Master.KeepProgram": _CLIENT,
    "Master.Runs": _CLIENT,
    "Master.Attach": _CLIENT,
    "Master.StopRun": _CLIENT,
    "Master.RunSaved": _CLIENT,
    "Master.OpenDataRun": _CLIENT,
    "Master.DataPosition": _CLIENT,
    "Master.CloseDataRun": _CLIENT,
    # What a worker asks of the master that deals out the data.
    "Master.AskData": _TASK,
}


Method: TypeAlias = Callable[[Frame], AsyncIterator[Frame]]
"""Answers a call."""
