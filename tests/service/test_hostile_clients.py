"""Whatever a client sends, it gets a Flight error that says why, and the service serves the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from samplebatch import SampleBatch
from samplebatch.errors import CapacityError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.fragment_forms import FragmentEncoder
from samplebatch.service.samples import read_stream, write_stream
from samplebatch.service.weights import pack_weights
from tests.service.table_rows import episode

PATH = flight.FlightDescriptor.for_path("replay", "someone")
ROWS = FragmentEncoder().encode(episode(0, range(8)))


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    tables = [ReplayTable("replay", capacity=100), ReplayTable("queue", kind="fifo", capacity=10, max_times_sampled=1)]
    with ReplayServer(tables, max_message_nbytes=1 << 16) as server, ReplayClient(server.uri, "replay") as client:
        client.extend(episode(0, range(8)))
        client.flush()
        yield server
        # Whoever behaves is served.
        client.reset()
        client.extend(episode(1, range(8)))
        assert len(client) == 8
        assert client.sample(4)[1].shape == (4,)


@pytest.fixture
def raw(server: ReplayServer) -> Iterator[Any]:
    client = flight.connect(server.uri)
    yield client
    client.close()


def get(raw: Any, ticket: bytes) -> Any:
    return raw.do_get(flight.Ticket(ticket)).read_chunk()


def put(raw: Any, rows: pa.RecordBatch, metadata: bytes | None = None, path: Any = PATH) -> bytes:
    writer, reader = raw.do_put(path, rows.schema)
    if metadata is None:
        writer.write_batch(rows)
    else:
        writer.write_with_metadata(rows, metadata)
    answer = reader.read()
    if answer is None:
        writer.close()
    writer.close()
    return answer.to_pybytes()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ticket", "why"),
    [
        (b"", "must be a JSON object"),
        (b"\xff\x00", "must be a JSON object"),
        (b"[" * 100_000, "must be a JSON object"),
        (b"[1]", "must be a JSON object"),
        (b" " * (1 << 20) + b"{}", "at most 1048576 bytes"),
        (b"{}", "must name a table"),
        (b'{"table": 7}', "table must be a string"),
        (b'{"table": null}', "table must be a string"),
        (b'{"table": "replai"}', "did you mean 'replay'"),
        (b'{"table": "replay", "batch_size": 0}', "batch_size must be a whole number from 1"),
        (b'{"table": "replay", "batch_size": 1e3}', "batch_size must be a whole number from 1"),
        (b'{"table": "replay", "batch_size": null}', "batch_size must be a whole number from 1"),
        (b'{"table": "replay", "batch_size": 1000000000}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "batch_size": 1100}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "mode": "sequences", "length": 1000000000}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "mode": "sequences"}', "length must be given"),
        (b'{"table": "replay", "mode": "stacks"}', "mode must be one of"),
        (b'{"table": "replay", "mode": "fragments"}', "mode must be one of a table of steps"),
        (b'{"table": "replay", "batchsize": 1}', "did you mean 'batch_size'"),
        (b'{"table": "replay", "n_step": -1}', "n_step must be a whole number from 1"),
        (b'{"table": "replay", "n_step": 9223372036854775808}', "whole numbers of 64 bits, one has 19 digits"),
        (b'{"table": "replay", "timeout_s": 1%s}' % (b"0" * 4000), "whole numbers of 64 bits, one has 4001 digits"),
        (b'{"table": "%s"}' % (b"t" * 257), "table must have at most 256 bytes"),
        (b'{"table": "queue", "key": "%s"}' % (b"k" * 257), "key must have at most 256 bytes"),
        (b'{"table": "\\ud800"}', "table must be text in UTF-8"),
        (b'{"table": "replay", "mode": "%s"}' % (b"m" * 100_000), "mode must be one of"),
        (b'{"table": "replay", "%s": 1}' % ("\u6f22".encode() * 100_000), "must have no entry"),
        (b'{"table": "replay", "gamma": NaN}', "gamma must be a number from 0 to 1"),
        (b'{"table": "replay", "timeout_s": -1}', "timeout_s must be a number above 0"),
        (b'{"table": "replay", "seed": -5}', "seed must be a whole number from 0"),
        (b'{"table": "replay", "seed": "x"}', "seed must be a whole number from 0"),
        (b'{"table": "replay", "padded": 1, "mode": "sequences", "length": 2}', "padded must be true or false"),
        (b'{"table": "queue", "batch_size": 11}', "batch_size must be at most 10"),
        (b'{"table": "queue", "timeout_s": 0.05}', "sampling needs 1 items, and there are 0"),
    ],
)
def test_bad_tickets(raw: Any, ticket: bytes, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        get(raw, ticket)
    assert "Traceback" not in str(caught.value)
    told = json.loads(caught.value.extra_info)
    assert told["error"].endswith("Error")


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (b"no JSON", "must be a JSON object"),
        (b'{"number": -1}', "number must be a whole number"),
        (b'{"number": null}', "number must be a whole number"),
        (b'{"key": 7}', "key must be a string"),
        (b'{"key": "k"}', "steps have no keys"),
        (b'{"priority": "high"}', "priority must be a number"),
        (b'{"priority": 1.0}', "steps have priorities in tables"),
        (b'{"batch": "{}"}', "not that of a batch"),
        (b'{"batch": "nonsense"}', "not that of a batch"),
        (b'{"writer": "me"}', "must have no entry 'writer'"),
    ],
)
def test_bad_metadata_of_fragments(raw: Any, metadata: bytes, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why):
        put(raw, ROWS, metadata)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (pa.record_batch({"x": [1, 2]}), "must have"),
        (pa.record_batch({"obs": [1, None], "actions": [1, 2], "rewards": [0.0, 1.0]}), "must have no nulls"),
        (pa.record_batch({"obs": [1.0, 2.0], "rewards": [0.0, 1.0]}), "'act'"),
        (FragmentEncoder().encode(SampleBatch(obs=np.zeros((8, 9, 1000)))), "at most 65536 bytes"),
        (FragmentEncoder().encode(episode(0, range(101))), "at most 100 steps"),
        (FragmentEncoder().encode(SampleBatch(obs=[1, 2], infos=np.array([{1, 2}, {"a": 1}], object))), "pickle"),
        (FragmentEncoder().encode(SampleBatch(obs=[[1], [2]], priority=[1.0, 2.0])), "priorit"),
        (ROWS.replace_schema_metadata({b"samplebatch": b'{"version": 99}'}), "version 99"),
        (ROWS.replace_schema_metadata({b"samplebatch": b'{"version": 1, "type": "MultiAgentBatch"}'}), "not whole"),
    ],
)
def test_bad_fragments(raw: Any, rows: pa.RecordBatch, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        put(raw, rows)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    "path", [flight.FlightDescriptor.for_path(), flight.FlightDescriptor.for_path("a", "b", "c", "d"),
             flight.FlightDescriptor.for_command(b"{}"), flight.FlightDescriptor.for_path("nowhere")],
    ids=["none", "long", "command", "unknown"],
)  # fmt: skip
def test_bad_paths(raw: Any, path: Any) -> None:
    with pytest.raises(flight.FlightError, match=r"a path must be a table|there are 'replay', 'queue'"):
        put(raw, ROWS, path=path)
    with pytest.raises(flight.FlightError):
        raw.get_flight_info(path)
    # Flight itself turns the errors of this call into others.
    with pytest.raises(pa.ArrowException, match=r"a path must be a table|there are 'replay', 'queue'"):
        raw.get_schema(path)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (["replay" * 1000], "table must have at most 256 bytes in UTF-8, got 6000"),
        (["replay", "w" * 3_000_000], "writer must have at most 256 bytes in UTF-8, got 3000000"),
        (["replay", "", "\u6f22" * 86], "stream must have at most 256 bytes in UTF-8, got 258"),
    ],
)
def test_names_that_a_service_does_not_keep(raw: Any, path: list[str], why: str) -> None:
    with pytest.raises(flight.FlightError, match=why):
        put(raw, ROWS, path=flight.FlightDescriptor.for_path(*path))
    longest = flight.FlightDescriptor.for_path("replay", "w" * 256, "\u6f22" * 85)
    assert json.loads(put(raw, ROWS, b'{"number": 1}', longest))["inserted"] == 8


@pytest.mark.parametrize(
    ("action", "body", "why"),
    [
        ("explode", b"", "there is no action 'explode'"),
        ("info", b"[]", "must be a JSON object"),
        ("info", b'{"table": "x"}', "table must be one of"),
        ("info", b'{"tables": "x"}', "must have no entry"),
        ("reset", b"", "table must be a string"),
        ("checkpoint", b"", "must have a folder"),
        ("limits", b'{"table": "replay", "min_sise": 3}', "did you mean 'min_size'"),
        ("limits", b'{"table": "replay", "min_size": 1000}', "min_size must be at most"),
        ("limits", b'{"table": "replay", "min_size": {}}', "min_size must be"),
        ("update_weight", b'{"table": "replay"}', "one is missing"),
        ("update_weight", b'{"table": "replay", "indices": [1], "priorities": [1]}', "kind 'prioritized' only"),
        ("update_weight", b'{"table": "replay", "indices": [[1], 2], "priorities": [1]}', "lists of numbers"),
        ("update_weight", b'{"table": "replay", "indices": ["a"], "priorities": [1]}', "lists of numbers"),
        ("publish", b"", "must come as an Arrow stream"),
        ("publish", b"\x80\x04K\x01.", "must come as an Arrow stream"),
        ("publish", bytes(1 << 17), "at most 65536 bytes"),
        ("latest", b'{"name": 5}', "name must be a string"),
        ("latest", b'{"newer_than": "x"}', "newer_than must be a whole number"),
        ("acknowledged", b'{"table": "replay", "writer": 5}', "writer must be a string"),
        ("acknowledged", b'{"table": "replay", "stream": "%s"}' % (b"s" * 257), "stream must have at most 256 bytes"),
        ("latest", b'{"name": "%s"}' % (b"n" * 257), "name must have at most 256 bytes"),
        ("publish", pack_weights({"w": np.zeros(2)}, "n" * 257).to_pybytes(), "name must have at most 256 bytes"),
        ("update_weight", b'{"table": "replay", "indices": [18446744073709551615]}', "whole numbers of 64 bits"),
        ("a" * 100_000, b"", "there is no action 'aaa"),
    ],
)
def test_bad_actions(raw: Any, action: str, body: bytes, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        list(raw.do_action(flight.Action(action, body)))
    assert "Traceback" not in str(caught.value)


def damaged(raw: bytes, old: bytes, new: bytes) -> pa.RecordBatch:
    """Change bytes of an Arrow stream, and read its record batch."""
    assert raw.count(old) == 1
    return read_stream(raw.replace(old, new))


def test_names_that_are_no_text(raw: Any) -> None:
    rows = damaged(write_stream(ROWS), b"rewards", b"reward\xc3")
    with pytest.raises(flight.FlightServerError, match="must have names in UTF-8"):
        put(raw, rows)


def test_a_schema_that_lacks_parts(raw: Any) -> None:
    weights = bytearray(pack_weights({"w": np.zeros(2)}, "net").to_pybytes())
    refused = []
    # The table of a field begins with how far its own layout lies before it.
    for place in range(8, 400):
        body = bytes([*weights[:place], 0, *weights[place + 1 :]])
        try:
            list(raw.do_action(flight.Action("publish", body)))
        except flight.FlightServerError as error:
            refused.append(str(error))
    assert refused
    assert not [sentence for sentence in refused if "the service failed with" in sentence]


def test_a_session_goes_on_after_what_it_cannot_do(raw: Any) -> None:
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b'{"table": "replay", "batch_size": 2}'))
    writer.begin(pa.schema([("x", pa.int64())]))
    writer.write_batch(pa.record_batch({"x": [1]}))
    told = json.loads(reader.read_chunk().app_metadata.to_pybytes())
    assert (told["error"], told["of"]) == ("ColumnNotFoundError", "update")
    for request, error in (
        (b"nonsense", "FormatError"),
        (b'{"cuont": 2}', "FormatError"),
        (b'{"count": 0}', "ArgumentError"),
        (b'{"count": 1025}', "ArgumentError"),
    ):
        writer.write_metadata(request)
        told = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        assert (told["error"], told["of"]) == (error, "sample")
    writer.write_metadata(b"{}")
    assert reader.read_chunk().data.num_rows == 2
    reader.cancel()


@pytest.mark.parametrize("guess", ["0" * 64, "", "\u00e9" * 64])
def test_a_secret_that_is_guessed_shares_no_memory(raw: Any, guess: str) -> None:
    command = json.dumps({"table": "replay", "batch_size": 2, "nonce": guess}).encode()
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
    writer.write_metadata(b"{}")
    assert reader.read_chunk().data.num_rows == 2
    reader.cancel()


def test_streams_that_are_closed_half_way(raw: Any) -> None:
    writer, reader = raw.do_put(PATH, ROWS.schema)
    writer.done_writing()
    assert reader.read() is None
    writer.close()
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b'{"table": "replay"}'))
    writer.done_writing()
    with pytest.raises(StopIteration):
        reader.read_chunk()
    for descriptor in (b"", b"nonsense"):
        writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(descriptor))
        with pytest.raises(flight.FlightError, match="must be a JSON object"):
            reader.read_chunk()
    reader = raw.do_get(flight.Ticket(b'{"table": "replay"}'))
    reader.read_chunk()
    reader.cancel()
    del reader


def test_acknowledgements_that_nobody_reads_hold_back_their_writer_alone(raw: Any) -> None:
    writer, _ = raw.do_put(PATH, ROWS.schema)
    for _ in range(200):
        writer.write_batch(ROWS)
    assert list(raw.do_action(flight.Action("info", b"")))


def test_a_client_too_is_told_what_is_too_large(server: ReplayServer) -> None:
    with ReplayClient(server.uri, "replay") as client:
        with pytest.raises(CapacityError, match="a sample must have at most 65536 bytes"):
            client.sample(10_000)
        with pytest.raises(CapacityError, match="weights must have at most 65536 bytes"):
            client.publish({"w": np.zeros(1 << 16)})
        client.extend(SampleBatch(obs=np.zeros((8, 9, 1000))))
        with pytest.raises(CapacityError, match="a fragment must have at most 65536 bytes"):
            client.flush()
