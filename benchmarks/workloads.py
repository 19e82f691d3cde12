"""Named attention workloads in suites, so that tests, benchmarks and tuning speak of the same shapes by the same names.

What a workload is, and how much work it is, is in `flashattn.roofline.workload`.

Surprising fact: a suite of one paper is a shape that another paper left out: nobody's grid has grouped heads, a window and short sequences.
"""

import math
import random
from dataclasses import replace

from flashattn.roofline.workload import DIRECTIONS, Workload, packed, square

__all__ = ["DIRECTIONS", "MIXED", "SUITES", "WORKLOADS", "Workload", "packed", "select", "square"]


def fa3_grid() -> tuple[Workload, ...]:
    """The grid of the FlashAttention-3 paper (Shah et al. 2024, section 4.1): 16 384 tokens a batch, heads x head dim = 2048."""
    return tuple(
        square(
            f"fa3-d{head_dim}-s{seqlen}{'-causal' if causal else ''}",
            16384 // seqlen, seqlen, 2048 // head_dim, 2048 // head_dim, head_dim, causal,
        )
        for head_dim in (64, 128, 256)
        for causal in (False, True)
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384)
    )


def llama3_8b() -> tuple[Workload, ...]:
    """The attention of Llama 3 8B (32 query heads, 8 key/value heads, head dim 128, causal) on 16 384 tokens."""
    return tuple(
        square(f"llama3-8b-s{seqlen}", 16384 // seqlen, seqlen, 32, 8, 128, True) for seqlen in (1024, 2048, 4096, 8192, 16384)
    )


# Documents as they come: a few long ones hold most of the tokens, most are short, and no length is a multiple of a tile.
MIXED = (5213, 3071, 2047, 1543, 1021, 809, 613, 509, 397, 331, 257, 199, 127, 101, 67, 43, 19, 11, 5, 1)


def packed_16k() -> tuple[Workload, ...]:
    """16 384 tokens of packed causal sequences, heads x head dim = 2048: of equal lengths, to compare with a dense batch, and mixed."""
    equal = (4096,) * 4
    return (
        packed("packed-16k", equal, 16, 16, 128),
        packed("packed-16k-d64", equal, 32, 32, 64),
        packed("packed-16k-mixed", MIXED, 16, 16, 128),
        packed("packed-16k-d64-mixed", MIXED, 32, 32, 64),
        packed("packed-16k-llama3-8b-mixed", MIXED, 32, 8, 128),
    )


def odd_head_dims() -> tuple[Workload, ...]:
    """Head dims that are no power of two, on 16 384 tokens: 72 of SigLIP, 80 of Phi-2, 96 of Phi-3, 192 with 128 of DeepSeek-V3."""
    dims = {"d72": (72, 72, 16), "d80": (80, 80, 32), "d96": (96, 96, 32), "d192-128": (192, 128, 16)}
    return tuple(
        Workload(f"dims-{name}-s4096{'-causal' if causal else ''}", 4, 4096, 4096, heads, heads, head_dim, head_dim_v, causal)
        for name, (head_dim, head_dim_v, heads) in dims.items()
        for causal in (False, True)
    )


def _drawn(total: int, least: int, most: int) -> tuple[int, ...]:
    """Lengths drawn evenly from [least, most], the same every time; the last is what is left."""
    draw, lengths = random.Random(0), []
    while total > 0:
        lengths.append(min(draw.randint(least, most), total))
        total -= lengths[-1]
    return tuple(lengths)


def kinds() -> tuple[Workload, ...]:
    """Kinds of calls beside the plain causal one that they are to be compared with, by FLOPs of kept pairs: grouped heads, a window of
    1024 keys, packed sequences of very different lengths."""
    window = [(64, 32), (128, 16)]
    lengths = _drawn(32768, 64, 8192)
    return (
        square("mha-64-s8192", 2, 8192, 64, 64, 128, True),
        square("gqa-64-8-s8192", 2, 8192, 64, 8, 128, True),
        *(square(f"causal-d{head_dim}-s16384", 1, 16384, heads, heads, head_dim, True) for head_dim, heads in window),
        *(
            replace(square(f"window-1024-d{head_dim}-s16384", 1, 16384, heads, heads, head_dim, True), window=(1023, 0))
            for head_dim, heads in window
        ),
        *(packed(f"packed-32k-drawn-d{head_dim}", lengths, heads, heads, head_dim) for head_dim, heads in window),
    )


def models() -> tuple[Workload, ...]:
    """Attention of models that people run, 16 384 tokens each, causal: their heads, head dims and windows, from the papers and cards.

    gpt-oss keeps 128 keys in every other layer, the query's own among them. DeepSeek-V3 is the form in which it is trained, with the
    latent expanded: 192 for queries and keys, 128 for values.
    """
    made = {"llama3-70b": (64, 8, 128), "qwen3-32b-64-8": (64, 8, 128), "qwen3-235b-64-4": (64, 4, 128), "gpt-oss-full": (64, 8, 64)}
    lengths = {"llama3-70b": (2048, 8192), "qwen3-32b-64-8": (4096, 16384), "qwen3-235b-64-4": (4096,), "gpt-oss-full": (2048, 8192)}
    grouped = [
        square(f"{name}-s{seqlen}", 16384 // seqlen, seqlen, *made[name], True) for name, found in lengths.items() for seqlen in found
    ]
    window = [
        replace(square(f"gpt-oss-window-128-s{seqlen}", 16384 // seqlen, seqlen, 64, 8, 64, True), window=(127, 0))
        for seqlen in (2048, 8192)
    ]
    latent = [Workload(f"deepseek-v3-s{seqlen}", 16384 // seqlen, seqlen, seqlen, 128, 128, 192, 128, True) for seqlen in (2048, 8192)]
    return (*(workload for workload in llama3_8b() if workload.seqlen_q in (2048, 8192)), *grouped, *window, *latent)


def _log_normal(total: int, median: int, sigma: float, most: int) -> tuple[int, ...]:
    """Lengths whose logarithm is normal, as those of documents nearly are; the same every time, the last is what is left."""
    draw, lengths = random.Random(0), []
    while total > 0:
        lengths.append(min(max(1, round(draw.lognormvariate(math.log(median), sigma))), most, total))
        total -= lengths[-1]
    return tuple(lengths)


def varlen() -> tuple[Workload, ...]:
    """32 768 tokens of packed causal documents: lengths log-normal around a median of 500, up to 8192, in batches of multi-head and grouped
    attention, and of chat turns (median 120)."""
    documents, turns = _log_normal(32768, 500, 1.2, 8192), _log_normal(32768, 120, 0.9, 2048)
    return (
        packed("varlen-documents-d64", documents, 32, 32, 64),
        packed("varlen-documents-d128", documents, 16, 16, 128),
        packed("varlen-documents-gqa-32-8", documents, 32, 8, 128),
        packed("varlen-turns-d128", turns, 16, 16, 128),
        packed("varlen-turns-gqa-32-8", turns, 32, 8, 128),
    )


def short() -> tuple[Workload, ...]:
    """Sequences of a tile or two, 16 384 tokens a batch: what is left of a kernel when its loop hardly runs."""
    return tuple(
        square(f"short-d{head_dim}-s{seqlen}{'-causal' if causal else ''}", 16384 // seqlen, seqlen, heads, heads, head_dim, causal)
        for head_dim, heads in ((64, 16), (128, 16))
        for causal in (False, True)
        for seqlen in (64, 128, 197, 256)
    )


def papers() -> tuple[Workload, ...]:
    """Shapes that papers measured: GPT-2 medium's attention (Dao et al. 2022, figure 2: S 1024, D 64, 16 heads, batch 64), fp16."""
    return tuple(
        square(f"gpt2-medium-s1024{'-causal' if causal else ''}", 64, 1024, 16, 16, 64, causal, "float16") for causal in (False, True)
    )


def smoke() -> tuple[Workload, ...]:
    """Tiny shapes that take every path of the benchmark in seconds on a CPU; their speeds mean nothing.

    float16, because Triton's interpreter takes the bits of bfloat16 operands of a dot for integers.
    """
    return (
        square("smoke-d64-s128", 1, 128, 2, 2, 64, False, "float16"),
        square("smoke-d64-s192-causal", 2, 192, 2, 2, 64, True, "float16"),
        square("smoke-gqa-s128-causal", 1, 128, 4, 2, 32, True, "float16"),
        packed("smoke-packed-causal", (100, 1, 27), 2, 1, 32, dtype="float16"),
    )


SUITES = {
    "fa3": fa3_grid(), "llama3": llama3_8b(), "packed": packed_16k(), "dims": odd_head_dims(), "kinds": kinds(), "models": models(),
    "varlen": varlen(), "short": short(), "papers": papers(), "smoke": smoke(),
}  # fmt: skip
WORKLOADS = {workload.name: workload for suite in SUITES.values() for workload in suite}


def select(
    suite: str, seqlens: tuple[int, ...] | None = None, head_dims: tuple[int, ...] | None = None, match: str = ""
) -> tuple[Workload, ...]:
    """The workloads of a suite whose (longest) length, head dim and name (a substring) were asked for; ValueError when none is left."""
    if suite not in SUITES:
        raise ValueError(f"suite is {suite!r}; known are {', '.join(SUITES)}")
    chosen = tuple(
        w
        for w in SUITES[suite]
        if (not seqlens or w.seqlen_q in seqlens) and (not head_dims or w.head_dim in head_dims) and match in w.name
    )
    if not chosen:
        raise ValueError(f"no workload of suite {suite!r} has seqlens {seqlens}, head_dims {head_dims} and {match!r} in its name")
    return chosen
