"""What makes masks of dropout come again, or not: seeds, generators, torch's state, checkpointing, compiled calls, vmap, graphs of CUDA.

The surprising fact: nothing here is about attention. The seed is a tensor that torch draws like any other, so whatever torch does to make
its own dropout come again does it to this one.
"""

from functools import partial
from itertools import combinations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from flashattn import attention
from support import WHERE
from test_torch_compile import compiled


def small(device, grad=False, dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(0)
    shapes = (2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 16)
    return [torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_(grad) for shape in shapes]


def call(impl, *tensors, **options):
    return attention(*tensors, dropout_p=0.5, impl=impl, **options)


@pytest.mark.parametrize("impl, device", WHERE)
def test_seeds_and_generators(impl, device):
    tensors = small(device)
    torch.manual_seed(0)
    first, second = call(impl, *tensors), call(impl, *tensors)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(call(impl, *tensors), first) and torch.equal(call(impl, *tensors), second)
    generator = torch.Generator(device).manual_seed(4)
    third = call(impl, *tensors, generator=generator)
    assert not torch.equal(call(impl, *tensors, generator=generator), third)
    seed = torch.randint(2**63 - 1, (2,), generator=generator.manual_seed(4), device=device)
    assert torch.equal(call(impl, *tensors, dropout_seed=seed), third)
    assert torch.equal(call(impl, *tensors, dropout_seed=torch.stack([seed, seed], 1)[:, 0]), third)  # of any stride
    assert torch.equal(call(impl, *tensors, dropout_seed=3), call(impl, *tensors, dropout_seed=torch.tensor([3, 0], device=device)))


@pytest.mark.parametrize("impl, device", WHERE)
def test_a_given_seed_draws_nothing(impl, device):
    state = torch.get_rng_state()
    call(impl, *small(device), dropout_seed=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("impl, device", WHERE)
def test_of_a_mask_two_numbers_are_kept(impl, device):
    kept = {}
    for p in (0.0, 0.5):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x):
            attention(*small(device, grad=True), dropout_p=p, impl=impl)
        kept[p] = sorted(sizes)
    kept[0.5].remove(2)
    assert kept[0.5] == kept[0.0]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("impl, device", WHERE)
def test_checkpointing(impl, device, reentrant):
    """The recomputed forward draws what the first one drew, between other draws; and with a seed that is given, without any state."""
    for options, preserve in (({}, True), ({"dropout_seed": 8}, False)):
        found = {}
        for wrap in (None, partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=preserve)):
            torch.manual_seed(0)
            tensors = small(device, grad=True)
            torch.rand(3, device=device)
            function = partial(call, impl, **options)
            out = function(*tensors) if wrap is None else wrap(function, *tensors)
            out = out + torch.rand_like(out)
            out.square().sum().backward()
            found[wrap is None] = [out.detach(), *(x.grad for x in tensors)]
        assert all(torch.equal(x, y) for x, y in zip(found[True], found[False], strict=True))


@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_compiled(impl, device):
    """One graph, in which the seed is drawn by torch's own operator: with AOT's plain backend that of the plain call."""
    torch._dynamo.reset()

    def forward(q, k, v, **options):
        return attention(q, k, v, dropout_p=0.5, impl=impl, causal=True, **options)

    whole, counter = compiled(forward, device)
    tensors = small(device, grad=True, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    for options in ({"dropout_seed": 6}, {"dropout_seed": torch.tensor([6, 1], device=device)}):
        found, expected = whole(*tensors, **options), forward(*tensors, **options)
        assert torch.equal(found, expected)
        cotangent = torch.ones_like(found)
        for x, y in zip(*(torch.autograd.grad(out, tensors, cotangent) for out in (found, expected)), strict=True):
            assert torch.equal(x, y)
    assert counter.frame_count == 2
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append([whole(*tensors).detach() for _ in range(2)])
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(*draws[0])
    if device == "cpu":
        torch.manual_seed(0)
        assert torch.equal(forward(*tensors), draws[0][0])


@pytest.mark.parametrize("impl, device", [WHERE[0], WHERE[2]])
def test_gradients_of_a_compiled_call_are_of_its_own_mask(impl, device):
    """v is linear: with out = f(v), the gradient of sum(out * c) in v, times v, sums to sum(out * c), if both have one mask."""
    torch._dynamo.reset()
    whole, _ = compiled(lambda q, k, v: attention(q, k, v, dropout_p=0.5, impl=impl), device)
    q, k, v = small(device, grad=True)
    for _ in range(3):
        out = whole(q, k, v)
        cotangent = torch.randn_like(out)
        (dv,) = torch.autograd.grad(out, v, cotangent)
        torch.testing.assert_close((dv * v).sum(), (out * cotangent).sum(), rtol=1e-3, atol=1e-3)


def test_samples_of_a_vmap():
    """Each sample is its own call: with the seed of all, with one of its own, or with what torch draws as it is told to."""
    q, k, v = (torch.stack([x, x]) for x in small("cpu"))
    one = partial(call, "eager")

    def gradient(q, k, v, seed):
        return torch.func.grad(lambda v: one(q, k, v, dropout_seed=seed).square().sum())(v)

    seeds = torch.tensor([[1, 2], [3, 4]])
    for seed, dim in ((5, None), (seeds, 0)):
        found = torch.func.vmap(lambda q, k, v, s: one(q, k, v, dropout_seed=s), (0, 0, 0, dim))(q, k, v, seed)
        each = [one(q[n], k[n], v[n], dropout_seed=seed if dim is None else seed[n]) for n in range(2)]
        assert torch.equal(found, torch.stack(each))
        found = torch.func.vmap(gradient, (0, 0, 0, dim))(q, k, v, seed)
        each = [gradient(q[n], k[n], v[n], seed if dim is None else seed[n]) for n in range(2)]
        torch.testing.assert_close(found, torch.stack(each))
    same, other = (torch.func.vmap(one, randomness=how)(q, k, v) for how in ("same", "different"))
    assert torch.equal(same[0], same[1]) and not torch.equal(other[0], other[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(one)(q, k, v)


def test_other_derivatives_than_the_first_in_reverse_are_refused():
    q, k, v = small("cpu", grad=True)
    with pytest.raises(NotImplementedError, match="with dropout is not implemented"):
        torch.func.jvp(lambda q: call("eager", q, k, v, dropout_seed=1), (q,), (q,))
    with pytest.raises(NotImplementedError, match="with dropout is not implemented"), forward_ad.dual_level():
        call("eager", forward_ad.make_dual(q.detach(), q.detach()), k, v, dropout_seed=1)
    (dq,) = torch.autograd.grad(call("eager", q, k, v, dropout_seed=1).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="with dropout is not implemented"):
        dq.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["portable", None])
def test_cuda_graphs(impl):
    """A replay draws another mask, in the forward as in the backward; with a seed that is given, the same one."""
    tensors = small("cuda", grad=True, dtype=torch.bfloat16)
    for options, repeats in (({}, False), ({"dropout_seed": 3}, True), ({"dropout_seed": torch.tensor([3, 0], device="cuda")}, True)):

        def step(options=options):
            out = call(impl, *tensors, **options)
            (dv,) = torch.autograd.grad(out, tensors[2], torch.ones_like(out))
            return out, dv

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, dv = step()
        found = []
        for _ in range(3):
            graph.replay()
            found.append((out.detach().clone(), dv.clone()))
            torch.testing.assert_close((dv.float() * tensors[2].float()).sum(), out.float().sum(), rtol=2e-2, atol=1.0)
        assert [torch.equal(a, b) for (a, _), (b, _) in combinations(found, 2)] == [repeats] * 3
        if repeats:
            assert torch.equal(found[0][0], call(impl, *tensors, **options))
