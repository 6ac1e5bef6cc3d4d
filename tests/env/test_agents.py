"""Agents of one kind share a policy."""

from __future__ import annotations

import pickle

import arena

from samplebatch.env.agents import kind_of, policy_by_kind


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
