"""End of a log file, read without what comes before: that may be gigabytes."""

import os
from typing import BinaryIO, Final

_BLOCK: Final = 64 << 10


def last_lines(file: BinaryIO, lines: int) -> list[str]:
    r"""Returns the last lines of a file, which is at its end afterwards.

    Args:
      file: of text, which need not be UTF-8.
      lines: how many, at most.

    Example:
      >>> import io
      >>> last_lines(io.BytesIO(b"one\ntwo\nthr\xff"), 2)
      ['two', 'thr�']
    """
    end = at = file.seek(0, os.SEEK_END)
    blocks: list[bytes] = []
    breaks = 0
    while at and breaks <= lines:  # one more, before the first of them
        begin = max(0, at - _BLOCK)
        file.seek(begin)
        blocks.append(file.read(at - begin))
        breaks += blocks[-1].count(b"\n")
        at = begin
    file.seek(end)
    content = b"".join(reversed(blocks))
    if content.endswith(b"\n"):
        content = content[:-1]
    elif not content:
        return []
    return [
        line.decode(errors="replace").rstrip("\r")
        for line in content.split(b"\n")[-lines:]
    ]
