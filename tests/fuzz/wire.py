"""The wire of the replay service that is fuzzed: messages of gRPC, made by hand, to a server in the same process.

A sample is the method of a call and its messages. A message is a list of the fields of a Protocol Buffers message, each
a number and bytes, or a number and such a list; of those bytes that are Arrow's, the header and the body of a message
are fields of their own. So the changes reach tickets, descriptors, JSON, schemas and the buffers of record batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from pyarrow import flight, ipc

from samplebatch import SampleBatch
from samplebatch.errors import FormatError
from samplebatch.service import ReplayServer, ReplayTable
from samplebatch.service.fragments import FragmentEncoder
from samplebatch.service.protocol import Draw, Fragment, read_json
from samplebatch.service.samples import read_secret
from samplebatch.service.weights import pack_weights
from tests.fuzz.mutations import mutate
from tests.service.table_rows import episode

Message = list[tuple[int, Any]]
Call = tuple[str, list[Message], bool]
"""Method, messages, and whether the call is refused as it is."""

_PREFIX = "/arrow.flight.protocol.FlightService/"
_DESCRIPTOR, _HEADER, _METADATA, _BODY = 1, 2, 3, 1000
"""Fields of Flight's data."""
_MAX_NBYTES = 1 << 20
_DEADLINE_S = 0.5
"""Seconds after which a call ends that is held back, or goes on for ever."""
_ANSWERS = 3
"""Answers of a stream that are read."""
_FAILURE = "the service failed with"


def encode(message: Message) -> bytes:
    """Encode a Protocol Buffers message whose fields are bytes, strings, messages or small integers."""
    actual = bytearray()
    for number, value in message:
        if isinstance(value, int):
            actual += _varint(number << 3) + _varint(value)
        else:
            raw = encode(value) if isinstance(value, list) else value
            actual += _varint(number << 3 | 2) + _varint(len(raw)) + raw
    return bytes(actual)


def _varint(number: int) -> bytes:
    actual = bytearray()
    while number > 127:
        actual.append(number & 127 | 128)
        number >>= 7
    return bytes([*actual, number])


def path(*parts: str) -> Message:
    """Encode a flight descriptor with a path."""
    return [(1, 1), *((3, part.encode()) for part in parts)]


def arrow_messages(rows: pa.RecordBatch) -> list[Message]:
    """Split a record batch into its schema message and its rows message."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    return [
        [(_HEADER, message.metadata.to_pybytes()), *([(_BODY, message.body.to_pybytes())] if message.body else [])]
        for message in ipc.MessageReader.open_stream(sink.getvalue())
    ]


def put(rows: pa.RecordBatch, descriptor: Message, *fragments: Fragment, refused: bool = False) -> Call:
    """Return the messages of a stream that inserts the same rows several times."""
    schema, batch = arrow_messages(rows)
    messages = [[(_DESCRIPTOR, descriptor), *schema]]
    return "DoPut", messages + [[*batch, (_METADATA, fragment.write())] for fragment in fragments], refused


def get(draw: Draw) -> Call:
    """Return the message of a request for samples."""
    return "DoGet", [[(1, draw.write())]], False


def exchange(draw: Draw, updates: pa.RecordBatch | None) -> Call:
    """Return the messages of a session that requests samples and sends priorities."""
    ask: list[Message] = [[(_METADATA, b"{}")]]
    messages = [[(_DESCRIPTOR, [(1, 2), (2, draw.write())])], *ask]
    if updates is not None:
        schema, batch = arrow_messages(updates)
        messages += [schema, [*batch, (_METADATA, b'{"any_generation":true}')]]
    return "DoExchange", messages + ask, False


def action(name: str, body: bytes = b"") -> Call:
    """Return the message of an action."""
    return "DoAction", [[(1, name.encode()), (2, body)]], False


class ReplayService:
    """Replay service that receives damaged calls."""

    @cached_property
    def _tables(self) -> dict[str, ReplayTable]:
        tables = [
            ReplayTable("replay", capacity=100, streams=2, seed=1),
            ReplayTable("prio", kind="prioritized", capacity=100, alpha=0.6, beta=0.4, seed=1),
            ReplayTable("queue", kind="queue", capacity=8),
            ReplayTable("levels", kind="key", capacity=8),
            ReplayTable("images", kind="lifo", capacity=8),
            ReplayTable("words", kind="lifo", capacity=8),
        ]
        sys.addaudithook(_refuse_pickles)
        return {table.name: table for table in tables}

    @cached_property
    def _server(self) -> ReplayServer:
        return ReplayServer(self._tables.values(), max_message_nbytes=_MAX_NBYTES).start()

    @cached_property
    def _channel(self) -> Any:
        return grpc.insecure_channel(f"127.0.0.1:{self._server.port}")

    @cached_property
    def _friend(self) -> Any:
        """Client that sends only valid calls."""
        return flight.connect(self._server.uri)

    def samples(self, folder: Path) -> list[Call]:
        rows = FragmentEncoder().encode(episode(0, range(8), env_id=3))
        nested = SampleBatch({**episode(1, range(4)), "obs": {"image": np.zeros((4, 2, 2), np.uint8)}})
        words = SampleBatch({**episode(2, range(3)), "word": np.array(["a", "b", "a"], object)})
        pickles = SampleBatch({**episode(3, range(2)), "infos": np.array([{1, 2}, {"a": 1}], object)})
        updates = pa.record_batch(
            {"batch_indexes": np.arange(4), "priority": np.arange(4) + 1.0, "generation": np.zeros(4, np.int64)}
        )
        attached = next(iter(self._friend.do_action(flight.Action("attach", b""))))
        nonce = read_secret(read_json(attached.body, "the answer"))
        return [
            put(rows, path("replay", "someone", "own"), Fragment(1), Fragment(2, timeout_s=0.1)),
            put(FragmentEncoder().encode(episode(0, range(8)), np.ones(8)), path("prio"), Fragment(), Fragment()),
            put(FragmentEncoder().encode(nested), path("images", "someone"), Fragment(timeout_s=0.1)),
            put(FragmentEncoder().encode(words), path("words"), Fragment()),
            put(rows, path("levels"), Fragment(key="one")),
            put(FragmentEncoder().encode(pickles), path("queue"), Fragment(), refused=True),
            get(Draw("replay", 4, count=2, n_step=2, gamma=0.9, timeout_s=0.2)),
            get(Draw("replay", 2, mode="sequences", length=4, burn_in=1, padded=True, seed=3)),
            get(Draw("replay", 1, mode="episodes", unfinished=True, count=1)),
            get(Draw("prio", 4, beta=0.5)),
            get(Draw("levels", 1, key="one", timeout_s=0.2)),
            exchange(Draw("prio", 4), updates),
            exchange(Draw("replay", 4, nonce=nonce), None),
            action("info", b'{"table":"replay"}'),
            action("reset", b'{"table":"replay"}'),
            action("limits", b'{"table":"prio","min_size":2,"samples_per_insert":4.0,"error_buffer":100.0}'),
            action("limits", b'{"table":"replay","max_times_sampled":2}'),
            action("update_weight", b'{"table":"prio","indices":[0,1],"priorities":[1.0,2.0],"generations":[0,0]}'),
            action("publish", pack_weights({"w": np.zeros((2, 2)), "b": {"c": np.arange(3)}}, "net").to_pybytes()),
            action("latest", b'{"name":"net","newer_than":0}'),
            action("acknowledged", b'{"table":"replay","writer":"someone","stream":"own"}'),
            ("GetFlightInfo", [path("replay")], False),
            ("GetSchema", [path("prio")], False),
            ("ListFlights", [[(1, b"")]], False),
        ]

    def mutate(self, sample: Call, rng: Random) -> Call:
        method, messages, refused = sample
        number = rng.random()
        actual: list[Any] = list(messages)
        at = rng.randrange(len(actual))
        if number < 0.05:
            actual.insert(rng.randrange(len(actual) + 1), actual[at])
        elif number < 0.1 and len(actual) > 1:
            del actual[at]
        elif number < 0.2:
            actual[at] = mutate(encode(actual[at]), rng)
        else:
            actual[at] = _mutate_field(actual[at], rng)
        return method, actual, refused

    def read(self, sample: Call, folder: Path) -> None:
        method, messages, refused = sample
        self._restore()
        error = self._call(method, [raw if isinstance(raw, bytes) else encode(raw) for raw in messages])
        for name, table in self._tables.items():
            assert len(table) <= table.capacity
            (answer,) = self._friend.do_action(flight.Action("info", f'{{"table":"{name}"}}'.encode()))
            assert read_json(answer.body, "the answer")["name"] == name
        if _UNPICKLED:
            raise AssertionError(f"{_UNPICKLED.pop()} was unpickled")
        if error is not None and _FAILURE in error:
            raise AssertionError(error)
        if error is not None and not refused:
            raise FormatError(error)

    def _restore(self) -> None:
        """Fill the tables, and restore limits that an earlier case changed."""
        for name in ("replay", "prio", "queue", "levels"):
            table = self._tables[name]
            times = int(name == "queue")
            table.set_limits(min_size=1, samples_per_insert=None, max_times_sampled=times)
            if table.unit == "steps" or len(table) in (0, table.capacity):
                table.reset()
                table.extend(
                    episode(7, range(12), env_id=3), writer="someone", keys="one" if name == "levels" else None
                )

    def _call(self, method: str, messages: list[bytes]) -> str | None:
        """Make a call; return the message of its rejection, or None if the call was accepted."""
        calls: Callable[..., Any] = self._channel.stream_stream
        answers = calls(_PREFIX + method)(iter(messages), timeout=_DEADLINE_S)
        try:
            for _ in range(_ANSWERS):
                if next(answers, None) is None:
                    break
            return None
        except grpc.RpcError as error:
            cause: Any = error
            late = cause.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "Deadline Exceeded" in cause.details()
            return None if late else str(cause.details())
        finally:
            answers.cancel()


_UNPICKLED: list[str] = []


def _refuse_pickles(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the names that a pickle imports; the library's inert reader never triggers this audit event."""
    if event == "pickle.find_class":
        _UNPICKLED.append(".".join(map(str, arguments[:2])))


def _mutate_field(message: Message, rng: Random) -> Message:
    """Change one field of a message, or recursively a field of a nested message."""
    at = rng.choices(range(len(message)), [_weight(value) for _, value in message])[0]
    number, value = message[at]
    if isinstance(value, list):
        changed: Any = _mutate_field(value, rng)
    elif isinstance(value, int):
        changed = rng.choice((0, 1, 2, 3, 127))
    else:
        changed = mutate(value, rng)
    return [*message[:at], (number, changed), *message[at + 1 :]]


def _weight(value: Any) -> float:
    return 1.0 if isinstance(value, int) else 8.0 + min(len(value), 400) ** 0.5


REPLAY_SERVICE = ReplayService()
