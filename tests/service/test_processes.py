"""Services and clients in processes of their own: killed, stopped and restarted, with nothing lost or left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import SampleBatch
from samplebatch.errors import ServiceError
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
from samplebatch.service.server import _cut_connections
from tests.service.table_rows import episode

ROOT = Path(__file__).parents[2]

SERVE = """
import sys, time
import numpy as np
from samplebatch import SampleBatch
from samplebatch.service import ReplayServer, ReplayTable
table = ReplayTable("replay", capacity=1000, seed=3)
images = np.random.default_rng(0).integers(0, 255, (400, 64, 64), np.uint8)
flags = np.zeros(400, bool)
if "filled" in sys.argv:
    table.extend(SampleBatch(obs=images, new_obs=images, actions=flags, rewards=flags, terminateds=flags))
with ReplayServer([table], port=int(sys.argv[1])) as server:
    print(server.port, flush=True)
    time.sleep(600)
"""

QUEUE = """
import signal, sys, threading
from samplebatch.service import Checkpoints, ReplayServer, ReplayTable
table = ReplayTable("queue", kind="queue", capacity=1000)
checkpoints = Checkpoints(sys.argv[2])
checkpoints.restore([table])
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
with ReplayServer([table], port=int(sys.argv[1]), checkpoint=lambda: checkpoints.write([table]).path) as server:
    print(server.port, flush=True)
    ended.wait()
checkpoints.write([table])
"""

READ = """
import os, sys
from samplebatch.service import ReplayClient
client = ReplayClient(f"grpc://127.0.0.1:{sys.argv[1]}", "replay", shared_memory="wire" not in sys.argv)
kept = [client.sample(256) for _ in range(2)]
print(int(client._only._nonce is not None), flush=True)
"""
SLEEP = "import time; time.sleep(600)"
STREAM = """
stream = client.stream(256, prefetch=8)
while True:
    kept.append(next(stream))
"""


@contextmanager
def running(code: str, *arguments: str) -> Iterator[tuple[Any, str]]:
    """Run Python code in a process; yield the process and the first printed line. The process is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, "the process must print a line"
        yield process, line
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def shared_mappings(pid: int | str = "self") -> int:
    """Count the regions of shared memory that a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:samplebatch")


def shared_descriptors(pid: int) -> int:
    actual = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            actual += "memfd:samplebatch" in os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
    return actual


def wait_until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_client_continues_when_the_service_is_killed_and_started_again() -> None:
    with running(SERVE, "0") as (server, port):
        client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay", reconnect_s=60.0)
        client.extend(episode(0, range(5)))
        assert len(client) == 5
        client.sample(4)
        server.kill()
        server.wait()
        with running(SERVE, port):
            # One is under way, the others are sent to the new service.
            for number in range(1, 4):
                client.extend(episode(number, range(5)))
            assert len(client) == 15
            assert client.written.rows == 20
            assert client.sample(4)[1].shape == (4,)
            stream = client.stream(4)
            next(stream)
            stream.close()
        client._end()


def test_a_client_reports_how_long_it_has_retried() -> None:
    with running(SERVE, "0") as (server, port):
        client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay", reconnect_s=0.5)
        client.extend(episode(0, range(5)))
        client.flush()
        server.kill()
        server.wait()
        began = time.monotonic()
        with pytest.raises(ServiceError, match="must be reachable, got no answer for"):
            client.sample(4)
        assert time.monotonic() - began < 20.0
        client._end()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("prefetch", [0, 4])
def test_a_stream_continues_when_the_service_is_ended_and_started_again(
    sign: signal.Signals, prefetch: int, tmp_path: Path
) -> None:
    actual: list[int] = []

    def read() -> None:
        numbers = (int(fragment["eps_id"][0]) for fragment in reader.stream(prefetch=prefetch))
        with pytest.raises(ServiceError, match="got a closed one"):
            actual.extend(numbers)

    folder = str(tmp_path / "checkpoints")
    with running(QUEUE, "0", folder) as (server, port):
        uri = f"grpc://127.0.0.1:{port}"
        reader, writer = (ReplayClient(uri, "queue", reconnect_s=60.0) for _ in range(2))
        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        for number in range(3):
            writer.extend(episode(number, range(5)))
        writer.flush()
        # The reader waits for more when the service ends.
        wait_until(lambda: len(actual) == 3)
        server.send_signal(sign)
        server.wait()
        with running(QUEUE, port, folder):
            for number in range(3, 9):
                writer.extend(episode(number, range(5)))
            writer.flush()
            wait_until(lambda: len(actual) >= 9)
            assert actual == [*range(9)]
            assert (writer.written.fragments, writer.written.refused) == (9, 0)
            reader._end()
            reading.join(20.0)
            assert not reading.is_alive()
        writer._end()


def test_a_stream_yields_received_samples_before_it_raises_an_error() -> None:
    with running(SERVE, "0", "filled") as (server, port):
        client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay", reconnect_s=0.5)
        stream = client.stream(8, prefetch=4)
        next(stream)
        (session,) = client._only._streaming
        wait_until(lambda: len(session._answers._inbox.answers) == 4)
        server.kill()
        server.wait()
        for _ in range(4):
            assert len(next(stream)) == 8
        began = time.monotonic()
        with pytest.raises(ServiceError, match="must be reachable, got no answer for"):
            next(stream)
        assert time.monotonic() - began < 20.0
        client._end()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared by the paths of descriptors")
def test_samples_are_mapped_from_a_service_that_was_started_again() -> None:
    before = shared_mappings()
    with running(SERVE, "0", "filled") as (server, port):
        client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay", reconnect_s=60.0)
        client.sample(256)
        server.kill()
        server.wait()
        wait_until(lambda: shared_mappings() == before)
        with running(SERVE, port, "filled"):
            batch, _ = client.sample(256)
            assert batch.obs.shape == (256, 64, 64)
            assert shared_mappings() > before
        client._end()


def test_fragments_stored_before_a_lost_connection_are_inserted_once() -> None:
    table = ReplayTable("replay", capacity=1000)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "replay") as client:
        for number in range(30):
            client.extend(episode(number, range(5)))
            if number % 7 == 3:
                _cut_connections(server.port)
        assert len(client) == client.written.rows == 150
        assert sorted(table._items.buffer[:].obs.tolist()) == [  # type: ignore[attr-defined]
            100.0 * number + t for number in range(30) for t in range(5)
        ]


CHECKPOINT_AND_DIE = """
import os, signal, sys, time
from samplebatch.service import Checkpoints, ReplayServer, ReplayTable
table = ReplayTable("replay", capacity=1000, seed=3)
checkpoints = Checkpoints(sys.argv[2])
checkpoints.restore([table])
insert = table.extend

def take_and_die(rows, **options):
    found = insert(rows, **options)
    if len(table) == 35:
        checkpoints.write([table])
        os.kill(os.getpid(), signal.SIGKILL)
    return found

if "dies" in sys.argv:
    table.extend = take_and_die
with ReplayServer([table], port=int(sys.argv[1])) as server:
    print(server.port, flush=True)
    time.sleep(600)
"""


def test_a_service_killed_before_acknowledging_inserts_each_fragment_once(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "checkpoints")
    with running(CHECKPOINT_AND_DIE, "0", folder, "dies") as (server, port):
        client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay")
        for number in range(8):
            client.extend(episode(number, range(5)))
        assert server.wait(20.0) == -signal.SIGKILL
        with running(CHECKPOINT_AND_DIE, port, folder):
            client.flush()
            episodes, _ = client.sample_episodes(64, seed=0)
            assert len(client) == client.written.rows == 40
            assert {int(item.obs[0]) // 100 for item in episodes} == {*range(8)}
        client._end()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared by the paths of descriptors")
def test_memory_of_mapped_samples_is_removed_after_a_killed_service() -> None:
    before = shared_mappings()
    with running(SERVE, "0", "filled") as (server, port):
        client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay", reconnect_s=0.2)
        batch, indices = client.sample(256)
        assert shared_mappings() > before
        retained = batch.obs.copy()
        server.kill()
        server.wait()
        # The sample lives on with who has it.
        assert (batch.obs == retained).all()
        assert batch.obs.shape == (256, 64, 64)
        client._end()
    del batch, indices
    wait_until(lambda: shared_mappings() == before)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("sb-", "samplebatch"))]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is shared by the paths of descriptors")
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_memory_of_a_killed_client_is_released(sign: int) -> None:
    with running(SERVE, "0", "filled") as (server, port):
        with running(READ + SLEEP, port) as (reader, is_mapped):
            assert is_mapped == "1"
            assert shared_descriptors(server.pid) >= 3
            reader.send_signal(sign)
            reader.wait()
        # The secret stays.
        wait_until(lambda: shared_descriptors(server.pid) == 1)


def test_a_client_that_retains_samples_receives_others_by_network() -> None:
    table = ReplayTable("replay", capacity=400, seed=1)
    images = np.zeros((400, 64, 64), np.uint8)
    table.extend(
        SampleBatch(obs=images, actions=images[:, 0, 0], rewards=images[:, 0, 0], terminateds=np.zeros(400, bool))
    )
    with (
        ReplayServer([table], max_shared_nbytes=8 << 20) as server,
        ReplayClient(server.uri, "replay") as client,
    ):
        before = shared_mappings()
        retained = [client.sample(256)[0] for _ in range(12)]
        # Twice each: the service is in this process, too.
        assert 0 < shared_mappings() - before <= 2 * (8 << 20) // retained[0].obs.nbytes + 2
        assert all(batch.obs.shape == (256, 64, 64) for batch in retained)


@pytest.mark.parametrize("way", ["shared", "wire"])
def test_a_stopped_client_does_not_affect_other_clients(way: str) -> None:
    step = np.zeros((1, 64, 64), np.uint8)
    flag = np.zeros(1, bool)
    rows = SampleBatch(obs=step, new_obs=step, actions=flag, rewards=flag, terminateds=~flag)
    with running(SERVE, "0", "filled") as (server, port), ReplayClient(f"grpc://127.0.0.1:{port}", "replay") as client:
        client.sample(256)
        with running(READ + STREAM, port, way) as (reader, _), running(READ + STREAM, port, way) as (other, _):
            for process in (reader, other):
                process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            before, began = resident_nbytes(server.pid), time.monotonic()
            for _ in range(20):
                client.sample(256)
                client.extend(rows)
            client.flush()
            assert time.monotonic() - began < 20.0
            assert resident_nbytes(server.pid) - before < 64 << 20


def resident_nbytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


FORK = """
import os, sys
from samplebatch.service import ReplayClient
client = ReplayClient(sys.argv[1], "replay")
client.info()
if not os.fork():
    try:
        client.info()
    except Exception as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
os.wait()
print(client.info()["size"], flush=True)
stream = client.stream(1)
"""


def test_a_forked_child_cannot_use_the_client() -> None:
    with ReplayServer([ReplayTable("replay", capacity=10)]) as server, running(FORK, server.uri) as (process, line):
        assert line == "OwnershipError"
        assert process.stdout.read() == "0\n"
        # It ends, though nobody has closed the client.
        assert process.wait(20.0) == 0


FORKED = """
import json, os, signal, sys, threading, time
from samplebatch.service import MetricsServer, ReplayClient, ReplayServer, ReplayTable
step = {"obs": [1], "act": [0], "rew": [1.0], "terminated": [True], "truncated": [False]}
server = ReplayServer([ReplayTable("replay", capacity=10)]).start()
metrics = MetricsServer(server.tables.values()).__enter__()
client = ReplayClient(sys.argv[1], "replay", prefetch=2)
sharded = ReplayClient([sys.argv[1], server.uri], "replay")
for one in (client, sharded):
    one.extend(step)
    one.flush()
    one.sample(1)
streams = [one.stream(1) for one in (client, sharded)]
for stream in streams:
    next(stream)
client.extend(step)
holds, ends = threading.Event(), threading.Event()

def hold_locks():
    with client._only._lock, sharded._lock:
        holds.set()
        ends.wait()

holder = threading.Thread(target=hold_locks)
holder.start()
holds.wait()
for code in json.loads(sys.argv[2]):
    child = os.fork()
    if not child:
        try:
            exec(code)
            print(code, flush=True)
        except Exception as error:
            print(code, type(error).__name__, flush=True)
        # As an interpreter ends: destructors and exit functions run.
        sys.exit(0)
    deadline = time.monotonic() + 30.0
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            print(code, "does not end", flush=True)
        time.sleep(0.01)
ends.set()
holder.join()
for stream in streams:
    next(stream)
client.sample(1)
client.extend(step)
print(client.info()["size"], ReplayClient(server.uri, "replay").info()["size"], flush=True)
for one in (*streams, client, sharded, metrics, server):
    one.close()
"""


def test_a_forked_child_does_not_close_clients_of_its_parent() -> None:
    expected = [
        "client.close(); client.close()",
        "client.__exit__(None, None, None); client.__exit__(ValueError, None, None)",
        "sharded.close(); sharded.__exit__(ValueError, None, None)",
        "del client, sharded, streams, server; import gc; gc.collect()",
        "[stream.close() for stream in streams]",
        "server.close(); metrics.close()",
        "client.sample(1) OwnershipError",
        "sharded.sample(1) OwnershipError",
        "next(streams[0]) OwnershipError",
        "next(streams[1]) OwnershipError",
        "server.serve() OwnershipError",
        "ReplayClient(sys.argv[1], 'replay') OwnershipError",
        "ReplayServer([ReplayTable('replay', capacity=10)]) OwnershipError",
        "import pickle; pickle.loads(pickle.dumps(sharded)) OwnershipError",
    ]
    codes = json.dumps([line.removesuffix(" OwnershipError") for line in expected])
    with ReplayServer([ReplayTable("replay", capacity=10)]) as server:
        ended = subprocess.run(
            [sys.executable, "-c", FORKED, server.uri, codes], capture_output=True, text=True, timeout=240,
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    *codes_of_children, sizes = ended.stdout.splitlines() or [""]
    assert codes_of_children == expected, ended.stderr
    # The step of the client of two services goes to one of them, by a hash of their addresses.
    assert sizes in ("4 0", "3 1"), ended.stderr
    assert ended.returncode == 0


LISTEN_AND_FORK = """
import os, sys, time
from samplebatch.service import ReplayServer, ReplayTable
server = ReplayServer([ReplayTable("replay", capacity=10)]).start()
child = os.fork()
if not child:
    time.sleep(60)
print(server.port, child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_does_not_listen_for_a_server_that_was_killed() -> None:
    with running(LISTEN_AND_FORK) as (process, line):
        port, child = line.split()
        try:
            process.kill()
            process.wait()
            client = ReplayClient(f"grpc://127.0.0.1:{port}", "replay", reconnect_s=0.5)
            with pytest.raises(ServiceError, match="must be reachable"):
                client.info()
            client._end()
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_blocked_sample_is_not_sent_to_a_closed_client() -> None:
    table = ReplayTable("queue", kind="queue", capacity=10)
    with ReplayServer([table]) as server, ReplayClient(server.uri, "queue") as client:
        with running(
            "import sys; from samplebatch.service import ReplayClient\n"
            "client = ReplayClient(sys.argv[1], 'queue')\nprint('begins', flush=True)\nclient.sample(1)",
            server.uri,
        ) as (reader, _):
            wait_until(lambda: len(table.info()["held_back"]) == 1)
            reader.kill()
            reader.wait()
        wait_until(lambda: not table.info()["held_back"])
        client.extend(episode(0, range(3)))
        client.flush()
        assert len(client.sample(1)[0]) == 3


def test_a_server_closes_while_clients_wait_and_streams_are_open() -> None:
    table = ReplayTable("queue", kind="queue", capacity=10)
    actual: list[Exception] = []
    with ReplayServer([table]) as server:
        client = ReplayClient(server.uri, "queue", reconnect_s=0.1)

        def read() -> None:
            try:
                client.sample(1)
            except Exception as error:
                actual.append(error)

        waiting = threading.Thread(target=read)
        waiting.start()
        idle = ReplayClient(server.uri, "queue", reconnect_s=0.1)
        idle.extend(episode(0, range(2)))
        idle.flush()
        idle.extend(episode(0, range(2)))
        idle.flush()
        waiting.join()
        waiting = threading.Thread(target=lambda: (client.sample(1), read()))
        waiting.start()
        wait_until(lambda: bool(table.info()["held_back"]))
        began = time.monotonic()
    assert time.monotonic() - began < 10.0
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert len(actual) == 1
    for item in (client, idle):
        item._end()


def test_an_interpreter_exits_with_an_open_server_and_client() -> None:
    code = """
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
server = ReplayServer([ReplayTable("replay", capacity=10)]).start()
client = ReplayClient(server.uri, "replay")
client.extend({"obs": [1], "act": [0], "rew": [1.0], "terminated": [True], "truncated": [False]})
client.sample(1)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
