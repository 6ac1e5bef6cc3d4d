"""Share among all tests how hard Hypothesis searches, how unequal batches are shown, and where environments lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

from samplebatch import SampleBatch

# Worker processes import the environments of tests by name.
sys.path.insert(0, str(Path(__file__).parent / "rollout"))

settings.register_profile("local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, max_examples=100, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Show both batches: pytest would compare them as mappings, array by array, and fail."""
    if op == "==" and isinstance(left, SampleBatch) and isinstance(right, SampleBatch):
        return ["the batches differ", *str(left).splitlines(), *str(right).splitlines()]
    return None
