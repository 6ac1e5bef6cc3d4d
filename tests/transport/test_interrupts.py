"""Signal handlers that raise at any moment: no block is lost, and the stream stays complete and ordered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samplebatch import SampleBatch, channel
from samplebatch.errors import ChannelTimeoutError

STREAM = Path(__file__).parent / "interrupts.py"
INTERRUPTS = int(os.environ.get("SAMPLEBATCH_INTERRUPTS", "1500"))


@pytest.mark.parametrize("kind", ["channel", "gather", "broadcast", "queue"])
def test_interrupts_at_random_moments_lose_nothing(kind: str) -> None:
    done = subprocess.run(
        [sys.executable, str(STREAM), kind, "--interrupts", str(INTERRUPTS), "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=60 + INTERRUPTS / 50,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    interrupts, batches = (int(part.split()[0]) for part in done.stdout.split(","))
    assert interrupts >= INTERRUPTS
    assert batches > INTERRUPTS // 50


class Interruption(Exception):
    """Exception that a signal handler raises."""


def test_a_batch_of_an_interrupted_recv_is_returned_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = channel(1 << 16)
    for i in range(2):
        producer.send(SampleBatch(i=[i]))
    assert consumer.poll()

    def interrupted(_: object) -> None:
        raise Interruption

    for name in ("Lease", "LeaseRef", "decode"):
        monkeypatch.setattr(f"samplebatch.transport.decode.{name}", lambda *_, **__: interrupted(_))
        with pytest.raises(Interruption):
            consumer.recv(timeout_s=0)
        assert consumer.poll()
        monkeypatch.undo()
    assert [consumer.recv(timeout_s=0)["i"].item() for _ in range(2)] == [0, 1]
    with pytest.raises(ChannelTimeoutError):
        consumer.recv(timeout_s=0)
    producer._blocks.collect()
    assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes
    producer.close()
    consumer.close()


def test_a_producer_reports_whether_an_interrupted_batch_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = channel(1 << 16)
    write = os.write
    assert producer.sent == 0

    def interrupted(*arguments: object) -> int:
        write(*arguments)  # type: ignore[arg-type]
        raise Interruption

    producer.send(SampleBatch(i=[0]))
    assert producer.sent == 1
    monkeypatch.setattr("samplebatch.transport.producer._write", interrupted)
    with pytest.raises(Interruption):
        producer.send(SampleBatch(i=[1]))
    assert producer.sent == 2
    block = producer.reserve({"i": "i8"}, 1)
    block["i"][:] = 2
    with pytest.raises(Interruption):
        block.commit()
    assert producer.sent == 3
    monkeypatch.undo()
    monkeypatch.setattr("samplebatch.transport.wire.pack_body", interrupted)
    with pytest.raises(TypeError):
        producer.send(SampleBatch(i=[9]))
    assert producer.sent == 3
    monkeypatch.undo()
    producer.send(SampleBatch(i=[3]))
    assert [consumer.recv(timeout_s=0)["i"].item() for _ in range(4)] == [0, 1, 2, 3]
    producer.fail("no more")
    assert producer.sent == 4
    producer._blocks.collect()
    assert producer._blocks.arena.free_nbytes == producer._blocks.arena.nbytes
    producer.close()
    consumer.close()
