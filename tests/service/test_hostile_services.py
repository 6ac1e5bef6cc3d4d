"""Invalid answers of a service are one error each; the next call opens another session instead of waiting forever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from samplebatch.batch.nested.batch import Batch
from samplebatch.errors import FormatError
from samplebatch.service import ReplayClient, RowClient
from samplebatch.service.items import Sample
from samplebatch.service.protocol import write_json
from samplebatch.service.samples import RowsStream, inline, pack


def valid_sample() -> bytes:
    sample = Sample(Batch(obs=np.array([5, 6])), np.array([0, 1]), np.array([1, 1]))
    return bytes(inline([RowsStream(pack(sample).batch)]))


class HostileService(flight.FlightServerBase):  # type: ignore[misc]
    """Service that answers each request of its first session with invalid messages, and later sessions as it should."""

    def __init__(self, invalid: list[bytes]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._invalid = invalid
        self.sessions = 0

    def do_action(self, context: Any, action: Any) -> Any:
        return [pa.py_buffer(b"{}")]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.sessions += 1
        messages = self._invalid if self.sessions == 1 else [valid_sample()]
        for _ in reader:
            for message in messages:
                writer.write_metadata(pa.py_buffer(message))


@contextmanager
def serving(invalid: list[bytes]) -> Iterator[HostileService]:
    with HostileService(invalid) as service:
        yield service


INVALID = {
    "no JSON": ([b"\xff\x00garbage"], "must be a JSON object"),
    "no Arrow stream": ([b'{"streams":[64]}\n' + bytes(64)], "must be an Arrow stream"),
    "sizes that exceed the message": ([b'{"streams":[6400]}\n' + bytes(64)], "must have the sizes that their message"),
    "address of no memory": ([b'{"at":["x"]}'], "address of a sample in shared memory must be valid"),
    "answer to an update": ([b'{"updated":1}'], "must have a request, got the answer to an update"),
    "rejection of an update": (
        [write_json({"error": "ArgumentError", "message": "no", "of": "update"})],
        "must have a request, got the answer to an update",
    ),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("case", INVALID)
def test_a_client_opens_another_session_after_an_invalid_answer(case: str, prefetch: int) -> None:
    messages, why = INVALID[case]
    with (
        serving(messages) as service,
        ReplayClient(f"grpc://127.0.0.1:{service.port}", "replay", shared_memory=False, prefetch=prefetch) as client,
    ):
        with pytest.raises(FormatError, match=why):
            client.sample(2)
        assert client.sample(2).batch.obs.tolist() == [5, 6]
        assert client.sample(2).batch.obs.tolist() == [5, 6]
        assert service.sessions == 2


def test_answers_without_a_request_are_an_error_and_do_not_fill_the_memory() -> None:
    with (
        serving([valid_sample()] * 3) as service,
        ReplayClient(f"grpc://127.0.0.1:{service.port}", "replay", shared_memory=False) as client,
    ):
        assert client.sample(2).batch.obs.tolist() == [5, 6]
        with pytest.raises(FormatError, match=r"must have a request, got \d+ answers to \d+ requests"):
            [client.sample(2) for _ in range(1000)]
        assert client.sample(2).batch.obs.tolist() == [5, 6]
        assert service.sessions == 2


def test_a_row_client_opens_another_session_after_answers_without_a_request() -> None:
    with (
        serving([b"{}", b"{}", b"{}"]) as service,
        RowClient(f"grpc://127.0.0.1:{service.port}", "rows", shared_memory=False) as client,
    ):
        # The surplus is noticed when the receiving thread has read it.
        for _ in range(1000):
            with pytest.raises(FormatError):
                client.sample(2)
            if service.sessions == 2:
                break
        assert service.sessions == 2
