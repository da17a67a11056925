"""Numeric options of users: checks, and Python's in place of NumPy's."""

from typing import TypeGuard

import numpy as np


def is_count(value: object, least: int) -> bool:
    """Whether an option is a whole number, and not less than that."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return bool(value >= least)


def is_number(value: object) -> TypeGuard[float]:
    """Whether an option is a number."""
    return isinstance(value, float | int | np.number) and not isinstance(value, bool)


def is_duration(value: object) -> bool:
    """Whether an option is a number of seconds, more than 0."""
    return is_number(value) and bool(value > 0)


def is_amount(value: object) -> bool:
    """Whether an option is a number, 0 or more; not NaN."""
    return is_number(value) and bool(value >= 0)


def is_share(value: object) -> bool:
    """Whether an option is a part of a whole, from 0 to 1."""
    return is_number(value) and bool(0 <= value <= 1)


def as_ints(options: object, *names: str) -> None:
    """Makes Python's of the NumPy integers among frozen options.

    Messages and files are JSON, which knows no others.
    """
    for name in names:
        if isinstance(value := getattr(options, name), np.integer):
            object.__setattr__(options, name, int(value))
