"""Fills a model's weights from a checkpoint, in the checkpoint's own formats."""

from __future__ import annotations

from pathlib import Path

import torch

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model.checkpoint import Checkpoint
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.network import DeepseekV41

# The vision tower is not part of the network.
_VISION = ("vision.", "aligner.", "image_")
_DRAFT = "mtp."


def open_model(
    folder: Path, ops: Ops, device: torch.device, max_positions: int, progress: bool = False
) -> DeepseekV41:
    """A checkpoint's whole model with its weights, for callers without an engine.

    Args:
        folder: The checkpoint; it is checked before memory is allocated.
        ops: The operators chosen for this process.
        device: Where weights and tables go.
        max_positions: Positions that the rotary tables cover, drafts included.
        progress: Whether to show a bar over the bytes.

    Returns:
        The model, with its draft if the checkpoint has one.

    Raises:
        ValueError: The checkpoint is not one that the model can run; the message says why.
    """
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    model = DeepseekV41(
        config,
        ops,
        device=device,
        max_positions=max_positions,
        vocabulary=CompressedVocabulary.from_folder(folder, config.vocab_size),
        draft=config.num_nextn_predict_layers > 0,
    )
    load(model, checkpoint, progress)
    return model


def load(model: DeepseekV41, checkpoint: Checkpoint, progress: bool = False) -> None:
    """Read every tensor that ``model`` has a place for, straight into that place.

    Args:
        model: On any device; its weights are overwritten.
        checkpoint: Opened, and so checked, with the model's configuration.
        progress: Whether to show a bar over the bytes.

    Raises:
        RuntimeError: A tensor of the checkpoint has no place in the model, or a place has no tensor. As the
            checkpoint fits the configuration, it is the model that does not.
    """
    targets = dict(model.targets())
    left = (*_VISION, _DRAFT) if model.draft_model is None else _VISION
    wanted = {name for name in checkpoint.wanted(model.placement) if not name.startswith(left)}
    problems = [f"{name} has no place in the model" for name in sorted(wanted - targets.keys())]
    problems += [f"{name} is not in the checkpoint" for name in sorted(targets.keys() - wanted)]
    for name in sorted(wanted & targets.keys()):
        shape, place = checkpoint.spec(name).shape, tuple(targets[name].tensor.shape)
        # A shard of a table has rows of its own number.
        if shape != place and (targets[name].first_row is None or shape[1:] != place[1:]):
            problems.append(f"{name} has shape {list(shape)}, but its place has {list(place)}")
    if problems:
        raise RuntimeError("\n  ".join([f"the model does not match {checkpoint.folder}:", *problems]))
    requests = [(name, target.tensor, target.first_row or 0) for name, target in targets.items()]
    checkpoint.load(requests, progress)
    model.loaded()
