"""Algorithms sample, update in the correct modes, return priorities, and resume from their state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

from samplebatch import Batch, Collector, MixedSampler, PrioritizedReplayBuffer, ReplayBuffer
from samplebatch.cli.recipes import RECIPES, complete_settings, make_algorithm
from samplebatch.errors import ArgumentError, EmptyBufferError, NonFiniteLossError
from samplebatch.learn import (
    AdamOptimizerFactory,
    LRSchedulerFactoryLinear,
    OfflineAlgorithm,
    OfflineTrainer,
    OfflineTrainerParams,
    OffPolicyAlgorithm,
    OffPolicyTrainer,
    OffPolicyTrainerParams,
    OnPolicyAlgorithm,
    OnPolicyTrainer,
    OnPolicyTrainerParams,
    Policy,
    SimpleLossTrainingStats,
    TorchOptimizerFactory,
    TrainingStats,
)
from samplebatch.rollout import SequenceSummaryStats
from tests.learn.learning import CHOICES, assert_equal_parameters, assert_goes_on, filled, parameters_of, seeded


class Linear(Policy):
    def __init__(self) -> None:
        super().__init__(CHOICES)
        self.net = seeded(0, 3, 4)

    def forward(self, batch: Batch, state: Any = None) -> Batch:
        logits = self.net(self.observations(batch)[0])
        return Batch(act=logits.argmax(-1), logits=logits)


def update_with_nan(
    name: str, *, allow_nonfinite: bool, prioritized: bool = False, mixed: bool = False
) -> tuple[Any, dict[str, Any], int, str]:
    """Update an algorithm with a NaN observation in one row, until an error occurs or for 20 updates.

    Returns
    -------
    The algorithm, its tensors before the last update, the number of updates, and the error.
    """
    env = gymnasium.make("Pendulum-v1" if name in ("td3", "ddpg", "sac", "cql") else "CartPole-v1")
    torch.manual_seed(0)
    collector: Any = Collector("random", env, seed=1, infos=False)
    rows: Any = collector.collect(n_step=60).batch.as_batch("tianshou")
    settings = complete_settings(name, {"hidden_sizes": [8], "allow_nonfinite": allow_nonfinite})
    algorithm: Any = make_algorithm(name, env.observation_space, env.action_space, settings)
    # As a buffer has it in which nobody looks for NaN.
    rows.obs[7] = np.nan
    if name in ("impala", "appo"):
        # As their own policies record it with each action; random ones have no such column.
        rows.action_logp = np.full(60, np.log(0.5), np.float32)
    kind: Any = PrioritizedReplayBuffer if prioritized else ReplayBuffer
    buffer = kind(60, **({"alpha": 0.6, "beta": 0.4} if prioritized else {}), random_seed=1)
    buffer.extend(rows)
    if mixed:
        buffer = MixedSampler({"replay": buffer}, seed=1)
    if hasattr(algorithm, "process_buffer"):
        buffer = algorithm.process_buffer(buffer)
    for number in range(20):
        before = {
            key: first.clone() for key, first in algorithm.state_dict().items() if isinstance(first, torch.Tensor)
        }
        try:
            if isinstance(algorithm, OnPolicyAlgorithm):
                algorithm.update(buffer, batch_size=60, repeat=1)
            else:
                algorithm.update(buffer, sample_size=16)
        except NonFiniteLossError as error:
            return algorithm, before, number, str(error)
    return algorithm, before, 20, ""


@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_that_is_not_finite_stops_updates_before_weights_change(name: str) -> None:
    algorithm, before, updates, error = update_with_nan(name, allow_nonfinite=False)
    assert error.startswith(f"a loss must be finite, got nan in update {updates + 1}; columns with such values: 'obs'")
    assert algorithm.updates == updates
    for key, first in algorithm.state_dict().items():
        if isinstance(first, torch.Tensor):
            assert first.isfinite().all(), key
            if "_steps" not in key and "ret_rms" not in key and "_old" not in key:
                assert torch.equal(first, before[key]), key


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_losses_that_are_not_finite_are_allowed_on_request(name: str, prioritized: bool) -> None:
    algorithm, _, updates, _ = update_with_nan(name, allow_nonfinite=True, prioritized=prioritized)
    assert updates == 20
    assert not all(bool(item.isfinite().all()) for item in algorithm.parameters())


def test_priorities_that_are_not_finite_are_omitted_in_mixed_sources() -> None:
    algorithm, _, updates, _ = update_with_nan("td3", allow_nonfinite=True, prioritized=True, mixed=True)
    assert updates == 20
    assert not all(bool(item.isfinite().all()) for item in algorithm.parameters())


def test_the_error_contains_the_path_of_a_nested_column() -> None:
    class Dividing(OffPolicyAlgorithm[Linear]):
        def __init__(self) -> None:
            super().__init__(policy=Linear())
            self.optim = self._create_optimizer(self.policy, AdamOptimizerFactory())

        def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
            loss = sum(parameter.sum() for parameter in self.policy.parameters()) * batch.rew.sum()
            self.optim.step(loss)
            return SimpleLossTrainingStats(loss=loss.item())

        def create_trainer(self, params: Any) -> Any:
            raise NotImplementedError

    buffer = ReplayBuffer(4)
    for rew in (1.0, np.inf):
        obs = {"camera": np.array([np.nan]), "speed": 1.0, "name": "a", "count": 3}
        buffer.add(Batch(obs=obs, act=0, rew=rew, terminated=True, truncated=False, info={}))
    algorithm = Dividing()
    with pytest.raises(NonFiniteLossError, match=r"columns with such values: 'obs.camera', 'rew'"):
        algorithm.update(buffer, 0)


class Watched(OffPolicyAlgorithm[Linear]):
    """Algorithm that records in which training modes its parts run."""

    def __init__(self, factory: Any = None, lagged: bool = False) -> None:
        super().__init__(policy=Linear())
        self.optim = self._create_optimizer(self.policy, factory or AdamOptimizerFactory(), max_grad_norm=1.0)
        self.target = self._add_lagged_network(self.policy.net) if lagged else None
        self.seen: list[tuple[str, bool, bool]] = []
        self.batches: list[Batch] = []
        self.priorities: torch.Tensor | None = None

    def _note(self, part: str) -> None:
        self.seen.append((part, self.policy.is_within_training_step, self.policy.training))

    def _preprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> Batch:
        self._note("preprocess")
        return batch

    def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
        self._note("update")
        self.batches.append(batch)
        loss = self.policy(batch).logits.square().mean()
        self.optim.step(loss)
        if self.priorities is not None:
            batch.weight = self.priorities
        self._update_lagged_network_weights(0.5)
        return SimpleLossTrainingStats(loss=loss.item())

    def _postprocess_batch(self, batch: Batch, buffer: Any, indices: Any) -> None:
        self._note("postprocess")
        super()._postprocess_batch(batch, buffer, indices)


def test_an_update_is_a_training_step_with_gradient_steps_in_training_mode() -> None:
    algorithm = Watched()
    algorithm.eval()
    stats = algorithm.update(buffer=filled(), sample_size=8)
    assert algorithm.seen == [("preprocess", True, False), ("update", True, True), ("postprocess", True, True)]
    assert not algorithm.policy.is_within_training_step
    assert not algorithm.training
    assert stats.train_time > 0.0
    assert algorithm.updates == 1


def test_batches_are_tensors_in_the_dtype_of_the_parameters() -> None:
    single, double = Watched(), Watched().double()
    for algorithm in (single, double):
        algorithm.update(filled(), 8)
    (batch,) = double.batches
    assert batch.obs.dtype == batch.rew.dtype == torch.float64
    assert batch.act.dtype == torch.int64
    assert batch.terminated.dtype == torch.bool
    assert single.batches[0].rew.dtype == torch.float32


def test_rows_can_represent_n_step_windows() -> None:
    algorithm = Watched()
    algorithm.n_step, algorithm.gamma = 3, 0.5
    buffer = filled()
    algorithm.update(buffer, 0)
    rows, _ = buffer.sample(0, n_step=3, gamma=0.5)
    np.testing.assert_allclose(algorithm.batches[0].returns.numpy(), rows.returns, rtol=1e-6)
    np.testing.assert_array_equal(algorithm.batches[0].obs_next.numpy(), rows.obs_next)


def test_priorities_are_returned_with_their_generations() -> None:
    buffer = filled(alpha=1.0, beta=0.4)
    algorithm = Watched()
    algorithm.priorities = torch.arange(1.0, 81.0)
    algorithm.update(buffer, 0)
    np.testing.assert_allclose(buffer.weight[:], np.arange(1.0, 81.0), rtol=1e-6)


def test_overwritten_rows_keep_the_priority_of_new_rows() -> None:
    buffer = PrioritizedReplayBuffer(4, alpha=1.0, beta=1.0)

    def add(i: int) -> None:
        buffer.add(Batch(obs=np.full(3, i, np.float32), act=0, rew=0.0, terminated=False, truncated=False))

    for i in range(4):
        add(i)

    class Late(Watched):
        def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
            add(9)
            return super()._update_with_batch(batch)

    algorithm = Late()
    algorithm.priorities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    algorithm.update(buffer, 0)
    np.testing.assert_allclose(buffer.weight[:], [1.0, 0.2, 0.3, 0.4], rtol=1e-6)


def test_importance_weights_are_not_treated_as_priorities() -> None:
    buffer = filled(alpha=1.0, beta=0.4)
    buffer.update_weight(np.arange(80), np.linspace(1.0, 2.0, 80))
    before = buffer.weight[:].copy()
    Watched().update(buffer, 16)
    assert np.array_equal(buffer.weight[:], before)


def test_schedules_are_stepped_once_per_update() -> None:
    factory = TorchOptimizerFactory(torch.optim.SGD, lr=1.0)
    algorithm = Watched(factory.with_lr_scheduler_factory(LRSchedulerFactoryLinear(1, 4, 1)))
    rates = []
    for _ in range(5):
        algorithm.update(filled(), 8)
        rates.append(algorithm.optim.optim.param_groups[0]["lr"])
    assert rates == [0.75, 0.5, 0.25, 0.0, 0.0]


def test_an_algorithm_resumes_bit_for_bit_from_its_state() -> None:
    def make() -> Watched:
        factory = AdamOptimizerFactory(lr=0.1).with_lr_scheduler_factory(LRSchedulerFactoryLinear(1, 9, 1))
        return Watched(factory, lagged=True)

    buffer = filled()
    assert_goes_on(make(), make(), lambda algorithm: [algorithm.update(buffer, 0) for _ in range(3)])


def test_loading_does_not_change_the_state() -> None:
    state = Watched().state_dict()
    names = [*state]
    Watched().load_state_dict(state)
    assert [*state] == names


def test_nested_algorithms_are_part_of_the_state() -> None:
    def make() -> nn.ModuleList:
        return nn.ModuleList([Watched(), Watched()])

    pair, again = make(), make()
    for algorithm in pair:
        algorithm.update(filled(), 8)  # type: ignore[operator]
    again.load_state_dict(pair.state_dict())
    assert_equal_parameters(pair, again)
    assert again[1].optim.state_dict()["state"][0]["step"] == 1  # type: ignore[operator, union-attr]


def test_a_state_of_other_optimizers_is_rejected() -> None:
    class Two(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.second = self._create_optimizer(self.policy, AdamOptimizerFactory())

    with pytest.raises(ArgumentError, match="must have 2 optimizers, as the algorithm has, got 1"):
        Two().load_state_dict(Watched().state_dict())


def test_a_state_of_another_network_size_is_rejected_without_loading() -> None:
    algorithm, state = Watched(), Watched().state_dict()
    before = parameters_of(algorithm)
    state["policy.net.0.bias"] = torch.ones(4)
    wide = state | {"policy.net.0.weight": torch.zeros(5, 3)}
    with pytest.raises(ArgumentError, match=r"'policy.net.0.weight' must have shape \(4, 3\), .* got \(5, 3\)"):
        algorithm.load_state_dict(wide)
    with pytest.raises(ArgumentError, match=r"must have only parameters of the algorithm, got 'policy.net.2.bias'"):
        algorithm.load_state_dict(state | {"policy.net.2.bias": torch.zeros(4)})
    del state["policy.net.0.weight"]
    with pytest.raises(ArgumentError, match=r"'policy.net.0.weight' must have .* got no such parameter"):
        algorithm.load_state_dict(state)
    for first, retained in zip(parameters_of(algorithm), before, strict=True):
        torch.testing.assert_close(first, retained)


def test_an_empty_buffer_is_rejected_and_nothing_changes() -> None:
    algorithm = Watched()
    before = parameters_of(algorithm)
    with pytest.raises(EmptyBufferError):
        algorithm.update(ReplayBuffer(8), 4)
    assert algorithm.updates == 0
    assert not algorithm.policy.is_within_training_step
    assert all(map(torch.equal, before, parameters_of(algorithm)))


class Summed(OnPolicyAlgorithm[Linear]):
    def __init__(self) -> None:
        super().__init__(policy=Linear())
        self.given: list[Any] = []

    def _update_with_batch(self, batch: Batch, batch_size: int | None, repeat: int) -> TrainingStats:
        self.given.append((batch, batch_size, repeat))
        return TrainingStats()


def test_on_policy_updates_use_all_steps_in_time_order() -> None:
    algorithm, buffer = Summed(), filled()
    algorithm.update(buffer=buffer, batch_size=16, repeat=2)
    ((batch, batch_size, repeat),) = algorithm.given
    assert (batch_size, repeat) == (16, 2)
    np.testing.assert_array_equal(batch.obs.numpy(), buffer[:].obs)


def test_on_policy_updates_need_steps() -> None:
    with pytest.raises(EmptyBufferError):
        Summed().update(ReplayBuffer(8), None, 1)


def test_statistics_show_losses_and_the_means_of_summaries() -> None:
    from dataclasses import dataclass

    @dataclass(kw_only=True)
    class Stats(TrainingStats):
        loss: SequenceSummaryStats | None
        steps: int
        missing: float | None = None

    stats = Stats(loss=SequenceSummaryStats.from_sequence([1.0, 3.0]), steps=2, train_time=1.0)
    assert stats.get_loss_stats_dict() == {"loss": 2.0, "steps": 2}


def test_each_kind_of_algorithm_creates_its_trainer() -> None:
    class Offline(OfflineAlgorithm[Linear]):
        def _update_with_batch(self, batch: Batch) -> TrainingStats:
            return TrainingStats()

    collector = SimpleNamespace(buffer=filled())
    cases: list[tuple[Any, Any, Any]] = [
        (Summed(), OnPolicyTrainer, OnPolicyTrainerParams(training_collector=collector)),
        (Watched(), OffPolicyTrainer, OffPolicyTrainerParams(training_collector=collector)),
        (Offline(policy=Linear()), OfflineTrainer, OfflineTrainerParams(buffer=collector.buffer)),
    ]
    for algorithm, kind, params in cases:
        trainer = algorithm.create_trainer(params)
        assert type(trainer) is kind
        assert trainer.algorithm is algorithm
        assert trainer.params is params
