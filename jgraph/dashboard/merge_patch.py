"""JSON merge patches, RFC 7396: what changed between two objects."""

from typing import Any


def difference(before: Any, after: Any) -> dict[str, Any]:
    """Returns the patch that makes ``after`` of ``before``, both objects.

    A value of ``after`` that is None cannot be told from one that is gone: whoever
    reads it takes both for unknown.

    Example:
      >>> difference({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 5}, "e": 6})
      {'b': {'c': 5, 'd': None}, 'e': 6, 'a': None}
    """
    patch: dict[str, Any] = {}
    for name, value in after.items():
        if name not in before:
            patch[name] = value
        elif isinstance(value, dict) and isinstance(before[name], dict):
            if inner := difference(before[name], value):
                patch[name] = inner
        elif value != before[name] or type(value) is not type(before[name]):
            patch[name] = value
    patch.update({name: None for name in before if name not in after})
    return patch


def patched(value: Any, patch: Any) -> Any:
    """Returns a value with a patch; neither is changed.

    Example:
      >>> patched({"a": 1, "b": {"c": 2, "d": 3}}, {"a": None, "b": {"c": 5}})
      {'b': {'c': 5, 'd': 3}}
    """
    if not isinstance(patch, dict):
        return patch
    found = dict(value) if isinstance(value, dict) else {}
    for name, change in patch.items():
        if change is None:
            found.pop(name, None)
        else:
            found[name] = patched(found.get(name), change)
    return found
