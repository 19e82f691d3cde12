"""What a profiler shows for the launches of these kernels: see kernels/common/profile.py. Delta has nothing but bytes, all its cost."""

from ..common.profile import metadata, total_bytes
from ..structs import Extras, View


def _tensors(args):
    """q, k, ... are Views, lse and delta tensors, and of Extras the bias counts; cumulative lengths, in a tuple of their own, are none."""
    return [arg.ptr if isinstance(arg, View) else arg.bias if isinstance(arg, Extras) else arg for arg in args.values()]


def _metadata(args, name, products_d, products_dv):
    tile = args["TILE"]
    return metadata(name, args, args["heads_kv"], tile.head_dim, tile.head_dim_v, _tensors(args), products_d, products_dv)


def forward_metadata(grid, kernel, args):
    return _metadata(args, "attn_fwd", 1, 1)


def tangent_metadata(grid, kernel, args):
    """Beside the forward's two: a product for each tangent of q, k and v, and P ts times v where scores have tangents."""
    tq, tk, tv = (args[name] is not None for name in ("tq", "tk", "tv"))
    return _metadata(args, "attn_jvp", 1 + tq + tk, 1 + (tq or tk) + tv)


def delta_metadata(grid, kernel, args):
    shape = f"b{args['batch']}_q{args['total_q']}_h{args['heads_q']}_d{args['TILE'].head_dim_v}"
    return {"name": f"attn_bwd_delta[{shape}]"} | total_bytes(_tensors(args))


def dkdv_metadata(grid, kernel, args):
    """Either gradient takes the scores and its own product, dK that with v as well."""
    dk, dv = args["SPEC"].need_dk, args["SPEC"].need_dv
    return _metadata(args, "attn_bwd_" + "dk" * dk + "dv" * dv, 1 + dk, dk + dv)


def shifts_metadata(grid, kernel, args):
    """Of few rows the scores are made again; which, nobody knows here."""
    shape = f"b{args['batch']}_q{args['total_q']}_k{args['total_k']}_h{args['heads_q']}"
    return {"name": f"attn_bwd_shifts[{shape}]"} | total_bytes([args["lse"], args["shifts"]])


def dbias_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dbias", 1, 1)


def dq_metadata(grid, kernel, args):
    return _metadata(args, "attn_bwd_dq", 2, 1)
