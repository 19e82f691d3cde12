"""How the operators are sharded over a mesh of devices: by heads or by batch entries, each device on its own, with nothing to exchange.

A DTensor with other placements (rows of a sequence sharded, partial sums) is redistributed before the call, which is what torch does where
no rule fits. Heads stay sharded only where the key/value heads divide evenly, so that a query head stays with the one it reads; packed
tensors have no batch dimension to shard.

The rules go by the names of the operators' arguments, and are told to torch when the first DTensor may come: importing DTensors takes half
of the time that importing torch does. The surprising fact: a compiler asks for a rule while it traces, so `ready` must really run then.
"""

import sys

import torch

HEADS, BATCH = "heads", "batch"
PLACES = {  # dimension of heads and of batch entries in a dense call, and of heads in a packed one; None: not in it
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv", "tq", "tk", "tv", "tout"), ((2, 0), 1)),
    **dict.fromkeys(("lse", "dlse", "tlse"), ((1, 0), 0)),
    "sinks": ((0, None), 0),
    **dict.fromkeys(("dsinks", "tsinks"), ((1, 0), 1)),
}
GRADIENTS = ("dq", "dk", "dv", "dsinks", "dbias")
RESULTS = {
    "flashattn::attn_fwd": ("out", "lse"),
    "flashattn::attn_bwd": GRADIENTS,
    "flashattn::attn_jvp": ("out", "lse", "tout", "tlse"),
    "flashattn::attn_second": GRADIENTS[:4],
}
BIAS = {HEADS: 1, BATCH: 0}  # dimensions of a bias and of its gradient; one of size 1 is whole everywhere
_told: set[str] = set()


def _dimension(name: str, spec, packed: bool, by: str) -> int | None:
    """The dimension of a tensor that is sharded `by` heads or batch; None if each device needs all of it. spec: of an argument, or None."""
    if name == "alibi_slopes":  # [heads] or [batch, heads]
        return spec.ndim - 1 if by == HEADS else 0 if spec.ndim == 2 else None
    if name == "cu_seqlens_k":  # of a dense call, lengths of keys [batch]
        return 0 if by == BATCH else None
    if name == "bias":
        return BIAS[by] if spec.shape[BIAS[by]] != 1 else None
    if name not in PLACES:
        return None
    (heads, batch), heads_packed = PLACES[name]
    return (heads_packed if packed else heads) if by == HEADS else batch


def _may_split_heads(given: dict, packed: bool) -> bool:
    """Whether heads are sharded already, over as many devices as divide the key/value heads, so that each has whole groups."""
    mesh, count = given["k"].mesh, 1
    tensors = [(name, arg) for name, arg in given.items() if hasattr(arg, "placements")]
    for place in range(mesh.ndim):
        if any(arg.placements[place].is_shard(_dimension(name, arg, packed, HEADS)) for name, arg in tensors if name in PLACES):
            count *= mesh.size(place)
    return count > 1 and given["k"].shape[-2] % count == 0


def _rule(operator):
    from torch.distributed.tensor import Partial, Replicate, Shard

    arguments = [argument.name for argument in operator._schema.arguments]
    results = RESULTS[operator._schema.name][: len(operator._schema.returns)]

    def shardings(*args):
        given = dict(zip(arguments, args, strict=False))
        packed = given["q"].ndim == 3

        def placements(by: str | None) -> tuple[list, list]:
            def place(name: str, spec=None):
                needless = name in GRADIENTS and not given.get(f"need_{name}")  # an empty tensor stands for it
                if name == "dbias" and by is not None and not needless:  # of what all devices share, each has a part of the sum
                    dim = _dimension("bias", given["bias"], packed, by)
                    return Partial() if dim is None else Shard(dim)
                dim = None if by is None or needless else _dimension(name, spec, packed, by)
                return Replicate() if dim is None else Shard(dim)

            tensors = [place(name, arg) if hasattr(arg, "placements") else None for name, arg in given.items()]
            return [place(name) for name in results], tensors

        ways = [None] + [HEADS] * _may_split_heads(given, packed) + [BATCH] * (not packed)
        return [placements(by) for by in ways]

    return shardings


def ready() -> None:
    """Tell torch the rules, once, if DTensors have been imported."""
    if not _told and "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.experimental import register_sharding

        _told.add("told")
        for name in RESULTS:
            operator = getattr(torch.ops.flashattn, name.removeprefix("flashattn::")).default
            register_sharding(operator)(_rule(operator))


ready._dynamo_marked_constant = True  # torch.compiler.assume_constant_result, which would import all of the compiler to say so
