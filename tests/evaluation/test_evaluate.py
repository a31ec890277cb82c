"""The command, with runners that are known and on the checkpoint that ships."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from deepinfer_plugins.commands import evaluate
from deepinfer_plugins.core import shipped
from deepinfer_plugins.evaluation.engine import ReferenceEngine
from deepinfer_plugins.evaluation.measure import MOST_OF_BASELINE
from deepinfer_plugins.features.calibration import AcceptanceLog, read_logs


class Known:
    """Every token has probability 1/8. Texts go on for two verifications that accept 2 drafts and all of them."""

    version = "of a test"
    logs = True

    def __init__(self, folder: Path, drafts: int, log: Path, max_positions: int) -> None:
        self.drafts, self.log, self.closed = drafts, log, False
        assert max_positions > 512 and (folder / "config.json").exists()

    def log_probabilities(
        self, sequences: Sequence[Sequence[int]], on_tokens: Callable[[int], None]
    ) -> list[np.ndarray]:
        return [np.full(len(sequence) - 1, -np.log(8)) for sequence in sequences]

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, on_tokens: Callable[[int], None]
    ) -> list[int]:
        accepted = [2, self.drafts] * len(prompts)
        if not self.logs:
            return np.bincount(accepted).tolist()
        with AcceptanceLog(self.log) as log:
            log.write(np.zeros((len(accepted), self.drafts)), [self.drafts] * len(accepted), accepted)
        return []

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> type[Known]:
    """In place of the reference loop, with a small corpus."""
    monkeypatch.setitem(evaluate._RUNNERS, "reference", f"{__name__}:Known")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)(__name__))
    monkeypatch.setattr(sys.modules[__name__], "Known", Known, raising=False)
    documents = shipped.read_documents(shipped.corpus())[:600]
    monkeypatch.setattr(shipped, "read_documents", lambda path: documents)
    return Known


@pytest.mark.parametrize("logs", [True, False])
def test_what_is_measured(
    known: type[Known],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    logs: bool,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(known, "logs", logs)
    log = tmp_path / "log"
    request = evaluate.Request(tokens=700, prompts=9, new_tokens=5, drafts=4, acceptance_log=log)
    status = evaluate.main(request, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["perplexity"]["model"] == pytest.approx(8) and answer["perplexity"]["tokens"] == 700
    assert sum(each["tokens"] for each in answer["perplexity_by_kind"].values()) == 700
    assert answer["acceptance"]["mean_length"] == 4 and answer["acceptance"]["verifications"] == 18
    assert answer["acceptance"]["rates"] == [1, 1, 0.5, 0.5]
    assert all(each["mean_length"] == 4 for each in answer["acceptance_by_kind"].values())
    assert sum(each["verifications"] for each in answer["acceptance_by_kind"].values()) == 18
    assert (
        (answer["calibration"] is not None)
        == logs
        == log.exists()
        == ("calibration" not in answer["not_measured"])
    )
    assert answer["ok"] == (status == 0) == all(check["ok"] is not False for check in answer["checks"])
    if logs:
        evaluate.main(request, as_json=True)
        assert len(read_logs([log]).verified) == 36


def test_what_is_not_asked_for(known: type[Known], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(evaluate.Request(tokens=0, prompts=0), as_json=False) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "not measured: perplexity: not asked for" in said
        and "not measured: acceptance: not asked for" in said
    )


def test_tables(known: type[Known], capsys: pytest.CaptureFixture[str]) -> None:
    """No markup, no exception; what the bars say is the exit status."""
    status = evaluate.main(evaluate.Request(tokens=300, prompts=4, new_tokens=5), as_json=False)
    said = capsys.readouterr().out
    assert status == (1 if "missed" in said else 0)
    assert "DEEPINFER_DFLASH_CONFIDENCE_HEAD_TEMPERATURE=" in said and "[green]" not in said


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert evaluate.main(evaluate.Request(model=str(tmp_path / "none")), as_json=True) == 2
    said = capsys.readouterr()
    assert said.out == "" and "neither a folder nor" in " ".join(said.err.split())
    assert evaluate.main(evaluate.Request(model=str(tmp_path)), as_json=True) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_shipped_checkpoint(tmp_path: Path) -> None:
    """As users call it, on few tokens; the whole evaluation is recorded in benchmarks/results."""
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-P",
        "-m",
        "deepinfer_plugins",
        "evaluate",
        "--json",
        "--tokens=1000",
        "--prompts=8",
    ]
    command += ["--new-tokens=24", f"--acceptance-log={log}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode in (0, 1), done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == str(shipped.default_checkpoint()) and answer["not_measured"] == {}
    # Of few tokens; the bar is for more.
    assert answer["perplexity"]["ratio"] < MOST_OF_BASELINE + 0.05 and answer["perplexity"]["baseline"] < 100
    assert answer["acceptance"]["mean_length"] >= 2.2
    assert len(read_logs([log]).verified) >= answer["acceptance"]["verifications"] > 30


def is_json_so_far(text: str) -> bool:
    """Whether something could follow that makes it JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :].strip()
        return error.msg.startswith("Unterminated") or bool(
            re.fullmatch("t|tr|tru|f|fa|fal|fals|n|nu|nul|-|", rest)
        )
    return True


def test_json_goes_on_as_json() -> None:
    assert is_json_so_far('[{"a": tr') and is_json_so_far('[{"a": "b') and not is_json_so_far('[{"a": tree')
    folder = shipped.default_checkpoint()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [
        '[{"id": 4711, "customer": {"name": "Ada", "city":',
        # To its last token: a line break of its own would be half of one.
        '[\n  {\n    "id": 1234,\n    "customer": {',
    ]
    engine = ReferenceEngine(folder, max_positions=160, max_requests=2)
    generated: list[Any] = engine.generate([tokenizer.encode(text).ids for text in prompts], 40, 5, stop=[1])
    for prompt, each in zip(prompts, generated):
        text = prompt + tokenizer.decode(each.token_ids)
        assert is_json_so_far(text), text
        whole = [v for v in each.verifications if v.whole]
        assert 1 + sum(v.accepted for v in whole) / len(whole) >= 3.0
