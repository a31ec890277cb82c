"""Engram: n-gram embeddings added to the streams in front of a layer's attention."""

from __future__ import annotations

import torch
from torch import nn

from deepinfer_plugins.kernels.catalogue import Ops
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import EngramTable
from deepinfer_plugins.model.layers import Fp8Linear, Quantized, Reduce, Target, Targets, weight

# Values of a row of the table that share one scale.
TABLE_GROUP = 32


class Engram(nn.Module):
    """Looks up the n-grams that end at each row and gates them into the streams.

    Args:
        config: The model.
        ops: Chosen operators.
        table: Multipliers, primes and offsets of this layer.
        rows: Rows of the table that this rank holds.
        reduce: Sums a tensor over the ranks that hold the table; None if this rank holds all of it.
        device: Where the weights go.
    """

    multipliers: torch.Tensor
    primes: torch.Tensor
    offsets: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        table: EngramTable,
        rows: range,
        reduce: Reduce | None,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.rows = rows
        self.reduce = reduce
        self.streams, self.hidden, self.eps = config.hc_mult, config.hidden_size, config.rms_norm_eps
        for name, numbers in (
            ("multipliers", table.multipliers),
            ("primes", table.primes),
            ("offsets", table.offsets),
        ):
            # Constants, not weights: made from the configuration and the tokenizer.
            self.register_buffer(
                name, torch.tensor(numbers, dtype=torch.int64, device=device), persistent=False
            )
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        width = config.engram_head_dim
        self.table = weight((len(rows), width), torch.float8_e4m3fn, device)
        self.table_scales = weight((len(rows), width // TABLE_GROUP), torch.uint8, device)
        self.wkv = Fp8Linear(ops, {"wkv": (self.streams + 1) * self.hidden}, columns * width, device)
        self.q_weight = weight((self.streams, self.hidden), torch.bfloat16, device)
        self.k_weight = weight((self.streams, self.hidden), torch.bfloat16, device)
        self.gate_weight = weight((self.streams, self.hidden), torch.float32, device)

    def targets(self, prefix: str) -> Targets:
        yield from self.wkv.targets(prefix)
        yield f"{prefix}q_weight", Target(self.q_weight)
        yield f"{prefix}k_weight", Target(self.k_weight)
        yield f"{prefix}embed.weight", Target(self.table, self.rows.start)
        yield f"{prefix}embed.scale", Target(self.table_scales, self.rows.start)

    def loaded(self) -> None:
        """Multiply the two norm weights once; a product of two bf16 numbers is exact in fp32."""
        self.gate_weight.copy_(self.q_weight.float() * self.k_weight.float())

    def forward(
        self, streams: torch.Tensor, context: torch.Tensor, image: torch.Tensor | None
    ) -> torch.Tensor:
        """The streams with the n-gram embeddings added.

        Args:
            streams: ``[n, hc_mult, hidden]``, bf16.
            context: ``[n, engram_max_ngram_size]``, int64; compressed ids, nearest first.
            image: ``[n]``, bool; rows that are left as they are. None if there are none.
        """
        index = self.ops.engram_hash(context, self.multipliers, self.primes, self.offsets)
        if image is not None:
            index = index.masked_fill(image[:, None], -1)
        keys_and_value = self.wkv(self._fetch(index))
        keys, value = keys_and_value.split([self.streams * self.hidden, self.hidden], dim=1)
        keys = keys.unflatten(1, (self.streams, self.hidden))
        return self.ops.engram_gate(streams, keys, value, self.gate_weight, self.eps, image)

    def _fetch(self, index: torch.Tensor) -> Quantized:
        """Rows of the table side by side, from whichever rank holds them; zeros where ``index`` is -1."""
        if self.reduce is None:
            return Quantized(*self.ops.engram_gather(self.table, self.table_scales, index))
        held = (index >= self.rows.start) & (index < self.rows.stop)
        local = torch.where(held, index - self.rows.start, -1)
        values, scales = self.ops.engram_gather(self.table, self.table_scales, local)
        # Bytes of one rank plus zeros of all others: the sum is a copy.
        scales = scales * held.repeat_interleave(scales.shape[1] // index.shape[1], dim=1)
        return Quantized(self.reduce(values.view(torch.uint8)).view(values.dtype), self.reduce(scales))
