"""Contracts for authors of collectors and environment adapters: suites of tests, and the environments they use.

A contract is a class whose methods are tests. Derive from it, say how to collect, and let pytest find it. Nothing here
needs pytest; the environments need the extra `envs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.testing.collector_contract import CollectorContract as CollectorContract
    from samplebatch.testing.multi_agent_contract import MultiAgentContract as MultiAgentContract
    from samplebatch.testing.steps import check_steps as check_steps

__getattr__, __dir__, __all__ = exports(__name__)
