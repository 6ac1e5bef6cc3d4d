"""Hostile peers cause an error of the library at the other end and never kill it."""

from __future__ import annotations

import json
from zlib import crc32

import numpy as np
import pytest

from samplebatch import SampleBatch, broadcast
from samplebatch.errors import FormatError
from samplebatch.transport import peers
from samplebatch.transport.broadcast import WEIGHTS
from samplebatch.transport.peers import ProcessIdentity, ProcessWatch
from samplebatch.transport.schema import Schema
from tests.fuzz.driver import CASES, fuzz


@pytest.mark.parametrize("target", ["MESSAGES", "ENDS", "BOARDS", "PARCELS"])
def test_messages_of_hostile_peers_are_rejected_or_valid(target: str) -> None:
    outcomes, faults = fuzz(f"tests.transport.hostile_peers:{target}", CASES // 4)
    assert not faults, "\n".join([str(dict(outcomes)), *faults])


@pytest.mark.parametrize("pid", [1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1])
def test_impossible_process_ids_count_as_dead(pid: int) -> None:
    identity = ProcessIdentity(pid, 0)
    assert not peers.is_alive(identity)
    assert not ProcessWatch(identity).is_alive()


@pytest.mark.parametrize(
    "structure", [None, 3, "ab", {"ab": None}, [["a"]], [["a", None, None]], [[3, None]], [["a", 3]], [["a", []]], []]
)
def test_nested_batches_have_a_name_for_each_value(structure: object) -> None:
    with pytest.raises(FormatError, match="a message's schema must describe its columns"):
        Schema.read({"kind": "Batch", "parts": [["", [["", "<f8", [], None, ""]], structure]]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("l", 3),
        ("l", [[["object"]]]),
        ("l", []),
        ("f", [[1, 2]]),
        ("f", []),
        ("r", [3, 3]),
        ("r", None),
        (WEIGHTS, 1),
    ],
)
def test_a_publication_that_contradicts_its_description_is_rejected(name: str, value: object) -> None:
    publisher, subscription = broadcast(1 << 16)
    with publisher, subscription:
        publisher.publish(SampleBatch(a=[1.0], infos=[{"a": 1}]))
        board = publisher._board
        content = board.content(1)
        assert content is not None
        head = json.dumps({**json.loads(content.head), name: value}).encode()
        start = content.values.ctypes.data - board._memory.ctypes.data + (content.values.nbytes + 63) // 64 * 64
        board._memory[start : start + len(head)] = np.frombuffer(head, np.uint8)
        ours = board._word(1)
        board._words[ours + 2], board._words[ours + 3] = len(head), crc32(head)
        with pytest.raises(FormatError):
            subscription.latest(timeout_s=1)
