"""Fragments of a form that came before are encoded and decoded without Arrow, and are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import Batch, SampleBatch
from samplebatch.service.fragments import _MAX_FORMS, FragmentDecoder, FragmentEncoder, as_record_batch, fragment_rows
from tests.service.table_rows import lengthened

RNG = np.random.default_rng(5)


def flat(rows: int) -> Any:
    return SampleBatch(obs=RNG.random((rows, 3)), rewards=RNG.random(rows), terminateds=np.zeros(rows, bool))


def nested(rows: int) -> Any:
    return Batch(obs={"camera": RNG.integers(0, 9, (rows, 2, 2)), "arm": RNG.random(rows)}, rew=RNG.random(rows))


def with_objects(rows: int) -> Any:
    return SampleBatch(obs=RNG.random(rows), infos=np.array([{"lives": row} for row in range(rows)], object))


@pytest.mark.parametrize("make", [flat, nested, with_objects])
def test_fragments_are_restored_exactly(make: Any) -> None:
    encoder, decoder = FragmentEncoder(), FragmentDecoder()
    for count in (3, 3, 7, 1):
        fragment = make(count)
        rows = encoder.encode(fragment)
        assert rows.equals(as_record_batch(fragment_rows(fragment).to_arrow()), check_metadata=True)
        rows.validate(full=True)
        assert decoder.nbytes_of(rows) == rows.nbytes
        assert decoder.decode(rows, None) == fragment_rows(fragment)


def test_alternating_layouts_are_distinguished_and_bounded() -> None:
    encoder = FragmentEncoder()
    makers = [lambda: SampleBatch({"obs.x": np.zeros(2)}), lambda: SampleBatch({"obs": {"x": np.zeros(2)}})]
    for turn in range(6):
        fragment = makers[turn % 2]()
        assert SampleBatch.from_arrow(encoder.encode(fragment)).column_names == fragment.column_names
    for width in range(3 * _MAX_FORMS):
        assert encoder.encode({"obs": np.zeros((2, width + 1))}).num_rows == 2
    assert len(encoder._forms) == _MAX_FORMS


def test_a_description_in_the_batch_overrides_the_cached_one() -> None:
    decoder = FragmentDecoder()
    rows = FragmentEncoder().encode(SampleBatch({"obs": {"x": np.zeros(2)}}))
    other = FragmentEncoder().encode(SampleBatch({"obs.x": np.zeros(2)}))
    assert decoder.decode(rows, None)["obs"]["x"].tolist() == [0.0, 0.0]
    text = other.schema.metadata[b"samplebatch"].decode()
    assert decoder.decode(rows, text)._nested == SampleBatch({"obs.x": np.zeros(2)})._nested
    assert decoder.decode(rows, None)["obs"]["x"].tolist() == [0.0, 0.0]


def test_columns_that_share_one_buffer_are_counted_separately() -> None:
    decoder = FragmentDecoder()
    columns = [pa.array(np.arange(5.0))] * 3
    rows = pa.RecordBatch.from_arrays(columns, schema=pa.schema([pa.field(name, pa.float64()) for name in "abc"]))
    assert decoder.nbytes_of(rows) == 120
    decoder.decode(rows, None)
    assert decoder.nbytes_of(rows) == 120


def test_a_fragment_with_too_few_bytes_is_rejected_after_complete_ones() -> None:
    decoder = FragmentDecoder()
    rows = FragmentEncoder().encode({"obs": np.arange(321)})
    decoder.decode(rows, None)
    with pytest.raises(pa.ArrowInvalid):
        decoder.decode(lengthened(rows), None)
