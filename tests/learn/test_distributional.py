"""C51 and QR-DQN learn as their papers and Tianshou have them; noisy layers explore within training steps."""

from __future__ import annotations

import copy
import pickle
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch, Collector, PrioritizedVectorReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ArgumentError, NonFiniteLossError, PolicySpecError
from samplebatch.learn import (
    C51,
    MLP,
    QRDQN,
    AdamOptimizerFactory,
    C51Policy,
    Convolutional,
    DiscreteCritic,
    DuelingCritic,
    Net,
    NoisyLinear,
    OffPolicyTrainerParams,
    QRDQNPolicy,
    policy_within_training_step,
)
from tests.learn.learning import CHOICES, MEASURES, OBS, assert_equal_parameters, assert_goes_on, filled, seeded
from tests.learn.oracle import their_buffer, update_theirs
from tests.learn.tasks import Masked, Match

ATOMS = 7
STEPS: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2, "actions": CHOICES}


class Shaped(nn.Module):
    """Network with Tianshou's call signature, whose output has axes for actions and atoms."""

    def __init__(self, seed: int = 0, softmax: bool = False) -> None:
        super().__init__()
        self.net, self.softmax_output = seeded(seed, 3, 16, 4 * ATOMS), softmax

    def forward(self, obs: Any, state: Any = None, info: Any = None) -> Any:
        output = self.net(torch.as_tensor(obs)).view(-1, 4, ATOMS)
        return (output.softmax(-1) if self.softmax_output else output), state


def c51(model: nn.Module, **options: Any) -> C51:
    atoms = {name: options.pop(name) for name in ("v_min", "v_max") if name in options}
    policy = C51Policy(model=model, action_space=CHOICES, num_atoms=ATOMS, **{"v_min": -3.0, "v_max": 3.0} | atoms)
    return C51(policy=policy, optim=AdamOptimizerFactory(lr=0.01), **options)


def qrdqn(model: nn.Module, **options: Any) -> QRDQN:
    policy = QRDQNPolicy(model=model, action_space=CHOICES)
    return QRDQN(policy=policy, optim=AdamOptimizerFactory(lr=0.01), **options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("c51", {}),
        # Tianshou's C51 takes the distribution after the first of several steps, and that of a target network that was
        # copied in the same update: the test by rows is of those.
        ("c51", {"gamma": 0.9}),
        ("qrdqn", {}),
        ("qrdqn", {"n_step_return_horizon": 3, "gamma": 0.9}),
        ("qrdqn", {"target_update_freq": 2, "n_step_return_horizon": 2}),
    ],
)
def test_learns_the_same_as_tianshou(kind: str, options: dict[str, Any]) -> None:
    optim = pytest.importorskip("tianshou.algorithm.optim").AdamOptimizerFactory(lr=0.01)
    theirs: Any
    if kind == "c51":
        from tianshou.algorithm.modelfree.c51 import C51 as TheirC51
        from tianshou.algorithm.modelfree.c51 import C51Policy as TheirC51Policy

        model = Shaped(softmax=True)
        ours: Any = c51(deepcopy(model), **options)
        atoms: Any = {"num_atoms": ATOMS, "v_min": -3.0, "v_max": 3.0}
        their_policy: Any = TheirC51Policy(model=model, action_space=CHOICES, **atoms)
        theirs = TheirC51(policy=their_policy, optim=optim, **options)
    else:
        from tianshou.algorithm.modelfree.qrdqn import QRDQN as TheirQRDQN
        from tianshou.algorithm.modelfree.qrdqn import QRDQNPolicy as TheirQRDQNPolicy

        model = Shaped()
        ours = qrdqn(deepcopy(model), num_quantiles=ATOMS, **options)
        their_policy = TheirQRDQNPolicy(model=model, action_space=CHOICES)
        theirs = TheirQRDQN(policy=their_policy, optim=optim, num_quantiles=ATOMS, **options)
    expected = update_theirs(theirs, 5, buffer=their_buffer("VectorReplayBuffer", **STEPS), sample_size=0)
    buffer = filled(**STEPS)
    # Tianshou sums over targets and averages over quantiles, of which there are as many.
    assert [ours.update(buffer, 0).loss for _ in range(5)] == pytest.approx(expected, rel=1e-4)
    assert_equal_parameters(ours.policy.model, theirs.policy.model, atol=1e-4)


def softmax(logits: Any) -> Any:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def outputs(model: nn.Module, obs: torch.Tensor) -> Any:
    """Return a network's output for one observation, shape (actions, atoms)."""
    with torch.no_grad():
        return model(obs[None])[0][0].double().numpy()


def prepared(algorithm: Any) -> tuple[Any, Any]:
    """Return rows of a prioritized buffer with different weights, and the inputs of targets."""
    buffer = filled(alpha=0.6, beta=0.4)
    buffer.update_weight(np.arange(80), np.linspace(1.0, 5.0, 80))
    batch, indices = algorithm._sample_batch(buffer, 0)
    return batch, lambda: algorithm._preprocess_batch(batch, buffer, indices)


@pytest.mark.parametrize(("is_double", "n_step"), [(True, 1), (False, 1), (True, 3)])
def test_the_loss_of_c51_agrees_with_its_formula_for_each_row(is_double: bool, n_step: int) -> None:
    algorithm = c51(Shaped(), gamma=0.9, target_update_freq=100, is_double=is_double, n_step_return_horizon=n_step)
    algorithm.updates = 1
    with torch.no_grad():
        algorithm.model_old.module.net[0].weight.mul_(-1.0)  # type: ignore[union-attr]
    batch, preprocess = prepared(algorithm)
    model, target = deepcopy(algorithm.policy.model), deepcopy(algorithm.model_old)
    weights, support = batch.weight.numpy().copy(), np.linspace(-3.0, 3.0, ATOMS)
    # Sums of rewards and factors come with the rows; those of one step are checked here.
    rewards, discounts = batch.returns.clone(), batch.discount.clone()
    if n_step == 1:
        torch.testing.assert_close(rewards, batch.rew)
        torch.testing.assert_close(discounts, 0.9 * (~batch.terminated).float())
    losses, priorities = [], []
    for row in range(len(batch)):
        old = outputs(target, batch.obs_next[row])  # type: ignore[arg-type]
        chooser = outputs(model, batch.obs_next[row]) if is_double else old
        best = int(np.argmax([softmax(logits) @ support for logits in chooser]))
        projected = np.zeros(ATOMS)
        for chance, atom in zip(softmax(old[best]), support, strict=True):
            value = float(rewards[row]) + float(discounts[row]) * atom
            position = (min(max(value, -3.0), 3.0) + 3.0) / (support[1] - support[0])
            below, above = int(np.floor(position)), int(np.ceil(position))
            projected[below] += chance * (1.0 if below == above else above - position)
            projected[above] += 0.0 if below == above else chance * (position - below)
        assert projected.sum() == pytest.approx(1.0)
        chances = softmax(outputs(model, batch.obs[row])[int(batch.act[row])])
        losses.append(-(projected * np.log(chances)).sum())
        present = projected > 0.0
        priorities.append((projected[present] * np.log(projected[present] / chances[present])).sum())
    stats = algorithm._update_with_batch(preprocess())
    assert stats.loss == pytest.approx((weights * losses).mean(), rel=1e-4)
    np.testing.assert_allclose(batch.weight.numpy(), priorities, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("delta", [1.0, 0.3])
def test_the_loss_of_qrdqn_agrees_with_its_formula_for_each_row(delta: float) -> None:
    algorithm = qrdqn(Shaped(), gamma=0.9, huber_loss_delta=delta)
    batch, preprocess = prepared(algorithm)
    model, weights = deepcopy(algorithm.policy.model), batch.weight.numpy().copy()
    losses = []
    for row in range(len(batch)):
        after = outputs(model, batch.obs_next[row])
        retained = 0.9 * (not batch.terminated[row])
        targets = float(batch.rew[row]) + retained * after[after.mean(1).argmax()]
        quantiles = outputs(model, batch.obs[row])[int(batch.act[row])]
        loss = 0.0
        for i, quantile in enumerate(quantiles):
            for target in targets:
                error = target - quantile
                huber = error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)
                loss += abs((2 * i + 1) / (2 * ATOMS) - (error < 0.0)) * huber / ATOMS
        losses.append(loss)
    stats = algorithm._update_with_batch(preprocess())
    assert stats.loss == pytest.approx((weights * losses).mean(), rel=1e-4)
    np.testing.assert_allclose(batch.weight.numpy(), np.divide(losses, ATOMS), rtol=1e-3, atol=1e-6)


def test_returns_outside_the_support_are_clipped_to_its_ends() -> None:
    algorithm = c51(Shaped(), v_min=-1.0, v_max=1.0)
    returns, output = torch.tensor([[50.0], [-50.0]]), torch.zeros(2, ATOMS)
    target = algorithm._target(returns, torch.full((2, 1), 0.9), output)
    expected = torch.zeros(2, ATOMS)
    expected[0, -1] = expected[1, 0] = 1.0
    torch.testing.assert_close(target, expected)


def test_rewards_that_are_not_finite_are_reported() -> None:
    buffer = filled()
    buffer.rew[:] = np.nan
    with pytest.raises(NonFiniteLossError, match="'rew'"):
        c51(Shaped()).update(buffer, 0)


@pytest.mark.parametrize("policy_class", [C51Policy, QRDQNPolicy])
def test_masked_actions_are_neither_selected_nor_in_targets(policy_class: Any) -> None:
    options: Any = {"num_atoms": ATOMS} if policy_class is C51Policy else {}
    policy = policy_class(model=Shaped(), action_space=CHOICES, **options)
    obs, mask = torch.randn(50, 3), torch.rand(50, 4) < 0.4
    mask[:, 2] = True
    decision = policy(Batch(obs=Batch(obs=obs, mask=mask)))
    assert mask[torch.arange(50), torch.from_numpy(decision.act)].all()
    assert decision.logits.shape == (50, 4, ATOMS)
    free = policy(Batch(obs=obs))
    assert (free.act != decision.act).any()


@pytest.mark.parametrize(
    ("make", "width"), [(c51, 4 * ATOMS - 1), (c51, 4 * (ATOMS + 1)), (c51, 3 * ATOMS), (qrdqn, 4 * ATOMS - 1)]
)
def test_networks_of_another_width_are_rejected(make: Any, width: int) -> None:
    with pytest.raises(ArgumentError, match=r"model must return shape \(n, 4, .*\), one row per action, got \(80, "):
        make(seeded(0, 3, width)).update(filled(), 0)


def test_another_number_of_quantiles_is_rejected() -> None:
    with pytest.raises(ArgumentError, match="num_quantiles must be 7, as the policy's network returns, got 8"):
        qrdqn(Shaped(), num_quantiles=8).update(filled(), 0)


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_atoms", 1), ("v_min", 10.0), ("v_max", float("nan")), ("v_min", float("-inf")), ("v_max", "10")],
)
def test_atoms_out_of_range_are_rejected(option: str, value: Any) -> None:
    match = "num_atoms must be" if option == "num_atoms" else "v_min must be a finite number below v_max"
    with pytest.raises(ArgumentError, match=match):
        C51Policy(model=Shaped(), action_space=CHOICES, **{option: value})


def test_continuous_actions_are_rejected() -> None:
    with pytest.raises(PolicySpecError, match="action_space must be a Discrete space"):
        QRDQNPolicy(model=Shaped(), action_space=MEASURES)


def test_qrdqn_with_one_quantile_has_half_the_loss_of_dqn() -> None:
    """With one quantile, tau is 1/2 on both sides."""
    from samplebatch.learn import DQN, DiscreteQLearningPolicy

    net, buffer = seeded(0, 3, 16, 4), filled()
    first = qrdqn(deepcopy(net), target_update_freq=2)
    policy = DiscreteQLearningPolicy(model=deepcopy(net), action_space=CHOICES)
    default = DQN(policy=policy, optim=AdamOptimizerFactory(lr=0.01), target_update_freq=2, huber_loss_delta=1.0)
    for _ in range(3):
        losses = [algorithm.update(buffer, 0).loss for algorithm in (first, default)]  # type: ignore[attr-defined]
        assert losses[0] == pytest.approx(losses[1] / 2, rel=1e-4)


# Networks


def test_a_dueling_head_agrees_with_the_formula_for_each_atom() -> None:
    torch.manual_seed(0)
    net = DuelingCritic.for_space(Net.for_space(OBS, [8]), CHOICES, num_atoms=ATOMS)
    obs = torch.randn(5, 3)
    values, _ = net(obs)
    assert values.shape == (5, 4, ATOMS)
    features = net.preprocess(obs)[0]
    advantage, value = net.advantage(features).view(5, 4, ATOMS), net.value(features)
    for action in range(4):
        expected = value + advantage[:, action] - sum(advantage[:, other] for other in range(4)) / 4
        torch.testing.assert_close(values[:, action], expected)


def test_noise_has_the_standard_deviation_of_its_formula() -> None:
    """The mean of |x| of a normal number is sqrt(2 / pi), and so is the variance of the noise's factors."""
    torch.manual_seed(0)
    layer = NoisyLinear(4, 3, noisy_std=0.8)
    torch.testing.assert_close(layer.sigma_W, torch.full((3, 4), 0.4))
    layer.is_noisy = True
    with torch.no_grad():
        noise = torch.stack([layer(torch.eye(4)) - layer.mu_W.T - layer.mu_bias for _ in range(20_000)])
    # Output j of input i has the noise sigma f(q_j) (f(p_i) + 1), that of a weight and of a bias.
    factor = np.sqrt(2 / np.pi)
    assert noise.mean().abs() < 0.01
    assert noise.var(0).mean().item() == pytest.approx(0.4**2 * factor * (factor + 1), rel=0.03)


def test_noise_is_shared_by_the_rows_of_one_call_only() -> None:
    layer = NoisyLinear(3, 2)
    layer.is_noisy = True
    rows = torch.ones(5, 3)
    first, second = layer(rows), layer(rows)
    assert (first == first[0]).all()
    assert not torch.equal(first, second)
    assert all(parameter.grad is None for parameter in layer.parameters())
    second.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


def noisy(actions: int = 4) -> nn.Module:
    torch.manual_seed(0)
    body = Net.for_space(OBS, [16], linear_layer=NoisyLinear)
    return DuelingCritic.for_space(body, spaces.Discrete(actions), num_atoms=ATOMS, linear_layer=NoisyLinear)


def noisy_flags(module: nn.Module) -> set[bool]:
    return {part.is_noisy for part in module.modules() if isinstance(part, NoisyLinear)}


def test_policies_are_noisy_only_within_training_steps() -> None:
    algorithm = c51(noisy(), target_update_freq=3)
    policy, obs = algorithm.policy, Batch(obs=torch.randn(6, 3))
    assert noisy_flags(policy) == {False}
    assert torch.equal(policy(obs).logits, policy(obs).logits)
    with policy_within_training_step(policy):
        assert not torch.equal(policy(obs).logits, policy(obs).logits)
        assert noisy_flags(copy.deepcopy(policy)) == noisy_flags(pickle.loads(pickle.dumps(policy))) == {True}
    assert noisy_flags(policy) == {False}
    algorithm.update(filled(), 16)
    assert noisy_flags(algorithm) == {False}
    assert algorithm.model_old is not None


def test_noisy_layers_may_be_anywhere() -> None:
    images = spaces.Box(0, 255, (36, 36, 4), np.uint8)
    networks = [
        Convolutional(images, 16, linear_layer=NoisyLinear),
        MLP(3, 2, [8], linear_layer=NoisyLinear),
        DiscreteCritic.for_space(Net.for_space(OBS, [8]), CHOICES, num_atoms=3, linear_layer=NoisyLinear),
    ]
    for network in networks:
        assert noisy_flags(network) == {False}
    assert networks[2].output_dim == 12


@pytest.mark.parametrize(("option", "value"), [("in_features", 0), ("out_features", -1), ("noisy_std", 0.0)])
def test_noisy_layers_reject_numbers_out_of_range(option: str, value: Any) -> None:
    arguments: dict[str, Any] = {"in_features": 2, "out_features": 2} | {option: value}
    with pytest.raises(ArgumentError, match=option):
        NoisyLinear(**arguments)


# Learning


@pytest.mark.parametrize("make", [c51, qrdqn])
def test_continues_from_its_state(make: Any) -> None:
    def update(algorithm: Any) -> None:
        algorithm.update(filled(alpha=0.6, beta=0.4), 0)

    algorithm = make(Shaped(), target_update_freq=2)
    update(algorithm)
    assert_goes_on(algorithm, make(Shaped(3), target_update_freq=2), update)


def match_policy(kind: str) -> Any:
    torch.manual_seed(0)
    obs, act = Match.observation_space, Match.action_space
    if kind == "qrdqn":
        head = DiscreteCritic.for_space(Net.for_space(obs, [32]), act, num_atoms=11)
        return QRDQNPolicy(model=head, action_space=act, eps_training=0.3)
    layer = NoisyLinear if kind == "rainbow" else nn.Linear
    body = Net.for_space(obs, [32], linear_layer=layer)
    head_class = DuelingCritic if kind == "rainbow" else DiscreteCritic
    head = head_class.for_space(body, act, num_atoms=11, linear_layer=layer)
    eps = 0.0 if kind == "rainbow" else 0.3
    return C51Policy(model=head, action_space=act, num_atoms=11, v_min=0.0, v_max=3.0, eps_training=eps)


@pytest.mark.parametrize("kind", ["c51", "qrdqn", "rainbow"])
def test_learns_to_select_the_observed_choice(kind: str) -> None:
    """The best return is 8; random actions get 8 / 3."""
    policy = match_policy(kind)
    algorithm_class: Any = QRDQN if kind == "qrdqn" else C51
    algorithm = algorithm_class(
        policy=policy, optim=AdamOptimizerFactory(lr=3e-3), gamma=0.5, target_update_freq=20, n_step_return_horizon=2
    )
    buffer: Any = VectorReplayBuffer(4000, 4)
    if kind == "rainbow":
        buffer = PrioritizedVectorReplayBuffer(4000, 4, alpha=0.5, beta=0.4)
    with Collector(policy, [Match] * 4, buffer, seed=1, exploration_noise=True) as collector:
        params = OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=800,
            collection_step_num_env_steps=4,
            batch_size=64,
            update_step_num_gradient_steps_per_sample=0.25,
            verbose=False,
            show_progress=False,
        )
        algorithm.run_training(params)
    with Collector(policy, Match(), seed=5) as collector:
        assert collector.collect(n_episode=30).returns.mean() > 7.0


@pytest.mark.parametrize("name", ["c51", "qrdqn"])
def test_a_tianshou_script_runs_with_changed_imports(name: str) -> None:
    """Only the imports and the environments differ from Tianshou's example on CartPole."""
    env = Match()
    train_envs = [Match] * 2
    is_c51 = name == "c51"
    net = Net(
        state_shape=env.observation_space.shape,
        action_shape=env.action_space.n,
        hidden_sizes=[16, 16],
        softmax=is_c51,
        num_atoms=ATOMS,
    )
    options: dict[str, Any] = {
        "model": net,
        "action_space": env.action_space,
        "observation_space": env.observation_space,
        "eps_training": 0.1,
        "eps_inference": 0.05,
    }
    learning: dict[str, Any] = {"gamma": 0.9, "n_step_return_horizon": 3, "target_update_freq": 320}
    optim = AdamOptimizerFactory(lr=1e-3)
    algorithm: Any
    if is_c51:
        c51_policy = C51Policy(num_atoms=ATOMS, v_min=-10.0, v_max=10.0, **options)
        algorithm = C51(policy=c51_policy, optim=optim, **learning).to("cpu")
    else:
        algorithm = QRDQN(policy=QRDQNPolicy(**options), optim=optim, num_quantiles=ATOMS, **learning).to("cpu")
    buf = PrioritizedVectorReplayBuffer(200, buffer_num=2, alpha=0.6, beta=0.4)
    train_collector = Collector(algorithm, train_envs, buf, exploration_noise=True)
    test_collector = Collector(algorithm, [Match], exploration_noise=True)
    train_collector.collect(n_step=20, reset_before_collect=True)
    result = algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=train_collector,
            test_collector=test_collector,
            max_epochs=1,
            epoch_num_steps=40,
            collection_step_num_env_steps=10,
            update_step_num_gradient_steps_per_sample=0.1,
            test_step_num_episodes=2,
            batch_size=8,
            training_fn=lambda epoch, env_step: algorithm.policy.set_eps_training(0.05),
            stop_fn=lambda mean_rewards: mean_rewards >= 100,
            show_progress=False,
            verbose=False,
        )
    )
    assert result.update_step > 0


def test_masked_steps_are_learned_from() -> None:
    policy = C51Policy(
        model=seeded(0, 3, 3 * ATOMS), action_space=Masked.action_space, num_atoms=ATOMS, eps_training=0.5
    )
    algorithm = C51(policy=policy, optim=AdamOptimizerFactory())
    buffer = VectorReplayBuffer(100, 2)
    with (
        policy_within_training_step(policy),
        Collector(policy, [Masked] * 2, buffer, seed=0, exploration_noise=True) as collector,
    ):
        collector.collect(n_step=60)
    assert np.isfinite(algorithm.update(buffer, 32).loss)  # type: ignore[attr-defined]
