"""Cases of ``kernels.py``: linear layers, experts, router, norms, casts.

The bar of linear layers, 0.90 of the fastest rival that need not be batch-invariant, is one of rivals: each starts from
the rows that the operator gets and ends with its result, in the result's precision. What is done to a weight beforehand
is not timed, as an engine does it once: cuBLAS gets weights in bfloat16, in twice the memory of FP8. Rows in FP8 are
decoded in the timed call. Products of rows that were decoded beforehand, or of a result half as wide, are bounds: they
tell what is left, and not whether the bar holds. vLLM runs FP8 weights in blocks by a Triton kernel of its own; SGLang
has the same kernel, with three stages in place of two. Neither has one for several groups on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from kernel_cases import Draw, KernelCase

from deepinfer_plugins.kernels.formats import decode_e2m1, decode_ue8m0
from deepinfer_plugins.model.config import ModelConfig

# Powers of two for the scales of weights: about one over the square root of the row's length.
_SCALES = (119, 123)


def cases(config: ModelConfig) -> list[KernelCase]:
    """Every case at the sizes of ``config``."""
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    inner, groups = config.moe_intermediate_size, config.o_groups
    query = config.q_lora_rank
    out = [
        _mxfp8_linear("wqkv_a", query + head_dim, hidden),
        _mxfp8_linear("wq_b", heads * head_dim, query),
        _mxfp8_linear("wo_b", hidden, groups * config.o_lora_rank),
        _mxfp8_linear("shared_w13", 2 * inner, hidden),
        _mxfp8_linear("shared_w2", hidden, inner),
        _grouped("wo_a", groups, config.o_lora_rank, heads * head_dim // groups),
        _linear("gate", config.n_routed_experts, hidden, torch.float32),
        _linear("compressor", 2 * head_dim, hidden, torch.float32),
        _linear("weights_proj", config.index_n_heads, hidden, torch.bfloat16),
        _linear("head", config.vocab_size, hidden, torch.float32, most_tokens=1024),
        _linear("markov_head", config.vocab_size, config.dspark_markov_rank, torch.float32, most_tokens=1024),
        _experts("experts", config),
        _route("gate", config.n_routed_experts, config.num_experts_per_tok),
        _combine("moe", hidden, config.num_experts_per_tok),
        _swiglu("shared", inner),
        _cast("hidden", hidden),
        _cast("attention", heads * head_dim),
        _norm("hidden", hidden),
        _norm("query", query),
        _rope("query", heads, head_dim, config.qk_rope_head_dim),
    ]
    return out


def _mxfp8(draw: Draw, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw.normal(rows, width, dtype=torch.float8_e4m3fn, scale=64), draw.integers(
        119, 123, rows, width // 32, dtype=torch.uint8
    )


def _scaled(values: torch.Tensor, scales: torch.Tensor, rows_per_scale: int = 1) -> torch.Tensor:
    """Bfloat16 values of MXFP8 numbers."""
    powers = decode_ue8m0(scales).bfloat16().repeat_interleave(32, -1)
    if rows_per_scale > 1:
        powers = powers.repeat_interleave(rows_per_scale, 0)[: values.shape[0]]
    return values.bfloat16() * powers


def _mxfp8_linear(name: str, m: int, k: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        values, scales = _mxfp8(draw, n, k)
        weight = draw.normal(m, k, dtype=torch.float8_e4m3fn)
        weight_scales = draw.integers(*_SCALES, -(-m // 32), k // 32, dtype=torch.uint8)
        return {"values": values, "scales": scales, "weight": weight, "weight_scales": weight_scales}

    def operands(args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return _scaled(args["values"], args["scales"]), _scaled(args["weight"], args["weight_scales"], 32)

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        x, weight = operands(args)
        return lambda: F.linear(x, weight)

    def cublas(args: dict[str, Any]) -> Callable[[], Any]:
        from deepinfer_plugins.kernels.triton_matmul import decode_rows

        values, scales, weight = args["values"].view(torch.uint8), args["scales"], operands(args)[1]
        return lambda: F.linear(decode_rows(values, scales), weight)

    def of_vllm(args: dict[str, Any]) -> Callable[[], Any]:
        """Its scales are float32; those of the rows are converted beforehand, a cast of vLLM's would write them so."""
        from vllm.model_executor.layers.quantization.utils.fp8_utils import w8a8_triton_block_scaled_mm

        powers, weight_powers = (decode_ue8m0(args[name]).float() for name in ("scales", "weight_scales"))
        return lambda: w8a8_triton_block_scaled_mm(
            args["values"], args["weight"], powers, weight_powers, [32, 32], torch.bfloat16
        )

    return KernelCase(
        "mxfp8_linear",
        name,
        f"{m} x {k}",
        make,
        ("values", "scales"),
        num_bytes=lambda n: (n + m) * k + n * k // 32 + m * k // 1024 + 2 * n * m,
        num_flops=lambda n: 2 * n * m * k,
        rivals=(("rows decoded, cuBLAS, weight in bf16", cublas), ("vLLM's block FP8 in Triton", of_vllm)),
        bounds=(("cuBLAS, operands decoded beforehand", bound),),
    )


def _grouped(name: str, groups: int, m: int, k: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        values, scales = _mxfp8(draw, n, groups * k)
        weight = draw.normal(groups * m, k, dtype=torch.float8_e4m3fn)
        weight_scales = draw.integers(*_SCALES, groups * m // 32, k // 32, dtype=torch.uint8)
        return {
            "values": values.view(n, groups, k),
            "scales": scales.view(n, groups, k // 32),
            "weight": weight,
            "weight_scales": weight_scales,
        }

    def decoded_weight(args: dict[str, Any]) -> torch.Tensor:
        return _scaled(args["weight"], args["weight_scales"], 32).view(groups, m, k).mT

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        rows = _scaled(args["values"].flatten(1), args["scales"].flatten(1))
        x, weight = rows.view(-1, groups, k).transpose(0, 1), decoded_weight(args)
        return lambda: torch.bmm(x, weight)

    def cublas(args: dict[str, Any]) -> Callable[[], Any]:
        from deepinfer_plugins.kernels.triton_matmul import decode_rows

        weight = decoded_weight(args)
        values, scales = args["values"].view(torch.uint8).flatten(1), args["scales"].flatten(1)
        return lambda: torch.bmm(decode_rows(values, scales).view(-1, groups, k).transpose(0, 1), weight)

    return KernelCase(
        "mxfp8_grouped_linear",
        name,
        f"{groups} x {m} x {k}",
        make,
        ("values", "scales"),
        num_bytes=lambda n: groups * ((n + m) * k + n * k // 32 + m * k // 1024 + 2 * n * m),
        num_flops=lambda n: 2 * n * m * k * groups,
        rivals=(("rows decoded, cuBLAS, batched, weight in bf16", cublas),),
        bounds=(("cuBLAS, batched, operands decoded beforehand", bound),),
    )


def _linear(name: str, m: int, k: int, out_dtype: torch.dtype, most_tokens: int = 8192) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {"x": draw.normal(n, k), "weight": draw.normal(m, k, scale=k**-0.5), "out_dtype": out_dtype}

    def bfloat16(args: dict[str, Any]) -> Callable[[], Any]:
        return lambda: F.linear(args["x"], args["weight"])

    def float32(args: dict[str, Any]) -> Callable[[], Any]:
        return lambda: torch.mm(args["x"], args["weight"].mT, out_dtype=torch.float32)

    half = ("cuBLAS, bf16 result", bfloat16)
    return KernelCase(
        "linear",
        name,
        f"{m} x {k}",
        make,
        ("x",),
        num_bytes=lambda n: 2 * (n + m) * k + out_dtype.itemsize * n * m,
        num_flops=lambda n: 2 * n * m * k,
        rivals=(half,) if out_dtype is torch.bfloat16 else (("cuBLAS, float32 result", float32),),
        bounds=() if out_dtype is torch.bfloat16 else (half,),
        most_tokens=most_tokens,
    )


def _experts(name: str, config: ModelConfig) -> KernelCase:
    k, d = config.hidden_size, config.moe_intermediate_size
    num_experts, topk = config.n_routed_experts, config.num_experts_per_tok
    of_expert = 3 * k * d * 17 // 32

    def make(n: int, draw: Draw) -> dict[str, Any]:
        values, scales = _mxfp8(draw, n, k)
        return {
            "values": values,
            "scales": scales,
            "ids": draw.choices(n, topk, num_experts),
            "weights": draw.normal(n, topk, dtype=torch.float32),
            "w13": draw.integers(0, 256, num_experts, 2 * d, k // 2, dtype=torch.uint8),
            "w13_scales": draw.integers(*_SCALES, num_experts, 2 * d, k // 32, dtype=torch.uint8),
            "w2": draw.integers(0, 256, num_experts, k, d // 2, dtype=torch.uint8),
            "w2_scales": draw.integers(*_SCALES, num_experts, k, d // 32, dtype=torch.uint8),
            "first_expert": 0,
            "limit": 10.0,
        }

    def num_bytes(n: int) -> int:
        # Of the experts, those that some token is expected to choose.
        chosen = num_experts * (1 - (1 - topk / num_experts) ** n)
        return int(chosen * of_expert) + n * k * 33 // 32 + 2 * n * topk * k

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        def decoded(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            out = packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=torch.bfloat16)
            for expert in range(len(packed)):
                powers = decode_ue8m0(scales[expert]).bfloat16().repeat_interleave(32, -1)
                out[expert] = decode_e2m1(packed[expert]).bfloat16() * powers
            return out

        w13, w2 = decoded(args["w13"], args["w13_scales"]), decoded(args["w2"], args["w2_scales"])
        order = args["ids"].flatten().argsort(stable=True)
        ends = args["ids"].flatten().bincount(minlength=num_experts).cumsum(0).int()
        x = _scaled(args["values"], args["scales"])
        weights = args["weights"].flatten()[order, None]

        def call() -> torch.Tensor:
            gate_up = torch._grouped_mm(x[order // topk], w13.mT, offs=ends)
            gate, up = gate_up.chunk(2, -1)
            hidden = F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0) * weights
            return torch._grouped_mm(hidden.bfloat16(), w2.mT, offs=ends)

        return call

    def marlin(args: dict[str, Any]) -> Callable[[], Any]:
        """As vLLM runs these weights on Hopper: rows in bf16, and an expert's rows summed up with the others'."""
        from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
            prepare_moe_mxfp4_layer_for_marlin,
        )
        from vllm.scalar_type import scalar_types

        layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
        weights = (args[name] for name in ("w13", "w2", "w13_scales", "w2_scales"))
        w13, w2, w13_scales, w2_scales, _, _ = prepare_moe_mxfp4_layer_for_marlin(layer, *weights, None, None)
        x = _scaled(args["values"], args["scales"])
        ids = args["ids"].int()
        return lambda: fused_marlin_moe(
            x,
            w13,
            w2,
            None,
            None,
            w13_scales,
            w2_scales,
            args["weights"],
            ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            activation_config=ApplyMoEActivationConfig(clamp_limit=args["limit"]),
        )

    return KernelCase(
        "experts",
        name,
        f"{num_experts} x ({2 * d} x {k} and back), {topk} each",
        make,
        ("values", "scales", "ids", "weights"),
        num_bytes=num_bytes,
        num_flops=lambda n: 6 * n * topk * k * d,
        rivals=(("vLLM's Marlin, rows in bf16, summed over a row's experts", marlin),),
        bounds=(("torch._grouped_mm on bf16, rows sorted beforehand, no cast", bound),),
    )


def _route(name: str, num_experts: int, topk: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        logits = draw.normal(n, num_experts, dtype=torch.float32, scale=4)
        bias = draw.normal(num_experts, dtype=torch.float32)
        return {"logits": logits, "bias": bias, "topk": topk, "scaling": 1.5}

    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        def call() -> tuple[torch.Tensor, torch.Tensor]:
            scores = F.softplus(args["logits"]).sqrt()
            ids = (scores + args["bias"]).topk(topk).indices
            weights = scores.gather(1, ids)
            return ids, weights / weights.sum(-1, keepdim=True) * 1.5

        return call

    return KernelCase(
        "route",
        name,
        f"{topk} of {num_experts}",
        make,
        ("logits",),
        num_bytes=lambda n: 4 * n * num_experts + 12 * n * topk,
        num_flops=lambda n: 0,
        rivals=(("torch in float32", rival),),
    )


def _combine(name: str, d: int, topk: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {"chosen": draw.normal(n, topk, d), "shared": draw.normal(n, d)}

    return KernelCase(
        "combine",
        name,
        f"{topk} + 1 of {d}",
        make,
        ("chosen", "shared"),
        num_bytes=lambda n: 2 * n * d * (topk + 2),
        num_flops=lambda n: n * d * topk,
        rivals=(("torch in bfloat16", lambda args: lambda: args["chosen"].sum(1) + args["shared"]),),
    )


def _swiglu(name: str, d: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        return {"gate_up": draw.normal(n, 2 * d, scale=4), "weights": None, "limit": 10.0}

    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        def call() -> torch.Tensor:
            gate, up = args["gate_up"].chunk(2, -1)
            return F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

        return call

    return KernelCase(
        "swiglu_and_cast",
        name,
        str(d),
        make,
        ("gate_up",),
        num_bytes=lambda n: 4 * n * d + n * d * 33 // 32,
        num_flops=lambda n: 0,
        bounds=(("torch in bfloat16, no cast", bound),),
    )


def _cast(name: str, d: int) -> KernelCase:
    def bound(args: dict[str, Any]) -> Callable[[], Any]:
        x = args["x"]
        return lambda: x.to(torch.float8_e4m3fn)

    return KernelCase(
        "mxfp8_cast",
        name,
        str(d),
        lambda n, draw: {"x": draw.normal(n, d, scale=4)},
        ("x",),
        num_bytes=lambda n: 2 * n * d + n * d * 33 // 32,
        num_flops=lambda n: 0,
        bounds=(("torch, no scales", bound),),
    )


def _norm(name: str, d: int) -> KernelCase:
    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        return lambda: F.rms_norm(args["x"], (d,), args["weight"], args["eps"])

    return KernelCase(
        "rms_norm",
        name,
        str(d),
        lambda n, draw: {"x": draw.normal(n, d), "weight": draw.normal(d), "eps": 1e-6},
        ("x",),
        num_bytes=lambda n: 4 * n * d,
        num_flops=lambda n: 0,
        rivals=(("torch.nn.functional.rms_norm", rival),),
    )


def _rope(name: str, heads: int, d: int, rope_dim: int) -> KernelCase:
    def make(n: int, draw: Draw) -> dict[str, Any]:
        table = draw.normal(4096, rope_dim, dtype=torch.float32)
        positions = draw.integers(0, 4096, n)
        return {"x": draw.normal(n, heads, d), "positions": positions, "table": table, "inverse": False}

    def rival(args: dict[str, Any]) -> Callable[[], Any]:
        x, half = args["x"], rope_dim // 2

        def call() -> torch.Tensor:
            cos, sin = args["table"][args["positions"]][:, None].split(half, -1)
            even, odd = x[..., -rope_dim::2].float(), x[..., 1 - rope_dim :: 2].float()
            turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
            return torch.cat([x[..., :-rope_dim], turned.to(x.dtype)], -1)

        return call

    return KernelCase(
        "rope",
        name,
        f"{heads} x {d}",
        make,
        ("x", "positions"),
        num_bytes=lambda n: 4 * n * heads * d,
        num_flops=lambda n: 0,
        rivals=(("torch in float32", rival),),
    )
