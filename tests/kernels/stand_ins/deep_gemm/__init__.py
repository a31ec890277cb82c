"""Functions of sgl-deep-gemm 0.2.5 with its signatures, what they ask of their arguments, and the formulas in float64.

What they ask: ``csrc/utils/layout.hpp`` of DeepGEMM, and rows that begin at multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch

Scaled = tuple[torch.Tensor, torch.Tensor]


def _check_rows(*operands: torch.Tensor) -> None:
    for tensor in operands:
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.itemsize % 16 == 0 for stride in tensor.stride()[:-1]), tensor.stride()


def _decode(data: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """``[..., rows, k]`` with a packed scale per row and 32 columns, in float64."""
    *groups, mn, k = data.shape
    assert data.dtype == torch.float8_e4m3fn and sf.dtype == torch.int32
    assert sf.shape == (*groups, mn, -(-k // 128))
    assert sf.stride(-2) == 1 or mn == 1
    assert sf.stride(-1) == (mn + 3) // 4 * 4
    if groups:
        assert sf.stride(-3) == sf.stride(-1) * sf.shape[-1]
    exponents = torch.stack([(sf >> shift) & 255 for shift in (0, 8, 16, 24)], -1).flatten(-2)[..., : k // 32]
    factors = (exponents - 127).double().exp2()
    # torch multiplies by a power of two exactly.
    return data.double() * factors.repeat_interleave(32, dim=-1)


def bf16_gemm_nt(
    a: torch.Tensor,
    b: torch.Tensor,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    compiled_dims: str = "",
    alpha: float | None = None,
    epilogue: Any = None,
) -> None:
    assert a.dtype == b.dtype == torch.bfloat16 and d.dtype in (torch.bfloat16, torch.float32)
    assert a.shape[1] == b.shape[1] and d.shape == (a.shape[0], b.shape[0])
    assert c is None and alpha is None and epilogue is None
    _check_rows(a, b, d)
    d.copy_(a.double() @ b.double().T)


def fp8_fp4_gemm_nt(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "",
    disable_ue8m0_cast: bool = False,
    alpha: float | None = None,
    epilogue: Any = None,
) -> None:
    assert recipe == (1, 1, 32) and c is None and d.dtype == torch.bfloat16
    _check_rows(a[0], b[0], d)
    d.copy_(_decode(*a) @ _decode(*b).T)


def fp8_einsum(
    expr: str,
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    c: torch.Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 128, 128),
    epilogue: Any = None,
) -> None:
    assert expr == "bhr,hdr->bhd" and recipe == (1, 1, 32) and c is None and d.dtype == torch.bfloat16
    _check_rows(a[0], b[0], d)
    rows = _decode(a[0].permute(1, 0, 2), a[1].permute(1, 0, 2))
    d.copy_(torch.einsum("hbr,hdr->bhd", rows, _decode(*b)))
