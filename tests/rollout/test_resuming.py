"""A collector that loads a state continues exactly like the collector that saved it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from samplebatch import AsyncCollector, Collector, MultiAgentCollector, ReplayBuffer
from samplebatch.errors import ArgumentError, EnvironmentSpecError, FormatError, SampleBatchError, UntrustedPickleError
from samplebatch.rollout.collector import BaseCollector
from tests.malice import Mark

MODES = ("NextStep", "SameStep", "Disabled")


def vector(mode: str, name: str = "CartPole-v1") -> SyncVectorEnv:
    return SyncVectorEnv([partial(gymnasium.make, name)] * 3, autoreset_mode=AutoresetMode(mode))


class Wrapped(gymnasium.vector.VectorWrapper):
    """Wrapped vector environment, which can only be stepped as a unit."""


def remembering(obs: Any, state: Any) -> Any:
    """Act by the number of steps of the episode, which only the state contains."""
    count = np.zeros(len(obs), np.int64) if state is None else state["count"]
    return {"act": count % 2, "state": {"count": count + 1}}


def graphed(obs: Any) -> Any:
    """Act by a state with a gradient history."""
    torch = pytest.importorskip("torch")
    observed = torch.as_tensor(np.asarray(obs), dtype=torch.float32).requires_grad_()
    return {"act": (observed[:, 0] > 0).long(), "state": {"seen": (observed * 2).sum(1)}}


MAKERS: dict[str, Callable[[], Any]] = {
    "CartPole": lambda: Collector("random", "CartPole-v1", num_envs=3, seed=5),
    "Pendulum": lambda: Collector("random", "Pendulum-v1", seed=5),
    "a state": lambda: Collector(remembering, "CartPole-v1", num_envs=3, seed=5),
    "a graph": lambda: Collector(graphed, "CartPole-v1", num_envs=3, seed=5),
    **{mode: partial(lambda mode: Collector("random", vector(mode), seed=5), mode) for mode in MODES},
    **{f"as a whole, {m}": partial(lambda m: Collector("random", Wrapped(vector(m)), seed=5), m) for m in MODES},
    "simple_spread": lambda: MultiAgentCollector("random", "mpe2/simple_spread_v3", num_envs=2, seed=5),
    "several states": lambda: MultiAgentCollector(remembering, "mpe2/simple_spread_v3", num_envs=2, seed=5),
    "several graphs": lambda: MultiAgentCollector(graphed, "mpe2/simple_spread_v3", num_envs=2, seed=5),
    "turns": lambda: MultiAgentCollector("random", "pettingzoo/classic/tictactoe_v3", num_envs=2, seed=5),
    "spaces": lambda: MultiAgentCollector(gymnasium.spaces.Discrete(5), "mpe2/simple_spread_v3", seed=5),
}


def rows(batch: Any) -> dict[str, Any]:
    """List the columns of a batch that depend only on the seed; episode ids are random."""
    parts = {"": batch} if not hasattr(batch, "policy_batches") else batch.policy_batches
    actual = {}
    for policy, steps in parts.items():
        columns = {name: np.asarray(steps[name]) for name in steps.column_names if name not in ("eps_id", "unroll_id")}
        # By stream and time: batches may be cut elsewhere.
        actual |= {f"{policy}.{name}": column.tolist() for name, column in columns.items()}
    return actual


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [7, 60])
def test_a_resumed_collector_resumes_exactly(name: str, steps: int) -> None:
    with MAKERS[name]() as first, MAKERS[name]() as second:
        first.collect(n_step=steps)
        state = pickle.loads(pickle.dumps(first.state_dict()))
        assert state["why_reset"] is None
        second.collect(n_step=11)
        second.load_state_dict(state, allow_pickle=True)
        for _ in range(3):
            left, other = first.collect(n_step=60), second.collect(n_step=60)
            assert str(rows(left.batch)) == str(rows(other.batch))
            # Where there are several agents, episodes come by their ids.
            assert sorted(left.returns.tolist()) == sorted(other.returns.tolist())
            assert sorted(left.lens.tolist()) == sorted(other.lens.tolist())


@pytest.mark.parametrize("name", ["CartPole", "NextStep", "simple_spread", "turns"])
def test_episodes_in_progress_keep_their_ids(name: str) -> None:
    with MAKERS[name]() as first, MAKERS[name]() as second:
        first.collect(n_step=6)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        ids = []
        for collector in (first, second):
            batch = collector.collect(n_step=2).batch
            steps = batch if not hasattr(batch, "policy_batches") else next(iter(batch.policy_batches.values()))
            ids.append(steps["eps_id"][:1].tolist())
        assert ids[0] == ids[1]


_IN_ANOTHER_PROCESS = """
import pickle, sys
sys.path.insert(0, {here!r})
import test_resuming
state = pickle.loads(sys.stdin.buffer.read())
with test_resuming.MAKERS[{name!r}]() as collector:
    collector.load_state_dict(state, allow_pickle=True)
    found = test_resuming.rows(collector.collect(n_step=60).batch)
sys.stdout.buffer.write(pickle.dumps(str(found)))
"""


@pytest.mark.parametrize("name", ["CartPole", "Pendulum", "simple_spread"])
def test_another_process_resumes(name: str) -> None:
    with MAKERS[name]() as first:
        first.collect(n_step=30)
        state = pickle.dumps(first.state_dict())
        expected = str(rows(first.collect(n_step=60).batch))
    code = _IN_ANOTHER_PROCESS.format(here=str(Path(__file__).parent), name=name)
    ended = subprocess.run([sys.executable, "-c", code], input=state, capture_output=True, check=True)
    assert pickle.loads(ended.stdout) == expected


def test_environments_in_processes_continue() -> None:
    makers = [partial(gymnasium.make, "CartPole-v1")] * 2
    options = {"start_method": "fork", "wait_num": 2}
    with (
        AsyncCollector("random", makers, seed=3, **options) as first,
        AsyncCollector("random", makers, seed=4, **options) as second,
    ):
        first.collect(n_step=25)
        second.load_state_dict(first.state_dict(), allow_pickle=True)
        left, other = (by_environment(collector.collect(n_step=200).batch) for collector in (first, second))
        for mine, its in zip(left, other, strict=True):
            length = min(len(mine), len(its))
            assert length > 50
            assert mine[:length] == its[:length]


def by_environment(batch: Any) -> list[list[Any]]:
    """List the observations and times of each environment; the number of steps per environment is not deterministic."""
    steps = list(zip(batch["env_id"].tolist(), batch["obs"].tolist(), batch["t"].tolist(), strict=True))
    return [[step for step in steps if step[0] == env_id] for env_id in range(2)]


class Endless(gymnasium.Env[Any, Any]):
    """Environment that cannot be pickled and whose observations contain its seed."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.unpicklable = (number for number in range(3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.np_random.random(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.np_random.random(1), 0.0, False, False, {}


def test_environments_that_cannot_be_saved_are_reset_with_other_seeds() -> None:
    first, second = (Collector("random", Endless(), seed=3) for _ in range(2))
    before = first.collect(n_step=8).batch
    state = first.state_dict()
    assert "cannot pickle" in state["why_reset"]
    second.load_state_dict(state, allow_pickle=True)
    after = second.collect(n_step=8).batch
    assert after["t"].tolist() == list(range(8)), "the episode begins with the reset"
    assert not set(before["obs"].ravel().tolist()) & set(after["obs"].ravel().tolist())
    again = Collector("random", Endless(), seed=99)
    again.load_state_dict(state, allow_pickle=True)
    assert again.collect(n_step=8).batch["obs"].tolist() == after["obs"].tolist()


def test_environments_are_not_unpickled_without_permission(mark: Path) -> None:
    collector = MAKERS["Pendulum"]()
    state = collector.state_dict()
    state["environments"][0]["saved"]["pickles"] = [pickle.dumps(Mark(mark))]
    with pytest.raises(UntrustedPickleError, match="the state of a Collector holds pickled objects"):
        collector.load_state_dict(state)
    collector.collect(n_step=3)


def test_counts_continue() -> None:
    first, second = MAKERS["CartPole"](), MAKERS["CartPole"]()
    first.collect(n_step=90)
    second.load_state_dict(first.state_dict(), allow_pickle=True)
    assert second.collect_step == first.collect_step
    assert second.collect_episode == first.collect_episode
    assert second.collect(n_step=3).batch["unroll_id"].tolist() == [1, 1, 1]


def test_a_state_does_not_change_when_its_collector_continues() -> None:
    first = MAKERS["a state"]()
    first.collect(n_step=10)
    state = first.state_dict()
    before = pickle.dumps(state["values"]), str(state["parts"])
    first.collect(n_step=100)
    assert (pickle.dumps(state["values"]), str(state["parts"])) == before


def test_a_buffer_gets_the_same_steps() -> None:
    first, second = (Collector("random", "CartPole-v1", ReplayBuffer(200), seed=1) for _ in range(2))
    first.collect(n_step=50)
    second.buffer.load_state_dict(first.buffer.state_dict())
    second.load_state_dict(first.state_dict(), allow_pickle=True)
    for collector in (first, second):
        for _ in range(60):
            collector.collect(n_step=1)
    assert str(first.buffer[:]) == str(second.buffer[:])


def test_states_that_do_not_fit_are_rejected() -> None:
    collector = MAKERS["CartPole"]()
    with pytest.raises(FormatError, match="must have the entry 'collector'"):
        collector.load_state_dict({})
    with pytest.raises(ArgumentError, match="of a Collector with 3 environments, got a Collector with 1"):
        collector.load_state_dict(MAKERS["Pendulum"]().state_dict())
    with pytest.raises(ArgumentError, match="got a MultiAgentCollector"):
        collector.load_state_dict(MAKERS["simple_spread"]().state_dict())
    with pytest.raises(EnvironmentSpecError, match="of a Wrapped, got a"):
        MAKERS["as a whole, SameStep"]().load_state_dict(MAKERS["Disabled"]().state_dict(), allow_pickle=True)


@pytest.mark.parametrize("name", ["CartPole", "simple_spread"])
@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_are_rejected_with_advice(name: str, take: Any) -> None:
    with pytest.raises(SampleBatchError, match="pass its state_dict"):
        take(MAKERS[name]())
    assert isinstance(MAKERS[name](), BaseCollector)
