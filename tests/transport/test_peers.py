"""Detection of dead processes, including zombies and reused process ids."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import leaks
import pytest

from samplebatch.transport import peers
from samplebatch.transport.peers import ProcessIdentity, ProcessWatch

SLEEPER = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


@pytest.fixture
def child():
    with subprocess.Popen(SLEEPER, stdout=subprocess.PIPE) as started:
        started.stdout.readline()
        yield started
        started.kill()


def identity_of(pid: int) -> ProcessIdentity:
    return ProcessIdentity(pid, peers._state_of(pid)[1])


@pytest.fixture(params=["descriptor", "number"])
def way(request, monkeypatch):
    """Watch a process by its descriptor, or only by its process id."""
    if request.param == "number":
        monkeypatch.delattr(os, "pidfd_open")


def kill_and_leave_unburied(child) -> None:
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.usefixtures("way")
def test_a_child_lives_until_it_is_killed(child) -> None:
    watch = ProcessWatch(identity_of(child.pid))
    assert watch.is_alive()
    kill_and_leave_unburied(child)
    assert not watch.is_alive()
    child.wait()
    assert not watch.is_alive()
    watch.close()
    assert not watch.is_alive()


@pytest.mark.usefixtures("way")
def test_a_process_that_has_already_ended_is_not_alive(child) -> None:
    identity = identity_of(child.pid)
    kill_and_leave_unburied(child)
    assert not ProcessWatch(identity).is_alive()
    assert not peers.is_alive(identity)
    child.wait()
    assert not ProcessWatch(identity).is_alive()
    assert not peers.is_alive(identity)


@pytest.mark.usefixtures("way")
def test_a_later_process_with_the_same_number_is_another() -> None:
    ours = ProcessIdentity.own()
    assert ProcessWatch(ours).is_alive()
    assert peers.is_alive(ours)
    assert not ProcessWatch(ours._replace(started=ours.started + 1)).is_alive()
    assert not peers.is_alive(ours._replace(started=ours.started + 1))


@pytest.mark.parametrize("pid", [0, -1, -(1 << 31)])
def test_identities_without_a_pid_are_not_alive(pid) -> None:
    assert not ProcessWatch(ProcessIdentity(pid, 0)).is_alive()
    assert not peers.is_alive(ProcessIdentity(pid, 0))


def test_a_process_of_another_user_is_alive(monkeypatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert peers.is_alive(ProcessIdentity.own())


@pytest.mark.usefixtures("child")
def test_only_the_pid_is_compared_without_proc_and_pidfd(monkeypatch, tmp_path, child) -> None:
    monkeypatch.setattr(peers, "_PROC", tmp_path)
    monkeypatch.delattr(os, "pidfd_open")
    assert ProcessIdentity.own() == (os.getpid(), 0)
    watch = ProcessWatch(ProcessIdentity(child.pid, 0))
    assert watch.fileno() == -1
    assert watch.is_alive()
    child.kill()
    child.wait()
    assert not watch.is_alive()


def test_the_descriptor_is_readable_once_the_process_has_ended(child) -> None:
    with leaks.nothing_left():
        watch = ProcessWatch(identity_of(child.pid))
        assert select.select([watch], [], [], 0)[0] == []
        child.kill()
        assert select.select([watch], [], [], 30)[0] == [watch]
        watch.close()
        watch.close()
        del watch


def test_program_names_may_contain_any_characters(tmp_path, monkeypatch) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text("5 (a) b) c) S " + " ".join(map(str, range(4, 53))))
    monkeypatch.setattr(peers, "_PROC", tmp_path)
    assert peers._state_of(5) == ("S", 22)
