"""Makes Triton's interpreter do once a launch what it does at every call of a device function: half of the time of an interpreted test.

Before a function runs, the interpreter replaces each builtin of `triton.language` by one that computes with numpy. A launch does that and
undoes it at its end. The functions that the kernel calls do it too, find nothing left to replace and undo nothing, for half a millisecond
each. Here they do nothing where the modules that they see are already replaced.
"""

from functools import cache


def replace_once() -> bool:
    """Whether this version of Triton is one that it is known how to do this for; with others the interpreter stays as slow as it is."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_LangPatchScope"):
        return False
    replace, replaced = interpreter._patch_lang, set()

    @cache
    def seen_by(function) -> frozenset:
        return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)

    def replace_what_is_left(function):
        new = seen_by(function) - replaced
        if not new:
            return interpreter._LangPatchScope()
        scope = replace(function)
        replaced.update(new)
        undo = scope.restore

        def restore():
            replaced.difference_update(new)
            undo()

        scope.restore = restore
        return scope

    interpreter._patch_lang = replace_what_is_left
    return True
