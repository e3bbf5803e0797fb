"""The least time that n dependent steps can take: chains of steps that do almost nothing. Needs Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["steps", "shift"])
def gather_chain(row, steps, shift, BLOCK: tl.constexpr):
    """A step of a row in registers: a gather among threads and one addition."""
    c = tl.arange(0, BLOCK)
    below = tl.maximum(c - shift, 0)
    x = tl.load(row + c)
    for _ in range(steps):
        x = tl.gather(x, below, 0) + 1.0
    tl.store(row + c, x)


@triton.jit(do_not_specialize=["steps", "shift"])
def memory_chain(row, steps, shift, BLOCK: tl.constexpr):
    """A step of a row in memory: a load, one addition, a store and a barrier."""
    c = tl.arange(0, BLOCK)
    below = tl.maximum(c - shift, 0)
    new_row = row + BLOCK
    for _ in range(steps):
        tl.store(new_row + c, tl.load(row + below) + 1.0)
        tl.debug_barrier()
        row, new_row = new_row, row
