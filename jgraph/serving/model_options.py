"""Options of a served model: ``model.toml``, read when a version is loaded."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from jgraph.coordination.serving.batching import Limits
from jgraph.errors import ArtifactError, ConfigError
from jgraph.serving.artifact import read_file

FILE: Final = "model.toml"
MOST_ROWS: Final = 1 << 20
"""Of an execution: code is tried with so many before a version answers."""
MOST_SLOTS: Final = 1024
MOST: Final = 10**12
"""Of any number; of milliseconds, 31 years."""
_NUMBER: Final = (int, float)
_SECTIONS: Final = ("batching", "versions", "outputs")
_KEYS: Final[Mapping[str, Any]] = {
    "max_rows": int,
    "buckets": list,
    "max_delay_ms": _NUMBER,
    "slots": int,
    "max_queued_rows": int,
    "timeout_ms": _NUMBER,
}


@final
@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What ``model.toml`` may say.

    Attributes:
      limits: what a function takes at a time.
      timeout_s: for requests without a deadline.
      newest: how many of the newest versions answer; 0: all.
      refuse_nonfinite: NaN or infinity in an answer is an error.
    """

    limits: Limits = field(default_factory=Limits)
    timeout_s: float = 10.0
    newest: int = 1
    refuse_nonfinite: bool = False

    @classmethod
    def of(cls, text: str) -> "ModelOptions":
        r"""Reads the content of the file.

        Raises:
          ValueError, ConfigError: it means nothing; says why.

        Example:
          >>> ModelOptions.of("[batching]\nmax_rows = 8").limits.buckets
          (1, 2, 4, 8)
        """
        body = tomllib.loads(text)
        for name in _SECTIONS:
            if not isinstance(body.setdefault(name, {}), dict):
                raise ValueError(f"{name} is a section: [{name}]")  # noqa: TRY004
        batching, versions, outputs = map(body.pop, _SECTIONS)
        newest = versions.pop("newest", 1)
        refuses = outputs.pop("refuse_nonfinite", False)
        sections = (body, versions, outputs)
        unknown = [key for section in sections for key in section]
        unknown += [key for key in batching if key not in _KEYS]
        if unknown:
            raise ValueError(f"'{unknown[0]}' is no option")
        _check_batching(batching)
        if type(newest) is not int or newest < 0:
            raise ValueError("newest is a whole number, 0 for all")
        if type(refuses) is not bool:
            raise ValueError("refuse_nonfinite is true or false")
        delay_ms = batching.pop("max_delay_ms", 0)
        timeout_s = batching.pop("timeout_ms", 10_000) / 1000
        if timeout_s <= 0:
            raise ValueError("timeout_ms is more than 0")
        if "max_rows" in batching:
            most = batching["max_rows"]
            batching.setdefault("buckets", _powers(most))
        if "buckets" in batching:
            batching["buckets"] = tuple(batching["buckets"])
            batching.setdefault("max_rows", max(batching["buckets"], default=0))
        limits = Limits(max_delay_s=delay_ms / 1000, **batching)
        return cls(limits, timeout_s, newest, refuses)


def _check_batching(batching: Mapping[str, Any]) -> None:
    for key, value in batching.items():
        if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
            raise ValueError(f"{key} has a value of another type")  # noqa: TRY004
        if isinstance(value, _NUMBER) and not abs(value) <= MOST:  # NaN is not
            raise ValueError(f"{key} is {value!s:.40}; give {MOST:,} at most")
    sizes = [batching.get("max_rows", 1), *batching.get("buckets", ())]
    if any(type(size) is not int or size > MOST_ROWS for size in sizes):
        raise ValueError(f"max_rows and buckets are whole numbers up to {MOST_ROWS:,}")
    if batching.get("slots", 1) > MOST_SLOTS:
        raise ValueError(f"slots is {MOST_SLOTS:,} at most")


def _powers(most: int) -> list[int]:
    """Returns the powers of two below a number, and the number."""
    return [1 << n for n in range(max(most, 1).bit_length()) if 1 << n < most] + [most]


def read_options(model: Path) -> ModelOptions:
    """Reads the options of a model; without the file all are as by default.

    Raises:
      ArtifactError: the file means nothing; says why.
    """
    try:
        return ModelOptions.of(read_file(model, FILE, 1 << 20).decode())
    except FileNotFoundError:
        return ModelOptions()
    except ConfigError as error:
        raise ArtifactError(f"{model / FILE}: {error.message}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{model / FILE}: {error}; correct it") from error
