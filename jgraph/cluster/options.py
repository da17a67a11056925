"""Options of clusters, of sessions and of ``run``, and their checks."""

import inspect
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jgraph.errors import ConfigError
from jgraph.rpc._pb import jgraph_pb2 as pb
from jgraph.rpc.frames import frame
from jgraph.rpc.transport import Frame

if TYPE_CHECKING:
    from jgraph.graph.tracing.function import Function

RECORDS_DIR: Final = "JGRAPH_RECORDS_DIR"
"""Variable of a ps's environment: below that directory it writes logs of updates."""


def check_options(fn: "Function", num_args: int, options: Mapping[str, bool]) -> None:
    """Refuses a call in which an option could be an argument of the function.

    Args:
      fn: what is run.
      num_args: how many arguments are given by position.
      options: each option of ``run``, and whether it is not at its default.

    Raises:
      ConfigError: the function has a parameter of an option's name, which is given by
        keyword, or is needed and not given by position.

    Example:
      >>> from jgraph.graph.tracing.function import Function
      >>> scale = Function(lambda x, timeout_s: x * timeout_s, name="scale")
      >>> check_options(scale, 2, {"timeout_s": False})
      >>> check_options(scale, 1, {"timeout_s": True})
      Traceback (most recent call last):
        ...
      jgraph.errors.ConfigError: JG-124 scale has a parameter 'timeout_s', which is
      also an option of run; give it by position, or rename it in the function
    """
    for index, parameter in enumerate(fn.parameters):
        if parameter.name not in options:
            continue
        by_position = (
            parameter.kind is not inspect.Parameter.KEYWORD_ONLY and index < num_args
        )
        is_needed = parameter.default is inspect.Parameter.empty
        if not by_position and (is_needed or options[parameter.name]):
            raise ConfigError(
                f"{fn.name} has a parameter '{parameter.name}', which is also an "
                "option of run; give it by position, or rename it in the function",
                parameter=parameter.name,
            )


def check_platforms(platforms: Sequence[str]) -> None:
    """Refuses kinds of device that ``jax.export`` does not know.

    Raises:
      ConfigError: one of another name.
    """
    known = ("cpu", "cuda", "rocm", "tpu")
    for name in [platforms] if isinstance(platforms, str) else platforms:
        if name not in known or isinstance(platforms, str):
            raise ConfigError(
                f"platforms is {platforms!r}; give a list of {', '.join(known)}, for "
                "example platforms=('cpu', 'cuda')"
            )


def check_sources(allowed: object) -> tuple[str, ...]:
    """Returns the patterns of functions that data may come from.

    Raises:
      ConfigError: they are no list of texts.

    Example:
      >>> check_sources("mine.data:*")
      Traceback (most recent call last):
      jgraph.errors.ConfigError: JG-124 allow_sources is 'mine.data:*'; write a list of
      patterns of functions, for example allow_sources=["package.data:*"]
    """
    patterns: tuple[object, ...] | None = None
    if isinstance(allowed, Iterable) and not isinstance(allowed, str | bytes):
        patterns = tuple(allowed)
    texts = tuple(each for each in patterns or () if isinstance(each, str))
    if patterns is None or len(texts) < len(patterns):
        raise ConfigError(
            f"allow_sources is {allowed!r:.60}; write a list of patterns of functions, "
            'for example allow_sources=["package.data:*"]'
        )
    return texts


def check_seconds(name: str, seconds: object) -> None:
    """Refuses what is no time to wait.

    Raises:
      ConfigError: it is no number, or a negative one.
    """
    if not isinstance(seconds, Real) or not float(seconds) >= 0.0:
        raise ConfigError(
            f"{name} is {seconds!r}; give a number of seconds, 0 or more, for example "
            f"{name}=30"
        )


def shutdown_order(grace_s: float) -> Frame:
    """Returns what tells a task to end.

    Raises:
      ConfigError: ``grace_s`` is no time.
    """
    check_seconds("grace_s", grace_s)
    return frame(shutdown=pb.Shutdown(grace_s=grace_s))


def reset_order(containers: Sequence[str]) -> Frame:
    """Returns what tells a master to drop the variables of containers.

    Raises:
      ConfigError: one is not a name.
    """
    for name in containers:
        if not isinstance(name, str):
            raise ConfigError(
                f"reset takes names of containers, and {name!r} is not one; write "
                "reset('a', 'b'), or reset() for all of them"
            )
    return frame(reset=pb.Reset(containers=containers))


def allowed_sources_in(path: Path) -> list[str]:
    """Returns the import paths that a cluster file lets data come from.

    Args:
      path: a file that ``ClusterSpec.from_toml`` has taken.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8")).get("sources")
    return list(table["allow"]) if table else []
