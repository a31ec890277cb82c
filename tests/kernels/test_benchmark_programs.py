"""Programs under ``benchmarks/`` that measure operators, at small sizes on a CPU: what they choose and record."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_plugins.core.target import Arch, Want
from deepinfer_plugins.kernels.catalogue import choices
from deepinfer_plugins.kernels.registry import providers

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
CPU = torch.device("cpu")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a program; those that are called like a package of the repository are found first."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(
        rows=[3], context=40, experts=8, preset="tiny", commit="none", out=tmp_path / "cost.json"
    )


def test_the_fastest_of_all_sizes_serves(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each number of tokens, and one that fails serves for none."""
    cost = program("mode_cost")
    (known,) = (one for one in providers("linear") if one.name == "torch")
    names = ("torch", "few", "many", "fails")
    all_of_them = [dataclasses.replace(known, name=name, batch_invariant=name == "torch") for name in names]
    times = {"torch": 5.0, "few": 1.0, "many": 4.0}
    asked: list[tuple[str, int]] = []

    def seconds(calls: list[Any], device: torch.device) -> float:
        name, n = asked[-1]
        if name == "fails":
            raise RuntimeError("no such shape")
        return times[name] * (n if name == "few" else 1)

    def load(provider: Any, n: int) -> Any:
        asked.append((provider.name, n))
        return lambda **args: None

    time_providers = cost.time_providers

    def timed(cases: Any, candidates: Any, n: int, device: torch.device) -> Any:
        loaded = {
            name: argparse.Namespace(load=lambda one=one: load(one, n)) for name, one in candidates.items()
        }
        return time_providers(cases, loaded, n, device)

    monkeypatch.setattr(cost.MEASURE, "seconds", seconds)
    monkeypatch.setattr(cost, "time_providers", timed)
    monkeypatch.setattr(cost, "providers", lambda op: all_of_them if op == "linear" else providers(op))
    invariant = {"linear": "torch", "route": "torch"}
    sets, records = cost.fastest_sets(invariant, [1, 7], "tiny", Arch.CPU, CPU)
    assert sets == {1: {"linear": "few", "route": "torch"}, 7: {"linear": "many", "route": "torch"}}
    compared = [record for record in records if "tokens" in record]
    assert [record["fastest"] for record in compared] == ["few", "many"]
    assert all(set(record["seconds"]) == {"torch", "few", "many"} for record in compared)
    assert [record["only"] for record in records if "only" in record] == [["torch"]]


def test_a_provider_that_no_graph_holds_is_left_out(program: Any) -> None:
    cost = program("mode_cost")
    found, refused = cost.able("linear", Arch.CPU, graphs=True)
    assert not found and refused["torch"] == "no CUDA graph can hold it"
    found, refused = cost.able("linear", Arch.CPU, graphs=False)
    assert list(found) == ["torch"] and "built for" in refused["cublas"]


def test_both_sets_run_the_whole_model_and_its_layers(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cost = program("mode_cost")
    results: list[Any] = []

    def seconds(calls: list[Any], device: torch.device) -> float:
        results.extend(call() for call in calls)
        return float(len(results))

    monkeypatch.setattr(cost.MEASURE, "seconds", seconds)
    monkeypatch.setattr(cost, "TURNS", 1)
    given = arguments(tmp_path)
    report = cost.measure(given)
    assert json.loads(given.out.read_text())["steps"] == report["steps"]
    assert report["invariant"] == {op: one.provider.name for op, one in choices(Want(Arch.CPU)).items()}
    assert report["fastest"] == {3: report["invariant"]}
    num_layers = len(report["steps"][0]["layer_ratio"])
    first = report["steps"][0]
    assert first["seconds"]["invariant"] == {"whole": 1.0} | {
        f"layer {i}": i + 2.0 for i in range(num_layers)
    }
    assert first["throughput_ratio"] == (num_layers + 2.0) / 1.0
    assert first["rows"] == 3 and not first["other_providers"]
    # The layers one after the other are the model: what the last one leaves has the hidden states of the whole.
    bench = cost.Bench(cost.preset("tiny"), 3, 40, CPU)
    bench.functions = cost.load(report["invariant"])
    step = bench.step(3)
    with torch.inference_mode():
        want = bench.model(step, bench.caches)
        for call in bench.layers(step):
            trunk, _ = call()
        got = bench.model.norm(bench.model.ops.hc_collapse(trunk.streams, trunk.pre))
    assert want.isfinite().all() and torch.equal(got, want)


def test_memory_goes_on_after_a_failure(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = program("memory")
    provider_of, ran = memory.provider_of, []

    def failing(op: str, name: str) -> Any:
        def run(**args: Any) -> Any:
            ran.append(op)
            if op == "mxfp8_cast":
                raise torch.OutOfMemoryError("no memory left")
            return provider_of(op, name)(**args)

        return run

    monkeypatch.setattr(memory, "provider_of", failing)
    out = tmp_path / "memory.json"
    options = ["--preset", "tiny", "--tokens", "5", "--context", "256", "--out", str(out)]
    ops = "mxfp8_cast/hidden,index_select/all,rms_norm/query"
    assert memory.main([*options, "--ops", ops]) == 1
    failed, *others = json.loads(out.read_text())["results"]
    assert failed["op"] == "mxfp8_cast" and "no memory left" in failed["error"]
    assert [one["op"] for one in others] == ["rms_norm", "index_select"]
    assert all(one["bounded"] and one["argument_bytes"] and one["result_bytes"] for one in others)
    # One request, with all of the context.
    assert "context 256" in others[1]["shape"]
    assert "mxfp8_cast/hidden" in capsys.readouterr().out and len(ran) == 5
    assert memory.main([*options, "--ops", "rms_norm/query"]) == 0


def test_memory_above_its_bound_is_told(
    program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = program("memory")
    monkeypatch.setattr(
        memory,
        "measure",
        lambda *_: {"argument_bytes": 1, "result_bytes": 1, "workspace_bytes": (64 << 20) + 1},
    )
    out = tmp_path / "memory.json"
    assert memory.main(["--preset", "tiny", "--ops", "linear/gate", "--out", str(out)]) == 1
    assert not json.loads(out.read_text())["results"][0]["bounded"]
