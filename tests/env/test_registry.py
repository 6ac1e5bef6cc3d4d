"""Environments by name, and the errors for unknown names."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import arena
import pettingzoo
import pytest

from samplebatch.env.agents import agent_positions
from samplebatch.env.registry import environment_factory, environment_kind, known_environments, make_environment
from samplebatch.errors import EnvironmentSpecError, MissingExtraError


@pytest.mark.parametrize(
    "name", ["mpe2/simple_spread_v3", "mpe2.simple_spread_v3", "mpe2.simple_spread_v3:parallel_env"]
)
def test_pettingzoo_environments_by_name(name: str) -> None:
    environment = make_environment(name)
    observations, _ = environment.reset(seed=1)
    assert list(observations) == ["agent_0", "agent_1", "agent_2"]
    assert agent_positions(environment) == {"agent_0": 0, "agent_1": 1, "agent_2": 2}
    environment.close()


def test_any_function_may_create_an_environment() -> None:
    assert isinstance(make_environment("arena:Relay"), arena.Relay)
    assert isinstance(make_environment(arena.slow_relay), arena.Relay)
    factory = pickle.loads(pickle.dumps(environment_factory("arena:slow_relay")))
    assert isinstance(factory(), arena.Relay)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpe2/simple_spraed_v3", "no environment 'mpe2/simple_spraed_v3'; did you mean 'mpe2/simple_spread_v3'"),
        ("mpe/simple_spread_v3", "no environment 'mpe/simple_spread_v3'; did you mean 'mpe2/simple_spread_v3'"),
        ("simple_spread_v3", "'package/module'.*did you mean 'mpe2/simple_spread_v3'"),
        ("simple_spred_v3", "'package/module'.*did you mean 'mpe2/simple_spread_v3'"),
        ("tictactoe", "did you mean 'pettingzoo/classic/tictactoe_v3'"),
        ("CartPole", "'Name-v0', .* got 'CartPole'; did you mean 'CartPole-v1'"),
        ("CartPole-v9", "no environment 'CartPole-v9'; did you mean 'CartPole-v1'"),
        ("CartPoel-v1", "no environment 'CartPoel-v1'; did you mean 'CartPole-v1'"),
        ("classic/tictatoe-v3", "no environment 'classic/tictatoe-v3'; "),
        ("areena:Relay-v0", "no environment 'areena:Relay-v0'"),
        ("../arena:Relay-v0", "'package/module' or 'module:function'"),
        ("", "'package/module' or 'module:function', got ''"),
        ("/", "'package/module' or 'module:function'"),
        ("mpe2/", "'package/module' or 'module:function'"),
        ("../arena:Relay", "'package/module' or 'module:function'"),
        ("arena:Rellay", "no function 'Rellay' in module 'arena'; did you mean 'Relay'"),
        ("areena:Relay", "no environment 'areena:Relay'"),
        ("email/message", "must have a function parallel_env or env"),
    ],
)
def test_the_error_for_a_wrong_name_lists_similar_names(name: str, words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        environment_factory(name)


def test_atari_environments_are_registered_on_demand() -> None:
    pytest.importorskip("ale_py")
    for name in ("ALE/Pong-v5", "PongNoFrameskip-v4"):
        environment = make_environment(name)
        assert environment.observation_space.shape == (210, 160, 3)
        environment.close()
    with pytest.raises(EnvironmentSpecError, match="no environment 'ALE/Pnog-v5'; did you mean 'ALE/Pong-v5'"):
        environment_factory("ALE/Pnog-v5")


def test_a_missing_atari_package_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py", None)
    with pytest.raises(MissingExtraError, match=r"'ale_py' is not installed; .*samplebatch\[atari\]"):
        environment_factory("ALE/Pong-v5")
    with pytest.raises(MissingExtraError, match=r"samplebatch\[atari\]"):
        environment_factory("PongDeterministic-v4")


KINDS = {
    "CartPole-v1": "gymnasium",
    "gymnasium.envs.classic_control:MountainCar-v0": "gymnasium",
    "arena:vector_of_carts": "vector",
    "mpe2/simple_spread_v3": "parallel",
    "arena:Relay": "parallel",
    "mpe2.simple_spread_v3:env": "aec",
    "pettingzoo/classic/tictactoe_v3": "aec",
    "pettingzoo/classic/rps_v2": "parallel",
    "pettingzoo.classic.rps_v2:env": "aec",
}
if hasattr(pettingzoo, "make"):
    KINDS |= {"classic/tictactoe-v3": "aec", "classic/rps-v2": "parallel"}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_environment_is_created_by_name_in_any_process(name: str) -> None:
    restored = pickle.loads(pickle.dumps(environment_factory(name)))()
    assert environment_kind(restored) == KINDS[name]
    restored.close()


def test_a_function_must_create_an_environment() -> None:
    with pytest.raises(EnvironmentSpecError, match=r"'arena:not_an_environment' must create an env.*got a object"):
        make_environment("arena:not_an_environment")
    with pytest.raises(EnvironmentSpecError, match="not_an_environment must create"):
        make_environment(arena.not_an_environment)
    with pytest.raises(EnvironmentSpecError, match="got a type"):
        environment_kind(arena.Relay)


def test_known_environments_lists_names_that_can_be_created() -> None:
    names = known_environments()
    assert {"mpe2/simple_tag_v3", "pettingzoo/classic/connect_four_v3", "CartPole-v1"} <= set(names)
    assert len(names) == len(set(names))


def test_modules_that_cannot_be_imported_report_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "is_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentSpecError, match="requires the module 'a_module_that_is_not_there'"):
        environment_factory("needs_more:make")
    with pytest.raises(EnvironmentSpecError, match="got ZeroDivisionError") as caught:
        environment_factory("is_broken:make")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_missing_package_is_reported_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpe2", None)
    with pytest.raises(MissingExtraError, match=r"samplebatch\[envs\]"):
        environment_factory("mpe2/simple_spread_v3")
