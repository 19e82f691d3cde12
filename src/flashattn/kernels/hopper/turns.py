"""Turns of programs whose parts of a sum must come in a fixed order, taken by a whole warpgroup that adds from registers."""

from .gluon import barrier, gl, gluon


@gluon.jit
def await_turn_together(number, earlier):
    """Until so many others have added their part."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 added;
        ASK: ld.acquire.gpu.global.b32 added, [$1];
        setp.lt.s32 early, added, $2;
        @early bra ASK;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [number.to(gl.int64), earlier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    barrier()


@gluon.jit
def give_turn_together(number):
    """What these warps have added is there, and one more has had its turn."""
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)
    barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 first, thread, 0;
        @first fence.acq_rel.gpu;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l", [number.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
