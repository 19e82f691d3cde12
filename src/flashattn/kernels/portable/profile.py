"""What a profiler shows for a launch: name with shape, FLOPs and bytes (Proton and other users of Triton's launch hooks read these).

Runs on the host, only while a launch hook is set. FLOPs and bytes are there for dense calls without a mask: under a mask the work depends
on more than a launch should count, and packed lengths live on the GPU.
"""


def _metadata(args, name, products_d, products_dv):
    q, seqlens, order, spec, tile = args["q"], args["seqlens"], args["order"], args["SPEC"], args["TILE"]
    shape = f"q{seqlens.q}_k{seqlens.k}_h{order.heads_q}/{order.heads_kv}_d{tile.head_dim}/{tile.head_dim_v}"
    found = {"name": f"{name}[{shape}]"}
    if not (spec.varlen or spec.left or spec.right):
        batch = seqlens.batch
        pairs = 2 * batch * order.heads_q * seqlens.q * seqlens.k
        itemsize = q.ptr.element_size()
        found[f"flops{itemsize * 8}"] = pairs * (products_d * tile.head_dim + products_dv * tile.head_dim_v)
        rows = batch * (order.heads_q * seqlens.q + order.heads_kv * seqlens.k)
        found["bytes"] = itemsize * rows * (tile.head_dim + tile.head_dim_v)
    return found


def forward_metadata(grid, kernel, args):
    return _metadata(args, "attn_fwd", 1, 1)


def dkdv_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dkdv", 2, 2)


def dq_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dq", 2, 1)
