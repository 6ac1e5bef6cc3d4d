"""Algorithms learn in the unit of their policy, for rows of any unit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from samplebatch import ActionUnit, Batch, Collector, Dataset, MixedSampler, ReplayBuffer, SampleBatch
from samplebatch.errors import ColumnMismatchError
from samplebatch.learn import (
    CQL,
    SAC,
    TD3,
    BehaviourCloning,
    ContinuousActorDeterministic,
    ContinuousActorProbabilistic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    ImitationPolicy,
    Net,
    Policy,
    SACPolicy,
    TorchOptimizerFactory,
)

_OBS, _TORQUES = spaces.Box(-8.0, 8.0, (3,)), spaces.Box(-2.0, 2.0, (1,))
_SCALE = ActionUnit("scale", np.float32(-2.0), np.float32(2.0))
_SGD = TorchOptimizerFactory(torch.optim.SGD, lr=0.01)


def steer(obs: Any) -> Any:
    return np.tanh(obs[:, :1]).astype(np.float32)


@pytest.fixture(scope="module")
def scaled() -> SampleBatch[Any]:
    with Collector(steer, "Pendulum-v1", map_action="scale", seed=1, infos=False) as collector:
        batch = collector.collect(n_step=64).batch
    assert batch is not None
    return batch


def algorithm_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "BehaviourCloning":
        actor = ContinuousActorDeterministic.for_space(Net.for_space(_OBS, [8]), _TORQUES)
        return BehaviourCloning(
            policy=ImitationPolicy(actor=actor, action_space=_TORQUES, action_scaling=True), optim=_SGD
        )
    policy: Any
    if name == "TD3":
        actor = ContinuousActorDeterministic.for_space(Net.for_space(_OBS, [8]), _TORQUES)
        policy = ContinuousDeterministicPolicy(actor=actor, action_space=_TORQUES)
    else:
        gaussian = ContinuousActorProbabilistic.for_space(Net.for_space(_OBS, [8]), _TORQUES, conditioned_sigma=True)
        policy = SACPolicy(actor=gaussian, action_space=_TORQUES)
    options: dict[str, Any] = {"calibrated": False} if name == "CQL" else {}
    return {"SAC": SAC, "TD3": TD3, "CQL": CQL}[name](
        policy=policy,
        policy_optim=_SGD,
        critic=ContinuousCritic.for_space(_OBS, _TORQUES, [8]),
        critic_optim=_SGD,
        **options,
    )


def learned(name: str, source: Any) -> dict[str, torch.Tensor]:
    algorithm = algorithm_of(name)
    torch.manual_seed(1)
    for _ in range(3):
        algorithm.update(source, 0 if not isinstance(source, MixedSampler) else 64)
    return {key: value for key, value in algorithm.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("name", ["SAC", "TD3", "CQL", "BehaviourCloning"])
@pytest.mark.parametrize("kind", ["buffer", "dataset"])
def test_rows_in_the_environment_unit_give_the_same_updates(
    name: str, kind: str, scaled: SampleBatch[Any], tmp_path: Path
) -> None:
    sources: list[Any] = []
    for position, rows in enumerate((scaled, scaled.to_environment_actions())):
        if kind == "dataset":
            sources.append(Dataset(tmp_path / str(position)))
            sources[-1].extend(rows)
        else:
            sources.append(ReplayBuffer(64))
            sources[-1].extend(rows)
    assert [source.action_unit for source in sources] == [_SCALE, ActionUnit()]
    ours, theirs = (learned(name, source) for source in sources)
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-5)
    # The unit matters: the same numbers without it are learned otherwise.
    plain = ReplayBuffer(64)
    unknown = scaled.to_environment_actions().copy()
    unknown.action_unit = None
    plain.extend(unknown)
    other = learned(name, plain)
    assert any(not torch.allclose(value, other[key], rtol=1e-3, atol=1e-5) for key, value in ours.items())


def test_rows_of_a_mixed_sampler_are_converted(scaled: SampleBatch[Any]) -> None:
    buffer = ReplayBuffer(64)
    buffer.extend(scaled.to_environment_actions())
    algorithm = algorithm_of("SAC")
    recorded: list[Any] = []
    algorithm._preprocess_batch, original = (
        lambda *args: recorded.append(args[0]) or original(*args),
        (algorithm._preprocess_batch),
    )
    algorithm.update(MixedSampler({"one": buffer}), 16)
    assert recorded[0].action_unit == _SCALE
    assert recorded[0].act.abs().max() <= 1.0


def test_rows_are_converted_as_the_policy_maps_actions(scaled: SampleBatch[Any]) -> None:
    rows = scaled.to_environment_actions().as_batch("tianshou")
    policy = algorithm_of("SAC").policy
    np.testing.assert_allclose(policy.in_policy_unit(rows).act, scaled["actions"], atol=1e-6)
    np.testing.assert_allclose(policy.in_policy_unit(rows.to_torch()).act, scaled["actions"], atol=1e-6)
    assert policy.in_policy_unit(scaled.as_batch("tianshou")).action_unit == _SCALE
    wider = SampleBatch(act=scaled["actions"], _action_unit=ActionUnit("scale", -1.0, 1.0)).as_batch()
    np.testing.assert_allclose(policy.in_policy_unit(wider).act, scaled["actions"] / 2, atol=1e-6)


def test_an_action_map_without_an_inverse_rejects_environment_actions(scaled: SampleBatch[Any]) -> None:
    class Halved(Policy):
        def forward(self, batch: Batch, state: Any = None) -> Batch:
            raise NotImplementedError

        def map_action(self, act: Any) -> Any:
            return act / 2

    class Doubled(Halved):
        def map_action_inverse(self, act: Any) -> Any:
            return act * 2

    rows = scaled.to_environment_actions().as_batch("tianshou")
    with pytest.raises(ColumnMismatchError, match="map_action_inverse"):
        Halved(_TORQUES).in_policy_unit(rows)
    np.testing.assert_array_equal(Doubled(_TORQUES).in_policy_unit(rows).act, 2 * rows.act)
    assert Halved(_TORQUES).action_unit == ActionUnit("function")
