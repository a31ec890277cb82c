"""``tile_kernels.mhc``."""

from __future__ import annotations

import torch


def mhc_post_fwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    num_seqs, num_tokens, mhc, hidden = residual.shape
    assert num_seqs * num_tokens > 0, "a launch of no programs fails"
    assert x.dtype == residual.dtype == torch.bfloat16
    assert post_layer_mix.dtype == comb_res_mix.dtype == torch.float32
    assert x.shape == (num_seqs, num_tokens, hidden)
    assert post_layer_mix.shape == (num_seqs, num_tokens, mhc, 1)
    assert comb_res_mix.shape == (num_seqs, num_tokens, mhc, mhc)
    assert x.is_contiguous() and post_layer_mix.is_contiguous() and comb_res_mix.is_contiguous()
    assert hidden % 128 == 0
    mixed = torch.einsum("btio,btih->btoh", comb_res_mix.double(), residual.double())
    result = (mixed + post_layer_mix.double() * x.double()[:, :, None]).bfloat16()
    return result if out is None else out.copy_(result)


def mhc_pre_apply_mix_fwd(x: torch.Tensor, mix: torch.Tensor, o: torch.Tensor) -> None:
    assert x.shape[0] > 0, "a launch of no programs fails"
    assert x.dtype == o.dtype == torch.bfloat16 and mix.dtype == torch.float32
    assert x.is_contiguous() and mix.is_contiguous() and o.is_contiguous()
    assert mix.shape == x.shape[:2] and o.shape == (x.shape[0], x.shape[2])
    o.copy_(torch.einsum("nm,nmh->nh", mix.double(), x.double()))
