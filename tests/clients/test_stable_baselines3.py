"""Models of Stable-Baselines3, unmodified, act in our collectors and learn from what these collect."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from samplebatch import GAE, Batch, Collector, SampleBatch, VectorReplayBuffer, as_policy
from samplebatch.convert import to_sb3_replay, to_sb3_rollout
from samplebatch.errors import PolicySpecError

sb3 = pytest.importorskip("stable_baselines3")
from stable_baselines3.common.logger import configure  # noqa: E402

pytestmark = pytest.mark.usefixtures("seeded")

ENVS = 4


def model_of(kind: Any, env: str, **options: Any) -> Any:
    model = kind("MlpPolicy", gymnasium.make(env), device="cpu", seed=0, **options)
    model.set_logger(configure(format_strings=[]))
    return model


def mean_return(model: Any, env: str) -> float:
    with Collector(as_policy(model, deterministic=True), env, num_envs=4, seed=9) as collector:
        return float(collector.collect(n_episode=20).returns.mean())


def values_of(model: Any) -> Any:
    """Return the model's value network as a function of observations."""

    @torch.no_grad()
    def values(obs: np.ndarray) -> torch.Tensor:
        return model.policy.predict_values(torch.as_tensor(obs)).flatten()  # type: ignore[no-any-return]

    return values


def collect(policy: Any, env: str, **options: Any) -> SampleBatch:
    with Collector(policy, env, num_envs=3, seed=1, **options) as collector:
        return collector.collect(n_step=60).batch


def train_ppo(env: str, updates: int) -> float:
    model = model_of(sb3.PPO, env, n_epochs=6, ent_coef=0.0, learning_rate=1e-3)
    advantages = GAE(bootstrap=values_of(model), gamma=model.gamma, lambda_=model.gae_lambda)
    spaces = model.observation_space, model.action_space
    with Collector(model, env, num_envs=ENVS, seed=1, hooks=[advantages]) as collector:
        for _ in range(updates):
            model.rollout_buffer = to_sb3_rollout(collector.collect(n_step=512).batch, *spaces, n_envs=ENVS)
            model.train()
    return mean_return(model, env)


def test_ppo_learns_from_what_a_collector_returns() -> None:
    assert train_ppo("CartPole-v1", 8) > 100


@pytest.mark.long
def test_dqn_learns_from_a_buffer_that_a_collector_fills() -> None:
    model = model_of(sb3.DQN, "CartPole-v1", learning_rate=1e-3, target_update_interval=1, tau=0.02)
    buffer = VectorReplayBuffer(8000, ENVS)
    with Collector(model, "CartPole-v1", buffer, num_envs=ENVS, seed=1) as collector:
        collector.collect(n_step=1000, random=True)
        for _ in range(10):
            collector.collect(n_step=200)
            model.replay_buffer = to_sb3_replay(buffer, model.observation_space, model.action_space)
            model.exploration_rate = 0.1
            for _ in range(100):
                model.train(gradient_steps=1, batch_size=64)
                model._on_step()
    assert mean_return(model, "CartPole-v1") > 60


@pytest.mark.long
def test_sac_learns_pendulum_from_a_buffer_that_a_collector_fills() -> None:
    model = model_of(sb3.SAC, "Pendulum-v1", learning_rate=1e-3, policy_kwargs={"net_arch": [64, 64]})
    buffer = VectorReplayBuffer(20_000, ENVS)
    with Collector(model, "Pendulum-v1", buffer, num_envs=ENVS, seed=1) as collector:
        collector.collect(n_step=1000, random=True)
        for _ in range(20):
            collector.collect(n_step=200)
            model.replay_buffer = to_sb3_replay(buffer, model.observation_space, model.action_space)
            model.train(gradient_steps=200, batch_size=128)
    assert mean_return(model, "Pendulum-v1") > -400, "about -1200 at random"


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_an_on_policy_model_records_log_probabilities_and_values(env: str) -> None:
    model = model_of(sb3.A2C, env)
    batch = collect(model, env)
    values, logp, _ = model.policy.evaluate_actions(torch.as_tensor(batch["obs"]), torch.as_tensor(batch["actions"]))
    np.testing.assert_allclose(batch["vf_preds"], values.detach().flatten(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch["action_logp"], logp.detach(), rtol=1e-4, atol=1e-5)


def test_environments_get_the_actions_of_an_on_policy_model_clipped() -> None:
    wide = model_of(sb3.PPO, "Pendulum-v1", policy_kwargs={"log_std_init": 2.0})
    actions = np.abs(collect(wide, "Pendulum-v1")["actions"])
    assert actions.max() > 2.0, "recorded as they were drawn"


def test_squashed_actions_are_recorded_between_minus_one_and_one() -> None:
    model = model_of(sb3.SAC, "Pendulum-v1")
    sampled = model.predict(obs := np.zeros((2, 3), np.float32), deterministic=True)[0]
    adapter = as_policy(model, deterministic=True)
    decided = adapter(Batch(obs=obs, info=Batch()))["act"]
    np.testing.assert_allclose(adapter.policy.map_action(decided), sampled, rtol=1e-5)
    for random in (False, True):
        with Collector(model, "Pendulum-v1", num_envs=3) as collector:
            actions = np.abs(collector.collect(n_step=60, random=random).batch["actions"])
        assert 0.5 < actions.max() <= 1.0


def test_the_noise_of_a_model_is_added_during_exploration() -> None:
    from stable_baselines3.common.noise import NormalActionNoise

    noise = NormalActionNoise(np.zeros(1), np.full(1, 0.5))
    model = model_of(sb3.TD3, "Pendulum-v1", action_noise=noise)
    still, noisy = (collect(model, "Pendulum-v1", exploration_noise=expected)["actions"] for expected in (False, True))
    assert noisy.dtype == still.dtype == np.float32
    assert 4 * np.abs(np.diff(still[:20], axis=0)).mean() < np.abs(np.diff(noisy[:20], axis=0)).mean()


def test_the_best_actions_are_the_same_each_time() -> None:
    model = model_of(sb3.PPO, "CartPole-v1")
    adapter = as_policy(model, deterministic=True)
    batch = Batch(obs=np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32), info=Batch())
    np.testing.assert_array_equal(adapter(batch)["act"], model.predict(batch.obs, deterministic=True)[0])
    assert (as_policy(model)(batch)["act"] != adapter(batch)["act"]).any()


def test_a_policy_and_its_predict_function_are_accepted() -> None:
    model = model_of(sb3.PPO, "CartPole-v1")
    assert len(collect(model.policy, "CartPole-v1")["vf_preds"]) == 60
    assert len(collect(as_policy(model.predict, takes="obs"), "CartPole-v1")) == 60


def test_a_model_receives_dict_observations_as_a_dict() -> None:
    low = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    space = gymnasium.spaces.Dict({"near": low, "far": low})
    policy = sb3.common.policies.MultiInputActorCriticPolicy(space, gymnasium.spaces.Discrete(2), lambda _: 0.0)
    rows = np.zeros((5, 2), np.float32)
    decided = as_policy(policy)(Batch(obs=Batch(near=rows, far=rows), info=Batch()))
    assert decided["act"].shape == decided["vf_preds"].shape == (5,)


class Remembering:
    """Policy that counts steps in its state; as in sb3-contrib, the first axis of states is layers."""

    squash_output = False
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.policy = self
        self.seen: list[Any] = []

    def get_parameters(self) -> dict[str, Any]:
        return {}

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = False
    ) -> Any:
        assert episode_start is None
        counts = np.zeros((1, len(observation), 1)) if state is None else state[0]
        self.seen.append(counts[0, :, 0].copy())
        return np.zeros(len(observation), int), (counts + 1, counts)


def test_a_recurrent_model_receives_its_state_and_starts_at_zero() -> None:
    model = Remembering()
    batch = collect(model, "CartPole-v1")
    assert batch["state_in_0"].shape == (60, 1, 1)
    np.testing.assert_array_equal(batch["state_in_0"][:, 0, 0], batch["t"])
    assert max(observed.max() for observed in model.seen) > 5


def test_the_policy_of_a_model_receives_new_weights() -> None:
    from samplebatch.policy.source import load_weights, weights_nbytes

    ours, other = model_of(sb3.PPO, "CartPole-v1"), sb3.PPO("MlpPolicy", "CartPole-v1", seed=5, device="cpu")
    load_weights(ours, other.policy.state_dict())
    for name, value in ours.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[name])
    assert weights_nbytes(ours) > 0


def test_a_policy_without_a_mode_rejects_requests_for_the_best_action() -> None:
    with pytest.raises(PolicySpecError, match="Stable-Baselines3 or RLlib for deterministic=True, got a function"):
        as_policy(lambda obs: obs[:, 0], deterministic=True)
