"""``experts``: the rows of each expert side by side, in whole blocks of ``ROWS``."""

import torch

from deepinfer_plugins.kernels.formats import decode_mxfp4, decode_mxfp8
from deepinfer_plugins.kernels.row_blocks import ROWS, decoded, linear
from deepinfer_plugins.kernels.swiglu_and_cast.reference import swiglu_and_cast

# Some blocks and the expert they are for: its number, or a tensor of it, which the host has not seen.
_Run = tuple[slice, int | torch.Tensor]


def experts(
    values: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    first_expert: int,
    limit: float,
) -> torch.Tensor:
    """As the reference; an expert's products are by blocks of rows, so who shares it with a row has no influence."""
    n, topk = ids.shape
    num_experts, k = len(w13), values.shape[1]
    if not n:
        return torch.zeros(n, topk, k, dtype=torch.bfloat16, device=values.device)
    local = ids.flatten() - first_expert
    elsewhere = (local < 0) | (local >= num_experts)
    # From here on pairs of row and place are in order of their experts; those that live elsewhere come last.
    expert, pair = local.masked_fill(elsewhere, num_experts).sort(stable=True)
    slots, num_slots, runs = _arrange(expert, num_experts, look=expert.is_cpu)
    x = decode_mxfp8(values, scales)
    rows = x.new_zeros(num_slots, k).index_copy_(0, slots, x.index_select(0, pair // topk))
    gate_up = _product(rows, runs, w13, w13_scales).index_select(0, slots)
    hidden = decode_mxfp8(*swiglu_and_cast(gate_up, weights.flatten()[pair], limit))
    rows = hidden.new_zeros(num_slots, hidden.shape[1]).index_copy_(0, slots, hidden)
    results = _product(rows, runs, w2, w2_scales).index_select(0, slots)
    out = torch.empty_like(results).index_copy_(0, pair, results)
    return out.masked_fill_(elsewhere[:, None], 0).view(n, topk, k)


def _arrange(expert: torch.Tensor, num_experts: int, look: bool) -> tuple[torch.Tensor, int, list[_Run]]:
    """A slot for each pair, such that no block of ``ROWS`` slots has pairs of two experts.

    Args:
        expert: ``[num_pairs]``, int64, ascending; ``num_experts`` stands for all that live elsewhere.
        num_experts: That live here.
        look: Whether the host may look at the result.

    Returns:
        slots: ``[num_pairs]``, int64.
        num_slots: How many there can be at most.
        runs: What each block is to be multiplied by.
    """
    num_pairs, device = len(expert), expert.device
    bounds = torch.searchsorted(expert, torch.arange(num_experts + 2, device=device))
    ends = ((bounds.diff() + (ROWS - 1)) // ROWS).cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    slots = (starts * ROWS - bounds[:-1])[expert] + torch.arange(num_pairs, device=device)
    # Every expert that has a pair may leave all but one slot of its last block empty.
    num_blocks = (num_pairs + (ROWS - 1) * min(num_pairs, num_experts + 1)) // ROWS
    runs: list[_Run] = []
    if look:
        first = 0
        for number, end in enumerate(ends[:-1].tolist()):
            if end > first:
                runs.append((slice(first * ROWS, end * ROWS), number))
            first = end
    else:
        # The host does not wait to learn which experts were chosen. What is computed for the blocks of those that
        # live elsewhere is dropped in the end.
        owners = torch.searchsorted(ends, torch.arange(num_blocks, device=device), right=True)
        for block, owner in enumerate(owners.clamp_(max=num_experts - 1).split(1)):
            runs.append((slice(block * ROWS, (block + 1) * ROWS), owner))
    return slots, num_blocks * ROWS, runs


def _product(
    rows: torch.Tensor, runs: list[_Run], weight: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Each run's ``rows [num_slots, k]``, float64, times its expert's weight; zeros elsewhere."""
    num_experts, num_out, k = len(weight), weight.shape[1], rows.shape[1]
    kept = decoded((weight, scales), num_experts * num_out * k, lambda: decode_mxfp4(weight, scales))
    if kept is None:
        out = torch.zeros(len(rows), num_out, dtype=torch.bfloat16, device=rows.device)
        for run, expert in runs:
            stored = weight[expert].view(num_out, -1), scales[expert].view(num_out, -1)
            out[run] = _mxfp4_linear(rows[run], *stored)
        return out
    products = rows.new_zeros(len(rows), num_out)
    for run, expert in runs:
        of_expert = kept[expert].view(num_out, k).T
        for block, product in zip(rows[run].split(ROWS), products[run].split(ROWS)):
            torch.mm(block, of_expert, out=product)
    return products.bfloat16()


def _mxfp4_linear(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    def rows_of_weight(part: slice) -> torch.Tensor:
        return decode_mxfp4(weight[part], scales[part])

    return linear(x, weight.shape[0], rows_of_weight, torch.bfloat16)
