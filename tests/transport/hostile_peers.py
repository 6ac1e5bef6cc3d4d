"""Peers that write what they like: messages, metadata, numbers of blocks, boards of broadcasts, shared counters.

The driver of `tests.fuzz` runs it, in a process that may die; by hand, with any number of cases::

    python -m tests.fuzz --cases 10000 tests.transport.hostile_peers:MESSAGES tests.transport.hostile_peers:BOARDS
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from samplebatch import broadcast, channel
from samplebatch.transport.arena import pack_ident
from samplebatch.transport.broadcast import Board, Subscription
from samplebatch.transport.channel_end import CONSUMER, HEADER_NBYTES, PRODUCER
from samplebatch.transport.shared_queue import SharedQueueMemory, receive
from samplebatch.transport.wire import MESSAGE_NBYTES, Message, pack, unpack
from tests.fuzz.mutations import mutate, mutate_tree
from tests.transport.rewrites import BATCHES, perform, uses_of

CAPACITY_NBYTES = 1 << 19
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    63,
    64,
    255,
    1 << 12,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
)
WIDTHS = {"kind": 8, "flags": 16, "schema": 32, "metadata_nbytes": 32, "metadata_sum": 32}
"""Bits of a message's fields that have not 64."""
NAMES = ["sequences", "several policies", "ragged", "nested"]
WAIT_S = 0.02


class Case(NamedTuple):
    """Batch to send and its change on the way; None for no change."""

    batch: str
    seed: int | None


class Peer:
    """Base class of targets, which send a batch and draw its change."""

    def samples(self, folder: Path) -> list[Case]:
        return [Case(name, None) for name in NAMES]

    def mutate(self, sample: Case, rng: Random) -> Case:
        return sample._replace(seed=rng.getrandbits(32))

    def read(self, sample: Case, folder: Path) -> None:
        self.meet(BATCHES[sample.batch](), None if sample.seed is None else Random(sample.seed), folder)

    def meet(self, batch: Any, rng: Random | None, folder: Path) -> None:
        raise NotImplementedError


class Messages(Peer):
    """Invalid messages and metadata in the pipe and in the arena of a channel."""

    def meet(self, batch: Any, rng: Random | None, folder: Path) -> None:
        producer, consumer = channel(CAPACITY_NBYTES, allow_pickle=True)
        with producer, consumer:
            for _ in range(2):
                producer.send(batch)
                raw = os.read(consumer._pipe, MESSAGE_NBYTES)
                if rng is not None:
                    raw = rng.choice((_other_field, _other_note, _other_note, _other_bytes))(raw, producer, rng)
                os.write(producer._pipe, raw)
                received = consumer.recv(timeout_s=WAIT_S if rng else 5)
                perform(uses_of(received, Random(1), folder), may_refuse=rng is not None)


def _other_field(raw: bytes, producer: Any, rng: Random) -> bytes:
    message = unpack(raw)
    field = rng.choice(Message._fields)
    stored = getattr(message, field)
    number = rng.choice((rng.choice(NUMBERS), stored + 1, stored - 1, stored * 2, stored + 64))
    return pack(**message._replace(**{field: number % (1 << WIDTHS.get(field, 64))})._asdict())


def _other_note(raw: bytes, producer: Any, rng: Random) -> bytes:
    message = unpack(raw)
    start, memory = message.metadata_start, producer._memory
    metadata = other_json(memory[start : start + message.metadata_nbytes].tobytes(), rng)
    room = memory.nbytes - start
    memory[start : start + len(metadata)] = np.frombuffer(metadata[:room], np.uint8)
    return pack(**message._replace(metadata_nbytes=len(metadata), metadata_sum=crc32(metadata))._asdict())


def _other_bytes(raw: bytes, producer: Any, rng: Random) -> bytes:
    return mutate(raw, rng)[: 4 * MESSAGE_NBYTES] or b"x"


def other_json(metadata: bytes, rng: Random) -> bytes:
    """Change metadata; in most cases, the result is valid JSON."""
    if not metadata or rng.random() < 0.25:
        return mutate(metadata, rng)
    plain = json.loads(metadata)
    for _ in range(rng.choice((1, 1, 2))):
        plain = mutate_tree(plain, rng)
    return json.dumps(plain, default=str).encode()


class Ends(Peer):
    """Invalid owners in the header of a channel, and returns of blocks that were never lent."""

    def meet(self, batch: Any, rng: Random | None, folder: Path) -> None:
        producer, consumer = channel(CAPACITY_NBYTES, allow_pickle=True)
        try:
            producer.send(batch)
            consumer.recv(timeout_s=5)
            if rng is not None:
                words = producer._memory[:HEADER_NBYTES].view(np.uint64)
                for side in (PRODUCER, CONSUMER):
                    for _ in range(rng.randrange(3)):
                        words[side + rng.randrange(4)] = rng.choice(NUMBERS)
                os.write(consumer._back, mutate(pack_ident(rng.choice(NUMBERS)), rng))
            _each(
                lambda: producer.send(batch, timeout_s=WAIT_S),
                lambda: consumer.recv(timeout_s=WAIT_S),
                lambda: consumer.poll(WAIT_S),
                lambda: producer.reserve({"a": np.dtype("f4")}, 3, timeout_s=WAIT_S).cancel(),
                lambda: consumer.fileno(),
                may_refuse=rng is not None,
            )
        finally:
            consumer.close()
            producer.close()


class Boards(Peer):
    """Publications with invalid numbers, positions and descriptions."""

    def meet(self, batch: Any, rng: Random | None, folder: Path) -> None:
        publisher, subscription = broadcast(CAPACITY_NBYTES, blocks=2, allow_pickle=True)
        weights = {"layer": {"w": np.ones((3, 2)), "b": np.zeros(2)}}
        with publisher, subscription:
            publisher.publish(batch if rng is None or rng.random() < 0.7 else weights)
            region = publisher._board.region
            if rng is not None:
                _other_board(region.array, publisher._board, rng)
            _each(
                lambda: subscription.version,
                lambda: subscription.latest(timeout_s=WAIT_S),
                lambda: subscription.latest(timeout_s=WAIT_S, into=weights) if rng else None,
                lambda: subscription.wait_for(2, timeout_s=WAIT_S) if rng else None,
                lambda: Subscription(Board(region.read_only()), allow_pickle=True).latest(timeout_s=WAIT_S),
                may_refuse=rng is not None,
            )


def _other_board(memory: np.ndarray, board: Board, rng: Random) -> None:
    content = board.content(board.status.newest)
    assert content is not None
    words = memory[:4096].view(np.uint64)
    if rng.random() < 0.4:
        for _ in range(rng.choice((1, 1, 2))):
            words[rng.randrange(24)] = rng.choice(NUMBERS)
        return
    head = other_json(content.head, rng)
    at = content.values.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    start = at + (content.values.nbytes + 63) // 64 * 64
    memory[start : start + len(head)] = np.frombuffer(head, np.uint8)
    ours = 8 + board.status.newest % board.blocks * 8
    words[ours + 2], words[ours + 3] = len(head), crc32(head)


class Parcels(Peer):
    """Invalid counters of a parcel in shared memory, as a receiver may leave them."""

    def meet(self, batch: Any, rng: Random | None, folder: Path) -> None:
        memory = SharedQueueMemory(keep_nbytes=1 << 20)
        try:
            sent = memory.send([np.arange(100)])
            assert sent is not None
            if rng is not None:
                words = memory._sent[0].region.array[:48].view(np.uint64)
                for _ in range(rng.randrange(4)):
                    words[rng.randrange(1, 5)] = rng.choice(NUMBERS)
                memory._sent[0]._next_look_s = 0.0
            _each(
                lambda: memory.send([np.arange(100)]),
                lambda: receive(*sent),
                lambda: memory.keep(1 << 10),
                lambda: memory.unreceived,
                may_refuse=rng is not None,
            )
        finally:
            memory.close()


def _each(*uses: Callable[[], Any], may_refuse: bool) -> None:
    perform(list(uses), may_refuse=may_refuse)


MESSAGES, ENDS, BOARDS, PARCELS = Messages(), Ends(), Boards(), Parcels()
