"""What a profiler shows for the launches of these kernels: see kernels/common/profile.py."""

from ..common.profile import metadata, total_bytes


def _tensors(args):
    """What a descriptor describes is its `base`; a View, its `ptr`."""
    return [getattr(arg, "base", getattr(arg, "ptr", arg)) for arg in args.values()]


def forward_metadata(grid, kernel, args):
    """The counter of tiles counts nothing."""
    tensors = _tensors({name: args[name] for name in ("q_desc", "k_desc", "v_desc", "out", "lse")})
    head_dim, head_dim_v = (tensors[i].shape[-1] for i in (0, 2))
    return metadata("attn_fwd_hopper", args, args["heads_q"] // args["group"], head_dim, head_dim_v, tensors)


def backward_metadata(grid, kernel, args):
    """Counts the products that the wanted gradients take, and dQ's sums as read and written once."""
    spec = args["SPEC"]
    names = ("q_desc", "k_desc", "v_desc", "do_desc", "rows_desc", "dq_desc", "dk", "dv")
    tensors = _tensors({name: args[name] for name in names})
    ds = spec.need_dq or spec.need_dk
    args = dict(args) | {"heads_q": args["heads_kv"] * args["group"]}
    head_dim, head_dim_v = tensors[0].shape[-1], tensors[3].shape[-1]
    return metadata(
        "attn_bwd_hopper", args, args["heads_kv"], head_dim, head_dim_v, tensors, 1 + spec.need_dq + spec.need_dk, ds + spec.need_dv
    )


def _pass_metadata(name, args):
    shape = f"b{args['batch']}_q{args['total_q']}_h{args['heads_q']}_d{args['TILE'].head_dim}/{args['TILE'].head_dim_v}"
    return {"name": f"{name}[{shape}]"} | total_bytes(_tensors(args))


def before_metadata(grid, kernel, args):
    return _pass_metadata("attn_bwd_hopper_before", args)


def after_metadata(grid, kernel, args):
    return _pass_metadata("attn_bwd_hopper_after", args)
