"""What is measured of a checkpoint, and how good it must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deepinfer_plugins.evaluation.ngram import Floats
from deepinfer_plugins.features.calibration import BINS, Acceptance, AcceptanceLog, Calibration, calibrate

# What the shipped checkpoint must reach.
MOST_OF_BASELINE = 0.5
LEAST_LENGTH = 3.0
MOST_CALIBRATION_ERROR = 0.05


class Runner(Protocol):
    """A way to run a checkpoint. Drafts are verified greedily and logged in an acceptance log."""

    @property
    def version(self) -> str:
        """Of the engine."""

    def log_probabilities(
        self, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None]
    ) -> list[Floats]:
        """Of every token but each sequence's first, given those before it."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, on_tokens: Callable[[int], None]
    ) -> list[int]:
        """Continue every prompt greedily, to the end of the text or for ``max_tokens``.

        Returns:
            How many verifications accepted none of the drafts, one, two and so on, as the engine itself counts; empty
            if it does not.
        """

    def close(self) -> None:
        """End what was started."""


class ReferenceRunner:
    """The reference loop.

    Args:
        folder: The checkpoint.
        drafts: Drafts per step; 0 for none.
        log: Where the acceptance log goes.
        max_positions: Tokens of a sequence at most.
    """

    def __init__(self, folder: Path, drafts: int, log: Path, max_positions: int) -> None:
        from deepinfer_plugins.core.settings import Settings
        from deepinfer_plugins.evaluation.engine import ReferenceEngine
        from deepinfer_plugins.platforms.detect import detect

        chip = detect(Settings.from_env().accelerator)
        self.version = f"on {chip}"
        self._drafts, self._log = drafts, log
        self._engine = ReferenceEngine(folder, chip.chip, max_positions, max_requests=16)

    def log_probabilities(
        self, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None]
    ) -> list[Floats]:
        """See :class:`Runner`."""
        return [found.numpy() for found in self._engine.log_probabilities(sequences, on_tokens)]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, on_tokens: Callable[[int], None]
    ) -> list[int]:
        """See :class:`Runner`."""
        stop = [self._engine.config.eos_token_id]
        done = self._engine.generate(prompts, max_tokens, self._drafts, stop=stop, on_tokens=on_tokens)
        found = [each for generated in done for each in generated.verifications]
        if found:
            with AcceptanceLog(self._log, engine="reference", sampling="greedy") as log:
                log.write(
                    [each.confidence_logits for each in found],
                    [each.verified for each in found],
                    [each.accepted for each in found],
                )
        return []

    def close(self) -> None:
        """Nothing was started."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """On the same tokens, each as likely as the model, or the n-gram baseline, thinks it is given those before."""

    tokens: int
    model: float
    baseline: float

    @property
    def ratio(self) -> float:
        return self.model / self.baseline

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio}

    @classmethod
    def of(cls, model: Sequence[Floats], baseline: Sequence[Floats]) -> Perplexity:
        """From log-probabilities of the same sequences.

        Raises:
            ValueError: They are not as many.
        """
        if [len(x) for x in model] != [len(x) for x in baseline]:
            raise ValueError(
                f"the engine scored {sum(map(len, model))} tokens in {len(model)} sequences, "
                f"the baseline {sum(map(len, baseline))} in {len(baseline)}"
            )
        ours, theirs = np.concatenate(model), np.concatenate(baseline)
        return cls(len(ours), math.exp(-ours.mean()), math.exp(-theirs.mean()))


@dataclass(frozen=True, slots=True)
class Speculation:
    """How many drafts are accepted.

    Args:
        verifications: Steps of a request in which all its drafts were judged: those in which its text ended say
            nothing of the drafts behind the end.
        mean_length: Mean of accepted drafts and the one token more that a step always gives.
        rates: Share of the verifications that accepted the draft of each position, and so all before it.
    """

    verifications: int
    mean_length: float
    rates: tuple[float, ...]

    @classmethod
    def of(cls, counts: Sequence[int]) -> Speculation:
        """From how many verifications accepted none of the drafts, one, two and so on up to all."""
        at_least = np.cumsum(np.array(counts)[::-1])[::-1]
        rates = at_least[1:] / at_least[0]
        return cls(int(at_least[0]), float(rates.sum()) + 1, tuple(rates.tolist()))


def count_accepted(log: Acceptance, drafts: int) -> list[int]:
    """How many verifications of ``drafts`` drafts accepted none, one, two and so on up to all."""
    return np.bincount(log.accepted[log.verified == drafts], minlength=drafts + 1).tolist()


@dataclass(frozen=True, slots=True)
class Check:
    """A value, None if there were no samples, and its bar; ``ok`` is None where too little was measured to tell."""

    name: str
    value: float | None
    bar: float
    ok: bool | None


@dataclass(slots=True)
class Evaluation:
    """Everything that was measured; what was not has its reason in ``not_measured``, by name.

    Args:
        perplexity: On all that was scored.
        perplexity_by_kind: The same by kind of document.
        speculation: Over all prompts.
        speculation_by_kind: The same by kind of document.
        calibration: Of the draft's confidences, with temperatures fitted to the same drafts.
    """

    perplexity: Perplexity | None = None
    perplexity_by_kind: dict[str, Perplexity] = field(default_factory=dict)
    speculation: Speculation | None = None
    speculation_by_kind: dict[str, Speculation] = field(default_factory=dict)
    calibration: Calibration | None = None
    not_measured: dict[str, str] = field(default_factory=dict)

    def add_scores(self, kinds: Sequence[str], model: Sequence[Floats], baseline: Sequence[Floats]) -> None:
        """Add perplexity, from log-probabilities of texts of these kinds."""
        self.perplexity = Perplexity.of(model, baseline)
        for kind in sorted(set(kinds)):
            chosen = [index for index, each in enumerate(kinds) if each == kind]
            self.perplexity_by_kind[kind] = Perplexity.of(
                [model[index] for index in chosen], [baseline[index] for index in chosen]
            )

    def add_drafts(self, counts: Mapping[str, Sequence[int]], log: Acceptance, engine: str) -> None:
        """Add speculation and calibration, or say that there is nothing to tell them from.

        Args:
            counts: By kind of document: verifications that accepted none of the drafts, one, two and so on.
            log: The acceptance log.
            engine: Its name.
        """
        self.speculation_by_kind = {kind: Speculation.of(each) for kind, each in counts.items() if any(each)}
        if self.speculation_by_kind:
            self.speculation = Speculation.of([sum(column) for column in zip(*counts.values(), strict=True)])
        else:
            self.not_measured["acceptance"] = f"{engine} verified no drafts, or did not count them"
        if len(log.verified):
            self.calibration = calibrate(log)
        else:
            self.not_measured["calibration"] = f"{engine} logged no confidences of drafts"

    def checks(self) -> list[Check]:
        """The bars, for what was measured."""
        found = []
        if self.perplexity is not None:
            ratio = self.perplexity.ratio
            found.append(Check("perplexity / baseline", ratio, MOST_OF_BASELINE, ratio <= MOST_OF_BASELINE))
        if self.speculation is not None:
            length = self.speculation.mean_length
            found.append(Check("acceptance length", length, LEAST_LENGTH, length >= LEAST_LENGTH))
        if self.calibration is not None:
            for position in self.calibration.positions:
                error = position.error_after
                name = f"calibration error, draft {position.position + 1}"
                ok: bool | None = error <= MOST_CALIBRATION_ERROR
                # Few samples scatter that far from a perfect calibration.
                if not ok and noise_floor(position.samples) > MOST_CALIBRATION_ERROR / 2:
                    ok = None
                value = error if position.samples else None
                found.append(Check(name, value, MOST_CALIBRATION_ERROR, ok))
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what was not measured is null."""
        return {
            "perplexity": self.perplexity and self.perplexity.as_dict(),
            "perplexity_by_kind": {kind: each.as_dict() for kind, each in self.perplexity_by_kind.items()},
            "acceptance": self.speculation and asdict(self.speculation),
            "acceptance_by_kind": {kind: asdict(each) for kind, each in self.speculation_by_kind.items()},
            "calibration": self.calibration and self.calibration.as_dict(),
            "not_measured": self.not_measured,
            "checks": [asdict(check) for check in self.checks()],
            "ok": not any(check.ok is False for check in self.checks()),
        }


def noise_floor(samples: int) -> float:
    """About the calibration error that a perfectly calibrated confidence shows on so few samples."""
    return math.sqrt(BINS / samples) / 3 if samples else math.inf
