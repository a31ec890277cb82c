"""How to draft under coupling: what is kept of drafts that use the target's noise in several ways.

A draft that is verified by coupling is kept iff it is the token that the target samples, whose noise the draft knows.
Any use of that noise is lossless. Compared are ``argmax(a * logits / temperature + gumbel + b * [the draft's most
probable token])``: ``a`` above 1 sharpens the draft, ``b`` above 0 favours its first choice. Beside them stands what
no scheme can surpass, ``1 - TV``, the sum of ``min(target, draft)``, which is what rejection keeps.

Pairs of logits, target's and draft's after the same tokens, are made up, and taken from a checkpoint that continues
held-out prompts. From the same runs: accepted drafts by position and tokens per step, by coupling and by rejection.

Usage: OMP_NUM_THREADS=1 python benchmarks/draft_coupling.py [--prompts 24] [--new-tokens 64] [--out results.json]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation import text
from deepinfer_plugins.evaluation.engine import ReferenceEngine
from deepinfer_plugins.features.sampling import SamplingParams, Verify
from deepinfer_plugins.platforms.detect import detect

TEMPERATURES = (0.3, 0.7, 1.0)
SHARPENING = (0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.3, 1.6)
FAVOUR = (0.0, 0.25, 0.5)
DEPTH = 5
DRAWS = 16


class Recorder(ReferenceEngine):
    """Keeps the logits of drafts and of the rows that judge them."""

    def record(self) -> None:
        """Start to keep pairs, in ``pairs``: position in the block, the target's logits, the draft's."""
        self.pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._drafted: dict[int, torch.Tensor] = {}
        draft = self.model.draft

        def kept(step: Any, caches: Any, depth: int, sample: Any) -> Any:
            drafted = draft(step, caches, depth, sample)
            self._last = drafted.logits
            return drafted

        self.model.draft = kept  # type: ignore[method-assign]

    def _draft(self, requests: Any, state: Any, depth: int) -> None:
        super()._draft(requests, state, depth)
        for request, logits in zip(requests, self._last, strict=True):
            self._drafted[id(request)] = logits

    def _choose(self, requests: Any, logits: torch.Tensor, *args: Any) -> None:
        start = 0
        pending = []
        for request in requests:
            count = len(request.drafts)
            drafted = self._drafted[id(request)] if count else logits
            pending.append((request, logits[start : start + count].clone(), drafted))
            start += count + 1
        super()._choose(requests, logits, *args)
        for request, judged, drafted in pending:
            if len(judged):
                # Up to the first draft that was not kept: what comes after it is never looked at.
                reached = request.result.verifications[-1].accepted + 1
                self.pairs += zip(range(reached), judged[:reached].cpu(), drafted[:reached].cpu())


def overlap(target: np.ndarray, draft: np.ndarray, temperature: float) -> np.ndarray:
    """``1 - TV`` of each pair ``[n, vocab_size]``: what rejection keeps, and nothing surpasses."""

    def softmax(x: np.ndarray) -> np.ndarray:
        weights = np.exp((x - x.max(axis=1, keepdims=True)) / temperature)
        return weights / weights.sum(axis=1, keepdims=True)

    return np.minimum(softmax(target), softmax(draft)).sum(axis=1)


def kept_share(target: np.ndarray, draft: np.ndarray, temperature: float, seed: int = 0) -> dict[str, Any]:
    """The share of drafts kept by each use of the noise, and ``1 - TV``; of pairs ``[n, vocab_size]``."""
    rng = np.random.default_rng(seed)
    best = draft.argmax(axis=1)[:, None] == np.arange(draft.shape[1])
    kept = {(a, b): 0 for a in SHARPENING for b in FAVOUR if a == 1.0 or b == 0.0}
    for _ in range(DRAWS):
        noise = rng.gumbel(size=target.shape)
        token = (target / temperature + noise).argmax(axis=1)
        for a, b in kept:
            kept[a, b] += int((((a / temperature) * draft + noise + b * best).argmax(axis=1) == token).sum())

    bound = float(overlap(target, draft, temperature).mean())
    shares = {key: count / (DRAWS * len(target)) for key, count in kept.items()}
    chosen = max(shares, key=lambda key: shares[key])
    return {
        "pairs": len(target),
        "one_minus_tv": bound,
        "kept": [
            {"a": a, "b": b, "share": share, "of_bound": share / bound} for (a, b), share in shares.items()
        ],
        "best": {"a": chosen[0], "b": chosen[1]},
        "plain_of_best": shares[1.0, 0.0] / shares[chosen],
    }


def made_up() -> list[dict[str, Any]]:
    """Pairs with errors of several sizes, over a falling prior of 1,000 entries."""
    found = []
    for error in (0.3, 1.0):
        rng = np.random.default_rng(1)
        prior = -1.5 * np.log(np.arange(1, 1001))
        target = prior + 1.5 * rng.normal(size=(600, 1000))
        draft = target + error * rng.normal(size=target.shape)
        for temperature in TEMPERATURES:
            share = kept_share(target, draft, temperature)
            found.append({"error": error, "temperature": temperature, **share})
    return found


def trained(folder: Path, num_prompts: int, new_tokens: int) -> list[dict[str, Any]]:
    """The same with a checkpoint's pairs, and what its runs keep."""
    engine = Recorder(folder, detect().chip, max_positions=256, max_requests=32)
    engine.record()
    tokenizer = text.open_tokenizer(folder)
    documents = shipped.read_documents(shipped.corpus())
    pieces = text.choose(tokenizer, documents, engine.config.eos_token_id, 0, num_prompts).prompts
    prompts = [piece.tokens for piece in pieces]
    found = []
    for temperature in TEMPERATURES:
        runs: dict[str, Any] = {}
        ways: tuple[Verify, ...] = ("coupling", "rejection")
        for way in ways:
            engine.pairs.clear()
            params = [
                SamplingParams(1000 + i, temperature=temperature, verify=way) for i in range(len(prompts))
            ]
            generated = engine.generate(prompts, new_tokens, DEPTH, params)
            whole = [v for one in generated for v in one.verifications if v.whole]
            reached = [[v.accepted > i for v in whole if v.accepted >= i] for i in range(DEPTH)]
            runs[way] = {
                "steps": len(whole),
                "mean_length": 1 + float(np.mean([v.accepted for v in whole])),
                "kept_by_position": [float(np.mean(each)) for each in reached],
            }
            if way == "coupling":
                positions, *sides = zip(*engine.pairs)
                target, draft = (torch.stack(side).double().numpy() for side in sides)
                pairs = kept_share(target[:1500], draft[:1500], temperature)
                same = overlap(target, draft, temperature)
                pairs["one_minus_tv_by_position"] = [
                    float(same[np.array(positions) == position].mean()) for position in range(DEPTH)
                ]
        ratio = runs["coupling"]["mean_length"] / runs["rejection"]["mean_length"]
        found.append({"temperature": temperature, "coupling_of_rejection": ratio, **runs, **pairs})
        print(f"T={temperature}: coupling keeps {ratio:.3f} of rejection's mean length", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=shipped.default_checkpoint())
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with torch.inference_mode():
        answer = {
            "machine": platform.machine(),
            "chip": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            "torch": importlib.metadata.version("torch"),
            "made_up": made_up(),
            "trained": trained(args.model, args.prompts, args.new_tokens),
        }
    written = json.dumps(answer, indent=1)
    if args.out:
        args.out.write_text(written + "\n", encoding="utf-8")
    else:
        print(written)


if __name__ == "__main__":
    main()
