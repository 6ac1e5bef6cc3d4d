"""A table remembers the last fragment of each stream of its writers, of so many streams and no more."""

from __future__ import annotations

import pytest

from samplebatch.errors import CapacityError, FormatError
from samplebatch.service import ReplayClient, protocol
from samplebatch.service.protocol import TakenNumbers


def test_the_least_recently_used_stream_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_STREAMS", 2)
    numbers = TakenNumbers()
    for stream, number in (("a", 1), ("b", 1), ("a", 2), ("c", 1)):
        numbers.note("actor", stream, number)
    assert numbers.state() == [["actor", "a", 2], ["actor", "c", 1]]


@pytest.mark.parametrize("state", [7, [["actor", "a"]], [["actor", "a", "x"]], [["actor", "a", -1]]])
def test_a_state_of_another_object_is_rejected(state: object) -> None:
    with pytest.raises(FormatError, match=r"must list \[writer, stream, number\] of each stream's last fragment"):
        TakenNumbers.from_state(state)


def test_a_client_name_that_is_too_long_is_rejected() -> None:
    with pytest.raises(CapacityError, match="writer must have at most 256 bytes in UTF-8, got 257"):
        ReplayClient("grpc://127.0.0.1:1", "replay", writer="w" * 257)
