"""A launch that is found again is the launch that Triton would have made: the same compiled kernel, the same arguments, new pointers.

No GPU is needed: a stand-in takes the place of the kernel and writes down what it is given. The surprising fact: what a compiled kernel
must be called with is nowhere documented, so one test reads it in Triton's own sources, and fails for a Triton that says otherwise.
"""

import gc
import inspect
from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import BaseBackend
from triton.knobs import HookChain
from triton.runtime import jit

from flashattn.kernels.structs import SIZES
from flashattn.launch import cache, portable
from flashattn.torch_ops.describe import describe

PASSES = ("forward", "delta", "dkdv", "dk", "dv", "dq")
CALL = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"


def flat(args):
    """Tensors as their addresses; tuples opened."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from flat(arg)
        else:
            yield arg.data_ptr() if isinstance(arg, torch.Tensor) else arg


class Compiled:
    """Stands in for what Triton compiles. Called with addresses in place of tensors."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, specialization):
        self.kernel, self.specialization = kernel, specialization

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args):
        assert (y, z, stream, function, metadata) == (1, 1, "stream", "function", "metadata")
        assert launch_metadata is enter_hook is exit_hook is None
        self.kernel.again.append((self, (x,), args))


class Kernel:
    """Stands in for a jit function of this name."""

    def __init__(self, function):
        self.signature = inspect.signature(getattr(function, "fn", function))
        self.anew, self.again = [], []

    def specialize(self, args):
        """What Triton decides by: see create_function_from_signature in triton/runtime/jit.py. Names of constants are in capitals."""
        return [
            arg if name.isupper() else jit.native_specialize_impl(BaseBackend, arg, False, name not in SIZES, True)
            for name, arg in zip(self.signature.parameters, args, strict=True)
        ]

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.anew.append((grid, args))
            return Compiled(self, (self.specialize(args), options))

        return launch


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(cache, "_launches", {})
    monkeypatch.setattr(cache, "_relaunches", True)
    monkeypatch.setattr(cache, "_stream", lambda device: "stream")


def tensors_of(packed=False, dim=64, dim_v=64, heads_kv=2, rows=128, offset=0, strides="bshd", dlse=True):
    """What every pass takes, by name."""
    shape = (rows,) if packed else (2, rows)

    def tensor(heads, dim):
        order = (*shape, heads, dim) if strides == "bshd" else (*shape[:-1], heads, rows, dim)
        x = torch.zeros(offset + torch.Size(order).numel(), dtype=torch.float16)[offset:].view(order)
        return x if strides == "bshd" else x.transpose(-2, -3)

    rows_of = (4, rows) if packed else (2, 4, rows)
    found = {name: tensor(heads, d) for name, heads, d in (("q", 4, dim), ("k", heads_kv, dim), ("v", heads_kv, dim_v), ("dout", 4, dim_v))}
    found |= {"out": torch.zeros(*shape, 4, dim_v, dtype=torch.float16), "dq": torch.zeros(*shape, 4, dim, dtype=torch.float16)}
    found |= {f"d{name}": torch.zeros(found[name].shape, dtype=torch.float16) for name in "kv"}
    found |= {name: torch.zeros(rows_of) for name in ("lse", "delta")} | {"dlse": torch.zeros(rows_of) if dlse else None}
    cu = [torch.tensor([0, rows // 2, rows], dtype=torch.int32) for _ in range(2)] if packed else [None, None]
    return found | dict(zip(("cu_q", "cu_k"), cu, strict=True))


def launch(name, tensors, causal, scale, monkeypatch):
    """One pass, as launch/portable.py makes it; (the stand-in, the arguments that belong to it now)."""
    t = tensors
    problem = describe(t["q"], t["k"], t["v"].shape[-1], t["cu_q"], None, None, None, scale, None, 0 if causal else None, False, False)
    problem = replace(problem, device="cuda", capability=(9, 0), interpret=False)
    rows = portable._rows_of(problem)
    row = rows.get(name, rows.get("dkdv", rows.get("dk")))
    names = {
        "forward": ("q", "k", "v", "out", "lse", "cu_q", "cu_k"),
        "delta": ("out", "dout", "dlse", "delta"),
        "dkdv": ("q", "k", "v", "dout", "lse", "delta", "dk", "dv", "cu_q", "cu_k"),
        "dk": ("q", "k", "v", "dout", "lse", "delta", "dk", None, "cu_q", "cu_k"),
        "dv": ("q", "k", None, "dout", "lse", None, None, "dv", "cu_q", "cu_k"),
        "dq": ("q", "k", "v", "dout", "lse", "delta", "dq", "cu_q", "cu_k"),
    }[name]
    mine = [None if name is None else t[name] for name in names]
    builder = getattr(portable, f"{'dkdv' if name in ('dk', 'dv') else name}_launch")
    kernel, grid, args, options = builder(problem, row, *mine)
    stand_in = KERNELS.setdefault(kernel, Kernel(kernel))
    cache.run(name, problem, mine, lambda: (stand_in, grid, args, options))
    return stand_in, grid, args, options


KERNELS = {}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_the_second_launch_has_the_arguments_of_the_first_and_new_pointers(name, packed, monkeypatch):
    KERNELS.clear()
    for first in (True, False):
        stand_in, grid, args, _ = launch(name, tensors_of(packed), True, 0.125, monkeypatch)
        assert (len(stand_in.anew), len(stand_in.again)) == ((1, 0) if first else (1, 1))
    _, found_grid, found = stand_in.again[0]
    assert found_grid == grid and list(flat(found)) == list(flat(args))
    assert not any(isinstance(x, torch.Tensor) for x in flat(found))


@pytest.mark.parametrize("name", PASSES)
def test_what_is_found_again_is_what_triton_would_compile(name, monkeypatch):
    """Whatever differs between two calls: strides, alignment, lengths, heads, dims, a gradient of lse, the mask, the scale."""
    KERNELS.clear()
    choices = {
        "packed": (False, True), "rows": (128, 100), "offset": (0, 1, 8), "strides": ("bshd", "bhsd"), "heads_kv": (2, 1),
        "dim_v": (64, 24), "dlse": (True, False),
    }  # fmt: skip
    calls = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    checked = 0
    for _ in range(2):
        for call, (causal, scale) in product(calls, ((True, 0.125), (False, -0.125), (True, 1e-40))):
            stand_in, grid, args, options = launch(name, tensors_of(**call), causal, scale, monkeypatch)
            if stand_in.again:
                compiled, found_grid, found = stand_in.again.pop()
                assert compiled.specialization == (stand_in.specialize(args), options), call
                assert found_grid == grid and list(flat(found)) == list(flat(args)), call
                checked += 1
    assert checked >= 3 * len(calls)


def test_no_tensor_is_kept_alive(monkeypatch):
    KERNELS.clear()
    stand_in, *_ = launch("dkdv", tensors_of(packed=True), True, 0.125, monkeypatch)
    stand_in.anew.clear()
    (kept,) = cache._launches.values()
    gc.collect()
    assert not [x for x in gc.get_referents(kept, *kept.args) if isinstance(x, torch.Tensor)]


HOOKS = {
    "enter": ("runtime", "launch_enter_hook", "chain"),
    "exit": ("runtime", "launch_exit_hook", "chain"),
    "enter function": ("runtime", "launch_enter_hook", print),
    "exit function": ("runtime", "launch_exit_hook", print),
    "instrumentation": ("compilation", "instrumentation_mode", "fpsan"),
}


@pytest.mark.parametrize("knobs, name, value", HOOKS.values(), ids=HOOKS)
def test_a_profiler_is_told(knobs, name, value, monkeypatch):
    """Its hooks get shape, FLOPs and bytes from Triton's own way alone, and instrumented kernels are compiled by it alone. What was
    launched under them is not remembered: an instrumented kernel would be launched long after."""
    KERNELS.clear()
    where = getattr(triton.knobs, knobs)
    if value == "chain":
        value = HookChain()
        value.add(print)
    told, plain = True, False
    launches = ((told, (1, 0)), (told, (2, 0)), (plain, (3, 0)), (plain, (3, 1)), (told, (4, 1)), (plain, (4, 2)))
    for hooked, expected in launches:
        with monkeypatch.context() as patch:
            if hooked:
                patch.setattr(where, name, value)
            stand_in, *_ = launch("forward", tensors_of(), True, 0.125, monkeypatch)
        assert (len(stand_in.anew), len(stand_in.again)) == expected


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_no_hook_may_be_none(name, monkeypatch):
    """As it was before Triton had chains of hooks, and as Triton itself still asks for."""
    KERNELS.clear()
    monkeypatch.setattr(triton.knobs.runtime, name, None)
    for _ in range(2):
        stand_in, *_ = launch("forward", tensors_of(), True, 0.125, monkeypatch)
    assert (len(stand_in.anew), len(stand_in.again)) == (1, 1)


def test_lengths_that_never_repeat_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(cache, "MOST", 5)
    KERNELS.clear()
    for rows in range(1, 20):
        launch("forward", tensors_of(rows=rows), True, 0.125, monkeypatch)
        assert len(cache._launches) <= 5


def test_tensors_that_are_not_the_arguments_are_an_error(monkeypatch):
    KERNELS.clear()
    t = tensors_of()
    problem = describe(t["q"], t["k"], 64, None, None, None, None, 0.125, None, None, False, False)
    kernel = Kernel(portable.attn_bwd_delta)
    prepare = lambda: (kernel, (1,), (t["q"], t["k"], t["v"], t["out"], 1, 1, 1, None), {})  # noqa: E731
    with pytest.raises(RuntimeError, match="delta: 3 tensors were named"):
        cache.run("delta", problem, (t["q"], t["k"], t["v"]), prepare)


def test_this_triton_launches_as_the_cache_does():
    found = CALL in inspect.getsource(jit.JITFunction.run)
    known = cache.KNOWN[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= cache.KNOWN[1]
    assert found or not known, f"Triton {triton.__version__} launches in another way: read it, then change launch/cache.py"
    assert "launch_enter_hook" in dir(triton.knobs.runtime) and hasattr(triton.knobs.runtime.launch_enter_hook, "calls")
    assert "instrumentation_mode" in dir(triton.knobs.compilation)
