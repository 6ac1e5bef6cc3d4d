"""Messages of all exceptions: short messages are shown unchanged, and the middle of long messages is omitted."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from samplebatch import SampleBatch, errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SampleBatchError)]


@pytest.mark.parametrize("kind", KINDS)
def test_long_messages_are_shortened(kind: Any) -> None:
    assert str(kind("no column 'x'")) == "no column 'x'"
    assert str(kind("x" * 10_000)) == "x" * 10_000
    error = kind("first " + "x" * 1_000_000 + " last")
    message = str(error)
    assert message.startswith("first x")
    assert message.endswith("x last")
    assert "[... 990011 characters omitted ...]" in message
    assert len(message) < 10_100
    assert str(pickle.loads(pickle.dumps(error))) == message


def test_a_long_column_name_does_not_fill_the_terminal() -> None:
    name = "x" * 1_000_000
    with pytest.raises(errors.ColumnLengthError) as caught:
        SampleBatch({"obs": [1, 2], name: [1]})
    assert str(caught.value).startswith("column 'xxx")
    assert str(caught.value).endswith("must have 2 rows as 'obs' has, got 1")
    assert len(str(caught.value)) < 10_100


def test_errors_of_the_operating_system_show_their_number_and_path() -> None:
    error = errors.StorageError(28, "No space left on device", "steps.arrow")
    assert str(error) == "[Errno 28] No space left on device: 'steps.arrow'"
