"""score_mod and mask_mod: each record that ships beside what it stands for, a user's own, alone and beside the other variants, forward and
backward; what is refused; that nothing of an edited mod is stale.

The device functions of the tests are in mod_kernels.py. The oracle runs twins, so records are measured by an oracle that is told the same
in another way. Over 300 lines, since all that is asked of a mod shares its inputs.
"""

import copy
import math
import pickle
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import flashattn
from aot import Job
from flashattn import MaskMod, ScoreMod, attention, attention_varlen, explain, mods
from flashattn.dispatch.table import hopper_reasons
from flashattn.kernels.structs import Extras
from flashattn.problem import Problem
from flashattn.reference import attention_reference, attention_varlen_reference, distances
from support import WHERE
from test_variants import EAGER, GPU, HALF, INTERPRETER

pytestmark = pytest.mark.thinned

SIZES = {EAGER: (29, 43, 24), INTERPRETER: (7, 21, 8), GPU: (301, 703, 64)}  # queries, keys, head_dim
BATCH, HEADS, HEADS_KV = 2, 2, 1
KERNELS = "mod_kernels."


def _curve(score, b, h, i, j, table):
    return score * table[h, j % 4] + 0.1 * score.square() + 0.01 * (b + i)


def _thirds(b, h, i, j, start):
    return (start[b] + h + i + j) % 3 != 0


def _root(score, b, h, i, j):
    return torch.where(score < 0, -math.inf, score.abs().sqrt())


curve = ScoreMod("test curve", KERNELS + "curve", KERNELS + "curve_gradient", _curve, aux=("table",))
thirds = MaskMod("test thirds", KERNELS + "thirds", _thirds, aux=("start",))
root = ScoreMod("test root", KERNELS + "root", KERNELS + "root_gradient", _root)
flat = ScoreMod("test flat", KERNELS + "curve", None, _curve, aux=("table",))


def inputs(impl, device, dtype=torch.float32, *, square=False, seed=3):
    """q, k, v and gradients of out and lse."""
    rows, keys, dim = SIZES[impl, device]
    rows = keys if square else rows
    make = torch.Generator(device).manual_seed(seed)
    shapes = (BATCH, rows, HEADS, dim), (BATCH, keys, HEADS_KV, dim), (BATCH, keys, HEADS_KV, dim), (BATCH, rows, HEADS, dim)
    tensors = [torch.randn(shape, generator=make, device=device).to(dtype) for shape in shapes]
    return *tensors, torch.randn(BATCH, HEADS, rows, generator=make, device=device)


def table_of(device):
    return torch.linspace(0.5, 1.5, 4 * HEADS, device=device).view(4, HEADS).T  # not contiguous


def both(device):
    """A score_mod and a mask_mod of a user."""
    start = torch.tensor([0, 7], dtype=torch.int16, device=device)
    return {"score_mod": curve, "score_mod_aux": (table_of(device),), "mask_mod": thirds, "mask_mod_aux": (start,)}


def results(function, data, options, dtype=None, **more):
    """{name: out, lse and the gradients of q, k, v, sinks and bias}, in dtype if one is given."""
    *qkv, dout, dlse = data
    leaves = dict(zip("qkv", qkv, strict=True)) | {name: options[name] for name in ("sinks", "bias") if name in options}
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in leaves.items() if x.is_floating_point()}
    q, k, v, *others = leaves.values()
    given = options | dict(zip(list(leaves)[3:], others, strict=True))
    out, lse = function(q, k, v, **given, **more, return_lse=True)
    kept = lse.isfinite()
    loss = (out * dout).sum(dtype=torch.float64) + lse.masked_fill(~kept, 0.0).mul(dlse).sum(dtype=torch.float64)
    return {"out": out, "lse": lse} | dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))


def check(data, impl, options, of_oracle=None, function=attention, oracle=attention_reference, **more):
    """As near to the oracle in float64 as the oracle itself is in the dtype of the inputs, but for a factor and a few roundings. of_oracle:
    the same said in another way."""
    told = options if of_oracle is None else of_oracle
    found = results(function, data, options, impl=impl, **more)
    exact = results(oracle, data, told, torch.float64, **more)
    peer = results(oracle, data, told, data[0].dtype, **more)
    for name, x in found.items():  # a bias that only the oracle is told is left out
        assert torch.equal(x.isinf(), exact[name].isinf()) and not x.isnan().any(), name
        finite = exact[name].isfinite()
        wrong, allowed = ((y - exact[name])[finite].abs().max().item() for y in (x.double(), peer[name].double()))
        size = exact[name][finite].abs().max().item()
        eps = torch.finfo(torch.float32 if name == "lse" else x.dtype).eps
        assert wrong <= 2 * allowed + 4 * eps * size + 1e-6, f"{name}: {wrong} beside {allowed} of {size}"
    return found


# ----------------------------------------------------------------------------------------------------------------------- records


def records(device, rows, keys):
    """{name: (what a call is told, what the oracle is told of the same)}."""
    make = torch.Generator(device).manual_seed(5)
    slopes = torch.linspace(0.1, 0.9, HEADS, device=device)
    buckets = mods.t5_buckets(max_distance=16, num_buckets=8, device=device)
    table = torch.randn(8, HEADS, generator=make, device=device)
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)
    of_distance = table[buckets[(j - i).clamp(-16, 16) + 16].long()].permute(2, 0, 1)[None]
    ids_q, ids_k = (torch.randint(0, 3, (BATCH, n), generator=make, device=device) for n in (rows, keys))
    ids_k[0, 0], ids_q[1, 2] = -1, 9  # nobody's, and without keys
    prefix = torch.tensor([0, 5], device=device)
    shift = distances(rows, rows, device)
    return {
        "softcap": ({"score_mod": "softcap", "score_mod_aux": [torch.tensor([1.5], device=device)]}, {"softcap": 1.5}),
        "alibi": ({"score_mod": mods.alibi, "score_mod_aux": (slopes,)}, {"bias": -slopes[:, None, None] * shift}),
        "relative_bias": ({"score_mod": mods.relative_bias, "score_mod_aux": (table, buckets)}, {"bias": of_distance}),
        "documents": (
            {"mask_mod": mods.documents, "mask_mod_aux": (ids_q, ids_k)},
            {"bias": (ids_q[:, :, None] == ids_k[:, None])[:, None]},
        ),
        "prefix_lm": ({"mask_mod": "prefix_lm", "mask_mod_aux": (prefix,)}, {"bias": (j <= i) | (j < prefix[:, None, None, None])}),
    }


@pytest.mark.parametrize("names", [("relative_bias", "prefix_lm"), ("softcap", "documents"), ("alibi",)], ids=str)
@pytest.mark.parametrize("impl, device", WHERE)
def test_records_are_what_they_stand_for(impl, device, names):
    """By themselves in the oracle, a score_mod and a mask_mod at a time in kernels."""
    dtype = HALF[impl, device] if "softcap" in names else torch.float32
    data = inputs(impl, device, dtype, square="alibi" in names)
    told, other = {}, {}
    for name in names:
        mine, same = records(device, data[0].shape[1], data[1].shape[1])[name]
        twins = {key: getattr(mods, x) if isinstance(x, str) else x for key, x in mine.items()}
        ours, theirs = (results(attention_reference, data, x, torch.float64) for x in (twins, same))
        assert all(torch.allclose(x, theirs[key], rtol=0, atol=1e-6) for key, x in ours.items())
        told |= mine
        bias = [x["bias"] for x in (other, same) if "bias" in x]
        other |= same | ({"bias": bias[0].masked_fill(~bias[1], -math.inf)} if len(bias) == 2 else {})
    found = check(data, impl, told, other)
    assert "documents" not in names or (not found["out"][1, 2].any() and (found["lse"][1, :, 2] == -math.inf).all())


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_t5(bidirectional):
    """Of T5Attention._relative_position_bucket in Transformers 5, for 32 buckets up to 128."""
    distance = torch.tensor([-300, -128, -127, -64, -33, -20, -16, -15, -8, -7, -1, 0, 1, 7, 8, 11, 12, 16, 40, 91, 92, 128, 300])
    both = [15, 15, 15, 14, 12, 10, 10, 9, 8, 7, 1, 0, 17, 23, 24, 24, 25, 26, 28, 31, 31, 31, 31]
    one = [31, 31, 31, 26, 21, 17, 16, 15, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    expected = torch.tensor(both if bidirectional else one)
    assert torch.equal(mods.t5_buckets(bidirectional=bidirectional)[distance.clamp(-128, 128) + 128].long(), expected)
    with pytest.raises(ValueError, match="num_buckets=32, max_distance=8: expected 4 or more, and more than 8"):
        mods.t5_buckets(max_distance=8)


# ------------------------------------------------------------------------------------------------------------------- a user's own


OTHERS = {
    "alone": {},
    "beside all": {"causal": True, "softcap": 2.0, "bias": True, "sinks": True, "alibi": True},
    "dropout": {"window": (9, 3), "dropout_p": 0.3, "dropout_seed": 5, "softmax_scale": -0.2},
    "lengths": {"causal": "top-left", "seqlens_k": [4, 21]},
}


@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("impl, device", WHERE)
def test_a_users_mods(impl, device, others):
    data = inputs(impl, device, HALF[impl, device] if others == "alone" else torch.float32)
    options = OTHERS[others] | both(device)
    if others == "lengths":
        options["seqlens_k"] = torch.tensor(options["seqlens_k"], dtype=torch.int32, device=device)
    if options.pop("alibi", None):
        options["alibi_slopes"] = torch.linspace(0.01, 0.2, HEADS, device=device)
    if options.pop("sinks", None):
        options["sinks"] = torch.linspace(-1, 1, HEADS, device=device)
    if options.pop("bias", None):
        options["bias"] = torch.randn(1, HEADS, data[0].shape[1], data[1].shape[1], generator=torch.Generator(device), device=device)
    check(data, impl, options)


@pytest.mark.parametrize("impl, device", WHERE)
def test_packed(impl, device):
    """Positions are those in a sequence, whose number the batch is; rows past the end are NaN."""
    q, k, v, dout, dlse = (x.flatten(0, 1) for x in inputs(impl, device, square=True))
    dlse = dlse.view(-1, HEADS).T
    end = len(q) - 2
    cu = torch.tensor([0, end // 2, end // 2, end], dtype=torch.int32, device=device)
    for x in (q, k, v):
        x[end:] = math.nan
    dout[end:] = 0
    options = both(device) | {"mask_mod_aux": (torch.tensor([0, 7, 1], dtype=torch.int16, device=device),), "causal": True}

    def ours(q, k, v, **given):
        return attention_varlen(q, k, v, cu, cu, **given)

    def theirs(q, k, v, **given):
        return attention_varlen_reference(q, k, v, cu, cu, **given)

    found = check((q, k, v, dout, dlse), impl, options, function=ours, oracle=theirs)
    assert not found["q"][end:].any() and not found["k"][end:].any()


@pytest.mark.parametrize("impl, device", WHERE)
def test_scores_without_a_derivative_where_nothing_comes_back(impl, device):
    """Scores that are -inf, a row of nothing else, and an infinite derivative at scores of 0 that the mask takes away."""
    q, k, *rest = inputs(impl, device)
    q[1, 3], k = -q[1, 3].abs(), k.abs()
    k[:, 0] = 0
    ids_q, ids_k = torch.zeros(BATCH, q.shape[1], device=device), torch.zeros(BATCH, k.shape[1], device=device)
    ids_k[:, 0] = 1
    found = results(attention, (q, k, *rest), {"score_mod": root, "mask_mod": mods.documents, "mask_mod_aux": (ids_q, ids_k)}, impl=impl)
    assert all(not x.isnan().any() for x in found.values())
    assert (found["lse"][1, :, 3] == -math.inf).all() and not found["q"][1, 3].any() and not found["k"][:, 0].any()


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("impl, device", WHERE)
def test_what_comes_back_for_rows_without_keys_ends_there(impl, device, sinks):
    """NaN, as of a normalisation of zeros. Where sinks give such rows an lse it doesn't tell them."""
    q, k, v, dout, _ = inputs(impl, device)
    ids_q, ids_k = torch.zeros(BATCH, q.shape[1], device=device), torch.zeros(BATCH, k.shape[1], device=device)
    ids_q[:, 4] = 1
    options = {"mask_mod": mods.documents, "mask_mod_aux": (ids_q, ids_k), "impl": impl}
    options |= {"sinks": torch.zeros(HEADS, device=device)} if sinks else {}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    clean = torch.autograd.grad(attention(*leaves, **(options | {"impl": "eager"})), leaves, dout)
    dout[:, 4] = math.nan
    found = torch.autograd.grad(attention(*leaves, **options), leaves, dout)
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(found, clean, strict=True)) and not found[0][:, 4].any()


def test_what_is_added_may_be_learned():
    """The table of a relative bias, beside a mask_mod, a bias of the caller's and a mask of booleans."""
    data = inputs(*EAGER)
    rows, keys = data[0].shape[1], data[1].shape[1]
    told, _ = records("cpu", rows, keys)["relative_bias"]
    table, buckets = told["score_mod_aux"]
    table.requires_grad_()
    mask = records("cpu", rows, keys)["prefix_lm"][0]
    keep = torch.rand(rows, keys) < 0.9
    for bias in (None, torch.randn(HEADS, rows, keys), keep):
        found, expected = (
            function(*data[:3], score_mod=mods.relative_bias, score_mod_aux=(table, buckets), bias=bias, **more)
            for function, more in (
                (attention, mask | {"impl": "eager"}),
                (attention_reference, mask | {"mask_mod": mods.prefix_lm}),
            )
        )
        assert torch.allclose(found, expected, atol=1e-5)
        (dtable,), (of_oracle,) = (torch.autograd.grad(out, table, data[3]) for out in (found, expected))
        assert torch.allclose(dtable, of_oracle, atol=1e-4) and dtable.any()
    text = str(explain(*data[:3], score_mod=mods.relative_bias, score_mod_aux=(table, buckets), impl="eager"))
    assert "bias float32 [1, heads, seqlen_q, seqlen_k]" in text and "score_mod" not in text
    cu = torch.tensor([0, rows], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"of score_mod_aux\[0\] .* of a packed call is not implemented: pass it detached$"):
        attention_varlen(data[0][0], data[1][0, :rows], data[2][0, :rows], cu, cu, **told)


@pytest.mark.parametrize("impl, device", WHERE)
def test_without_a_derivative(impl, device):
    """The forward works with inputs that require gradients, and so does the gradient of v; those of q and k say why not."""
    q, k, v, dout, _ = inputs(impl, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"score_mod_aux": (table_of(device),), "impl": impl}
    out = attention(*leaves, score_mod=flat, **options)
    with pytest.raises(NotImplementedError, match="score_mod 'test flat' has no derivative: give its ScoreMod a backward"):
        torch.autograd.grad(out, leaves, dout)
    q, k, v = q.detach(), k.detach(), v
    dv = [torch.autograd.grad(attention(q, k, v, score_mod=mod, **options), v, dout)[0] for mod in (flat, curve)]
    assert torch.equal(*dv)


# --------------------------------------------------------------------------------------------------------------- edited, compiled


EDITED = """
import triton
import triton.language as tl
from flashattn import ScoreMod

@triton.jit
def forward(score, batch, head, q_idx, kv_idx, aux):
    return score * {factor}

@triton.jit
def backward(dscore, score, batch, head, q_idx, kv_idx, aux):
    return dscore * {factor}

def twin(score, batch, head, q_idx, kv_idx):
    return score * {factor}

record = ScoreMod("test edited", forward, backward, twin)
"""


def edited(path, factor: float) -> ScoreMod:
    """A file with one mod, written and run, as if a cell had been edited."""
    import linecache

    linecache.clearcache()
    path.write_text(EDITED.format(factor=factor))
    space = {"__name__": "edited", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space["record"]


@pytest.mark.parametrize("impl, device", WHERE)
def test_an_edited_mod_is_never_stale(impl, device, tmp_path):
    """The name means the newest, and a graph keeps the one that it was made with."""
    q, k, v, dout, _ = inputs(impl, device)
    q.requires_grad_()
    base = [attention(q, k, v, softmax_scale=scale, impl=impl) for scale in (0.5, 0.25)]
    expected = [torch.autograd.grad(out, q, dout)[0] for out in base]
    edited(tmp_path / "first.py", 2.0)  # of which the interpreter reads what it calls when it does
    first = attention(q, k, v, score_mod="test edited", softmax_scale=0.25, impl=impl)
    edited(tmp_path / "second.py", 1.0)
    second = attention(q, k, v, score_mod="test edited", softmax_scale=0.25, impl=impl)
    for out, plain, dq in zip((first, second), base, expected, strict=True):
        assert torch.allclose(out, plain, atol=1e-5) and torch.allclose(torch.autograd.grad(out, q, dout)[0], dq, atol=1e-4)
    assert not torch.allclose(first, second, atol=1e-2)


def problem_of(key: str, aux=(), **changes) -> Problem:
    sizes = {"batch": 2, "seqlen_q": 200, "seqlen_k": 200, "heads_q": 4, "heads_kv": 2, "head_dim": 16, "head_dim_v": 16}
    return Problem(dtype="float16", softmax_scale=0.25, capability=(9, 0), **sizes, score_mod=key, mod_aux=aux, **changes)


def ptx_of_edited(path, cache, factor: float) -> str:
    """In a worker, with Triton's cache at `cache`."""
    import triton

    from aot import _driver
    from launches import launch_of

    triton.runtime.driver.set_active(_driver(90))
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(cache)
        kernel, args, options = launch_of(problem_of(edited(path, factor).key), "forward")
        return kernel.warmup(*args, grid=(1,), **options).asm["ptx"]


@pytest.mark.compile_only
def test_an_edited_mod_is_compiled_anew(compile_pool, tmp_path):
    """In one process and through the cache on disk of another."""
    path, cache = tmp_path / "mod.py", tmp_path / "cache"
    first, second = (compile_pool.run(ptx_of_edited, path, cache, factor) for factor in (3.0, 5.0))
    assert "0f40400000" in first and "0f40A00000" in second and "0f40400000" not in second  # 3 and 5
    assert len({path.parent.name for path in cache.glob("*/attn_fwd.ptx")}) == 2


def build(name: str):
    from launches import launch_of

    rel, doc = (("float32", (32, 4)), ("int32", (257,))), (("int32", (2, 200)),) * 2
    if name in ("dbias", "shifts"):  # which with two spill a few bytes
        return launch_of(problem_of("alibi", (("float32", (4,)),), bias="float16", bias_dims="hqk"), name)
    return launch_of(problem_of("relative_bias", rel + doc, mask_mod="documents", window_right=0), name)


@pytest.mark.compile_only
@pytest.mark.parametrize("job", [Job("test_mods.build", (name,), 90) for name in ("forward", "dkdv", "dq", "shifts", "dbias")], ids=str)
def test_compiles(job, compiled):
    assert compiled.problems() == []


# ------------------------------------------------------------------------------------------------------------- torch and the rest


def test_flex_attention_agrees():
    """A twin is FlexAttention's function, with what that captures given."""
    q, k, v, *_ = inputs(*EAGER)
    table = table_of("cpu")

    def captured(score, b, h, i, j):
        return _curve(score, b, h, i, j, table)

    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=captured, enable_gqa=True)
    out = attention(q, k, v, score_mod=curve, score_mod_aux=(table,), impl="eager")
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-5)


def test_torch_compile(tmp_path):
    """One graph, forward and backward, that knows when a name means another mod."""
    q, k, v, dout, _ = inputs(*EAGER)
    q.requires_grad_()

    def named(q, table):
        others = {"mask_mod": mods.prefix_lm, "mask_mod_aux": (prefix,), "impl": "eager"}
        return attention(q, k, v, score_mod="test compiled", score_mod_aux=(table,), **others)

    prefix, compiled = torch.tensor([1, 5]), torch.compile(named, backend="aot_eager", fullgraph=True)
    for twin in (_curve, lambda *args: _curve(*args) * 2):
        ScoreMod("test compiled", KERNELS + "curve", KERNELS + "curve_gradient", twin, aux=("table",))
        found, expected = (function(q, table_of("cpu")) for function in (compiled, named))
        assert torch.equal(found, expected)
        assert torch.equal(*(torch.autograd.grad(out, q, dout)[0] for out in (found, expected)))


def test_operators():
    q, k, v, *_ = (x.detach().requires_grad_(i < 3) for i, x in enumerate(inputs(*EAGER)))
    options = None, None, None, 0.0, 0.0, None, None, None, None, None, None, 0.2, None, None, False, False, "eager"
    arguments = q, k, v, *options, curve.key, thirds.key, [table_of("cpu"), torch.tensor([0, 7])]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.flashattn.attn_mod_fwd.default, arguments, test_utils=tests)


def test_vmap_tells_each_sample_its_own_entries():
    q, k, v, *_ = inputs(*EAGER)
    options = both("cpu") | {"impl": "eager"}
    qs = torch.stack([q, 2 * q])
    found = torch.vmap(lambda q: attention(q, k, v, **options))(qs)
    assert torch.equal(found, torch.stack([attention(q, k, v, **options) for q in qs]))
    gradients = torch.vmap(torch.func.grad(lambda q: attention(q, k, v, **options).square().sum()))(qs)
    leaf = qs[1].clone().requires_grad_()
    (expected,) = torch.autograd.grad(attention(leaf, k, v, **options).square().sum(), leaf)
    assert torch.allclose(gradients[1], expected, atol=1e-5)


@pytest.mark.parametrize("derive", ["jvp", "double"])
def test_other_derivatives_are_refused(derive):
    q, k, v, *_ = inputs(*EAGER)
    options = both("cpu") | {"impl": "eager"}
    with pytest.raises(NotImplementedError, match=r"forward-mode or second derivative .* with a score_mod or a mask_mod is not"):
        if derive == "jvp":
            torch.func.jvp(lambda q: attention(q, k, v, **options), (q,), (q,))
        else:
            q.requires_grad_()
            (dq,) = torch.autograd.grad(attention(q, k, v, **options).square().sum(), q, create_graph=True)
            dq.sum().backward()


def test_explain_names_them():
    q, k, v, *_ = inputs(*EAGER)
    text = str(explain(q, k, v, **both("cpu"), impl="eager"))
    assert "with score_mod 'test curve' and mask_mod 'test thirds'" in text
    problem = replace(problem_of(curve.key, mask_mod=thirds.key), aligned=True)
    for direction in ("forward", "backward"):
        assert hopper_reasons(problem, direction) == ["a score_mod: the portable kernels run it", "a mask_mod: the portable kernels run it"]


def with_aux(*tensors):
    return {"score_mod": curve, "score_mod_aux": tensors}


TABLE = torch.ones(HEADS, 4)
WRONG = {
    "unknown": ({"score_mod": "nobody"}, ValueError, "score_mod='nobody': expected a ScoreMod or the name of one, of alibi, "),
    "kind": ({"score_mod": thirds}, TypeError, "score_mod is a MaskMod: expected a flashattn.ScoreMod, the name of one, or None"),
    "function": ({"mask_mod": _thirds}, TypeError, "mask_mod is a function: expected a flashattn.MaskMod"),
    "none": ({"score_mod": curve}, ValueError, r"score_mod_aux has 0 tensors: score_mod 'test curve' reads 1 \(table\)"),
    "many": (with_aux(TABLE, TABLE), ValueError, "score_mod_aux has 2 tensors"),
    "alone": ({"mask_mod_aux": (TABLE,)}, ValueError, "mask_mod_aux without mask_mod: expected both, or neither"),
    "bare": ({"score_mod": curve, "score_mod_aux": TABLE}, TypeError, "score_mod_aux is a Tensor: expected a tuple of tensors"),
    "number": (with_aux(1.0), TypeError, r"score_mod_aux\[0\] \(table of 'test curve'\) is a float: expected a torch.Tensor"),
    "complex": (with_aux(TABLE.cfloat()), TypeError, "has dtype torch.complex64: expected real"),
    "elsewhere": (with_aux(TABLE.to("meta")), ValueError, "is on meta and q on cpu: expected one device"),
    "learned": (
        with_aux(TABLE.clone().requires_grad_()), NotImplementedError,
        r"the gradient of score_mod_aux\[0\] \(table of 'test curve'\) is not implemented: pass it detached, or as bias= .*adds=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said(wrong):
    options, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        attention(*inputs(*EAGER)[:3], **options)


def test_a_key_that_is_another_records_name_is_left_alone():
    keep = [lambda b, h, i, j, limit=limit: (j < limit) | (i < 0) for limit in (1, 2, 3)]
    first, *others = (MaskMod(name, "any.function", twin) for name, twin in zip(("taken#2", "taken", "taken"), keep, strict=True))
    assert len({first.key, *(other.key for other in others)}) == 3
    assert all(MaskMod.records[record.key] is record for record in (first, *others))
    q, v = torch.zeros(1, 3, 1, 3), torch.eye(3)[None, :, None]
    assert attention(q, q, v, mask_mod="taken", impl="eager")[0, 0, 0].tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("options", [
    {"mask_mod": "documents", "mask_mod_aux": (torch.zeros(1, 7), torch.zeros(1, 9))},  # would be read past the end
    {"mask_mod": "documents", "mask_mod_aux": (torch.zeros(7), torch.zeros(9))},
    {"score_mod": "alibi", "score_mod_aux": (torch.ones(2),)},
    {"score_mod": "alibi", "score_mod_aux": (torch.ones(3, 4),)},
    {"mask_mod": "prefix_lm", "mask_mod_aux": (torch.ones(1),)},
    {"score_mod": "relative_bias", "score_mod_aux": (torch.ones(4, 32), mods.t5_buckets())},
    {"score_mod": "softcap", "score_mod_aux": (torch.tensor(3.0),)},
], ids=lambda options: str(*[name for name in options.values() if isinstance(name, str)]))  # fmt: skip
def test_what_ready_mods_read_has_the_shape_that_they_say(options):
    q, k = torch.randn(3, 7, 4, 8), torch.randn(3, 9, 4, 8)
    with pytest.raises(ValueError, match=r"_aux\[[01]\] \(.* has shape .*: expected \[.*, here \["):
        attention(q, k, k, **options, impl="eager")
    with pytest.raises(ValueError, match="has shape"):
        explain(q, k, k, **options)


def test_a_model_with_a_mod_is_copied_and_saved():
    record = MaskMod("copied", "any.function", _first_two)
    assert copy.deepcopy({"mod": record})["mod"] is record and copy.copy(record) is record
    loaded = pickle.loads(pickle.dumps(record))
    assert loaded == record and loaded.key == record.key


def _first_two(b, h, i, j):
    return (j < 2) | (i < 0)


def test_twins_that_return_something_else_are_named():
    q = torch.randn(1, 3, 1, 8)
    for mod, message in ((MaskMod("whole", "a.b", lambda b, h, i, j: j), "mask_mod 'whole' returned torch.int64"),
                         (ScoreMod("number", "a.b", None, lambda s, b, h, i, j: 1.0), "score_mod 'number' returned a float")):  # fmt: skip
        with pytest.raises(TypeError, match=message):
            attention(q, q, q, **{mod.kind: mod}, impl="eager")


def test_pointers_come_in_the_order_in_which_they_are_given():
    """A launch that is remembered fills them in by that order."""
    assert Extras._fields.index("rng") < Extras._fields.index("blocks") < Extras._fields.index("score_aux")


def test_records_are_checked():
    with pytest.raises(TypeError, match=r"forward of score_mod 'x' is a function: expected a @triton.jit function or the dotted path"):
        ScoreMod("x", _curve, None, _curve)
    with pytest.raises(TypeError, match="twin of mask_mod 'x' is a NoneType"):
        MaskMod("x", "a.b", None)
    assert ScoreMod("test curve", *(getattr(curve, x) for x in ("forward", "backward", "twin", "aux"))).key == curve.key
    assert flashattn.mods.MaskMod is MaskMod and lru_cache(hash)(problem_of(curve.key)) is not None


# --------------------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_launches_are_remembered_with_other_tensors(tmp_path):
    """Tensors in tuples inside of a tuple find their places in a launch that is made again, and a mod that was edited is another launch."""
    q, k, v, dout, _ = inputs(*GPU, torch.bfloat16)
    q.requires_grad_()

    def run(factor):
        options = both("cuda") | {"score_mod_aux": (table_of("cuda") * factor,)}
        out = attention(q, k, v, **options)
        return out, *torch.autograd.grad(out, q, dout)

    expected = [run(factor) for factor in (1.0, 2.0)]
    for factor in (1.0, 2.0, 1.0, 2.0):
        assert all(torch.equal(x, y) for x, y in zip(run(factor), expected[int(factor) - 1], strict=True))
    assert not torch.equal(expected[0][0], expected[1][0])
    outs = []
    for factor in (1.0, 3.0, 1.0):
        edited(tmp_path / "mod.py", factor)
        outs.append(attention(q, k, v, score_mod="test edited"))
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])
