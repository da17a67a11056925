"""Answers of served functions, and what a server asks of a source of versions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias, final

from jgraph.coordination.serving.versions import Listed
from jgraph.errors import JGError
from jgraph.serving.exported_model import LoadedFunction, LoadedVersion
from jgraph.serving.model_options import ModelOptions
from jgraph.serving.signature import Array, Signature

Fact: TypeAlias = int | str
NO_FACTS: Final[Mapping[str, Fact]] = MappingProxyType({})
NOBODY: Final[Mapping[int, JGError]] = MappingProxyType({})


@final
@dataclass(frozen=True, slots=True)
class Answered:
    """What a function gives for a batch.

    Attributes:
      outputs: in the order of its signature.
      facts: what is told beside them, in the parameters of an answer.
      refused: why rows of the batch have no answer, by their number.
    """

    outputs: Sequence[Array]
    facts: Mapping[str, Fact] = field(default_factory=lambda: NO_FACTS)
    refused: Mapping[int, JGError] = field(default_factory=lambda: NOBODY)


class WaitingFunction(Protocol):
    """A function that waits for others, and so never runs on the event loop."""

    signature: Signature

    @property
    def problem(self) -> JGError | None:
        """Why it cannot answer now; None: it can."""

    @property
    def facts(self) -> Mapping[str, Fact]:
        """What is told beside an answer for no rows."""

    def prepare(self, inputs: Sequence[Array]) -> None:
        """Compiles what so many rows need, and tries it; waits for both."""

    async def answer(self, inputs: Sequence[Array]) -> Answered:
        """Returns the answer for a batch."""

    def close(self) -> None:
        """Lets go of what it holds elsewhere; not for the event loop."""


Function: TypeAlias = LoadedFunction | WaitingFunction
Version: TypeAlias = LoadedVersion[LoadedFunction] | LoadedVersion[WaitingFunction]


class VersionSource(Protocol):
    """Where the versions of a model come from."""

    name: str
    """Name of the model."""
    newest: int
    """How many of the newest versions answer; 0: all."""

    def look(self) -> Listed:
        """Returns the versions and labels there are now; may read files."""

    def load(self, version: int) -> tuple[Version, ModelOptions]:
        """Returns a version in memory, and how it is served; takes its time."""

    def set_label(self, label: str, version: int | None) -> None:
        """Calls a version by a label."""
