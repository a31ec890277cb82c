"""``mxfp8_cast``, with the definition's bits (``triton_formats.py``)."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.triton_formats import (
    encode_e4m3,
    magnitude_bits,
    reciprocal_ue8m0,
    scale_of_e4m3,
)

# Groups of 32 that a program quantises.
_GROUPS = 64


def mxfp8_cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    if x.shape[-1] % 32:
        raise ValueError(f"the last dimension is quantised in groups of 32, but it is {x.shape[-1]}")
    x = x.contiguous()
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // 32, dtype=torch.uint8, device=x.device)
    size = scales.numel()
    if size:
        _mxfp8_cast[(triton.cdiv(size, _GROUPS),)](values.view(torch.uint8), scales, x, size, GROUPS=_GROUPS)
    return values, scales


@triton.jit
def quantise_mxfp8(x):
    """Bytes ``[groups, 32]`` and UE8M0 scales ``[groups]``, both as int32, of float32 ``x [groups, 32]``."""
    codes = scale_of_e4m3(tl.max(magnitude_bits(x), axis=1))
    return encode_e4m3(x * reciprocal_ue8m0(codes)[:, None]), codes


@triton.jit(do_not_specialize=["size"])
def _mxfp8_cast(values, scales, x, size, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    present = group < size
    place = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    wide = tl.load(x + place, mask=present[:, None], other=0.0).to(tl.float32)
    codes, powers = quantise_mxfp8(wide)
    tl.store(values + place, codes.to(tl.uint8), mask=present[:, None])
    tl.store(scales + group, powers.to(tl.uint8), mask=present)
