"""Write a trained network as a checkpoint in the release format. What is written is what was trained with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.tensors import expected_tensors
from training import quantise as q

_CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SHARD = "model-00001-of-00001.safetensors"


def exponent_bytes(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 of powers of two."""
    return (torch.log2(scale).round() + 127).to(torch.uint8)


def pack_e2m1(values: torch.Tensor) -> torch.Tensor:
    """``[..., d]`` e2m1 values to ``[..., d/2]`` bytes, the even index in the low nibble."""
    codes = torch.searchsorted(_CODES, values.abs().contiguous()).to(torch.uint8)
    codes = codes | (torch.signbit(values).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def stored(name: str, weight: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint that hold one weight."""
    scale_name = name.removesuffix("weight") + "scale"
    if dtype == "BF16":
        return {name: weight.bfloat16()}
    if dtype == "F32":
        return {name: weight.float()}
    if dtype == "I8":
        values, scale = q.mxfp4_parts(weight)
        return {
            name: pack_e2m1(values.flatten(-2)).view(torch.int8),
            scale_name: exponent_bytes(scale.squeeze(-1)).view(torch.float8_e8m0fnu),
        }
    if name.endswith("engram.embed.weight"):
        values, scale = q.mxfp8_parts(weight)
        values, scale = values.flatten(-2), scale.squeeze(-1)
    else:
        values, scale = q.fp8_block_parts(weight)
    return {
        name: values.to(torch.float8_e4m3fn),
        scale_name: exponent_bytes(scale).view(torch.float8_e8m0fnu),
    }


@torch.no_grad()
def export(
    folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor], tokenizer_folder: Path
) -> None:
    """Write ``folder``.

    Args:
        folder: Made anew.
        config: The model.
        weights: fp32 on the CPU, by the checkpoint's names, experts of a layer stacked.
        tokenizer_folder: Holds the tokenizer's files.
    """
    specs = expected_tensors(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if ".experts." in name and ".shared_experts." not in name:
            for expert, one in enumerate(weight):
                single = name.replace(".experts.", f".experts.{expert}.")
                tensors |= stored(single, one, specs[single].dtype)
        else:
            tensors |= stored(name, weight, specs[name].dtype)
    generator = torch.Generator().manual_seed(0)
    for name, spec in specs.items():
        if name in tensors:
            continue
        if name.endswith("bias_vl"):
            tensors[name] = tensors[name.removesuffix("_vl")].clone()
        elif spec.dtype == "BF16":  # The vision tower is not trained.
            tensors[name] = (torch.randn(spec.shape, generator=generator) * spec.shape[-1] ** -0.5).bfloat16()
        else:
            raise ValueError(f"{name} was not trained")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensors[name].contiguous() for name in specs}, folder / SHARD, metadata={"format": "pt"})
    total = sum(spec.num_bytes for spec in specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(specs, SHARD)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")) + "\n")
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2, ensure_ascii=False) + "\n")
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
