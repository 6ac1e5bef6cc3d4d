"""States of buffers of several agents: `state_dict` and `load_state_dict` of `MultiAgentReplayBuffer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from samplebatch.buffer.env_steps import EnvSteps
from samplebatch.buffer.fragments import Form
from samplebatch.buffer.streams import Tail
from samplebatch.storage.buffer_state import generator_from_state, generator_state
from samplebatch.storage.state_checksums import check_state, with_checksums
from samplebatch.storage.state_dict import export_state, load_state
from samplebatch.storage.untrusted_state import State, check_fragments

if TYPE_CHECKING:
    from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer


def export_multi_agent_state(buffer: MultiAgentReplayBuffer) -> State:
    """Return the state of a buffer of several agents; see `MultiAgentReplayBuffer.state_dict`."""
    with buffer._lock:
        state = {
            "buffers": {policy: export_state(own) for policy, own in buffer.buffers.items()},
            "forms": {policy: (sorted(form.flags), form.rewards.str) for policy, form in buffer._forms.items()},
            "tails": {policy: tuple(tail) for policy, tail in buffer._tails.items()},
            "steps": buffer._steps.state_dict(),
            "generator": generator_state(buffer._rng),
        }
    return with_checksums(state)


def load_multi_agent_state(buffer: MultiAgentReplayBuffer, state: Mapping[str, Any], *, verify: bool = True) -> None:
    """Replace the state of a buffer of several agents; see `MultiAgentReplayBuffer.load_state_dict`."""
    if verify:
        check_state(state)
    buffers = {policy: buffer._new(policy) for policy in state["buffers"]}
    for policy, own in buffers.items():
        load_state(own, state["buffers"][policy], verify=False)
    rng, steps = generator_from_state(state["generator"]), EnvSteps.from_state_dict(state["steps"])
    forms = {policy: Form(frozenset(flags), np.dtype(dtype)) for policy, (flags, dtype) in state["forms"].items()}
    check_fragments(buffers, forms)
    tails = {policy: Tail(*tail) for policy, tail in state["tails"].items()}
    with buffer._lock:
        buffer._forms, buffer._tails = forms, tails
        buffer.buffers, buffer._rng, buffer._steps = buffers, rng, steps
