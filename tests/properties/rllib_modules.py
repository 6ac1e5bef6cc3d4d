"""RLlib's own code run over our batches: its modules with our classes in place of theirs, and theirs beside them."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest

import samplebatch as ours

REPLACED = ("SampleBatch", "MultiAgentBatch", "concat_samples", "concat_samples_into_ma_batch")
"""Names that modules of RLlib import from `ray.rllib.policy.sample_batch`."""

BUFFERS = "ray.rllib.utils.replay_buffers"
PATCHED = (
    "ray.rllib.policy.rnn_sequencing",
    "ray.rllib.policy.sample_batch",
    f"{BUFFERS}.replay_buffer",
    f"{BUFFERS}.fifo_replay_buffer",
    f"{BUFFERS}.reservoir_replay_buffer",
    f"{BUFFERS}.prioritized_replay_buffer",
    f"{BUFFERS}.multi_agent_replay_buffer",
    f"{BUFFERS}.multi_agent_mixin_replay_buffer",
    f"{BUFFERS}.multi_agent_prioritized_replay_buffer",
    f"{BUFFERS}.utils",
)


class Batches(NamedTuple):
    """Classes and functions of one of the two libraries."""

    SampleBatch: Any
    MultiAgentBatch: Any
    concat_samples: Any
    concat_samples_into_ma_batch: Any


OURS = Batches(*(getattr(ours, name) for name in REPLACED))


def load(name: str) -> ModuleType:
    """Import a module of RLlib, which takes seconds and warns; skip the test if RLlib is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip("needs ray[rllib]")


def theirs() -> Batches:
    module = load("ray.rllib.policy.sample_batch")
    return Batches(*(getattr(module, name) for name in REPLACED))


def run_both(scenario: Callable[[Batches], Any], missing: str = "error") -> tuple[Any, Any]:
    """Run RLlib's code with batches of each library and the same seeds; return both results.

    `missing`: how batches of this library handle columns that only some batches have.
    """
    joining = {name: partial(getattr(OURS, name), missing=missing) for name in REPLACED[2:]}
    actual = []
    for batches in (OURS._replace(**joining), theirs()):
        random.seed(7)
        np.random.seed(7)
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("ignore")
            for name in PATCHED:
                module = load(name)
                for replaced in REPLACED:
                    if hasattr(module, replaced):
                        patch.setattr(module, replaced, getattr(batches, replaced))
            actual.append(scenario(batches))
    return actual[0], actual[1]


def plain(value: Any) -> Any:
    """Convert batches, arrays and containers to values that compare dtype, shape and content."""
    if hasattr(value, "policy_batches"):
        parts = {(type(policy), policy): plain(part) for policy, part in value.policy_batches.items()}
        return value.count, parts
    if hasattr(value, "zero_padded"):
        columns = {name: plain(column) for name, column in value.items()}
        return value.count, value.zero_padded, value.max_seq_len or 0, columns
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        # RLlib's lengths become int32 or int64 as it happens.
        kind = value.dtype.kind if value.dtype.kind in "iu" else value.dtype
        return kind, value.shape, value.tolist()
    return value
