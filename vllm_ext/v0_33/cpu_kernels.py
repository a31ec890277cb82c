"""The V2 model runner's bookkeeping kernels for a CPU, in numpy.

Interpreted Triton runs one program after another at a fraction of a millisecond an instruction: a step of
five requests took half a second. vLLM lets a platform stand in for a kernel; these are the ones that run every
step. They take the kernel's own arguments and leave the same bytes behind, without context parallelism,
which a CPU does not have. What is not here still runs in the interpreter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Array: TypeAlias = npt.NDArray[Any]


def install() -> None:
    """Put them in place of vLLM's, unless they are there already (several engines in one process)."""
    from vllm.triton_utils.dispatcher import KernelOverride, register_kernels
    from vllm.v1.worker.gpu import block_table
    from vllm.v1.worker.gpu.sample import gumbel

    if isinstance(block_table._compute_slot_mappings_kernel, KernelOverride):
        return
    worker = "vllm.v1.worker.gpu"
    register_kernels(
        {
            f"{worker}.buffer_utils._apply_write_kernel": apply_write,
            f"{worker}.block_table._gather_block_tables_kernel": gather_block_tables,
            f"{worker}.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
            f"{worker}.input_batch._prepare_prefill_inputs_kernel": prepare_prefill_inputs,
            f"{worker}.input_batch._prepare_pos_seq_lens_kernel": prepare_pos_seq_lens,
            f"{worker}.input_batch._combine_sampled_and_draft_tokens_kernel": combine_sampled_and_draft_tokens,
            f"{worker}.input_batch._get_num_sampled_and_rejected_kernel": get_num_sampled_and_rejected,
            f"{worker}.input_batch._post_update_kernel": post_update,
            f"{worker}.input_batch._expand_idx_mapping_kernel": expand_idx_mapping,
            f"{worker}.structured_outputs._apply_grammar_bitmask_kernel": apply_grammar_bitmask,
            f"{worker}.sample.gumbel._gumbel_sample_kernel": _greedy_or(gumbel._gumbel_sample_kernel),
        }
    )


def _rows(pointers: torch.Tensor, strides: torch.Tensor, group: int, count: int) -> Array:
    """The first ``count`` rows of the int32 table that ``pointers[group]`` points at, writable."""
    stride = int(strides[group])
    memory = (ctypes.c_int32 * (count * stride)).from_address(int(pointers[group]))
    return np.ctypeslib.as_array(memory).reshape(count, stride)


def _flat(tensor: torch.Tensor) -> Array:
    """A tensor's memory from its first element on, in order of address: what a pointer argument sees."""
    return tensor.as_strided((tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0).numpy()[
        tensor.storage_offset() :
    ]


def apply_write(
    output: torch.Tensor,
    output_stride: Any,
    indices: torch.Tensor,
    starts: torch.Tensor,
    contents: torch.Tensor,
    cu_lens: torch.Tensor,
    group_ids: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Copy each piece of ``contents`` to a row of one table, or of the table of its group."""
    ends = cu_lens.numpy()
    values = contents.numpy()
    rows = indices.numpy()
    count = len(rows) and int(rows.max()) + 1
    flat = None if MULTI_GROUP else _flat(output)
    begin = 0
    for write, (row, start, end) in enumerate(zip(rows, starts.numpy(), ends)):
        if end <= begin and write:
            break
        piece = values[begin:end]
        if flat is None:
            assert group_ids is not None
            table = _rows(output, output_stride, int(group_ids[write]), count)
            table[row, start : start + len(piece)] = piece
        else:
            first = int(row) * output_stride + int(start)
            flat[first : first + len(piece)] = piece
        begin = end


def gather_block_tables(
    batch_to_request: torch.Tensor,
    source_pointers: torch.Tensor,
    target_pointers: torch.Tensor,
    strides: torch.Tensor,
    num_blocks: torch.Tensor,
    num_blocks_stride: int,
    num_requests: int,
    num_computed: torch.Tensor,
    reach: torch.Tensor,
    block_sizes: torch.Tensor,
    MASK_SLIDING_WINDOW: bool,
    BLOCK_SIZE: int,
) -> None:
    """Bring the batch's rows to the front, with blocks that no window reaches nulled.

    Rows past the batch are left alone: they matter to captured graphs only.
    """
    requests = batch_to_request.numpy()
    computed, far, sizes = num_computed.numpy(), reach.numpy(), block_sizes.numpy()
    counts = num_blocks.numpy()
    for group in range(len(strides)):
        source = _rows(source_pointers, strides, group, int(requests.max()) + 1)
        target = _rows(target_pointers, strides, group, num_requests)
        for row, request in enumerate(requests):
            count = int(counts[group, request])
            target[row, :count] = source[request, :count]
            if MASK_SLIDING_WINDOW and far[group] > 0:
                nulled = max(int(computed[request]) - int(far[group]), 0) // int(sizes[group])
                target[row, : min(nulled, count)] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    batch_to_request: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    pointers: torch.Tensor,
    strides: torch.Tensor,
    block_sizes: torch.Tensor,
    enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slots: torch.Tensor,
    slots_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """The slot of every token in every group; ``PAD_ID`` past the batch."""
    if CP_SIZE != 1:
        raise NotImplementedError(f"context parallelism over {CP_SIZE} ranks on a CPU; set it to 1")
    requests = batch_to_request.numpy()
    starts = query_start.numpy()[: len(requests) + 1]
    num_tokens = int(starts[-1])
    request = np.repeat(requests, np.diff(starts))
    position = positions.numpy()[:num_tokens]
    out = slots.numpy()
    out[:, num_tokens:max_num_tokens] = PAD_ID
    for group in range(len(strides)):
        if not bool(enabled[group]):
            out[group, :num_tokens] = PAD_ID
            continue
        size = int(block_sizes[group])
        table = _rows(pointers, strides, group, max(int(requests.max()), 0) + 1)
        block = table[np.maximum(request, 0), position // size].astype(np.int64)
        out[group, :num_tokens] = np.where(request < 0, PAD_ID, block * size + position % size)


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_tokens: torch.Tensor,
    next_tokens_stride: int,
    num_lookahead: int,
    batch_to_request: torch.Tensor,
    query_start: torch.Tensor,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,
    num_computed: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled part of each prompt, and note the tokens after it (0 past its end)."""
    starts, ids, tokens = query_start.numpy(), input_ids.numpy(), all_token_ids.numpy()
    following = next_tokens.numpy()
    for row, request in enumerate(batch_to_request.numpy()):
        length, computed = int(prefill_lens[request]), int(num_computed[request])
        if computed >= length:
            continue
        begin, end = int(starts[row]), int(starts[row + 1])
        stop = computed + end - begin
        ids[begin:end] = tokens[request, computed:stop]
        ahead = tokens[request, stop : min(stop + num_lookahead, length)]
        following[:num_lookahead, request] = 0
        following[: len(ahead), request] = ahead


def prepare_pos_seq_lens(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_to_request: torch.Tensor,
    query_start: torch.Tensor,
    num_computed: torch.Tensor,
    max_num_requests: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions of the batch's tokens and lengths of its requests; 0 for the requests that are not there."""
    requests = batch_to_request.numpy()
    starts = query_start.numpy()[: len(requests) + 1]
    lengths = np.diff(starts)
    computed = num_computed.numpy()[requests]
    seq_lens.numpy()[: len(requests)] = computed + lengths
    seq_lens.numpy()[len(requests) : max_num_requests] = 0
    offset = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    positions.numpy()[: starts[-1]] = np.repeat(computed, lengths) + offset


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    batch_to_request: torch.Tensor,
    last_sampled: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,
    logits_indices: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Which rows get logits, and the tokens that the last step sampled or drafted as this one's input."""
    starts, ends = query_start.numpy(), cu_num_logits.numpy()
    ids, indices = input_ids.numpy(), logits_indices.numpy()
    for row, request in enumerate(batch_to_request.numpy()):
        first, last = int(ends[row]), int(ends[row + 1])
        num_logits, query_end = last - first, int(starts[row + 1])
        begin = query_end - num_logits
        indices[first:last] = np.arange(begin, query_end)
        length, prefill = int(seq_lens[row]), int(prefill_lens[request])
        if length <= prefill:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and length - num_logits >= prefill:
            ids[begin] = int(last_sampled[request, 0])
        if (num_drafts := num_logits - NUM_NEW_SAMPLED_TOKENS) > 0:
            ids[query_end - num_drafts : query_end] = draft_tokens[request, :num_drafts].numpy()


def expand_idx_mapping(
    batch_to_request: torch.Tensor,
    expanded: torch.Tensor,
    local: torch.Tensor,
    cu_num_logits: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """For each row of logits its request, and its place among that request's rows."""
    ends = cu_num_logits.numpy()[: len(batch_to_request) + 1]
    counts, total = np.diff(ends), int(ends[-1])
    expanded.numpy()[:total] = np.repeat(batch_to_request.numpy(), counts)
    local.numpy()[:total] = np.arange(total) - np.repeat(ends[:-1], counts)


def apply_grammar_bitmask(
    logits: torch.Tensor,
    logits_stride: int,
    places: torch.Tensor,
    cu_num_logits: torch.Tensor,
    bitmask: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """-inf for every token that a grammar does not allow, in the rows that requests have."""
    ends = cu_num_logits.numpy()
    for index, place in enumerate(places.numpy()[: len(bitmask)]):
        request, position = divmod(int(place), MASK_STRIDE)
        row = int(ends[request]) + position
        if row < ends[request + 1]:
            allowed = np.unpackbits(bitmask[index].numpy().view(np.uint8), bitorder="little")[:vocab_size]
            logits[row, :vocab_size].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    batch_to_request: torch.Tensor,
    prefill_lens: torch.Tensor,
) -> None:
    """Nothing is sampled, and so nothing rejected, before a prompt's end."""
    num_requests = len(batch_to_request)
    unfinished = seq_lens[:num_requests] < prefill_lens[batch_to_request]
    num_sampled[:num_requests].masked_fill_(unfinished, 0)
    num_logits = cu_num_logits[: num_requests + 1].diff()
    num_rejected[:num_requests] = (num_logits - num_sampled[:num_requests]).masked_fill(unfinished, 0)


def post_update(
    batch_to_request: torch.Tensor,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
    counts: torch.Tensor | None,
    counts_stride: int,
    sampled: torch.Tensor,
    sampled_stride: int,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    all_token_ids_stride: int,
    total_len: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_tokens_out: torch.Tensor | None,
    num_draft_tokens: int,
    num_warps: int = 1,
) -> None:
    """Append what was sampled to each request's record and move its counters on."""
    computed, lengths, record = num_computed.numpy(), total_len.numpy(), all_token_ids.numpy()
    starts = None if query_start is None else query_start.numpy()
    for row, request in enumerate(batch_to_request.numpy()):
        if request < 0:
            continue
        if draft_tokens is not None and draft_tokens_out is not None:
            draft_tokens_out[request] = draft_tokens[row]
        if (count := int(num_sampled[row])) > 0:
            new = sampled[row, :count].numpy()
            length = int(lengths[request])
            last_sampled[request] = int(new[-1])
            record[request, length : length + count] = new
            lengths[request] = length + count
            if counts is not None:
                np.add.at(counts.numpy()[request], new, 1)
        length = 0 if starts is None else int(starts[row + 1] - starts[row])
        computed[request] += length - int(num_rejected[row])


def _greedy_or(interpreted: Any) -> Callable[..., None]:
    """The sampling kernel: the argmax itself where nobody asks for noise, else vLLM's own in the interpreter."""

    def gumbel_sample(
        local_argmax: torch.Tensor,
        local_argmax_stride: int,
        local_max: torch.Tensor,
        local_max_stride: int,
        logits_cache: torch.Tensor | None,
        logits_cache_stride_0: int,
        logits_cache_stride_1: int,
        logits_cache_col: torch.Tensor | None,
        logits_cache_source: torch.Tensor | None,
        logits_cache_source_stride: int,
        logits: torch.Tensor,
        logits_stride: int,
        batch_to_request: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        temperatures: torch.Tensor,
        vocab_size: int,
        **constants: Any,
    ) -> None:
        if logits_cache is not None or bool((temperatures[batch_to_request] != 0).any()):
            interpreted[tuple(local_argmax.shape)](
                local_argmax,
                local_argmax_stride,
                local_max,
                local_max_stride,
                logits_cache,
                logits_cache_stride_0,
                logits_cache_stride_1,
                logits_cache_col,
                logits_cache_source,
                logits_cache_source_stride,
                logits,
                logits_stride,
                batch_to_request,
                seeds,
                positions,
                temperatures,
                vocab_size,
                **constants,
            )
            return
        size = constants["BLOCK_SIZE"]
        for block in range(local_argmax.shape[1]):
            part = logits[:, block * size : min((block + 1) * size, vocab_size)].float().numpy()
            # numpy's argmax takes the first of equals, as the kernel does.
            best = part.argmax(-1)
            local_argmax[:, block] = torch.from_numpy(best + block * size)
            local_max[:, block] = torch.from_numpy(np.take_along_axis(part, best[:, None], -1)[:, 0])

    return gumbel_sample
