"""Environments by name, and what is said when there is none."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import arena
import pytest

from samplebatch.errors import EnvironmentSpecError, MissingExtraError
from samplebatch.rollout.environments import (
    agent_positions,
    environment_factory,
    kind_of,
    make_environment,
    policy_by_kind,
)


@pytest.mark.parametrize(
    "name", ["mpe2/simple_spread_v3", "mpe2.simple_spread_v3", "mpe2.simple_spread_v3:parallel_env"]
)
def test_pettingzoo_environments_by_name(name: str) -> None:
    environment = make_environment(name)
    observations, _ = environment.reset(seed=1)
    assert list(observations) == ["agent_0", "agent_1", "agent_2"]
    assert agent_positions(environment) == {"agent_0": 0, "agent_1": 1, "agent_2": 2}
    environment.close()


def test_any_function_makes_an_environment() -> None:
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
        ("CartPole-v1", "'package/module' or 'module:function', got 'CartPole-v1'"),
        ("", "'package/module' or 'module:function', got ''"),
        ("/", "'package/module' or 'module:function'"),
        ("mpe2/", "'package/module' or 'module:function'"),
        ("../arena:Relay", "'package/module' or 'module:function'"),
        ("arena:Rellay", "no function 'Rellay' in module 'arena'; did you mean 'Relay'"),
        ("areena:Relay", "no environment 'areena:Relay'"),
        ("email/message", "must have a function parallel_env"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(name: str, words: str) -> None:
    with pytest.raises(EnvironmentSpecError, match=words):
        environment_factory(name)


def test_what_is_made_must_be_a_parallel_environment() -> None:
    with pytest.raises(EnvironmentSpecError, match="'arena:not_an_environment' must make a PettingZoo parallel"):
        make_environment("arena:not_an_environment")
    with pytest.raises(EnvironmentSpecError, match="agents act together"):
        make_environment("mpe2.simple_spread_v3:env")
    with pytest.raises(EnvironmentSpecError, match="not_an_environment must make"):
        make_environment(arena.not_an_environment)


def test_modules_that_cannot_be_imported_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "is_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EnvironmentSpecError, match="needs the module 'a_module_that_is_not_there'"):
        environment_factory("needs_more:make")
    with pytest.raises(EnvironmentSpecError, match="raised ZeroDivisionError") as caught:
        environment_factory("is_broken:make")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpe2", None)
    with pytest.raises(MissingExtraError, match=r"samplebatch\[envs\]"):
        environment_factory("mpe2/simple_spread_v3")


def test_agents_of_one_kind_share_a_policy_unless_their_spaces_differ() -> None:
    mapping = pickle.loads(pickle.dumps(policy_by_kind(arena.Mixed())))
    assert [mapping(agent) for agent in arena.Mixed.possible_agents] == ["robot_0", "robot_1", "lamp", "lamp"]
    assert [kind_of(agent) for agent in ("agent", "first_0", 7, "7", "team_1_agent_22", "a1b")] == [
        "agent",
        "first",
        "agent",
        "7",
        "team_1_agent",
        "a1b",
    ]
