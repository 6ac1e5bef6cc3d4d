"""Meaningless arguments are rejected on entry; the error names the argument, the requirement and the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    HERReplayBuffer,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
    broadcast,
    channel,
)
from samplebatch.errors import ArgumentError, ColumnMismatchError, ColumnNotFoundError
from samplebatch.returns import compute_nstep_return, discounted_returns, gae, nstep
from samplebatch.rollout import GAE, Aggregator, NStepReturns, RolloutWorkers


def filled(**options: Any) -> ReplayBuffer:
    buf = ReplayBuffer(8, **options)
    for n in range(5):
        buf.add(Batch(obs=n, act=0, rew=1.0, terminated=n == 3, truncated=False, obs_next=n + 1))
    return buf


def steps() -> SampleBatch:
    return SampleBatch(obs=[1, 2], actions=[0, 0], rewards=[1.0, 1.0], terminateds=[False, True])


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "size": ReplayBuffer,
    "total_size": lambda n: VectorReplayBuffer(n, 2),
    "buffer_num": lambda n: PrioritizedVectorReplayBuffer(8, n, alpha=1.0, beta=1.0),
    "cached_buffer_num": lambda n: CachedReplayBuffer(ReplayBuffer(4), n, 4),
    "max_episode_length": lambda n: CachedReplayBuffer(ReplayBuffer(4), 2, n),
    "horizon": lambda n: HERReplayBuffer(4, np.subtract, n),
    "stack_num": lambda n: ReplayBuffer(8, stack_num=n),
    "batch_size": lambda n: filled().sample(n),
    "n_step": lambda n: filled().sample(4, n_step=n),
    "length": lambda n: filled().sample_sequences(4, n),
    "burn_in": lambda n: filled().get_sequences([1], 4, burn_in=n),
    "n": lambda n: filled().latest(n),
    "epochs": lambda n: list(filled().minibatches(2, epochs=n)),
    "env_steps": lambda n: MultiAgentBatch({"walker": steps()}, n),
    "k": lambda n: steps().timeslices(k=n),
    "num_slices": lambda n: steps().timeslices(num_slices=n),
    "max_seq_len": lambda n: SampleBatch(a=[1, 2], seq_lens=[2]).right_zero_pad(n),
    "train_batch_size": Aggregator,
    "fragment_length": lambda n: RolloutWorkers("random", "CartPole-v1").fragments(fragment_length=n),
    "capacity_nbytes": channel,
    "blocks": lambda n: broadcast(1 << 10, blocks=n),
    "max_restarts": lambda n: RolloutWorkers("random", "CartPole-v1", max_restarts=n),
}


@pytest.mark.parametrize("wrong", [2.5, 2.0, float("nan"), True, "2", -2], ids=str)
@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_counts_must_be_integers(name: str, wrong: Any) -> None:
    if name == "batch_size" and wrong == -2:
        assert len(NUMBERS[name](wrong)[1]) == 0
        return
    with pytest.raises(ArgumentError, match=rf"^{name} must be a whole number( from \d)?, got {wrong!r}$"):
        NUMBERS[name](wrong)


MADE: dict[str, Callable[[Any], Any]] = {
    "size": lambda buf: buf.maxsize,
    "buffer_num": lambda buf: buf.buffer_num,
    "stack_num": lambda buf: buf.stack_num,
    "batch_size": lambda sampled: len(sampled[1]),
    "n_step": lambda sampled: sampled[0].returns.tolist(),
    "length": lambda sampled: sampled[1].shape,
    "k": lambda slices: [len(part) for part in slices],
}
"""The outcomes of some numbers of `NUMBERS`, as they can be read."""


def test_integers_that_python_does_not_format_are_rejected() -> None:
    with pytest.raises(ArgumentError, match=r"got an integer of 16610 bits$"):
        ReplayBuffer(-(10**5000))
    with pytest.raises(
        ArgumentError, match=r"^stall_timeout_s must be a number above 0, got an integer of 16610 bits$"
    ):
        RolloutWorkers("random", "CartPole-v1", stall_timeout_s=10**5000)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2)], ids=repr)
@pytest.mark.parametrize("name", MADE)
def test_counts_may_be_numpy_integers(name: str, number: Any) -> None:
    assert MADE[name](NUMBERS[name](number)) == MADE[name](NUMBERS[name](2))


REWARDS: Any = {"rewards": [1.0, 1.0], "terminated": [0, 1]}
DISCOUNTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sample": ("gamma", lambda x: filled().sample(4, n_step=2, gamma=x)),
    "sample of single steps": ("gamma", lambda x: filled().sample(4, gamma=x)),
    "sample of several agents": ("gamma", lambda x: several_agents().sample(4, n_step=2, gamma=x)),
    "nstep": ("gamma", lambda x: nstep(**REWARDS, n_step=2, gamma=x)),
    "discounted_returns": ("gamma", lambda x: discounted_returns(**REWARDS, gamma=x)),
    "gae": ("gamma", lambda x: gae(**REWARDS, values=[1, 1], next_values=[1, 1], gamma=x)),
    "gae_lambda": ("gae_lambda", lambda x: gae(**REWARDS, values=[1, 1], next_values=[1, 1], gae_lambda=x)),
    "compute_nstep_return": ("gamma", lambda x: nstep_return(x)),
    "GAE": ("gamma", lambda x: GAE(gamma=x)),
    "GAE's lambda_": ("lambda_", lambda x: GAE(lambda_=x)),
    "NStepReturns": ("gamma", lambda x: NStepReturns(2, gamma=x)),
}


def several_agents() -> MultiAgentReplayBuffer:
    buf = MultiAgentReplayBuffer(4)
    part = steps()
    part["new_obs"] = [2, 3]
    buf.add(MultiAgentBatch({"walker": part}, 2))
    return buf


def nstep_return(gamma: Any) -> Any:
    buf = filled()
    return compute_nstep_return(buf[[0, 1]], buf, [0, 1], lambda b, i: np.zeros((len(i), 1)), gamma=gamma)


@pytest.mark.parametrize("wrong", [2, -0.1, float("nan"), float("inf"), "0.9", True], ids=str)
@pytest.mark.parametrize("position", sorted(DISCOUNTS))
def test_discounts_must_be_between_0_and_1(position: str, wrong: Any) -> None:
    name, call = DISCOUNTS[position]
    with pytest.raises(ArgumentError, match=f"^{name} must be a number from 0 to 1, got {wrong!r}$"):
        call(wrong)
    call(np.float32(0.5))


@pytest.mark.parametrize("wrong", [0, -1, 1.5])
def test_stack_num_is_validated_at_every_assignment(wrong: Any) -> None:
    buf = filled()
    with pytest.raises(ArgumentError, match="stack_num"):
        buf.stack_num = wrong
    with pytest.raises(ArgumentError, match="stack_num"):
        buf.get([1], "obs", stack_num=wrong)
    assert buf.stack_num == 1


@pytest.mark.parametrize("draw", ["sample", "n_step", "gamma", "batch_size", "stretches", "names", "next", "agents"])
def test_rejected_calls_draw_no_random_numbers(draw: str) -> None:
    buf = filled()
    masked = ReplayBuffer(4)
    masked.add(Batch(obs=1, act=0, rew=1.0, terminated=False, truncated=False, mask=1))
    agents: Any = several_agents()
    buffer, call = {
        "sample": (buf, lambda: buf.sample(4, n_step=0)),
        "n_step": (buf, lambda: buf.sample(4, n_step=1.5)),
        "gamma": (buf, lambda: buf.sample(None, n_step=1, gamma=2)),
        "batch_size": (buf, lambda: buf.sample_indices(2.5)),
        "stretches": (buf, lambda: buf.sample_sequences(2.5, 2, padded=False)),
        "names": (masked, lambda: masked.sample_sequences(2, 2)),
        "next": (masked, lambda: masked.sample(2, n_step=2)),
        "agents": (agents.buffers["walker"], lambda: agents.sample(4, n_step=0)),
    }[draw]
    before = repr(buffer._rng.bit_generator.state)
    with pytest.raises((ArgumentError, ColumnMismatchError, KeyError)):
        call()
    assert repr(buffer._rng.bit_generator.state) == before


@pytest.mark.parametrize("wrong", [0.5, 2, -1, float("nan")])
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_flags_must_be_0_or_1(name: str, wrong: Any) -> None:
    for buf in (filled(), ReplayBuffer(4)):
        before = len(buf)
        row = Batch(obs=9, act=0, rew=1.0, terminated=False, truncated=False, obs_next=10)
        row[name] = wrong
        with pytest.raises(ColumnMismatchError, match=f"column {name!r} must have flags, 0 or 1 each"):
            buf.add(row)
        assert len(buf) == before
        row[name] = 1.0
        assert buf.add(row)[2].tolist() == [2 if before else 1]
    vector = VectorReplayBuffer(8, 2)
    flags: dict[str, Any] = {"terminated": [0, 0], "truncated": [0, 0]}
    for value in (flags, flags | {name: [0, wrong]}):
        rows = Batch(obs=[1, 2], act=[0, 0], rew=[1.0, 1.0], **value)
        if value is flags:
            vector.add(rows)
        else:
            with pytest.raises(ColumnMismatchError, match=name):
                vector.add(rows)
    with pytest.raises(ColumnMismatchError, match=name):
        filled().set_array_at_key([wrong], name, [1])
    with pytest.raises(ColumnMismatchError, match=name):
        nstep([1.0, 1.0], **(flags | {name: [0, wrong]}))
    part = SampleBatch(obs=[1, 2], actions=[0, 0], rewards=[1.0, 1.0], terminateds=[0, 1], truncateds=[0, 0])
    part[f"{name}s"] = [wrong, wrong]
    with pytest.raises(ColumnMismatchError, match=f"{name}s"):
        MultiAgentReplayBuffer(4).add(MultiAgentBatch({"walker": part}, 2))


def test_columns_to_compress_must_exist() -> None:
    row = Batch(obs={"camera": np.zeros((4, 4), np.uint8)}, act=0, rew=1.0, terminated=False, truncated=False)
    for name, hint in (("typo", "got 'typo'; there are"), ("obs.camra", "did you mean 'obs.camera'")):
        for option in ("compress", "ragged"):
            buf = ReplayBuffer(4, **{option: ["obs.camera", name] if option == "compress" else [name]})
            with pytest.raises(ArgumentError, match=f"^{option} must name columns of a step, .*{hint}"):
                buf.add(row)
            assert len(buf) == 0
    for names in (True, "obs", "obs.camera", ["obs", "obs_next"], ["obs.camera", "policy.hidden", "info.path"]):
        ReplayBuffer(4, compress=names).add(row)


@pytest.mark.parametrize("shape", [(84, 84, 4), (84, 84, 1), (84, 84)], ids=str)
def test_images_are_rejected_as_frame_stacks(shape: tuple[int, ...]) -> None:
    frames = np.zeros(shape, np.uint8)
    for obs in (frames, {"camera": frames}):
        buf = ReplayBuffer(4, save_only_last_obs=True)
        with pytest.raises(ColumnMismatchError, match=r"must have frames along the first axis.*got rows of shape"):
            buf.add(Batch(obs=obs, act=0, rew=1.0, terminated=False, truncated=False))
        assert len(buf) == 0
    vector = VectorReplayBuffer(4, 1, save_only_last_obs=True)
    with pytest.raises(ColumnMismatchError, match="column 'obs'"):
        vector.add(Batch(obs=frames[None], act=[0], rew=[1.0], terminated=[False], truncated=[False]))


@pytest.mark.parametrize("shape", [(4, 84, 84), (4, 84, 84, 3), (1, 84, 84, 4), (4,), (4, 17)], ids=str)
def test_only_the_last_frame_of_a_stack_is_stored(shape: tuple[int, ...]) -> None:
    buf = ReplayBuffer(4, save_only_last_obs=True)
    buf.add(Batch(obs=np.zeros(shape), act=0, rew=1.0, terminated=False, truncated=False))
    assert buf.obs.shape == (4, *shape[1:])


def test_unknown_naming_conventions_are_rejected() -> None:
    with pytest.raises(
        ArgumentError, match="convention must be one of 'rllib', 'tianshou', got 'tianshu'; did you mean"
    ):
        steps().as_batch(convention="tianshu")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="convention must be one of 'rllib', 'tianshou', got 'kept'"):
        Batch(a=[1]).as_sample_batch(convention="kept")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="mode must be one of 'env_steps', 'agent_steps', got 'steps'"):
        Aggregator(4, mode="steps")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [float("nan"), 0, -1.0, "1"], ids=str)
def test_durations_must_be_positive(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="stall_timeout_s must be a number above 0"):
        RolloutWorkers("random", "CartPole-v1", stall_timeout_s=wrong)


def test_a_failed_update_does_not_change_the_batch() -> None:
    for batch in (SampleBatch(a=[1, 2], b={"x": [3, 4]}), SampleBatch(a=[0, 1, 2], b={"x": [0, 3, 4]})[1:]):
        a = batch["a"]
        with pytest.raises(ValueError, match="'c'"):
            batch.update({"a": [5, 6], "b": [7, 8], "new": [1, 2], "c": [1]})
        assert batch["a"] is a
        assert (batch["b"]["x"].tolist(), sorted(batch), len(batch)) == ([3, 4], ["a", "b"], 2)
        batch.update({"a": [5, 6]}, c=[7, 8])
        assert (batch["a"].tolist(), batch["c"].tolist(), a.tolist()) == ([5, 6], [7, 8], [1, 2])
    torch = pytest.importorskip("torch")
    nested = Batch(a=1)
    with pytest.raises(TypeError):
        nested.update({"a": 2}, c=[torch.ones(2), torch.ones(3)])
    assert nested == Batch(a=1)


def test_names_of_any_length_are_shortened_in_hints() -> None:
    """Names can come from files; comparing long names would take minutes."""
    batch = SampleBatch({f"{number}{'a' * 100_000}": [1] for number in range(64)} | {"rewards": [1.0]})
    with pytest.raises(ColumnNotFoundError, match="did you mean 'rewards'"):
        batch["reward"]
    with pytest.raises(ColumnNotFoundError, match=r"there are '0aaa.* and 53 more") as error:
        batch["b" * 100_000]
    assert len(str(error.value)) < 2_000
