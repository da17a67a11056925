"""Allowlist of native code (custom calls) that an exported program may use.

JAX looks at the targets of custom calls when it exports, not when it loads; so whoever
writes the bytes could name anything that is registered in the process.
"""

import re
from typing import Any, Final

from jgraph._compat import stable_custom_calls
from jgraph.errors import ForbiddenProgramError
from jgraph.plan.program import SegmentCode

ALLOWED: Final = stable_custom_calls - {"tf.call_tf_function"}
"""TensorFlow's would run a graph of its own in this process."""
_CALL: Final = re.compile(r"\bstablehlo\.custom_call\b")
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
    unread = len(targets) != len(_CALL.findall(text))
    unknown = sorted(set(targets) - ALLOWED)
    if unknown or unread:
        what = f"'{unknown[0][:80]}'" if unknown else "something that has no name"
        raise ForbiddenProgramError(
            f"segment '{code.label[:80]}' calls native code, {what}, which a server "
            "does not run for others; use operations of JAX in its place",
            targets=unknown,
        )
