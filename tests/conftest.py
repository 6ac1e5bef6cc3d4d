"""What all tests share: how hard Hypothesis searches."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile("local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, max_examples=100, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
