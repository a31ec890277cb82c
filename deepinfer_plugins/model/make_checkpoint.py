"""Random checkpoints in exactly the release's format.

The values are random but not arbitrary: activations keep their size from layer to layer, scores and logits
are spread widely enough that a wrong value shows in the tokens, and scales differ from their neighbours.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.presets import preset
from deepinfer_plugins.model.tensors import TensorSpec, expected_tensors
from deepinfer_plugins.model.tokenizer_data import build_tokenizer, write_tokenizer

INDEX_NAME = "model.safetensors.index.json"
_MAX_SHARD_BYTES = 10 * 2**30
# Rows of a large tensor are made this many values at a time.
_CHUNK_VALUES = 2**24

_UE8M0_BIAS = 127
# e4m3 values are drawn with this standard deviation, inside their range of 448.
_E4M3_STD = 32.0
# Root mean square of the sixteen e2m1 values.
_E2M1_RMS = 2.93
# An exponent drawn evenly from -1, 0 and 1 around its mean makes squares 1.75 times as large.
_SPREAD_LOSS = math.sqrt(1.75)


def make_checkpoint(
    folder: str | Path,
    shape: str | ModelConfig = "small",
    seed: int = 0,
    shard_bytes: int | None = None,
    with_weights: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ModelConfig:
    """Write a random checkpoint.

    The same arguments write the same bytes, and a tensor's values depend on the seed and its name only.

    Args:
        folder: Made if it does not exist; must be empty if it does.
        shape: Name of a preset, or a configuration.
        seed: Seed of every random value.
        shard_bytes: A shard ends when the next tensor would make it larger than this; by default a quarter of
            the checkpoint, at most 10 GiB.
        with_weights: If False, write the configuration and the index only, for loaders that are tested at
            true shapes.
        progress: Called with the bytes written so far and in all.

    Returns:
        The configuration written: ``shape`` with the size of its compressed vocabulary filled in.

    Raises:
        ConfigError: The configuration is not one the model can run.
        FileExistsError: ``folder`` has something in it.
        ValueError: There is no such preset, ``shard_bytes`` is not positive, or the vocabulary is too small.
    """
    folder = Path(folder)
    config = preset(shape) if isinstance(shape, str) else shape
    if with_weights:
        tokenizer = build_tokenizer(config.vocab_size, config.image_token_id, config.dspark_noise_token_id)
        distinct = CompressedVocabulary.from_tokenizer(tokenizer, config.vocab_size).size
        config = replace(config, engram_compressed_vocab_size=distinct)
    config = ModelConfig.from_dict(config.to_dict(), "the shape asked for")
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; it must be at least 1")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name a new folder, or empty this one")
    folder.mkdir(parents=True, exist_ok=True)
    if with_weights:
        write_tokenizer(tokenizer, folder, config.max_position_embeddings)

    specs = expected_tensors(config)
    total = sum(spec.num_bytes for spec in specs.values())
    shards = _assign(specs, shard_bytes or min(_MAX_SHARD_BYTES, -(-total // 4)))
    _write_json(folder / "config.json", config.to_dict())
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    _write_json(
        folder / "generation_config.json", {**tokens, "do_sample": True, "temperature": 1.0, "top_p": 1.0}
    )
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if with_weights:
        written = 0
        for shard, names in shards.items():
            for num_bytes in _write_shard(folder / shard, {name: specs[name] for name in names}, specs, seed):
                written += num_bytes
                if progress is not None:
                    progress(written, total)
    return config


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _assign(specs: Mapping[str, TensorSpec], shard_bytes: int) -> dict[str, list[str]]:
    """Names by shard, in order."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, spec in specs.items():
        if groups[-1] and size + spec.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += spec.num_bytes
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups)}


def _write_shard(
    path: Path, shard: Mapping[str, TensorSpec], specs: Mapping[str, TensorSpec], seed: int
) -> Iterator[int]:
    """Write one safetensors file, tensor by tensor, and say how many bytes each piece had."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, spec in shard.items():
        end = offset + spec.num_bytes
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, spec in shard.items():
            for piece in _random(name, spec, specs, seed):
                data = piece.contiguous().view(torch.uint8).numpy().data
                file.write(data)
                yield data.nbytes


def _random(
    name: str, spec: TensorSpec, specs: Mapping[str, TensorSpec], seed: int
) -> Iterator[torch.Tensor]:
    """Random values of one tensor, in pieces of whole rows and of the stored dtype's width."""
    # torch's generator on the CPU takes 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    draw = _drawer(name, spec, specs)
    rows, *rest = spec.shape
    step = max(1, _CHUNK_VALUES // math.prod(rest))
    for start in range(0, rows, step):
        yield draw((min(step, rows - start), *rest), generator)


_Draw = Callable[[tuple[int, ...], torch.Generator], torch.Tensor]


def _drawer(name: str, spec: TensorSpec, specs: Mapping[str, TensorSpec]) -> _Draw:
    """How to draw values of the tensor called ``name``."""
    if spec.dtype == "F8_E4M3":
        return lambda shape, generator: _normal(shape, generator, _E4M3_STD).to(torch.float8_e4m3fn)
    if spec.dtype == "I8":
        return lambda shape, generator: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if spec.dtype == "F8_E8M0":
        weight = specs[name.removesuffix("scale") + "weight"]
        return _scale_drawer(name, weight)
    dtype = torch.float32 if spec.dtype == "F32" else torch.bfloat16
    if "hc_" in name:
        return _mixer_drawer(name, spec)
    if name.endswith((".bias", ".bias_vl", "attn_sink")):
        mean, std = 0.0, 0.25
    elif "norm" in name or name.endswith(("q_weight", "k_weight")):
        mean, std = 1.0, 0.1
    elif name.startswith("image_") or name.endswith("embed.weight"):
        mean, std = 0.0, 1.0
    else:
        mean, std = 0.0, _gain(name) / math.sqrt(spec.shape[-1])
    return lambda shape, generator: _normal(shape, generator, std, mean).to(dtype)


def _normal(
    shape: tuple[int, ...], generator: torch.Generator, std: float, mean: float = 0.0
) -> torch.Tensor:
    return torch.randn(shape, generator=generator).mul_(std).add_(mean)


# What a sublayer adds to the streams is small beside them, as in a trained network. Sublayers that dominate make
# a chaotic network, in which one value rounded otherwise changes most of the tokens after it.
_GAINS = {r"head\.": 3.0, r"engram\.wkv\.": 0.3, r"attn\.wo_b\.": 0.25, r"experts\..*w2\.": 0.1}


def _gain(name: str) -> float:
    """Root mean square of a linear's output when its input's is 1."""
    return next((gain for pattern, gain in _GAINS.items() if re.search(pattern, name)), 1.0)


def _scale_drawer(name: str, weight: TensorSpec) -> _Draw:
    """UE8M0 bytes such that the linear has its gain, or a table row a root mean square of 1."""
    packed = weight.dtype == "I8"
    inner = weight.shape[-1] * (2 if packed else 1)
    fan_in = 1 if name.endswith("engram.embed.scale") else inner
    target = _gain(name) / math.sqrt(fan_in) / (_E2M1_RMS if packed else _E4M3_STD) / _SPREAD_LOSS
    exponent = round(math.log2(target)) + _UE8M0_BIAS

    def draw(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randint(exponent - 1, exponent + 2, shape, generator=generator, dtype=torch.uint8)

    return draw


def _mixer_drawer(name: str, spec: TensorSpec) -> _Draw:
    """mHC parameters around the release's initial values: pre 3, post 0, 3 on the residual mix's diagonal."""
    if name.endswith("_fn"):
        return lambda shape, generator: _normal(shape, generator, 1.0 / math.sqrt(shape[-1]))
    if name.endswith("_scale"):
        return lambda shape, generator: _normal(shape, generator, 0.1, 0.5)
    streams = math.isqrt(spec.shape[0] + 1) - 1
    start = torch.cat([torch.full((streams,), 3.0), torch.zeros(streams), 3.0 * torch.eye(streams).flatten()])
    return lambda shape, generator: start + _normal(shape, generator, 1.0)
