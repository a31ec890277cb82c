"""What batch invariance costs in decoding: the providers that the mode chooses against the fastest of all, in one run.

First every provider of an operator that has a choice on this chip is timed on all cases of the operator
(``kernel_cases.py``), for each number of tokens; those that took the least time in all are the fastest set. Then decode
steps of one row per request are timed with both sets: of a small model, whole, and of one layer of every kind at the
release's shapes, together with embedding and head and each layer alone. Weights are random. On a GPU all of it is
captured in CUDA graphs, so the host's time is left out, and with it what no graph can hold.

An engine chooses before it knows how many rows a step has, so a fastest set for each number of rows is more than one
could have without the mode.

Usage: python benchmarks/invariance.py --cost --out FILE [--rows 1 64 512] [--context 1024]
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from compile_ahead import compile_ahead  # noqa: E402
from kernel_cases import KernelCase, all_cases  # noqa: E402
from release_layers import KINDS, PAGE, fill, make_caches, shapes, step_of  # noqa: E402

from deepinfer_plugins.core.target import Arch, Want  # noqa: E402
from deepinfer_plugins.kernels.catalogue import Ops, choices  # noqa: E402
from deepinfer_plugins.kernels.registry import providers  # noqa: E402
from deepinfer_plugins.kernels.spec import Provider  # noqa: E402
from deepinfer_plugins.model import hyper_connection  # noqa: E402
from deepinfer_plugins.model.attention import Selection  # noqa: E402
from deepinfer_plugins.model.config import ModelConfig  # noqa: E402
from deepinfer_plugins.model.engram import CompressedVocabulary  # noqa: E402
from deepinfer_plugins.model.network import DeepseekV41  # noqa: E402
from deepinfer_plugins.model.presets import preset  # noqa: E402
from deepinfer_plugins.model.rows import Rows, ngram_context  # noqa: E402
from deepinfer_plugins.model.step import Caches, Paged, Step  # noqa: E402
from deepinfer_plugins.platforms.detect import detect  # noqa: E402

# The program beside this one; its name is also that of a package.
MEASURE = importlib.import_module("kernels")
# Times that each set is measured, in turn with the other; the least counts.
TURNS = 3

Functions = dict[str, Callable[..., Any]]


def able(op: str, arch: Arch, graphs: bool) -> tuple[dict[str, Provider], dict[str, str]]:
    """Providers that can serve here, invariant or not, by name; and why the others cannot."""
    found, refused = {}, {}
    for provider in providers(op):
        why = provider.refusal(Want(arch, batch_invariant=False))
        if not why and graphs and not provider.capturable:
            why = "no CUDA graph can hold it"
        if why:
            refused[provider.name] = why
        else:
            found[provider.name] = provider
    return found, refused


def time_providers(
    cases: list[KernelCase], candidates: Mapping[str, Provider], n: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Seconds of all cases of an operator by provider, with those of each case; without a provider that fails."""
    times: dict[str, dict[str, float]] = {name: {} for name in candidates}
    for case in cases:
        if n > case.most_tokens:
            continue
        sets = MEASURE.argument_sets(case, n, device)
        for name, provider in candidates.items():
            if name not in times:
                continue
            try:
                function = provider.load()
                calls = [functools.partial(function, **args) for args in sets]
                times[name][case.name] = MEASURE.seconds(calls, device)
            except Exception as error:  # one that does not take these sizes is none of the fastest
                print(f"# {case.op}/{case.name}, {name}, {n} tokens: {error!r}"[:300], file=sys.stderr)
                del times[name]
    return times


def fastest_sets(
    invariant: Mapping[str, str], rows: list[int], preset_name: str, arch: Arch, device: torch.device
) -> tuple[dict[int, dict[str, str]], list[dict[str, Any]]]:
    """The fastest provider of each operator for each number of rows, and a record of each comparison."""
    cases = all_cases(preset(preset_name))
    sets = {n: dict(invariant) for n in rows}
    records: list[dict[str, Any]] = []
    for op in invariant:
        candidates, refused = able(op, arch, device.type == "cuda")
        record: dict[str, Any] = {"op": op, "invariant": invariant[op], "refused": refused}
        if len(candidates) < 2:
            records.append(record | {"only": sorted(candidates)})
            continue
        for n in rows:
            times = time_providers([case for case in cases if case.op == op], candidates, n, device)
            total = {name: sum(of_cases.values()) for name, of_cases in times.items() if of_cases}
            if total:
                sets[n][op] = min(total, key=lambda name: total[name])
            records.append(record | {"tokens": n, "fastest": sets[n][op], "seconds": times})
            print(json.dumps(records[-1]), flush=True)
    return sets, records


def load(names: Mapping[str, str]) -> Functions:
    return {op: next(one for one in providers(op) if one.name == name).load() for op, name in names.items()}


class Bench:
    """A model with random weights whose operators can be exchanged, and requests that have some tokens each."""

    def __init__(self, config: ModelConfig, requests: int, context: int, device: torch.device) -> None:
        self.functions: Functions = {}
        size = config.engram_compressed_vocab_size
        vocabulary = CompressedVocabulary(np.arange(config.vocab_size, dtype=np.int64) % size, size)
        ops = Ops(**{field.name: functools.partial(self._call, field.name) for field in fields(Ops)})
        length = context + 1
        self.model = DeepseekV41(config, ops, device=device, max_positions=length, vocabulary=vocabulary)
        fill(self.model, seed=0)
        self.context = context
        made = make_caches(config, -(-length // PAGE), requests, device)
        # In place of a prompt, bytes that are finite whatever they are read as; tables as engines have them.
        kinds = {
            name: {
                layer: Paged(paged.pages.random_(0, 120), paged.table.int())
                for layer, paged in getattr(made, name).items()
            }
            for name in ("window", "compressed", "index_key", "compressor")
        }
        self.caches = Caches(**kinds)
        generator = torch.Generator().manual_seed(1)
        high = config.vocab_size - 100
        self.tokens = torch.randint(3, high, (requests, length), generator=generator).to(device)

    def _call(self, op: str, *args: Any, **kwargs: Any) -> Any:
        return self.functions[op](*args, **kwargs)

    def step(self, requests: int) -> Step:
        """One row for each of the first requests."""
        return step_of(self.model.config, self.tokens, self.context, 1, list(range(requests)))

    def whole(self, step: Step) -> Callable[[], torch.Tensor]:
        return lambda: self.model.logits(self.model(step, self.caches))

    def layers(self, step: Step) -> Iterator[Callable[[], Any]]:
        """Each layer by itself, given what those before it made of the step: its part of the model's ``forward``."""
        model, rows = self.model, Rows(step, self.model.config.sliding_window)
        context = ngram_context(step, model.compressed_ids, model.pad, model.config.engram_max_ngram_size)
        trunk = hyper_connection.start(model.embed[step.token_ids], model.config.hc_mult)
        selection: Selection | None = None
        for layer in model.layers:

            def run(
                layer: Any = layer, trunk: Any = trunk, selection: Selection | None = selection
            ) -> tuple[Any, Selection | None]:
                if layer.engram is not None:
                    trunk = trunk._replace(streams=layer.engram(trunk.streams, context, rows.image))
                y = layer.attention_input(trunk)
                if layer.attn.compressor is not None:
                    layer.attn.compressor(y, rows, self.caches)
                mixes = layer.attn_hc.mixes(trunk.streams)
                x, selection = layer.attn(y, rows, self.caches, selection)
                return layer.feed_forward(layer.attn_hc.write(x, trunk.streams, mixes), rows.image), selection

            trunk, selection = run()
            yield run


def compare(
    bench: Bench,
    kinds: Mapping[int, str],
    names: Mapping[str, Mapping[str, str]],
    rows: int,
    device: torch.device,
) -> dict[str, Any]:
    """Times of a step of so many rows with each of two sets of providers, whole and by layer."""
    loaded = {label: load(of_set) for label, of_set in names.items()}
    times: dict[str, dict[str, float]] = {label: {} for label in loaded}
    step = bench.step(rows)
    for _ in range(TURNS):
        for label, functions in loaded.items():
            bench.functions = functions
            calls = {"whole": bench.whole(step)}
            calls |= {kinds[index]: call for index, call in enumerate(bench.layers(step)) if index in kinds}
            for what, call in calls.items():
                spent = MEASURE.seconds([call], device)
                times[label][what] = min(spent, times[label].get(what, spent))
    whole = {label: of_set["whole"] for label, of_set in times.items()}
    return {
        "rows": rows,
        "tokens_per_second": {label: rows / spent for label, spent in whole.items()},
        "throughput_ratio": whole["fastest"] / whole["invariant"],
        "layer_ratio": {
            what: times["fastest"][what] / times["invariant"][what]
            for what in times["fastest"]
            if what != "whole"
        },
        "seconds": times,
        "other_providers": {
            op: name for op, name in names["fastest"].items() if name != names["invariant"][op]
        },
    }


def models(preset_name: str, experts: int) -> Iterator[tuple[str, ModelConfig, dict[int, str]]]:
    """What is timed: its name, sizes, and the layers that are timed alone."""
    if preset_name != "release":
        config = preset(preset_name)
        yield f"{preset_name}, whole", config, {i: f"layer {i}" for i in range(config.num_hidden_layers)}
        return
    yield "small, whole", preset("small"), {}
    yield "one release layer of each kind, embedding and head", shapes(experts), dict(KINDS)


def compile_kernels(
    invariant: Mapping[str, str],
    candidates: Mapping[str, Mapping[str, Provider]],
    rows: list[int],
    preset_name: str,
) -> None:
    """Compile in several processes what Triton compiles: the mode's providers for both models, then others."""
    others: dict[str, list[str]] = {
        op: [
            name
            for name, provider in of_op.items()
            if name != invariant[op] and any(need.startswith("triton") for need in provider.needs)
        ]
        for op, of_op in candidates.items()
    }
    rounds = [
        {op: names[turn] for op, names in others.items() if turn < len(names)}
        for turn in range(max(map(len, others.values())))
    ]
    for shape, names in (
        (preset_name, invariant),
        ("small", invariant),
        *((preset_name, one) for one in rounds),
    ):
        jobs = [
            (f"{case.op}/{case.name}", n, None)
            for case in all_cases(preset(shape))
            for n in rows
            if case.op in names and n <= case.most_tokens
        ]
        compile_ahead(jobs, shape, names=names)


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arch = detect().arch
    invariant = {op: choice.provider.name for op, choice in choices(Want(arch)).items()}
    report: dict[str, Any] = {
        "what": "decoding with the providers of batch-invariant mode and with the fastest ones",
        "chip": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": MEASURE.versions(),
        "commit": arguments.commit,
        "preset": arguments.preset,
        "context": arguments.context,
        "experts": arguments.experts,
        "invariant": invariant,
    }

    def save() -> None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")

    if device.type == "cuda":
        candidates = {op: able(op, arch, True)[0] for op in invariant}
        compile_kernels(invariant, candidates, arguments.rows, arguments.preset)
    sets, report["operators"] = fastest_sets(invariant, arguments.rows, arguments.preset, arch, device)
    report |= {"fastest": sets, "steps": []}
    save()
    for name, config, kinds in models(arguments.preset, arguments.experts):
        bench = Bench(config, max(arguments.rows), arguments.context, device)
        for rows in arguments.rows:
            names = {"invariant": invariant, "fastest": sets[rows]}
            record = {"model": name} | compare(bench, kinds, names, rows, device)
            report["steps"].append(record)
            ratio = record["throughput_ratio"]
            print(
                f"{name}, {rows} rows: {ratio:.3f} of the throughput with the fastest providers", flush=True
            )
            print(json.dumps(record), flush=True)
            save()
        del bench
    return report
