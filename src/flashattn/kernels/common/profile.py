"""What a profiler shows for a launch: name with shape, FLOPs and bytes (Proton and other users of Triton's launch hooks read these).

Runs on the host, only while a launch hook is set. FLOPs are those of the products over the pairs that the mask keeps, and of all that this
kernel computes: each backward pass rebuilds the scores, so together they count more than `flashattn.explain` does. Packed calls have none,
since their lengths live on the GPU, nor have those with a block mask. Bytes are every tensor once, in its full extent.
"""


def total_bytes(tensors):
    """What is no tensor counts nothing."""
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


def metadata(name, args, heads_kv, head_dim, head_dim_v, tensors, products_d=1, products_dv=1):
    """tensors: q is the first. products_d, products_dv: how many products of a tile run along head_dim, and along head_dim_v."""
    heads = f"h{args['heads_q']}/{heads_kv}_d{head_dim}/{head_dim_v}"
    found = {"name": f"{name}[b{args['batch']}_q{args['total_q']}_k{args['total_k']}_{heads}]"} | total_bytes(tensors)
    if not (args["SPEC"].varlen or args["SPEC"].blocks):
        pairs = args["batch"] * args["heads_q"] * _kept_pairs(args)
        found[f"flops{8 * tensors[0].element_size()}"] = 2 * pairs * (products_d * head_dim + products_dv * head_dim_v)
    return found
