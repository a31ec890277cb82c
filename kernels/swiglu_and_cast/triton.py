"""``swiglu_and_cast`` in float64, rounded where the definition rounds."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from deepinfer_plugins.kernels.mxfp8_cast.triton import quantise_mxfp8

# Groups of 32 that a program computes.
_GROUPS = 32


def swiglu_and_cast(
    gate_up: torch.Tensor, weights: torch.Tensor | None, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    n, d = gate_up.shape[0], gate_up.shape[1] // 2
    if d % 32:
        raise ValueError(f"the result is quantised in groups of 32, but a row of it is {d}")
    values = torch.empty(n, d, dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = torch.empty(n, d // 32, dtype=torch.uint8, device=gate_up.device)
    size = scales.numel()
    if size:
        weights = None if weights is None else weights.contiguous()
        _swiglu_and_cast[(triton.cdiv(size, _GROUPS),)](
            values.view(torch.uint8),
            scales,
            gate_up.contiguous(),
            weights,
            size,
            d,
            float(limit),
            GROUPS=_GROUPS,
        )
    return values, scales


@triton.jit
def swiglu(gate, up, LIMIT: tl.constexpr):
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, float64; a NaN stays one."""
    gate = gate.to(tl.float64)
    up = up.to(tl.float64)
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["size"])
def _swiglu_and_cast(values, scales, gate_up, weights, size, d, LIMIT: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    present = group < size
    row = group // (d // 32)
    lane = tl.arange(0, 32)[None, :]
    place = group[:, None] * 32 + lane
    # A row of ``gate_up`` is two rows of the result.
    gate_place = row[:, None] * d + place
    gate = tl.load(gate_up + gate_place, mask=present[:, None], other=0.0).to(tl.float32)
    up = tl.load(gate_up + gate_place + d, mask=present[:, None], other=0.0).to(tl.float32)
    hidden = swiglu(gate, up, LIMIT)
    if weights is not None:
        hidden = hidden * tl.load(weights + row, mask=present, other=0.0).to(tl.float64)[:, None]
    codes, powers = quantise_mxfp8(hidden.to(tl.float32))
    tl.store(values + place, codes.to(tl.uint8), mask=present[:, None])
    tl.store(scales + group, powers.to(tl.uint8), mask=present)
