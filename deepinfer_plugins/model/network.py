"""DeepSeek-V4.1-Flash as it runs: paged caches, any mix of rows, one code path.

Source: section 2 of the model's fact sheet; rounding points: ``README.md`` beside this file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model import hyper_connection
from deepinfer_plugins.model.attention import Attention, Selection
from deepinfer_plugins.model.checkpoint import Placement
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.draft import Block, Draft, Drafted
from deepinfer_plugins.model.engram import CompressedVocabulary, engram_tables
from deepinfer_plugins.model.engram_layer import Engram
from deepinfer_plugins.model.hyper_connection import Trunk
from deepinfer_plugins.model.layer import Layer, Layers
from deepinfer_plugins.model.layers import Linear, Norm, Reduce, Target, Targets, weight
from deepinfer_plugins.model.moe import MoE
from deepinfer_plugins.model.rope import rope_table
from deepinfer_plugins.model.rows import Rows, ngram_context
from deepinfer_plugins.model.step import Caches, Step


class DeepseekV41(nn.Module):
    """The backbone and its head.

    Weights are left uninitialised: see ``loading.py``.

    Args:
        config: The model.
        ops: The operators chosen for this process.
        device: Where weights and tables go.
        max_positions: Number of positions the rotary tables cover.
        vocabulary: Compressed ids of the tokens, for Engram.
        placement: Which routed experts and Engram rows this rank holds.
        reduce: Sums a tensor over the ranks of ``placement``, which all run the same rows; None for one rank.
        draft: Whether to build the draft layers (and write their context keys).
    """

    compressed_ids: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        *,
        device: torch.device,
        max_positions: int,
        vocabulary: CompressedVocabulary,
        placement: Placement | None = None,
        reduce: Reduce | None = None,
        draft: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        placement = Placement() if placement is None else placement
        if reduce is None and placement != Placement():
            raise ValueError(
                f"{placement} spreads weights over ranks, so the model needs reduce= to add up their parts"
            )
        tables = {
            compressed: rope_table(config, compressed, max_positions, device) for compressed in (False, True)
        }
        engrams = engram_tables(config, vocabulary.size)
        self.placement = placement
        self.embed = weight((config.vocab_size, config.hidden_size), torch.bfloat16, device)
        num_experts = config.n_routed_experts
        experts = placement.experts(num_experts)
        self.layers = Layers()
        for index in range(config.num_hidden_layers):
            attention = Attention(config, index, ops, tables[config.compress_ratios[index] > 0], device)
            moe = MoE(config, ops, num_experts, config.num_experts_per_tok, experts, reduce, device)
            engram = None
            if index in engrams:
                rows = placement.engram_rows(engrams[index].num_rows)
                engram = Engram(config, ops, engrams[index], rows, reduce, device)
            self.layers.append(Layer(config, ops, attention, moe, engram, device))
        self.norm = Norm(ops, config.hidden_size, config.rms_norm_eps, device)
        self.head = Linear(ops, {"head": config.vocab_size}, config.hidden_size, device, torch.float32)
        if draft and not config.num_nextn_predict_layers:
            raise ValueError("draft=True needs draft layers, but num_nextn_predict_layers is 0")
        self.draft_model = Draft(config, ops, tables[False], placement, reduce, device) if draft else None
        self.register_buffer("compressed_ids", torch.from_numpy(vocabulary.map).to(device), persistent=False)
        self.pad = int(vocabulary.map[config.engram_pad_token_id])

    def targets(self) -> Targets:
        """Where each tensor of the checkpoint goes, by name."""
        yield "embed.weight", Target(self.embed)
        for index, layer in enumerate(self.layers):
            yield from layer.targets(f"layers.{index}.")
        yield from self.norm.targets("norm")
        yield from self.head.targets("")
        if self.draft_model is not None:
            yield from self.draft_model.targets()

    def loaded(self) -> None:
        """Derive what is computed from weights; the loader calls it once they are there."""
        for layer in self.layers:
            if layer.engram is not None:
                layer.engram.loaded()

    @torch.no_grad()
    def forward(self, step: Step, caches: Caches) -> torch.Tensor:
        """Run the step's rows and write their keys.

        Args:
            step: The rows.
            caches: Read and written.

        Returns:
            ``[num_rows, hidden]``, bf16, after the final norm; zero for rows that ``step.decoder`` drops.
        """
        rows = Rows(step, self.config.sliding_window)
        context = ngram_context(step, self.compressed_ids, self.pad, self.config.engram_max_ngram_size)
        trunk = hyper_connection.start(self.embed[rows.local(step.token_ids)], self.config.hc_mult)
        selection: Selection | None = None
        taps: list[torch.Tensor] = []
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                trunk = trunk._replace(streams=layer.engram(trunk.streams, rows.local(context), rows.image))
            y = layer.attention_input(trunk)
            if layer.attn.compressor is not None:
                layer.attn.compressor(y, rows, caches)
            if index == self.config.decoder_start and step.decoder is not None:
                rows, (streams, pre, *taps) = self._enter_decoder(step, rows, [*trunk, *taps])
                trunk = Trunk(streams, pre)
                y = layer.attention_input(trunk)
                context = context[step.decoder_rows]
            if caches.draft and index in self.config.dspark_target_layer_ids:
                mean = torch.full_like(trunk.pre, 1 / self.config.hc_mult)
                taps.append(self.ops.hc_collapse(trunk.streams, mean))
            mixes = layer.attn_hc.mixes(trunk.streams)
            x, selection = layer.attn(y, rows, caches, selection)
            trunk = layer.attn_hc.write(x, trunk.streams, mixes)
            trunk = layer.feed_forward(trunk, rows.image)
        if caches.draft:
            if self.draft_model is None:
                raise ValueError("caches.draft holds caches, but the model was built with draft=False")
            self.draft_model.store_context(taps, rows, caches)
        hidden = rows.gather(self.norm(self.ops.hc_collapse(trunk.streams, trunk.pre)))
        if step.decoder_rows is None:
            return hidden
        return hidden.new_zeros((step.num_rows, hidden.shape[1])).index_copy_(0, step.decoder_rows, hidden)

    def _enter_decoder(
        self, step: Step, rows: Rows, state: list[torch.Tensor]
    ) -> tuple[Rows, list[torch.Tensor]]:
        """Go on with the rows that ``step.decoder`` keeps, on whichever ranks they were and will be."""
        assert step.decoder is not None
        decoder = Rows(step.decoder, self.config.sliding_window)
        return decoder, [decoder.local(rows.gather(x)[step.decoder_rows]) for x in state]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of some rows of :meth:`forward`'s result, fp32 ``[rows, vocab_size]``."""
        return self.head(hidden)

    @torch.no_grad()
    def draft(
        self,
        step: Step,
        caches: Caches,
        depth: int,
        sample: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> Drafted:
        """Draft ``depth`` tokens after each request's last one; see :meth:`Draft.forward` and :meth:`Draft.chain`."""
        return self.draft_chain(self.draft_block(step, caches, depth), sample)

    @torch.no_grad()
    def draft_block(self, step: Step, caches: Caches, depth: int) -> Block:
        """The first half of :meth:`draft`, which writes and reads caches."""
        block: Block = self._draft_layers()(step, caches, depth, self.embed, self.head)
        return block

    @torch.no_grad()
    def draft_chain(self, block: Block, sample: Callable[[torch.Tensor, int], torch.Tensor]) -> Drafted:
        """The second half, which chooses the tokens."""
        return self._draft_layers().chain(block, sample)

    def _draft_layers(self) -> Draft:
        if self.draft_model is None:
            raise ValueError("draft() needs the draft layers, but the model was built with draft=False")
        return self.draft_model
