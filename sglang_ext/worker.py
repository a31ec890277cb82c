"""Drafting and verification under SGLang: what its scheduler calls in the place of its own DSpark worker.

The draft layers are part of the one model object (they share its embedding, its head and its checkpoint, and read
keys that its own forward writes), so there is no second model runner, pool or backend for them. A step of the
scheduler drafts after each request's last token, verifies and accepts: between steps nothing of a draft is
kept, so that a request may be aborted, retracted or resumed at any time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_model, get_observability, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_worker_common import make_draft_input_v2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from deepinfer_plugins.core.settings import Settings
from deepinfer_plugins.features.calibration import AcceptanceLog
from deepinfer_plugins.features.cost_curve import Clock, Mark, providers
from deepinfer_plugins.features.graphs import DraftGraphs, sizes_up_to
from deepinfer_plugins.features.sampling import NO_SLOT, Rows
from deepinfer_plugins.features.schedule import Plan
from deepinfer_plugins.features.verification import verify
from deepinfer_plugins.model.draft import confidences as confidences_of
from deepinfer_plugins.model.step import NO_POSITION, NO_TOKEN
from deepinfer_plugins.sglang_ext import speculation, versions
from deepinfer_plugins.sglang_ext.attention import Inputs
from deepinfer_plugins.sglang_ext.budget import Budget, cost_curve
from deepinfer_plugins.sglang_ext.grammar import SampleDraft, following
from deepinfer_plugins.sglang_ext.metrics import Metrics


class Window(NamedTuple):
    """The rows of one verification: each request's last token and, after it, some of its drafts.

    Args:
        request: int64 ``[rows]``.
        place: int64 ``[rows]``; 0 for the last token, ``i`` for draft ``i``, counted from 1.
        offsets: int64 ``[requests + 1]``; where the rows of each request start.
        token_ids: int64 ``[rows]``.
        prefix: int64 ``[rows, depth]``; the drafts before and at each row, -1 after them.
    """

    request: torch.Tensor
    place: torch.Tensor
    offsets: torch.Tensor
    token_ids: torch.Tensor
    prefix: torch.Tensor

    @classmethod
    def of(
        cls, last: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor | None, num_rows: int
    ) -> Window:
        """Lay out the rows without looking at a number on the device.

        Args:
            last: int64 ``[requests]``.
            drafts: int64 ``[requests, depth]``.
            lengths: int64 ``[requests]``; drafts to verify of each; None: all.
            num_rows: The requests and the sum of ``lengths``.
        """
        num_requests, depth = drafts.shape
        device = drafts.device
        rows_each = torch.full_like(last, depth + 1) if lengths is None else lengths + 1
        offsets = torch.zeros(num_requests + 1, dtype=torch.int64, device=device)
        torch.cumsum(rows_each, dim=0, out=offsets[1:])
        numbers = torch.arange(num_requests, device=device)
        request = torch.repeat_interleave(numbers, rows_each, output_size=num_rows)
        place = torch.arange(num_rows, device=device) - offsets[request]
        token_ids = torch.cat([last[:, None], drafts], dim=1)[request, place]
        column = torch.arange(depth, device=device)
        prefix = drafts[request].masked_fill(column >= place[:, None], NO_TOKEN)
        return cls(request, place, offsets, token_ids, prefix)


class Drafts(NamedTuple):
    """What is drafted for some requests.

    Args:
        tokens: int64 ``[requests, depth]``.
        confidence_logits: fp32 ``[requests, depth]``.
    """

    tokens: torch.Tensor
    confidence_logits: torch.Tensor


class Outcome(NamedTuple):
    """What became of a step, on its way to the host.

    Args:
        slots: int64 ``[requests]``, on the host.
        plan: The schedule's; None if it verified everything.
        planning_ms: Milliseconds that the host took for it.
        marks: Four of the clock's, around the phases.
        numbers: fp32 ``[requests, 2 + 2 * depth]``, on the host once the last mark is passed: drafts verified, drafts
            accepted, confidences, and the logits of those.
        num_rows: Of the verification as it ran, padding included.
    """

    slots: torch.Tensor
    plan: Plan | None
    planning_ms: float
    marks: tuple[Mark, ...]
    numbers: torch.Tensor
    num_rows: int


class DraftingWorker(BaseSpecWorker):
    """One scheduler step: draft, verify, accept.

    Args:
        server_args, gpu_id, nccl_port: As SGLang gives them; there is nothing left to set up.
        target_worker: The worker that runs prompts, with our model.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        self.speculative_num_draft_tokens = int(get_spec().speculative_num_draft_tokens)
        self.depth = self.speculative_num_draft_tokens - 1
        self._runner = target_worker.model_runner
        self._network = self._runner.model.network
        self._sampling = self._runner.model.sampling
        self._settings = Settings.from_env()
        self._is_scheduled = speculation.is_scheduled(self._settings)
        self._budget: Budget | None = None
        self._graphs: DraftGraphs[Drafts] | None = None
        self._metrics = Metrics() if get_observability().enable_metrics else None
        path = self._settings.acceptance_log
        facts = {"model": get_model().model_path, "engine": f"sglang {versions.installed()}"}
        self._log = None if path is None else AcceptanceLog(path, **facts)
        self._clock = Clock(torch.device(self._runner.device))
        self._outcomes: deque[Outcome] = deque()

    def init_cuda_graphs(self) -> None:
        """Capture drafts; and time steps, which the target has captured by now."""
        self._capture()
        if not self._is_scheduled:
            return
        most = get_schedule().max_running_requests * (self.depth + 1)
        curve = None
        if self._settings.verify_budget == "auto":
            width = 1 + self.depth
            captured = [size * width for size in self._runner.attn_backend.captured]
            key = {
                "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
                "sglang": versions.installed(),
                "config": repr(self._network.config),
                # What a step costs depends on whether it is replayed, and on how many rows a request has.
                "graphs": captured,
                "depth": self.depth,
                "providers": providers(self._network.ops),
            }
            curve = cost_curve(self._settings, most, captured, self._time_step, key)
        num_slots = self._runner.req_to_token_pool.req_to_token.shape[0]
        self._budget = Budget(num_slots, self.depth, curve, self._settings)
        self._temperatures = torch.tensor(
            self._budget.temperatures, dtype=torch.float64, device=torch.device(self._runner.device)
        )

    @torch.no_grad()
    def _time_step(self, num_rows: int) -> float:
        """Milliseconds of a step that verifies so many rows, in the place that padding has in the caches."""
        device = torch.device(self._runner.device)
        width = 1 + self.depth
        rows = torch.arange(num_rows, device=device)
        nowhere = torch.zeros(-(-num_rows // width), dtype=torch.int64, device=device)
        tokens = rows % self._network.config.vocab_size
        start = self._clock.mark()
        inputs = Inputs(nowhere, rows // width, tokens, rows % width, nowhere, width)
        self._network.logits(self._runner.attn_backend.run(inputs))
        end = self._clock.mark()
        self._clock.wait()
        return self._clock.milliseconds(start, end)

    @property
    def preloaded_weights_bytes(self) -> int:
        return 0

    def get_confidence_budget_prepare(self) -> None:
        """SGLang's own schedule of verification; ours needs nothing from the scheduler."""

    def dump_info_records(self) -> None:
        """SGLang's own records of its worker's steps."""

    def block_accept_estimate_log_suffix(self) -> None:
        """SGLang's own estimate, in its log of a step."""

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, grammar_barrier: Any = None, *, pp_proxy_tensors: Any = None
    ) -> GenerationBatchResult:
        """Run a batch of SGLang's scheduler.

        Args:
            batch: A ``ScheduleBatch``.
            on_publish: Called with the new lengths as soon as they are known on the device.
            grammar_barrier: Called before grammars are read: brings them up to the last batch's tokens.
            pp_proxy_tensors: Of pipeline parallelism, which is refused.
        """
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        return self._decode(batch, on_publish, grammar_barrier)

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """SGLang has a step's tokens on the host, and so our numbers of it are there too."""
        self._collect()

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        if self._budget is not None:
            decoding = {id(req) for req in batch.decoding_reqs or ()}
            self._budget.forget([req.kv.req_pool_idx for req in batch.reqs if id(req) not in decoding])
        result = self._target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        result.next_draft_input = make_draft_input_v2(
            bonus_tokens=result.next_token_ids, new_seq_lens=batch.seq_lens
        )
        return result

    @torch.no_grad()
    def _decode(self, batch: Any, on_publish: Any, grammar_barrier: Any) -> GenerationBatchResult:
        self._collect()
        self._sampling.admit(self._runner, batch)
        asked = time.perf_counter()
        plan = None if self._budget is None else self._budget.plan(batch.req_pool_indices_cpu)
        planning_ms = 1e3 * (time.perf_counter() - asked)
        backend, state = self._runner.attn_backend, self._sampling.state
        # The last token's position is the number of tokens before it.
        last, positions = batch.spec_info.bonus_tokens.long(), batch.seq_lens.long()
        slots = batch.req_pool_indices.long()
        num_requests = slots.shape[0]
        longest = int(batch.spec_info.nxt_kv_lens_cpu.max())

        started = self._clock.mark()
        if batch.has_grammar:
            if grammar_barrier is not None:
                # Drafts follow the grammars from the last token on.
                grammar_barrier()
            drafted = self._draft(slots, last, positions, longest, batch.reqs)
        else:
            drafted = self._replay_draft(slots, last, positions, longest)
        has_drafted = self._clock.mark()
        confidences, lengths = torch.zeros_like(drafted.confidence_logits), None
        num_drafts = num_requests * self.depth
        if self._budget is not None and plan is not None:
            num_drafts = plan.budget
            confidences = confidences_of(drafted.confidence_logits, self._temperatures)
            lengths = self._budget.lengths(confidences, plan)
        window = Window.of(last, drafted.tokens, lengths, num_requests + num_drafts)
        tree = None
        if batch.has_grammar:
            # Starts a copy to the host that is awaited after the forward is on its way.
            tree = GrammarTree.from_linear_chain(torch.cat([last[:, None], drafted.tokens], dim=1))

        row_positions = positions[window.request] + window.place
        inputs = Inputs(slots, window.request, window.token_ids, row_positions, positions, longest)
        logits = self._network.logits(backend.run(inputs))
        has_run, num_rows = self._clock.mark(), backend.num_rows
        if tree is not None:
            self._apply_grammar(logits, window, batch, tree, grammar_barrier)
        rows = Rows(slots[window.request], row_positions + 1, window.prefix)
        verified = verify(state, logits, rows, window.offsets)
        accepted = verified.num_accepted
        state.commit(slots, verified.tokens)
        new_lengths = positions + accepted + 1
        if on_publish is not None:
            on_publish(new_lengths)
        output = LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            self._report_logprobs(output, verified, batch)
        marks = (started, has_drafted, has_run, self._clock.mark())
        judged = torch.cat([confidences, drafted.confidence_logits], dim=1)
        self._await(batch.req_pool_indices_cpu, plan, planning_ms, marks, window, accepted, judged, num_rows)
        bonus = verified.tokens.gather(1, accepted[:, None])[:, 0]
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=verified.tokens.flatten(),
            accept_lens=(accepted + 1).int(),
            cap_lens=None if lengths is None else (lengths + 1).int(),
            next_draft_input=make_draft_input_v2(bonus_tokens=bonus, new_seq_lens=new_lengths),
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            speculative_output_stride=verified.tokens.shape[1],
            new_seq_lens=new_lengths,
            can_run_cuda_graph=backend.replays,
        )

    def _draft(
        self,
        slots: torch.Tensor,
        last: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
        constrained: Sequence[Any] = (),
    ) -> Drafts:
        """Draft after the last token of each request.

        Args:
            slots: int64 ``[requests]``; ``NO_SLOT``: padding.
            last: int64 ``[requests]``.
            positions: int64 ``[requests]``, of the last tokens; ``NO_POSITION``: padding.
            longest: As of :class:`Inputs`.
            constrained: The requests, if some have a grammar.
        """
        backend, rows = self._runner.attn_backend, slots.clamp(min=0)
        request = torch.arange(slots.shape[0], device=slots.device)
        step = backend.step(rows, request, last, positions, positions)
        sampler: SampleDraft = self._sampling.state.draft_sampler(slots, positions + 1)
        with following(constrained, sampler) if constrained else nullcontext(sampler) as sample:
            drafted = self._network.draft(step, backend.caches(rows, longest), self.depth, sample)
        return Drafts(drafted.tokens, drafted.confidence_logits)

    def _replay_draft(
        self, slots: torch.Tensor, last: torch.Tensor, positions: torch.Tensor, longest: int
    ) -> Drafts:
        """:meth:`_draft` without grammars, from a graph if one serves the requests."""
        count = slots.shape[0]
        found = None if self._graphs is None else self._graphs.find(count)
        if found is None:
            return self._draft(slots, last, positions, longest)
        graphs, size = found
        self._slots[:count], self._slots[count:size] = slots, NO_SLOT
        self._last[:count] = last
        self._positions[:count], self._positions[count:size] = positions, NO_POSITION
        drafted = graphs.replay(size)
        # The target's graphs share the memory: what is read after their replay must not lie in it.
        return Drafts(*(part[:count].clone() for part in drafted))

    def _capture(self) -> None:
        """Capture drafts, if the target's steps are."""
        backend, device = self._runner.attn_backend, torch.device(self._runner.device)
        if not backend.captured:
            return
        most = max(backend.captured)
        self._slots = torch.full((most,), NO_SLOT, device=device)
        self._positions = torch.full((most,), NO_POSITION, device=device)
        self._last = torch.zeros(most, dtype=torch.int64, device=device)
        graphs = DraftGraphs(
            lambda size: self._draft(
                self._slots[:size], self._last[:size], self._positions[:size], backend.longest
            ),
            sizes_up_to(most),
            self._sampling.prepare(self._runner),
            self.depth,
            rejection=self._sampling.may_reject,
        )
        graphs.capture(backend.graph_pool)
        self._graphs = graphs

    def _await(
        self,
        slots: torch.Tensor,
        plan: Plan | None,
        planning_ms: float,
        marks: tuple[Mark, ...],
        window: Window,
        accepted: torch.Tensor,
        judged: torch.Tensor,
        num_rows: int,
    ) -> None:
        """Start to copy to the host what :meth:`_collect` will want of this step."""
        if self._metrics is None and self._log is None and plan is None:
            return
        numbers = torch.cat([(window.offsets.diff() - 1)[:, None], accepted[:, None], judged], dim=1)
        numbers = numbers.to("cpu", non_blocking=True)
        marks = (*marks, self._clock.mark())
        self._outcomes.append(Outcome(slots, plan, planning_ms, marks, numbers, num_rows))

    def _collect(self) -> None:
        """Hand on what has arrived on the host, without waiting for what has not."""
        while self._outcomes and self._clock.passed(self._outcomes[0].marks[-1]):
            slots, plan, planning_ms, marks, numbers, num_rows = self._outcomes.popleft()
            draft, forward, sample = (
                self._clock.milliseconds(start, end) for start, end in zip(marks[:3], marks[1:4], strict=True)
            )
            phases = {"schedule": planning_ms, "draft": draft, "forward": forward, "sample": sample}
            (verified, accepted), confidences = numbers[:, :2].long().T, numbers[:, 2 : 2 + self.depth]
            if self._metrics is not None:
                self._metrics.observe(self.depth, verified.tolist(), accepted.tolist(), phases)
            if self._log is not None:
                self._log.write(numbers[:, 2 + self.depth :], verified, accepted)
            if self._budget is not None and plan is not None:
                self._budget.record(slots, confidences, plan)
                if self._budget.cost is not None:
                    self._budget.cost.observe_forward(num_rows, forward)
                    self._budget.cost.observe_sampler(len(slots), draft + sample)

    def _apply_grammar(
        self, logits: torch.Tensor, window: Window, batch: Any, tree: GrammarTree, barrier: Any
    ) -> None:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=tree,
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=barrier,
        )
        if mask is not None:
            chosen = window.request * (self.depth + 1) + window.place
            mask._replace(vocab_mask=mask.vocab_mask[chosen]).apply(logits)

    def _report_logprobs(self, output: LogitsProcessorOutput, verified: Any, batch: Any) -> None:
        """SGLang reads the logprobs of token ``j`` of request ``b`` at row ``b * width + j``."""
        output.next_token_logits = verified.logits[verified.row_of_token.flatten().clamp(min=0)]
        tokens = verified.tokens.flatten().clamp(min=0)
        compute_spec_logprobs(batch, output, tokens, chain_stride=verified.tokens.shape[1])
