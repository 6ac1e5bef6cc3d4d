"""Invalid messages of a client raise a Flight error with the reason, and other clients are served."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from samplebatch import Collector, MultiAgentBatch, SampleBatch
from samplebatch.errors import CapacityError, ColumnMismatchError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.fragments import FragmentEncoder
from samplebatch.service.samples import read_stream
from samplebatch.service.weights import MAX_ARRAYS, pack_weights
from tests.service.table_rows import episode, samples_in, write_stream

PATH = flight.FlightDescriptor.for_path("replay", "someone")
ROWS = FragmentEncoder().encode(episode(0, range(8)))


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    tables = [ReplayTable("replay", capacity=100), ReplayTable("queue", kind="queue", capacity=10)]
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


def weights_of(*rows: tuple[list[Any], str, list[Any], bytes | None], compression: str | None = None) -> bytes:
    """Encode weights with any paths, dtypes, shapes and bytes."""
    fitting = pack_weights({"w": np.zeros(2)}, "net")
    with pa.ipc.open_stream(fitting) as stream:
        schema = stream.schema
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)]
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


UNBUILDABLE = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4", "uint4", "bits8", "nn", "float32_")
BAD_WEIGHTS = {
    **{name: weights_of((["w"], f"torch.{name}", [4], bytes(4))) for name in UNBUILDABLE},
    "no elements of a quantized dtype": weights_of((["w"], "torch.qint8", [0], b"")),
    "objects": weights_of((["w"], "|O", [1], bytes(8))),
    "big-endian numbers": weights_of((["w"], ">f4", [1], bytes(4))),
    "strings of no bytes": weights_of((["w"], "|S0", [1 << 60], b"")),
    "bytes of another shape": weights_of((["w"], "<f4", [3], bytes(8))),
    "a negative extent": weights_of((["w"], "<f4", [-1, -2], bytes(8))),
    "an impossible shape": weights_of((["w"], "torch.float32", [0, 1 << 62, 1 << 62], b"")),
    "too many axes": weights_of((["w"], "|u1", [1] * 33, bytes(1))),
    "no path": weights_of(([], "|u1", [1], bytes(1))),
    "a deep path": weights_of((["w"] * 33, "|u1", [1], bytes(1))),
    "two arrays of one name": weights_of(*[(["w"], "|u1", [1], bytes(1))] * 2),
    "an array as a dict": weights_of((["w"], "|u1", [1], bytes(1)), (["w", "b"], "|u1", [1], bytes(1))),
    "a dict as an array": weights_of((["w", "b"], "|u1", [1], bytes(1)), (["w"], "|u1", [1], bytes(1))),
    "no name": weights_of(([None], "|u1", [1], bytes(1))),
    "no extent": weights_of((["w"], "|u1", [None], bytes(1))),
    "no bytes": weights_of((["w"], "|u1", [1], None)),
    "compressed bytes": weights_of((["w"], "|u1", [1 << 12], bytes(1 << 12)), compression="zstd"),
}
"""Weights that the service refuses, and a client of another service."""

READ_WEIGHTS = """
import json
import os
import sys

from tests.optional import torch

from samplebatch.errors import FormatError
from samplebatch.service.weights import unpack_weights

for name, raw in json.load(sys.stdin).items():
    child = os.fork()
    if not child:
        try:
            print(unpack_weights(bytes.fromhex(raw))[1]["w"].ravel()[:1], flush=True)
        except FormatError:
            os._exit(7)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 7:
        print(f"{name}: exit status {code}", flush=True)
"""
"""A process that survives what its children read: torch ends the process that builds a quantized tensor from bytes."""


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
        (b"{}", "must have the entry 'table', got"),
        (b'{"table": 7}', "table must be a string"),
        (b'{"table": null}', "table must be a string"),
        (b'{"table": "replai"}', "did you mean 'replay'"),
        (b'{"table": "replay", "batch_size": 0}', "batch_size must be a whole number from 1"),
        (b'{"table": "replay", "batch_size": 1e3}', "batch_size must be a whole number from 1"),
        (b'{"table": "replay", "batch_size": null}', "batch_size must be a whole number from 1"),
        (b'{"table": "replay", "batch_size": 1000000000}', "a sample must have at most 1048576 steps"),
        (b'{"table": "queue", "batch_size": 65537}', "a sample must have at most 65536 fragments"),
        (b'{"table": "replay", "batch_size": 1048576, "mode": "episodes"}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "batch_size": 1048576, "n_step": 1000000}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "batch_size": 1100}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "mode": "sequences", "length": 1000000000}', "a sample must have at most 1048576 steps"),
        (b'{"table": "replay", "mode": "sequences", "length": 10000}', "a sample must have at most 65536 bytes"),
        (b'{"table": "replay", "mode": "sequences"}', "length must be an integer from 1 for sequences, got None"),
        (b'{"table": "replay", "mode": "stacks"}', "mode must be one of"),
        (b'{"table": "replay", "mode": "fragments"}', "mode of a table of steps must be one of"),
        (b'{"table": "replay", "batchsize": 1}', "did you mean 'batch_size'"),
        (b'{"table": "replay", "n_step": -1}', "n_step must be a whole number from 1"),
        (b'{"table": "replay", "n_step": 9223372036854775808}', "integers of at most 64 bits, got one of 19 digits"),
        (
            b'{"table": "replay", "timeout_s": 1%s}' % (b"0" * 4000),
            "integers of at most 64 bits, got one of 4001 digits",
        ),
        (b'{"table": "%s"}' % (b"t" * 257), "table must have at most 256 bytes"),
        (b'{"table": "queue", "key": "%s"}' % (b"k" * 257), "key must have at most 256 bytes"),
        (b'{"table": "\\ud800"}', "table must be encodable as UTF-8, got a surrogate at position 0"),
        (b'{"table": "replay", "mode": "%s"}' % (b"m" * 100_000), "mode must be one of"),
        (b'{"table": "replay", "%s": 1}' % ("\u6f22".encode() * 100_000), "must have no entry"),
        (b'{"table": "replay", "gamma": NaN}', "gamma must be a number from 0 to 1"),
        (b'{"table": "replay", "timeout_s": -1}', "timeout_s must be a number above 0"),
        (b'{"table": "replay", "seed": -5}', "seed must be a whole number from 0"),
        (b'{"table": "replay", "seed": "x"}', "seed must be a whole number from 0"),
        (b'{"table": "replay", "padded": 1, "mode": "sequences", "length": 2}', "padded must be true or false"),
        (b'{"table": "queue", "batch_size": 11}', "batch_size must be at most 10"),
        (b'{"table": "queue", "timeout_s": 0.05}', "sampling requires 1 items, and there are 0"),
    ],
)
def test_invalid_tickets_are_rejected(raw: Any, ticket: bytes, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        get(raw, ticket)
    assert "Traceback" not in str(caught.value)
    reported = json.loads(caught.value.extra_info)
    assert reported["error"].endswith("Error")


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        (b"no JSON", "must be a JSON object"),
        (b'{"number": -1}', "number must be a whole number"),
        (b'{"number": null}', "number must be a whole number"),
        (b'{"key": 7}', "key must be a string"),
        (b'{"key": "k"}', "a fragment for a table of steps must have no key, got 'k'"),
        (b'{"priority": "high"}', "priority must be a number"),
        (b'{"priority": 1.0}', "priorities must be omitted for tables of kind 'uniform'"),
        (b'{"batch": "{}"}', "metadata of the batch must be a JSON object"),
        (b'{"batch": "nonsense"}', "metadata of the batch must be a JSON object"),
        (b'{"writer": "me"}', "must have no entry 'writer'"),
    ],
)
def test_invalid_metadata_of_fragments_is_rejected(raw: Any, metadata: bytes, why: str) -> None:
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
        (
            ROWS.replace_schema_metadata({b"samplebatch": b'{"version": 1, "type": "MultiAgentBatch"}'}),
            "must be complete",
        ),
    ],
)
def test_invalid_fragments_are_rejected(raw: Any, rows: pa.RecordBatch, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        put(raw, rows)
    assert "Traceback" not in str(caught.value)


def empty_lists(rows: int) -> pa.Array:
    """Return rows without elements, which occupy no bytes."""
    return pa.Array.from_buffers(pa.list_(pa.int64(), 0), rows, [None], children=[pa.array([], pa.int64())])


@pytest.mark.parametrize("table", ["replay", "queue"])
def test_rows_without_bytes_are_rejected(raw: Any, table: str) -> None:
    path = flight.FlightDescriptor.for_path(table)
    many = pa.record_batch({"obs": empty_lists(10**9)})
    with pytest.raises(flight.FlightError, match="a fragment must have at most 65536 rows in 0 bytes, got 1000000000"):
        put(raw, many, path=path)
    # Nor after a fragment of the same form, which is read without Arrow.
    writer, reader = raw.do_put(flight.FlightDescriptor.for_path("queue"), many.schema)
    writer.write_batch(pa.record_batch({"obs": empty_lists(10)}))
    assert json.loads(reader.read().to_pybytes())["inserted"] == 10
    writer.write_batch(many)
    assert reader.read() is None
    with pytest.raises(flight.FlightError, match="got 1000000000"):
        writer.close()


@pytest.mark.parametrize(
    "path", [flight.FlightDescriptor.for_path(), flight.FlightDescriptor.for_path("a", "b", "c", "d"),
             flight.FlightDescriptor.for_command(b"{}"), flight.FlightDescriptor.for_path("nowhere")],
    ids=["none", "long", "command", "unknown"],
)  # fmt: skip
def test_invalid_paths_are_rejected(raw: Any, path: Any) -> None:
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
def test_names_that_are_too_long_are_rejected(raw: Any, path: list[str], why: str) -> None:
    with pytest.raises(flight.FlightError, match=why):
        put(raw, ROWS, path=flight.FlightDescriptor.for_path(*path))
    longest = flight.FlightDescriptor.for_path("replay", "w" * 256, "\u6f22" * 85)
    assert json.loads(put(raw, ROWS, b'{"number": 1}', longest))["inserted"] == 8


@pytest.mark.parametrize(
    ("action", "body", "why"),
    [
        ("explode", b"", "action must be known, got 'explode'"),
        ("info", b"[]", "must be a JSON object"),
        ("info", b'{"table": "x"}', "table must be a table of the service"),
        ("info", b'{"tables": "x"}', "must have no entry"),
        ("reset", b"", "table must be a string"),
        ("checkpoint", b"", "must have a folder"),
        ("limits", b'{"table": "replay", "min_sise": 3}', "did you mean 'min_size'"),
        ("limits", b'{"table": "replay", "min_size": 1000}', "min_size must be at most"),
        ("limits", b'{"table": "replay", "min_size": {}}', "min_size must be"),
        ("limits", b'{"table": "replay", "self": 1}', "a table has no limit 'self'"),
        ("update_weight", b'{"table": "replay"}', "must have the entries 'indices' and 'priorities', got"),
        (
            "update_weight",
            b'{"table": "replay", "indices": [1], "priorities": [1]}',
            "must be of kind 'prioritized' to update",
        ),
        ("update_weight", b'{"table": "replay", "indices": [[1], 2], "priorities": [1]}', "lists of numbers"),
        ("update_weight", b'{"table": "replay", "indices": ["a"], "priorities": [1]}', "lists of numbers"),
        ("publish", b"", "must be an Arrow stream"),
        ("publish", b"\x80\x04K\x01.", "must be an Arrow stream"),
        ("publish", bytes(1 << 17), "at most 65536 bytes"),
        ("latest", b'{"name": 5}', "name must be a string"),
        ("latest", b'{"newer_than": "x"}', "newer_than must be a whole number"),
        ("acknowledged", b'{"table": "replay", "writer": 5}', "writer must be a string"),
        ("acknowledged", b'{"table": "replay", "stream": "%s"}' % (b"s" * 257), "stream must have at most 256 bytes"),
        ("latest", b'{"name": "%s"}' % (b"n" * 257), "name must have at most 256 bytes"),
        ("publish", pack_weights({"w": np.zeros(2)}, "n" * 257).to_pybytes(), "name must have at most 256 bytes"),
        ("update_weight", b'{"table": "replay", "indices": [18446744073709551615]}', "integers of at most 64 bits"),
        ("a" * 100_000, b"", "action must be known, got 'aaa"),
    ],
)
def test_invalid_actions_are_rejected(raw: Any, action: str, body: bytes, why: str) -> None:
    with pytest.raises(flight.FlightError, match=why) as caught:
        list(raw.do_action(flight.Action(action, body)))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_weights_that_clients_cannot_construct_are_rejected(raw: Any, case: str) -> None:
    with pytest.raises(flight.FlightServerError, match=r"weights must|an array of weights must"):
        list(raw.do_action(flight.Action("publish", BAD_WEIGHTS[case])))


def test_a_client_rejects_the_weights_of_a_hostile_service() -> None:
    cases = json.dumps({case: weights.hex() for case, weights in BAD_WEIGHTS.items()})
    command = [sys.executable, "-c", READ_WEIGHTS]
    done = subprocess.run(command, input=cases, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_weights_have_a_bounded_number_of_arrays(server: ReplayServer, raw: Any) -> None:
    many = {str(number): np.zeros(0) for number in range(MAX_ARRAYS + 1)}
    with ReplayClient(server.uri, "replay") as client, pytest.raises(CapacityError, match="at most 65536 arrays"):
        client.publish(many)


def damaged(raw: bytes, old: bytes, new: bytes) -> pa.RecordBatch:
    """Change bytes of an Arrow stream; return its record batch."""
    assert raw.count(old) == 1
    return read_stream(raw.replace(old, new))


def test_column_names_of_invalid_utf_8_are_rejected(raw: Any) -> None:
    rows = damaged(write_stream(ROWS), b"rewards", b"reward\xc3")
    with pytest.raises(flight.FlightServerError, match="must have column names in UTF-8"):
        put(raw, rows)


def test_a_schema_that_lacks_parts_is_rejected(raw: Any) -> None:
    weights = bytearray(pack_weights({"w": np.zeros(2)}, "net").to_pybytes())
    refused = []
    # The table of a field begins with how far its own layout lies before it.
    for position in range(8, 400):
        body = bytes([*weights[:position], 0, *weights[position + 1 :]])
        try:
            list(raw.do_action(flight.Action("publish", body)))
        except flight.FlightServerError as error:
            refused.append(str(error))
    assert refused
    assert not [sentence for sentence in refused if "the service failed with" in sentence]


def test_a_session_continues_after_invalid_requests(raw: Any) -> None:
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(b'{"table": "replay", "batch_size": 2}'))
    writer.begin(pa.schema([("x", pa.int64())]))
    writer.write_batch(pa.record_batch({"x": [1]}))
    reported = json.loads(reader.read_chunk().app_metadata.to_pybytes())
    assert (reported["error"], reported["of"]) == ("ColumnNotFoundError", "update")
    for request, error in (
        (b"nonsense", "FormatError"),
        (b'{"cuont": 2}', "FormatError"),
        (b'{"count": 0}', "ArgumentError"),
        (b'{"count": 1025}', "ArgumentError"),
    ):
        writer.write_metadata(request)
        reported = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        assert (reported["error"], reported["of"]) == (error, "sample")
    writer.write_metadata(b"{}")
    assert samples_in(reader.read_chunk())[0].num_rows == 2
    reader.cancel()


@pytest.mark.parametrize("guess", ["0" * 64, "", "\u00e9" * 64])
def test_a_guessed_nonce_does_not_share_memory(raw: Any, guess: str) -> None:
    command = json.dumps({"table": "replay", "batch_size": 2, "nonce": guess}).encode()
    writer, reader = raw.do_exchange(flight.FlightDescriptor.for_command(command))
    writer.write_metadata(b"{}")
    assert samples_in(reader.read_chunk())[0].num_rows == 2
    reader.cancel()


def test_streams_may_close_at_any_point(raw: Any) -> None:
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


def test_unread_acknowledgements_block_only_their_writer(raw: Any) -> None:
    writer, _ = raw.do_put(PATH, ROWS.schema)
    for _ in range(200):
        writer.write_batch(ROWS)
    assert list(raw.do_action(flight.Action("info", b"")))


def test_a_client_receives_size_limit_errors(server: ReplayServer) -> None:
    with ReplayClient(server.uri, "replay") as client:
        with pytest.raises(CapacityError, match="a sample must have at most 65536 bytes"):
            client.sample(10_000)
        with pytest.raises(CapacityError, match="weights must have at most 65536 bytes"):
            client.publish({"w": np.zeros(1 << 16)})
        client.extend(SampleBatch(obs=np.zeros((8, 9, 1000))))
        with pytest.raises(CapacityError, match="a fragment must have at most 65536 bytes"):
            client.flush()


STEP_COLUMNS = "obs:float64+new_obs:float64+act:int64+rewards:float64+terminateds:bool+truncateds:bool"
SOUND = episode(0, range(8))
STRANGE: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype": ({"obs": np.zeros(8, "f4")}, r"column 'obs' must be float64, as the table declares, got float32"),
    "another shape": (
        {"obs": np.zeros((8, 3))},
        r"column 'obs' must be float64, .* got float64\[3\]",
    ),
    "rows of varying shape": ({"obs": [np.zeros(1 + i) for i in range(8)]}, r"column 'obs' .* got float64\[\?\]"),
    "text": ({"obs": ["x"] * 8}, r"column 'obs' must be float64, as the table declares, got text"),
    "a further one": ({"extra": np.zeros(8)}, r"column 'extra' must be declared by the table .* got float64"),
    "a missing one": ({"actions": None}, r"column 'act(ions)?' must be int64, as the table declares, got none"),
    "an id of another dtype": ({"eps_id": np.zeros(8)}, r"column 'eps_id' must be .*int64.*, got float64"),
}


def changed(columns: dict[str, Any]) -> SampleBatch[Any]:
    """Return valid steps with replaced columns; None removes a column."""
    values = {**{name: SOUND[name] for name in SOUND}, **columns}
    return SampleBatch({name: value for name, value in values.items() if value is not None})


@pytest.mark.parametrize("change", STRANGE)
@pytest.mark.parametrize("kind", ["uniform", "fifo"])
@pytest.mark.parametrize("number", [1, 2])
def test_the_first_fragment_does_not_change_declared_columns(kind: Any, number: int, change: str) -> None:
    columns, message = STRANGE[change]
    strange: Any = changed(columns)
    sound: Any = SOUND
    declared: Any = STEP_COLUMNS.replace("act:", "actions:")
    if kind == "fifo":
        # Fragments are joined as they are, so their ids are declared like any other column.
        declared += "+eps_id:int64+t:int64"
    if number == 2:
        strange, sound = (MultiAgentBatch({"left": rows, "right": SOUND}, 8) for rows in (strange, sound))
        if kind == "fifo":
            declared = "+".join(f"{policy}/{part}" for policy in ("left", "right") for part in declared.split("+"))
    table = ReplayTable("t", kind=kind, capacity=64, columns=declared)
    with ReplayServer([table]) as server:
        with pytest.raises(ColumnMismatchError, match=message), ReplayClient(server.uri, "t") as stranger:
            stranger.extend(strange)
        assert len(table) == 0
        with ReplayClient(server.uri, "t") as writer:
            writer.extend(sound)
            writer.extend(sound)
            writer.flush()
            assert len(table) == (2 if kind == "fifo" else 16 * number)
            assert writer.info()["columns"] == table.info()["columns"]


def test_a_table_accepts_only_declared_policies() -> None:
    table = ReplayTable("t", kind="fifo", capacity=4, columns={"left": {"obs": "int64"}, 1: {"obs": "float64"}})
    rows = SampleBatch(obs=[1, 2])
    for fragment, message in (
        (rows, "a fragment must have policies"),
        (MultiAgentBatch({"right": rows}, 2), "policy 'right' must be one that the table declares"),
        (MultiAgentBatch({"1": rows}, 2), "policy '1' must be one that the table declares"),
        (MultiAgentBatch({1: rows}, 2), "policy 1: column 'obs' must be float64"),
    ):
        with pytest.raises(ColumnMismatchError, match=message):
            table.extend(fragment)
    table.extend(MultiAgentBatch({"left": rows}, 2))
    table.extend(MultiAgentBatch({1: SampleBatch(obs=[0.5])}, 1))
    with pytest.raises(ColumnMismatchError, match="a fragment must be of one policy"):
        ReplayTable("t", kind="fifo", capacity=4, columns="obs:int64").extend(MultiAgentBatch({"left": rows}, 2))


def test_columns_of_every_kind_can_be_declared() -> None:
    declared = "n:int32+tokens:int64[?]+prompt:text+pair:text[2]+raw:bytes+infos:object+obs.rgb:uint8[2x3]+z:complex64"
    rows = {
        "n": np.zeros(2, "i4"),
        "tokens": [np.arange(2), np.arange(3)],
        "prompt": ["a", "b"],
        "pair": np.array([["a", "b"], ["c", "d"]]),
        "raw": [b"a", b"b"],
        "infos": np.array([{"lives": 3}, None], object),
        "obs": {"rgb": np.zeros((2, 2, 3), "u1")},
        "z": np.zeros(2, "c8"),
    }
    table = ReplayTable("t", kind="fifo", capacity=4, columns=declared)
    table.extend(SampleBatch(rows))
    # Rows that happen to have one shape are ragged where they are declared so, and text may be missing.
    table.extend(SampleBatch({**rows, "tokens": np.zeros((2, 5), np.int64), "prompt": ["a", None]}))
    joined = table.sample(2, timeout_s=0).batch
    assert [len(tokens) for tokens in joined["tokens"]] == [2, 3, 5, 5]
    assert joined["prompt"].tolist() == ["a", "b", "a", None]
    with pytest.raises(ColumnMismatchError, match="column 'infos' must be object, as the table declares, got int64"):
        table.extend(SampleBatch({**rows, "infos": [1, 2]}))


def test_infos_of_steps_are_optional_and_match_their_declaration() -> None:
    table = ReplayTable("t", capacity=64, columns=f"{STEP_COLUMNS}+info.lives:int64")
    table.extend(SOUND)
    table.extend(changed({"infos": {"lives": np.full(8, 3)}}))
    for infos in ({"lives": np.zeros(8)}, {"bonus": np.zeros(8)}):
        with pytest.raises(ColumnMismatchError, match=r"column 'infos\.(lives|bonus)' must be"):
            table.extend(changed({"infos": infos}))
    assert len(table) == 16


def test_a_collector_writes_to_a_table_that_declares_columns() -> None:
    columns = "obs:float32[4]+obs_next:float32[4]+act:int64+rew:float64+terminated:bool+truncated:bool"
    with (
        ReplayServer([ReplayTable("t", capacity=100, streams=2, columns=columns)]) as server,
        ReplayClient(server.uri, "t") as client,
        Collector("random", "CartPole-v1", client, num_envs=2, seed=1) as collector,
    ):
        collector.collect(n_step=40)
        assert len(client) == 40
