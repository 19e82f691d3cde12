"""The test tools themselves: a tolerance that can't fail, or poison that doesn't reach, would make every other test worthless."""

import math
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch

import flashattn.eager
import support
from flashattn import explain
from poison import poison
from support import (
    DTYPES,
    STRIDES,
    WHERE_DTYPE,
    Results,
    assert_close_to_oracle,
    check,
    compare,
    dense,
    expect,
    packed,
    run,
    same_bits,
    tolerance,
)

DTYPE = torch.bfloat16


# ------------------------------------------------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize("name", STRIDES)
def test_strided_inputs_hold_the_same_numbers_in_another_place(name):
    plain, strided = (dense(5, batch=2, heads=3, dim=7, dtype=torch.float32, strides=kind) for kind in ("contiguous", name))
    assert strided.q.shape == plain.q.shape
    assert strided.q.isfinite().all()
    if name in ("expanded_batch", "expanded_heads", "scalar"):
        assert 0 in strided.q.stride()
    else:
        assert torch.equal(strided.q, plain.q)
        assert name == "contiguous" or strided.q.stride() != plain.q.stride() or strided.q.storage_offset()
    if name in ("fused", "every_second_row", "padded_dim", "odd_offset"):
        assert strided.q.untyped_storage().nbytes() > plain.q.untyped_storage().nbytes()


def test_inputs_depend_on_the_seed_only():
    a, b, c = (dense(3, 4, dtype=DTYPE, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.q, b.q) and torch.equal(a.dlse, b.dlse)
    assert not torch.equal(a.q, c.q) and not torch.equal(a.q[:, :3], a.k[:, :3])


def test_packed_inputs_end_in_nan():
    data = packed([2, 0, 3], [1, 4, 0], tail_q=2, tail_k=1, heads=4, heads_kv=2, dim=8, dtype=DTYPE)
    assert data.cu_q.tolist() == [0, 2, 2, 5] and data.cu_q.dtype == torch.int32
    assert data.q.shape == (7, 4, 8) and data.v.shape == (6, 2, 8) and data.dlse.shape == (4, 7)
    for tensor, used in ((data.q, 5), (data.dout, 5), (data.k, 5), (data.v, 5), (data.dlse.T, 5)):
        assert tensor[:used].isfinite().all() and tensor[used:].isnan().all()


# ------------------------------------------------------------------------------------------------------------------- the oracle


def test_pieces_give_what_the_whole_gives(monkeypatch):
    """A budget of one score matrix cuts batch, key heads and the heads of a group apart."""
    data = dense(9, 11, batch=2, heads=6, heads_kv=2, dim=8, dtype=torch.float32)
    whole = expect(data, causal=True)
    monkeypatch.setattr(support, "BUDGET", {"cpu": 1})
    assert len(list(support._pieces(data, itemsize=8))) == 12
    parts = expect(data, causal=True)
    for a, b in zip((*whole.oracle, *whole.magnitude), (*parts.oracle, *parts.magnitude), strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-5)


def test_empty_rows_and_unseen_keys_are_found():
    data = dense(7, 3, dtype=torch.float32, dim=8)
    found = expect(data, causal=True)
    assert found.empty[0, 0].tolist() == [True] * 4 + [False] * 3
    assert not found.unseen.any()
    found = expect(dense(3, 7, dtype=torch.float32, dim=8), causal=True, window=(1, 0))
    assert found.unseen[0, :, 0, 0].tolist() == [True] * 3 + [False] * 4
    found = expect(packed([0, 2], [2, 1], tail_k=1, dtype=torch.float32, dim=8))
    assert found.unseen[:, 0, 0].tolist() == [True, True, False, True]


# ---------------------------------------------------------------------------------------------------------------- the tolerance


def test_tolerance_is_the_formula():
    oracle, peer = torch.tensor([3.0, -4.0]).double(), torch.tensor([3.5, -4.0])
    eps = 2.0**-7
    most, rms = tolerance(oracle, peer, DTYPE)
    assert most == pytest.approx(2 * (0.5 + eps * 4))
    assert rms == pytest.approx(1.5 * (0.5 / math.sqrt(2) + eps * 5 / math.sqrt(2)))
    assert tolerance(oracle, peer, DTYPE, magnitude=torch.tensor([8.0, 0.0]))[0] == pytest.approx(2 * (0.5 + eps * 4 + 2.0**-23 * 8))


def test_a_peer_or_oracle_that_overflows_is_refused():
    oracle = torch.ones(2).double()
    with pytest.raises(ValueError, match="peer is not finite"):
        tolerance(oracle, torch.tensor([1.0, math.inf]), DTYPE)
    with pytest.raises(ValueError, match="not finite"):
        tolerance(oracle, oracle, DTYPE, magnitude=torch.tensor([math.inf]))


@pytest.mark.parametrize(
    "actual, what",
    [
        ([1.0, 2.0, 3.1], "max error"),
        ([1.0, 2.0, math.nan], "not finite"),
        ([1.0, math.inf, 3.0], "not finite"),
        ([1.0, 2.0], "shape"),
    ],
)
def test_wrong_results_fail(actual, what):
    oracle = torch.tensor([1.0, 2.0, 3.0]).double()
    assert_close_to_oracle(torch.tensor([1.0, 2.0, 3.0]), oracle, oracle.to(DTYPE), DTYPE)
    with pytest.raises(AssertionError, match=what):
        assert_close_to_oracle(torch.tensor(actual), oracle, oracle.to(DTYPE), DTYPE)


def test_many_small_errors_fail_the_root_mean_square():
    oracle = torch.zeros(1000).double()
    oracle[0] = 1.0
    with pytest.raises(AssertionError, match="rms error"):
        assert_close_to_oracle(oracle + 0.01, oracle, oracle.to(DTYPE), DTYPE)


def test_infinities_must_be_exact():
    oracle = torch.tensor([1.0, -math.inf]).double()
    assert_close_to_oracle(oracle.float(), oracle, oracle.float(), torch.float32)
    for wrong in ([1.0, -1e30], [1.0, math.inf], [1.0, math.nan]):
        with pytest.raises(AssertionError, match="exactly infinite"):
            assert_close_to_oracle(torch.tensor(wrong), oracle, oracle.float(), torch.float32)


def reference_results(data, **options) -> tuple[Results, object]:
    """The low-precision peer as if it were an implementation: its error is within the tolerance by construction."""
    expected = expect(data, **options)
    half = Results(*(x.to(data.q.dtype) for x in expected.peer if x is not None))
    return half._replace(lse=expected.peer.lse.float()), expected


PLANTED = {
    "out": lambda r: r._replace(out=r.out * 1.05),
    "lse": lambda r: r._replace(lse=r.lse / math.log(2)),
    "dq": lambda r: r._replace(dq=r.dq.roll(1, dims=1)),
    "dk": lambda r: r._replace(dk=r.dk * 8**-0.5),
    "dv": lambda r: r._replace(dv=r.dv.flip(2)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_fail_naming_the_result(name):
    results, expected = reference_results(dense(12, 15, batch=2, heads=4, heads_kv=2, dim=8, dtype=DTYPE), causal=True)
    compare(results, expected, DTYPE)
    with pytest.raises(AssertionError, match=f"^{name}: "):
        compare(PLANTED[name](results), expected, DTYPE)


def test_a_gradient_of_a_row_without_keys_must_be_exactly_zero():
    results, expected = reference_results(dense(6, 3, dim=8, dtype=DTYPE), causal=True)
    compare(results, expected, DTYPE)
    results.dq[0, 0, 0, 0] = 1e-20
    with pytest.raises(AssertionError, match="dq: not exactly 0"):
        compare(results, expected, DTYPE)


def test_one_key_allows_float32_roundoff_of_what_cancels():
    """dq is exactly 0 with one key, in the oracle and in its peer: what is allowed comes from dout.v, which was subtracted from itself."""
    expected = expect(dense(5, 1, dim=64, dtype=DTYPE), lse_grad=False)
    assert not expected.oracle.dq.any() and not expected.peer.dq.any()
    most, _ = tolerance(expected.oracle.dq, expected.peer.dq, DTYPE, expected.magnitude.dq)
    assert 1e-7 < most < 1e-4


# -------------------------------------------------------------------------------------------------------------- check, as it is used


@pytest.mark.parametrize("impl, device, dtype", WHERE_DTYPE)
def test_check_runs_everywhere(impl, device, dtype):
    data = dense(19, 23, heads=4, heads_kv=2, dim=24, dim_v=16, dtype=dtype, device=device, strides="fused")
    first = check(data, impl, causal=True, window=(9, None), layout="bhsd")
    assert same_bits(first, run(data, impl, causal=True, window=(9, None)))
    assert not same_bits(first, run(data, impl, causal=True, window=(8, None)))
    check(packed([3, 0, 9], [5, 2, 0], tail_q=2, tail_k=3, dim=16, dtype=dtype, device=device), impl, causal=True)


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("chosen", ["hopper", "portable"])
def test_what_is_checked_with_portable_is_checked_with_hopper_too(monkeypatch, chosen, kind):
    """Where that would be chosen: its forward, with the same options; and a wrong one is found."""
    data = packed([3, 5], dim=8, dtype=DTYPE) if kind == "packed" else dense(3, 5, dim=8, dtype=DTYPE)
    options = {"layout": "bshd" if kind == "packed" else "bhsd", "deterministic": True, "causal": True}
    ran, wrong = {}, []

    def stand_in(data, impl, **options):
        ran[impl] = options
        results = run(data, "eager", **options)
        return results._replace(out=results.out + 1) if impl in wrong else results

    def choice(*args, **options):
        assert explain(*args, **options).problem.window_right == 0
        return SimpleNamespace(kernels={"forward": chosen})

    monkeypatch.setattr(support, "run", stand_in)
    monkeypatch.setattr(support, "explain", choice)
    check(data, "portable", lse_grad=False, **options)
    assert ran.pop("portable") == {**options, "grads": "qkvsb", "lse_grad": False}
    assert ran == ({"hopper": {**options, "grads": ""}} if chosen == "hopper" else {})
    wrong.append("hopper")
    with pytest.raises(AssertionError, match="out: max error") if chosen == "hopper" else nullcontext():
        check(data, "portable", **options)
    ran.clear()
    check(data, "eager", **options)
    assert set(ran) == {"eager"}


def test_only_the_gradients_asked_for():
    results = run(dense(4, 4, dim=8, dtype=torch.float32), "eager", grads="v")
    assert results.dq is None and results.dk is None and results.dv is not None
    assert run(dense(4, 4, dim=8, dtype=torch.float32), "eager", grads="")[2:] == (None,) * 5


# ------------------------------------------------------------------------------------------------------------------------ poison


def planted(monkeypatch, name, source):
    """A module of the library that the library doesn't have."""
    module = ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.no_poison
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("allocate", ["torch.empty(4, dtype=x.dtype)", "torch.empty_like(x)", "x.new_empty(4)", "x.new_empty((2, 2))"])
def test_allocations_of_the_library_are_poisoned(monkeypatch, allocate, dtype):
    source = f"import torch\ndef allocate(x):\n    return {allocate}"
    launcher, other = planted(monkeypatch, "flashattn.launch.planted", source), planted(monkeypatch, "elsewhere", source)
    x = torch.zeros(4, dtype=dtype)
    new_empty = torch.Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        poison(patch)
        found = launcher.allocate(x)
        assert found.dtype == dtype and found.numel() == 4
        if dtype.is_floating_point:
            assert found.isnan().all()
        else:
            assert (found == (True if dtype == torch.bool else torch.iinfo(dtype).max)).all()
        assert launcher.torch.float32 is torch.float32 and launcher.torch.nn.functional is torch.nn.functional
        assert other.torch is torch and torch.Tensor.new_empty is not new_empty
        assert other.allocate(x).shape == found.shape
    assert launcher.torch is torch and torch.Tensor.new_empty is new_empty


def test_the_rooms_that_allocate_are_poisoned():
    assert flashattn.eager.torch is not torch
    assert flashattn.eager.torch.empty(3).isnan().all()


@pytest.mark.no_poison
def test_no_poison_leaves_the_library_alone():
    assert flashattn.eager.torch is torch
    assert "new_empty" not in vars(torch.Tensor)


def test_poison_is_not_traced():
    """torch.compile must see new_empty as it is, without a graph break, outside the library."""

    @torch.compile(fullgraph=True, backend="eager")
    def function(x):
        return x.new_empty(3).fill_(2.0) + torch.empty_like(x).fill_(1.0) + x

    assert function(torch.ones(3)).tolist() == [4.0] * 3


@pytest.mark.interpret
def test_the_interpreter_replaces_builtins_once_a_launch(monkeypatch):
    """`interpreter.replace_once` knows this Triton: without it everything here is right and takes twice as long."""
    from triton.runtime import interpreter

    launches = []
    replace = interpreter._patch_builtin
    monkeypatch.setattr(interpreter, "_patch_builtin", lambda package, *rest: launches.append(package) or replace(package, *rest))
    data = dense(40, 40, batch=2, heads=2, dim=16, dtype=torch.float32)
    run(data, "portable")
    first = len(launches)
    run(data, "portable")
    assert 0 < len(launches) - first <= 8 * 4, "four launches, and of each tl, its tensor, math and descriptors"
