"""Turns of programs whose parts of a sum must come in a fixed order.

A number in global memory counts the parts that have been added. The surprising fact: that a part has left says nothing to others. Its
sender waits until it has arrived, and only then the number is raised. That takes a microsecond, in which the next part is made.
"""

from .gluon import gl, gluon


@gluon.jit
def await_turn(number, earlier):
    """Until so many tiles have added their part, and what they added is there for the copy engine too."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred early;
        .reg .b32 added;
        ASK: ld.acquire.gpu.global.b32 added, [$1];
        setp.lt.s32 early, added, $2;
        @early bra ASK;
        bar.warp.sync 0xffffffff;
        fence.proxy.async;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [number.to(gl.int64), earlier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def give_turn(number):
    """All that this warp has sent has arrived (not only left), and one more tile has added its part."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .b32 lane;
        cp.async.bulk.wait_group 0;
        fence.proxy.async;
        bar.warp.sync 0xffffffff;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l", [number.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
