"""The least that an engine must do to run the model: pages, chunks, batches, reuse, preemption.

It is meant to be unkind. Page ids are random, every page is poisoned with 0xFF (NaN in each format)
before it is handed out and when it is given back, pages behind a window are given back as soon as
nothing may read them, layers are interleaved in one allocation, and unused table entries hold ids of
other requests' pages. A row that is computed twice must have the same bits both times.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.model.caches import CacheSpec, cache_specs
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.step import NO_TOKEN, Caches, Paged, Step

POISON = 0xFF


@dataclass(eq=False)
class Request:
    """One sequence.

    Args:
        tokens: The prompt and what was generated after it.
        image: Positions that belong to images.
        computed: Tokens whose keys are in the caches.
        pages: For each group, the page of each run of entries; None before it is needed and once it is freed.
        hidden: Hidden state by position, of every row computed so far.
    """

    tokens: list[int]
    image: frozenset[int] = frozenset()
    computed: int = 0
    pages: dict[str, list[int | None]] = field(default_factory=dict)
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)


class Group:
    """Caches that share a page table: those of one kind and ratio."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        page_size: int,
        num_pages: int,
        rng: random.Random,
        page_stride: int | None,
    ) -> None:
        first = specs[0]
        self.name = f"{first.kind}/{first.ratio}"
        self.specs = specs
        self.ratio, self.window, self.page_size = first.ratio, first.window, page_size
        layer_bytes = page_size * (first.record_bytes + 3)
        stride = len(specs) * layer_bytes if page_stride is None else page_stride
        # Untouched memory costs nothing, so pages may lie gigabytes apart.
        memory = torch.empty(num_pages * stride, dtype=torch.uint8)
        self.pages = {
            spec.layer: memory.as_strided(
                (num_pages, page_size, first.record_bytes),
                (stride, first.record_bytes + 3, 1),
                index * layer_bytes,
            )
            for index, spec in enumerate(specs)
        }
        self.num_pages = num_pages
        self.free = list(range(num_pages))
        rng.shuffle(self.free)
        self.rng = rng

    def take(self) -> int:
        assert self.free, f"{self.name}: all {self.num_pages} pages are taken; give the engine more"
        page = self.free.pop(self.rng.randrange(len(self.free)))
        self._poison(page)
        return page

    def give_back(self, page: int) -> None:
        self._poison(page)
        self.free.append(page)

    def _poison(self, page: int) -> None:
        for pages in self.pages.values():
            pages[page] = POISON


class PagedEngine:
    """Runs requests through a model.

    Args:
        model: The model.
        page_sizes: Entries per page, by kind.
        num_pages: Pages of each group.
        seed: Of everything random.
        page_stride: Bytes from one page to the next; None packs them.
        draft: Whether the draft's context keys are kept.
    """

    def __init__(
        self,
        model: DeepseekV41,
        page_sizes: Mapping[str, int],
        num_pages: int = 256,
        seed: int = 0,
        page_stride: int | None = None,
        draft: bool = False,
    ) -> None:
        self.model = model
        self.rng = random.Random(seed)
        by_group: dict[tuple[str, int], list[CacheSpec]] = {}
        for spec in cache_specs(model.config, draft):
            by_group.setdefault((spec.kind, spec.ratio), []).append(spec)
        self.groups = [
            Group(specs, page_sizes[kind], num_pages, self.rng, page_stride)
            for (kind, _), specs in by_group.items()
        ]
        self.context = model.config.engram_max_ngram_size - 1
        self.steps = 0

    # -- Requests --

    def add(self, tokens: Sequence[int], image: frozenset[int] = frozenset()) -> Request:
        return Request(list(tokens), image, pages={group.name: [] for group in self.groups})

    def fork(self, request: Request, length: int, tokens: Sequence[int]) -> Request:
        """A request for ``tokens`` that takes the keys of its first ``length`` tokens from ``request``."""
        assert list(tokens[:length]) == request.tokens[:length] and length <= request.computed
        new = self.add(tokens, request.image)
        new.computed = length
        for group in self.groups:
            for index, page in enumerate(
                request.pages[group.name][: -(-length // (group.ratio * group.page_size))]
            ):
                if page is None:
                    new.pages[group.name].append(None)
                    continue
                copy = group.take()
                for pages in group.pages.values():
                    entries = max(0, min(group.page_size, length // group.ratio - index * group.page_size))
                    pages[copy, :entries] = pages[page, :entries]
                new.pages[group.name].append(copy)
        return new

    def preempt(self, request: Request) -> None:
        """Take all pages away; the request starts over, with the tokens it has generated."""
        for group in self.groups:
            for page in request.pages[group.name]:
                if page is not None:
                    group.give_back(page)
            request.pages[group.name] = []
        request.computed = 0

    # -- Steps --

    def make_step(self, plan: Sequence[tuple[Request, int, Sequence[int]]]) -> tuple[Step, Caches]:
        """Allocate pages for the next rows of some requests.

        Args:
            plan: Request, number of its next tokens, draft tokens to verify after them.
        """
        token_ids, positions, owners, context, image = [], [], [], [], []
        for owner, (request, count, drafts) in enumerate(plan):
            first, last = request.computed, request.computed + count + len(drafts) - 1
            self._allocate(request, first, last)
            tokens = request.tokens[: first + count] + list(drafts)
            assert len(tokens) == last + 1
            token_ids += tokens[first:]
            positions += range(first, last + 1)
            owners += [owner] * (last + 1 - first)
            image += [position in request.image for position in range(first, last + 1)]
            before = [
                NO_TOKEN if p in request.image else tokens[p]
                for p in range(max(0, first - self.context), first)
            ]
            context.append((before[::-1] + [NO_TOKEN] * self.context)[: self.context])
        tensors = [torch.tensor(x, dtype=torch.int64) for x in (token_ids, positions, owners)]
        step = Step(
            *tensors,
            context_ids=torch.tensor(context, dtype=torch.int64),
            image=torch.tensor(image) if any(image) else None,
        )
        return step, self._caches([request for request, _, _ in plan])

    def run(self, plan: Sequence[tuple[Request, int] | tuple[Request, int, Sequence[int]]]) -> torch.Tensor:
        """One step. Rows of drafts are computed and then forgotten, as if all were rejected.

        Returns:
            Hidden states of all rows.
        """
        full = [(item[0], item[1], item[2] if len(item) > 2 else ()) for item in plan]
        step, caches = self.make_step(full)
        hidden = self.model(step, caches)
        self.steps += 1
        row = 0
        for request, count, drafts in full:
            for position, state in enumerate(hidden[row : row + count], request.computed):
                if position in request.hidden:
                    assert_same_bits(state, request.hidden[position], f"recomputed position {position}")
                request.hidden[position] = state
            request.computed += count
            row += count + len(drafts)
        return hidden

    def generate(self, requests: Sequence[Request], new_tokens: int, chunk: int, drafts: int = 0) -> None:
        """Give each request ``new_tokens`` more tokens; decode rows and chunks of prompts share steps.

        Args:
            requests: All are there from the start; prompts are taken in order.
            new_tokens: Tokens to generate for each.
            chunk: Prompt tokens per step, over all requests.
            drafts: Wrong tokens to verify after each decode row.
        """
        goal = {id(request): len(request.tokens) + new_tokens for request in requests}
        vocab = self.model.config.vocab_size
        while waiting := [request for request in requests if len(request.tokens) < goal[id(request)]]:
            plan: list[tuple[Request, int, Sequence[int]]] = []
            budget = chunk
            for request in waiting:
                left = len(request.tokens) - request.computed
                if left == 1:
                    plan.append((request, 1, [self.rng.randrange(vocab) for _ in range(drafts)]))
                elif budget:
                    plan.append((request, min(left, budget), ()))
                    budget -= min(left, budget)
            self.rng.shuffle(plan)
            self.run(plan)
            done = [request for request, _, _ in plan if request.computed == len(request.tokens)]
            if done:
                last = torch.stack([request.hidden[request.computed - 1] for request in done])
                for request, token in zip(done, self.model.logits(last).argmax(-1).tolist()):
                    request.tokens.append(token)

    # -- Pages --

    def _allocate(self, request: Request, first: int, last: int) -> None:
        for group in self.groups:
            pages = request.pages[group.name]
            per_page = group.page_size * group.ratio
            if group.window is not None:
                for index in range(max(0, first - group.window + 1) // per_page):
                    if index < len(pages) and (page := pages[index]) is not None:
                        group.give_back(page)
                        pages[index] = None
            while len(pages) * per_page <= last:
                pages.append(group.take())

    def _caches(self, requests: Sequence[Request]) -> Caches:
        caches: dict[str, dict[int, Paged]] = {kind: {} for kind in Caches.__dataclass_fields__}
        for group in self.groups:
            width = max(len(request.pages[group.name]) for request in requests) + 1
            table = torch.tensor(
                [
                    [self.rng.randrange(group.num_pages) if page is None else page for page in pages]
                    + [self.rng.randrange(group.num_pages) for _ in range(width - len(pages))]
                    for pages in (request.pages[group.name] for request in requests)
                ],
                dtype=torch.int32,
            )
            for spec in group.specs:
                caches[spec.kind][spec.layer] = Paged(group.pages[spec.layer], table)
        return Caches(**caches)
