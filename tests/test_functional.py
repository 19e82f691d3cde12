"""torch.func's transforms and forward-mode AD: what works gives the ordinary results, and what is missing says so.

The surprising fact: a derivative that isn't implemented is easily lost in silence, a tangent most of all, so every way to ask for one is
asked here.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from flashattn import attention, attention_varlen
from flashattn.torch_ops import schemas
from support import WHERE

EAGER, _, GPU = WHERE

@pytest.mark.parametrize("impl, device", [EAGER, GPU])
def test_functional_transforms_give_the_ordinary_results(impl, device):
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 1, 5, 2, 8, generator=generator, device=device)

    def loss(x):
        out, lse = attention(x, x, x, causal=True, return_lse=True, impl=impl)
        return out.square().sum() + lse.sum()

    leaf = x[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(x[0]), expected)
    value, pullback = torch.func.vjp(loss, x[0])
    assert torch.equal(pullback(torch.ones_like(value))[0], expected)


MAPPED = {  # dimensions of q, k and v
    "all": (0, 0, 0),
    "each elsewhere": (3, 1, 4),
    "q": (0, None, None),
    "k, v": (None, 1, 0),
    "v": (None, None, 2),
}


@pytest.fixture
def ran(monkeypatch):
    """How often a kernel of which direction was chosen and run."""
    counts, select = Counter(), schemas.select
    monkeypatch.setattr(schemas, "select", lambda problem, direction, impl: counts.update([direction]) or select(problem, direction, impl))
    return counts


def samples(dims, device="cpu"):
    """q, k and v with three samples in the dimensions mapped, and the arguments of each sample."""
    generator, tensors = torch.Generator(device).manual_seed(0), []
    for shape, dim in zip(((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3)), dims, strict=True):
        tensors.append(torch.randn(shape if dim is None else (*shape[:dim], 3, *shape[dim:]), generator=generator, device=device))
    return tensors, apart(tensors, dims)


def apart(tensors, dims):
    return [[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)] for i in range(3)]


def both(q, k, v, impl="eager"):
    return attention(q, k, v, causal=True, return_lse=True, impl=impl)


def total(q, k, v, impl="eager"):
    return sum((x * torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape)).sum() for x in both(q, k, v, impl))


def assert_stacked(found, alone):
    for x, ones in zip(found, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(ones))


@pytest.mark.parametrize("dims", MAPPED.values(), ids=MAPPED)
def test_vmap_is_one_call_with_a_larger_batch(dims, ran):
    x, each = samples(dims)
    found = torch.func.vmap(both, dims)(*x)
    assert ran == {"forward": 1}
    assert_stacked(found, [both(*one) for one in each])


@pytest.mark.parametrize("impl, device", WHERE)
def test_vmap_on_every_device(impl, device):
    dims = MAPPED["each elsewhere"]
    x, each = samples(dims, device)
    gradients = torch.func.grad(partial(total, impl=impl), (0, 1, 2))
    assert_stacked(torch.func.vmap(partial(both, impl=impl), dims)(*x), [both(*one, impl) for one in each])
    assert_stacked(torch.func.vmap(gradients, dims)(*x), [gradients(*one) for one in each])


@pytest.mark.parametrize("dims", MAPPED.values(), ids=MAPPED)
@pytest.mark.parametrize("wanted", [(0, 1, 2), (2,), (0,)])
def test_gradients_of_each_sample_are_one_call_too(dims, wanted, ran):
    """Also of what all samples share."""
    x, each = samples(dims)
    found = torch.func.vmap(torch.func.grad(total, wanted), dims)(*x)
    assert ran == {"forward": 1, "backward": 1}
    assert_stacked(found, [torch.func.grad(total, wanted)(*one) for one in each])


@pytest.mark.parametrize("dims", MAPPED.values(), ids=MAPPED)
def test_the_gradient_of_a_vmap(dims, ran):
    x, _ = samples(dims)
    leaves = [y.requires_grad_() for y in x]
    found = torch.autograd.grad(torch.func.vmap(total, dims)(*leaves).sum(), leaves)
    assert ran == {"forward": 1, "backward": 1}
    torch.testing.assert_close(found, torch.func.grad(lambda *x: torch.func.vmap(total, dims)(*x).sum(), (0, 1, 2))(*x))
    torch.testing.assert_close(found, torch.autograd.grad(sum(total(*one) for one in apart(leaves, dims)), leaves))


def per_head(q, k, v, slopes, sinks):
    return attention(q, k, v, causal=True, softcap=2.0, alibi_slopes=slopes, sinks=sinks, return_lse=True, impl="eager")


@pytest.mark.parametrize("shape, dim", [((4,), None), ((2, 4), None), ((3, 4), 0), ((2, 3, 4), 1)])
def test_vmap_with_slopes_of_all_and_of_each_sample(shape, dim, ran):
    x, each = samples(MAPPED["each elsewhere"])
    slopes, sinks = torch.rand(shape), torch.randn(4)
    found = torch.func.vmap(per_head, (*MAPPED["each elsewhere"], dim, None))(*x, slopes, sinks)
    assert ran == {"forward": 1}
    assert_stacked(found, [per_head(*one, slopes if dim is None else slopes.select(dim, i), sinks) for i, one in enumerate(each)])


def test_the_gradient_of_shared_sinks_is_that_of_each_sample(ran):
    x, each = samples(MAPPED["all"])
    slopes, sinks = torch.rand(4), torch.randn(4)

    def loss(q, k, v, sinks):
        out, lse = per_head(q, k, v, slopes, sinks)
        return out.square().sum() + lse.sum()

    gradient = torch.func.grad(loss, (0, 3))
    found = torch.func.vmap(gradient, (0, 0, 0, None))(*x, sinks)
    assert ran == {"forward": 1, "backward": 1}
    assert_stacked(found, [gradient(*one, sinks) for one in each])
    leaf = sinks.clone().requires_grad_()
    (total_,) = torch.autograd.grad(torch.func.vmap(loss, (0, 0, 0, None))(*x, leaf).sum(), leaf)
    torch.testing.assert_close(total_, found[1].sum(0))


def test_what_slopes_and_sinks_can_not_do_is_refused():
    x, _ = samples(MAPPED["all"])
    slopes, sinks = torch.rand(4), torch.randn(3, 4)
    with pytest.raises(NotImplementedError, match="vmap over sinks is not implemented: share them"):
        torch.func.vmap(per_head, (0, 0, 0, None, 0))(*x, slopes, sinks)
    one = [y[0] for y in x]
    with pytest.raises(NotImplementedError, match="the gradient of alibi_slopes is not implemented"):
        torch.func.grad(lambda slopes: per_head(*one, slopes, None)[0].sum())(slopes)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
        per_head(*one, slopes, forward_ad.make_dual(sinks[0], sinks[1]))


def test_vmap_of_vmap_of_another_layout_and_of_nothing(ran):
    x = torch.randn(2, 3, 1, 4, 5, 8)
    call = lambda x: attention(x, x, x, layout="bhsd", impl="eager")  # noqa: E731
    found = torch.func.vmap(torch.func.vmap(call))(x)
    assert ran == {"forward": 1}
    torch.testing.assert_close(found, call(x.flatten(0, 2)).view(x.shape))
    assert torch.func.vmap(call)(x[0, :0]).shape == x[0, :0].shape
    assert torch.func.vmap(call)(x[0, :, :0]).shape == x[0, :, :0].shape
    jacobian = torch.func.jacrev(call)(x[0, 0])
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(call, x[0, 0]))


def test_vmap_of_a_packed_call_is_refused():
    x, cu = torch.randn(3, 5, 2, 8), torch.tensor([[0, 5], [0, 4], [2, 5]], dtype=torch.int32)
    for call, dims in ((lambda x, cu: attention_varlen(x, x, x, cu, cu), (0, 0)), (lambda x: attention_varlen(x, x, x, cu[0], cu[0]), 0)):
        with pytest.raises(NotImplementedError, match=r"vmap of attention_varlen is not implemented: pack the rows of all samples"):
            torch.func.vmap(call, dims)(*((x, cu) if dims == (0, 0) else (x,)))


# --------------------------------------------------------------------------------------------------------------- forward-mode AD


def dual(x):
    return forward_ad.make_dual(x, torch.ones_like(x))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_tangent_is_refused_and_not_dropped(which, packed, grad):
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    qkv = [torch.randn(5, 2, 8).requires_grad_(grad) for _ in range(3)]

    def call(q, k, v):
        return attention_varlen(q, k, v, cu, cu, impl="eager") if packed else attention(q[None], k[None], v[None], impl="eager")

    alone = call(*qkv)
    with forward_ad.dual_level():
        assert torch.equal(call(*qkv), alone), "without a tangent nothing is refused"
        qkv[which] = dual(qkv[which])
        with pytest.raises(NotImplementedError, match=r"forward-mode derivative .* is not implemented .* use backward\(\)"):
            call(*qkv)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
            call(*qkv)


def test_a_tangent_of_a_gradient_is_refused():
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    out = attention(q, q, q, impl="eager")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode derivative"):
        torch.autograd.grad(out, q, dual(torch.ones_like(out)))


@pytest.mark.parametrize("compiled", [False, True])
def test_what_has_no_tangent_may_be_there_beside_one_that_has(compiled):
    q, x = torch.randn(1, 3, 2, 8), torch.tensor(2.0)

    def call(x):
        return torch.func.jvp(lambda x: x * attention(q, q, q, impl="eager").sum(), (x,), (x,))

    value, tangent = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x)
    assert torch.equal(tangent, value)


TRANSFORMS = {
    "jvp": lambda loss, x: torch.func.jvp(loss, (x,), (x,)),
    "jacfwd": lambda loss, x: torch.func.jacfwd(loss)(x),
    "hessian": lambda loss, x: torch.func.hessian(loss)(x),
    "jvp of grad": lambda loss, x: torch.func.jvp(torch.func.grad(loss), (x,), (x,)),
    "grad of grad": lambda loss, x: torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x),
    "grad of vmap of grad": lambda loss, x: torch.func.grad(lambda x: torch.func.vmap(torch.func.grad(loss))(x[None]).sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_that_need_what_is_missing_are_refused(transform):
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=r"derivative of flashattn's (attention|backward) is not implemented"):
        transform(lambda x: attention(x, x, x, impl="eager").square().sum(), x)
