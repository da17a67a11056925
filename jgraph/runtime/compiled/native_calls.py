"""Shapes of the calls of LAPACK in a compiled segment.

The routines write as much as their first operands say, and look at no result's size: a
program whose results are smaller would write over other memory of the process. JAX
never makes such calls; whoever writes a program by hand could.
"""

import math
import re
from typing import Any, Final, TypeAlias

from jgraph._compat import stable_custom_calls
from jgraph.errors import ForbiddenProgramError
from jgraph.plan.program.program import SegmentCode

Shape: TypeAlias = tuple[int, ...]

_SHAPES: Final = {
    # Operands, then results; "k" is the lesser of "m" and "n", and "j" is "n" less one.
    "potrf": ("nn", "nn -"),
    "getrf": ("mn", "mn k -"),
    "geqrf": ("mn", "mn k"),
    "orgqr": ("mn t", "mn"),
    "ungqr": ("mn t", "mn"),
    "geqp3": ("mn n", "mn n k"),
    "gesdd mode=65": ("mn", "mn k mm nn -"),
    "gesdd mode=83": ("mn", "mn k mk kn -"),
    "gesdd mode=78": ("mn", "mn k uv wx -"),  # of which it makes none
    "syevd": ("nn", "nn n -"),
    "heevd": ("nn", "nn n -"),
    "geev real": ("nn", "n n nn nn -"),
    "geev": ("nn", "n nn nn -"),
    "gees real": ("nn", "nn nn n n - -"),
    "gees": ("nn", "nn nn n - -"),
    "gehrd": ("nn", "nn j -"),
    "sytrd": ("nn", "nn n j j -"),
    "hetrd": ("nn", "nn n j j -"),
    "trsm side=76": ("mm mn", "mn"),
    "trsm side=82": ("nn mn", "mn"),
    "gtsv": ("n n n nr", "n n n nr -"),
}
ROUTINES: Final = frozenset(name.split()[0] for name in _SHAPES)
_CALL: Final = re.compile(
    r"= (?P<results>.*?) custom-call\(.*"
    r'custom_call_target="lapack_(?P<type>[sdcz])(?P<routine>\w+)_ffi".*'
    r"operand_layout_constraints=\{(?P<operands>(?:[^{}]|\{[^{}]*\})*)\}"
)
_TYPE: Final = re.compile(r"\b[a-z]+\d+\[([\d,]*)\]")


def check_lapack_calls(label: str, text: str) -> None:
    """Refuses compiled code that calls LAPACK with results of another size.

    Args:
      label: of the segment.
      text: what was compiled, as HLO.

    Raises:
      ForbiddenProgramError: names what it calls.
    """
    for line in text.splitlines():
        if 'custom_call_target="lapack_' not in line:
            continue
        if (found := _CALL.search(line)) is None or not _is_sound(found, line):
            what = line.partition('custom_call_target="')[2].partition('"')[0]
            raise ForbiddenProgramError(
                f"segment '{label[:80]}' calls native code, '{what[:80]}', with arrays "
                "that do not fit it; use operations of JAX in its place",
                targets=[what],
            )


def _is_sound(call: re.Match[str], line: str) -> bool:
    operands, results = _shapes(call["operands"]), _shapes(call["results"])
    routine = call["routine"]
    kinds = [routine]
    if call["type"] in "sd":
        kinds.insert(0, f"{routine} real")
    if option := re.search(r"\b(?:mode|side) = (\d+) : ui8", line):
        kinds.append(f"{routine} {option[0].partition(' ')[0]}={option[1]}")
    rule = next((_SHAPES[kind] for kind in kinds if kind in _SHAPES), None)
    if rule is None or not operands:
        return False
    first = rule[0].split()[0]
    batch = operands[0][: len(operands[0]) - len(first)]
    sizes: dict[str, int] = {}
    if not _fits(operands, rule[0].split(), batch, sizes):
        return False
    sizes["k"] = min(sizes.get("m", math.inf), sizes.get("n", math.inf))  # type: ignore[assignment]
    sizes["j"] = max(sizes.get("n", 0) - 1, 0)
    return _fits(results, rule[1].split(), batch, sizes)


def _fits(
    shapes: list[Shape], names: list[str], batch: Shape, sizes: dict[str, int]
) -> bool:
    """Whether shapes are what they are called; notes sizes that are new."""
    if len(shapes) != len(names):
        return False
    for shape, name in zip(shapes, names, strict=True):
        axes = name.replace("-", "")
        if len(shape) != len(batch) + len(axes) or shape[: len(batch)] != batch:
            return False
        for size, axis in zip(shape[len(batch) :], axes, strict=True):
            if sizes.setdefault(axis, size) != size:
                return False
    return True


def _shapes(text: str) -> list[Shape]:
    return [
        tuple(int(size) for size in dims.split(",") if size)
        for dims in _TYPE.findall(text)
    ]


ALLOWED: Final = stable_custom_calls - {"tf.call_tf_function"}
"""TensorFlow's would run a graph of its own in this process."""
_CUSTOM_CALL: Final = re.compile(r"\bstablehlo\.custom_call\b")
_TARGET: Final = re.compile(
    r'\bstablehlo\.custom_call @(?:"([^"]+)"|([\w$.-]+))'
    r'|"stablehlo\.custom_call"[^\n]*?\bcall_target_name = "([^"]+)"'
)


def check_custom_calls(code: SegmentCode, exported: Any) -> None:
    """Refuses a segment that calls native code which is not allowed.

    Raises:
      ForbiddenProgramError: names what it would call.
    """
    # Names of operations are plain text in the bytes; most segments have none of these.
    if b"custom_call" not in exported.mlir_module_serialized:
        return
    text = exported.mlir_module()
    targets = [a or b or c for a, b, c in _TARGET.findall(text)]
    unread = len(targets) != len(_CUSTOM_CALL.findall(text))
    unknown = sorted(set(targets) - ALLOWED)
    if unknown or unread:
        what = f"'{unknown[0][:80]}'" if unknown else "something that has no name"
        raise ForbiddenProgramError(
            f"segment '{code.label[:80]}' calls native code, {what}, which a server "
            "does not run for others; use operations of JAX in its place",
            targets=unknown,
        )
