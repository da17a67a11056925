"""A process that has loaded what tasks load, and becomes them: ``… FD MODULE …``.

Loading is four fifths of what a task costs that serves a few steps. This process
computes nothing and has one thread: a fork of it is what a new process is once it has
loaded that. Each order is a JSON object that comes with three files: standard input,
output and error.
"""

import gc
import json
import os
import runpy
import signal
import socket
import struct
import sys
import tempfile
from importlib import import_module
from typing import Any, Final

from jgraph import failpoints
from jgraph.loading import uncollected

SIZE: Final = struct.Struct("!I")


def await_order(orders: socket.socket) -> dict[str, Any]:
    """Returns what the process is to be that this one has become.

    In the process that it was before, goes on to take orders, and ends when nobody is
    there to give any.
    """
    while True:
        head, files, _, _ = socket.recv_fds(orders, SIZE.size, 3)
        if not head:
            sys.exit()
        (size,) = SIZE.unpack(head)
        order: dict[str, Any] = json.loads(orders.recv(size, socket.MSG_WAITALL))
        if between := os.fork():
            os.waitpid(between, 0)  # now the test process has the task as a child
            orders.sendall(b"!")
            for file in files:
                os.close(file)
            continue
        if task := os.fork():
            orders.sendall(SIZE.pack(task))
            os._exit(0)
        orders.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return order


def become(order: dict[str, Any]) -> None:
    """Makes this process what a new one would be: its session, folder and variables."""
    if order["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    sys.path[0] = order["folder"]
    sys.argv = ["", *order["arguments"]]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uncollected():
        for name in sys.argv[2:]:
            import_module(name)
    gc.freeze()
    order = await_order(socket.socket(fileno=int(sys.argv[1])))
    become(order)
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
