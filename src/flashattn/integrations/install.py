"""`import flash_attn` in code that isn't yours, answered by this library: opt-in, and undone by `uninstall_flash_attn`.

The surprising fact: much code never imports to find out. It asks importlib.util.find_spec, which answers for these modules too because they
have a spec, or importlib.metadata, which knows installed distributions only: where that decides, as in Transformers, this has no effect
and `flashattn.integrations.transformers.register()` is the way.
"""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

VERSION = "2.8.0"  # of the interface
NAMES = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding", "flash_attn_interface")
MARK = "__flashattn__"
_replaced: dict[str, ModuleType] = {}


def _ours(name: str) -> bool:
    return MARK in vars(sys.modules.get(name, object))


def _module(name: str, source: ModuleType, names: tuple[str, ...], is_package: bool = False) -> ModuleType:
    module = ModuleType(name, f"{name}, by flashattn: {source.__doc__}")
    module.__spec__ = ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []  # others of its modules are not found, and say so
    vars(module).update({key: getattr(source, key) for key in names} | {"__version__": VERSION, MARK: True})
    return module


def install_as_flash_attn(force: bool = False, fa3: bool = False) -> None:
    """From now on `import flash_attn` gives the functions of `flashattn.integrations.flash_attn`, in this process.

    Puts `flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` into `sys.modules`; other modules of flash-attn
    (`flash_attn.layers`, ...) are not there and raise ModuleNotFoundError. Must run before whatever imports them by name. A second call
    changes nothing.

    Args:
        force: also where flash-attn is installed, which then is hidden, not changed. Default False.
        fa3: also FlashAttention-3's module, `flash_attn_interface`. Default False.

    Raises:
        RuntimeError: a real `flash_attn` (or, with fa3, `flash_attn_interface`) can be imported, and `force` is False.
    """
    from . import flash_attn, flash_attn_3, padding

    of_fa2 = tuple(name for name in flash_attn.__all__ if name.startswith("flash_attn"))
    of_padding = ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")
    modules = [
        _module(NAMES[0], flash_attn, of_fa2, is_package=True),
        _module(NAMES[1], flash_attn, of_fa2),
        _module(NAMES[2], padding, of_padding),
    ]
    modules[0].flash_attn_interface, modules[0].bert_padding = modules[1:]
    if fa3:
        modules.append(_module(NAMES[3], flash_attn_3, tuple(flash_attn_3.__all__)))
    for name in (NAMES[0], NAMES[3])[: 1 + fa3]:
        if not force and not _ours(name) and (name in sys.modules or find_spec(name) is not None):
            raise RuntimeError(f"install_as_flash_attn: a real {name} can be imported here; force=True puts flashattn in its place")
    for module in modules:
        name = module.__name__
        if not _ours(name):
            if name in sys.modules:
                _replaced[name] = sys.modules[name]
            sys.modules[name] = module


def uninstall_flash_attn() -> None:
    """Undo `install_as_flash_attn`: what was imported before it is back, else a later `import flash_attn` searches again."""
    for name in filter(_ours, NAMES):
        del sys.modules[name]
    sys.modules.update(_replaced)
    _replaced.clear()
