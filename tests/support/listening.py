"""Where a process listens: ports, and sockets of its machine."""

from pathlib import Path

import psutil

_LISTENS = 0x10000
"""Of the flags of a Unix socket, as the kernel tells them."""


def listening_sockets(pid: int) -> list[str]:
    """Returns where a process and its children listen."""
    process = psutil.Process(pid)
    return [
        where
        for one in (process, *process.children(recursive=True))
        for where in (*_ports(one), *_unix(one))
    ]


def _ports(process: psutil.Process) -> list[str]:
    found = process.net_connections("inet")
    # A port of UDP has no state: who has one takes what anybody sends there.
    taking = {psutil.CONN_LISTEN, psutil.CONN_NONE}
    return [str(one.laddr) for one in found if one.status in taking]


def _unix(process: psutil.Process) -> list[str]:
    files = [_file(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    mine = {name.removeprefix("socket:[").removesuffix("]") for name in files}
    rows = Path("/proc/net/unix").read_text().splitlines()[1:]
    split = [row.split() for row in rows]
    return [
        row[7] if len(row) > 7 else "without a name"
        for row in split
        if row[6] in mine and int(row[3], 16) & _LISTENS
    ]


def _file(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:  # it was closed meanwhile
        return ""
