"""The one place that knows how Triton's versions spell Gluon. Names here are those of the newest version.

Triton 3.8 renamed the copies and 3.9 took the old names away (they are still there, and raise), so the new names are looked for first.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor", "async_add", "async_load", "async_store", "barrier", "fence_async_shared", "gl", "gluon", "mbarrier",
    "reinterpret", "store_wait", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
store_wait = tma.store_wait
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_REINTERPRET = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory under another shape and layout."""
    return getattr(memory, _REINTERPRET)(dtype, shape, layout, _semantic=_semantic)


@builtin
def _add(desc, coord, tile, _semantic=None):
    """Triton 3.6 and 3.7 have the instruction, and no name for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, tile.handle)


async_add = tma.async_atomic_add if hasattr(tma, "async_atomic_add") else _add
