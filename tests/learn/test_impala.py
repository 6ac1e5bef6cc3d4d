"""IMPALA and APPO estimate by V-trace, accept steps of older policies, resume exactly, and learn asynchronously."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from samplebatch import Collector, RolloutWorkers, VectorReplayBuffer
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.learn import (
    APPO,
    IMPALA,
    PPO,
    AdamOptimizerFactory,
    ContinuousActorProbabilistic,
    DiscreteActor,
    Net,
    OnPolicyTrainerParams,
    ProbabilisticActorPolicy,
    RecurrentBody,
    ValueCritic,
    load_checkpoint,
    policy_within_training_step,
)
from samplebatch.learn.policy import log_probability
from samplebatch.returns import vtrace
from tests.learn.learning import assert_equal_parameters, assert_goes_on, parameters_of
from tests.learn.tasks import Aim, Match, Recall

KINDS = [IMPALA, APPO]


def make(kind: Any, env: Any = Match, lr: float = 0.01, **options: Any) -> Any:
    torch.manual_seed(0)
    obs, act = env.observation_space, env.action_space
    head = DiscreteActor if env is not Aim else ContinuousActorProbabilistic
    if env is Recall:
        body = RecurrentBody(obs, 16)
        actor, critic = head.for_space(body, act), ValueCritic(body)
    else:
        actor, critic = head.for_space(Net.for_space(obs, [16]), act), ValueCritic(Net.for_space(obs, [16]))
    policy = ProbabilisticActorPolicy(actor=actor, action_space=act, deterministic_eval=True)
    return kind(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=lr), **options)


def collected(algorithm: Any, env: Any = Match, steps: int = 60) -> VectorReplayBuffer:
    buffer = VectorReplayBuffer(200, 2)
    collector = Collector(algorithm.policy, [env] * 2, buffer, seed=1)
    with collector, policy_within_training_step(algorithm.policy):
        collector.collect(n_step=steps)
    return buffer


@pytest.mark.parametrize("env", [Match, Aim])
def test_policies_record_the_log_probability_of_each_action(env: Any) -> None:
    algorithm = make(IMPALA, env)
    batch, _ = collected(algorithm, env).sample(0)
    rows = torch.as_tensor(batch.obs), torch.as_tensor(batch.act)
    with torch.no_grad():
        dist, _ = algorithm.policy.distribution(type(batch)(obs=rows[0]))
        expected = log_probability(dist, rows[1])
    torch.testing.assert_close(torch.as_tensor(batch.action_logp), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_stale_steps_agree_with_vtrace(kind: Any) -> None:
    algorithm = make(kind, gae_lambda=0.9, rho_clip=1.3, c_clip=0.8, advantage_rho_clip=1.1)
    buffer = collected(algorithm)
    with torch.no_grad():
        for parameter in algorithm.policy.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    batch, indices = buffer.sample(0, device="cpu")
    prepared = algorithm._preprocess_batch(batch, buffer, indices)
    with torch.no_grad():
        target = log_probability(algorithm.policy.distribution(batch)[0], batch.act)
        values, following = (algorithm.critic(obs).flatten().numpy() for obs in (batch.obs, batch.obs_next))
    ratios = (target - batch.action_logp).numpy()
    assert np.abs(ratios).max() > 0.05
    ended = batch.truncated.numpy().astype(bool)
    ended[np.isin(indices, buffer.unfinished_index())] = True
    expected = vtrace(
        batch.rew,
        batch.terminated,
        ended,
        values=values,
        next_values=following,
        log_ratios=ratios,
        vtrace_lambda=0.9,
        rho_clip=1.3,
        c_clip=0.8,
        advantage_rho_clip=1.1,
    )
    np.testing.assert_allclose(prepared.returns, expected.returns, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(prepared.adv, expected.advantages, rtol=1e-4, atol=1e-5)


def test_appo_updates_like_ppo_for_steps_of_the_current_policy() -> None:
    options = {"gae_lambda": 1.0, "max_grad_norm": 0.5}
    first, other = make(APPO, **options), make(PPO, **options)
    for algorithm in (first, other):
        torch.manual_seed(2)
        buffer = collected(algorithm)
        torch.manual_seed(3)
        algorithm.update(buffer, 16, 3)
    assert_equal_parameters(first, other, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_log_probabilities_are_rejected_with_a_fix(kind: Any) -> None:
    ppo = make(PPO)
    buffer = collected(ppo)
    with pytest.raises(ColumnNotFoundError, match=r"'action_logp'.*create the algorithm before"):
        make(kind).update(buffer, 16, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rho_clip", "c_clip", "advantage_rho_clip"])
def test_clip_thresholds_must_be_positive(kind: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        make(kind, **{name: 0.0})
    assert getattr(make(kind, **{name: None}), name) is None


@pytest.mark.parametrize("kind", KINDS)
def test_an_algorithm_resumes_from_its_state(kind: Any) -> None:
    algorithm, fresh = make(kind), make(kind)
    buffer = collected(algorithm)
    assert_goes_on(algorithm, fresh, lambda trained: trained.update(buffer, 16, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_policies_are_updated_in_sequences(kind: Any) -> None:
    algorithm = make(kind, Recall)
    buffer = collected(algorithm, Recall)
    before = parameters_of(algorithm)
    algorithm.update(buffer, 16, 1)
    assert all(not torch.equal(first, second) for first, second in zip(before, parameters_of(algorithm), strict=True))


def trainer(kind: Any, workers: RolloutWorkers, algorithm: Any, **options: Any) -> Any:
    params = {
        "max_epochs": 2,
        "epoch_num_steps": 200,
        "collection_step_num_env_steps": 40,
        "batch_size": 20,
        "asynchronous": True,
        "verbose": False,
        "show_progress": False,
        **options,
    }
    return algorithm.create_trainer(OnPolicyTrainerParams(training_collector=workers, **params))


def workers_of(algorithm: Any, backend: Any, **options: Any) -> RolloutWorkers:
    with policy_within_training_step(algorithm.policy):
        return RolloutWorkers(
            algorithm.policy,
            Match,
            VectorReplayBuffer(2000, 4),
            num_workers=2,
            envs_per_worker=2,
            seed=1,
            backend=backend,
            # Each spawned worker would import torch; tests/workers and tests/cli spawn workers with torch.
            start_method="fork",
            **options,
        )


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        (IMPALA, "inline"),
        (APPO, "process"),
        pytest.param(APPO, "inline", marks=pytest.mark.long),
        pytest.param(IMPALA, "process", marks=pytest.mark.long),
        pytest.param(IMPALA, "ray", marks=pytest.mark.long),
        pytest.param(APPO, "ray", marks=pytest.mark.long),
    ],
)
def test_a_policy_learns_from_asynchronous_workers(kind: Any, backend: str) -> None:
    if backend == "ray":
        pytest.importorskip("ray")
    algorithm = make(kind, lr=0.02)
    with workers_of(algorithm, backend) as workers:
        info = trainer(kind, workers, algorithm, max_epochs=4, epoch_num_steps=1000).run()
        assert info.train_step >= 4000
        versions = workers.worker_stats.versions
        assert len(versions) > 10
    with Collector(algorithm.policy, [Match], seed=9) as collector:
        assert collector.collect(n_episode=20).returns.mean() >= 7.5


def test_an_asynchronous_training_of_inline_workers_resumes_exactly(tmp_path: Any) -> None:
    def run(epochs: int, folder: Any, load: Any = None) -> Any:
        algorithm = make(IMPALA)
        with workers_of(algorithm, "inline") as workers:
            resumed = trainer(IMPALA, workers, algorithm, max_epochs=epochs, checkpoint_dir=folder)
            if load is not None:
                assert load_checkpoint(resumed, load, allow_pickle=True) is None
            resumed.run()
        return algorithm, resumed.counters.env_step

    intact, steps = run(2, tmp_path / "one")
    run(1, tmp_path / "other")
    resumed, other_steps = run(2, tmp_path / "more", load=tmp_path / "other")
    assert steps == other_steps
    assert_equal_parameters(intact, resumed)


def test_fragments_older_than_max_lag_are_dropped_and_counted() -> None:
    algorithm = make(IMPALA)
    weights = algorithm.policy.state_dict()
    with workers_of(algorithm, "process", max_lag=0) as workers:
        workers.publish(weights)
        assert workers.receive(40).n_collected_steps >= 40
        deadline = time.monotonic() + 60
        while workers.worker_stats.sent_steps < 80:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # The 40 steps on their way are of version 1, and stale from here on.
        workers.publish(weights)
        newer = workers.receive(40)
        remaining = workers.receive()
        facts, buffer = workers.worker_stats, workers.buffer
    assert (facts.stale_steps, facts.stale_fragments) == (40, 2)
    assert facts.versions.keys() == {1, 2}
    assert facts.versions[1] == 80
    assert facts.versions[2] == newer.n_collected_steps + remaining.n_collected_steps
    assert set(buffer.weights_version[buffer.sample_indices(0)].tolist()) == {1, 2}


def test_asynchronous_training_rejects_unsuitable_parameters() -> None:
    ppo = make(PPO)
    buffer = VectorReplayBuffer(100, 2)
    with (
        Collector(ppo.policy, [Match] * 2, buffer) as collector,
        pytest.raises(
            ArgumentError, match="training_collector must be RolloutWorkers or RemoteActors for asynchronous"
        ),
    ):
        OnPolicyTrainerParams(training_collector=collector, asynchronous=True)
    with workers_of(ppo, "inline") as workers:
        with pytest.raises(ArgumentError, match="asynchronous must be False for PPO"):
            trainer(PPO, workers, ppo)
        with pytest.raises(ArgumentError, match="overlap must be False with asynchronous=True, got True"):
            OnPolicyTrainerParams(training_collector=workers, asynchronous=True, overlap=True)
        with pytest.raises(
            ArgumentError, match="collection_step_num_env_steps must be passed for asynchronous, got None"
        ):
            OnPolicyTrainerParams(
                training_collector=workers,
                asynchronous=True,
                collection_step_num_env_steps=None,
                collection_step_num_episodes=2,
            )
