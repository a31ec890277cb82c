"""``tile_kernels.engram``."""

from __future__ import annotations

import torch


def engram_gate_fwd(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: torch.Tensor | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    num_tokens, hc_mult, hidden_size = hidden_states.shape
    assert any(hidden_size % blk == 0 and hidden_size >= 2 * blk for blk in (1024, 768, 512, 256))
    assert hidden_states.dtype == kv.dtype == torch.bfloat16 and weight_fused.dtype == torch.float32
    assert hidden_states.is_contiguous() and kv.is_contiguous() and weight_fused.is_contiguous()
    assert kv.shape == (num_tokens, hc_mult + 1, hidden_size)
    assert image_token_mask is None or image_token_mask.dtype == torch.bool
    assert not save_for_backward and not inplace
    x, k, v = hidden_states.double(), kv[:, :-1].double(), kv[:, -1:].double()
    norms = ((x.square().mean(-1) + eps) * (k.square().mean(-1) + eps)).rsqrt()
    score = (x * weight_fused.double() * k).sum(-1) * norms * hidden_size**-0.5
    gate = torch.copysign(score.abs().clamp(min=clamp_value).sqrt(), score).sigmoid()
    output = (x + gate[..., None] * v).bfloat16()
    if image_token_mask is not None:
        output = torch.where(image_token_mask[:, None, None], hidden_states, output)
    return output, None, None, None, None
