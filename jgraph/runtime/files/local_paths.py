"""Paths of users, and why one cannot be a directory of this machine."""

import os
import re
from contextlib import suppress
from pathlib import Path


def local_path(path: str | Path) -> Path:
    """Returns the path that a user means.

    Raises:
      ValueError: it cannot be a directory of this machine; says why.

    Example:
      >>> local_path("gs://bucket/mlp")
      Traceback (most recent call last):
      ValueError: it is an address of an object store
    """
    try:
        text = os.fspath(path)
        target = Path(text).expanduser().absolute()
        if not (why := _why_not(text)):
            with suppress(FileNotFoundError):
                target.stat()
            return target
    except (OSError, RuntimeError, TypeError) as error:
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
    raise ValueError(why)


def _why_not(text: str) -> str:
    if not text:
        return "it is empty"
    if "\0" in text:
        return "it has a zero byte"
    if re.match(r"[A-Za-z][\w+.-]+:/", text):
        return "it is an address of an object store"
    return ""
