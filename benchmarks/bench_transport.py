"""`transport.*`: transfer of a batch of eight columns from one process to another.

- `send`: one message, until the receiver has answered and can read every byte. Bare is one copy into warm memory and a
  round trip through a pipe.
- `handover`: one message that is already in shared memory, until the receiver has answered. Our message is a channel
  block that was filled in place; torch's messages are tensors in shared memory. Bare is a round trip through a pipe,
  whose time does not depend on the size.
- `stream`: many messages in sequence, until the receiver has answered the last message: 200 of 1 KB, 100 of 64 KB, 16
  of 1 MB, 4 of 16 MB, 2 of 256 MB. Bare sends messages of up to 64 KB as pickled bytes through a pipe. For larger
  messages, bare copies the batch and sends a token through a pipe.
- `pickling`: one message through a standard `multiprocessing` pipe; ours uses `samplebatch.enable_shared_pickling`.

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
MAX_PICKLED_NBYTES = 64 * KB
NUM_BATCHES = 3
"""Number of batches for which memory is allocated."""

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
    """Send a batch through our channel."""

    def setup(lib: Any, columns: Any) -> Call:
        from samplebatch import channel

        batch = lib.SampleBatch(columns)
        producer, consumer = channel(NUM_BATCHES * batch.size_bytes() + MB)
        session = Session("ours", partner.consume, (consumer,), producer.close, count)
        return _repeated(partial(producer.send, batch), session.answer, count)

    return setup


def _ours_in_place(lib: Any, columns: Any) -> Call:
    from samplebatch import channel

    batch = lib.SampleBatch(columns)
    producer, consumer = channel(NUM_BATCHES * batch.size_bytes() + MB)
    session = Session("ours", partner.consume, (consumer,), producer.close)
    rows = len(batch)
    layout = {name: (values.dtype, values.shape[1:]) for name, values in batch.items()}

    def call() -> Any:
        producer.reserve(layout, rows).commit()
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
    """Send new tensors per message with torch.multiprocessing, which moves sent tensors to shared memory."""

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
    """Send tensors that are already in shared memory."""

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
    """Send a batch through Ray's object store to an actor."""

    def setup(lib: Any, columns: Any) -> Call:
        def call() -> Any:
            return lib.get([lib.seen(lib.put(columns)) for _ in range(count)])[-1]

        return call

    return Way(setup)


def _bare_tokens(num_batches: int, count: int) -> Way:
    """Copy a batch into warm memory for `num_batches` batches, and send a token through a pipe."""

    def setup(_: Any, columns: Any) -> Call:
        source, sink = multiprocessing.Pipe(duplex=False)
        session = Session("bare", partner.read_tokens, (source,), lambda: (sink.send_bytes(b""), sink.close()), count)
        targets = cycle([[(np.ones_like(values), values) for values in columns.values()] for _ in range(num_batches)])
        rewards = columns["rewards"]
        summary = (len(rewards), float(rewards[-1]))

        def send() -> None:
            if num_batches:
                for target, values in next(targets):
                    np.copyto(target, values)
            sink.send_bytes(TOKEN)

        def answer() -> Any:
            session.answer()
            return summary

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


def _connected(way: Way) -> Way:
    """Execute the first call during setup, because it connects the processes."""

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
    connected = {name: _connected(way) for name, way in ways.items()}
    # Results are not compared, because an unwritten block contains arbitrary bytes.
    return Row(f"transport.handover.{name}", _batch(size), connected, view=None, bar=2.0)


def _stream(name: str, size: int) -> Row:
    count = STREAMED[name]
    pickled = size <= MAX_PICKLED_NBYTES
    ways = {
        "ours": Way(_ours(count)),
        "pipe": Way(_pipe(count)),
        "torch fd": _torch("file_descriptor", count),
        "torch fs": _torch("file_system", count),
        "ray": _ray(count),
        "bare": _bare_pickles(count) if pickled else _bare_tokens(NUM_BATCHES, count),
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
