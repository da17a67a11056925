"""Numbers and flags that users give: checks, and Python's in place of NumPy's."""

from numbers import Integral, Real
from typing import TypeGuard

from jgraph.errors import ConfigError


def is_count(value: object, least: int) -> TypeGuard[int]:
    """Whether an option is a whole number, and not less than that."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return False
    return int(value) >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether an option is a number."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_duration(value: object) -> TypeGuard[float]:
    """Whether an option is a number of seconds, more than 0."""
    return is_number(value) and bool(value > 0)


def is_amount(value: object) -> TypeGuard[float]:
    """Whether an option is a number, 0 or more; not NaN."""
    return is_number(value) and bool(value >= 0)


def is_share(value: object) -> TypeGuard[float]:
    """Whether an option is a part of a whole, from 0 to 1."""
    return is_number(value) and bool(0 <= value <= 1)


def check_flags(**flags: object) -> None:
    """Refuses a flag that is neither true nor false; "no", for one, counts as true.

    Raises:
      ConfigError: names it.

    Example:
      >>> check_flags(dry_run="no")
      Traceback (most recent call last):
      jgraph.errors.ConfigError: JG-124 dry_run is 'no'; give True or False
    """
    for name, value in flags.items():
        kind = str(getattr(value, "dtype", ""))  # of NumPy's; its import takes a while
        if not isinstance(value, bool) and kind != "bool":
            raise ConfigError(f"{name} is {value!r:.60}; give True or False")


def as_ints(options: object, *names: str) -> None:
    """Makes Python's of the NumPy integers among frozen options.

    Messages and files are JSON, which knows no others.
    """
    for name in names:
        if isinstance(value := getattr(options, name), Integral):
            object.__setattr__(options, name, int(value))
