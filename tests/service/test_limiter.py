"""Rate limits: how far inserts and samples of a table may run ahead of each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch.errors import ArgumentError
from samplebatch.service import RateLimiter

RATIOS = st.sampled_from([0.1, 0.5, 1.0, 2.0, 8.0])
OPERATIONS = st.lists(st.tuples(st.sampled_from(["insert", "sample"]), st.integers(1, 40)), max_size=60)


@given(OPERATIONS, RATIOS, st.integers(1, 20), st.floats(1.0, 4.0))
def test_requests_are_admitted_like_the_first_item_in_reverb(
    operations: list[tuple[str, int]], ratio: float, min_size: int, slack: float
) -> None:
    buffer = slack * max(1.0, ratio)
    limiter = RateLimiter(min_size, samples_per_insert=ratio, error_buffer=buffer)
    inserted = sampled = 0
    for action, n in operations:
        # The rule of Reverb's SampleToInsertRatio, for the first item of a request.
        offset = ratio * min_size
        if action == "insert":
            admitted = inserted < min_size or (inserted + 1) * ratio - sampled <= offset + buffer + 1e-9
            assert (limiter.why_not_insert(inserted) == "") == admitted
            if admitted:
                limiter.count_inserts(n)
                inserted += n
        else:
            admitted = inserted >= min_size and inserted * ratio - sampled - 1 >= offset - buffer - 1e-9
            assert (limiter.why_not_sample(inserted) == "") == admitted
            if admitted:
                limiter.count_samples(n)
                sampled += n
        assert not (limiter.why_not_insert(inserted) and limiter.why_not_sample(inserted)), "both sides wait"
    assert (limiter.inserted, limiter.sampled) == (inserted, sampled)


def test_without_a_ratio_only_the_minimum_size_blocks() -> None:
    limiter = RateLimiter(3)
    limiter.count_samples(1_000_000)
    assert limiter.why_not_sample(2) == "sampling requires 3 items, and there are 2"
    assert not limiter.why_not_sample(3)
    assert not limiter.why_not_insert(1_000)


def test_a_new_ratio_counts_from_the_change() -> None:
    limiter = RateLimiter(2, samples_per_insert=1.0, error_buffer=2.0)
    limiter.count_inserts(1000)
    limiter.set_limits(1000, {"samples_per_insert": 4.0})
    assert (limiter.samples_per_insert, limiter.error_buffer) == (4.0, 8.0)
    assert not limiter.why_not_insert(1000)
    limiter.count_inserts(2)
    assert limiter.why_not_insert(1002) == "samples are 8 behind, with a limit of 8: 0 were drawn for 1002 inserts"
    limiter.count_samples(16)
    assert limiter.why_not_sample(1002) == "samples are 8 ahead, with a limit of 8: 16 were drawn for 1002 inserts"


def test_a_new_error_buffer_does_not_reset_the_count() -> None:
    limiter = RateLimiter(1, samples_per_insert=1.0, error_buffer=2.0)
    limiter.count_inserts(11)
    limiter.set_limits(11, {"error_buffer": 20.0})
    assert not limiter.why_not_insert(11)
    limiter.set_limits(11, {"error_buffer": 10.0})
    assert limiter.why_not_insert(11)


def test_a_limiter_resumes_from_its_state() -> None:
    limiter = RateLimiter(2, samples_per_insert=0.5)
    limiter.count_inserts(7)
    limiter.set_limits(7, {"samples_per_insert": 2.0})
    limiter.count_inserts(2)
    again = RateLimiter.from_state_dict(limiter.state_dict())
    assert again.state_dict() == limiter.state_dict()
    assert again.why_not_insert(9) == limiter.why_not_insert(9) != ""


def test_a_reset_counts_from_the_beginning() -> None:
    limiter = RateLimiter(2, samples_per_insert=1.0, error_buffer=2.0)
    limiter.count_inserts(50)
    limiter.reset()
    assert limiter.state_dict() == RateLimiter(2, samples_per_insert=1.0, error_buffer=2.0).state_dict()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"min_size": 0}, "min_size must be a whole number from 1, got 0"),
        ({"min_size": 1.5}, "min_size must be a whole number from 1, got 1.5"),
        ({"samples_per_insert": 0}, "samples_per_insert must be a number above 0, got 0"),
        ({"samples_per_insert": "2"}, "samples_per_insert must be a number above 0, got '2'"),
        ({"error_buffer": 3}, "error_buffer must come with samples_per_insert, got none"),
        ({"samples_per_insert": 4, "error_buffer": 3}, "error_buffer must be at least 4, .* got 3"),
        ({"samples_per_insert": 0.5, "error_buffer": 0.9}, "error_buffer must be at least 1, .* got 0.9"),
        ({"samples_per_insert": float("inf")}, "must be finite, got inf; leave them out for no limit"),
        ({"samples_per_insert": 1, "error_buffer": float("inf")}, "must be finite, got inf"),
        ({"samples_per_insert": float("nan")}, "samples_per_insert must be a number above 0, got nan"),
    ],
)
def test_invalid_limits_are_rejected(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        RateLimiter(**limits)
    limiter = RateLimiter()
    before = limiter.state_dict()
    with pytest.raises(ArgumentError, match=message):
        limiter.set_limits(5, limits)
    assert limiter.state_dict() == before
