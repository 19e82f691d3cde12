"""What a profiler is told about a launch, against the work that `flashattn.explain` counts; no GPU is needed.

The surprising fact: the backward passes together do more products than the backward has, because each rebuilds the scores; the difference
is known, so it is checked as well.
"""

from dataclasses import replace

import pytest

from aot import CompilePool
from flashattn.problem import Problem
from flashattn.roofline.work import PASSES, attention
from support import dense, packed, run

pytest.importorskip("triton")

BASE = Problem(
    dtype="float16", batch=3, seqlen_q=300, seqlen_k=500, heads_q=6, heads_kv=2, head_dim=64, head_dim_v=40, softmax_scale=0.1,
    capability=(8, 0),
)  # fmt: skip
PROBLEMS = {
    "plain": BASE,
    "float32": replace(BASE, dtype="float32", heads_kv=6),
    "causal": replace(BASE, window_right=0),
    "more-queries": replace(BASE, seqlen_q=500, seqlen_k=300, window_right=0),
    "top-left": replace(BASE, window_right=0, top_left=True),
    "window": replace(BASE, window_left=17, window_right=3),
    "window-left": replace(BASE, window_left=450),
    "top-left-window": replace(BASE, seqlen_q=500, seqlen_k=300, window_left=7, window_right=0, top_left=True),
    "one-query": replace(BASE, seqlen_q=1, window_left=30, window_right=0),
    "no-keys": replace(BASE, seqlen_k=0),
}
PACKED = replace(BASE, varlen=True, total_q=1000, total_k=900, window_right=0)


def told(problem: Problem, name: str, **options) -> dict:
    """What the pass's function says of the arguments that a launch would have."""
    from flashattn.kernels.hopper import profile as hopper
    from flashattn.kernels.portable import profile
    from launches import hopper_backward_launch, launch_of

    if name.startswith("hopper "):
        kernel, args, _ = hopper_backward_launch(problem, name=name.removeprefix("hopper "), **options)
        describe = getattr(hopper, f"{name.removeprefix('hopper ')}_metadata")
    else:
        kernel, args, _ = launch_of(problem, name, **options)
        describe = hopper.forward_metadata if name == "hopper" else getattr(profile, f"{name}_metadata")
    return describe((1,), None, dict(zip(kernel.arg_names, args, strict=True)))


def on_hopper(problem: Problem) -> bool:
    """Whether that forward launches anything."""
    return problem.dtype != "float32" and problem.seqlen_k > 0


def flops(found: dict) -> int:
    """The one number of FLOPs."""
    (name,) = [key for key in found if key.startswith("flops")]
    return found[name]


@pytest.mark.parametrize("which", PROBLEMS)
def test_flops_are_those_of_the_kept_pairs(which):
    problem = PROBLEMS[which]
    counted = {name: attention(problem, name).flops for name in PASSES}
    forward, dkdv, dq = (flops(told(problem, name)) for name in ("forward", "dkdv", "dq"))
    assert forward == counted["forward"]
    if on_hopper(problem):
        assert told(problem, "hopper")["flops16"] == forward
        assert told(problem, "hopper backward")["flops16"] == counted["backward"]
    assert dkdv + dq == counted["backward"] + forward, "q k^T and dO v^T are computed twice, as many FLOPs as a forward"
    dk, dv = (flops(told(problem, "dkdv", needs=needs)) for needs in "kv")
    pairs = forward // (2 * (problem.head_dim + problem.head_dim_v))
    assert dk == 2 * pairs * (2 * problem.head_dim + problem.head_dim_v), "q k^T, dO v^T, dS^T q"
    assert dv == 2 * pairs * (problem.head_dim + problem.head_dim_v), "q k^T, P^T dO"
    if on_hopper(problem):
        assert [told(problem, "hopper backward", needs=needs)["flops16"] for needs in "kv"] == [dk, dv]
    assert flops(told(problem, "tangent")) == attention(problem, "tangent").flops == 3 * forward
    along = {"q": (2, 2), "k": (2, 2), "qk": (3, 2), "v": (1, 2), "s": (1, 1), "qv": (2, 3)}  # products of head_dim, of head_dim_v
    for moving, (d, dv) in along.items():
        assert flops(told(problem, "tangent", moving=moving)) == 2 * pairs * (d * problem.head_dim + dv * problem.head_dim_v), moving
    assert f"flops{8 * problem.itemsize}" in told(problem, "forward")


@pytest.mark.parametrize("which", [*PROBLEMS, "packed"])
def test_bytes_are_those_of_the_tensors_of_each_pass(which):
    problem = PROBLEMS.get(which, PACKED)
    moved = {name: attention(problem, name).bytes for name in PASSES}
    rows_q, rows_k = (problem.total_q, problem.total_k) if problem.varlen else (3 * problem.seqlen_q, 3 * problem.seqlen_k)
    q, out = (problem.itemsize * rows_q * problem.heads_q * dim for dim in (problem.head_dim, problem.head_dim_v))
    k, v = (problem.itemsize * rows_k * problem.heads_kv * dim for dim in (problem.head_dim, problem.head_dim_v))
    lse = 4 * rows_q * problem.heads_q
    expected = {
        ("forward", ""): moved["forward"],
        ("tangent", "qkv"): 2 * moved["forward"],
        ("tangent", "k"): moved["forward"] + k + out + lse,
        ("delta", "dlse"): 2 * out + 2 * lse,
        ("delta", ""): 2 * out + lse,
        ("dkdv", "kv"): q + k + v + out + 2 * lse + k + v,
        ("dkdv", "k"): q + k + v + out + 2 * lse + k,
        ("dkdv", "v"): q + k + out + lse + v,  # neither v nor delta
        ("dq", ""): q + k + v + out + 2 * lse + q,
    } | ({("hopper", ""): moved["forward"]} if on_hopper(problem) else {})
    for (name, variant), size in expected.items():
        options = {"needs": variant} if name == "dkdv" else {"moving": variant} if name == "tangent" else {"dlse": variant == "dlse"}
        assert told(problem, name, **options)["bytes"] == size, f"{name} {variant}"
    once = {"q": q, "k": k, "v": v, "out": out, "dout": out, "lse": lse, "dq": q, "dk": k, "dv": v}
    assert moved["backward"] == sum(once.values())


def test_packed_calls_have_no_flops():
    assert not [key for name in ("forward", "tangent", "dkdv", "dq", "hopper") for key in told(PACKED, name) if "flops" in key]


def test_names_tell_the_pass_and_the_shape():
    shape = "b3_q300_k500_h6/2_d64/40"
    assert told(BASE, "forward")["name"] == f"attn_fwd[{shape}]"
    assert told(BASE, "hopper")["name"] == f"attn_fwd_hopper[{shape}]"
    assert told(PACKED, "hopper")["name"] == told(PACKED, "forward")["name"].replace("fwd", "fwd_hopper")
    assert [told(BASE, "dkdv", needs=needs)["name"] for needs in ("kv", "k", "v")] == [
        f"attn_bwd_dkdv[{shape}]", f"attn_bwd_dk[{shape}]", f"attn_bwd_dv[{shape}]"]  # fmt: skip
    assert told(BASE, "tangent")["name"] == f"attn_jvp[{shape}]"
    assert told(BASE, "dq")["name"] == f"attn_bwd_dq[{shape}]"
    assert told(BASE, "hopper backward")["name"] == f"attn_bwd_hopper[{shape}]"
    for name in ("before", "after"):
        assert told(BASE, f"hopper {name}")["name"].startswith(f"attn_bwd_hopper_{name}[b3_q300_h6_d64/40")
    assert told(BASE, "delta")["name"] == "attn_bwd_delta[b3_q300_h6_d40]"


def wiring() -> dict[str, str]:
    """{kernel: the function that describes its launches}, where kernels can be compiled: the interpreter drops it."""
    from flashattn.kernels.hopper import passes
    from flashattn.kernels.hopper.backward import attn_bwd_hopper
    from flashattn.kernels.hopper.forward import attn_fwd_hopper
    from flashattn.kernels.portable import backward, forward, tangent

    hopper = (attn_fwd_hopper, attn_bwd_hopper, passes.attn_bwd_hopper_before, passes.attn_bwd_hopper_after)
    kernels = (*hopper, forward.attn_fwd, tangent.attn_jvp, backward.attn_bwd_delta, backward.attn_bwd_dkdv, backward.attn_bwd_dq)
    return {kernel.fn.__name__: f"{kernel.launch_metadata.__module__}.{kernel.launch_metadata.__name__}" for kernel in kernels}


@pytest.mark.compile_only
def test_every_kernel_has_its_description():
    pool = CompilePool(1)
    try:
        assert pool.run(wiring) == {
            "attn_fwd": "flashattn.kernels.portable.profile.forward_metadata",
            "attn_jvp": "flashattn.kernels.portable.profile.tangent_metadata",
            "attn_fwd_hopper": "flashattn.kernels.hopper.profile.forward_metadata",
            "attn_bwd_hopper": "flashattn.kernels.hopper.profile.backward_metadata",
            "attn_bwd_hopper_before": "flashattn.kernels.hopper.profile.before_metadata",
            "attn_bwd_hopper_after": "flashattn.kernels.hopper.profile.after_metadata",
            "attn_bwd_delta": "flashattn.kernels.portable.profile.delta_metadata",
            "attn_bwd_dkdv": "flashattn.kernels.portable.profile.dkdv_metadata",
            "attn_bwd_dq": "flashattn.kernels.portable.profile.dq_metadata",
        }
    finally:
        pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", [None, "portable"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_launch_hook_is_told(kind, impl):
    import torch
    import triton

    size = {"heads": 4, "heads_kv": 2, "dim": 256, "dtype": torch.bfloat16, "device": "cuda"}
    data = dense(200, 300, batch=2, **size) if kind == "dense" else packed([100, 100], [120, 180], **size)
    seen = []
    note = lambda metadata: seen.append(metadata.get())  # noqa: E731
    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        run(data, impl, causal=True)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)
    ours = [each for each in seen if each["name"].startswith("attn_")]
    names = [each["name"].partition("[")[0] for each in ours]
    if impl is None and torch.cuda.get_device_capability() == (9, 0):
        assert names == ["attn_fwd_hopper", "attn_bwd_hopper_before", "attn_bwd_hopper", "attn_bwd_hopper_after"]
    else:
        assert names[:2] == ["attn_fwd", "attn_bwd_delta"] and names[-1] == "attn_bwd_dq"
        assert names[2:-1] in (["attn_bwd_dkdv"], ["attn_bwd_dk", "attn_bwd_dv"])
    assert all(each["bytes"] > 0 for each in ours)
    passes = ("delta", "before", "after")
    assert [any("flops" in key for key in each) for each in ours] == [kind == "dense" and not name.endswith(passes) for name in names]
