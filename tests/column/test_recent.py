"""`Recent` caches the latest values, up to its limit."""

from __future__ import annotations

import pytest

from samplebatch.column.arrow import Recent


def test_a_value_is_created_once_and_the_oldest_is_evicted() -> None:
    recent = Recent[str, int](limit=2)
    created: list[str] = []

    def get(key: str) -> int:
        return recent.get(key, lambda: (created.append(key), len(created))[1])

    assert [get(key) for key in "abab"] == [1, 2, 1, 2]
    assert [get(key) for key in "cba"] == [3, 2, 4]
    assert len(recent) == 2


def test_a_failure_is_not_cached() -> None:
    recent = Recent[str, int](limit=2)
    with pytest.raises(ZeroDivisionError):
        recent.get("a", lambda: 1 // 0)
    assert recent.get("a", lambda: 3) == 3


def test_none_is_cached() -> None:
    recent = Recent[str, int | None](limit=2)
    assert recent.get("a", lambda: None) is None
    assert recent.get("a", lambda: 3) is None
