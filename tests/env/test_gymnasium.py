"""Every autoreset mode produces the same transitions, with correct next observations."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium
import gyms
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from samplebatch.env.as_environments import as_environments
from samplebatch.env.base import Environments
from samplebatch.env.infos import batch_of, infos_to_rows, replace_infos
from samplebatch.errors import EnvironmentSpecError

MODES = ["NextStep", "SameStep", "Disabled"]


def ladders(kind: type[Any], mode: str, lengths: list[int], **options: Any) -> Any:
    makers = [
        lambda number=number, length=length: kind(number, length, **options) for number, length in enumerate(lengths)
    ]
    return makers if mode == "List" else SyncVectorEnv(makers, autoreset_mode=mode)


class Step(NamedTuple):
    """Step of all environments: observations, outcomes, ended and reset environments, and next observations."""

    new_obs: list[Any]
    rewards: Any
    terminateds: Any
    truncateds: Any
    infos: Any
    ended: list[int]
    autoreset: list[int]
    obs: Any
    obs_infos: Any


def step_once(environments: Environments, actions: Any) -> Step:
    """Step all environments once, as a chunk."""
    raw = environments.step_raw(actions)
    obs, obs_infos = environments.next_obs(raw)
    chunk = environments.finish_chunk([raw])
    ended = chunk.ends()[0].nonzero()[0].tolist()
    autoreset = [] if chunk.autoreset is None else chunk.autoreset.tolist()
    outcome = chunk.rewards, chunk.terminateds, chunk.truncateds, chunk.infos.get(0, {})
    return Step([*chunk.new_obs], *outcome, ended, autoreset, obs, obs_infos)


def walk(environments: Environments, steps: int) -> list[tuple[Any, ...]]:
    """Step; list transitions as (number, episode, step) before and after, rewards, flags and infos."""
    obs, infos = environments.reset()
    actual = []
    reported = infos_to_rows(infos, environments.num_envs)
    for _ in range(steps):
        before, said_before = obs[0], reported
        step = step_once(environments, [np.zeros(environments.num_envs, int)])
        rows = infos_to_rows(step.infos, environments.num_envs)
        for row in range(environments.num_envs):
            if row not in step.autoreset:
                over = row in step.ended
                assert over == (step.terminateds[row] or step.truncateds[row])
                actual.append(
                    (
                        *before[row].tolist(),
                        *step.new_obs[0][row].tolist(),
                        float(step.rewards[row]),
                        bool(step.terminateds[row]),
                        bool(step.truncateds[row]),
                        str(rows[row]),
                        str(said_before[row]),
                    )
                )
        obs, reported = step.obs, infos_to_rows(step.obs_infos, environments.num_envs)
    return sorted(actual)


def expected(lengths: list[int], counts: list[int], *, truncates: bool, with_infos: bool) -> list[tuple[Any, ...]]:
    actual = []
    for number, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for result in range(count):
            episode, step = divmod(result, length)
            over = step + 1 == length
            info = {"step": step + 1, "name": f"step {step + 1}"} if with_infos else {}
            before: dict[str, Any] = {"step": step, "name": f"step {step}"} if with_infos else {}
            if with_infos and not step:
                before = {"episode_number": episode}
            after = (number, episode, step + 1, 100.0 * number + step + 1)
            flags = (over and not truncates, over and truncates)
            actual.append((number, episode, step, *after, *flags, str(info), str(before)))
    return sorted(actual)


@pytest.mark.parametrize("with_infos", [False, True])
@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "List"])
def test_transitions_are_the_same_in_every_mode(mode: str, truncates: bool, with_infos: bool) -> None:
    lengths = [1, 3, 5]
    environments = as_environments(ladders(gyms.Ladder, mode, lengths, truncates=truncates, with_infos=with_infos))
    counts = [12] * 3
    if mode == "NextStep":
        counts = [12 - 12 // (length + 1) for length in lengths]
    assert walk(environments, 12) == expected(lengths, counts, truncates=truncates, with_infos=with_infos)


@pytest.mark.parametrize("mode", MODES)
def test_environments_in_processes(mode: str) -> None:
    makers = [lambda n=n: gyms.Ladder(n, 2 + n, truncates=True, with_infos=True) for n in range(2)]
    environments = as_environments(AsyncVectorEnv(makers, autoreset_mode=mode, context="fork"))
    counts = [6, 6] if mode != "NextStep" else [4, 5]
    try:
        assert walk(environments, 6) == expected([2, 3], counts, truncates=True, with_infos=True)
    finally:
        environments.close()


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_reset_after_an_episode_loses_no_transition(mode: str, memory: bool) -> None:
    makers = [lambda n=n: gyms.Ladder(n, 2 + n) for n in range(2)]
    vector = AsyncVectorEnv(makers, autoreset_mode=mode, shared_memory=memory, context="fork")
    environments = as_environments(vector)
    environments.reset()
    for _ in range(2):
        step = step_once(environments, [np.zeros(2, int)])
    assert step.ended
    obs, _ = environments.reset()
    assert obs[0][:, 2].tolist() == [0, 0]
    step = step_once(environments, [np.zeros(2, int)])
    if mode == "NextStep" and not memory:
        # Gymnasium resets once more the environment whose episode had ended: that is no transition.
        assert step.autoreset == [0]
        assert step.new_obs[0][:, 1:].tolist() == [[obs[0][0, 1] + 1, 0], [obs[0][1, 1], 1]]
        step = step_once(environments, [np.zeros(2, int)])
        assert step.new_obs[0][:, 2].tolist() == [1, 2]
    else:
        assert step.new_obs[0][:, 1:].tolist() == [[obs[0][0, 1], 1], [obs[0][1, 1], 1]]
    assert not step.autoreset
    environments.close()


def test_spaces_unsupported_in_shared_memory_are_rejected() -> None:
    vector = AsyncVectorEnv([lambda: gyms.Nested(0)], context="fork")
    with pytest.raises(EnvironmentSpecError, match=r"'mouth', a Text, .* with shared_memory=False"):
        as_environments(vector)
    vector.close()


@pytest.mark.parametrize("kind", [gyms.Ladder, gyms.Reusing])
def test_a_single_environment(kind: type[Any]) -> None:
    env = kind(0, 3, truncates=True)
    environments = as_environments(env)
    assert environments.num_envs == 1
    assert walk(environments, 8) == expected([3], [8], truncates=True, with_infos=False)
    environments.close()
    assert env.closed


def test_arrays_reused_by_a_vector_environment_are_copied() -> None:
    makers = [lambda n=n: gyms.Ladder(n, 3) for n in range(2)]
    environments = as_environments(SyncVectorEnv(makers, copy=False))
    obs, _ = environments.reset()
    step = step_once(environments, [np.zeros(2, int)])
    assert obs[0][:, 2].tolist() == [0, 0]
    assert step.new_obs[0][:, 2].tolist() == [1, 1]


def test_the_autoreset_mode_is_read_from_the_instance() -> None:
    same, later = (ladders(gyms.Ladder, mode, [1, 1]) for mode in ("SameStep", "NextStep"))
    assert gyms.Ladder.metadata["autoreset_mode"].value == "NextStep"
    kinds = [type(as_environments(env)).__name__ for env in (same, later)]
    assert kinds == ["SyncEnvironments", "NextStepSyncEnvironments"]


def test_wrapped_and_custom_vector_environments() -> None:
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(ladders(gyms.Ladder, "SameStep", [2, 3]))
    environments = as_environments(wrapped)
    environments.reset()
    step_once(environments, [np.zeros(2, int)])
    step = step_once(environments, [np.zeros(2, int)])
    assert [sorted(row) for row in infos_to_rows(step.infos, 2)] == [["episode"], []]
    custom = as_environments(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point"))
    obs, _ = custom.reset(seeds=[5, 6, 7])
    again, _ = custom.reset(seeds=[5, 9, 9])
    assert obs[0].tolist() == again[0].tolist()
    stored = obs[0].copy()
    step_once(custom, [np.ones(3, int)])
    assert (obs[0] == stored).all()


def test_every_environment_is_seeded() -> None:
    env = ladders(gyms.Ladder, "NextStep", [2, 2])
    environments = as_environments(env)
    environments.reset(seeds=[3, 4], options={"level": 1})
    environments.reset(seeds=[3, 4], seed=8)
    environments.reset()
    assert [item.resets for item in env.envs] == [  # type: ignore[attr-defined]
        [(3, {"level": 1}), (8, None), (None, None)],
        [(4, {"level": 1}), (9, None), (None, None)],
    ]


def test_a_missing_final_observation_is_rejected() -> None:
    class Forgetful(gymnasium.vector.VectorWrapper):
        def step(self, actions: Any) -> Any:
            *others, _ = super().step(actions)
            return (*others, {})

    environments = as_environments(Forgetful(ladders(gyms.Ladder, "SameStep", [1, 2])))
    environments.reset()
    with pytest.raises(EnvironmentSpecError, match="final_obs"):
        step_once(environments, [np.zeros(2, int)])


def test_other_objects_than_environments_are_rejected() -> None:
    with pytest.raises(EnvironmentSpecError, match=r"env must be a Gymnasium environment .*, got a int"):
        as_environments(7)


def test_infos_of_some_rows_are_replaced() -> None:
    infos = {"x": np.array([1, 2, 3]), "_x": np.array([True, True, False]), "d": {"y": np.array([1.5, 2.5, 0.0])}}
    others = {"x": np.array([0.5, 0.0, 0.0]), "_x": np.array([True, False, False]), "z": np.array([None, "b", "c"])}
    merged = replace_infos(infos, others, np.array([0, 1]), 3)
    assert infos_to_rows(merged, 3) == [{"x": 0.5, "z": None}, {"z": "b"}, {"d": {"y": 0.0}}]
    assert infos_to_rows(infos, 3)[0] == {"x": 1, "d": {"y": 1.5}}


def test_infos_as_a_batch() -> None:
    both = np.array([True, True])
    infos = {
        "x": np.array([1, 2]),
        "_x": both,
        "deep": {"y": np.zeros((2, 3)), "_y": both},
        "_deep": both,
        "_odd": both,
    }
    result = batch_of(infos)
    assert result.x.tolist() == [1, 2]
    assert result.deep.y.shape == (2, 3)
    assert sorted(result.__dict__) == ["_odd", "deep", "x"]
    assert batch_of([{"x": 1}, {}]).x.tolist() == [1, 0]
    assert not batch_of([{}, {}]).__dict__
    assert infos_to_rows([{"x": 1}], 1) == [{"x": 1}]
    assert infos_to_rows({}, 2) == [{}, {}]
    assert infos_to_rows({"v": np.eye(2)}, 2)[1]["v"].tolist() == [0.0, 1.0]


class Silent(VectorEnv):
    """Vector environment without an autoreset mode."""

    def __init__(self, inner: VectorEnv) -> None:
        self._inner = inner
        self.num_envs, self.metadata = inner.num_envs, {}
        self.single_observation_space, self.observation_space = inner.single_observation_space, inner.observation_space
        self.single_action_space, self.action_space = inner.single_action_space, inner.action_space

    def reset(self, **options: Any) -> Any:
        return self._inner.reset(**options)

    def step(self, actions: Any) -> Any:
        return self._inner.step(actions)


def test_an_undeclared_autoreset_mode_is_next_step_with_a_warning() -> None:
    with pytest.warns(
        UserWarning,
        match=r"Silent must specify its autoreset mode in metadata\['autoreset_mode'\].*NEXT_STEP is assumed",
    ):
        environments = as_environments(Silent(ladders(gyms.Ladder, "NextStep", [2, 3])))
    reported = as_environments(ladders(gyms.Ladder, "NextStep", [2, 3]))
    assert walk(environments, 12) == walk(reported, 12)


def test_a_final_observation_contradicts_next_step_autoreset() -> None:
    with pytest.warns(UserWarning, match="Silent"):
        environments = as_environments(Silent(ladders(gyms.Ladder, "SameStep", [2])))
    environments.reset()
    actions = [np.zeros(1, int)]
    step_once(environments, actions)
    with pytest.raises(EnvironmentSpecError, match=r"infos\['final_obs'\].*must be AutoresetMode.SAME_STEP"):
        step_once(environments, actions)
