"""The house rules that a reader relies on and a compiler doesn't check: who imports whom, how long things get, what importing costs.

`violations(root)` reads the sources and imports nothing. Each rule has a planted violation below, to show that it finds what it is for.
A new room fails until it has a row in ARROWS: who may lean on whom is decided when the room is built, not found out later. That table and
what is planted against it take this file over 300 lines.
"""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashattn

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src"
MOST_ARGUMENTS, MOST_FUNCTION_LINES, MOST_FILE_LINES = 26, 120, 300

# Room -> (rooms of flashattn it may import besides itself, heavy packages it may import). The first row that fits a module counts.
ARROWS = {
    "flashattn.api": ({"problem", "checks", "block_mask", "dropout", "mods", "torch_ops", "dispatch"}, {"torch"}),
    "flashattn.problem": (set(), set()),
    "flashattn.mods": (set(), {"torch"}),
    "flashattn.block_lists": (set(), {"torch"}),
    "flashattn.block_mask": ({"block_lists", "problem", "checks"}, {"torch"}),
    "flashattn.dropout": ({"problem", "checks"}, {"torch"}),
    "flashattn.checks": ({"problem"}, {"torch"}),
    "flashattn.reference": ({"problem", "dropout", "mods"}, {"torch", "einops"}),
    "flashattn.merge": (set(), {"torch"}),
    "flashattn.eager": ({"problem", "block_lists", "dropout", "mods"}, {"torch", "einops"}),
    "flashattn.torch_ops": ({"problem", "block_lists", "checks", "mods", "dispatch", "launch", "roofline.gpus"}, {"torch"}),
    "flashattn.dispatch": ({"problem", "roofline.gpus", "roofline.work", "roofline.bound"}, set()),
    "flashattn.roofline.gpus": (set(), set()),
    "flashattn.roofline.work": ({"problem"}, set()),
    "flashattn.roofline.bound": ({"roofline.gpus", "roofline.work"}, set()),
    "flashattn.roofline.memory": ({"roofline.gpus", "roofline.work"}, set()),
    "flashattn.roofline.model": ({"roofline.gpus", "roofline.work"}, set()),
    "flashattn.roofline.timing": (set(), {"torch"}),
    "flashattn.roofline.calls": ({"roofline.workload"}, {"torch"}),
    "flashattn.roofline.peers": ({"api", "dispatch", "roofline.calls", "roofline.workload"}, {"torch"}),  # on top of the house
    "flashattn.roofline.gate": ({"reference", "roofline.calls", "roofline.workload"}, {"torch"}),
    "flashattn.roofline.workload": ({"problem", "roofline.work"}, {"torch"}),
    "flashattn.roofline.measure": ({"roofline"}, {"torch"}),
    "flashattn.roofline.cli": ({"reference", "roofline"}, {"torch"}),
    "flashattn.roofline": ({"problem"}, set()),
    "flashattn.launch": ({"problem", "block_lists", "mods", "dispatch", "kernels"}, {"torch", "triton"}),
    "flashattn.kernels.common": ({"kernels.structs"}, {"triton"}),
    "flashattn.kernels.portable": ({"kernels.common", "kernels.structs"}, {"triton"}),
    "flashattn.kernels.hopper": ({"kernels.common", "kernels.structs"}, {"triton"}),
    "flashattn.kernels": (set(), {"triton"}),
    "flashattn.integrations": ({"api"}, {"torch"}),
    "flashattn.ahead": ({"api"}, {"torch"}),
    "flashattn.info": ({"api", "problem", "dispatch"}, {"torch"}),
    "flashattn.commands": ({"ahead", "dispatch", "info", "roofline.cli", "roofline.report"}, set()),
    "flashattn.__main__": ({"commands"}, set()),
    "flashattn": ({"ahead", "api", "block_mask", "dropout", "merge", "mods", "reference"}, set()),
}
KERNEL_IMPORTS = {"triton", "math", "typing", "flashattn"}  # all that device code may import: what else could it use?
POISONED = {"empty", "empty_like", "new_empty"}  # what tests/poison.py fills; other uninitialised memory would escape it


# ------------------------------------------------------------------------------------------------------------------------- rules


def violations(root: Path) -> list[str]:
    """Every broken rule under root/flashattn, as "file:line: what"."""
    found = []
    for path in sorted(root.glob("flashattn/**/*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(root).as_posix()
        module = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        rules = (_arrows(tree, module, is_package=path.name == "__init__.py"), _kernels(tree), _functions(tree), _statements(tree, module))
        found += [f"{name}:{line}: {what}" for rule in rules for line, what in rule]
        if not ast.get_docstring(tree):
            found.append(f"{name}:1: no docstring that says what the module is for")
    return found


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of everything imported, at any depth. `from a import b` is a.b, since b may be a module."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def _arrows(tree, module, is_package) -> Iterator[tuple[int, str]]:
    room = next((room for room in ARROWS if _within(module, room) and (room != "flashattn" or module == room)), None)
    if room is None:
        yield 1, f"{module} has no row in ARROWS of tests/test_house.py: decide what it may import"
        return
    rooms, packages = ARROWS[room]
    for line, target in _imports(tree, module, is_package):
        top = target.partition(".")[0]
        if top == "flashattn":
            allowed = room != "flashattn" and _within(target, room)
            if not allowed and not any(_within(target, f"flashattn.{other}") for other in rooms):
                yield line, f"{room} must not import {target}"
        elif top in {"torch", "triton", "einops", "numpy"} and top not in packages:
            yield line, f"{room} must not import {top}"
        elif _within(room, "flashattn.kernels") and top not in KERNEL_IMPORTS:
            yield line, f"device code must not import {top}"


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def _kernels(tree) -> Iterator[tuple[int, str]]:
    for node in _all_functions(tree):
        decorators = {ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in node.decorator_list}
        count = len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        if "jit" in decorators and count > MOST_ARGUMENTS:
            yield node.lineno, f"kernel {node.name} has {count} arguments, more than {MOST_ARGUMENTS}"


def _functions(tree) -> Iterator[tuple[int, str]]:
    """Lines of code: a docstring may be as long as the mathematics needs."""
    for node in _all_functions(tree):
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        lines = node.end_lineno - first.lineno + 1
        if lines > MOST_FUNCTION_LINES:
            yield node.lineno, f"function {node.name} has {lines} lines, more than {MOST_FUNCTION_LINES}"


def _all_functions(tree) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _statements(tree, module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert: raise a typed error that names the argument (python -O drops asserts)"
        if isinstance(node, ast.Attribute) and "empty" in node.attr.split("_") and node.attr not in POISONED | {"is_empty"}:
            yield node.lineno, f"{node.attr}: tests fill only {', '.join(sorted(POISONED))} with NaN, so allocate with one of these"
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and {alias.name for alias in node.names} & POISONED:
            yield node.lineno, "import torch and call torch.empty, which tests fill with NaN; an imported name escapes them"


def long_files(repository: Path) -> list[str]:
    """Files of more than MOST_FILE_LINES lines whose first docstring doesn't say why ("... 300 lines ...")."""
    found = []
    for folder in ("src", "tests", "benchmarks", "examples"):
        for path in sorted(repository.glob(f"{folder}/**/*.py")):
            text = path.read_text(encoding="utf-8")
            lines = text.count("\n")
            if lines > MOST_FILE_LINES and f"{MOST_FILE_LINES} lines" not in " ".join((ast.get_docstring(ast.parse(text)) or "").split()):
                name = path.relative_to(repository).as_posix()
                found.append(f"{name}:1: {lines} lines; over {MOST_FILE_LINES} lines the first docstring says why")
    return found


def test_the_house_is_in_order():
    assert violations(SOURCE) == []


def test_long_files_say_why():
    assert long_files(REPOSITORY) == []


# -------------------------------------------------------------------------------------------------- the rules find what they are for

KERNEL_OF_27 = f"def f({', '.join(f'a{i}' for i in range(27))}): pass"
PLANTED = [
    ("problem.py", "import torch", "problem must not import torch"),
    ("dispatch/table.py", "def row():\n    from flashattn.launch import portable", "dispatch must not import flashattn.launch.portable"),
    ("dispatch/table.py", "from ..launch.portable import forward", "dispatch must not import flashattn.launch.portable.forward"),
    ("api.py", "from .launch import portable", "api must not import flashattn.launch.portable"),
    ("api.py", "from . import eager", "api must not import flashattn.eager"),
    ("api.py", "import triton.language as tl", "api must not import triton"),
    ("api.py", "from .roofline import measure", "api must not import flashattn.roofline.measure"),
    ("dispatch/explain.py", "from ..roofline.peers import ours", "dispatch must not import flashattn.roofline.peers.ours"),
    ("roofline/work.py", "import torch", "roofline.work must not import torch"),
    ("roofline/gpus.py", "from .work import Work", "roofline.gpus must not import flashattn.roofline.work.Work"),
    ("roofline/memory.py", "def f():\n    import triton", "roofline.memory must not import triton"),
    ("__init__.py", "from .torch_ops import schemas", "flashattn must not import flashattn.torch_ops.schemas"),
    ("__init__.py", "import torch", "flashattn must not import torch"),
    ("integrations/sdpa.py", "from ..torch_ops import schemas", "integrations must not import flashattn.torch_ops.schemas"),
    ("torch_ops/schemas.py", "import triton", "torch_ops must not import triton"),
    ("eager.py", "from .reference import attention_reference", "eager must not import flashattn.reference.attention_reference"),
    ("kernels/portable/forward.py", "import torch", "kernels.portable must not import torch"),
    ("kernels/portable/forward.py", "import os", "device code must not import os"),
    ("kernels/portable/forward.py", "from ..hopper import layouts", "portable must not import flashattn.kernels.hopper.layouts"),
    ("kernels/hopper/block.py", "from ..portable.forward import f", "hopper must not import flashattn.kernels.portable.forward.f"),
    ("kernels/common/mask.py", "from ..portable.forward import f", "common must not import flashattn.kernels.portable.forward.f"),
    ("kernels/common/mask.py", "from ...problem import Problem", "common must not import flashattn.problem.Problem"),
    ("cellar/wine.py", "", "flashattn.cellar.wine has no row in ARROWS of tests/test_house.py"),
    ("eager.py", "def f(x):\n    assert x", "assert: raise a typed error"),
    ("eager.py", "def f(x):\n    return x.new_empty_strided(1)", "new_empty_strided: tests fill only empty, empty_like, new_empty"),
    ("eager.py", "from torch import empty", "an imported name escapes them"),
    ("kernels/portable/forward.py", f"@triton.jit\n{KERNEL_OF_27}", "kernel f has 27 arguments, more than 26"),
    ("kernels/portable/forward.py", f"@jit(repr=g)\n{KERNEL_OF_27}", "kernel f has 27 arguments, more than 26"),
    ("eager.py", "def f():\n    '''What f does.'''\n" + "    f()\n" * 121, "function f has 121 lines, more than 120"),
]


def plant(root: Path, name: str, source: str, docstring='"""What it is for."""\n') -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(docstring + source + "\n")
    return path


@pytest.mark.parametrize("name, source, what", PLANTED)
def test_a_planted_violation_is_found(tmp_path, name, source, what):
    plant(tmp_path / "flashattn", name, source)
    (found,) = violations(tmp_path)
    assert found.startswith(f"flashattn/{name}:"), found
    assert what in found


def test_a_violation_is_named_by_file_and_line(tmp_path):
    plant(tmp_path / "flashattn", "kernels/common/mask.py", "\n\ndef f():\n    import torch")
    assert violations(tmp_path) == ["flashattn/kernels/common/mask.py:5: flashattn.kernels.common must not import torch"]


def test_a_missing_docstring_is_found(tmp_path):
    plant(tmp_path / "flashattn", "eager.py", "import math", docstring="")
    assert violations(tmp_path) == ["flashattn/eager.py:1: no docstring that says what the module is for"]


def test_what_is_allowed_passes(tmp_path):
    root = tmp_path / "flashattn"
    plant(root, "__init__.py", "from .api import attention\nfrom .reference import online_softmax")
    plant(root, "launch/portable.py", "import torch\nfrom ..kernels.portable.forward import f\nfrom ..problem import Problem")
    plant(root, "kernels/portable/forward.py", "import math\nimport triton.language as tl\nfrom ..common.mask import f\nfrom .a import b")
    plant(root, "eager.py", f"def f():\n    '''{'long' * 200}\n{'line' + chr(10) * 200}'''\n    return torch.empty_like(x)")
    assert violations(tmp_path) == []


def test_a_long_file_is_found_unless_it_says_why(tmp_path):
    plant(tmp_path / "src", "a.py", "\n" * 300)
    plant(tmp_path / "tests", "b.py", "\n" * 300, docstring='"""Over 300\nlines: one table."""\n')
    assert long_files(tmp_path) == ["src/a.py:1: 302 lines; over 300 lines the first docstring says why"]


# ------------------------------------------------------------------------------------------------------------------- importing it


def python(code: str, **environment) -> str:
    """Run `code` in a fresh process that knows the package; its output."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])} | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_triton_and_starts_no_cuda():
    code = """
import sys, torch
before = set(sys.modules)  # what torch itself loads is not ours
import flashattn
loaded = set(sys.modules) - before
wrong = [name for name in loaded if name.startswith(('triton', 'flashattn.roofline', 'flashattn.integrations'))]
print(wrong, torch.cuda.is_initialized())
"""
    assert python(code) == "[] False"


def test_a_call_on_cpu_tensors_loads_no_triton():
    code = """
import sys, torch, flashattn
before = set(sys.modules)
q = torch.randn(1, 3, 2, 8, requires_grad=True)
flashattn.attention(q, q, q, causal=True).sum().backward()
print([name for name in set(sys.modules) - before if name.partition('.')[0] == 'triton'], torch.cuda.is_initialized())
"""
    assert python(code, TRITON_INTERPRET="0") == "[] False"


FORK = """
import os, sys, torch, flashattn
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
q = torch.randn(1, 3, 2, 8, device={device!r}, requires_grad=True)
flashattn.attention(q, q, q).sum().backward()
print(bool(q.grad.isfinite().all()), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_works_in_a_process_forked_after_the_import(device):
    assert python(FORK.format(device=device)) == "True"


# ---------------------------------------------------------------------------------------------------------------------- docstrings


@pytest.mark.parametrize("name", flashattn.__all__)
def test_public_docstrings_name_every_argument(name):
    """Or name `attention`, for arguments that mean what they mean there and in `attention_varlen`."""
    thing = getattr(flashattn, name)
    doc = inspect.getdoc(thing)
    assert doc, f"flashattn.{name} has no docstring"
    known = set()
    if not name.startswith("attention") and "`attention`" in doc:
        known = {argument for of in (flashattn.attention, flashattn.attention_varlen) for argument in inspect.signature(of).parameters}
    missing = [argument for argument in inspect.signature(thing).parameters if argument not in doc and argument not in known]
    assert not missing, f"the docstring of flashattn.{name} doesn't name {', '.join(missing)}"
