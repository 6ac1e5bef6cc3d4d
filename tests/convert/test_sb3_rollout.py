"""Users' PPO scripts of Stable-Baselines3 with our rollout buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch.convert import SB3RolloutBuffer, from_sb3
from samplebatch.errors import CapacityError, ColumnMismatchError, EmptyBufferError
from tests.optional import torch

sb3 = pytest.importorskip("stable_baselines3")
buffers = pytest.importorskip("stable_baselines3.common.buffers")
env_util = pytest.importorskip("stable_baselines3.common.env_util")
spaces = pytest.importorskip("gymnasium.spaces")

LINE = spaces.Box(-np.inf, np.inf, (2,), np.float32)
PARTS = spaces.Dict({"x": LINE, "place": spaces.Discrete(9)})


@pytest.mark.parametrize(("name", "env"), [("PPO", "CartPole-v1"), ("PPO", "Pendulum-v1"), ("A2C", "CartPole-v1")])
def test_algorithms_learn_nearly_the_same_parameters(name: str, env: str) -> None:
    """Advantages are summed in float64; Stable-Baselines3 uses float32."""
    torch.set_num_threads(1)
    models = []
    for buffer in (SB3RolloutBuffer, None):
        options: dict[str, Any] = {"n_steps": 64, "seed": 3, "device": "cpu", "rollout_buffer_class": buffer}
        if name == "PPO":
            options |= {"batch_size": 32, "n_epochs": 2}
        algorithm = getattr(sb3, name)
        model = algorithm("MlpPolicy", env_util.make_vec_env(env, 2), policy_kwargs={"net_arch": [16]}, **options)
        start = [value.clone() for value in model.policy.state_dict().values()]
        models.append(model.learn(256))
        assert not all(torch.equal(x, y) for x, y in zip(start, model.policy.state_dict().values(), strict=True))
    for key, value in models[0].policy.state_dict().items():
        torch.testing.assert_close(value, models[1].policy.state_dict()[key], rtol=1e-3, atol=1e-4)


def fill(buffer: Any, seed: int, space: Any) -> Any:
    rng = np.random.default_rng(seed)
    n_envs = buffer.n_envs
    for _ in range(buffer.buffer_size):
        obs: Any = rng.normal(size=(n_envs, 2)).astype(np.float32)
        if space is PARTS:
            obs = {"x": obs, "place": rng.integers(0, 9, n_envs)}
        numbers = torch.as_tensor(rng.normal(size=(2, n_envs)), dtype=torch.float32)
        starts = rng.random(n_envs) < 0.3
        buffer.add(obs, rng.integers(0, 3, n_envs), rng.normal(size=n_envs), starts, numbers[0], numbers[1])
    last = torch.as_tensor(rng.normal(size=(n_envs, 1)), dtype=torch.float32)
    buffer.compute_returns_and_advantage(last, rng.random(n_envs) < 0.5)
    return buffer


@pytest.mark.parametrize("space", [LINE, PARTS], ids=["array", "dict"])
@pytest.mark.parametrize("seed", range(4))
def test_minibatches_agree_with_stable_baselines3(space: Any, seed: int) -> None:
    kind = buffers.DictRolloutBuffer if space is PARTS else buffers.RolloutBuffer
    arguments = (7, space, spaces.Discrete(3), "cpu", 0.9, 0.97, 1 + seed % 3)
    theirs, ours = fill(kind(*arguments), seed, space), fill(SB3RolloutBuffer(*arguments), seed, space)
    batch, expected = ours.to_sample_batch(), from_sb3(theirs)
    for name in ("actions", "rewards", "vf_preds", "action_logp", "env_id"):
        np.testing.assert_array_equal(batch[name], expected[name])
    np.testing.assert_allclose(batch["advantages"], expected["advantages"], rtol=1e-4, atol=1e-5)
    for size in (None, 3):
        np.random.seed(seed)
        left = list(ours.get(size))
        np.random.seed(seed)
        for mine, other in zip(left, theirs.get(size), strict=True):
            for field in other._fields:
                torch.testing.assert_close(getattr(mine, field), getattr(other, field), rtol=1e-4, atol=1e-5)


def test_a_rollout_is_a_batch_that_shares_memory() -> None:
    buffer = fill(SB3RolloutBuffer(5, LINE, spaces.Discrete(3), "cpu", n_envs=2), 1, LINE)
    batch = buffer.to_sample_batch()
    assert np.shares_memory(batch["obs"], buffer.to_sample_batch()["obs"])
    retained = batch["obs"].copy()
    buffer.reset()
    fill(buffer, 2, LINE)
    assert np.array_equal(batch["obs"], retained)


def test_unsupported_arguments_are_reported() -> None:
    buffer = SB3RolloutBuffer(2, LINE, spaces.Discrete(3), "cpu")
    step = (np.zeros((1, 2)), np.zeros(1), np.zeros(1), np.ones(1), torch.zeros(1), torch.zeros(1))
    with pytest.raises(EmptyBufferError, match="must contain 2 steps per environment, got 0"):
        buffer.get(2)
    with pytest.raises(ColumnMismatchError, match=r"obs must have shape \(1, 2\), got \(3, 2\)"):
        buffer.add(np.zeros((3, 2)), *step[1:])
    buffer.add(*step)
    buffer.add(*step)
    with pytest.raises(CapacityError, match="must contain at most 2 steps per environment"):
        buffer.add(*step)
