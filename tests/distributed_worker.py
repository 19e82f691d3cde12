"""One of two processes, started by test_distributed.py: `python distributed_worker.py RANK STORE TEST...`. It prints "TEST ok" or fails.

Each test here has the whole of the data, from one seed, so that a process can compare its part with what one process alone computes.
"""

import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flashattn import attention, attention_varlen
from flashattn.integrations.aten import _backward

DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.device_count() > 1 else "cpu"
WORLD = 2


class Block(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.project, self.back, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return x + self.back(attention(q, k, v, causal=True).flatten(-2))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(16, 1)).to(DEVICE)


def batch():
    return torch.randn(4, 7, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def train(net, x, steps=3):
    """Losses of a few steps; all processes see the mean."""
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(steps):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def same_losses(net, rank):
    alone = train(model(), batch())
    found = train(net, batch().chunk(WORLD)[rank])
    dist.all_reduce(found)
    torch.testing.assert_close(found / WORLD, alone, atol=1e-5, rtol=1e-4)
    assert alone[-1] < alone[0]


def ddp(rank):
    same_losses(nn.parallel.DistributedDataParallel(model()), rank)


def fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    net, mesh = model(), init_device_mesh(DEVICE, (WORLD,))
    for block in net[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert type(net[0].back.weight).__name__ == "DTensor"
    same_losses(net, rank)


def tensors(heads=4, heads_kv=2, batch=4):
    generator = torch.Generator().manual_seed(2)
    shapes = ((batch, 5, heads, 8), (batch, 7, heads_kv, 8), (batch, 7, heads_kv, 8))
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def sharded(rank):
    """By heads and by batch entries: no communication, results and gradients sharded alike. By rows: gathered first."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh(DEVICE, (WORLD,))
    q, k, v = tensors()
    expected = attention(q, k, v, causal=True, return_lse=True)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE) for x in expected]
    gradients = torch.autograd.grad(expected, (q, k, v), weights)
    for dim, placement_of_lse, free in ((1, Replicate(), False), (0, Shard(0), True), (2, Shard(1), True)):
        parts = [distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)]
        with CommDebugMode() as communication:
            out, lse = attention(*parts, causal=True, return_lse=True)
        assert (communication.get_total_counts() == 0) == free, (dim, communication.get_comm_counts())
        if free:
            assert out.placements == (Shard(dim),) and lse.placements == (placement_of_lse,), (out.placements, lse.placements)
        torch.testing.assert_close([out.full_tensor(), lse.full_tensor()], list(expected))
        spread = [distribute_tensor(x, mesh, y.placements) for x, y in zip(weights, (out, lse), strict=True)]
        found = torch.autograd.grad((out, lse), parts, spread)
        torch.testing.assert_close([x.full_tensor() for x in found], list(gradients))
        (alone,) = torch.autograd.grad(attention(*parts, causal=True), parts[2], spread[0])
        torch.testing.assert_close(alone.full_tensor(), torch.autograd.grad(attention(q, k, v, causal=True), v, weights[0])[0])
    wanted = {"need_dq": True, "need_dk": False, "need_dv": False, "window_right": 0, "softmax_scale": 1.0, "head_dim_v": 8}
    lse = lse.detach()
    dq, dk, _ = _backward(dout=out.detach(), q=parts[0], k=parts[1], v=parts[2], out=out.detach(), lse=lse, **wanted)
    assert dq.shape == q.shape and dk.full_tensor().shape == (0,)
    q, k, v = tensors(heads=6, heads_kv=3)  # which two devices can't share
    parts = [distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in (q, k, v)]
    torch.testing.assert_close(attention(*parts).full_tensor(), attention(q, k, v).detach())


def sharded_packed(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (WORLD,))
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in tensors())
    cu = [torch.tensor([0, 4, 4, len(x)], dtype=torch.int32, device=DEVICE) for x in (q, k)]
    expected = attention_varlen(q, k, v, *cu, causal=True)
    gradients = torch.autograd.grad(expected.sum(), (q, k, v))
    parts = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
    lengths = [distribute_tensor(x, mesh, [Replicate()]) for x in cu]
    out = attention_varlen(*parts, *lengths, causal=True)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), expected)
    found = torch.autograd.grad(out.sum(), parts)
    torch.testing.assert_close([x.full_tensor() for x in found], list(gradients))


def sharded_variants(rank):
    """Slopes and sinks go with the heads, and are whole where batch entries are sharded; the gradient of sinks is summed over these."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (WORLD,))
    q, k, v = tensors()
    sinks = torch.linspace(-1, 1, 4, device=DEVICE).requires_grad_()
    for slopes in (torch.linspace(0.1, 1, 4, device=DEVICE), torch.linspace(0.1, 1, 16, device=DEVICE).view(4, 4)):
        options = {"causal": True, "softcap": 2.0}
        expected = attention(q, k, v, alibi_slopes=slopes, sinks=sinks, **options)
        gradients = torch.autograd.grad(expected.square().sum(), (q, k, v, sinks))
        for dim, of_heads in ((2, True), (0, False)):
            parts = [distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)]
            of_slopes = Shard(slopes.dim() - 1) if of_heads else Shard(0) if slopes.dim() == 2 else Replicate()
            part = distribute_tensor(sinks.detach(), mesh, [Shard(0) if of_heads else Replicate()]).requires_grad_()
            out = attention(*parts, alibi_slopes=distribute_tensor(slopes, mesh, [of_slopes]), sinks=part, **options)
            assert out.placements == (Shard(dim),)
            torch.testing.assert_close(out.full_tensor(), expected)
            found = torch.autograd.grad(out.square().sum(), (*parts, part))
            torch.testing.assert_close([x.full_tensor() for x in found], list(gradients))


def sharded_biases(rank):
    """A bias goes with the heads or batch entries along which it differs; of what all devices share each gives a part of the gradient."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (WORLD,))
    q, k, v = tensors()
    sizes = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
    for shape in (sizes, (1, *sizes[1:]), (sizes[0], 1, *sizes[2:]), (1, 1, *sizes[2:])):
        bias = torch.linspace(-1, 1, sizes[2] * sizes[3], device=DEVICE).view(sizes[2:]).expand(shape).clone().requires_grad_()
        expected = attention(q, k, v, bias=bias, causal=True)
        gradients = torch.autograd.grad(expected.square().sum(), (q, k, v, bias))
        for dim, of_bias in ((2, 1), (0, 0)):
            parts = [distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_() for x in (q, k, v)]
            place = Shard(of_bias) if shape[of_bias] != 1 else Replicate()
            parts.append(distribute_tensor(bias.detach(), mesh, [place]).requires_grad_())
            out = attention(*parts[:3], bias=parts[3], causal=True)
            assert out.placements == (Shard(dim),)
            torch.testing.assert_close(out.full_tensor(), expected)
            found = torch.autograd.grad(out.square().sum(), parts)
            torch.testing.assert_close([x.full_tensor() for x in found], list(gradients))


def sharded_dropout(rank):
    """No shard knows its place in the whole, on which the mask depends."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (WORLD,))
    shards = [distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in tensors()]
    try:
        attention(*shards, dropout_p=0.5)
    except NotImplementedError as error:
        assert "dropout_p=0.5 of a DTensor is not implemented" in str(error)
    else:
        raise AssertionError("dropout of a DTensor was not refused")
    local = [x.to_local() for x in shards]
    assert attention(*local, dropout_p=0.5, dropout_seed=rank).shape == (4, 5, 2, 8)


def sharded_compiled(rank):
    """The compiler asks for the rule before any call was made."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(DEVICE, (WORLD,))
    parts = [distribute_tensor(x.detach(), mesh, [Shard(2)]).requires_grad_() for x in tensors()]

    def call(q, k, v):
        return attention(q, k, v, causal=True)

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(*parts)
    assert out.placements == (Shard(2),)
    torch.testing.assert_close(out.full_tensor(), attention(*tensors(), causal=True))
    found = torch.autograd.grad(out.sum(), parts)
    expected = torch.autograd.grad(attention(*(inputs := tensors()), causal=True).sum(), inputs)
    torch.testing.assert_close([x.full_tensor() for x in found], list(expected))


def main(rank: int, store: str, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for name in names:
        globals()[name](rank)
        print(name, "ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
