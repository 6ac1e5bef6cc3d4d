"""PPO updates as Tianshou's does, ends early, keeps to masks, goes over sequences with their states, and learns."""

from __future__ import annotations

import gc
import pickle
import shutil
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from samplebatch import Batch, Collector, ReplayBuffer, VectorReplayBuffer
from samplebatch.errors import ArgumentError, ColumnNotFoundError, EmptyBufferError
from samplebatch.learn import (
    PPO,
    AdamOptimizerFactory,
    ContinuousActorProbabilistic,
    DiscreteActor,
    DiscreteActorPolicy,
    LRSchedulerFactoryLinear,
    Net,
    ProbabilisticActorPolicy,
    RecurrentBody,
    ValueCritic,
    policy_within_training_step,
)
from samplebatch.learn.policy import diagonal_normal, log_probability
from samplebatch.learn.ppo import ActorCriticTrainingStats
from tests.learn.learning import (
    CHOICES,
    MEASURES,
    assert_equal_parameters,
    assert_goes_on,
    filled,
    parameters_of,
    seeded,
)
from tests.learn.oracle import Asked, Valued, same_order, their_buffer, update_theirs
from tests.learn.tasks import Aim, Masked, Match, Recall

STEPS: dict[str, Any] = {"seed": 1, "steps": 40, "envs": 2}


class Gaussian(nn.Module):
    """Network of means, with standard deviations as parameters."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.log_sigma = net, nn.Parameter(torch.zeros(2))

    def forward(self, obs: Any) -> Any:
        mu = self.net(obs)
        return mu, self.log_sigma.exp().expand_as(mu)


def make(actor: nn.Module, critic: nn.Module, actions: Any = CHOICES, **options: Any) -> PPO:
    policy = ProbabilisticActorPolicy(actor=actor, action_space=actions)
    options.setdefault("optim", AdamOptimizerFactory(lr=0.01))
    return PPO(policy=policy, critic=critic, **options)


def make_theirs(actor: nn.Module, critic: nn.Module, actions: Any, **options: Any) -> Any:
    reinforce = pytest.importorskip("tianshou.algorithm.modelfree.reinforce")
    factory = pytest.importorskip("tianshou.algorithm.optim").AdamOptimizerFactory(lr=0.01)
    box = isinstance(actions, spaces.Box)
    policy = reinforce.ProbabilisticActorPolicy(
        actor=Asked(actor),
        dist_fn=diagonal_normal if box else (lambda logits: torch.distributions.Categorical(logits=logits)),
        action_space=actions,
        action_scaling=box,
        action_bound_method="clip" if box else None,
    )
    ppo = pytest.importorskip("tianshou.algorithm.modelfree.ppo")
    return ppo.PPO(policy=policy, critic=Valued(critic), optim=factory, **options)


@pytest.mark.parametrize("actions", [CHOICES, MEASURES])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_clip": True, "eps_clip": 0.1},
        {"dual_clip": 1.5, "advantage_normalization": False, "max_grad_norm": 0.1},
        {"recompute_advantage": True, "gae_lambda": 0.8, "gamma": 0.9},
        {"return_scaling": True, "max_batchsize": 16, "ent_coef": 0.1, "vf_coef": 1.0},
    ],
)
def test_updates_agree_with_tianshou(options: dict[str, Any], actions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    box = isinstance(actions, spaces.Box)
    net, critic = seeded(0, 3, 16, 2 if box else 4), seeded(1, 3, 16, 1)
    actor: nn.Module = Gaussian(net) if box else net
    theirs = make_theirs(actor, critic, actions, **options)
    # A pair of outputs alone would be taken for an output and a state.
    ours = make(Asked(actor) if box else actor, critic, actions, **options)
    buffer, their = filled(**STEPS, actions=actions), their_buffer("VectorReplayBuffer", **STEPS, actions=actions)
    same_order(monkeypatch)
    expected = update_theirs(theirs, 3, buffer=their, batch_size=32, repeat=2)
    actual = [ours.update(buffer, 32, 2).get_loss_stats_dict()["loss"] for _ in range(3)]
    assert actual == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert_equal_parameters(ours.policy, theirs.policy, atol=1e-4)
    assert_equal_parameters(ours.critic, theirs.critic, atol=1e-4)


def test_all_rows_are_one_minibatch_without_a_size() -> None:
    stats = make(seeded(0, 3, 4), seeded(1, 3, 1)).update(filled(), None, 3)
    assert isinstance(stats, ActorCriticTrainingStats)
    assert stats.gradient_steps == 3


def test_an_update_does_not_keep_the_buffer() -> None:
    algorithm, buffer = make(seeded(0, 3, 4), seeded(1, 3, 1), recompute_advantage=True), filled()
    references = sys.getrefcount(buffer)
    algorithm.update(buffer, 16, 2)
    gc.collect()
    assert sys.getrefcount(buffer) == references


def test_an_update_ends_early_if_the_kl_divergence_is_too_large() -> None:
    stats = make(seeded(0, 3, 8, 4), seeded(1, 3, 1), target_kl=1e-4, eps_clip=0.5).update(filled(), 16, 50)
    assert isinstance(stats, ActorCriticTrainingStats)
    assert 0 < stats.gradient_steps < 20
    assert stats.approx_kl is not None
    assert stats.approx_kl.max <= 1.5e-4


def test_ppo_resumes_bit_for_bit() -> None:
    buffer = filled()

    def fresh(seed: int) -> PPO:
        factory = AdamOptimizerFactory(lr=0.01).with_lr_scheduler_factory(LRSchedulerFactoryLinear(1, 9, 1))
        return make(seeded(seed, 3, 8, 4), seeded(seed, 3, 8, 1), return_scaling=True, optim=factory)

    assert_goes_on(fresh(0), fresh(1), lambda algorithm: [algorithm.update(buffer, 16, 2) for _ in range(2)])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"gamma": 1.5}, "gamma"),
        ({"gae_lambda": -0.5}, "gae_lambda"),
        ({"max_batchsize": 0}, "max_batchsize"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"dual_clip": [2.0]}, "dual_clip must be a number above 0, got a list"),
        ({"eps_clip": 0.0}, "eps_clip"),
        ({"target_kl": -1.0}, "target_kl"),
        ({"sequence_length": 0}, "sequence_length"),
    ],
)
def test_arguments_out_of_range_are_rejected(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        make(seeded(0, 3, 4), seeded(1, 3, 1), **options)


def test_buffers_without_steps_are_rejected() -> None:
    with pytest.raises(EmptyBufferError):
        make(seeded(0, 3, 4), seeded(1, 3, 1)).update(VectorReplayBuffer(8, 2), 16, 1)


def networks(task: Any, body: Any = Net.for_space, width: Any = (32,)) -> tuple[Any, nn.Module]:
    space = task.observation_space
    inner = space["obs"] if isinstance(space, spaces.Dict) else space
    actor_body = body(inner, width)
    critic = ValueCritic(actor_body if body is RecurrentBody else body(inner, width))
    if isinstance(task.action_space, spaces.Box):
        return ContinuousActorProbabilistic.for_space(actor_body, task.action_space), critic
    return DiscreteActor.for_space(actor_body, task.action_space), critic


def train(
    task: Any, updates: int, body: Any = Net.for_space, width: Any = (32,), *, lr: float = 0.01, **options: Any
) -> float:
    """Train; return the mean return of 20 episodes with deterministic actions."""
    torch.manual_seed(0)
    envs = [task() for _ in range(4)]
    actor, critic = networks(envs[0], body, width)
    policy = ProbabilisticActorPolicy(actor=actor, action_space=envs[0].action_space, deterministic_eval=True)
    algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=lr), **options)
    buffer = VectorReplayBuffer(512, 4)
    with Collector(policy, envs, buffer, seed=0) as collector:
        for _ in range(updates):
            with policy_within_training_step(policy):
                collector.collect(n_step=256)
            algorithm.update(buffer, 64, 4)
            buffer.reset(keep_statistics=True)
    with Collector(policy, [task()], seed=1) as collector:
        return float(collector.collect(n_episode=20).returns.mean())


def test_ppo_learns_discrete_actions() -> None:
    assert train(Match, 8, gamma=0.5) >= 7.5


def test_ppo_learns_continuous_actions() -> None:
    assert train(Aim, 20, gamma=0.5) >= -2.0


def test_ppo_learns_masked_actions() -> None:
    assert train(Masked, 8, gamma=0.5) >= 7.5


def test_a_recurrent_policy_learns_a_memory_task() -> None:
    assert train(Recall, 12, RecurrentBody, 16, lr=0.003, ent_coef=0.0) >= 0.95


def collected(kind: str = "gru", sequence_length: int = 5) -> tuple[PPO, Any]:
    """Collect with a recurrent policy from running episodes whose first steps have been overwritten."""
    torch.manual_seed(0)
    envs = [Match() for _ in range(3)]
    body = RecurrentBody(envs[0].observation_space, 8, kind)
    policy = DiscreteActorPolicy(
        actor=DiscreteActor.for_space(body, envs[0].action_space), action_space=envs[0].action_space
    )
    algorithm = PPO(
        policy=policy, critic=ValueCritic(body), optim=AdamOptimizerFactory(), sequence_length=sequence_length
    )
    buffer = VectorReplayBuffer(90, 3)
    with Collector(policy, envs, buffer, seed=0) as collector:
        collector.collect(n_step=12)
        buffer.reset(keep_statistics=True)
        collector.collect(n_step=60)
    return algorithm, buffer


@pytest.mark.parametrize("kind", ["gru", "lstm"])
@pytest.mark.parametrize("sequence_length", [1, 3, 5, 100])
def test_outputs_of_sequences_agree_with_collected_steps(kind: str, sequence_length: int) -> None:
    algorithm, buffer = collected(kind, sequence_length)
    batch, indices = algorithm._sample_batch(buffer, 0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    observed = 0
    for rows, dist, values in algorithm._evaluate_minibatches(batch, 16):
        observed += len(rows)
        torch.testing.assert_close(log_probability(dist, rows.act), rows.logp_old)
        torch.testing.assert_close(values, rows.v_s)
    assert observed == len(batch) == 60


def test_sequences_do_not_cross_episode_boundaries() -> None:
    algorithm, buffer = collected()
    batch, indices = algorithm._sample_batch(buffer, 0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    begins = np.flatnonzero(batch.starts_episode)
    assert begins[0] == 0
    done = buffer.done[indices]
    assert {int(row) for row in np.flatnonzero(done[:-1]) + 1} <= set(begins.tolist())


def test_minibatches_of_sequences_have_about_the_requested_size() -> None:
    algorithm, buffer = collected()
    batch, indices = algorithm._sample_batch(buffer, 0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    sizes = [len(rows) for rows, _, _ in algorithm._evaluate_minibatches(batch, 16)]
    assert sum(sizes) == 60
    assert max(sizes) <= 16
    assert [len(rows) for rows, _, _ in algorithm._evaluate_minibatches(batch, None)] == [60]


def test_the_state_before_a_step_is_the_state_after_the_previous() -> None:
    _, buffer = collected()
    after = {int(slot): int(buffer.next(slot)) for slot in buffer.sample_indices(0)}
    for slot, following in after.items():
        if following != slot:
            np.testing.assert_array_equal(buffer[slot].policy.hidden_state.h, buffer[following].state_in.h)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_replaying_a_sequence_reproduces_its_stored_states(kind: str) -> None:
    algorithm, buffer = collected(kind)
    batch, _ = buffer.sample_sequences(32, 6, device="cpu")
    states = batch.state_in
    _, state = algorithm.policy.distribution(Batch(obs=batch.obs[:, :1]), states[:, 0])
    for step in range(1, 6):
        rows = batch.mask[:, step]
        torch.testing.assert_close(state["h"][rows], states.h[rows, step])
        _, state = algorithm.policy.distribution(Batch(obs=batch.obs[:, step : step + 1]), state)


def test_rows_of_a_recurrent_policy_without_states_are_rejected() -> None:
    algorithm, buffer = collected()
    rows = buffer[:]
    del rows.state_in, rows.policy
    bare = ReplayBuffer(60)
    bare.extend(rows)
    with pytest.raises(ColumnNotFoundError, match="recurrent policy must have a column 'state_in'"):
        algorithm.update(bare, 16, 1)


def test_a_critic_with_a_separate_recurrent_body_is_rejected() -> None:
    actor = DiscreteActor.for_space(RecurrentBody(Match.observation_space), Match.action_space)
    with pytest.raises(ArgumentError, match="critic must share the actor's recurrent layers"):
        make(actor, ValueCritic(RecurrentBody(Match.observation_space)), Match.action_space)


@pytest.mark.parametrize("trains_body", [True, False])
def test_the_critic_trains_the_shared_body_by_default(trains_body: bool) -> None:
    body = RecurrentBody(Match.observation_space, 8)
    critic = ValueCritic(body, trains_body=trains_body)
    critic(torch.ones(2, 3, *Match.observation_space.shape)).sum().backward()
    assert [part.grad is not None for part in body.parameters()] == [trains_body] * 4
    assert all(part.grad is not None for part in critic.head.parameters())


def test_a_recurrent_update_changes_actor_and_critic() -> None:
    algorithm, buffer = collected()
    before = parameters_of(algorithm)
    stats = algorithm.update(buffer, 16, 2)
    assert isinstance(stats, ActorCriticTrainingStats)
    assert stats.gradient_steps >= 8
    assert all(not torch.equal(first, second) for first, second in zip(before, parameters_of(algorithm), strict=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "backend",
    [
        # Traces the loss and its gradients, but generates no code.
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.long),
    ],
)
def test_a_compiled_loss_leads_to_the_same_parameters(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))

    def trained(**options: Any) -> PPO:
        algorithm = make(seeded(0, 3, 8, 4), seeded(1, 3, 8, 1), value_clip=True, target_kl=10.0, **options)
        torch.manual_seed(3)
        for _ in range(2):
            # The last minibatch of 80 rows is larger.
            algorithm.update(filled(**STEPS), 24, 2)
        return algorithm

    compiled, plain = trained(compile=True), trained()
    assert_equal_parameters(compiled.policy, plain.policy, atol=1e-5)
    assert_equal_parameters(compiled.critic, plain.critic, atol=1e-5)
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    again = pickle.loads(pickle.dumps(compiled))
    assert again._compiler is not None
    assert_equal_parameters(again.policy, compiled.policy, atol=0.0)


def test_a_loss_that_cannot_be_compiled_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    body = RecurrentBody(Match.observation_space)
    actor = DiscreteActor.for_space(body, Match.action_space)
    with pytest.raises(ArgumentError, match="compile must be False for a recurrent policy, got True"):
        make(actor, ValueCritic(body), Match.action_space, compile=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ArgumentError, match=r"requires a C\+\+ compiler on PATH or in CXX, got none; install"):
        make(seeded(0, 3, 4), seeded(1, 3, 1), compile=True)
