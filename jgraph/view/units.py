"""Text of quantities: bytes, FLOPs, times, counts, lists of names."""

from collections.abc import Sequence

_MAX_NAMES = 4


def bytes_text(count: int) -> str:
    """Returns a byte count for people.

    Example:
      >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**20)
      ('512 B', '1.5 KiB', '3.0 MiB')
    """
    if count < 1024:
        return f"{count} B"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f} {units[0]}"


def flops_text(count: float) -> str:
    """Returns a number of floating-point operations for people.

    Example:
      >>> flops_text(12), flops_text(2500), flops_text(3e9)
      ('12 FLOP', '2.5 kFLOP', '3.0 GFLOP')
    """
    if count < 1000:
        return f"{count:.0f} FLOP"
    units = ["", "k", "M", "G", "T", "P"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.1f} {units[0]}FLOP"


def ms_text(seconds: float) -> str:
    """Returns a time in milliseconds for people.

    Example:
      >>> ms_text(0.0591234)
      '59.1 ms'
    """
    return f"{1e3 * seconds:.3g} ms"


def count_text(count: int, noun: str) -> str:
    """Returns a number and its noun.

    Example:
      >>> count_text(1, "segment"), count_text(1200, "segment")
      ('1 segment', '1,200 segments')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def names_text(names: Sequence[str]) -> str:
    """Returns the first names and how many more there are."""
    listing = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{listing} and {more} more" if more > 0 else listing
