"""All targets of fuzzing, by their names; a target's module is only imported in the process that reads its cases."""

from __future__ import annotations

from tests.fuzz import foreign, formats

TARGETS = formats.TARGETS | foreign.TARGETS | {"REPLAY_SERVICE": "tests.fuzz.wire:REPLAY_SERVICE"}

NEEDS = {"REPLAY_SERVICE": "grpc"}
"""The package that a target needs beyond those that all need."""
