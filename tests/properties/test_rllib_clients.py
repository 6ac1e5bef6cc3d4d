"""RLlib's replay buffers and sequencing, unmodified, do the same over our batches as over theirs."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from tests.properties.rllib_modules import BUFFERS, Batches, load, plain, run_both

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[rllib]")

UNITS = ("timesteps", "fragments", "episodes", "sequences")


def fragment(batches: Batches, number: int, unit: str) -> Any:
    """Return an identifiable episode of 4 steps, as one sequence if the buffer stores sequences."""
    t = np.arange(4)
    sequences = {"seq_lens": np.array([4])} if unit == "sequences" else {}
    return batches.SampleBatch(
        {
            "obs": (t[:, None] + 100.0 * number).repeat(3, 1).astype(np.float32),
            "new_obs": (t[:, None] + 100.0 * number + 1).repeat(3, 1).astype(np.float32),
            "actions": t % 2,
            "rewards": (t + number).astype(np.float32),
            "terminateds": t == 3,
            "truncateds": np.zeros(4, bool),
            "eps_id": np.full(4, number),
            "agent_index": np.zeros(4, int),
            "t": t,
            **sequences,
        }
    )


def several(batches: Batches, number: int, unit: str) -> Any:
    """Return a batch of policies with integer ids, as in RLlib's tests, and string ids."""
    parts = {policy: fragment(batches, number + position, unit) for position, policy in ((0, 0), (50, 1), (70, "1"))}
    return batches.MultiAgentBatch(parts, 4)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("capacity", [6, 100])
def test_replay_buffer(unit: str, capacity: int) -> None:
    def scenario(batches: Batches) -> Any:
        buffer = load(f"{BUFFERS}.replay_buffer").ReplayBuffer(capacity=capacity, storage_unit=unit)
        for number in range(5):
            buffer.add(fragment(batches, number, unit))
        sample = [buffer.sample(3) for _ in range(3)]
        other = load(f"{BUFFERS}.replay_buffer").ReplayBuffer(capacity=capacity, storage_unit=unit)
        other.set_state(buffer.get_state())
        return plain([sample, other.sample(2), buffer.stats(), len(other)])

    mine, theirs = run_both(scenario)
    assert mine == theirs


@pytest.mark.parametrize("unit", UNITS)
def test_prioritized_replay_buffer(unit: str) -> None:
    def scenario(batches: Batches) -> Any:
        buffer = load(f"{BUFFERS}.prioritized_replay_buffer").PrioritizedReplayBuffer(
            capacity=40, storage_unit=unit, alpha=0.6
        )
        for number in range(5):
            buffer.add(fragment(batches, number, unit), weight=number + 0.5)
        first = buffer.sample(3, beta=0.4)
        indexes = np.unique(first["batch_indexes"])
        buffer.update_priorities(indexes, np.arange(1.0, 1 + len(indexes)))
        return plain([first, [buffer.sample(4, beta=1.0) for _ in range(3)], buffer.stats()])

    mine, theirs = run_both(scenario)
    assert mine == theirs


@pytest.mark.parametrize("kind", ["FifoReplayBuffer", "ReservoirReplayBuffer"])
def test_other_buffers(kind: str) -> None:
    def scenario(batches: Batches) -> Any:
        module = load(f"{BUFFERS}.{kind.removesuffix('ReplayBuffer').lower()}_replay_buffer")
        buffer = getattr(module, kind)(*([8] if kind.startswith("Reservoir") else []))
        actual = []
        for number in range(6):
            buffer.add(fragment(batches, number, "timesteps"))
            actual.append(buffer.sample(2))
        return plain(actual)

    mine, theirs = run_both(scenario)
    assert mine == theirs


@pytest.mark.parametrize("mode", ["independent", "lockstep"])
@pytest.mark.parametrize("unit", UNITS)
def test_multi_agent_replay_buffer(unit: str, mode: str) -> None:
    if mode == "lockstep" and unit in ("episodes", "sequences"):
        pytest.skip("RLlib has no lockstep of these")

    def scenario(batches: Batches) -> Any:
        buffer = load(f"{BUFFERS}.multi_agent_replay_buffer").MultiAgentReplayBuffer(
            capacity=100, storage_unit=unit, replay_mode=mode, replay_sequence_length=4
        )
        for number in range(4):
            buffer.add(several(batches, number, unit))
        sample = [buffer.sample(3) for _ in range(3)]
        if mode == "independent":
            sample.append(buffer.sample(2, policy_id=1))
        return plain(sample)

    mine, theirs = run_both(scenario)
    if mode == "lockstep" and unit == "timesteps":
        # RLlib's timeslices of several policies add a column.
        for _, parts in theirs:
            for *_, columns in parts.values():
                del columns["unroll_id"]
    assert mine == theirs


@pytest.mark.parametrize("unit", ["timesteps", "fragments", "sequences"])
def test_multi_agent_prioritized_replay_buffer(unit: str) -> None:
    def scenario(batches: Batches) -> Any:
        buffer = load(f"{BUFFERS}.multi_agent_prioritized_replay_buffer").MultiAgentPrioritizedReplayBuffer(
            capacity=100, storage_unit=unit, replay_sequence_length=6, replay_burn_in=2
        )
        for number in range(4):
            buffer.add(several(batches, number, unit))
        first = buffer.sample(3, beta=0.4)
        errors = {
            policy: (part["batch_indexes"], np.arange(1.0, 1 + len(part["batch_indexes"])))
            for policy, part in first.policy_batches.items()
        }
        buffer.update_priorities(errors)
        return plain([first, buffer.sample(3, beta=0.4), buffer.sample(2, policy_id="1", beta=0.4)])

    mine, theirs = run_both(scenario)
    assert mine == theirs


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("unit", UNITS)
def test_multi_agent_mixin_replay_buffer(unit: str, ratio: float) -> None:
    def scenario(batches: Batches) -> Any:
        buffer = load(f"{BUFFERS}.multi_agent_mixin_replay_buffer").MultiAgentMixInReplayBuffer(
            capacity=100, storage_unit=unit, replay_ratio=ratio, replay_sequence_length=4
        )
        sampled = []
        for number in range(4):
            buffer.add(several(batches, number, unit), beta=0.4)
            sampled.append(buffer.sample(2, policy_id=0, beta=0.4))
            sampled.append(buffer.sample(2, policy_id=None, beta=0.4))
        return plain(sampled)

    # Rows that were drawn have weights, which the newest have not: RLlib leaves them out without a word.
    mine, theirs = run_both(scenario, missing="drop")
    assert mine == theirs


# -- sequences --------------------------------------------------------------------------------------------------------


def recurrent(batches: Batches) -> Any:
    """Return 10 steps of two episodes with recurrent states, without sequences."""
    steps = np.arange(10)
    return batches.SampleBatch(
        {
            "obs": steps.astype(np.float32),
            "a": steps,
            "eps_id": np.array([1] * 4 + [5] * 6),
            "unroll_id": np.array([8] * 8 + [9] * 2),
            "agent_index": np.zeros(10, int),
            "state_in_0": steps[:, None] * 0.5,
            "state_out_0": steps[:, None] * 0.5 + 0.5,
        }
    )


@pytest.mark.parametrize(("overlap", "zero"), [(0, True), (2, True), (2, False)])
@pytest.mark.parametrize("pad", [0, 7])
def test_timeslices_along_lengths(overlap: int, zero: bool, pad: int) -> None:
    # Without overlap RLlib takes the state before the first step for one of no rows.
    def scenario(batches: Batches) -> Any:
        slices = load("ray.rllib.policy.rnn_sequencing").timeslice_along_seq_lens_with_overlap(
            recurrent(batches),
            seq_lens=[4, 4, 2],
            pre_overlap=overlap,
            zero_init_states=zero,
            zero_pad_max_seq_len=pad,
        )
        return plain(slices)

    mine, theirs = run_both(scenario)
    assert mine == theirs
