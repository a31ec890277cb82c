"""A seed for every request: the user's, or one chosen here that the request's output names.

vLLM's worker would draw one and tell nobody. Here the front end draws it, before anything else sees the request, so
that a preempted request keeps it; ``CompletionOutput.seed`` reports the seed of each sample, and the log those of
requests that came without (an answer over HTTP has no field for it). ``n`` samples take the seeds from there on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from deepinfer_plugins.vllm_ext.v0_33 import defaults

# Below vLLM's, so that its level and handlers apply.
_log = logging.getLogger("vllm.deepinfer_plugins")
# In a request's ``extra_args``: the seed was not the user's.
_CHOSEN = "deepinfer_seed_chosen"


def was_chosen(params: Any) -> bool:
    """Whether the request came without a seed."""
    return bool(params.extra_args and params.extra_args.get(_CHOSEN))


def choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """``InputProcessor.process_inputs`` that gives a request a seed if it samples and has none."""
    from deepinfer_plugins.features.sampling import fresh_seed

    def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        params = request.sampling_params
        if params is None or params.seed is not None or params.temperature == 0:
            return request
        if defaults.runs_our_model(self.vllm_config):
            # vLLM made these parameters for this request alone.
            params.seed = fresh_seed()
            params.extra_args = {**(params.extra_args or {}), _CHOSEN: True}
            _log.info("Request %s came without a seed and got %d.", request.request_id, params.seed)
        return request

    return process_inputs


def keeping(original: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestState.from_new_request`` that remembers the seed."""

    def from_new_request(cls: Any, *args: Any, request: Any, **kwargs: Any) -> Any:
        state = original(cls, *args, request=request, **kwargs)
        state.seed = request.sampling_params.seed if request.sampling_params else None
        return state

    return from_new_request


def reporting(original: Callable[..., Any]) -> Callable[..., Any]:
    """``RequestState._new_completion_output`` that reports it."""

    def _new_completion_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        output.seed = self.seed
        return output

    return _new_completion_output
