"""RLlib's modules, learners and policies, unmodified, act in our collectors and learn from what these collect."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from samplebatch import GAE, Batch, Collector, as_policy
from samplebatch.convert import to_rllib_episodes

pytest.importorskip("ray.rllib")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tree
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.algorithms.ppo.ppo_torch_policy import PPOTorchPolicy
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.policy.sample_batch import SampleBatch as RLlibBatch

pytestmark = [pytest.mark.usefixtures("seeded"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)


def learner_of(env: str = "CartPole-v1", *, lstm: bool = False, **options: Any) -> Any:
    """Return RLlib's PPO learner, with the module that RLlib sends to its runners."""
    model = DefaultModelConfig(
        fcnet_hiddens=[64], vf_share_layers=False, use_lstm=lstm, lstm_cell_size=32, max_seq_len=10, **options
    )
    config = PPOConfig().environment(env).training(lr=1e-3, vf_clip_param=1e4).rl_module(model_config=model)
    return config.debugging(seed=0).build_learner(env=gymnasium.make(env))


def module_of(learner: Any) -> Any:
    return learner.module["default_policy"]


def train(learner: Any, iterations: int) -> float:
    module, env = module_of(learner), gymnasium.make("CartPole-v1")
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    with Collector(module, "CartPole-v1", num_envs=8, seed=1) as collector:
        for _ in range(iterations):
            episodes = to_rllib_episodes(collector.collect(n_step=1024).batch, **spaces)
            learner.update(episodes=episodes, num_epochs=6, minibatch_size=128)
    with Collector(as_policy(module, deterministic=True), "CartPole-v1", num_envs=4, seed=3) as collector:
        return float(collector.collect(n_episode=10).returns.mean())


def test_ppo_learns_from_the_episodes_of_a_collector() -> None:
    assert train(learner_of(), 5) > 100


@pytest.mark.long
def test_recurrent_ppo_learns_from_the_episodes_of_a_collector() -> None:
    assert train(learner_of(lstm=True), 6) > 100


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_a_module_samples_from_its_own_distribution(env: str) -> None:
    module = module_of(learner_of(env))
    with Collector(module, env, num_envs=3) as collector:
        batch = collector.collect(n_step=60).batch
    distribution = module.get_exploration_action_dist_cls().from_logits(torch.as_tensor(batch["action_dist_inputs"]))
    logp = distribution.logp(torch.as_tensor(batch["actions"]))
    np.testing.assert_allclose(batch["action_logp"], logp, rtol=1e-5, atol=1e-6)
    assert len(np.unique(batch["actions"], axis=0)) > 1


def test_the_best_actions_are_those_of_forward_inference() -> None:
    module = module_of(learner_of())
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    decided = as_policy(module, deterministic=True)(Batch(obs=obs, info=Batch()))
    inputs = module.forward_inference({"obs": torch.as_tensor(obs)})["action_dist_inputs"]
    assert decided["act"].tolist() == inputs.argmax(1).tolist()


def test_training_and_stepwise_outputs_of_a_recurrent_module_agree() -> None:
    module = module_of(learner_of(lstm=True))
    with Collector(module, "CartPole-v1", num_envs=2, seed=1) as collector:
        collector.collect(n_step=10)
        batch = collector.collect(n_step=60).batch
    (later, *_), episodes = to_rllib_episodes(batch), list(batch.split_by_episode())
    first = episodes[0]
    assert first["t"][0] > 0, "an episode that goes on from the call before"
    states = later.get_extra_model_outputs("state_out", indices=-1, neg_index_as_lookback=True)
    options = {
        "obs": torch.as_tensor(np.asarray(first["obs"]))[None],
        "state_in": tree.map_structure(lambda state: torch.as_tensor(state)[None], states),
    }
    with torch.no_grad():
        output = module.forward_train(options)["action_dist_inputs"][0]
    np.testing.assert_allclose(first["action_dist_inputs"], output, rtol=1e-4, atol=1e-5)
    retained = later.get_extra_model_outputs("state_out")
    tree.map_structure(
        lambda after, before: np.testing.assert_array_equal(after[:-1], before[1:]), retained, first["state_in"]
    )


def policy_of(*, lstm: bool = False) -> Any:
    env = gymnasium.make("CartPole-v1")
    config = PPOConfig().api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    model = {"use_lstm": lstm, "lstm_cell_size": 8, "fcnet_hiddens": [64]}
    options = {"lr": 1e-3, "num_sgd_iter": 6, "sgd_minibatch_size": 128, "vf_clip_param": 1e4}
    config = config.framework("torch").training(model=model)
    return PPOTorchPolicy(env.observation_space, env.action_space, config.to_dict() | options)


@pytest.mark.long
def test_a_policy_of_the_older_api_learns() -> None:
    policy, rng = policy_of(), np.random.default_rng(0)

    def values(obs: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            policy.model({"obs": torch.as_tensor(obs)})
            return policy.model.value_function()  # type: ignore[no-any-return]

    names = "obs", "actions", "action_logp", "action_dist_inputs", "vf_preds", "advantages", "value_targets"
    with Collector(policy, "CartPole-v1", num_envs=8, seed=1, hooks=[GAE(bootstrap=values)]) as collector:
        for _ in range(4):
            expected = (batch := collector.collect(n_step=1024).batch).select(*names)
            expected["advantages"] = (batch["advantages"] - batch["advantages"].mean()) / batch["advantages"].std()
            for rows in expected.minibatches(128, epochs=6, rng=rng):
                policy.learn_on_batch(RLlibBatch(rows.to_dict()))
    with Collector(as_policy(policy, deterministic=True), "CartPole-v1", num_envs=4, seed=3) as collector:
        assert collector.collect(n_episode=10).returns.mean() > 60


def test_a_recurrent_policy_of_the_older_api_resumes_from_its_state() -> None:
    policy = policy_of(lstm=True)
    with Collector(policy, "CartPole-v1", num_envs=2, seed=1) as collector:
        batch = collector.collect(n_step=60).batch
    states = [np.asarray(batch[f"state_in_{position}"]) for position in (0, 1)]
    assert states[0].shape == (60, 8)
    assert not states[0][batch["t"] == 0].any()
    _, after, output = policy.compute_actions(np.asarray(batch["obs"]), states, explore=False)
    np.testing.assert_allclose(output["action_dist_inputs"], batch["action_dist_inputs"], rtol=1e-4, atol=1e-5)
    going = batch["t"][1:] == batch["t"][:-1] + 1
    np.testing.assert_allclose(after[1][:-1][going], states[1][1:][going], rtol=1e-4, atol=1e-5)


def test_a_policy_of_the_older_api_receives_new_weights() -> None:
    from samplebatch.policy.source import load_weights, weights_nbytes

    policy, weights = policy_of(), policy_of().get_weights()
    load_weights(policy, weights)
    for name, value in policy.get_weights().items():
        np.testing.assert_array_equal(value, weights[name])
    assert weights_nbytes(policy) > 0
