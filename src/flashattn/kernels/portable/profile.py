"""What a profiler shows for a launch: name with shape, FLOPs and bytes (Proton and other users of Triton's launch hooks read these).

Runs on the host, only while a launch hook is set. FLOPs and bytes are there for dense calls without a mask: under a mask the work depends
on more than a launch should count, and packed lengths live on the GPU.
"""

from ..structs import SIZES


def _metadata(args, name, products_d, products_dv):
    total_q, total_k, batch, heads_q, heads_kv = (args[size] for size in SIZES[:5])
    spec, tile, itemsize = args["SPEC"], args["TILE"], args["q"].ptr.element_size()
    shape = f"q{total_q}_k{total_k}_h{heads_q}/{heads_kv}_d{tile.head_dim}/{tile.head_dim_v}"
    found = {"name": f"{name}[{shape}]"}
    if not (spec.varlen or spec.left or spec.right):
        pairs = 2 * batch * heads_q * total_q * total_k
        found[f"flops{itemsize * 8}"] = pairs * (products_d * tile.head_dim + products_dv * tile.head_dim_v)
        rows = batch * (heads_q * total_q + heads_kv * total_k)
        found["bytes"] = itemsize * rows * (tile.head_dim + tile.head_dim_v)
    return found


def forward_metadata(grid, kernel, args):
    return _metadata(args, "attn_fwd", 1, 1)


def dkdv_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dkdv", 2, 2)


def dq_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dq", 2, 1)
