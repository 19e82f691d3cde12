"""What each kernel can't do: for every rule of the dispatch table a call that breaks it and no other, by `impl=`, whose message is read.

Rules are plain `if`s in functions of table.py that are called `..._reasons`, so the list of them is read from its source, and a rule
without a case here fails. The calls are of fake tensors on machines that aren't here, which take no memory: one has 2^43 elements. Beside
each is a call as near as can be that the kernel runs.
"""

import ast
import inspect
import re
from copy import copy
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode

from flashattn import BlockMask, explain, torch_ops
from flashattn.dispatch import table
from flashattn.dispatch.select import select
from flashattn.dispatch.table import DIRECTIONS, KERNELS

ROWS = {kernel.name: kernel for kernel in KERNELS}
H100, T4, ALL, BACKWARD = (9, 0), (7, 5), (*DIRECTIONS, "second"), ("backward",)
FULL = BlockMask.from_window(128, 256)
SHORT = {"rows": (1, 1), "heads": (1, 1)}


class Case(NamedTuple):
    kernel: str
    broken: dict  # of `call`; of `machine`, if that is in its signature
    good: dict  # what to change for the kernel to run it
    words: str  # in the message
    passes: tuple[str, ...] = ALL  # that the rule is against


def call(
    dtype="bfloat16", batch=2, rows=(128, 256), heads=(4, 2), dims=(64, 64), sequences=0, row=1, device="cuda", alibi=False, sinks=False,
    bias=False, used=False, kept=False, mods=(), **options,
):  # fmt: skip
    """`explain` of fake tensors of these sizes, packed if there are sequences. row: what a row takes at least, in memory."""
    shapes = [(rows[0], heads[0], dims[0]), (rows[1], heads[1], dims[0]), (rows[1], heads[1], dims[1])]
    with FakeTensorMode():
        lead = () if sequences else (batch,)
        q, k, v = (
            torch.empty(*lead, *rest, max(dim, row), dtype=getattr(torch, dtype), device=device).narrow(-1, 0, dim) for *rest, dim in shapes
        )
        cu = [torch.empty(sequences + 1, dtype=torch.int32, device=device)] * 2 if sequences else []
        options |= {"alibi_slopes": torch.empty(heads[0], device=device)} if alibi else {}
        options |= {"bias": torch.empty(1, 1, *rows, device=device)} if bias else {}
        if kept:
            options["block_mask"] = copy(FULL)
            options["block_mask"].packed = torch.empty(FULL.packed.shape, dtype=torch.int32, device=device)
        options |= {"seqlens_k": torch.empty(batch, dtype=torch.int32, device=device)} if used else {}
        options |= {"score_mod": "alibi", "score_mod_aux": [torch.empty(heads[0], device=device)]} if "score" in mods else {}
        options |= {"mask_mod": "prefix_lm", "mask_mod_aux": [torch.empty(batch, device=device)]} if "mask" in mods else {}
        return explain(q, k, v, *cu, **options)


CASES = {
    # ------------------------------------------------------------------------------------------------------------------- portable
    "portable without Triton": Case("portable", {"triton": None}, {"triton": "3.6.0"}, "triton is not installed"),
    "portable beside a new numpy": Case(
        "portable", {"triton": "3.6.0", "numpy": "2.4.0", "interpret": True, "dtype": "float32"}, {"numpy": "2.3.5"},
        "the interpreter of Triton 3.6.0 fails with numpy 2.4.0: install numpy<2.4 or triton>=3.7",
    ),
    "portable bfloat16 in the interpreter": Case(
        "portable", {"numpy": "2.3.5", "interpret": True, "device": "cpu"}, {"dtype": "float16"}, "use float16 or float32 there",
    ),
    "portable on a CPU": Case(
        "portable", {"device": "cpu", "dtype": "float32"}, {"interpret": True, "numpy": "2.3.5"}, "set TRITON_INTERPRET=1 before importing",
    ),
    "portable on an AMD GPU": Case("portable", {"cuda": "hip"}, {"cuda": "cuda"}, "AMD GPUs (ROCm) are untested"),
    "portable on another device": Case(
        "portable", {"device": "meta"}, {"device": "cuda"}, "Triton kernels are launched on CUDA devices, not on 'meta'",
    ),
    "portable on an old GPU": Case("portable", {"capability": T4}, {"capability": (8, 0)}, "compute capability 7.5: tested from 8.0 on"),
    "portable lengths of keys beside a bias": Case(
        "portable", {"used": True, "bias": True}, {"bias": False}, "lengths of keys (seqlens_k) beside a bias", BACKWARD,
    ),
    "portable with a window over too many rows": Case(
        "portable", {"rows": (1, (1 << 30) + 1), "window": (5, None)}, {"rows": (1, 1 << 30)}, "a window over more than 1073741824 rows",
    ),
    # --------------------------------------------------------------------------------------------------------------------- hopper
    "hopper without Triton": Case("hopper", {"triton": None}, {"triton": "3.6.0"}, "triton is not installed"),
    "hopper with a new Triton": Case("hopper", {"triton": "3.10.1"}, {"triton": "3.9.0"}, "Triton 3.10.1: the Gluon of 3.6 to 3.9"),
    "hopper with an old Triton": Case("hopper", {"triton": "3.5.1"}, {"triton": "3.6.0"}, "Triton 3.5.1: the Gluon of 3.6 to 3.9"),
    "hopper in the interpreter": Case("hopper", {"interpret": True}, {"interpret": False}, "Gluon has no interpreter: unset TRITON_INTER"),
    "hopper on an A100": Case("hopper", {"capability": (8, 0)}, {"capability": H100}, "and this is one of 8.0"),
    "hopper on a B200": Case("hopper", {"capability": (10, 0)}, {"capability": H100}, "and this is one of 10.0"),
    "hopper on a CPU": Case("hopper", {"device": "cpu"}, {"device": "cuda"}, "capability 9.0 (H100, H200), and this is 'cpu'"),
    "hopper float32": Case("hopper", {"dtype": "float32"}, {"dtype": "float16"}, "dtype float32: multiplies float16 and bfloat16"),
    "hopper score_mod": Case("hopper", {"mods": ("score",)}, {"mods": ()}, "a score_mod: the portable kernels run it"),
    "hopper mask_mod": Case("hopper", {"mods": ("mask",)}, {"mods": ()}, "a mask_mod: the portable kernels run it"),
    "hopper block mask": Case("hopper", {"kept": True}, {"kept": False}, "a block mask"),
    "hopper lengths of keys": Case("hopper", {"used": True}, {"used": False}, "lengths of keys (seqlens_k): every batch entry has all"),
    "hopper ALiBi beside a top-left diagonal": Case(
        "hopper", {"alibi": True, "causal": "top-left"}, {"causal": True}, "ALiBi beside a top-left diagonal: it counts both from one",
    ),
    "hopper unaligned": Case("hopper", {"row": 68}, {"row": 72}, "TMA can't address rows that aren't aligned to 16 bytes"),
    "hopper head_dim_v": Case(
        "hopper", {"dims": (64, 20), "row": 24}, {"dims": (64, 24)}, "head_dim_v 20: rows of out would not be aligned to 16 bytes",
    ),
    "hopper rows of all heads": Case(
        "hopper", {"rows": (128, 128), "batch": (1 << 23) + 1, "heads": (1, 1)}, {"batch": 1 << 23}, "than 1073741824 rows of all heads",
    ),
    "hopper rows of all heads, packed": Case(
        "hopper", {"rows": (1 << 28, 8), "sequences": 1, "heads": (4, 1)}, {"rows": ((1 << 28) - 1, 8)}, "rows of all heads",
    ),
    "hopper positions": Case(
        "hopper", {"rows": (1, (1 << 30) - 383)}, {"rows": (1, (1 << 30) - 384)}, "more than 1073741440 rows: positions are 32-bit sums",
    ),
    "hopper positions, packed": Case(
        "hopper", {"rows": (8, (1 << 30) - 383), "sequences": 2, "max_seqlen_k": 9}, {"rows": (8, (1 << 30) - 384)}, "positions are 32-bit",
    ),
    # -------------------------------------------------------------------------------------------------------- hopper, the backward
    "hopper head_dim": Case(
        "hopper", {"dims": (60, 64), "row": 64}, {"dims": (56, 64)}, "head_dim 60: rows of dQ and dK would not be aligned", BACKWARD,
    ),
    "hopper bias": Case("hopper", {"bias": True}, {"bias": False}, "a bias or mask: its forward takes one, its backward doesn't", BACKWARD),
    "hopper wide softcap": Case(
        "hopper", {"dims": (136, 64), "softcap": 9.0}, {"dims": (128, 128)}, "a softcap at head dims above 128", BACKWARD,
    ),
    "hopper wide dropout": Case(
        "hopper", {"dims": (64, 136), "dropout_p": 0.1}, {"dims": (128, 128)}, "dropout at head dims above 128", BACKWARD,
    ),
    "hopper blocks of queries": Case(
        "hopper", {"batch": (1 << 25) + 1, **SHORT}, {"batch": 1 << 25}, "more than 33554432 blocks of queries", BACKWARD,
    ),
    "hopper blocks of queries, wide": Case(
        "hopper", {"batch": (1 << 24) + 1, "dims": (256, 256), **SHORT}, {"batch": 1 << 24}, "more than 16777216 blocks of", BACKWARD,
    ),
    "hopper blocks of queries, packed": Case(
        "hopper", {"sequences": 1 << 25, **SHORT}, {"sequences": (1 << 25) - 1}, "more than 33554432 blocks of queries", BACKWARD,
    ),
    "hopper blocks of keys": Case(
        "hopper", {"rows": (1, 1 << 29), "batch": 257, "heads": (1, 1)}, {"batch": 256}, "more than 1073741824 blocks of keys", BACKWARD,
    ),
    "hopper blocks of keys, packed": Case(
        "hopper", {"rows": (1, 1 << 29), "sequences": 1, "heads": (256, 256)}, {"heads": (255, 255)}, "blocks of keys", BACKWARD,
    ),
    # ---------------------------------------------------------------------------------------------------------------------- eager
    "eager float64": Case("eager", {"problem": {"dtype": "float64"}}, {"problem": {}}, "dtype float64"),
}  # fmt: skip


@pytest.fixture
def machine(monkeypatch):
    """To set up a machine that isn't here: its GPU, its versions, and how it was told to run."""

    def set_up(capability=H100, cuda="cuda", triton="3.6.0", numpy=None, interpret=False):
        """cuda: what there is under that name. triton: None for none, numpy: None for what there is."""
        versions = {"triton": triton or "3.6.0", "numpy": numpy}
        monkeypatch.setattr(table, "version", lambda name: versions.get(name) or version(name))
        monkeypatch.setattr(table, "find_spec", lambda name: triton and find_spec(name))
        kinds, module = {"cuda": (cuda, capability if cuda == "cuda" else None)}, import_module("flashattn.torch_ops.describe")
        monkeypatch.setattr(module, "_machine", lambda device: kinds.get(device.type, (device.type, None)))
        monkeypatch.setattr(torch_ops, "gpu_name", lambda device: None)
        monkeypatch.setenv("TRITON_INTERPRET", str(int(interpret)))
        forget()

    def forget():
        for cache in (table.gluon_reasons, table.interpreter_reasons, select):
            cache.cache_clear()

    yield set_up
    forget()


def made(options: dict, machine, impl: str | None = None):
    """`explain` of a call on a machine; or, of a problem that no call has, of the choice for it."""
    settings = {name: options[name] for name in inspect.signature(machine).parameters if name in options}
    machine(**settings)
    rest = {name: value for name, value in options.items() if name not in settings}
    change = rest.pop("problem", None)
    found = call(**rest, impl=None if change else impl)
    if not change:
        return found.problem
    for direction in ALL * (impl is not None):
        select(replace(found.problem, **change), direction, impl)
    return replace(found.problem, **change)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_broken_rule_says_what_it_is(case, machine):
    kernel = ROWS[case.kernel]
    problem = made(case.broken, machine)
    passes = [direction for direction in kernel.directions if direction in case.passes]
    for direction in kernel.directions:
        reasons = kernel.reasons(problem, direction)
        assert len(reasons) == (direction in passes) and all(case.words in reason for reason in reasons), (direction, reasons)
    with pytest.raises(NotImplementedError) as caught:
        made(case.broken, machine, impl=case.kernel)
    (reason,) = kernel.reasons(problem, passes[0])
    assert str(caught.value) == f"no kernel can run the {passes[0]} of this call ({case.kernel}: {reason})"
    good = made(case.broken | case.good, machine, impl=case.kernel)
    assert not any(kernel.reasons(good, direction) for direction in kernel.directions), "and the call beside it runs"


# ------------------------------------------------------------------------------------------------------- every rule of the table


def rules(source: str) -> dict[tuple[str, str], re.Pattern]:
    """{(function, its words): what its messages match} of the rules in a source: what functions called ..._reasons append, or return in a
    list, with anything for what is filled in."""
    found = {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or not function.name.endswith("_reasons"):
            continue
        for node in ast.walk(function):
            appended = node.args if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "append" else []
            for message in appended or (node.elts if isinstance(node, ast.List) else []):
                if not isinstance(message, ast.Constant | ast.JoinedStr):
                    raise ValueError(f"{function.name}, line {message.lineno}: expected the message of a rule, a string")
                parts = message.values if isinstance(message, ast.JoinedStr) else [message]
                words = [part.value if isinstance(part, ast.Constant) else None for part in parts]
                pattern = "".join(".+" if part is None else re.escape(part) for part in words)
                found[function.name, "".join("{}" if part is None else part for part in words)] = re.compile(pattern)
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_every_rule_of_the_table_has_a_case(machine):
    found, broken = rules(inspect.getsource(table)), set()
    assert len(found) >= 20 and {kernel.reasons.__name__ for kernel in KERNELS} <= {function for function, _ in found}
    for case in CASES.values():
        problem, kernel = made(case.broken, machine), ROWS[case.kernel]
        for reason in {reason for direction in kernel.directions for reason in kernel.reasons(problem, direction)}:
            (rule,) = (rule for rule, pattern in found.items() if case.kernel == kernel_of(rule) and pattern.fullmatch(reason))
            broken.add(rule)
    missing = "; ".join(f"{words!r} of {function}" for function, words in found.keys() - broken)
    assert not missing, f"rules without a case in CASES: {missing}"


def kernel_of(rule: tuple[str, str]) -> str:
    """That a rule is of, as the name of its function begins, or that of the function that asks it."""
    return {"gluon": "hopper", "interpreter": "portable"}.get(name := rule[0].partition("_")[0], name)


PLANTED = """
def odd_reasons(problem, direction):
    found = more_reasons(problem)
    if problem.odd:
        found.append("odd")
    found += [f"odd {problem.odd} (of {direction})"] if direction else []
    return found

def more(problem):
    return ["no rule"]
"""


def test_rules_are_found_in_a_source():
    found = rules(PLANTED)
    assert list(found) == [("odd_reasons", "odd"), ("odd_reasons", "odd {} (of {})")]
    assert found["odd_reasons", "odd {} (of {})"].fullmatch("odd 3 (of forward)") and not found["odd_reasons", "odd"].fullmatch("odd 3")
    with pytest.raises(ValueError, match="odd_reasons, line 5: expected the message of a rule"):
        rules(PLANTED.replace('append("odd")', "append(WORDS)"))
