"""The wire protocol of its page, with clients that use Arrow Flight and JSON without this library."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from samplebatch import SampleBatch
from samplebatch.errors import AccessError, ArgumentError, ServiceError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from tests.service.table_rows import episode, samples_in


@pytest.fixture
def uri() -> Iterator[str]:
    tables = [
        ReplayTable("prio", kind="prioritized", capacity=100, alpha=1.0, seed=1),
        ReplayTable("queue", kind="queue", capacity=10),
    ]
    with ReplayServer(tables) as server:
        yield server.uri


@pytest.fixture
def client(uri: str) -> Iterator[Any]:
    client = flight.connect(uri)
    yield client
    client.close()


ROWS = pa.record_batch(
    {
        "obs": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(4, 3)),
        "new_obs": pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(4, 3) + 3),
        "actions": [0, 1, 0, 1],
        "rewards": [0.0, 0.0, 0.0, 1.0],
        "terminateds": [False, False, False, True],
        "eps_id": [7, 7, 7, 7],
        "t": [0, 1, 2, 3],
    }
)


def put(client: Any, table: str, **metadata: Any) -> dict[str, Any]:
    writer, reader = client.do_put(flight.FlightDescriptor.for_path(table, "another language"), ROWS.schema)
    writer.write_with_metadata(ROWS, json.dumps(metadata).encode())
    answer: dict[str, Any] = json.loads(reader.read().to_pybytes())
    writer.close()
    return answer


def act(client: Any, action: str, **request: Any) -> Any:
    (result,) = client.do_action(flight.Action(action, json.dumps(request).encode()))
    return json.loads(result.body.to_pybytes())


def test_tables_are_listed_with_tickets_that_can_be_used(client: Any) -> None:
    put(client, "prio")
    infos = {info.descriptor.path[0].decode(): info for info in client.list_flights()}
    assert infos.keys() == {"prio", "queue"}
    assert infos["prio"].total_records == 4
    assert infos["prio"].schema.names == ROWS.schema.names
    stream = client.do_get(infos["prio"].endpoints[0].ticket)
    assert stream.read_chunk().data.num_rows == 1
    stream.cancel()
    info = client.get_flight_info(flight.FlightDescriptor.for_path("prio"))
    assert info.schema == client.get_schema(flight.FlightDescriptor.for_path("prio")).schema
    assert {action.type for action in client.list_actions()} >= {"info", "checkpoint", "reset", "limits", "publish"}


def test_fragments_are_acknowledged_once(client: Any) -> None:
    assert put(client, "prio", number=1) == {"number": 1, "inserted": 4, "held_s": 0.0, "size": 4}
    assert put(client, "prio", number=1)["inserted"] == 0
    assert put(client, "prio", number=2)["size"] == 8
    assert act(client, "acknowledged", table="prio", writer="another language") == {"number": 2}


def test_samples_are_record_batches(client: Any) -> None:
    put(client, "prio")
    ticket = {"table": "prio", "batch_size": 6, "count": 3, "n_step": 2, "gamma": 0.5}
    rows = client.do_get(flight.Ticket(json.dumps(ticket).encode())).read_all().to_pydict()
    assert len(rows["rew"]) == 18
    assert {"obs", "act", "returns", "discount", "weight", "generation", "batch_indexes"} <= rows.keys()
    returns = {3: 1.0, 2: 0.5, 1: 0.0, 0: 0.0}
    assert all(returns[slot] == actual for slot, actual in zip(rows["batch_indexes"], rows["returns"], strict=True))
    sequences = {"table": "prio", "batch_size": 2, "count": 1, "mode": "sequences", "length": 3}
    result = client.do_get(flight.Ticket(json.dumps(sequences).encode())).read_all()
    assert result.schema.field("mask").type == pa.fixed_shape_tensor(pa.int8(), (3,))
    assert result.schema.field("batch_indexes").type == pa.fixed_shape_tensor(pa.int64(), (3,))
    episodes = {"table": "prio", "batch_size": 2, "count": 1, "mode": "episodes"}
    result = client.do_get(flight.Ticket(json.dumps(episodes).encode())).read_all()
    assert [len(rewards) for rewards in result.column("rew").to_pylist()] == [4, 4]


def test_a_session_samples_and_updates_priorities(client: Any) -> None:
    put(client, "prio")
    command = flight.FlightDescriptor.for_command(json.dumps({"table": "prio", "batch_size": 8}).encode())
    writer, reader = client.do_exchange(command)
    writer.write_metadata(b"{}")
    (sample,) = samples_in(reader.read_chunk())
    update = pa.record_batch(
        {
            "batch_indexes": sample.column("batch_indexes"),
            "priority": pa.array([100.0 if slot == 2 else 1e-3 for slot in sample.column("batch_indexes").to_pylist()]),
            "generation": sample.column("generation"),
        }
    )
    writer.begin(update.schema)
    writer.write_batch(update)
    assert json.loads(reader.read_chunk().app_metadata.to_pybytes()) == {"updated": 8}
    priorities = {"indices": [0, 1, 3], "priorities": [1e-6, 1e-6, 1e-6]}
    assert act(client, "update_weight", table="prio", **priorities) == {"updated": 3}
    writer.write_metadata(b"{}")
    assert set(samples_in(reader.read_chunk())[0].column("batch_indexes").to_pylist()) == {2}
    writer.done_writing()
    with pytest.raises(StopIteration):
        reader.read_chunk()


def test_samples_of_a_session_are_streams_in_metadata(client: Any) -> None:
    put(client, "prio")
    request = {"table": "prio", "batch_size": 8}
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(json.dumps(request).encode()))
    actual = []
    for count in (1, 3):
        writer.write_metadata(json.dumps({"count": count}).encode())
        chunk = reader.read_chunk()
        assert chunk.data is None
        actual += samples_in(chunk)
    assert len(actual) == 4
    assert all(rows.schema.equals(actual[0].schema, check_metadata=True) and rows.num_rows == 8 for rows in actual)
    writer.done_writing()


def test_fragments_of_a_session_have_sequence_numbers(client: Any) -> None:
    put(client, "queue")
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b'{"table": "queue"}'))
    writer.write_metadata(b"{}")
    chunk = reader.read_chunk()
    assert json.loads(chunk.app_metadata.to_pybytes().partition(b"\n")[0])["numbers"] == [0]
    assert samples_in(chunk)[0].to_pydict() == ROWS.to_pydict()
    writer.done_writing()


def test_large_samples_of_a_session_are_complete(client: Any, uri: str) -> None:
    frames = np.random.default_rng(5).integers(0, 256, (4, 300, 300), np.uint8)
    with ReplayClient(uri, "prio") as library_client:
        library_client.extend(
            SampleBatch(obs=frames, actions=[0, 1, 2, 3], rewards=np.zeros(4), terminateds=[False] * 3 + [True])
        )
    request = {"table": "prio", "batch_size": 4}
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(json.dumps(request).encode()))
    for _ in range(3):
        writer.write_metadata(b"{}")
        actual = SampleBatch.from_arrow(samples_in(reader.read_chunk())[0])
        assert (actual["obs"] == frames[actual["batch_indexes"]]).all()
    writer.done_writing()


def test_a_queue_returns_fragments_with_sequence_numbers(client: Any) -> None:
    for _ in range(2):
        put(client, "queue")
    stream = client.do_get(flight.Ticket(b'{"table": "queue"}'))
    for number in range(2):
        chunk = stream.read_chunk()
        assert chunk.data.to_pydict() == ROWS.to_pydict()
        assert json.loads(chunk.app_metadata.to_pybytes())["numbers"] == [number]
    stream.cancel()


def test_weights_are_published_as_documented(client: Any, uri: str) -> None:
    def publish(data: pa.DataType) -> Any:
        types = {"path": pa.list_(pa.string()), "dtype": pa.string(), "shape": pa.list_(pa.int64()), "data": data}
        schema = pa.schema(types, {"samplebatch.weights": '{"name": "policy"}'})
        row = {"path": ["layer", "bias"], "dtype": "<f4", "shape": [2], "data": np.array([1, 2], "<f4").tobytes()}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            stream.write_batch(pa.RecordBatch.from_pylist([row], schema))
        return json.loads(next(client.do_action(flight.Action("publish", sink.getvalue()))).body.to_pybytes())

    answer = publish(pa.large_binary())
    assert (answer["version"], len(answer["epoch"])) == (1, 16)
    with ReplayClient(uri, "prio") as library_client:
        assert library_client.latest(name="policy").value["layer"]["bias"].tolist() == [1.0, 2.0]
    with pytest.raises(
        flight.FlightServerError, match=r"shape \(list<.*int64>\), data \(large_binary\), without nulls"
    ):
        publish(pa.binary())


def test_weights_are_rows_of_bytes(client: Any, uri: str) -> None:
    with ReplayClient(uri, "prio") as library_client:
        library_client.publish({"layer": {"bias": np.array([1.0, 2.0], np.float32)}}, name="policy")
    answer, weights = client.do_action(flight.Action("latest", b'{"name": "policy"}'))
    assert json.loads(answer.body.to_pybytes()) == {"version": 1, "epoch": uri_epoch(client)}
    (row,) = pa.ipc.open_stream(weights.body).read_all().to_pylist()
    assert (row["path"], row["dtype"], row["shape"]) == (["layer", "bias"], "<f4", [2])
    assert np.frombuffer(row["data"], row["dtype"]).tolist() == [1.0, 2.0]
    (answer,) = client.do_action(flight.Action("latest", b'{"name": "policy", "newer_than": 1}'))


def uri_epoch(client: Any) -> str:
    """Return the epoch of the weights `policy`."""
    (answer,) = client.do_action(flight.Action("latest", b'{"name": "policy", "version_only": true}'))
    return str(json.loads(answer.body.to_pybytes())["epoch"])


def page_bytes(part: str) -> bytes:
    """Return the bytes in the documentation for a part of a call."""
    page = Path(__file__).parents[2] / "docs/replay-wire.md"
    (row,) = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {part} |")]
    return bytes.fromhex(row.rpartition("| `")[2].removesuffix("` |"))


def test_documented_bytes_are_accepted_by_the_service(client: Any) -> None:
    path = flight.FlightDescriptor.deserialize(page_bytes("descriptor of DoPut"))
    writer, reader = client.do_put(path, ROWS.schema)
    writer.write_with_metadata(ROWS, page_bytes("metadata of its first record batch"))
    assert json.loads(reader.read().to_pybytes()) == {"number": 1, "inserted": 4, "held_s": 0.0, "size": 4}
    writer.close()
    assert act(client, "acknowledged", table="prio", writer="java 1", stream="a") == {"number": 1}
    samples = client.do_get(flight.Ticket.deserialize(page_bytes("ticket of DoGet"))).read_all()
    assert samples.num_rows == 2
    command = flight.FlightDescriptor.deserialize(page_bytes("descriptor of DoExchange"))
    writer, reader = client.do_exchange(command)
    writer.write_metadata(b"{}")
    assert samples_in(reader.read_chunk())[0].num_rows == 2
    writer.close()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("descriptor of DoPut", flight.FlightDescriptor.for_path("prio", "java 1", "a")),
        ("ticket of DoGet", flight.Ticket(b'{"table":"prio","batch_size":2,"count":1}')),
        ("descriptor of DoExchange", flight.FlightDescriptor.for_command(b'{"table":"prio","batch_size":2}')),
    ],
)
def test_documented_bytes_agree_with_arrow_flight(part: str, message: Any) -> None:
    assert page_bytes(part) == message.serialize()


def test_limits_and_state_are_json(client: Any) -> None:
    put(client, "prio")
    assert act(client, "limits", table="prio", min_size=3)["limits"]["min_size"] == 3
    info = act(client, "info")
    assert info["tables"]["prio"]["inserted"] == 4
    assert info["weights"] == {}
    act(client, "reset", table="prio")
    assert act(client, "info", table="prio")["size"] == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_a_tls_service_accepts_clients_that_verify_its_certificate(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    table = ReplayTable("replay", capacity=10)
    with ReplayServer([table], tls=(certificate, key), token="sesame") as server:
        assert server.uri.startswith("grpc+tls://")
        with ReplayClient(server.uri, "replay", token="sesame", tls_root_certs=certificate) as client:
            client.extend(episode(0, range(3)))
            assert len(client) == 3
        with pytest.raises(AccessError):
            ReplayClient(server.uri, "replay", tls_root_certs=certificate).info()
        for uri, roots in ((server.uri, None), (server.uri.replace("127.0.0.1", "0.0.0.0"), certificate)):
            # At once, and not when the time to reconnect is over.
            with pytest.raises(AccessError, match="the certificate of the service at grpc"):
                ReplayClient(uri, "replay", token="sesame", tls_root_certs=roots).info()
        with pytest.raises(
            ArgumentError, match="tls_root_certs must be a file with PEM certificates, got a file without a certificate"
        ):
            ReplayClient(server.uri, "replay", token="sesame", tls_root_certs=key)
        with pytest.raises(ServiceError):
            ReplayClient(server.uri.replace("+tls", ""), "replay", token="sesame", reconnect_s=0.1).info()


def test_invalid_addresses_and_tables_are_rejected() -> None:
    with pytest.raises(ServiceError, match="cannot listen at"):
        ReplayServer([ReplayTable("replay", capacity=10)], host="203.0.113.7")
    with pytest.raises(ArgumentError, match="must have a table"):
        ReplayServer([])
    with pytest.raises(ArgumentError, match="must have different names, got 'replay' twice"):
        ReplayServer([ReplayTable("replay", capacity=10), ReplayTable("replay", capacity=10)])
    with pytest.raises(ArgumentError, match="uri must be"):
        ReplayClient("nonsense", "replay")
