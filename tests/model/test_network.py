"""The running model against the oracle, and against itself under every schedule an engine may choose."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.core.testing import assert_same_bits
from deepinfer_plugins.kernels.catalogue import load_ops
from deepinfer_plugins.model.checkpoint import Checkpoint, Placement
from deepinfer_plugins.model.config import ModelConfig
from deepinfer_plugins.model.engram import CompressedVocabulary
from deepinfer_plugins.model.loading import load
from deepinfer_plugins.model.make_checkpoint import make_checkpoint
from deepinfer_plugins.model.network import DeepseekV41
from deepinfer_plugins.model.oracle import Oracle
from deepinfer_plugins.model.step import Step

from .paged import PagedEngine, Request

# Around the window (16), a compressed pair, a page, and where selection and candidates begin to leave entries out.
LENGTHS = (1, 2, 5, 15, 16, 17, 33, 63, 64, 65, 100, 127, 128, 129, 333, 700)
NEW_TOKENS = 64
PAGES = {"window": 16, "compressed": 64, "index_key": 64, "compressor": 16, "draft": 16}
ODD_PAGES = {"window": 6, "compressed": 5, "index_key": 7, "compressor": 3, "draft": 6}
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Case:
    """A random checkpoint, both models of it, and prompts."""

    config: ModelConfig
    folder: Path
    model: DeepseekV41
    oracle: Oracle
    prompts: tuple[tuple[int, ...], ...]


def build(folder: Path, placement: Placement | None = None, **options: object) -> DeepseekV41:
    checkpoint = Checkpoint.open(folder)
    model = DeepseekV41(
        checkpoint.config,
        load_ops(Want(Arch.CPU)),
        device=torch.device("cpu"),
        max_positions=MAX_POSITIONS,
        vocabulary=CompressedVocabulary.from_folder(folder, checkpoint.config.vocab_size),
        placement=placement,
        draft=True,
        **options,  # type: ignore[arg-type]
    )
    load(model, checkpoint)
    return model


def make_case(folder: Path, shape: str) -> Case:
    make_checkpoint(folder, shape)
    checkpoint = Checkpoint.open(folder)
    config = checkpoint.config
    vocabulary = CompressedVocabulary.from_folder(folder, config.vocab_size)
    oracle = Oracle(config, {name: checkpoint.read(name) for name in checkpoint.names}, vocabulary.map)
    rng = random.Random(41)
    prompts = tuple(tuple(rng.randrange(3, config.vocab_size) for _ in range(length)) for length in LENGTHS)
    return Case(config, folder, build(folder), oracle, prompts)


@functools.cache
def oracle_logits(
    oracle: Oracle, prompt: tuple[int, ...], image: frozenset[int] = frozenset()
) -> torch.Tensor:
    """The oracle takes seconds, and several tests ask it the same."""
    mask = torch.tensor([position in image for position in range(len(prompt))]) if image else None
    return oracle.logits(prompt, mask)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("tiny") / "checkpoint", "tiny")


@pytest.fixture(scope="module")
def expected(tiny: Case) -> list[Request]:
    """All prompts as one batch. The oracle is asked about these; every other schedule must reproduce them."""
    engine = PagedEngine(tiny.model, PAGES, num_pages=512)
    requests = [engine.add(prompt) for prompt in tiny.prompts]
    engine.generate(requests, NEW_TOKENS, chunk=128)
    return requests


def assert_same_request(got: Request, want: Request, label: str) -> None:
    """What ``got`` has computed, ``want`` has too, bit for bit; ``want`` may have gone further."""
    assert got.tokens == want.tokens[: len(got.tokens)], f"{label}: other tokens"
    assert sorted(got.hidden) == list(range(min(got.hidden), got.computed)), f"{label}: rows are missing"
    for position, state in got.hidden.items():
        assert_same_bits(state, want.hidden[position], f"{label}, position {position}")


def states(request: Request, start: int = 0) -> torch.Tensor:
    return torch.stack([request.hidden[position] for position in range(start, request.computed)])


def assert_one_ulp(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    """Both are roundings to fp32 of sums that differ by 1e-13 at most: equal, or neighbours."""
    near = (got == want) | (torch.nextafter(got, want) == want)
    assert near.all(), f"{label}: {(~near).sum()} of {near.numel()} logits are more than one ulp away"


# -- Against the oracle --


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[str(length) for length in LENGTHS])
def test_generates_what_the_oracle_generates(tiny: Case, expected: list[Request], index: int) -> None:
    request, length = expected[index], LENGTHS[index]
    want = tiny.oracle.logits(request.tokens[:-1])
    assert request.tokens[length:] == want[length - 1 :].argmax(-1).tolist()
    assert_one_ulp(tiny.model.logits(states(request)), want, f"prompt of {length}")


def test_a_larger_model_generates_what_the_oracle_generates(tmp_path: Path) -> None:
    small = make_case(tmp_path / "checkpoint", "small")
    engine = PagedEngine(small.model, ODD_PAGES)
    requests = [engine.add(small.prompts[LENGTHS.index(length)]) for length in (17, 128, 333)]
    engine.generate(requests, 6, chunk=200)
    for request in requests:
        want = small.oracle.logits(request.tokens[:-1])
        assert request.tokens[-6:] == want[-6:].argmax(-1).tolist()
        assert_one_ulp(small.model.logits(states(request)), want, f"{len(request.tokens) - 6} tokens")


@pytest.mark.parametrize(
    "wider", [{"index_topk": 1024}, {"candidate_topk_blocks": 1024}, {"sliding_window": 1024}], ids=str
)
def test_selection_leaves_entries_out(tiny: Case, wider: dict[str, int]) -> None:
    """The configuration of the other tests is one in which each limit changes the result."""
    prompt = tiny.prompts[LENGTHS.index(129)]
    unlimited = Oracle(replace(tiny.config, **wider), tiny.oracle.tensors, tiny.oracle.compressed_vocab)
    assert not torch.equal(unlimited.logits(prompt)[-1], oracle_logits(tiny.oracle, prompt)[-1])


@pytest.mark.parametrize("chunk", [1024, 7])
def test_image_rows(tiny: Case, chunk: int) -> None:
    """They route by a bias of their own, and neither they nor n-grams across them use Engram."""
    image = frozenset({0, *range(20, 41), 98})
    prompt = tiny.prompts[LENGTHS.index(100)]
    engine = PagedEngine(tiny.model, PAGES)
    request = engine.add(prompt, image)
    engine.generate([request], 1, chunk)
    want = oracle_logits(tiny.oracle, prompt, image)
    assert_one_ulp(tiny.model.logits(states(request)), want, "image rows")
    assert not torch.equal(oracle_logits(tiny.oracle, prompt), want)


# -- Against itself --


@pytest.mark.parametrize(
    ("batch", "chunk", "page_sizes", "new_tokens"),
    [
        (2, 63, PAGES, 6),
        (7, 128, ODD_PAGES, NEW_TOKENS),
        (16, 63, dict.fromkeys(PAGES, 64), 20),
        (16, 128, dict.fromkeys(PAGES, 1), 20),
    ],
    ids=["2 x 63", "7 x 128", "16 x 63", "16 x 128"],
)
def test_batches_and_chunks(
    tiny: Case,
    expected: list[Request],
    batch: int,
    chunk: int,
    page_sizes: dict[str, int],
    new_tokens: int,
) -> None:
    order = list(range(len(LENGTHS)))
    random.Random(batch).shuffle(order)
    for start in range(0, len(order), batch):
        engine = PagedEngine(tiny.model, page_sizes, num_pages=8192 // min(page_sizes.values()), seed=start)
        chosen = order[start : start + batch]
        requests = [engine.add(tiny.prompts[index]) for index in chosen]
        engine.generate(requests, new_tokens, chunk)
        for index, request in zip(chosen, requests):
            assert_same_request(request, expected[index], f"prompt of {LENGTHS[index]}")


@pytest.mark.parametrize("index", range(len(LENGTHS)), ids=[str(length) for length in LENGTHS])
def test_alone(tiny: Case, expected: list[Request], index: int) -> None:
    """The whole prompt in one step, then one row at a time."""
    engine = PagedEngine(tiny.model, PAGES)
    request = engine.add(tiny.prompts[index])
    engine.generate([request], NEW_TOKENS if LENGTHS[index] in (1, 65, 700) else 3, chunk=MAX_POSITIONS)
    assert_same_request(request, expected[index], f"prompt of {LENGTHS[index]}")


def test_chunks_of_one_token(tiny: Case, expected: list[Request]) -> None:
    engine = PagedEngine(tiny.model, ODD_PAGES)
    chosen = [index for index, length in enumerate(LENGTHS) if length <= 33]
    requests = [engine.add(tiny.prompts[index]) for index in chosen]
    engine.generate(requests, 3, chunk=1)
    for index, request in zip(chosen, requests):
        assert_same_request(request, expected[index], f"prompt of {LENGTHS[index]}")


@pytest.mark.parametrize("page_sizes", [PAGES, ODD_PAGES], ids=["even pages", "odd pages"])
def test_prefix_reuse(tiny: Case, expected: list[Request], page_sizes: dict[str, int]) -> None:
    """Keys of another request's first tokens serve as one's own, wherever the two part."""
    index = LENGTHS.index(129)
    prompt = tiny.prompts[index]
    engine = PagedEngine(tiny.model, page_sizes, num_pages=1024)
    requests = []
    for length, beyond in (
        (1, 0),
        (2, 0),
        (15, 4),
        (16, 0),
        (17, 2),
        (63, 5),
        (64, 1),
        (100, 0),
        (127, 0),
        (128, 0),
    ):
        donor = engine.add([*prompt[:length], *range(3, 3 + beyond)])
        engine.run([(donor, length + beyond)])
        requests.append(engine.fork(donor, length, prompt))
        engine.preempt(donor)
    engine.generate(requests, 3, chunk=50)
    for request in requests:
        assert_same_request(request, expected[index], f"reused {min(request.hidden)} tokens")


def test_preemption(tiny: Case, expected: list[Request]) -> None:
    """A request that lost its pages recomputes the same rows, generated tokens as part of its prompt."""
    chosen = [LENGTHS.index(length) for length in (1, 2, 17, 64, 129)]
    engine = PagedEngine(tiny.model, ODD_PAGES)
    requests = [engine.add(tiny.prompts[index]) for index in chosen]
    for new_tokens in (1, 6, 5):
        engine.generate(requests, new_tokens, chunk=40)
        for request in engine.rng.sample(requests, 3):
            engine.preempt(request)
    engine.generate(requests, 2, chunk=63)
    for index, request in zip(chosen, requests):
        assert_same_request(request, expected[index], f"prompt of {LENGTHS[index]}")


@pytest.mark.parametrize("drafts", [1, 4])
def test_rejected_drafts_leave_no_trace(tiny: Case, expected: list[Request], drafts: int) -> None:
    chosen = [LENGTHS.index(length) for length in (1, 16, 33, 128)]
    engine = PagedEngine(tiny.model, PAGES)
    requests = [engine.add(tiny.prompts[index]) for index in chosen]
    engine.generate(requests, 12, chunk=63, drafts=drafts)
    for index, request in zip(chosen, requests):
        assert_same_request(request, expected[index], f"prompt of {LENGTHS[index]}")


def test_pages_past_two_gigabytes(tiny: Case, expected: list[Request]) -> None:
    """Offsets do not fit in 32 bits."""
    index = LENGTHS.index(100)
    stride = 2**31 // 32
    engine = PagedEngine(tiny.model, PAGES, num_pages=64, page_stride=stride)
    request = engine.add(tiny.prompts[index])
    engine.generate([request], 3, chunk=63)
    highest = max(page for page in request.pages["window/1"] if page is not None)
    assert highest * stride > 2**31
    assert_same_request(request, expected[index], "far pages")


def test_a_step_of_no_rows(tiny: Case) -> None:
    engine = PagedEngine(tiny.model, PAGES)
    request = engine.add(tiny.prompts[0])
    step, caches = engine.make_step([(request, 1, ())])
    none = step.token_ids[:0]
    empty = replace(step, token_ids=none, positions=none, request=none)
    assert tiny.model(empty, caches).shape == (0, tiny.config.hidden_size)


# -- Which rows the decoder side runs on, and where rows live --


def replay(
    case: Case, prompt: Sequence[int], keep: int, chunk: int, mask: bool
) -> tuple[PagedEngine, Request]:
    """Prefill with the decoder side bounded to the last ``keep`` rows.

    Args:
        mask: Run the decoder side on all rows all the same, and only bound the windows.
    """
    engine = PagedEngine(case.model, ODD_PAGES)
    request = engine.add(prompt)
    floor = len(prompt) - keep
    while request.computed < len(prompt):
        count = min(chunk, len(prompt) - request.computed)
        step, caches = engine.make_step([(request, count, ())])
        kept = torch.arange(count) if mask else (step.positions >= floor).nonzero()[:, 0]
        bounds = torch.where(step.positions >= floor, floor, 0)
        hidden = case.model(step.keep(kept, bounds[kept]), caches)
        for row, position in enumerate(step.positions.tolist()):
            if position >= floor:
                request.hidden[position] = hidden[row]
            elif not mask:
                assert not hidden[row].any(), f"position {position} was dropped, but is not zero"
        request.computed += count
    request.tokens.append(int(case.model.logits(request.hidden[len(prompt) - 1][None]).argmax()))
    return engine, request


@pytest.mark.parametrize("chunk", [1024, 33])
def test_bounded_replay(tiny: Case, chunk: int) -> None:
    prompt, keep = tiny.prompts[LENGTHS.index(100)], 20
    engine, request = replay(tiny, prompt, keep, chunk, mask=False)
    _, masked = replay(tiny, prompt, keep, chunk, mask=True)
    for position in range(len(prompt) - keep, len(prompt)):
        assert_same_bits(request.hidden[position], masked.hidden[position], f"position {position}")
    want = tiny.oracle.logits(prompt, decoder_from=len(prompt) - keep)
    assert_one_ulp(tiny.model.logits(states(request, len(prompt) - keep)), want, "kept rows")
    assert not torch.equal(want[0], oracle_logits(tiny.oracle, prompt)[len(prompt) - keep]), (
        "nothing was bounded"
    )
    engine.generate([request], 5, chunk)
    assert tiny.oracle.verify(prompt, request.tokens[len(prompt) :], replay_keep=keep) is None


class Group:
    """Ranks as threads that meet wherever one needs the others' tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=300)
        self.mail: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.mail[rank] = x
        self.barrier.wait()
        everything = list(self.mail)
        self.barrier.wait()
        return everything

    def gather(self, rank: int, shares: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        order = torch.cat(list(shares)).argsort()
        return lambda x: torch.cat(self.exchange(rank, x))[order]

    def reduce(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.stack(self.exchange(rank, x)).sum(0).to(x.dtype)

    def run(self, work: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        results: list[torch.Tensor | BaseException] = [torch.empty(0)] * self.size

        def guarded(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return [result for result in results if isinstance(result, torch.Tensor)]


def spread(step: Step, rank: int, group: Group) -> Step:
    """Every ``size``-th row to this rank, from both ends, on either side of the cut."""
    rows = torch.arange(step.num_rows)
    turn = rows % (2 * group.size)
    shares = [rows[(turn == r) | (turn == 2 * group.size - 1 - r)] for r in range(group.size)]
    decoder = None if step.decoder is None else spread(step.decoder, rank, group)
    return replace(step, local_rows=shares[rank], gather=group.gather(rank, shares), decoder=decoder)


@pytest.mark.parametrize("keep", [None, 21])
def test_rows_spread_over_ranks(tiny: Case, keep: int | None) -> None:
    """Each rank computes its own rows' queries, and all ranks' caches get all keys."""
    group = Group(2)
    prompts = [tiny.prompts[LENGTHS.index(length)] for length in (17, 65)]

    def run(rank: int | None) -> torch.Tensor:
        engine = PagedEngine(tiny.model, ODD_PAGES, seed=rank or 0)
        requests = [engine.add(prompt) for prompt in prompts]
        results = []
        for counts in ((9, 40), (8, 25)):
            step, caches = engine.make_step([(r, count, ()) for r, count in zip(requests, counts)])
            if keep is not None:
                step = step.keep(torch.arange(max(0, step.num_rows - keep), step.num_rows))
            results.append(tiny.model(step if rank is None else spread(step, rank, group), caches))
            for request, count in zip(requests, counts):
                request.computed += count
        return torch.cat(results)

    want = run(None)
    for rank, got in enumerate(group.run(run)):
        assert_same_bits(got, want, f"rank {rank}")


def test_weights_spread_over_ranks(tiny: Case, expected: list[Request]) -> None:
    """Each rank holds half of the experts and of the Engram rows."""
    group = Group(2)
    index = LENGTHS.index(33)
    models = [build(tiny.folder, Placement(rank, 2, rank, 2), reduce=group.reduce(rank)) for rank in range(2)]
    whole = dict(tiny.model.named_parameters())
    for name in ("layers.1.engram.table", "layers.1.ffn.w13", "draft_model.layers.0.ffn.w2_scales"):
        shards = [dict(model.named_parameters())[name] for model in models]
        joined = torch.cat([shard.view(torch.uint8) for shard in shards])
        assert_same_bits(joined[: len(whole[name])], whole[name].view(torch.uint8), name)

    def run(rank: int) -> torch.Tensor:
        engine = PagedEngine(models[rank], PAGES)
        request = engine.add(tiny.prompts[index])
        engine.generate([request], 2, chunk=20)
        return states(request)

    for rank, got in enumerate(group.run(run)):
        assert_same_bits(got, states(expected[index])[: len(got)], f"rank {rank}")


def test_weights_on_other_ranks_need_a_way_to_them(tiny: Case) -> None:
    with pytest.raises(ValueError, match="reduce="):
        build(tiny.folder, Placement(0, 2, 0, 1))


# -- The draft --


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_draft(tiny: Case, depth: int) -> None:
    """Blocks of any depth, side by side, equal the oracle's; rows of verified drafts in between change nothing."""
    engine = PagedEngine(tiny.model, ODD_PAGES, draft=True)
    requests = [engine.add(tiny.prompts[LENGTHS.index(length)]) for length in (1, 17, 100)]
    engine.generate(requests, 3, chunk=40, drafts=2)
    _, caches = engine.make_step([(request, 1, [0] * (depth - 1)) for request in requests])
    step = Step(
        token_ids=torch.tensor([request.tokens[-1] for request in requests]),
        positions=torch.tensor([request.computed for request in requests]),
        request=torch.arange(len(requests)),
        context_ids=torch.zeros(len(requests), 3, dtype=torch.int64),
    )
    drafted = tiny.model.draft(step, caches, depth, lambda logits, _: logits.argmax(-1))
    for row, request in enumerate(requests):
        want = tiny.oracle.draft(request.tokens[:-1], request.tokens[-1], depth)
        assert drafted.tokens[row].tolist() == want.tokens.tolist()
        assert_one_ulp(drafted.logits[row], want.logits, f"draft logits of request {row}")
        assert torch.allclose(drafted.confidences()[row], want.confidence, rtol=2**-20, atol=0)


def test_draft_caches_need_draft_layers(tiny: Case) -> None:
    engine = PagedEngine(tiny.model, PAGES, draft=True)
    request = engine.add(tiny.prompts[1])
    step, caches = engine.make_step([(request, 2, ())])
    checkpoint = Checkpoint.open(tiny.folder)
    vocabulary = CompressedVocabulary.from_folder(tiny.folder, tiny.config.vocab_size)
    model = DeepseekV41(
        tiny.config, tiny.model.ops, device=torch.device("cpu"), max_positions=8, vocabulary=vocabulary
    )
    load(model, checkpoint)
    with pytest.raises(ValueError, match="draft=False"):
        model(step, caches)
    assert_same_bits(model(step, replace(caches, draft={})), tiny.model(step, caches), "without draft layers")
