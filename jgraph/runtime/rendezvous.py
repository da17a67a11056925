"""Rendezvous: a table of channels, keyed by (program, step, key).

Source: tensorflow/core/framework/rendezvous.h. A producer never blocks; a consumer may
ask before or after the value came; a dropped step forgets both.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from jgraph.errors import MalformedMessageError

StepKey: TypeAlias = tuple[str, int]
"""(program handle, step id). A handle is registered with one incarnation of its tasks,
so a key never outlives a restart."""

Values: TypeAlias = Sequence[Any]
Consumer: TypeAlias = Callable[[Values], None]

_REMEMBERED_STEPS = 4096


def _nbytes(values: Values) -> int:
    return sum(getattr(value, "nbytes", 0) for value in values)


@final
class Rendezvous:
    """Pairs ``send`` and ``recv`` of one task. Used from one thread.

    Example:
      >>> table = Rendezvous()
      >>> table.recv(("train", 7), "w", print)
      >>> table.send(("train", 7), "w", [1, 2])
      [1, 2]
    """

    def __init__(self) -> None:
        self._waiting: dict[StepKey, dict[str, Consumer]] = {}
        self._arrived: dict[StepKey, dict[str, Values]] = {}
        self._finished: OrderedDict[StepKey, None] = OrderedDict()
        self.nbytes = 0
        """Bytes of the values that nobody asked for yet."""

    def send(self, step: StepKey, key: str, values: Values) -> None:
        """Gives values to the consumer of ``key``, now or when it asks.

        Values of a step that is over are dropped.

        Raises:
          MalformedMessageError: the key of this step was sent before.
        """
        if step in self._finished:
            return
        consumer = self._waiting.get(step, {}).pop(key, None)
        if consumer is not None:
            consumer(values)
            return
        arrived = self._arrived.setdefault(step, {})
        if key in arrived:
            raise MalformedMessageError(
                f"values '{key}' of step {step[1]} of '{step[0]}' were sent twice"
            )
        arrived[key] = values
        self.nbytes += _nbytes(values)

    def recv(self, step: StepKey, key: str, consumer: Consumer) -> None:
        """Calls ``consumer(values)`` once, as soon as the values are there."""
        arrived = self._arrived.get(step, {})
        if key in arrived:
            values = arrived.pop(key)
            self.nbytes -= _nbytes(values)
            if not arrived:
                del self._arrived[step]
            consumer(values)
        else:
            self._waiting.setdefault(step, {})[key] = consumer

    def finish(self, step: StepKey) -> None:
        """Forgets a step; what still comes for it is dropped."""
        self._waiting.pop(step, None)
        for values in self._arrived.pop(step, {}).values():
            self.nbytes -= _nbytes(values)
        self._finished[step] = None
        while len(self._finished) > _REMEMBERED_STEPS:
            self._finished.popitem(last=False)

    def is_finished(self, step: StepKey) -> bool:
        """Whether a step was forgotten, as far as is remembered."""
        return step in self._finished

    def oldest(self) -> StepKey:
        """Returns the step whose values wait longest for somebody to ask for them."""
        return next(iter(self._arrived))

    def waiting_for(self, step: StepKey) -> list[str]:
        """Returns the keys that the step's consumers still wait for."""
        return sorted(self._waiting.get(step, {}))

    def finish_program(self, handle: str) -> None:
        """Forgets all steps of a program."""
        for step in {*self._waiting, *self._arrived}:
            if step[0] == handle:
                self.finish(step)
