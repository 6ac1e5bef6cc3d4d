"""The page of TorchRL's names mentions every public name of its replay buffers, and each row is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import samplebatch

pytest.importorskip("torchrl")

PAGE = Path(__file__).parents[2] / "docs" / "torchrl-names.md"


def table() -> dict[str, str]:
    actual: dict[str, str] = {}
    for names, verdict in re.findall(r"^\| (`.*?) \| (yes|differs|left out)\b.*\|$", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in actual, f"{name} is on the page twice"
            actual[name] = verdict
    return actual


def theirs() -> set[str]:
    import torchrl.data.replay_buffers as buffers

    methods = {name for name in dir(buffers.ReplayBuffer) if not name.startswith("_")}
    return set(buffers.__all__) | {f"ReplayBuffer.{name}" for name in methods}


@pytest.mark.filterwarnings("ignore")
def test_every_public_name_is_on_the_page() -> None:
    missing, unknown = theirs() - table().keys(), table().keys() - theirs()
    assert not missing, f"not mentioned: {sorted(missing)}"
    assert not unknown, f"not in TorchRL: {sorted(unknown)}"


def test_the_page_agrees_with_the_library() -> None:
    for name, verdict in table().items():
        owner, _, attribute = name.rpartition(".")
        here = hasattr(samplebatch.ReplayBuffer, attribute) if owner else name in samplebatch.__all__
        assert here != (verdict == "left out"), name
