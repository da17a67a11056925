"""Device strings and scopes, with TensorFlow's grammar and field-by-field merging.

Source: tensorflow/python/framework/device.py (DeviceSpec) and ``tf.device``.
"""

import contextvars
import difflib
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ContextDecorator,
    ExitStack,
    contextmanager,
)
from dataclasses import dataclass, fields
from typing import Final, NewType, final

from jgraph.errors import DeviceSpecError
from jgraph.view import markup

TaskName = NewType("TaskName", str)

"""Canonical name of one task, for example ``/job:ps/task:0``."""

_FIELDS = (
    re.compile(r"job:(?P<job>\*|[a-zA-Z][a-zA-Z0-9_]*)"),
    re.compile(r"replica:(?P<replica>\*|[0-9]+)"),
    re.compile(r"task:(?P<task>\*|[0-9]+)"),
    re.compile(
        r"device:(?P<device_type>[a-zA-Z][a-zA-Z0-9_]*)(:(?P<device_index>\*|[0-9]+))?"
    ),
    re.compile(r"(?P<device_type>(?i:[cgt]pu))(:(?P<device_index>\*|[0-9]+))?"),
    re.compile(r"with:(?P<beside>[^/]+)"),
)
_TASK = re.compile(r"([a-zA-Z][a-zA-Z0-9_]*):([0-9]{1,3})")  # more is a port
_EXAMPLE = "/job:worker/task:0/device:cpu:0"


def is_ps(task: str) -> bool:
    """Whether a task is a parameter server, which holds variables of others.

    Example:
      >>> is_ps("/job:ps/task:0"), is_ps("/job:worker/task:0")
      (True, False)
    """
    return task.startswith("/job:ps/")


def is_worker(task: str) -> bool:
    """Whether a task is a worker.

    Example:
      >>> is_worker("/job:worker/task:0"), is_worker("/job:ps/task:0")
      (True, False)
    """
    return task.startswith("/job:worker/")


@final
@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A possibly partial device: every field may be unset (``None``).

    ``device_index`` None with a ``device_type`` means any device of that type
    (``/device:cpu:*``). ``beside`` is the name, quoted as in URLs, of a variable whose
    task is meant where the fields do not say another one (see ``colocate_with``).

    Example:
      >>> spec = DeviceSpec.from_string("/job:ps/task:1/cpu:0")
      >>> str(spec)
      '/job:ps/task:1/device:CPU:0'
      >>> str(DeviceSpec.from_string("/job:worker").merge(spec))
      '/job:ps/task:1/device:CPU:0'
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None
    beside: str | None = None

    @classmethod
    def from_string(cls, text: str) -> "DeviceSpec":
        """Parses a device string.

        Args:
          text: fields separated by ``/``, in any order, each optional:
            ``job:NAME``, ``replica:N``, ``task:N``, ``device:TYPE:N``, and the short
            forms ``cpu:N``, ``gpu:N``, ``tpu:N``; ``*`` stands for any, and so does a
            device without index. ``""`` is the empty spec. A task alone may be
            written short: ``ps:0``.

        Raises:
          DeviceSpecError: the text is not a device string.
        """
        found: dict[str, str] = {}
        if (short := _TASK.fullmatch(text)) and not _is_field(text):
            text = f"/job:{short[1]}/task:{short[2]}"
        for part in filter(None, text.split("/")):
            for key, value in _parse_field(part, text).items():
                if key in found:
                    raise DeviceSpecError(
                        f"device string '{text}' sets {key} twice; write each field "
                        f"once, for example '{_EXAMPLE}'"
                    )
                found[key] = value
        said = {key: value for key, value in found.items() if value != "*"}
        return cls(
            job=said.get("job"),
            replica=_number(said.get("replica")),
            task=_number(said.get("task")),
            device_type=said["device_type"].upper() if "device_type" in said else None,
            device_index=_number(said.get("device_index")),
            beside=said.get("beside"),
        )

    def merge(self, inner: "DeviceSpec") -> "DeviceSpec":
        """Returns ``inner`` with its unset fields filled from this one.

        Type and index of a device are one field: TensorFlow would let ``/cpu:*`` in
        ``/gpu:1`` mean CPU 1, which nobody wants, and merging must be associative, as
        scopes are merged in whatever order JAX's traces nest.

        Example:
          >>> outer = DeviceSpec.from_string("/job:worker/task:3/gpu:1")
          >>> str(outer.merge(DeviceSpec.from_string("/task:0/cpu:*")))
          '/job:worker/task:0/device:CPU:*'
        """
        kind = inner if inner.device_type is not None else self
        outer = self if inner.beside is None else DeviceSpec()
        return DeviceSpec(
            job=outer.job if inner.job is None else inner.job,
            replica=outer.replica if inner.replica is None else inner.replica,
            task=outer.task if inner.task is None else inner.task,
            device_type=kind.device_type,
            device_index=kind.device_index,
            beside=self.beside if inner.beside is None else inner.beside,
        )

    @property
    def task_name(self) -> str | None:
        """``/job:J/task:T`` when both are set, else None."""
        if self.job is None or self.task is None:
            return None
        return f"/job:{self.job}/task:{self.task}"

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))

    def __str__(self) -> str:
        parts = []
        if self.job is not None:
            parts.append(f"/job:{self.job}")
        if self.replica is not None:
            parts.append(f"/replica:{self.replica}")
        if self.task is not None:
            parts.append(f"/task:{self.task}")
        if self.device_type is not None:
            index = "*" if self.device_index is None else self.device_index
            parts.append(f"/device:{self.device_type}:{index}")
        if self.beside is not None:
            parts.append(f"/with:{self.beside}")
        return "".join(parts)

    def _repr_html_(self) -> str:
        return markup.data(self)


def _is_field(part: str) -> bool:
    return any(field.fullmatch(part) for field in _FIELDS)


def _parse_field(part: str, text: str) -> dict[str, str]:
    for field in _FIELDS:
        if match := field.fullmatch(part):
            return {k: v for k, v in match.groupdict().items() if v is not None}
    raise DeviceSpecError(
        f"'{part}' in device string '{text}' is not a device field; write for example "
        f"'{_EXAMPLE}'"
    )


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


MARK: Final = "jgdev\x1f"
"""What names of scopes begin with that are devices; nobody types its last character."""

# A scope is a jax.named_scope of such a name. JAX's autodiff and batching carry it to
# the equations they make, wrapped: transpose(jvp(jgdev<…>)). Slashes separate scopes in
# a name stack, so they are not used inside.
_SCOPE = re.compile(MARK + r"<([^>]*)>")
_CURRENT: contextvars.ContextVar[DeviceSpec | None] = contextvars.ContextVar(
    "jgraph_device", default=None
)
_ENTERED: contextvars.ContextVar[tuple[ExitStack, ...]] = contextvars.ContextVar(
    "jgraph_devices", default=()
)


def device(spec: str | DeviceSpec | None) -> AbstractContextManager[None]:
    """Places the operations traced inside on a device.

    Scopes nest: the inner one wins field by field; ``None`` clears all outer scopes.
    What it returns may be used again, in any thread.

    Args:
      spec: a device string such as ``"/job:worker/task:1"``, possibly partial.

    Raises:
      DeviceSpecError: ``spec`` is not a device string.

    Example:
      >>> import jax.numpy as jnp
      >>> with device("/job:worker"):
      ...     with device("/task:1"):
      ...         str(current_device())
      '/job:worker/task:1'
    """
    # Checked here, not when the scope is entered: a typo shows where it is written.
    return _Scope(None if spec is None else as_spec(spec))


@final
class _Scope(ContextDecorator, AbstractContextManager[None]):
    """A device scope that may be entered more than once."""

    def __init__(self, inner: DeviceSpec | None) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        entered = ExitStack()
        entered.enter_context(_scope(self._inner))
        _ENTERED.set((*_ENTERED.get(), entered))

    def __exit__(self, *exc: object) -> None:
        *others, last = _ENTERED.get()
        _ENTERED.set(tuple(others))
        last.close()


@contextmanager
def _scope(inner: DeviceSpec | None) -> Iterator[None]:
    import jax  # not above: who reads cluster descriptions needs no JAX

    merged = DeviceSpec() if inner is None else current_device().merge(inner)
    token = _CURRENT.set(merged)
    try:
        with jax.named_scope(_scope_name(inner)):
            yield
    finally:
        _CURRENT.reset(token)


def as_spec(device: object) -> DeviceSpec:
    """Returns the spec of a device string; a spec is checked and returned.

    Raises:
      DeviceSpecError: neither of the two, or a spec that no device string says.
    """
    if isinstance(device, str):
        return DeviceSpec.from_string(device)
    if isinstance(device, DeviceSpec) and DeviceSpec.from_string(str(device)) == device:
        return device
    raise DeviceSpecError(
        f"{device!r} is not a device; write a string, for example '{_EXAMPLE}'"
    )


def current_device() -> DeviceSpec:
    """Returns the merged device scope of the calling code."""
    return _CURRENT.get() or DeviceSpec()


def _scope_name(spec: DeviceSpec | None) -> str:
    text = "none" if spec is None else str(spec).lstrip("/").replace("/", ",")
    return f"{MARK}<{text}>"


@functools.lru_cache(maxsize=4096)
def stamp_of(name_stack: str, outer: DeviceSpec | None = None) -> DeviceSpec:
    """Returns the device scopes in an equation's name stack, merged over ``outer``."""
    spec = outer or DeviceSpec()
    for text in _SCOPE.findall(name_stack):
        if text == "none":
            spec = DeviceSpec()
        else:
            spec = spec.merge(DeviceSpec.from_string(text.replace(",", "/")))
    return spec


def did_you_mean(asked: str, known: Sequence[str]) -> str:
    """Returns ``did you mean '…'? `` for the nearest of ``known``, or nothing.

    Example:
      >>> did_you_mean("/job:wroker/task:0", ["/job:ps/task:0", "/job:worker/task:0"])
      "did you mean '/job:worker/task:0'? "
    """
    close = difflib.get_close_matches(asked, known, n=1)
    return f"did you mean '{close[0]}'? " if close else ""
