"""A launch that is found again is the launch that Triton would have made: the same compiled kernel, the same arguments, new pointers.

No GPU is needed: a stand-in takes the place of the kernel and writes down what it is given. The surprising fact: what a compiled kernel
must be called with is nowhere documented, so tests read it in Triton's own sources, and fail for a Triton that says otherwise. They take
this file over 300 lines: what is launched by hand is asked of Triton first.
"""

import gc
import inspect
import re
import weakref
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import BaseBackend
from triton.backends.nvidia import driver
from triton.knobs import HookChain
from triton.runtime import jit

from flashattn import attention
from flashattn.dispatch.table import hopper_rows
from flashattn.kernels import structs
from flashattn.kernels.hopper import walk
from flashattn.launch import cache, hopper, maps, portable
from flashattn.torch_ops.describe import _biased, describe

PASSES = {  # and the tensors of each, as its launcher names them
    "forward": ("q", "k", "v", "out", "lse", "cu_q", "cu_k", "slopes", "sinks", "bias"),
    "tangent": (
        "q", "k", "v", "tq", "tk", "tv", "out", "tout", "lse", "tlse", "cu_q", "cu_k", "slopes", "sinks", "tsinks",
    ),
    "delta": ("out", "dout", "dlse", "delta"),
    "dkdv": ("q", "k", "v", "dout", "lse", "delta", "dk", "dv", "cu_q", "cu_k", "slopes", "bias"),
    "dk": ("q", "k", "v", "dout", "lse", "delta", "dk", None, "cu_q", "cu_k", "slopes", "bias"),
    "dv": ("q", "k", None, "dout", "lse", None, None, "dv", "cu_q", "cu_k", "slopes", "bias"),
    "dq": ("q", "k", "v", "dout", "lse", "delta", "dq", "cu_q", "cu_k", "slopes", "bias"),
    "hopper": ("q", "k", "v", "out", "lse", "cu_q", "cu_k", "counter"),
}
SIZES = {*structs.SIZES, *walk.SIZES}
CALL = "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,"


def opened(args):
    """The members of tuples, and what is read of descriptors."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from opened(arg)
        elif hasattr(arg, "padding"):
            yield from (arg.base, *arg.shape, *arg.strides, arg.padding, getattr(arg, "round_f32_to_tf32", False))
        else:
            yield arg


def flat(args):
    """Opened, and tensors as their addresses."""
    return [arg.data_ptr() if hasattr(arg, "data_ptr") else arg for arg in opened(args)]


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
def alone(monkeypatch, request):
    monkeypatch.setattr(cache, "_launches", {})
    monkeypatch.setattr(cache, "_calls", {})
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(cache, "_relaunches", True)
        monkeypatch.setattr(cache, "stream_of", lambda device: "stream")


def tensors_of(
    packed=False, dim=64, dim_v=64, heads_kv=2, rows=128, offset=0, strides="bshd", dlse=True, slopes=None, sinks=False, bias=None
):
    """What every pass takes, by name. slopes: their number of dimensions. bias: (shape, dtype, how it lies)."""
    shape = (rows,) if packed else (2, rows)

    def tensor(heads, dim):
        order = (*shape, heads, dim) if strides == "bshd" else (*shape[:-1], heads, rows, dim)
        x = torch.zeros(offset + torch.Size(order).numel(), dtype=torch.float16)[offset:].view(order)
        return x if strides == "bshd" else x.transpose(-2, -3)

    rows_of = (4, rows) if packed else (2, 4, rows)
    found = {name: tensor(heads, d) for name, heads, d in (("q", 4, dim), ("k", heads_kv, dim), ("v", heads_kv, dim_v), ("dout", 4, dim_v))}
    found |= {"out": torch.zeros(*shape, 4, dim_v, dtype=torch.float16), "dq": torch.zeros(*shape, 4, dim, dtype=torch.float16)}
    found |= {f"d{name}": torch.zeros(found[name].shape, dtype=torch.float16) for name in "kv"}
    found |= {f"t{name}": tensor(heads, d) for name, heads, d in (("q", 4, dim), ("k", heads_kv, dim), ("v", heads_kv, dim_v))}
    found |= {"tout": torch.zeros(*shape, 4, dim_v, dtype=torch.float16)}
    found |= {name: torch.zeros(rows_of) for name in ("lse", "delta", "tlse")} | {"dlse": torch.zeros(rows_of) if dlse else None}
    cu = [torch.tensor([0, rows // 2, rows], dtype=torch.int32) for _ in range(2)] if packed else [None, None]
    counter = torch.zeros(4, dtype=torch.int32)[offset // 4 :]  # one that is aligned to 8 bytes only is another kernel
    found |= {"slopes": torch.zeros([2, 4][2 - slopes :] if slopes else 0), "sinks": torch.zeros(offset + 4)[offset:]}
    found |= {"tsinks": torch.zeros(2 if not packed else 1, 4)}
    found |= {name: None for name, there in (("slopes", slopes), ("sinks", sinks), ("tsinks", sinks), ("tk", dlse)) if not there}
    found["bias"] = None if bias is None else bias[2](torch.zeros(bias[0], dtype=bias[1]))
    return found | dict(zip(("cu_q", "cu_k", "counter"), (*cu, counter), strict=True))


def launch(name, tensors, causal, scale, monkeypatch):
    """One pass, as its launcher makes it; (the stand-in, the arguments that belong to it now)."""
    t = tensors
    problem = describe(t["q"], t["k"], t["v"].shape[-1], t["cu_q"], None, None, None, scale, None, 0 if causal else None, False, False)
    problem = replace(problem, device="cuda", capability=(9, 0), interpret=False, aligned=name == "hopper")
    if name != "hopper":
        problem = replace(problem, alibi=t["slopes"] is not None, sinks=t["sinks"] is not None)
        if t["bias"] is not None:
            dtype, dims = _biased(t["bias"])
            problem = replace(problem, bias="bool" if dtype == "uint8" else dtype, bias_dims=dims)
    mine = [None if name is None else t[name] for name in PASSES[name]]
    if "aux" in t:  # of mods, behind what dropout has
        of_aux = tuple((str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in t["aux"])
        problem, mine = replace(problem, score_mod="alibi", mask_mod="documents", mod_aux=of_aux), [*mine, None, *t["aux"]]
    if name == "hopper":
        row, builder = hopper_rows(problem)["forward"], hopper.forward_launch
        mine[-1] = mine[-1] if row.tickets else None
    else:
        rows = portable._rows_of(problem)
        row = rows.get(name, rows.get("dkdv", rows.get("dk")))
        builder = getattr(portable, f"{'dkdv' if name in ('dk', 'dv') else name}_launch")
    kernel, grid, args, options = builder(problem, row, *mine)
    stand_in = KERNELS.setdefault(id(kernel), Kernel(kernel))  # where the interpreter is on, one of Gluon has no hash
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
    assert found_grid == grid and flat(found) == flat(args)
    assert not any(isinstance(x, torch.Tensor) for x in opened(found))


@pytest.mark.parametrize("name", PASSES)
def test_what_is_found_again_is_what_triton_would_compile(name, monkeypatch):
    """Whatever differs between two calls: strides, alignment, lengths, heads, dims, a gradient of lse, the mask, the scale."""
    KERNELS.clear()
    choices = {
        "packed": (False, True), "rows": (128, 100), "offset": (0, 1, 8), "strides": ("bshd", "bhsd"), "heads_kv": (2, 1),
        "dim_v": (64, 24), "dlse": (True, False),
    }  # fmt: skip
    if name == "hopper":
        choices["offset"] = (0, 8)  # the others it refuses
    calls = [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]
    checked = 0
    for _ in range(2):
        for call, (causal, scale) in product(calls, ((True, 0.125), (False, -0.125), (True, 1e-40))):
            stand_in, grid, args, options = launch(name, tensors_of(**call), causal, scale, monkeypatch)
            if stand_in.again:
                compiled, found_grid, found = stand_in.again.pop()
                assert compiled.specialization == (stand_in.specialize(args), options), call
                assert found_grid == grid and flat(found) == flat(args), call
                checked += 1
    assert checked >= 3 * len(calls)


@pytest.mark.parametrize("name", [name for name in PASSES if name not in ("delta", "hopper")])
def test_slopes_and_sinks_among_the_numbers_of_a_struct_are_pointers_too(name, monkeypatch):
    """With one of them, the other or both, and with slopes of two ranks, whose kernels differ in a stride."""
    KERNELS.clear()
    calls = [{"slopes": slopes, "sinks": sinks, "offset": offset} for slopes, sinks, offset in product((None, 1, 2), (0, 1), (0, 1, 4))]
    checked = 0
    for _ in range(2):
        for call in calls:
            stand_in, grid, args, options = launch(name, tensors_of(**call), True, 0.125, monkeypatch)
            if stand_in.again:
                compiled, found_grid, found = stand_in.again.pop()
                assert compiled.specialization == (stand_in.specialize(args), options), call
                assert found_grid == grid and flat(found) == flat(args), call
                checked += 1
    assert checked >= len(calls)


@pytest.mark.parametrize("name", ["forward", "dkdv", "dq"])
def test_a_bias_is_a_pointer_with_strides(name, monkeypatch):
    """Of every broadcast, dtype and alignment; sizes of 1 have the strides that they happen to have."""
    KERNELS.clear()
    ways = {
        "whole": lambda x: x, "transposed": lambda x: x.mT.contiguous().mT,
        "odd": lambda x: torch.cat([x.flatten(), x.flatten()[:1]])[1:].view(x.shape),
    }  # fmt: skip
    shapes = (2, 4, 128, 128), (1, 4, 128, 128), (2, 1, 1, 128), (1, 1, 128, 1)
    calls = list(product(shapes, (torch.float32, torch.bfloat16, torch.uint8), ways.values()))
    checked = 0
    for _ in range(2):
        for call in calls:
            stand_in, grid, args, options = launch(name, tensors_of(bias=call), True, 0.125, monkeypatch)
            if stand_in.again:
                compiled, found_grid, found = stand_in.again.pop()
                assert compiled.specialization == (stand_in.specialize(args), options), call
                assert found_grid == grid and flat(found) == flat(args), call
                checked += 1
    assert checked >= len(calls)


@pytest.mark.parametrize("name", ["forward", "dkdv", "dq"])
def test_what_mods_read_are_pointers_in_tuples_inside_of_a_tuple(name, monkeypatch):
    """Of other shapes, strides, dtypes and alignments."""
    KERNELS.clear()
    calls = list(product((128, 100), (torch.int32, torch.int64), (lambda x: x, lambda x: x.T.contiguous().T, lambda x: x[:, 1:])))
    checked = 0
    for _ in range(2):
        for rows, dtype, way in calls:
            ids = [way(torch.zeros(2, rows + (way(torch.zeros(2, 2)).shape[1] == 1), dtype=dtype)) for _ in range(2)]
            tensors = tensors_of(rows=rows, slopes=1) | {"slopes": None, "aux": [torch.zeros(5)[1:], *ids]}
            stand_in, grid, args, options = launch(name, tensors, True, 0.125, monkeypatch)
            if stand_in.again:
                compiled, found_grid, found = stand_in.again.pop()
                assert compiled.specialization == (stand_in.specialize(args), options), (rows, dtype)
                assert found_grid == grid and flat(found) == flat(args), (rows, dtype)
                checked += 1
    assert checked >= len(calls)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_no_tensor_is_kept_alive(name, packed, monkeypatch):
    KERNELS.clear()
    tensors = tensors_of(packed)
    references = [weakref.ref(x) for x in tensors.values() if x is not None]
    launch(name, tensors, True, 0.125, monkeypatch)[0].anew.clear()
    del tensors
    gc.collect()
    assert len(cache._launches) == 1 and not [ref for ref in references if ref() is not None]


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


def test_this_triton_reads_no_more_of_a_descriptor_than_it_gets():
    """Where Triton makes a tensor map of it; what only a convolution has is not asked."""
    read = set(re.findall(r"\barg\.(\w+)", inspect.getsource(driver.make_tensordesc_arg)))
    read -= {"element_strides", "pixel_box_lower_corner", "pixel_box_upper_corner"}
    assert read >= {"base", "shape", "strides", "padding"}
    like = maps.described(tensors_of()["q"], 64, 64)
    found = cache.Described(160, like)
    assert found.base.data_ptr() == 160
    assert {name: getattr(found, name) for name in read - {"base"}} == {name: getattr(like, name) for name in read - {"base"}}


@pytest.fixture
def launcher_of(monkeypatch):
    """Triton's own launcher of a kernel, but for the C function, which writes down what it gets."""

    def make(signature, metas):
        called = []
        record = MagicMock(side_effect=lambda *args: called.append(args))  # no Python function, as the real one
        utils = SimpleNamespace(**{name: lambda *args: ("map", *args) for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled")})
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils), raising=False)
        monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(utils=utils, allocate_default_profile_scratch=None))
        launcher = driver.CudaLauncher.__new__(driver.CudaLauncher)
        sizes = ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align")
        names = ("gsan_enabled", "launch_cooperative_grid", "launch_pdl")
        launcher.__dict__.update(dict.fromkeys(sizes, 0) | dict.fromkeys(names, False) | {"num_ctas": 1})
        launcher.arg_annotations, launcher.kernel_signature = "annotations", "signature"
        launcher.launch = driver.wrap_handle_tensordesc(record, signature, metas)
        return launcher, called

    return make


@pytest.mark.parametrize("described", [False, True])
def test_the_c_function_gets_what_tritons_launcher_gives_it(described, launcher_of):
    descriptor = maps.described(torch.zeros(2, 128, 4, 64, dtype=torch.float16), 64, 64)
    meta = {"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [1, 64, 1, 64], "fp4_padded": False}
    signature = {"x": "*fp16", "n": "i32"} | ({"d": "tensordesc<fp16[1, 64, 1, 64]>"} if described else {})
    launcher, called = launcher_of(signature, [meta] if described else None)
    args = (12345, 7, *([cache.Described(160, descriptor)] if described else []))
    compiled = SimpleNamespace(run=launcher, function="function", packed_metadata="packed")
    launcher(5, 1, 1, "stream", "function", "packed", None, None, None, *args)
    function, before, after, _ = cache._c_call(compiled, (5, 1, 1), args)
    function(*before, "stream", *after)
    assert len(called) == 2 and called[0] == called[1] and "stream" in called[0]
    assert not described or "map" in str(called[0])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["portable", None])
def test_repeated_calls_take_the_short_way_and_give_the_same_bits(impl):
    """Where this fails for a new Triton, calls are right and slow: read its launcher, then change launch/cache.py."""
    q, k, v = (torch.randn(2, 100, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        first = attention(q, k, v, causal=True, impl=impl)
        for _ in range(4):
            assert torch.equal(attention(q, k, v, causal=True, impl=impl), first)
        q.copy_(k)  # the same addresses, other numbers
        expected = attention(k.clone(), k, v, causal=True, impl=impl)
        assert torch.equal(attention(q, k, v, causal=True, impl=impl), expected)
    assert cache._calls or not cache.KNOWN[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= cache.KNOWN[1]
