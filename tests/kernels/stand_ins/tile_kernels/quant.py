"""``tile_kernels.quant``."""

from __future__ import annotations

import torch


def _cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 per 32 values, and UE8M0 scales four to an int32. The scale is found with a reciprocal, as theirs is."""
    n, hidden = x.shape
    groups = x.float().view(n, hidden // 32, 32)
    amax = groups.abs().amax(-1).clamp(min=1e-4)
    bits = (amax * torch.tensor(1 / 448, dtype=torch.float32)).view(torch.int32)
    exponent = ((bits - 1) >> 23) + 1 - 127
    values = (groups.double() * (-exponent).double().exp2()[..., None]).float().to(torch.float8_e4m3fn)
    stored = torch.zeros(n, -(-hidden // 128) * 4, dtype=torch.uint8)
    stored[:, : hidden // 32] = exponent + 127
    return values.view(n, hidden), stored.view(torch.int32)


def per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert (fmt, num_per_channels, x_block_size, out) == ("e4m3", 32, None, None)
    assert round_sf and use_packed_ue8m0
    assert not use_tma_aligned_col_major_sf and not use_e4m3_sf and not stochastic_cast
    assert x.dtype in (torch.bfloat16, torch.float32) and x.stride(1) == 1 and x.shape[1] % 64 == 0
    return _cast(x)


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert (fmt, num_per_channels) == ("e4m3", 32)
    assert psum_num_tokens_per_expert is None and routed_scaling_factor is None and clamped_count is None
    assert round_sf and use_packed_ue8m0 and not use_tma_aligned_col_major_sf
    assert x.dim() == 2 and x.is_contiguous() and x.shape[1] % 128 == 0
    left, right = x.double().chunk(2, -1)
    if clamp_value is not None:
        left, right = left.clamp(max=clamp_value), right.clamp(-clamp_value, clamp_value)
    product = left * left.sigmoid() * right
    if topk_weights is not None:
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == x.shape[:1]
        product = product * topk_weights[:, None].double()
    return _cast(product.float())


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    assert residual is None and out is None and residual_out is None and out_scale == 1.0 and not with_rstd
    hidden = x.shape[-1]
    assert x.dtype in (torch.bfloat16, torch.float32) and x.stride(-1) == 1
    assert (
        weight is not None
        and weight.shape == (hidden,)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
    )
    assert 0 < hidden <= 8192 and hidden % 16 == 0 and x.stride(0) % 16 == 0
    wide = x.double()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    return normed.to(x.dtype), None, x
