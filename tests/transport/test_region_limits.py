"""Estimates of free memory from the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from samplebatch.transport import region

GIB = 1 << 30
STAT = "anon 5\nactive_file {active}\ninactive_file {inactive}\n"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Replace the kernel's files with those of a machine with 8 GiB of free memory."""
    monkeypatch.setattr(region, "_MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(region, "_GROUPS", str(tmp_path / "cgroup"))
    monkeypatch.setattr(region, "_MOUNT", str(tmp_path / "mount"))
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:  {8 * GIB >> 10} kB\n")
    return tmp_path


def group(folder: Path, limit: str, usage: int, *, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(STAT.format(active=0, inactive=cached))


def test_without_cgroups_the_machine_is_the_limit(kernel) -> None:
    assert region.free_nbytes() == 8 * GIB
    (kernel / "cgroup").write_text("0::/\n")
    assert region.free_nbytes() == 8 * GIB


def test_the_tightest_parent_cgroup_is_the_limit(kernel) -> None:
    (kernel / "cgroup").write_text("0::/outer/inner\n")
    group(kernel / "mount" / "outer", str(4 * GIB), 3 * GIB)
    group(kernel / "mount" / "outer" / "inner", str(2 * GIB), 0)
    assert region.free_nbytes() == GIB
    group(kernel / "mount" / "outer", "max", 3 * GIB)
    assert region.free_nbytes() == 2 * GIB


def test_cached_files_count_as_free(kernel) -> None:
    (kernel / "cgroup").write_text("0::/one\n")
    group(kernel / "mount" / "one", str(2 * GIB), 2 * GIB - 100, cached=1000)
    assert region.free_nbytes() == 1100


def test_a_cgroup_over_its_limit_has_no_free_memory(kernel) -> None:
    (kernel / "cgroup").write_text("0::/one\n")
    group(kernel / "mount" / "one", "1000", 2000)
    assert region.free_nbytes() == 0


def test_the_root_cgroup_is_the_limit_in_a_container(kernel) -> None:
    (kernel / "cgroup").write_text("0::/host/only\n")
    group(kernel / "mount", str(GIB), 0)
    assert region.free_nbytes() == GIB


def test_cgroups_of_version_1_are_supported(kernel) -> None:
    (kernel / "cgroup").write_text("9:name=systemd:/\n4:memory:/jobs/one\n0::/\n")
    folder = kernel / "mount" / "memory" / "jobs" / "one"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("5000\n")
    (folder / "memory.usage_in_bytes").write_text("1000\n")
    (folder / "memory.stat").write_text("total_active_file 10\ntotal_inactive_file 20\n")
    assert region.free_nbytes() == 4030


def test_missing_memory_information_is_reported_as_unknown(kernel) -> None:
    (kernel / "meminfo").unlink()
    assert region.free_nbytes() is None


def test_free_memory_of_a_folder(tmp_path) -> None:
    free = region.free_in_folder(str(tmp_path))
    assert free is not None
    assert free > 0
    assert region.free_in_folder(str(tmp_path / "absent")) is None
