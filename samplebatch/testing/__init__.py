"""Contracts for whoever writes a collector or an environment adapter: suites of tests, and the environments they use.

A contract is a class whose methods are tests. Derive from it, say how to collect, and let pytest find it. Nothing here
needs pytest; the environments need the extra `envs`.
"""

from samplebatch.testing.collector_contract import CollectorContract, check_ladder
from samplebatch.testing.environments import Market, Relay, RungError, ladder, walk
from samplebatch.testing.multi_agent_contract import MultiAgentContract, check_market, check_relay, play_by_the_book
from samplebatch.testing.steps import check_steps

__all__ = [
    "CollectorContract",
    "Market",
    "MultiAgentContract",
    "Relay",
    "RungError",
    "check_ladder",
    "check_market",
    "check_relay",
    "check_steps",
    "ladder",
    "play_by_the_book",
    "walk",
]
