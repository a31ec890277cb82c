"""`sglang.Engine(model_path=DIR)` and nothing else, as the README shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys
import sglang

def main():
    engine = sglang.Engine(model_path=sys.argv[1], log_level="error")
    greedy = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    answers = engine.generate(input_ids=json.loads(sys.argv[2]), sampling_params=greedy)
    text = engine.generate("Hello world", {"temperature": 0, "max_new_tokens": 4})["text"]
    engine.shutdown()
    print(json.dumps([[answer["output_ids"] for answer in answers], text]))

if __name__ == "__main__":
    main()
"""


def test_engine_without_flags(
    checkpoint: Path, reference: Any, prompts: list[list[int]], engine_environment: Any, tmp_path: Path
) -> None:
    script = tmp_path / "generate.py"
    script.write_text(SCRIPT)
    group = prompts[3:7]
    done = subprocess.run(
        [sys.executable, str(script), str(checkpoint), json.dumps(group)],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    generated, text = json.loads(done.stdout.strip().splitlines()[-1])
    for prompt, tokens in zip(group, generated, strict=True):
        reference.check(prompt, tokens, "offline engine")
    assert isinstance(text, str)


def test_a_broken_checkpoint_stops_the_launch_with_its_reason(
    checkpoint: Path, engine_environment: Any, tmp_path: Path
) -> None:
    """In the launcher, before a scheduler is started."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).symlink_to(file)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    del index["weight_map"]["norm.weight"]
    (broken / "model.safetensors.index.json").unlink()
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model-path", str(broken), "--host", "127.0.0.1"],
        env=engine_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "norm.weight" in done.stderr and "CheckpointError" in done.stderr
