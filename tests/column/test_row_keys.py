from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samplebatch.column.interface import resolve
from samplebatch.errors import RowIndexError


@st.composite
def keys(draw):
    n = draw(st.integers(0, 9))
    row = st.integers(-n, n - 1)
    kinds = [st.slices(n), st.lists(st.booleans(), min_size=n, max_size=n).map(lambda bits: np.array(bits, bool))]
    if n:
        kinds += [row, row.map(np.int8), st.lists(row, max_size=6), st.lists(row, min_size=1).map(np.array)]
    return n, draw(st.one_of(kinds))


@given(keys())
def test_resolves_to_what_numpy_selects(result):
    n, key = result
    values = np.arange(n) * 10
    expected = values[np.array(key, np.intp) if isinstance(key, list) else key]
    actual = resolve(key, n)
    if isinstance(actual, tuple):
        start, stop = actual
        assert 0 <= start <= stop <= n
        assert values[start:stop].tolist() == expected.tolist()
    elif isinstance(actual, int):
        assert 0 <= actual < n
        assert values[actual] == expected
    else:
        assert actual.dtype == np.intp
        assert values[actual].tolist() == expected.tolist()


@pytest.mark.parametrize("key", [5, -6, [0, 5], np.array([-6]), np.uint8(200), 2**70])
def test_the_error_contains_rows_out_of_range(key):
    first = key if np.ndim(key) == 0 else key[-1]
    with pytest.raises(RowIndexError, match=rf"row {first} must be in \[-5, 5\)"):
        resolve(key, 5)


@pytest.mark.parametrize("key", [[0, 4, 2], [-5, 4], [-1]])
def test_the_indices_are_a_copy(key):
    original = np.array(key)
    actual = resolve(original, 5)
    assert actual.tolist() == [row % 5 for row in key]
    assert not np.shares_memory(actual, original)
    with pytest.raises(RowIndexError, match=r"row 5 must be in \[-5, 5\)"):
        resolve(np.array([*key, 5]), 5)


@pytest.mark.parametrize("key", [None, "a", 1.0, [0.5], [[1]], True, {"a": 1}, [True] * 4, np.zeros((5, 1), bool)])
def test_unsupported_keys_are_rejected(key):
    with pytest.raises(RowIndexError):
        resolve(key, 5)
