"""The passes before and after the Hopper backward, which are plain Triton: in the interpreter, and on a GPU.

The surprising fact: the order in which sums of dQ are stored is checked here against the layout of a wgmma accumulator as NVIDIA documents
it (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts", m64nNk16), since no interpreter runs what makes them.
"""

import math
from dataclasses import replace

import pytest
import torch

from flashattn.dispatch.table import hopper_backward_row
from flashattn.kernels.hopper.passes import attn_bwd_hopper_after, attn_bwd_hopper_before
from flashattn.kernels.structs import Tile, View
from flashattn.problem import Problem

WHERE = [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [3, 0, 128, 65, 1]
TAIL = 70


def view(x) -> View:
    stride = x.stride()
    return View(x, stride[0], stride[2], stride[1]) if x.dim() == 4 else View(x, 0, stride[1], stride[0])


def blocks_of(packed: bool, rows: int, block: int, device):
    """(cu_seqlens or None, blocks of a head, [(first row, rows, number) of each block of a head])"""
    if not packed:
        return None, -(-rows // block), [(m0, min(block, rows - m0), m0 // block) for m0 in range(0, rows, block)]
    cu = [0]
    for length in LENGTHS:
        cu.append(cu[-1] + length)
    found = []
    for b, (start, end) in enumerate(zip(cu, [*cu[1:], cu[-1] + TAIL], strict=True)):
        found += [(m0, min(block, end - m0), start // block + b + (m0 - start) // block) for m0 in range(start, end, block)]
    return torch.tensor(cu, dtype=torch.int32, device=device), rows // block + len(LENGTHS) + 1, found


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("negative, fours", [(False, True), (True, False)])
@pytest.mark.parametrize(
    "block, head_dim, head_dim_v, padded",
    [(64, 96, 72, (128, 128)), (128, 64, 40, (64, 64)), (64, 128, 64, (128, 64)), (64, 136, 72, (192, 128))],
)
def test_before(device, packed, negative, fours, block, head_dim, head_dim_v, padded):
    """lse, delta and zeros where blocks of rows are, and nothing elsewhere."""
    torch.manual_seed(0)
    batch, rows, heads = 2, sum(LENGTHS) + TAIL, 2
    shape = (rows, heads, head_dim_v) if packed else (batch, rows, heads, head_dim_v)
    out, dout = (torch.randn(shape, device=device).half() for _ in range(2))
    lse, dlse = (torch.randn((heads, rows) if packed else (batch, heads, rows), device=device) for _ in range(2))
    lse[..., 5:9] = -math.inf  # rows without keys
    cu, blocks, places = blocks_of(packed, rows, block, device)
    lanes = heads if packed else batch * heads
    numbers = torch.full((blocks * lanes, 2, block), 7.0, device=device)
    sums = torch.full((blocks * lanes, block * padded[0]), 7.0, device=device)
    turns = torch.full((blocks * lanes, 2), 7, dtype=torch.int32, device=device)
    tile = Tile(block, 128, head_dim, head_dim_v, *padded, 8)
    sizes = (rows, len(LENGTHS) if packed else batch, heads, blocks)
    args = (lse, view(out), view(dout), dlse, numbers, sums, turns, cu, *sizes)
    attn_bwd_hopper_before[(blocks * lanes,)](*args, TILE=tile, VARLEN=packed, NEGATIVE=negative, FOURS=fours)
    delta = (out.float() * dout.float()).sum(-1).transpose(-1, -2) - dlse
    used = torch.zeros(blocks * lanes, dtype=torch.bool)
    for lane in range(lanes):
        lse_of, delta_of = (x.reshape(lanes, rows)[lane].cpu() for x in (lse, delta))
        for row, count, number in places:
            expected = torch.stack([torch.full((block,), math.inf), torch.zeros(block)])
            kept = lse_of[row : row + count] > -math.inf
            expected[0, :count][kept] = lse_of[row : row + count][kept] * math.log2(math.e)
            expected[1, :count][kept] = (-1 if negative else 1) * delta_of[row : row + count][kept]
            if fours:  # (16 rows, half, pair, of the pair) -> (16 rows, pair, half, of the pair)
                expected = expected.reshape(2, -1, 2, 4, 2).transpose(2, 3).reshape(2, block)
            torch.testing.assert_close(numbers[lane * blocks + number].cpu(), expected, atol=1e-4, rtol=1e-5)
            used[lane * blocks + number] = True
    assert (sums[used] == 0).all() and (turns[used] == 0).all()
    for x in (numbers, sums, turns):
        assert (x[~used] == 7).all()


def in_registers(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a [64, 64] product in the order in which its threads store them: 16 bytes each, all lanes of a warp, all columns."""
    warp, columns, lane, half, pair = torch.meshgrid(*[torch.arange(n) for n in (4, 8, 32, 2, 2)], indexing="ij")
    return x[16 * warp + 8 * half + lane // 4, 8 * columns + 2 * (lane % 4) + pair].reshape(-1)


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "block, head_dim, width", [(64, 96, 128), (128, 40, 64), (64, 128, 128), (128, 64, 64), (64, 136, 192), (64, 256, 256)]
)
def test_after(device, packed, block, head_dim, width):
    torch.manual_seed(0)
    batch, rows, heads = 2, sum(LENGTHS) + TAIL, 2
    cu, blocks, places = blocks_of(packed, rows, block, device)
    lanes = heads if packed else batch * heads
    dq = torch.full((rows, heads, head_dim) if packed else (batch, rows, heads, head_dim), 7.0, device=device).half()
    expected, sums = dq.clone(), torch.randn(blocks * lanes, block * width // 4096, 4096, device=device)
    for lane in range(lanes):
        entry, head = divmod(lane, heads)
        for row, count, number in places:
            whole = torch.randn(block, width)
            parts = [rows.contiguous() for half in whole.split(64) for rows in half.split(64, dim=1)]
            sums[lane * blocks + number] = torch.stack([in_registers(part) for part in parts]).to(device)
            target = (expected if packed else expected[entry])[row : row + count, head]
            target.copy_(whole[:count, :head_dim] * 0.5)
    tile = Tile(block, 128, head_dim, head_dim, width, width, 8)
    sizes = (rows, len(LENGTHS) if packed else batch, heads, blocks)
    attn_bwd_hopper_after[(blocks * lanes,)](sums, view(dq), cu, *sizes, 0.5, TILE=tile, VARLEN=packed)
    torch.testing.assert_close(dq, expected, atol=0, rtol=0)


def test_the_last_wave_of_the_backward_is_as_full_as_the_others():
    """64 heads in groups of 8 at 8192 tokens: one key/value head after the other left the last programs alone, at 0.81 of the speed."""
    from flashattn.launch.hopper_backward import _order

    grouped = Problem("bfloat16", 1, 8192, 8192, 64, 8, 128, 128, 0.1, None, 0, capability=(9, 0), aligned=True)
    assert _order(grouped, hopper_backward_row(grouped)) == (8, 64, 4)
    for lanes in range(1, 40):
        problem = replace(grouped, heads_q=lanes, heads_kv=lanes)
        found, slots, wave = _order(problem, hopper_backward_row(problem))
        assert (found, slots) == (lanes, 64) and 1 <= wave <= min(lanes, 5)
        if lanes % 4 == 0:
            assert wave in (4, 5) and lanes % wave == 0


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("negative", [False, True])
def test_the_gradient_of_sinks(packed, negative):
    """Summed from lse and delta of blocks, where a sink's share of a row is at most 1, however lse is rounded."""
    from flashattn.launch.hopper_backward import _sinks_gradient, blocks_of

    problem = Problem("bfloat16", 2, 130, 130, 3, 3, 64, 64, 0.1, varlen=packed, total_q=130 * packed, total_k=130 * packed, sinks=True)
    config = hopper_backward_row(problem)
    blocks, lanes = blocks_of(problem, config.block_m)
    torch.manual_seed(0)
    sinks = torch.tensor([0.5, -math.inf, 3e11])
    heads = torch.arange(lanes) % 3
    share, delta = torch.rand(blocks * lanes, config.block_m), torch.randn(blocks * lanes, config.block_m)
    share.view(lanes, blocks, -1)[heads == 1], share.view(lanes, blocks, -1)[heads == 2] = 0.0, 1.0
    lse = sinks[heads].repeat_interleave(blocks)[:, None] * math.log2(math.e) - share.log2()
    lse[heads.repeat_interleave(blocks) == 1] = 0.0
    lse[heads.repeat_interleave(blocks) == 2] *= 1 - 2.0**-23
    share[:, ::7], delta[:, ::7], lse[:, ::7] = 0.0, 0.0, math.inf  # rows that don't exist
    numbers = torch.stack([lse, -delta if negative else delta], 1)
    found = _sinks_gradient(problem, config, negative, numbers.flatten(1), sinks)
    expected = -(share * delta).view(-1, 3, blocks * config.block_m).sum(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch, rows, keys, dlse", [(2, 5, 0, True), (2, 5, 0, False), (0, 5, 5, True), (2, 0, 5, False)])
def test_the_gradient_of_sinks_where_nothing_is_launched(batch, rows, keys, dlse):
    """[batch, heads] as the operator's fake has it, and a row without keys owes the sink what came into its lse."""
    from flashattn.launch.hopper_backward import backward

    q, k = (torch.zeros(batch, n, 3, 8, dtype=torch.float16) for n in (rows, keys))
    lse, sinks = torch.zeros(batch, 3, rows), torch.zeros(3)
    problem = Problem("float16", batch, rows, keys, 3, 3, 8, 8, 0.1, sinks=True)
    *_, dsinks, dbias = backward(problem, (True,) * 4, None, torch.ones_like(lse) if dlse else None, q, k, k, q, lse, sinks=sinks)
    assert torch.equal(dsinks, torch.full((batch, 3), float(rows if dlse and not keys else 0)))
    assert dbias is None
