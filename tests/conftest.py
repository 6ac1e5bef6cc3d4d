"""Hypothesis settings, comparison reports of batches, environment paths and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from doctest import UnexpectedException
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from samplebatch import SampleBatch
from tests.optional import missing_package
from tests.uncompiled import uncompile_tianshou

# Its modules change the process that imports them.
collect_ignore = ["posix_only"]

# A shell that runs the tests in the background lets them ignore Ctrl-C, and with them all to which they send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Worker processes import the environments of tests by name.
sys.path.insert(0, str(Path(__file__).parent / "rollout"))

uncompile_tianshou()

settings.register_profile("local", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


NEEDS = {
    "samplebatch.convert.jax": "jax",
    "samplebatch.convert.rllib": "ray",
    "samplebatch.convert.sb3": "stable_baselines3",
    "samplebatch.convert.torchrl": "tensordict",
    "samplebatch.convert.tianshou": "tianshou",
}
"""Modules to the package that the examples of their docstrings need."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the garbage collector during test collection, where it uses a quarter of the time and frees nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip examples of docstrings whose packages are not installed; reject names that differ between processes."""
    for item in items:
        if " at 0x" in item.name:
            raise pytest.UsageError(f"a test's name must have no address, use tests.ids.plain_repr: {item.nodeid}")
        module = item.name.rpartition(".")[0]
        if isinstance(item, pytest.DoctestItem) and module in NEEDS and find_spec(NEEDS[module]) is None:
            item.add_marker(pytest.mark.skip(f"{NEEDS[module]} is not installed"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip modules that import a package that is not installed."""
    report = yield
    call: Any = getattr(report, "call", None)
    error = call.excinfo.value if report.failed and call is not None and call.excinfo is not None else None
    package = missing_package(error) or missing_package(getattr(error, "__cause__", None))
    if package is not None:
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {package} is not installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip tests that import a package that is not installed."""
    try:
        return (yield)
    except (ImportError, UnexpectedException) as error:
        package = missing_package(error.exc_info[1] if isinstance(error, UnexpectedException) else error)
        if package is None:
            raise
        pytest.skip(f"{package} is not installed")


def pytest_sessionfinish() -> None:
    """Unfreeze the objects of `_frozen_heap`, because libraries search for leaks at exit."""
    gc.unfreeze()


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Report both batches; pytest would compare batches as mappings, array by array, and fail."""
    if op == "==" and isinstance(left, SampleBatch) and isinstance(right, SampleBatch):
        return ["the batches differ", *str(left).splitlines(), *str(right).splitlines()]
    return None


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> None:
    """Freeze all existing objects, because a garbage collection over the peers' modules takes a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _no_cluster_left() -> Iterator[None]:
    """Disconnect from the Ray cluster that a test started or joined; the next file starts a new cluster."""
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """Path of the folder that a malicious pickle would create; check that no pickle created the folder."""
    path = tmp_path / "code has run"
    yield path
    assert not path.exists()
