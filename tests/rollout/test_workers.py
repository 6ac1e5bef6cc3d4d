"""Workers are real processes here, and die real deaths."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import arena
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, concat_samples
from samplebatch.errors import EnvironmentSpecError, WorkerError
from samplebatch.rollout.aggregate import Aggregator
from samplebatch.rollout.statistics import episode_statistics
from samplebatch.rollout.workers import RolloutWorkers

SPREAD = "mpe2/simple_spread_v3"


def is_running(pid: int) -> bool:
    """Tell whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: Iterable[int], timeout_s: float = 10) -> list[int]:
    """Wait for processes to end, and return those that did not."""
    deadline = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if is_running(pid)]
        time.sleep(0.02)
    return left


def check_whole(batch: MultiAgentBatch) -> None:
    """Check that a batch holds every step up to somewhere, of every worker's relay, and nothing else."""
    steps = batch["runner"]
    assert (steps["obs"][:, 0] == steps["t"]).all()
    assert (steps["rewards"] == 100 * steps["t"] + steps["agent_index"]).all()
    env_steps = len(np.unique(np.stack([steps["eps_id"], steps["t"]], 1), axis=0))
    assert env_steps == batch.count


def gather(fragments: Iterable[MultiAgentBatch], aggregator: Aggregator) -> None:
    for fragment in fragments:
        aggregator.add(fragment)


def test_the_total_is_exact_and_every_step_is_there_once() -> None:
    aggregator = Aggregator()
    with RolloutWorkers("arena:Relay", env_steps=211, num_workers=3, fragment_length=20, seed=1) as workers:
        pids = workers.pids
        assert len(set(pids)) == 3
        for fragment in workers:
            assert 0 < fragment.count <= 20
            aggregator.add(fragment)
    assert not wait_until_gone(pids, 0.5)
    assert aggregator.env_steps == 211
    assert aggregator.fragments == 12
    batch = aggregator.build_and_reset()
    assert batch.count == 211
    check_whole(batch)
    steps = batch["runner"]
    # 71, 70 and 70 steps are 9 episodes of 8 each, the last of them unfinished.
    assert len(np.unique(steps["eps_id"])) == 27
    assert len(np.unique(steps["unroll_id"])) == 12
    found = episode_statistics(batch)
    assert found is not None
    assert (found.episodes, found.unfinished) == (24, 3)


def by_worker(fragments: list[MultiAgentBatch]) -> dict[int, dict[str, Any]]:
    """Lay out what each worker sent, but for the episodes' ids."""
    found: dict[int, list[MultiAgentBatch]] = {}
    for fragment in fragments:
        found.setdefault(int(fragment["agent"]["unroll_id"][0]) >> 32, []).append(fragment)
    return {
        worker: {
            name: column.tolist()
            for name, column in concat_samples(parts)["agent"].items()
            if name not in ("eps_id", "infos")
        }
        for worker, parts in found.items()
    }


def test_a_seed_determines_what_each_worker_sends_and_no_ids_repeat() -> None:
    runs = []
    for seed in (5, 5):
        with RolloutWorkers(SPREAD, env_steps=80, num_workers=2, fragment_length=15, seed=seed) as workers:
            runs.append(list(workers))
    one, two = map(by_worker, runs)
    assert sorted(one) == [0, 1]
    assert one == two
    assert one[0] != one[1]
    ids = [np.unique(np.concatenate([part["agent"]["eps_id"] for part in run])) for run in runs]
    # Two workers with 40 steps each, in episodes of 25, are four episodes.
    assert [len(own) for own in ids] == [4, 4]
    assert not np.intersect1d(*ids).size


@pytest.mark.parametrize("delay_s", [0.0, random.uniform(0.02, 0.25)])
def test_a_killed_worker_is_named_and_the_rest_is_kept(delay_s: float) -> None:
    aggregator = Aggregator()
    with RolloutWorkers("arena:slow_relay", env_steps=100_000, num_workers=2, fragment_length=7) as workers:
        pids = workers.pids
        fragments = iter(workers)
        aggregator.add(next(fragments))
        time.sleep(delay_s)
        victim = random.randrange(2)
        os.kill(pids[victim], signal.SIGKILL)
        with pytest.raises(
            WorkerError,
            match=rf"worker {victim} \(process {pids[victim]}\) was killed by SIGKILL after sending \d+ of 50000",
        ):
            gather(fragments, aggregator)
        assert not wait_until_gone(pids, 0.5)
    assert aggregator.env_steps > 0
    assert aggregator.env_steps % 7 == 0
    check_whole(aggregator.build_and_reset())


def test_an_environment_that_raises_is_reported_with_its_traceback() -> None:
    aggregator = Aggregator()
    words = r"worker 0 .* failed after sending 24 of 100 steps: RuntimeError: the baton was dropped"
    with (
        RolloutWorkers("arena:Failing", env_steps=100, num_workers=1, fragment_length=8) as workers,
        pytest.raises(WorkerError, match=words) as caught,
    ):
        gather(workers, aggregator)
    assert "arena.py" in caught.value.__notes__[0]
    assert aggregator.env_steps == 24
    check_whole(aggregator.build_and_reset())


def test_a_worker_that_hangs_is_ended_and_named() -> None:
    aggregator = Aggregator()
    with RolloutWorkers("arena:Hanging", env_steps=100, num_workers=1, fragment_length=8, stall_timeout_s=3) as workers:
        pids = workers.pids
        with pytest.raises(WorkerError, match=r"worker 0 .* hangs \(it made no step for 3 s\) after sending 24 of 100"):
            gather(workers, aggregator)
    assert not wait_until_gone(pids, 0.5)
    assert aggregator.env_steps == 24


def test_who_takes_fragments_may_be_slow() -> None:
    with RolloutWorkers("arena:Relay", env_steps=4000, num_workers=2, fragment_length=20, stall_timeout_s=3) as workers:
        fragments = iter(workers)
        counts = [next(fragments).count]
        time.sleep(4)
        counts += [fragment.count for fragment in fragments]
    assert sum(counts) == 4000


def test_workers_must_be_started() -> None:
    with pytest.raises(WorkerError, match="with statement"):
        next(iter(RolloutWorkers("arena:Relay", env_steps=1)))


def test_leaving_early_ends_all_workers() -> None:
    with RolloutWorkers("arena:slow_relay", env_steps=100_000, num_workers=2, fragment_length=5) as workers:
        pids = workers.pids
        for _ in workers:
            break
    assert not wait_until_gone(pids, 0.5)


def test_asking_to_stop_gives_what_was_sent_and_ends_quietly() -> None:
    aggregator = Aggregator()
    with RolloutWorkers("arena:slow_relay", env_steps=100_000, num_workers=2, fragment_length=5) as workers:
        for fragment in workers:
            aggregator.add(fragment)
            if aggregator.fragments == 3:
                time.sleep(0.2)
                workers.request_stop()
    # What lay in the pipes when the request came is there too.
    assert aggregator.fragments > 3
    check_whole(aggregator.build_and_reset())


def test_other_ways_to_start_and_functions_with_arguments() -> None:
    environment = functools.partial(arena.Relay, pause_s=0.0)
    with RolloutWorkers(
        environment, env_steps=1, num_workers=4, policy_mapping=arena.whose, start_method="forkserver"
    ) as workers:
        (fragment,) = workers
    assert list(fragment.policy_batches) == ["policy of runner_0"]


@pytest.mark.parametrize("name", ["env_steps", "num_workers", "fragment_length", "stall_timeout_s"])
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        RolloutWorkers(SPREAD, **{"env_steps": 1, name: 0})


def test_a_wrong_environment_is_found_before_any_process_starts() -> None:
    with pytest.raises(EnvironmentSpecError, match="did you mean"):
        RolloutWorkers("mpe2/simple_spraed_v3", env_steps=1)


def test_what_cannot_go_to_another_process_is_refused() -> None:
    with pytest.raises(EnvironmentSpecError, match="importable"), RolloutWorkers(lambda: arena.Relay(), env_steps=1):
        pass


PARENT = """
    import sys
    sys.path.insert(0, {folder!r})
    from samplebatch.rollout.workers import RolloutWorkers

    if __name__ == "__main__":
        with RolloutWorkers({environment!r}, env_steps=10**7, num_workers=2, fragment_length=5) as workers:
            fragments = iter(workers)
            next(fragments)
            print(*workers.pids, flush=True)
            {then}
"""


@pytest.mark.parametrize(
    ("environment", "then"),
    [
        ("arena:slow_relay", "for _ in fragments: pass"),
        ("arena:Relay", "import time; time.sleep(1000)"),
        ("arena:Hanging", "import time; time.sleep(1000)"),
    ],
    ids=["stepping", "blocked by a full pipe", "hanging"],
)
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path, environment: str, then: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(PARENT).format(folder=str(Path(arena.__file__).parent), environment=environment, then=then)
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert not wait_until_gone(pids, 5)
