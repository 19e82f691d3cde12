"""Score and mask programs: records of what changes scores and what keeps pairs, each with a device function and its twin in torch.

A kernel runs the device function on every tile of scores that it has made, the oracle and the eager path run the twin, and operators, whose
schemas hold no functions, take the key of a record. Nothing here imports Triton: device functions that ship with the library are named by a
dotted path and found when a kernel wants them.

The surprising fact: a name is no key. Whoever makes another record of a name that is taken, as an edited cell of a notebook does, gets
another key, so that nothing compiled, chosen or remembered for the old one serves the new one, and a backward belongs to its own forward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor

SIZES = "batch", "heads_q", "seqlen_q", "seqlen_k"  # of a call
DEVICE = "flashattn.kernels.common.mods."  # where those that ship are
_lock = Lock()


@dataclass(frozen=True)
class _Mod:
    name: str

    records: ClassVar[dict[str, Any]]  # by key; one that was made is never forgotten, since a graph may hold its key
    newest: ClassVar[dict[str, Any]]  # by name
    kind: ClassVar[str]
    functions: ClassVar[tuple[str, ...]]

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name={self.name!r} of a {type(self).__name__}: expected a string that isn't empty")
        for member in self.functions:
            function = getattr(self, member)
            if not (isinstance(function, str) or hasattr(function, "fn")) and not (member == "backward" and function is None):
                what = "a @triton.jit function or the dotted path of one" + ", or None" * (member == "backward")
                raise TypeError(f"{member} of {self.kind} {self.name!r} is a {type(function).__name__}: expected {what}")
        if not callable(self.twin):
            raise TypeError(f"twin of {self.kind} {self.name!r} is a {type(self.twin).__name__}: expected a function of torch tensors")
        if not isinstance(self.aux, tuple) or not all(isinstance(name, str) for name in self.aux):
            raise TypeError(f"aux={self.aux!r} of {self.kind} {self.name!r}: expected a tuple of names, one a tensor that it reads")
        if self.shapes is not None and not self._are_shapes(self.shapes):
            known = ", ".join(map(repr, SIZES))
            expected = f"None, or a tuple of sizes for each of {self.aux}: numbers, None for any, or {known}"
            raise TypeError(f"shapes={self.shapes!r} of {self.kind} {self.name!r}: expected {expected}")
        with _lock:
            same = [record for record in self.records.values() if record == self]
            key, count = self.name, 1
            while key in self.records:
                count += 1
                key = f"{self.name}#{count}"
            key = same[0].key if same else key
            object.__setattr__(self, "key", key)
            self.records.setdefault(key, self)
            self.newest[self.name] = self

    def _are_shapes(self, shapes) -> bool:
        if not isinstance(shapes, tuple) or len(shapes) != len(self.aux) or not all(isinstance(shape, tuple) for shape in shapes):
            return False
        return all(size is None or size in SIZES or (isinstance(size, int) and size >= 0) for shape in shapes for size in shape)

    def __copy__(self):  # a record says what it is and never changes
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):  # made again where it is unpickled, so that it is registered there
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)


@dataclass(frozen=True)
class ScoreMod(_Mod):
    r"""What changes every score, after the scale, softcap, ALiBi and bias and before the mask: s' = f(s, b, h, i, j).

    Made once, at the top of a module. To make a record registers it: `attention(score_mod="name")` is the newest record of that name.

    Args:
        name: of the program.
        forward: a ``@triton.jit`` function ``(score, batch, head, q_idx, kv_idx, aux) -> score``. score: a float32 tile in natural units.
            batch, head: numbers, the head one of q's; of a packed call batch is the number of the sequence. q_idx, kv_idx: int32, the
            positions of its rows and keys in their sequence, counted from 0, as ``[rows, 1]`` and ``[1, keys]`` or transposed, so the
            function must be elementwise and broadcast, and call no arange, dot or reduction. Positions of pairs past the end of a tile are
            those of the last row or key there is, so what is read by them exists. aux: a tuple of the tensors, which
            `flashattn.kernels.common.mods.read` reads: ``read(aux[0], head, kv_idx)`` is ``aux[0][head, kv_idx]``, of booleans bytes; each
            has ``ptr``, ``shape`` and ``strides``, too. None without any.
        backward: ``(dscore, score, batch, head, q_idx, kv_idx, aux) -> d score``, with the score that `forward` was given: dscore times
            the derivative. None: there is none, and a backward that needs it is refused, when it runs.
        twin: the same in torch, ``(score, batch, head, q_idx, kv_idx, *aux) -> score`` of a score ``[batch, heads, rows, keys]`` and int64
            indices that broadcast to it: a `score_mod` of FlexAttention, with what it would capture given as aux. Differentiable.
        aux: names of the tensors that it reads, in order, which are given with each call.
        adds: says that f only adds to a score, s + g(b, h, i, j). Then tensors that it reads have a gradient in dense calls: where one
            requires it, g is made by the twin, with all its quadratic memory, and goes the way of a bias. Default False: none has one.
        shapes: of the tensors that it reads, a tuple of sizes each: numbers, None for any, or of the call ``"batch"`` (packed: sequences),
            ``"heads_q"``, ``"seqlen_q"``, ``"seqlen_k"`` (packed: any). A call with others is refused. Default None: whatever comes is
            read, and a kernel doesn't notice where a tensor ends.

    Raises:
        TypeError: an argument is none of these.

    Source: Dong et al. 2024 (FlexAttention), section 3, for programs of single scores.
    """

    forward: Any
    backward: Any
    twin: Callable[..., Tensor]
    aux: tuple[str, ...] = ()
    adds: bool = False
    shapes: tuple[tuple[int | str | None, ...], ...] | None = None
    key: str = field(init=False, compare=False, repr=False, default="")

    records: ClassVar[dict[str, "ScoreMod"]] = {}
    newest: ClassVar[dict[str, "ScoreMod"]] = {}
    kind: ClassVar[str] = "score_mod"
    functions: ClassVar[tuple[str, ...]] = ("forward", "backward")


@dataclass(frozen=True)
class MaskMod(_Mod):
    """What keeps a pair of a query and a key, beside causal and window: K(i) has only keys j with g(b, h, i, j).

    Registered as a `ScoreMod` is. All keys inside of causal and window are walked, whatever it keeps of them.

    Args:
        name: of the program.
        keep: a ``@triton.jit`` function ``(batch, head, q_idx, kv_idx, aux) -> bool`` of a tile, True where the pair attends, with
            arguments as the forward of a `ScoreMod` has them.
        twin: the same in torch, ``(batch, head, q_idx, kv_idx, *aux) -> bool``: a `mask_mod` of FlexAttention.
        aux: names of the tensors that it reads, in order.
        shapes: theirs, as in a `ScoreMod`.

    Raises:
        TypeError: an argument is none of these.
    """

    keep: Any
    twin: Callable[..., Tensor]
    aux: tuple[str, ...] = ()
    shapes: tuple[tuple[int | str | None, ...], ...] | None = None
    key: str = field(init=False, compare=False, repr=False, default="")

    records: ClassVar[dict[str, "MaskMod"]] = {}
    newest: ClassVar[dict[str, "MaskMod"]] = {}
    kind: ClassVar[str] = "mask_mod"
    functions: ClassVar[tuple[str, ...]] = ("keep",)


def device_function(function: Any) -> Any:
    """The @triton.jit function of a record's member; imports Triton if it ships with the library."""
    if not isinstance(function, str):
        return function
    module, _, name = function.rpartition(".")
    return getattr(import_module(module), name)


def indices(sequences: Tensor, heads: slice, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch, head, q_idx, kv_idx) as a twin takes them: int64, to broadcast to [sequences, heads, rows, keys]. rows, keys: positions."""
    head = torch.arange(heads.start, heads.stop, device=rows.device)
    return sequences[:, None, None, None], head[:, None, None], rows[:, None], keys


def apply_score_mod(mod: ScoreMod, score: Tensor, where: tuple[Tensor, ...], aux: tuple[Tensor, ...]) -> Tensor:
    """What the twin makes of score [batch, heads, rows, keys]: as large, in its dtype."""
    found = mod.twin(score, *where, *aux)
    if not isinstance(found, Tensor):
        raise TypeError(f"the twin of score_mod {mod.name!r} returned a {type(found).__name__}: expected a tensor of scores")
    return found.to(score.dtype).expand(score.shape)


def apply_mask_mod(mod: MaskMod, where: tuple[Tensor, ...], aux: tuple[Tensor, ...]) -> Tensor:
    """Which pairs the twin keeps: bool, to broadcast to [batch, heads, rows, keys]."""
    found = mod.twin(*where, *aux)
    if not isinstance(found, Tensor) or found.dtype != torch.bool:
        came = f"{found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise TypeError(f"the twin of mask_mod {mod.name!r} returned {came}: expected a torch.bool tensor")
    return found


def added_by(mod: ScoreMod, aux: tuple[Tensor, ...], batch: int, heads: int, rows: int, keys: int) -> Tensor:
    """What a mod that `adds` adds to scores, float32, broadcast to [batch, heads, rows, keys]; differentiable in aux."""
    entries, row, key = (torch.arange(size, device=aux[0].device) for size in (batch, rows, keys))
    return mod.twin(torch.zeros(1, 1, 1, 1, device=row.device), *indices(entries, slice(0, heads), row, key), *aux).float()


def t5_buckets(max_distance: int = 128, num_buckets: int = 32, bidirectional: bool = True, device=None) -> Tensor:
    """int32 [2 * max_distance + 1], the `buckets` of `relative_bias` as T5 has them: entry max_distance + d is the bucket of the distance
    d = kv_idx - q_idx, and distances past either end have that of the end.

    Half of the buckets of each direction hold one distance, the others grow with its logarithm up to max_distance. Without `bidirectional`,
    as in a decoder, keys behind the query share bucket 0. ValueError for num_buckets below 4 or a max_distance that they reach one by one.

    Source: Raffel et al. 2020 (T5), section 2.1.
    """
    distance = torch.arange(-max_distance, max_distance + 1)
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    if num_buckets < 4 or max_distance <= exact:
        raise ValueError(f"num_buckets={num_buckets}, max_distance={max_distance}: expected 4 or more, and more than {max(exact, 1)}")
    first = torch.where(distance > 0, count, 0) if bidirectional else torch.zeros_like(distance)
    apart = distance.abs() if bidirectional else (-distance).clamp(min=0)
    growth = torch.log(apart.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (count - exact)
    far = (exact + growth.to(torch.int64)).clamp(max=count - 1)
    return (first + torch.where(apart < exact, apart, far)).to(torch.int32).to(device)


def _softcap(score, batch, head, q_idx, kv_idx, cap):
    return cap * torch.tanh(score / cap)


def _alibi(score, batch, head, q_idx, kv_idx, slopes):
    return score - slopes[head] * (q_idx - kv_idx).abs()


def _relative_bias(score, batch, head, q_idx, kv_idx, table, buckets):
    reach = (len(buckets) - 1) // 2
    return score + table[buckets[(kv_idx - q_idx).clamp(-reach, reach) + reach].long(), head]


def _documents(batch, head, q_idx, kv_idx, ids_q, ids_k):
    return ids_q[batch, q_idx] == ids_k[batch, kv_idx]


def _prefix_lm(batch, head, q_idx, kv_idx, lengths):
    return (kv_idx <= q_idx) | (kv_idx < lengths[batch])


softcap = ScoreMod("softcap", DEVICE + "softcap", DEVICE + "softcap_gradient", _softcap, aux=("cap",), shapes=((1,),))
"""cap tanh(score / cap), with cap ``[1]``: what `softcap` is without a bias and ALiBi, which here are capped too."""
alibi = ScoreMod("alibi", DEVICE + "alibi", DEVICE + "unchanged", _alibi, ("slopes",), adds=True, shapes=(("heads_q",),))
"""score - slopes[head] |q_idx - kv_idx|, with slopes ``[heads_q]``: `alibi_slopes` where there are as many queries as keys."""
relative_bias = ScoreMod(
    "relative_bias", DEVICE + "relative_bias", DEVICE + "unchanged", _relative_bias, aux=("table", "buckets"), adds=True,
    shapes=((None, "heads_q"), (None,)),
)  # fmt: skip
"""score + table[buckets[kv_idx - q_idx], head], with table ``[buckets, heads_q]`` and buckets of `t5_buckets` or others, int32 of odd
length with that of distance 0 in the middle. A table that requires a gradient has one, see `ScoreMod.adds`."""
documents = MaskMod("documents", DEVICE + "documents", _documents, ("ids_q", "ids_k"), (("batch", "seqlen_q"), ("batch", "seqlen_k")))
"""Keeps keys of the query's document: ids_q ``[batch, seqlen_q]`` equal to ids_k ``[batch, seqlen_k]``, whole numbers. Negative ones are
ids as others are; to `BlockMask.from_document_ids` they are padding."""
prefix_lm = MaskMod("prefix_lm", DEVICE + "prefix_lm", _prefix_lm, ("lengths",), (("batch",),))
"""Keeps the keys up to the query, and all of the first lengths[batch], whole numbers ``[batch]``. Positions are counted from 0 on both
sides."""
