"""What a profiler shows for a launch of the forward: see kernels/common/profile.py."""

from ..common.profile import metadata


def forward_metadata(grid, kernel, args):
    """What a descriptor describes is its `base`; the counter of tiles counts nothing."""
    tensors = [getattr(args[name], "base", args[name]) for name in ("q_desc", "k_desc", "v_desc", "out", "lse")]
    head_dim, head_dim_v = (tensors[i].shape[-1] for i in (0, 2))
    return metadata("attn_fwd_hopper", args, args["heads_q"] // args["group"], head_dim, head_dim_v, tensors)
