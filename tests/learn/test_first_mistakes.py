"""Common mistakes in training scripts are reported in one sentence with the fix."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import samplebatch
from samplebatch import GAE, Batch, Collector, MultiAgentBatch, ReplayBuffer, SampleBatch
from samplebatch.errors import ArgumentError, PolicySpecError
from samplebatch.learn import (
    CQL,
    DDPG,
    DQN,
    PPO,
    QRDQN,
    SAC,
    TD3,
    AdamOptimizerFactory,
    BehaviourCloning,
    C51Policy,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteActorPolicy,
    DiscreteBCQ,
    DiscreteQLearningPolicy,
    DiscreteSAC,
    MultiAgentOffPolicyAlgorithm,
    Net,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    SACPolicy,
)
from tests.learn.learning import CHOICES, MEASURES, filled


def q_policy() -> DiscreteQLearningPolicy:
    return DiscreteQLearningPolicy(model=Net(3, 4, [8]), action_space=CHOICES)


def dqn(**options: Any) -> DQN:
    return DQN(**{"policy": q_policy(), "optim": AdamOptimizerFactory()} | options)


def ppo(**options: Any) -> PPO:
    policy = DiscreteActorPolicy(actor=Net(3, 4, [8]), action_space=CHOICES)
    return PPO(**{"policy": policy, "critic": Net(3, 1), "optim": AdamOptimizerFactory()} | options)


def wrong_policy(algorithm: type[Any], policy: Any) -> Any:
    """Create an algorithm with the policy of another algorithm."""
    adam = AdamOptimizerFactory()
    if issubclass(algorithm, DQN | QRDQN | DiscreteBCQ | BehaviourCloning):
        return algorithm(policy=policy, optim=adam)
    critic = ContinuousCritic(preprocess_net=Net(3, 1, [8], concat=True))
    return algorithm(policy=policy, policy_optim=adam, critic=critic, critic_optim=adam)


def deterministic() -> ContinuousDeterministicPolicy:
    actor = ContinuousActorDeterministic(preprocess_net=Net(3, hidden_sizes=[8]), action_shape=2)
    return ContinuousDeterministicPolicy(actor=actor, action_space=MEASURES)


def squashed() -> SACPolicy:
    actor = ContinuousActorProbabilistic(preprocess_net=Net(3, hidden_sizes=[8]), action_shape=2)
    return SACPolicy(actor=actor, action_space=MEASURES)


def optimizer(kind: Any) -> Any:
    return kind(q_policy().parameters(), lr=0.5)


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (lambda: dqn(optim=optimizer(torch.optim.Adam)), r"got a Adam; pass AdamOptimizerFactory\(lr=0.5\)"),
        (lambda: dqn(optim=optimizer(torch.optim.SGD)), r"pass TorchOptimizerFactory\(torch.optim.SGD, lr=0.5\)"),
        (lambda: dqn(optim=torch.optim.Adam), r"got the class Adam; pass AdamOptimizerFactory\(lr=...\)"),
        (lambda: dqn(optim=1e-3), r"got a float; pass AdamOptimizerFactory\(lr=1e-3\)"),
        (lambda: dqn(policy=Net(3, 4)), "policy must be a policy, got a Net; pass the network to a policy"),
        (lambda: dqn(discount_factor=0.9), "DQN has no argument 'discount_factor'; did you mean 'gamma'"),
        (lambda: dqn(estimation_step=3), "did you mean 'n_step_return_horizon'"),
        (lambda: dqn(lr=1e-3), r"did you mean 'optim=AdamOptimizerFactory\(lr=...\)'"),
        (lambda: dqn(gama=0.9), "DQN has no argument 'gama'; did you mean 'gamma'"),
        (lambda: ppo(clip_param=0.2), "PPO has no argument 'clip_param'; did you mean 'eps_clip'"),
        (lambda: ppo(gae_lamda=0.9), "PPO has no argument 'gae_lamda'; did you mean 'gae_lambda'"),
        (lambda: ppo(critic=q_policy()), "got a DiscreteQLearningPolicy; policy and critic may be swapped"),
        (lambda: DQN(q_policy(), AdamOptimizerFactory()), "by name, policy=..., optim=..., .*, got 2 positional"),  # type: ignore[misc, call-arg]
        (lambda: DiscreteQLearningPolicy(network=Net(3, 4), action_space=CHOICES), "did you mean 'model'"),  # type: ignore[call-arg]
        (lambda: dqn().update(64, filled()), r"buffer must be .*, got 64; the order is update\(buffer, 64\)"),
        (lambda: ppo().update(64, filled(), 2), r"got 64; the order is update\(buffer, 64\)"),  # type: ignore[arg-type]
        (lambda: dqn().update(None, 64), "buffer must be a replay buffer or a batch, got None"),
        (lambda: dqn().update(MultiAgentBatch({}, 0)), "got a MultiAgentBatch; pass batch"),
        (lambda: MultiAgentOffPolicyAlgorithm({"a": dqn()}).update(filled(), 8), "must have 'agent_id'"),
        (lambda: OffPolicyTrainer(max_epoch=1), "no argument 'max_epoch'; there are 'algorithm', 'params'"),  # type: ignore[call-arg]
        (lambda: OnPolicyTrainer(ppo()), "OnPolicyTrainer requires 'params'"),  # type: ignore[call-arg]
        (lambda: Net(3, 4, 64), r"hidden_sizes must be a list of widths, got 64; pass \[64\]"),  # type: ignore[arg-type]
        (lambda: dqn().train(1000), r"mode must be True or False, got 1000; run_training\(params\) trains"),
        (lambda: dqn().run_training(max_epochs=2), r"did you mean 'params=...TrainerParams\(...\)'"),  # type: ignore[call-arg]
        (lambda: Net(), "Net requires 'state_shape'"),  # type: ignore[call-arg]
        (lambda: Net(3, 4, hidden_size=[8]), "did you mean 'hidden_sizes'"),  # type: ignore[call-arg]
        (lambda: OffPolicyTrainerParams(step_per_epoch=10), "did you mean 'epoch_num_steps'"),  # type: ignore[call-arg]
        (lambda: OffPolicyTrainerParams(train_collector=None), "did you mean 'training_collector'"),  # type: ignore[call-arg]
        (lambda: OnPolicyTrainerParams(repeat_per_collect=3), "did you mean 'update_step_num_repetitions'"),  # type: ignore[call-arg]
        (lambda: OnPolicyTrainerParams(10), "must get its arguments by name"),  # type: ignore[misc, call-arg]
        (lambda: GAE("vf_preds", lam=0.9), "GAE has no argument 'lam'; did you mean 'lambda_'"),  # type: ignore[call-arg]
        (lambda: SampleBatch(a=[1]).minibatches(minibatch_size=1), "did you mean 'size'"),  # type: ignore[call-overload]
        (lambda: Batch(a=[1]).minibatches(minibatch_size=1), "did you mean 'size'"),  # type: ignore[call-arg]
        (lambda: MultiAgentBatch({}, 0).minibatches(minibatch_size=1), "did you mean 'size'"),  # type: ignore[call-overload]
        (lambda: ReplayBuffer(4).minibatches(minibatch_size=1), "did you mean 'batch_size'"),  # type: ignore[call-arg]
    ],
)
def test_a_mistake_is_reported_in_one_sentence_with_the_fix(mistake: Any, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence) as caught:
        mistake()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "policy", "expected"),
    [
        (DQN, lambda: None, "DiscreteQLearningPolicy, got a NoneType"),
        (QRDQN, q_policy, "QRDQNPolicy, got a DiscreteQLearningPolicy"),
        (DiscreteBCQ, q_policy, "DiscreteBCQPolicy, got a DiscreteQLearningPolicy"),
        (BehaviourCloning, q_policy, "ImitationPolicy, got a DiscreteQLearningPolicy"),
        (DiscreteSAC, q_policy, "ProbabilisticActorPolicy, got a DiscreteQLearningPolicy"),
        (SAC, deterministic, "SACPolicy, got a ContinuousDeterministicPolicy"),
        (CQL, deterministic, "SACPolicy, got a ContinuousDeterministicPolicy"),
        (TD3, squashed, "ContinuousDeterministicPolicy, got a SACPolicy"),
        (DDPG, squashed, "ContinuousDeterministicPolicy, got a SACPolicy"),
    ],
)
def test_the_policy_of_another_algorithm_is_rejected(algorithm: type[Any], policy: Any, expected: str) -> None:
    sentence = f"policy of {algorithm.__name__} must be an instance of {expected}"
    with pytest.raises(ArgumentError, match=sentence):
        wrong_policy(algorithm, policy())


def test_dqn_rejects_outputs_that_are_not_one_value_per_action() -> None:
    learner = dqn(policy=C51Policy(model=Net(3, 4, [8], num_atoms=51), action_space=CHOICES))
    weights = [parameter.clone() for parameter in learner.parameters()]
    with pytest.raises(ArgumentError, match=r"one value per action, got 51 outputs per action .*; use C51 or QRDQN"):
        learner.update(filled(), 8)
    assert all(map(torch.equal, weights, learner.parameters()))


@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        ("from samplebatch import PPO", "from samplebatch.learn import PPO"),
        ("from samplebatch import Colector", "did you mean 'Collector'"),
        ("from samplebatch.learn import PPPO", "did you mean 'PPO'"),
    ],
)
def test_failed_imports_report_the_module_or_a_similar_name(statement: str, sentence: str) -> None:
    with pytest.raises(ImportError, match=sentence):
        exec(statement)
    assert not hasattr(samplebatch, "PPO")


def test_learning_without_torch_is_reported_with_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None\ntry:\n    from samplebatch.learn import PPO\n"
    code += "except ImportError as error:\n    print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "MissingExtraError 'torch' is not installed, but samplebatch.learn.PPO requires it" in done.stdout


@pytest.mark.parametrize(
    ("obs", "sentence"),
    [
        (np.zeros((1, 3)), r"a policy must be called with a Batch that has 'obs', got a ndarray; pass Batch\(obs="),
        (Batch(obs=np.zeros(3)), r"observations must have a leading axis of rows .* got shape \(3,\)"),
        (Batch(obs=np.zeros((1, 4))), r"the width of the network's input, got shape \(1, 4\): mat1 and mat2"),
    ],
    ids=["array", "one observation", "another width"],
)
def test_observations_that_do_not_fit_the_network_are_reported(obs: Any, sentence: str) -> None:
    with pytest.raises(PolicySpecError, match=sentence):
        q_policy()(obs)


def test_a_custom_algorithm_may_have_other_arguments() -> None:
    class Mine(DQN):
        def __init__(self, policy: Any, optim: Any, temperature: float) -> None:
            super().__init__(policy=policy, optim=optim)
            self.temperature = temperature

    assert Mine(q_policy(), AdamOptimizerFactory(), temperature=0.5).temperature == 0.5


def test_environments_accept_actions_of_value_policies_unchanged() -> None:
    policy = DiscreteQLearningPolicy(model=Net(4, 2, [8]), action_space=spaces.Discrete(2))
    with Collector(policy, "CartPole-v1") as collector:
        env = collector.env
        assert env is not None
    act = policy(Batch(obs=[np.zeros(4, np.float32)])).act[0]
    assert spaces.Discrete(2).contains(act)
