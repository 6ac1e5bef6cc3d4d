"""The table of RLlib's public names is complete, and each row is correct."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import samplebatch
from tests.properties.rllib_modules import load

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[rllib]"),
    pytest.mark.filterwarnings("ignore"),
]

PAGE = Path(__file__).parents[1] / "docs" / "rllib-names.md"
MODULES = ("sample_batch", "view_requirement", "rnn_sequencing")
CLASSES = ("SampleBatch", "MultiAgentBatch", "ViewRequirement")
BUFFERS = ("ReplayBuffer", "PrioritizedReplayBuffer", "MultiAgentReplayBuffer", "StorageUnit", "ReplayMode")
"""Classes of `ray.rllib.utils.replay_buffers` whose own methods or members are on the page."""
EVERYWHERE = {"SampleBatch": dict, "MultiAgentBatch": object, "ViewRequirement": object}


def table() -> dict[str, str]:
    """Read the answer to each name on the page."""
    text = PAGE.read_text()
    section = text
    actual: dict[str, str] = {}
    for cells in re.findall(r"^\| (`.*?) \| (yes|differs|left out)\b.*\|$", section, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", cells[0]):
            assert name not in actual, f"{name} stands on the page twice"
            actual[name] = cells[1]
    return actual


def theirs() -> set[str]:
    """List the public names of RLlib's modules, and of their classes and instances."""
    modules = [load(f"ray.rllib.policy.{name}") for name in MODULES]
    names = {
        name
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.getmodule(value) is module and callable(value)
    }
    instances: dict[str, Any] = {
        "SampleBatch": modules[0].SampleBatch({}),
        "MultiAgentBatch": modules[0].MultiAgentBatch({}, 0),
        "ViewRequirement": modules[1].ViewRequirement(),
    }
    for kind, instance in instances.items():
        public_names = {name for name in dir(instance) if not name.startswith("_")}
        # Of a dict's names those count that RLlib gives a meaning of its own.
        inherited = {name for name in dir(EVERYWHERE[kind]) if name not in vars(type(instance))}
        names |= {f"{kind}.{name}" for name in public_names - inherited}
    buffers = importlib.import_module("ray.rllib.utils.replay_buffers")
    names |= set(buffers.__all__) - {"utils"} | {"ReplayBufferInterface"}
    for kind in BUFFERS:
        names |= {f"{kind}.{name}" for name in vars(getattr(buffers, kind)) if not name.startswith("_")}
    return names | {"DEFAULT_POLICY_ID"}


def ours(name: str) -> bool:
    """Return whether the library has a name."""
    kind, _, attribute = name.rpartition(".")
    if not kind:
        return hasattr(samplebatch, name)
    if kind in BUFFERS:
        return hasattr(getattr(samplebatch, kind, None), attribute)
    instance = {
        "SampleBatch": samplebatch.SampleBatch(),
        "MultiAgentBatch": samplebatch.MultiAgentBatch({}, 0),
        "ViewRequirement": samplebatch.ViewRequirement(),
    }[kind]
    return hasattr(instance, attribute)


def test_every_public_name_is_on_the_page() -> None:
    missing, removed = theirs() - table().keys(), table().keys() - theirs()
    assert not missing, f"say on the page what becomes of {sorted(missing)}"
    assert not removed, f"take off the page what RLlib does not have: {sorted(removed)}"


def test_the_page_agrees_with_the_library() -> None:
    wrong = {name: answer for name, answer in table().items() if ours(name) is (answer == "left out")}
    assert not wrong
