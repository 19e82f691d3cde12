"""What the drop-ins share: the options of `attention` that a call really asks for, and the words for those that are missing.

The surprising fact: "off" has many spellings. A softcap of 0.0, a window of (-1, -1), a dropout of 0.0 are what others' callers pass when
they want none, so they must not be an error where the feature itself would be.
"""

import inspect
from typing import Any

from ..api import attention, attention_varlen

ACCEPTED = {function: frozenset(inspect.signature(function).parameters) for function in (attention, attention_varlen)}


def refuse(what: str, instead: str = "leave it at its default") -> None:
    raise NotImplementedError(f"{what} is not implemented by flashattn: {instead}")


def refuse_given(**arguments: Any) -> None:
    """NotImplementedError, naming it, for the first argument that isn't what it is when nobody wants it: None, False or 0."""
    for name, value in arguments.items():
        if value is not None and (not isinstance(value, (bool, int, float)) or value != 0):
            shown = f"{name}={value!r}" if isinstance(value, (bool, int, float, str)) else name
            refuse(shown)


def wanted(function, **options: Any) -> dict[str, Any]:
    """The options without those that are None or a plain 0, as keywords for `attention` or `attention_varlen`.

    NotImplementedError names one that this version of `function` doesn't have.
    """
    found = {}
    for name, value in options.items():
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0):
            continue
        if name not in ACCEPTED[function]:
            refuse(name)
        found[name] = value
    return found


def window_of(window_size) -> tuple[int | None, int | None] | None:
    """flash-attn's (left, right), where any negative number is no limit, as `attention` has it; None is no window."""
    if window_size is None:
        return None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size={window_size!r}: expected (left, right), -1 for no limit")
    left, right = (None if limit is None or limit < 0 else limit for limit in window_size)
    return None if left is None and right is None else (left, right)
