"""Memory stays constant over a long run."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samplebatch import (
    Batch,
    CachedReplayBuffer,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    PrioritizedVectorReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    VectorReplayBuffer,
)

ENVIRONMENTS = 200


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def rows(round_: int) -> Batch:
    n = np.arange(ENVIRONMENTS, dtype=np.float32) + round_
    obs = np.repeat(n[:, None], 17, 1)
    done = (np.arange(ENVIRONMENTS) + round_) % 97 == 0
    return Batch(
        obs=obs,
        act=obs[:, :6],
        rew=n,
        terminated=done,
        truncated=~done & (n % 61 == 0),
        obs_next=obs + 1,
        info={"n": n},
    )


MAKERS: dict[str, Any] = {
    "vector": lambda: VectorReplayBuffer(20_000, ENVIRONMENTS),
    "final observations": lambda: VectorReplayBuffer(20_000, ENVIRONMENTS, stack_num=4, ignore_obs_next=True),
    "prioritized": lambda: PrioritizedVectorReplayBuffer(20_000, ENVIRONMENTS, alpha=0.6, beta=0.4),
    # Smaller, as it is given fewer: a ring that is not full yet takes pages as it fills.
    "cached": lambda: CachedReplayBuffer(ReplayBuffer(4_000), ENVIRONMENTS, 100),
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("transitions", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_memory_is_constant_over_many_transitions(kind: str, transitions: int) -> None:
    buf = MAKERS[kind]()
    # The cached buffer moves episodes one by one, so a fifth of the transitions is as long a run.
    rounds = transitions // ENVIRONMENTS // (5 if kind == "cached" else 1)

    def run(start: int, stop: int) -> None:
        for n in range(start, stop):
            buf.add(rows(n))
            if n % 50 == 0:
                batch, indices = buf.sample(256)
                assert batch.obs_next.shape[-1] == 17
                if kind == "prioritized":
                    buf.update_weight(indices, np.abs(batch.rew), generation=batch.generation)

    run(0, rounds // 2)
    gc.collect()
    before, stored = resident_nbytes(), buf.nbytes
    run(rounds // 2, rounds)
    gc.collect()
    grown = resident_nbytes() - before
    assert grown < 2 << 20, f"{grown / 2**20:.1f} MiB more than after warm-up"
    assert buf.nbytes == stored


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_is_constant_for_agents_in_lockstep() -> None:
    buf = MultiAgentReplayBuffer({"a": 8_000, "b": 20_000}, lockstep=True)
    at = np.arange(ENVIRONMENTS)

    def run(start: int, stop: int) -> None:
        for n in range(start, stop):
            obs = np.repeat((at + n).astype(np.float32)[:, None], 17, 1)
            part = SampleBatch(
                obs=obs, new_obs=obs, actions=at, rewards=at / 2, terminateds=at == 99, eps_id=np.full_like(at, n), t=at
            )
            buf.add(MultiAgentBatch({"a": part, "b": part[: 50 + n % 100]}, ENVIRONMENTS))
            if n % 20 == 0:
                assert buf.sample(64).batch.env_steps() == 64

    run(0, 300)
    gc.collect()
    before = resident_nbytes()
    run(300, 1_500)
    gc.collect()
    grown = resident_nbytes() - before
    assert grown < 2 << 20, f"{grown / 2**20:.1f} MiB more than after warm-up"
    assert 7_000 < buf.env_steps() <= 8_000
