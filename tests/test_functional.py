"""torch.func's transforms and forward-mode AD: what works gives the ordinary results, and what is missing says so.

The surprising fact: a derivative that isn't implemented is easily lost in silence, a tangent most of all, so every way to ask for one is
asked here, which takes this file over 300 lines.
"""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from flashattn import attention, attention_varlen
from flashattn.reference import attention_reference
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


# ---------------------------------------------------------------------------------------------- forward-mode AD and second derivatives

OPTIONS = {"causal": True, "softcap": 1.3, "return_lse": True}
SHAPES = (2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 3), (4,)  # of q, k, v and sinks
ALL = (0, 1, 2, 3)


def ours(q, k, v, sinks):
    return attention(q, k, v, sinks=sinks, impl="eager", **OPTIONS)


def oracle(q, k, v, sinks):
    return attention_reference(q, k, v, sinks=sinks, **OPTIONS)


def draw(seed, *more):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*more, *shape, generator=generator) for shape in SHAPES]


def scalar(f):
    """Not linear in either result, so that nothing of a second derivative is zero."""
    return lambda *x: sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sin().sum() for y in f(*x))


def of_tangents(f, tangents):
    return lambda *x: sum(y.sin().sum() for y in tree_leaves(torch.func.jvp(f, x, tuple(tangents))))


FIRST = {
    "jvp": lambda f, x, t: torch.func.jvp(f, x, t),
    "jacfwd": lambda f, x, t: torch.func.jacfwd(f, ALL)(*x),
    "linearize": lambda f, x, t: torch.func.linearize(f, *x)[1](*t),
    "autograd.functional.jvp": lambda f, x, t: torch.autograd.functional.jvp(f, x, t),
    "vmap of jvp over tangents": lambda f, x, t: torch.func.vmap(lambda *t: torch.func.jvp(f, x, t))(*[torch.stack([y, -y]) for y in t]),
    "jvp of vmap": lambda f, x, t: torch.func.jvp(
        lambda q, k, v, sinks: torch.func.vmap(f, (0, None, 0, None))(q, k, v, sinks),
        (x[0][None], x[1], x[2][None], x[3]),
        (t[0][None], t[1], t[2][None], t[3]),
    ),
}
SECOND = {
    "hessian": lambda f, x, t: torch.func.hessian(scalar(f), ALL)(*x),
    "jacrev of jacrev": lambda f, x, t: torch.func.jacrev(torch.func.jacrev(scalar(f), ALL), ALL)(*x),
    "jvp of grad": lambda f, x, t: torch.func.jvp(torch.func.grad(scalar(f), ALL), x, t),
    "grad of grad": lambda f, x, t: torch.func.grad(lambda *x: sum(y.sin().sum() for y in torch.func.grad(scalar(f), ALL)(*x)), ALL)(*x),
    "grad of jvp": lambda f, x, t: torch.func.grad(of_tangents(f, t), ALL)(*x),
    "grad of jvp in tangents": lambda f, x, t: torch.func.grad(lambda *t: of_tangents(f, t)(*x), ALL)(*t),
    "vmap of grad of grad": lambda f, x, t: torch.func.vmap(
        torch.func.grad(lambda *x: sum(y.sin().sum() for y in torch.func.grad(scalar(f), ALL)(*x)), (0, 1, 2)), (0, 0, 0, None)
    )(*[torch.stack([y, y.cos()]) for y in x[:3]], x[3]),
    "vhp": lambda f, x, t: torch.autograd.functional.vhp(scalar(f), x, t),
    "autograd.functional.hessian": lambda f, x, t: torch.autograd.functional.hessian(scalar(f), x),
}


@pytest.mark.parametrize("transform", [*FIRST.values(), *SECOND.values()], ids=[*FIRST, *SECOND])
def test_transforms_of_a_second_order_give_the_oracles_results(transform):
    x, t = (tuple(y[:1, :2] if y.dim() == 4 else y for y in draw(seed)) for seed in (0, 1))
    found = tree_leaves(transform(ours, x, t))
    expected = tree_leaves(transform(oracle, tuple(y.double() for y in x), tuple(y.double() for y in t)))
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(0,), (1, 3), (2,)], ids=str)
@pytest.mark.parametrize("name", ["jvp", "hessian", "grad of grad", "grad of jvp"])
def test_of_some_inputs(name, wanted):
    """What is not asked about has neither a tangent nor a gradient."""
    x, t = draw(0), tuple(draw(1)[i] for i in wanted)

    def of(f, kind):
        def some(*moving):
            inputs = [y.to(kind) for y in x]
            for place, y in zip(wanted, moving, strict=True):
                inputs[place] = y
            return f(*inputs)

        moving, tangents = (tuple(y.to(kind) for y in ys) for ys in ((x[i] for i in wanted), t))
        places = tuple(range(len(wanted)))
        if name == "jvp":
            return torch.func.jvp(some, moving, tangents)
        if name == "hessian":
            return torch.func.hessian(scalar(some), places)(*moving)
        if name == "grad of jvp":
            return torch.func.grad(of_tangents(some, tangents), places)(*moving)
        return torch.func.grad(lambda *m: sum(y.sin().sum() for y in torch.func.grad(scalar(some), places)(*m)), places)(*moving)

    for y, z in zip(tree_leaves(of(ours, torch.float32)), tree_leaves(of(oracle, torch.float64)), strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-5)


def test_vmap_of_jvp_is_one_call_with_a_larger_batch(ran):
    x, t = draw(0, 3), draw(1, 3)
    sinks = x[3][0]

    def one(q, k, v, *t):
        return torch.func.jvp(ours, (q, k, v, sinks), t)

    found = tree_leaves(torch.func.vmap(one)(*x[:3], *t))
    assert ran == {"tangent": 1}
    assert_stacked(found, [tree_leaves(one(*y)) for y in zip(*x[:3], *t, strict=True)])


def test_a_tangent_of_slopes_is_refused():
    x, slopes = draw(0)[:3], torch.rand(4)
    for call in (
        lambda: torch.func.jvp(lambda s: attention(*x, alibi_slopes=s, impl="eager"), (slopes,), (slopes,)),
        lambda: torch.func.jvp(torch.func.grad(lambda q, s: attention(q, *x[1:], alibi_slopes=s, impl="eager").sum()), (x[0], slopes),
                               (x[0], slopes)),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="the gradient of alibi_slopes is not implemented"):
            call()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="the gradient of alibi_slopes is not implemented"):
        attention(*x, alibi_slopes=forward_ad.make_dual(slopes, slopes), impl="eager")


THIRD = {
    "jvp of jvp": lambda loss, x: torch.func.jvp(lambda x: torch.func.jvp(loss, (x,), (x,))[1], (x,), (x,)),
    "jacfwd of jacfwd": lambda loss, x: torch.func.jacfwd(torch.func.jacfwd(loss))(x),
    "grad of grad of grad": lambda loss, x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x).sum()
    )(x),
    "jacfwd of hessian": lambda loss, x: torch.func.jacfwd(torch.func.hessian(loss))(x),
    "hvp, which takes three": lambda loss, x: torch.autograd.functional.hvp(loss, x, x),
}


@pytest.mark.parametrize("transform", THIRD.values(), ids=THIRD)
def test_what_goes_further_is_refused(transform):
    x = torch.randn(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=r"derivative of flashattn's attention is not implemented: .*detach\(\)"):
        transform(lambda x: attention(x, x, x, impl="eager").square().sum(), x)


def test_a_packed_call_has_them_too_but_no_vmap():
    x, cu = torch.randn(5, 2, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    loss = lambda x: attention_varlen(x, x, x, cu, cu, impl="eager").square().sum()  # noqa: E731
    apart = lambda x: sum(attention_reference(*[y[None]] * 3).square().sum() for y in (x[:2], x[2:]))  # noqa: E731
    for transform in (
        lambda f, x: torch.func.jvp(f, (x,), (x.cos(),)),
        lambda f, x: torch.func.jvp(torch.func.grad(f), (x,), (x.cos(),)),
        lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).sin().sum())(x),
    ):
        torch.testing.assert_close(transform(loss, x), transform(apart, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="vmap of attention_varlen is not implemented"):
        torch.func.jacfwd(loss)(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_has_no_tangent_may_be_there_beside_one_that_has(compiled):
    q, x = torch.randn(1, 3, 2, 8), torch.tensor(2.0)

    def call(x):
        return torch.func.jvp(lambda x: x * attention(q, q, q, impl="eager").sum(), (x,), (x,))

    value, tangent = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(x)
    assert torch.equal(tangent, value)
