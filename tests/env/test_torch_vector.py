"""Vector environments that speak torch: what they see stays tensors, from the simulator to the columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from samplebatch import Batch, Collector, RolloutWorkers, SampleBatch, VectorReplayBuffer
from samplebatch.errors import EnvironmentSpecError
from tests.optional import torch

MODES = list(AutoresetMode)


class Drift(VectorEnv):
    """Points that actions move, simulated together in torch in reused buffers.

    An observation is (number, step, position); the reward is the position. Episodes of point n have 3 + n steps.
    Episodes of the last point are truncated.
    """

    def __init__(self, mode: Any = AutoresetMode.NEXT_STEP, num_envs: int = 3, device: str = "cpu") -> None:
        self.num_envs, self.device = num_envs, torch.device(device)
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.obs = torch.zeros(num_envs, 3, device=self.device)
        self.lengths = 3 + torch.arange(num_envs, device=self.device)
        self.ended = torch.zeros(num_envs, dtype=torch.bool, device=self.device)
        self.given: list[torch.Tensor] = []
        self.odd: dict[int, Any] = {}

    def _begin(self, which: Any) -> None:
        numbers = torch.arange(self.num_envs, device=self.device)
        self.obs[which] = torch.stack([numbers, 0 * numbers, 0 * numbers], 1).float()[which]

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        mask = (options or {}).get("reset_mask")
        self._begin(slice(None) if mask is None else torch.as_tensor(mask, device=self.device))
        self.ended[:] = False
        return self.obs, {}

    def step(self, actions: Any) -> Any:
        assert isinstance(actions, torch.Tensor)
        assert actions.dtype == torch.float32
        self.given.append(actions.clone())
        mode, begins = self.metadata["autoreset_mode"], self.ended.clone()
        self.obs[:, 1] += 1
        self.obs[:, 2] += actions[:, 0]
        if mode == AutoresetMode.NEXT_STEP:
            self._begin(begins)
        ends = self.obs[:, 1] == self.lengths
        self.ended[:] = ends
        last = torch.arange(self.num_envs, device=self.device) == self.num_envs - 1
        infos: dict[str, Any] = {"level": self.obs[:, 1] * 10, "_level": ends}
        rewards = self.obs[:, 2].clone()
        if mode == AutoresetMode.SAME_STEP and ends.any():
            infos = {"final_obs": self.obs.clone(), "_final_obs": ends, "final_info": infos, "_final_info": ends}
            self._begin(ends)
        step = [self.obs, rewards, ends & ~last, ends & last, infos]
        for position, value in self.odd.items():
            step[position] = value
        return tuple(step)


def push(obs: Any) -> Any:
    assert isinstance(obs, torch.Tensor)
    return 0.25 * torch.ones(len(obs), 1) * (1 + obs[:, :1].cpu())


def check_drift(batch: SampleBatch) -> None:
    """Compare every row with the rules of the simulation."""
    for name in ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds"):
        assert isinstance(batch[name], torch.Tensor), name
    number = batch["obs"][:, 0]
    assert batch["env_id"].tolist() == number.tolist()
    assert batch["obs"][:, 1].tolist() == batch["t"].tolist()
    assert batch["new_obs"][:, 1].tolist() == (batch["t"] + 1).tolist()
    assert torch.equal(batch["actions"][:, 0], 0.25 * (1 + number))
    assert torch.equal(batch["new_obs"][:, 2], batch["obs"][:, 2] + batch["actions"][:, 0])
    assert torch.equal(batch["rewards"], batch["new_obs"][:, 2].double())
    ends = batch["new_obs"][:, 1] == 3 + number
    last = number == number.max()
    assert torch.equal(batch["terminateds"], ends & ~last)
    assert torch.equal(batch["truncateds"], ends & last)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stateful", [False, True])
def test_values_of_the_simulator_remain_tensors(mode: Any, stateful: bool) -> None:
    def counting(obs: Any, state: Any) -> Any:
        return {"act": push(obs), "state": torch.ones(len(obs), 1) if state is None else state + 1}

    with Collector(counting if stateful else push, Drift(mode), seed=1) as collector:
        batches = [collector.collect(n_step=count).batch for count in (1, 40, 7, 300)]
    for batch in batches:
        check_drift(batch)
        if stateful:
            assert batch["state_in_0"][:, 0].tolist() == batch["t"].tolist()
    steps = [SampleBatch({"t": batch["t"], "env_id": batch["env_id"]}) for batch in batches]
    for env in range(3):
        t = np.concatenate([part["t"][part["env_id"] == env] for part in steps])
        assert t.tolist() == [step % (3 + env) for step in range(len(t))]


@pytest.mark.parametrize("mode", MODES)
def test_episodes_are_counted(mode: Any) -> None:
    with Collector(push, Drift(mode)) as collector:
        stats = collector.collect(n_episode=7)
    check_drift(stats.batch)
    assert sorted(set(stats.lens.tolist())) == [3, 4, 5]
    assert stats.returns.dtype == np.float64


@pytest.mark.parametrize("mode", MODES)
def test_infos_belong_to_their_steps(mode: Any) -> None:
    with Collector(push, Drift(mode)) as collector:
        batch = collector.collect(n_step=60).batch
    ends = batch["terminateds"] | batch["truncateds"]
    infos = [info.get("level") for info in batch["infos"]]
    expected = [10 * (t + 1) if end else None for t, end in zip(batch["t"].tolist(), ends.tolist(), strict=True)]
    assert infos == expected


def test_modules_batches_and_random_policies_act_on_tensors() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 1)

        def forward(self, x: Any) -> Any:
            return self.linear(x).tanh()

    def of_batch(batch: Any) -> Any:
        return Batch(act=push(batch.obs), policy=Batch(value=batch.obs[:, 2]))

    env = Drift()
    for policy in (Net(), of_batch, "random"):
        with Collector(policy, env, seed=1) as collector:
            batch = collector.collect(n_step=30).batch
        assert isinstance(batch["actions"], torch.Tensor)
        values = batch["policy"]["value"] if policy is of_batch else batch["obs"][:, 2]
        assert torch.equal(values, batch["obs"][:, 2])
    assert len(env.given) >= 30


def test_observations_of_several_parts() -> None:
    class Seeing(Drift):
        def __init__(self) -> None:
            super().__init__()
            self.single_observation_space = spaces.Dict(who=spaces.Discrete(9), place=spaces.Box(-9, 9, (1,)))

        def _see(self) -> Any:
            return {"who": self.obs[:, 0].long(), "place": self.obs[:, 2:]}

        def reset(self, **options: Any) -> Any:
            super().reset(**options)
            return self._see(), {}

        def step(self, actions: Any) -> Any:
            _, *others = super().step(actions)
            return self._see(), *others

    with Collector(lambda obs: torch.ones(len(obs.who), 1), Seeing()) as collector:
        batch = collector.collect(n_step=30).batch
    assert isinstance(batch["obs"]["who"], torch.Tensor)
    assert batch["obs"]["who"].tolist() == batch["env_id"].tolist()
    assert torch.equal(batch["new_obs"]["place"], batch["obs"]["place"] + 1)


def test_buffers_store_arrays() -> None:
    buffer = VectorReplayBuffer(60, 3)
    with Collector(push, Drift(AutoresetMode.SAME_STEP), buffer) as collector:
        collector.collect(n_step=60)
    assert isinstance(buffer.obs, np.ndarray)
    assert buffer.obs_next[:, 1].tolist() == (buffer.obs[:, 1] + 1).tolist()


def test_step_hooks_receive_tensors() -> None:
    recorded: list[Any] = []

    def look(decision: Any, transitions: Any) -> None:
        recorded.append(transitions.obs)
        transitions.twice = 2 * transitions.obs[:, 2]

    with Collector(push, Drift(), on_step_hook=look) as collector:
        batch = collector.collect(n_step=20).batch
    check_drift(batch)
    assert all(isinstance(obs, torch.Tensor) for obs in recorded)
    assert torch.equal(batch["twice"], 2 * batch["obs"][:, 2])


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 3), "'obs' must have 3 rows, got 2 in step 1"),
        (0, torch.zeros(3, 2), r"'obs' must have rows of shape \(3,\), got \(2,\) in step 1"),
        (0, torch.zeros(3, 3, dtype=torch.complex64), "'obs' must have dtype float32, got torch.complex64"),
        (1, torch.zeros(2), "'rewards' must have 3 rows, got 2 in step 1"),
        (2, torch.tensor([0.0, 0.5, 1.0]), "'terminateds' must have dtype bool, got a value of float32 .* 1"),
    ],
)
def test_values_that_do_not_fit_are_rejected(position: int, value: Any, message: str) -> None:
    env = Drift()
    env.odd[position] = value
    with pytest.raises(EnvironmentSpecError, match=message), Collector(push, env) as collector:
        collector.collect(n_step=3)


def test_workers_send_tensors() -> None:
    with RolloutWorkers(push, Drift, num_workers=1, start_method="fork") as workers:
        batch = workers.collect(n_step=30).batch
    assert isinstance(batch["obs"], torch.Tensor)
    assert torch.equal(batch["new_obs"][:, 2], batch["obs"][:, 2] + batch["actions"][:, 0])
