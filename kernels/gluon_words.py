"""Weights in words of four e4m3 or eight e2m1 numbers, as Gluon kernels for an SM90 read them.

The chip's copying unit brings blocks of 16 words of an output to the shared memory, some steps ahead. Each thread
decodes its words to what the matrix unit wants of that thread as the left operand: of every 16 columns, four. So that
no number has to change its thread, the columns of a few words are multiplied in another order than they are stored
in, and the rows' columns as well: every product of a sum is there, in an order that is the same for all rows.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Words of an output in a step.
WORDS = 16

# Triton 3.9 has only the one name, 3.6 only the other.
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def blocks_of(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``tensor [n, k]``, contiguous and aligned to 16 bytes, to be read in blocks of ``[rows, columns]``."""
    block = [rows, columns]
    dtype = {torch.int32: gl.int32, torch.bfloat16: gl.bfloat16}[tensor.dtype]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@gluon.constexpr_function
def sums_layout(rows, warps):
    """Registers of the sums ``[outputs, rows]``: a warp has 16 outputs of every ``16 * warps``."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, rows, 16])


@gluon.constexpr_function
def words_layout(outputs, warps, words=WORDS):
    """Registers of 8 or 16 words of each output: each with the thread whose part of the left operand it becomes."""
    of_warps = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    repeats = [[16 * warps << i, 0] for i in range((outputs // (16 * warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], *repeats] if words == 16 else [[8, 0], [0, 4], *repeats],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=of_warps,
        block_bases=[],
        shape=[outputs, words],
    )


@gluon.constexpr_function
def stores_layout(outputs, warps, bits):
    """Registers of results ``[outputs, rows]`` of ``bits`` bits: a thread writes 16 bytes of a row."""
    lanes = min(32, outputs * bits // 128)
    return gl.BlockedLayout([128 // bits, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """A barrier for each stage, at which a step's two blocks arrive."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def fetch(weight, weight_row, word, words, x, row, column, columns, barriers, step, do, STAGES: gl.constexpr):
    """Copy a step's words and rows to the stage whose turn it is.

    Args:
        weight: Descriptor, by blocks of ``[outputs, WORDS]``.
        weight_row: First output.
        word: First word.
        words: Shared memory, ``[STAGES, outputs, WORDS]``.
        x: Descriptor, by blocks of ``[rows, columns of a step]``.
        row: First row.
        column: First column.
        columns: Shared memory, ``[STAGES, rows, columns of a step]``.
        barriers: Of :func:`new_barriers`.
        step: Its stage is ``step % STAGES``.
        do: Whether there is such a step.
        STAGES: Steps that are there or on their way.
    """
    stage = step % STAGES
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, weight.block_type.nbytes + x.block_type.nbytes, pred=do)
    load_block(weight, [weight_row, word], barrier, words.index(stage), pred=do)
    load_block(x, [row, column], barrier, columns.index(stage), pred=do)


@gluon.jit
def wait_for(barriers, step, STAGES: gl.constexpr):
    """Wait until what was fetched for a step is there."""
    mbarrier.wait(barriers.index(step % STAGES), (step // STAGES) & 1)


@gluon.jit
def twice_power(powers, EXTRA: gl.constexpr):
    """Words that hold ``2^(power - 127 + EXTRA)`` two times, in bfloat16, of UE8M0 bytes as int32.

    NaN for a byte of 255, and infinity where the power is too great for bfloat16. ``power + EXTRA`` is at least 1.
    """
    bits = gl.where(powers == 255, 0x7FC0, gl.minimum(powers + EXTRA, 255) << 7)
    return bits | (bits << 16)
