"""Children of servers that take part in XLA's collectives, found from outside."""

import psutil

MODULE = "jgraph.runtime.group_child"


def children_of(pid: int) -> list[psutil.Process]:
    """Returns those of one server, whichever thread of it began them."""
    found = []
    for child in psutil.Process(pid).children():
        try:
            if MODULE in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found
