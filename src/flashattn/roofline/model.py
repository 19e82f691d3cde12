"""A whole transformer in matrix products, and model FLOPs utilisation: how much of the peak a training run turns into useful work.

Legend, as papers write it: C width, L layers, H query heads, V vocabulary, M tokens of one forward pass, N parameters, T sequence length.

Surprising fact: what makes a forward pass compute-bound is the number of tokens M and hardly anything else. Each weight is read once
and used M times, so the intensity starts at 1 FLOP/byte for one token and grows with M until the activations count.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from .gpus import GPU
from .work import Work, check_positive, check_sizes, matmul


@dataclass(frozen=True)
class Transformer:
    """A decoder: per layer Q, K, V and the output projection, and an MLP of `gates` matrices into and one out of `hidden`; one head.

    width C, heads H, layers L, vocab V; heads_kv: of keys and values (default: H). hidden: default 4 C. gates: 2 for SwiGLU, 1 for GELU.
    """

    width: int
    heads: int
    layers: int
    vocab: int
    heads_kv: int | None = None
    hidden: int | None = None
    gates: int = 1

    def __post_init__(self) -> None:
        check_sizes(width=self.width, heads=self.heads, layers=self.layers, vocab=self.vocab, gates=self.gates)
        check_sizes(**{name: size for name, size in (("heads_kv", self.heads_kv), ("hidden", self.hidden)) if size is not None})
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: expected a multiple of heads={self.heads}")
        if self.heads % (self.heads_kv or self.heads):
            raise ValueError(f"heads={self.heads}: expected a multiple of heads_kv={self.heads_kv}")

    def matmuls(self) -> dict[str, tuple[int, int, int]]:
        """{name: (k, n, how often)}: every product [M, k] x [k, n] of a forward pass."""
        kv = self.width // self.heads * (self.heads_kv or self.heads)
        hidden = self.hidden or 4 * self.width
        return {
            "query": (self.width, self.width, self.layers),
            "key and value": (self.width, kv, 2 * self.layers),
            "output": (self.width, self.width, self.layers),
            "mlp in": (self.width, hidden, self.gates * self.layers),
            "mlp out": (hidden, self.width, self.layers),
            "head": (self.width, self.vocab, 1),
        }

    def parameters(self) -> int:
        """Of the products; the head's matrix is the embedding's too, or as large."""
        return sum(count * k * n for k, n, count in self.matmuls().values())

    def forward(self, tokens: int, itemsize: int = 2) -> Work:
        """All products of one pass over `tokens` tokens; each weight read once, each activation in and out of memory."""
        check_sizes(tokens=tokens)
        total = Work(0, 0)
        for k, n, count in self.matmuls().values():
            one = matmul(tokens, k, n, itemsize)
            total += Work(count * one.flops, count * one.bytes)
        return total

    def row(self, itemsize: int = 2) -> tuple[float, float, float]:
        """(bytes of the weights, FLOPs a token, bytes of activations a token): `forward(M)` is M times the latter two, plus the first."""
        weights = itemsize * self.parameters()
        one = self.forward(1, itemsize)
        return weights, one.flops, one.bytes - weights


MODELS = {  # what their makers published of them: Llama 3 (Grattafiori et al. 2024), table 3; GPT-2 (Radford et al. 2019), table 2
    "llama3-8b": Transformer(4096, 32, 32, 128256, 8, 14336, 2),
    "llama3-70b": Transformer(8192, 64, 80, 128256, 8, 28672, 2),
    "llama3-405b": Transformer(16384, 128, 126, 128256, 8, 53248, 2),
    "gpt2-medium": Transformer(1024, 16, 24, 50257),
}


def train_flops_per_token(parameters: int, layers: int = 0, width: int = 0, seqlen: int = 0, causal: bool = False) -> float:
    """FLOPs of a forward and a backward pass for one token: 6 N + 12 L C T, of which the second term is attention's.

    6 N: 2 forward and 4 backward for each of the N parameters. 12 L C T: q k^T and p v over T = seqlen keys, three times 4 C T in each of
    L = layers layers of C = width = heads x head_dim; half of it when the mask is causal. Without layers, width and seqlen the attention
    term is left out. ValueError if only some of the three are given.

    Source: Chowdhery et al. 2022 (PaLM), appendix B; the half is not in it.
    """
    check_sizes(parameters=parameters)
    if any((layers, width, seqlen)):
        check_sizes(layers=layers, width=width, seqlen=seqlen)
    return 6 * parameters + 12 * layers * width * seqlen / (2 if causal else 1)


def mfu(flops_per_token: float, tokens_per_second: float, peak: float, gpus: int = 1) -> float:
    """Model FLOPs utilisation: flops_per_token x tokens_per_second (of all GPUs together) over `peak` FLOP/s of each of the `gpus`.
    ValueError unless all are positive and finite.

    Source: Chowdhery et al. 2022 (PaLM), section 4.1.
    """
    check_positive(flops_per_token=flops_per_token, tokens_per_second=tokens_per_second, peak=peak, gpus=gpus)
    return flops_per_token * tokens_per_second / (peak * gpus)


def useful_flops(utilisation: float, peak: float, gpus: int = 1) -> float:
    """FLOP/s that `gpus` GPUs of `peak` FLOP/s turn into useful work at an MFU of `utilisation`. ValueError unless that is in (0, 1]."""
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation={utilisation!r}: expected more than 0 and at most 1")
    return utilisation * peak * gpus


def training_days(flops: float, useful: float) -> float:
    """Days that `flops` FLOPs take at `useful` FLOP/s."""
    return flops / useful / 86400


@dataclass(frozen=True)
class Reading:
    """Of one interval: tokens/s of all GPUs together, and the MFU (None where the peak isn't known)."""

    tokens_per_second: float
    mfu: float | None


class MFUMeter:
    """Tokens/s and MFU of a training loop, interval by interval.

        meter = MFUMeter(train_flops_per_token(parameters, layers, width, seqlen, causal=True), gpus.detect(name))
        meter.start()
        for step in range(steps):
            ...                                # and read the loss, or synchronise: the clock is the host's
            print(meter.lap(tokens_per_step))

    flops_per_token: of forward and backward. gpu: of the table, or None: then there is no MFU. dtype: of the products. gpus: how many.
    clock: seconds, for tests. `lap` raises RuntimeError before `start`.
    """

    def __init__(
        self,
        flops_per_token: float,
        gpu: GPU | None,
        dtype: str = "bfloat16",
        gpus: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.flops_per_token, self.gpus, self.clock = flops_per_token, gpus, clock
        self.peak = None if gpu is None else gpu.peak(dtype)
        self.since: float | None = None

    def start(self) -> None:
        """The interval begins now: what happened since the last lap (a validation, say) doesn't count."""
        self.since = self.clock()

    def lap(self, tokens: int) -> Reading:
        """The interval that ends now, in which `tokens` tokens were trained on; the next one begins."""
        if self.since is None:
            raise RuntimeError("lap before start: call start() where the interval begins")
        now = self.clock()
        rate, self.since = tokens / (now - self.since), now
        return Reading(rate, mfu(self.flops_per_token, rate, self.peak, self.gpus) if self.peak else None)
