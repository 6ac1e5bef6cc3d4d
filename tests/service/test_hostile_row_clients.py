"""Invalid bytes for a table of rows raise an error with the reason, and other clients are served."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from samplebatch import SampleBatch
from samplebatch.service import ReplayServer, RowClient, RowTable

PATH = flight.FlightDescriptor.for_path("rows", "someone")
TAKE = {"ask": "take", "n": 1, "columns": ["ids"], "consumer": "trainer", "reader": "r", "number": 1, "timeout_s": 0}


@pytest.fixture
def raw() -> Iterator[Any]:
    table = RowTable("rows", 100, group="uid", version="version", length="ids", ragged={"ids": "int64"})
    with (
        ReplayServer([table], max_message_nbytes=1 << 16) as server,
        RowClient(server.uri, "rows") as rows,
        flight.connect(server.uri) as client,
    ):
        rows.put([1, 2], {"uid": [7, 7], "version": [0, 0], "ids": [[5, 6], [9]]})
        yield client
        assert rows.get([1, 2], columns=["ids"])["ids"].lengths.tolist() == [2, 1]
        assert len(rows) == 2
        rows.put([3], {"ids": [[4]], "uid": [8]})
        assert rows.take(3, columns=["ids"])["key"].tolist() == [1, 2, 3]


def put(raw: Any, rows: pa.RecordBatch, metadata: bytes = b'{"number": 1}') -> Any:
    writer, reader = raw.do_put(PATH, rows.schema)
    writer.write_with_metadata(rows, metadata)
    answer = reader.read()
    writer.close()
    return answer


def record(**columns: Any) -> pa.RecordBatch:
    batch: pa.RecordBatch = SampleBatch(columns).to_arrow().combine_chunks().to_batches()[0]
    return batch


def lists(offsets: list[int], count: int = 3, rows: int = 2) -> pa.Array:
    """Return lists whose offsets may be invalid."""
    buffers = [None, pa.py_buffer(np.array(offsets, np.int64))]
    return pa.Array.from_buffers(
        pa.large_list(pa.int64()), rows, buffers, children=[pa.array(range(count), pa.int64())]
    )


KEYS = pa.array([11, 12])
EMPTY = pa.Array.from_buffers(pa.list_(pa.int64(), 0), 10**9, [None], children=[pa.array([], pa.int64())])
BAD_ROWS = {
    "numbers in a ragged column": (record(ids=[1, 2]), "column 'ids' must be ragged of int64"),
    "keys alone": (pa.record_batch({"key": KEYS}), "column"),
    "fractions as keys": (record(key=[0.5, 1.5], x=[1, 2]), "keys must be integers or text"),
    "missing keys": (pa.record_batch({"key": pa.array([11, None]), "x": KEYS}), "null"),
    "missing text keys": (pa.record_batch({"key": pa.array(["a", None]), "x": KEYS}), "keys must be"),
    "lists as keys": (pa.record_batch({"key": lists([0, 1, 2]), "x": KEYS}), "keys must be"),
    "repeated keys": (record(key=[11, 11], x=[1, 2]), "keys must be unique, got 1 repeated"),
    "text keys in a table of integers": (record(key=["a", "b"], x=[1, 2]), "keys of a table must be all integers"),
    "a column that exists": (record(key=[1, 12], ids=[[3], [4, 4]]), "ids"),
    "another dtype": (record(key=[11, 12], ids=[[0.5], [1.5, 2.5]]), "ids"),
    "objects": (record(key=[11, 12], x=np.array([{1}, {2}], object)), "pickle"),
    "offsets that decrease": (pa.record_batch({"key": KEYS, "x": lists([0, 3, 1])}), "offset"),
    "rows without bytes": (
        pa.record_batch({"key": pa.nulls(10**6, pa.null()), "x": EMPTY.slice(0, 10**6)}),
        "rows in|null|key",
    ),
    "too many rows": (record(key=np.arange(101) + 10, x=np.zeros(101, "i1")), "at most 100 rows"),
    "too many bytes": (record(key=[11], x=np.zeros((1, 9000))), "at most 65536 bytes"),
    "groups of fractions": (record(key=[11], uid=[0.5]), "uid"),
    "a long name": (record(key=[11], **{"n" * 300: [1]}), "256 bytes"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_invalid_rows_are_rejected_and_store_nothing(raw: Any, case: str) -> None:
    rows, why = BAD_ROWS[case]
    with pytest.raises((flight.FlightError, pa.ArrowException), match=why) as caught:
        put(raw, rows)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (b"\xff\x00", "JSON object"),
        (b'{"number": -1}', "number must be a whole number"),
        (b'{"number": 1, "update": 7}', "update must be"),
        (b'{"number": 1, "timeout_s": -1}', "timeout_s must be a number"),
        (b'{"number": 1, "key": "k"}', "key must not be passed with rows"),
        (b'{"number": 1, "priority": 1.0}', "priority must not be passed with rows"),
        (b'{"number": 1, "batch": "{}"}', "metadata of the batch"),
    ],
)
def test_invalid_metadata_is_rejected(raw: Any, metadata: bytes, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        put(raw, record(key=[11], x=[1]), metadata)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (b"\xff", "JSON object"),
        (b"[]", "JSON object"),
        ({}, "use a RowClient"),
        ({"ask": "tke"}, "must be a known action, got 'tke'"),
        ({"ask": ["take"]}, "must be a known action"),
        ({"ask": {}}, "must be a known action"),
        ({**TAKE, "n": 0}, "n must be a whole number from 1"),
        ({**TAKE, "n": 1e3}, "n must be a whole number from 1"),
        ({**TAKE, "n": 1 << 40}, "n must be at most 65536 rows"),
        ({**TAKE, "columns": "ids"}, "columns must be a list of names"),
        ({**TAKE, "columns": [1]}, "column"),
        ({**TAKE, "columns": [[]]}, "column"),
        ({**TAKE, "columns": []}, "columns must be one or more unique names"),
        ({**TAKE, "columns": ["ids", "ids"]}, "columns must be one or more unique names"),
        ({**TAKE, "columns": ["nothing"]}, "1 lack 'nothing'|lack 'nothing'"),
        ({**TAKE, "consumer": "judge"}, "consumer"),
        ({**TAKE, "consumer": None}, "consumer"),
        ({**TAKE, "reader": 5}, "reader must be a string"),
        ({**TAKE, "number": -1}, "number. must be an integer from 1"),
        ({**TAKE, "number": "x"}, "number. must be an integer from 1"),
        ({**TAKE, "timeout_s": -1}, "timeout_s must be a number from 0"),
        ({**TAKE, "timeout_s": "x"}, "timeout_s must be a number from 0"),
        ({**TAKE, "by_group": 1}, "by_group must be true or false"),
        ({**TAKE, "max_tokens": -1}, "max_tokens must be a whole number from 1"),
        ({**TAKE, "max_lag": -1}, "max_lag must be a whole number from 0"),
        ({**TAKE, "at_least": 2}, "at_least must be at most n"),
        ({**TAKE, "x": 1}, "must have no entry 'x'"),
        ({"ask": "sample", "n": 1, "columns": ["ids"], "seed": -5, "timeout_s": 0}, "seed must be a whole number"),
        ({"ask": "sample", "n": 1, "columns": ["ids"], "seed": [], "timeout_s": 0}, "seed must be a whole number"),
        ({"ask": "wait", "count": -1}, "count must be a whole number"),
        ({"ask": "wait", "count": {}}, "count must be a whole number"),
        ({"ask": "wait", "count": 1, "columns": {"ids": 1}, "timeout_s": 0}, "columns must be a list"),
        ({"ask": "get", "columns": ["ids"]}, "must have keys, got none"),
        ({"ask": "remove"}, "must have keys, got none"),
        ({"ask": "reserve", "count": -1}, "count"),
        ({"ask": "reserve", "count": 1 << 62}, "count|keys"),
        ({"ask": "settle", "reader": "r"}, "must have a number"),
    ],
)
def test_invalid_requests_are_rejected_and_the_session_continues(raw: Any, request_: Any, why: str) -> None:
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b'{"table": "rows"}'))

    def ask(body: bytes) -> Any:
        writer.write_metadata(body)
        return reader.read_chunk().app_metadata.to_pybytes()

    body = request_ if isinstance(request_, bytes) else json.dumps(request_).encode()
    assert json.loads(ask(b'{"ask": "commit"}')) == {"committed": False}
    answer = json.loads(ask(body))
    assert answer["error"].endswith("Error"), answer
    assert re.search(why, answer["message"]), answer["message"]
    assert json.loads(ask(b'{"ask": "commit"}')) == {"committed": False}
    writer.close()
