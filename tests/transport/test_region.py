"""Shared memory without a name: allocated on creation, sent as a descriptor, freed with its last user."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import sys
import warnings

import leaks
import numpy as np
import pytest
import region_children

from samplebatch.errors import FormatError, SharedMemoryError
from samplebatch.transport import region
from samplebatch.transport.region import Region

START_METHODS = ["fork", "forkserver", "spawn"]
MIB = 1 << 20


@pytest.fixture(params=[False, True], ids=["memfd", "named"])
def make(request):
    return lambda nbytes: Region._create(nbytes, named=request.param)


def run(context, target, *arguments) -> int:
    process = context.Process(target=target, args=arguments)
    with warnings.catch_warnings():
        # Other tests of the session may have started threads, which newer Pythons warn of at a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    process.join(60)
    assert process.exitcode == 0
    return process.pid


def test_a_new_region_is_zero_writable_and_aligned(make) -> None:
    with leaks.nothing_left(), make(5000) as result:
        assert result.nbytes == len(result.memory) == result.array.size == 5000
        assert not result.array.any()
        assert result.address % 4096 == result.array.ctypes.data % 4096 == 0
        result.array[:] = 7
        assert bytes(result.memory[4998:]) == b"\x07\x07"


def test_memory_is_retained_until_its_last_view(make) -> None:
    with leaks.nothing_left():
        result = make(MIB)
        view, array = result.memory[10:20], result.array[30:40]
        result.close()
        result.close()
        view[:] = b"0123456789"
        array[:] = 3
        assert bytes(view) == b"0123456789"
        assert result.closed
        del view, array


def test_pages_are_unmapped_with_the_last_view() -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum("memfd:samplebatch" in line for line in lines)

    before = mapped()
    result = Region.create(MIB)
    view = result.memory
    result.close()
    assert mapped() == before + 1
    del view
    assert mapped() == before


def test_a_closed_region_raises() -> None:
    result = Region.create(10)
    result.close()
    for use in (lambda: result.memory, lambda: result.array, lambda: result.address, result.warm):
        with pytest.raises(ValueError, match="the region is closed"):
            use()
    with pytest.raises(ValueError, match="descriptor is closed"):
        result.fileno()
    assert repr(result) == "<Region of 10 bytes, closed>"


@pytest.mark.parametrize("method", START_METHODS)
def test_a_child_writes_to_the_same_memory(method, make) -> None:
    context = multiprocessing.get_context(method)
    with make(64) as result:
        pid = run(context, region_children.write_pid, result)
        assert int.from_bytes(result.memory[:8], "little") == pid


@pytest.mark.parametrize("method", START_METHODS)
def test_a_region_is_sent_through_queues_and_returned(method, make) -> None:
    context = multiprocessing.get_context(method)
    queue, done = context.Queue(), context.Queue()
    result = make(64)
    process = context.Process(target=region_children.write_pid_to_what_arrives, args=(queue, done))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    queue.put(result)
    back = done.get(timeout=30)
    queue.put("fetched")
    process.join(60)
    assert int.from_bytes(result.memory[:8], "little") == int.from_bytes(back.memory[:8], "little") == process.pid
    back.memory[8] = 9
    assert result.memory[8] == 9
    for end in (queue, done):
        end.close()
        end.join_thread()


def test_a_read_only_region_is_read_only_in_a_child() -> None:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=False)
    with Region.create(64) as result, result.read_only() as observed:
        result.memory[0] = 5
        assert observed.memory[0] == 5
        assert observed.memory.readonly
        with pytest.raises(ValueError, match="read-only"):
            observed.array[0] = 1
        run(context, region_children.try_to_write, observed, child_end)
        assert parent_end.recv() == r"b'\x05\x00' cannot modify read-only memory"
        parent_end.close()
        child_end.close()


def test_peers_cannot_shrink_a_region() -> None:
    with Region.create(8192) as result:
        for size in (0, 4096, 16384):
            with pytest.raises(OSError, match="not permitted") as refused:
                os.ftruncate(result.fileno(), size)
            assert refused.value.errno == errno.EPERM


def handed_over(nbytes: int, **options) -> Region:
    with Region._create(8192, named=options.pop("named", False)) as result:
        return Region.attach(os.dup(result.fileno()), nbytes, **options)


@pytest.mark.parametrize("claimed", [-1, 0, 1, 4096, 8191, 8193, 1 << 40])
def test_a_wrong_size_is_rejected(claimed) -> None:
    with leaks.nothing_left(), pytest.raises(FormatError, match=rf"a file of {claimed} bytes, got one of 8192"):
        handed_over(claimed)


def test_memory_that_can_be_shrunk_is_rejected() -> None:
    with leaks.nothing_left():
        with pytest.raises(FormatError, match="sealed against shrinking"):
            handed_over(8192, named=True)
        unsealed = os.memfd_create("unsealed")
        os.ftruncate(unsealed, 8192)
        with pytest.raises(FormatError, match="sealed against shrinking"):
            Region.attach(unsealed, 8192)


def test_descriptors_without_memory_are_rejected() -> None:
    with leaks.nothing_left():
        ends = os.pipe()
        for end in ends:
            with pytest.raises(FormatError, match="must be a file of 10 bytes"):
                Region.attach(end, 10)


def test_an_attached_region_shares_the_same_memory(make) -> None:
    with make(100) as result, Region.attach(os.dup(result.fileno()), 100, sealed=False) as other:
        other.array[99] = 4
        assert result.array[99] == 4


def test_a_region_may_close_its_descriptor() -> None:
    with Region.create(100) as result:
        before = len(leaks.descriptors())
        result.close_descriptor()
        assert len(leaks.descriptors()) == before - 1
        result.array[:] = 1
        with pytest.raises(ValueError, match="descriptor is closed"):
            multiprocessing.reduction.ForkingPickler.dumps(result)


def test_executed_programs_do_not_inherit_a_region(make) -> None:
    with make(10) as result:
        assert not os.get_inheritable(result.fileno())
        code = f"import os; print(os.path.exists('/proc/self/fd/{result.fileno()}'))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False)
        assert done.stdout.strip() == "False"


def test_plain_pickle_of_a_region_is_rejected() -> None:
    with Region.create(10) as result, pytest.raises(TypeError, match="must be pickled by multiprocessing"):
        pickle.dumps(result)


def test_warming_does_not_change_contents() -> None:
    with Region.create(3 * MIB + 5) as result, result.read_only() as observed:
        result.array[:] = np.arange(result.nbytes) % 251
        before = result.array.copy()
        for start, stop in ((0, None), (5000, 5001), (3 * MIB, 9 * MIB), (9 * MIB, None)):
            result.warm(start, stop)
            observed.warm(start, stop)
        np.testing.assert_array_equal(observed.array, before)


def test_warm_pages_are_mapped() -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    with Region.create(16 * MIB) as result:
        result.warm()
        array, before = result.array, faults()
        array[:] = 1
        assert faults() - before < 16 * MIB // 4096 // 4


def test_discarded_pages_are_free_and_read_as_zeros(make) -> None:
    with make(MIB + 100) as result:
        result.array[:] = 1
        allocated = os.stat(result.fileno()).st_blocks * 512
        result.discard(5000)
        assert os.stat(result.fileno()).st_blocks * 512 == allocated - (MIB + 4096) + 8192
        assert result.array[:8192].all()
        assert not result.array[8192:].any()
        result.discard(2 * MIB)
        result.array[:] = 2
        assert result.array.all()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_region_is_rejected(nbytes) -> None:
    with pytest.raises(ValueError, match=f"positive number of bytes, got {nbytes}"):
        Region.create(nbytes)


def test_more_memory_than_the_machine_provides_is_rejected(make) -> None:
    free = region.free_nbytes()
    with leaks.nothing_left(), pytest.raises(SharedMemoryError, match=rf"^{1 << 50} bytes .* got \d+ free bytes"):
        make(1 << 50)
    assert free is None or free < 1 << 50


def test_more_memory_than_a_limit_allows_is_rejected(make, monkeypatch) -> None:
    monkeypatch.setattr(region, "free_nbytes", lambda: 3 * MIB)
    with leaks.nothing_left():
        make(3 * MIB).close()
        with pytest.raises(
            SharedMemoryError, match=f"^{4 * MIB} bytes of shared memory must be free, got {3 * MIB} free bytes"
        ):
            make(4 * MIB)


def test_errors_of_the_kernel_contain_the_size(make) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with leaks.nothing_left(), pytest.raises(SharedMemoryError, match=rf"^{2 * MIB} bytes .*File too large"):
            make(2 * MIB)
        make(MIB).close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_unknown_free_memory_is_reported_in_the_error(monkeypatch) -> None:
    monkeypatch.setattr(region, "free_nbytes", lambda: None)
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.ENOSPC))
    with leaks.nothing_left(), pytest.raises(SharedMemoryError, match=r"got an unknown number .*No space left"):
        Region.create(MIB)


def test_other_errors_are_raised_unchanged(monkeypatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
    with leaks.nothing_left(), pytest.raises(OSError, match="Input/output"):
        Region.create(MIB)


def fail_with(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


FULL_FOLDER = """
import os, sys
from samplebatch.errors import SharedMemoryError
from samplebatch.transport import region
from samplebatch.transport.region import Region
full = sys.argv[1]
if full == "told":
    region._obtainable_nbytes = lambda **_: None
Region._create(600_000, named=True).memory[599_999] = 1
kept = Region._create(600_000, named=True)
try:
    Region._create(600_000, named=True)
except SharedMemoryError as error:
    print(error)
print(os.listdir("/dev/shm"))
"""


@pytest.mark.parametrize("full", ["foreseen", "told"])
def test_a_full_shared_memory_folder_raises_on_creation(full) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    script = 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"'
    command = [unshare, "-m", "sh", "-c", script, "sh", sys.executable, "-c", FULL_FOLDER, full]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    message, left = done.stdout.splitlines()
    assert message.startswith("600000 bytes of shared memory must be free, got ")
    assert "No space left" in message
    assert left == "[]"


def test_many_regions_are_created_and_freed() -> None:
    with leaks.nothing_left():
        for _ in range(300):
            Region.create(70_000).array[:] = 1


def test_deleting_a_region_closes_it() -> None:
    with leaks.nothing_left():
        retained = [Region.create(5000) for _ in range(20)]
        assert len({result.fileno() for result in retained}) == 20
        del retained


def test_seals_prevent_resizing_and_further_seals() -> None:
    import fcntl

    assert region._SEALS == fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def test_a_region_closes_without_output_at_interpreter_exit():
    code = "from samplebatch.transport import region; held = region.Region.create(4096); region.os = None; del held"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr == ""
