"""SGLang's own kits against a server of ours under DSpark. Run by hand; pytest doesn't collect it by itself:

    .venv/sglang/bin/python -P -m pytest tests/sglang_ext/upstream_kits.py

Left out, and why: ``SpecAccuracyKit`` and ``SpecPerfKit`` download GSM8K; ``SpecHiddenStatesKit`` asks for hidden
states and ``SpecSamplingMaskKit`` for sampling masks, which the plugin refuses; ``BasicDecodeCorrectnessMixin``, the
kits of evaluations and the tests that are None below ask for knowledge that the small checkpoint lacks, such as where
an answer ends; ``JSONModeMixin`` leaves the word out of its prompts that SGLang's own encoding of this model's chats
demands (status 400 before the engine); ``WaitingTimeoutMixin`` and ``RunningTimeoutTwoWaveMixin`` need servers of
their own.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest
import requests

# The kits' imports reach a module of data sets that none of these tests loads.
_datasets = ModuleType("datasets")
_datasets.load_dataset = None  # type: ignore[attr-defined]
sys.modules.setdefault("datasets", _datasets)

# ruff: noqa: E402
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.test.kits import spec_server_kits as spec
from sglang.test.kits.abort_timeout_kit import AbortAllMixin
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin
from sglang.test.kits.radix_cache_server_kit import gen_radix_tree
from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin

from deepinfer_plugins.core.shipped import default_checkpoint
from deepinfer_plugins.model.config import ModelConfig

from .conftest import Server, serving

DSPARK = ("--speculative-algorithm", "DSPARK", "--enable-metrics")
GREEDY = {"temperature": 0, "max_new_tokens": 48}


@pytest.fixture(scope="session")
def spec_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(default_checkpoint(), tmp_path_factory.mktemp("kits") / "log", *DSPARK) as running:
        yield running


class Alive:
    """Stands for the server's process: what the kits ask is whether it still runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def poll(self) -> int | None:
        return None if requests.get(f"{self.url}/health", timeout=60).ok else 1


class Against(unittest.TestCase):
    """What the kits read from their class."""

    model = str(default_checkpoint())

    @pytest.fixture(autouse=True)
    def _server(self, spec_server: Server) -> None:
        cls = type(self)
        cls.base_url, cls.process = spec_server.url, Alive(spec_server.url)
        cls.tokenizer = get_tokenizer(cls.model)
        cls.client = openai.Client(api_key="none", base_url=f"{spec_server.url}/v1")

    def ask(self, timeout_s: float = 240, **params: Any) -> requests.Response:
        body = {"text": "def read(path):", "sampling_params": {"max_new_tokens": 48, **params}}
        return requests.post(f"{self.base_url}/generate", json=body, timeout=timeout_s)

    def send_request(self) -> None:
        assert self.ask(temperature=0).status_code == 200

    def send_requests_abort(self) -> None:
        """A client that goes away."""
        with suppress(requests.Timeout):
            self.ask(timeout_s=0.5, temperature=0, max_new_tokens=200, ignore_eos=True)

    def run_decode(self, params: dict[str, Any]) -> None:
        assert self.ask(temperature=0.7, **params).status_code == 200


def run_radix_attention_test(base_url: str) -> None:
    """Theirs, with fewer and shorter prompts, and tokens of a small vocabulary."""
    size = ModelConfig.from_folder(default_checkpoint()).vocab_size
    nodes = gen_radix_tree(num_nodes=60, chunk_len=48)
    body = {
        "input_ids": [[token % size for token in node["input_ids"]] for node in nodes],
        "sampling_params": [{"max_new_tokens": node["decode_len"], "temperature": 0} for node in nodes],
    }
    assert requests.post(f"{base_url}/generate", json=body).status_code == 200


spec.run_radix_attention_test = run_radix_attention_test


class TestSpeculation(
    spec.SpecLogprobKit, spec.SpecFeatureKit, spec.SpecGrammarKit, spec.SpecPenaltyKit, Against
):
    # Both paths compute the same bits here.
    logprob_match_delta = 1e-4


class TestLengths(spec.SpecCorrectnessKit, Against):
    acc_length_thres = 1.0
    batch_accept_len_thres = 1.0


class TestGrammars(JSONConstrainedMixin, RegexConstrainedMixin, EBNFConstrainedMixin, Against):
    # Its strings go on until there are no more tokens, and its lists repeat a key.
    test_json_generate = test_json_openai = test_mix_json_and_other = test_ebnf_generate_complex_json = None


class TestServer(MatchedStopMixin, AbortAllMixin, BasicAPIContractMixin, Against):
    # Of its context of 4,096.
    abort_all_max_new_tokens = 4000
    # It ends no answer to what it does not know.
    test_finish_stop_eos = None


def test_parity_with_a_server_without_speculation(tmp_path: Path) -> None:
    """``SpecParityKit``, whose own start of a server has options of a GPU."""
    texts = []
    for arguments in ((), DSPARK):
        with ExitStack() as stack:
            running = stack.enter_context(serving(default_checkpoint(), tmp_path / "log", *arguments))
            texts.append(
                [
                    requests.post(
                        f"{running.url}/generate", json={"text": prompt, "sampling_params": GREEDY}
                    ).json()["text"]
                    for prompt in spec.SpecParityKit.parity_prompts
                ]
            )
    assert texts[0] == texts[1]
