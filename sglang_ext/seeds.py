"""Parallel samples of one request get seeds of their own, where SGLang takes requests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine
from typing import Any

from deepinfer_plugins.features.sampling import child_seed, signed_seed


def numbering(original: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """A ``TokenizerManager._send_one_request`` that numbers the samples of a request by their seeds.

    SGLang sends the ``n`` samples one after another, each with the one object of parameters that they share.
    """
    # By the object's id: the object, so that the id stays its own, and how many samples were sent.
    sent: dict[int, tuple[Any, int]] = {}

    async def send_one_request(self: Any, tokenized_obj: Any) -> None:
        params = getattr(tokenized_obj, "sampling_params", None)
        if (
            params is not None
            and params.n > 1
            and params.sampling_seed is not None
            and params.max_new_tokens != 0
        ):
            _, index = sent.pop(id(params), (params, 0))
            if index + 1 < params.n:
                sent[id(params)] = (params, index + 1)
            tokenized_obj.sampling_params = copy.copy(params)
            tokenized_obj.sampling_params.sampling_seed = signed_seed(child_seed(params.sampling_seed, index))
        await original(self, tokenized_obj)

    return send_one_request
