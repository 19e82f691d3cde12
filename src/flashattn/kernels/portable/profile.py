"""What a profiler shows for a launch: name with shape, FLOPs and bytes (Proton and other users of Triton's launch hooks read these).

Runs on the host, only while a launch hook is set. FLOPs are those of the products over the pairs that the mask keeps, and of all that this
kernel computes: each backward pass rebuilds the scores, so together they count more than `flashattn.explain` does. Packed calls have none,
since their lengths live on the GPU. Bytes are every tensor once, in its full extent; delta has nothing else, as they are all its cost.
"""

from ..structs import View


def _bytes(args):
    """q, k, ... are Views, lse and delta tensors; cumulative lengths and what is None count nothing."""
    tensors = [arg.ptr if isinstance(arg, View) else arg for arg in args.values()]
    return {"bytes": sum(tensor.nbytes for tensor in tensors if hasattr(tensor, "nbytes"))}


def _clipped_sum(first, count, top):
    """sum over i in [0, count) of clip(first + i, 0, top)"""

    def triangle(n):
        return n * (n + 1) // 2 if n > 0 else 0

    def ramp(start):  # sum over i in [0, count) of max(start + i, 0)
        return triangle(start + count - 1) - triangle(start - 1)

    return ramp(first) - ramp(first - top)


def _kept_pairs(args):
    """(query, key) pairs that a dense mask keeps in one head: row i sees the keys from i + diagonal - left to i + diagonal + right."""
    rows_q, rows_k, spec = args["total_q"], args["total_k"], args["SPEC"]
    diagonal = 0 if spec.top_left else rows_k - rows_q
    ends = _clipped_sum(diagonal + args["right"] + 1, rows_q, rows_k) if spec.right else rows_q * rows_k
    starts = _clipped_sum(diagonal - args["left"], rows_q, rows_k) if spec.left else 0
    return ends - starts


def _metadata(args, name, products_d, products_dv):
    """products_d, products_dv: how many products of a tile run along the head dim of q and k, and along that of v."""
    tile, spec = args["TILE"], args["SPEC"]
    rows = f"b{args['batch']}_q{args['total_q']}_k{args['total_k']}"
    found = {"name": f"{name}[{rows}_h{args['heads_q']}/{args['heads_kv']}_d{tile.head_dim}/{tile.head_dim_v}]"} | _bytes(args)
    if not spec.varlen:
        pairs = args["batch"] * args["heads_q"] * _kept_pairs(args)
        bits = 8 * args["q"].ptr.element_size()
        found[f"flops{bits}"] = 2 * pairs * (products_d * tile.head_dim + products_dv * tile.head_dim_v)
    return found


def forward_metadata(grid, kernel, args):
    return _metadata(args, "attn_fwd", 1, 1)


def delta_metadata(grid, kernel, args):
    shape = f"b{args['batch']}_q{args['total_q']}_h{args['heads_q']}_d{args['TILE'].head_dim_v}"
    return {"name": f"attn_bwd_delta[{shape}]"} | _bytes(args)


def dkdv_metadata(grid, kernel, args):
    """Either gradient takes the scores and its own product, dK that with v as well."""
    dk, dv = args["SPEC"].need_dk, args["SPEC"].need_dv
    return _metadata(args, "attn_bwd_" + "dk" * dk + "dv" * dv, 1 + dk, dk + dv)


def dq_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dq", 2, 1)
