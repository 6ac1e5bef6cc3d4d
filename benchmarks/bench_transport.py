"""`transport.*`: a batch of eight columns from one process to another.

- `send`: until the receiver, which can then read every byte, has answered. Bare is one copy into warm memory and a
  round trip through a pipe.
- `handover`: the same for a batch in shareable memory; ours is a block that was filled in place, torch's are tensors in
  shared memory. Bare is a round trip through a pipe. Its time does not depend on the size.
- `stream`: many messages in sequence, until the receiver has answered the last: 200 of 1 KB, 100 of 64 KB, 16 of 1 MB,
  4 of 16 MB, 2 of 256 MB. Bare is a pipe with pickled bytes up to 64 KB, and for larger messages a copy and a token
  through a pipe.
- `pickling`: through an ordinary `multiprocessing` pipe, with `samplebatch.enable_shared_pickling`.

Peers are a `multiprocessing` pipe and pickle protocol 5, torch.multiprocessing with both of its sharing strategies, and
Ray's object store.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks import data, partner
from benchmarks.harness import Row, Way
from benchmarks.partner import TOKEN, Session

KB, MB = 1 << 10, 1 << 20
ROW_NBYTES = 182
SIZES = {"1KB": KB, "64KB": 64 * KB, "1MB": MB, "16MB": 16 * MB, "256MB": 256 * MB}
STREAMED = {"1KB": 200, "64KB": 100, "1MB": 16, "16MB": 4, "256MB": 2}
IN_PICKLES = 64 * KB
PLACES = 3
"""Number of batches with allocated memory."""

Call = Callable[[], Any]


def _batch(size: int) -> Callable[[], data.Columns]:
    return data.flat(round(size / ROW_NBYTES))


def _repeated(send: Call, answer: Call, count: int) -> Call:
    def call() -> Any:
        for _ in range(count):
            send()
        return answer()

    return call


def _ours(count: int) -> Callable[[Any, Any], Call]:
    """Send through our channel."""

    def setup(lib: Any, columns: Any) -> Call:
        from samplebatch import channel

        batch = lib.SampleBatch(columns)
        producer, consumer = channel(PLACES * batch.size_bytes() + MB)
        session = Session("ours", partner.consume, (consumer,), producer.close, count)
        return _repeated(partial(producer.send, batch), session.answer, count)

    return setup


def _ours_in_place(lib: Any, columns: Any) -> Call:
    from samplebatch import channel

    batch = lib.SampleBatch(columns)
    producer, consumer = channel(PLACES * batch.size_bytes() + MB)
    session = Session("ours", partner.consume, (consumer,), producer.close)
    rows = len(batch)
    described = {name: (values.dtype, values.shape[1:]) for name, values in batch.items()}

    def call() -> Any:
        producer.reserve(described, rows).commit()
        return session.answer()

    return call


def _ours_pickled(lib: Any, columns: Any) -> Call:
    from samplebatch import enable_shared_pickling

    batch = lib.SampleBatch(columns)
    source, sink = multiprocessing.Pipe(duplex=False)
    session = Session("pickling", partner.read_objects, (source,), lambda: (sink.send(None), sink.close()))

    def call() -> Any:
        enable_shared_pickling()
        sink.send(batch)
        return session.answer()

    return call


def _pipe(count: int) -> Callable[[Any, Any], Call]:
    """Send through a pipe with pickle."""

    def setup(_: Any, columns: Any) -> Call:
        source, sink = multiprocessing.Pipe(duplex=False)
        session = Session("pipe", partner.read_pickles, (source,), lambda: (sink.send_bytes(b""), sink.close()), count)

        def send() -> None:
            sink.send_bytes(pickle.dumps(columns, 5))

        return _repeated(send, session.answer, count)

    return setup


def _torch(strategy: str, count: int) -> Way:
    """Send with torch.multiprocessing, which moves tensors to shared memory: each message has new tensors."""

    def setup(lib: Any, columns: Any) -> Any:
        tensors = {name: lib.torch.from_numpy(values) for name, values in columns.items()}
        source, sink = lib.multiprocessing.Pipe(duplex=False)
        session = Session(strategy, partner.read_objects, (source,), lambda: (sink.send(None), sink.close()), count)
        return lib, tensors, sink, session

    def fresh(state: Any) -> Call:
        lib, tensors, sink, session = state
        messages = [{name: values.clone() for name, values in tensors.items()} for _ in range(count)]

        def call() -> Any:
            lib.strategy(strategy)
            for message in messages:
                sink.send(message)
            return session.answer()

        return call

    return Way(setup, fresh=fresh)


def _torch_in_place(strategy: str) -> Way:
    """Send tensors that already are in shared memory."""

    def setup(lib: Any, columns: Any) -> Call:
        lib.strategy(strategy)
        shared = {name: lib.torch.from_numpy(values).clone().share_memory_() for name, values in columns.items()}
        source, sink = lib.multiprocessing.Pipe(duplex=False)
        session = Session(strategy, partner.read_objects, (source,), lambda: (sink.send(None), sink.close()))

        def call() -> Any:
            lib.strategy(strategy)
            sink.send(shared)
            return session.answer()

        return call

    return Way(setup)


def _ray(count: int) -> Way:
    """Send through Ray's object store to an actor."""

    def setup(lib: Any, columns: Any) -> Call:
        def call() -> Any:
            return lib.get([lib.seen(lib.put(columns)) for _ in range(count)])[-1]

        return call

    return Way(setup)


def _bare_tokens(places: int, count: int) -> Way:
    """Copy into warm memory with space for `places` batches, and send a token through a pipe."""

    def setup(_: Any, columns: Any) -> Call:
        source, sink = multiprocessing.Pipe(duplex=False)
        session = Session("bare", partner.read_tokens, (source,), lambda: (sink.send_bytes(b""), sink.close()), count)
        targets = cycle([[(np.ones_like(values), values) for values in columns.values()] for _ in range(places)])
        rewards = columns["rewards"]
        seen = (len(rewards), float(rewards[-1]))

        def send() -> None:
            if places:
                for target, values in next(targets):
                    np.copyto(target, values)
            sink.send_bytes(TOKEN)

        def answer() -> Any:
            session.answer()
            return seen

        return _repeated(send, answer, count)

    return Way(setup)


def _bare_pickles(count: int) -> Way:
    """Send previously pickled bytes through a pipe."""

    def setup(_: Any, columns: Any) -> Call:
        source, sink = multiprocessing.Pipe(duplex=False)
        session = Session("bare", partner.read_pickles, (source,), lambda: (sink.send_bytes(b""), sink.close()), count)
        return _repeated(partial(sink.send_bytes, pickle.dumps(columns, 5)), session.answer, count)

    return Way(setup)


def _send(name: str, size: int) -> Row:
    ways = {
        "ours": Way(_ours(1)),
        "pipe": Way(_pipe(1)),
        "torch fd": _torch("file_descriptor", 1),
        "torch fs": _torch("file_system", 1),
        "ray": _ray(1),
        "bare": _bare_tokens(1, 1),
    }
    return Row(f"transport.send.{name}", _batch(size), ways, traffic=True)


def _begun(way: Way) -> Way:
    """Execute the first call untimed, in which the processes connect."""

    def setup(lib: Any, columns: Any) -> Call:
        call: Call = way.setup(lib, columns)
        call()
        return call

    return Way(setup)


def _handover(name: str, size: int) -> Row:
    ways = {
        "ours": Way(_ours_in_place),
        "torch fd": _torch_in_place("file_descriptor"),
        "torch fs": _torch_in_place("file_system"),
        "bare": _bare_tokens(0, 1),
    }
    begun = {who: _begun(way) for who, way in ways.items()}
    # An unwritten block contains arbitrary bytes.
    return Row(f"transport.handover.{name}", _batch(size), begun, view=None, bar=2.0)


def _stream(name: str, size: int) -> Row:
    count = STREAMED[name]
    pickled = size <= IN_PICKLES
    ways = {
        "ours": Way(_ours(count)),
        "pipe": Way(_pipe(count)),
        "torch fd": _torch("file_descriptor", count),
        "torch fs": _torch("file_system", count),
        "ray": _ray(count),
        "bare": _bare_pickles(count) if pickled else _bare_tokens(PLACES, count),
    }
    return Row(f"transport.stream.{name}", _batch(size), ways, traffic=True, bar=2.0 if pickled else None)


def _pickling(name: str, size: int) -> Row:
    ways = {
        "ours": Way(_ours_pickled),
        "pipe": Way(_pipe(1)),
        "torch fd": _torch("file_descriptor", 1),
        "torch fs": _torch("file_system", 1),
    }
    return Row(f"transport.pickling.{name}", _batch(size), ways, traffic=True)


ROWS = [make(name, size) for make in (_send, _handover, _stream) for name, size in SIZES.items()]
ROWS += [_pickling(name, SIZES[name]) for name in ("1MB", "16MB", "256MB")]
