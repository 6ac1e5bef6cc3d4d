"""Test suites for authors of collectors and environment adapters, and the test environments.

A contract, such as `CollectorContract`, is a class whose methods are tests. To use a contract, derive a class from the
contract and implement the abstract methods. The package `samplebatch.testing` does not require pytest; the test
environments require the extra `envs`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.testing.collector_contract import CollectorContract as CollectorContract
    from samplebatch.testing.environments import check_steps as check_steps
    from samplebatch.testing.multi_agent_contract import MultiAgentContract as MultiAgentContract

__getattr__, __dir__, __all__ = exports(__name__)
