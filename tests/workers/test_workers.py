"""Workers in real processes, including processes that are killed."""

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

import actors
import arena
import numpy as np
import pytest

from samplebatch import MultiAgentBatch, concat_samples
from samplebatch.errors import EnvironmentSpecError, PolicySpecError, WorkerError
from samplebatch.rollout.aggregator import Aggregator
from samplebatch.rollout.postprocessing import GAE, postprocess
from samplebatch.rollout.statistics import episode_statistics
from samplebatch.workers.workers import RolloutWorkers
from tests.workers.killing import kill_one

SPREAD = "mpe2/simple_spread_v3"
# Forks begin at once; the tests that start workers by `RolloutWorkers` alone spawn them.
forked = functools.partial(RolloutWorkers, start_method="fork")


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
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
    """Check that a batch contains exactly the first steps of every worker's relay, without gaps."""
    steps = batch["runner"]
    assert (steps["obs"][:, 0] == steps["t"]).all()
    assert (steps["rewards"] == 100 * steps["t"] + steps["agent_index"]).all()
    env_steps = len(np.unique(np.stack([steps["eps_id"], steps["t"]], 1), axis=0))
    assert env_steps == batch.count


def gather(fragments: Iterable[MultiAgentBatch], aggregator: Aggregator) -> None:
    for fragment in fragments:
        aggregator.add(fragment)


def test_the_total_is_exact_and_every_step_occurs_once() -> None:
    aggregator = Aggregator()
    with RolloutWorkers("random", "arena:Relay", num_workers=3, seed=1) as workers:
        pids = workers.pids
        assert len(set(pids)) == 3
        for fragment in workers.fragments(n_step=211, fragment_length=20):
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
    actual = episode_statistics(batch)
    assert actual is not None
    assert (actual.episodes, actual.unfinished) == (24, 3)


def by_worker(fragments: list[MultiAgentBatch]) -> dict[int, dict[str, Any]]:
    """Group the fragments of each worker, except for episode ids."""
    actual: dict[int, list[MultiAgentBatch]] = {}
    for fragment in fragments:
        actual.setdefault(int(fragment["agent"]["unroll_id"][0]) >> 32, []).append(fragment)
    return {
        worker: {
            name: column.tolist()
            for name, column in concat_samples(parts)["agent"].items()
            if name not in ("eps_id", "infos")
        }
        for worker, parts in actual.items()
    }


def test_a_seed_determines_what_each_worker_sends_and_no_ids_repeat() -> None:
    runs = []
    for seed in (5, 5):
        with RolloutWorkers("random", SPREAD, seed=seed, backend="inline") as workers:
            runs.append(list(workers.fragments(n_step=80, fragment_length=15)))
    first, second = map(by_worker, runs)
    assert sorted(first) == [0, 1]
    assert first == second
    assert first[0] != first[1]
    ids = [np.unique(np.concatenate([part["agent"]["eps_id"] for part in run])) for run in runs]
    # Two workers with 40 steps each, in episodes of 25, are four episodes.
    assert [len(part) for part in ids] == [4, 4]
    assert not np.intersect1d(*ids).size


def test_a_killed_worker_is_reported_and_other_steps_are_kept() -> None:
    delay_s = random.choice([0.0, random.uniform(0.02, 0.25)])
    aggregator = Aggregator()
    with RolloutWorkers("random", "arena:slow_relay", num_workers=2) as workers:
        pids = workers.pids
        fragments = workers.fragments(n_step=100_000, fragment_length=7)
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
        RolloutWorkers("random", "arena:Failing", num_workers=1) as workers,
        pytest.raises(WorkerError, match=words) as caught,
    ):
        gather(workers.fragments(n_step=100, fragment_length=8), aggregator)
    assert "arena.py" in caught.value.__notes__[0]
    assert aggregator.env_steps == 24
    check_whole(aggregator.build_and_reset())


def test_a_hanging_worker_is_killed_and_reported() -> None:
    aggregator = Aggregator()
    with RolloutWorkers("random", "arena:Hanging", num_workers=1, stall_timeout_s=3) as workers:
        pids = workers.pids
        message = r"worker 0 .* hangs \(it completed no step for 3 s\) after sending 24 of 100"
        with pytest.raises(WorkerError, match=message):
            gather(workers.fragments(n_step=100, fragment_length=8), aggregator)
    assert not wait_until_gone(pids, 0.5)
    assert aggregator.env_steps == 24


def test_a_slow_consumer_does_not_count_as_a_stalled_worker() -> None:
    with RolloutWorkers("random", "arena:Relay", num_workers=2, stall_timeout_s=2) as workers:
        fragments = workers.fragments(n_step=4000, fragment_length=20)
        counts = [next(fragments).count]
        time.sleep(2.5)
        counts += [fragment.count for fragment in fragments]
    assert sum(counts) == 4000


def test_workers_must_be_started() -> None:
    with pytest.raises(WorkerError, match="with statement"):
        RolloutWorkers("random", "arena:Relay").fragments()


def test_leaving_early_ends_all_workers() -> None:
    with forked("random", "arena:slow_relay", num_workers=2) as workers:
        pids = workers.pids
        for _ in workers.fragments(n_step=100_000, fragment_length=5):
            break
    assert not wait_until_gone(pids, 0.5)


def test_a_requested_stop_returns_sent_fragments_without_an_error() -> None:
    aggregator = Aggregator()
    with forked("random", "arena:slow_relay", num_workers=2) as workers:
        for fragment in workers.fragments(n_step=100_000, fragment_length=5):
            aggregator.add(fragment)
            if aggregator.fragments == 3:
                time.sleep(0.2)
                workers.request_stop()
    # What lay in the pipes when the request came is there too.
    assert aggregator.fragments > 3
    check_whole(aggregator.build_and_reset())


def test_a_requested_stop_during_start_ends_iteration_immediately() -> None:
    workers = forked("random", "arena:slow_relay", num_workers=2)
    workers.request_stop()
    with workers:
        assert sum(fragment.env_steps() for fragment in workers.fragments(n_step=100_000, fragment_length=5)) < 100_000


def test_other_ways_to_start_and_functions_with_arguments() -> None:
    environment = functools.partial(arena.Relay, pause_s=0.0)
    with RolloutWorkers(
        "random", environment, num_workers=4, policy_mapping=arena.whose, start_method="forkserver"
    ) as workers:
        (fragment,) = workers.fragments(n_step=1)
    assert list(fragment.policy_batches) == ["policy of runner_0"]


def by_environment(fragments: Iterable[Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Group collected rows by policy and environment, except for ids that differ between runs."""
    joined = concat_samples(list(fragments)).as_multi_agent()
    actual = {}
    for policy, steps in joined.policy_batches.items():
        for env_id in np.unique(steps["env_id"]).tolist():
            rows = steps.take(np.flatnonzero(steps["env_id"] == env_id))
            order = np.argsort(rows["agent_index"], kind="stable")
            actual[policy, env_id] = {
                name: np.asarray(rows[name])[order].tolist()
                for name in rows.column_names
                if name not in ("eps_id", "unroll_id")
            }
    return actual


@pytest.mark.parametrize(
    ("environment", "policy"), [("CartPole-v1", "random"), (SPREAD, "random"), ("gyms:Walk", "actors:ones")]
)
def test_the_same_seed_gives_the_same_data_for_any_worker_count(environment: str, policy: str) -> None:
    runs = []
    for workers, envs, backend in ((1, 4, "inline"), (4, 1, "inline"), (2, 2, "process")):
        with forked(policy, environment, num_workers=workers, envs_per_worker=envs, seed=7, backend=backend) as pool:
            runs.append(by_environment(pool.fragments(n_step=1003, fragment_length=120)))
        assert pool.stats.n_collected_steps == pool.worker_stats.sent_steps == 1003
    first, *others = runs
    assert {env_id for _, env_id in first} == {0, 1, 2, 3}
    for other in others:
        assert other == first


def test_all_sent_steps_are_received_and_aggregated() -> None:
    aggregator = Aggregator(300, "env_steps")
    trained = 0
    with forked("random", "CartPole-v1", envs_per_worker=3) as workers:
        for fragment in workers.fragments(n_step=2001, fragment_length=70):
            aggregator.add(fragment)
            trained += sum(batch.env_steps() for batch in aggregator.batches())
    stats, facts = workers.stats, workers.worker_stats
    assert trained % 300 == 0
    assert trained + aggregator.env_steps == stats.n_collected_steps == facts.sent_steps == 2001
    assert (facts.queue_depth, facts.lost_steps, facts.restarts, facts.failures) == (0, 0, 0, [])
    assert facts.versions == {0: 2001}
    assert facts.nbytes > 0
    assert facts.fragments == 2 * 15


def test_new_weights_are_used_and_recorded_with_every_step() -> None:
    recorded = []
    with forked("actors:Marked", "CartPole-v1", num_workers=2, seed=1) as workers:
        for fragment in workers.fragments(fragment_length=50):
            (version,) = np.unique(fragment["weights_version"]).tolist()
            assert fragment["weights_version"].dtype == np.int64
            assert set(fragment["policy.mark"].tolist()) == {10.0 * version}
            recorded.append(version)
            if len(recorded) % 20 == 0 and len(recorded) <= 60:
                number = workers.publish({"mark": np.array([10.0 * len(recorded) / 20])})
                assert number == len(recorded) // 20
            if version == 3 or len(recorded) > 5000:
                workers.request_stop()
    assert recorded[0] == 0
    assert 3 in recorded
    assert sum(workers.worker_stats.versions.values()) == workers.stats.n_collected_steps


def test_weights_are_loaded_by_the_policy_of_their_name() -> None:
    policies = {"adversary": "actors:Marked", "agent": "random"}
    with RolloutWorkers(policies, "mpe2/simple_tag_v3", num_workers=1, backend="inline") as workers:
        assert workers.publish({"adversary": {"mark": np.array([4.0])}}) == 1
        for fragment in workers.fragments(n_step=60, fragment_length=20):
            assert set(fragment["adversary"]["policy.mark"].tolist()) == {4.0}
            assert set(fragment["agent"]["weights_version"].tolist()) == {1}


@pytest.mark.parametrize("backend", ["inline", "process"])
def test_policy_ids_may_be_integers(backend: Any) -> None:
    policies = {0: "actors:Marked", "0": "random"}
    with forked(
        policies, "mpe2/simple_tag_v3", policy_mapping=actors.numbered, num_workers=1, backend=backend
    ) as workers:
        assert workers.publish({0: {"mark": np.array([4.0])}}) == 1
        fragments = [fragment.copy() for fragment in workers.fragments(n_step=60, fragment_length=20)]
    for fragment in fragments:
        assert {type(policy) for policy in fragment} == {int, str}
        assert "policy.mark" not in fragment["0"]
    assert set(fragments[-1][0]["policy.mark"].tolist()) == {4.0}
    assert episode_statistics(concat_samples(fragments)).policies.keys() <= {0, "0"}


def test_a_torch_module_loads_a_copy_of_the_published_state() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(net.weight)
    net.bias.data = torch.tensor([1.0, 0.0])
    with RolloutWorkers(net, "CartPole-v1", num_workers=1) as workers:
        fragments = workers.fragments(fragment_length=40)
        assert set(next(fragments)["actions"].tolist()) == {0}
        net.bias.data = torch.tensor([0.0, 1.0])
        time.sleep(0.1)
        for _, fragment in zip(range(3), fragments, strict=False):
            assert set(fragment["actions"].tolist()) == {0}
        workers.publish(net.state_dict())
        for fragment in fragments:
            if fragment["weights_version"][0]:
                assert set(fragment["actions"].tolist()) == {1}
                workers.request_stop()


def test_workers_apply_hooks() -> None:
    hooks = [GAE(bootstrap=actors.first, gamma=0.9, lambda_=0.8)]
    plain, hooked = [], []
    for actual, original in ((plain, []), (hooked, hooks)):
        with forked(
            "actors:Marked", "CartPole-v1", num_workers=1, envs_per_worker=2, seed=3, hooks=original
        ) as workers:
            actual += [fragment.copy() for fragment in workers.fragments(n_step=400)]
    for first, other in zip(plain, hooked, strict=True):
        expected = postprocess(first, hooks)
        assert "advantages" in other
        for name in ("advantages", "value_targets", "obs", "weights_version"):
            assert expected[name].tolist() == other[name].tolist()


def test_more_fragments_than_the_arena_can_store_may_be_retained() -> None:
    with forked("random", "CartPole-v1", capacity_nbytes=1 << 16, seed=2) as workers:
        retained = list(workers.fragments(n_step=6000, fragment_length=100))
    with RolloutWorkers("random", "CartPole-v1", backend="inline", seed=2) as workers:
        assert by_environment(workers.fragments(n_step=6000, fragment_length=100)) == by_environment(retained)
    assert sum(fragment.size_bytes() for fragment in retained) > 4 << 16


def test_fragments_larger_than_the_arena_are_sent_in_parts() -> None:
    with forked("random", SPREAD, num_workers=1, capacity_nbytes=1 << 16) as workers:
        counts = [fragment.count for fragment in workers.fragments(n_step=400, fragment_length=400)]
    assert sum(counts) == 400
    assert len(counts) > 4


def test_repeatedly_killed_workers_lose_only_their_fragments() -> None:
    aggregator = Aggregator(complete_episodes=True)
    with forked("random", "arena:slow_relay", num_workers=1) as workers:
        # The first workers of a process open descriptors that stay, such as that of multiprocessing's resource tracker.
        workers.collect(n_step=1)
    before = set(os.listdir("/proc/self/fd"))
    killed: set[int] = set()
    at, dropped, everybody = time.monotonic(), 0, []
    with forked("random", "arena:slow_relay", num_workers=2, max_restarts=50, seed=4) as workers:
        handled = 0
        for fragment in workers.fragments(fragment_length=8):
            assert fragment.count == 8
            aggregator.add(fragment)
            everybody += workers.pids
            for incident in workers.worker_stats.failures[handled:]:
                handled += 1
                dropped += aggregator.drop_unfinished(incident.env_ids)
            running = [pid for pid in workers.pids if pid not in killed]
            if time.monotonic() - at > 0.5 and len(killed) < 4 and running:
                killed |= kill_one(running)
                at = time.monotonic()
            elif len(killed) == 4 and handled >= 3:
                workers.request_stop()
    facts, kills = workers.worker_stats, len(killed)
    assert 1 <= kills - 1 <= facts.restarts == len(facts.failures) <= kills
    for incident in facts.failures:
        assert incident.how == "was killed by SIGKILL"
        assert incident.replaced
        # What it had not sent: one fragment at most, and what had been made of the next.
        assert incident.lost_steps <= 2 * 8
    assert workers.stats.n_collected_steps == facts.sent_steps == aggregator.env_steps + dropped
    assert facts.lost_steps == sum(incident.lost_steps for incident in facts.failures)
    check_whole(aggregator.build_and_reset())
    assert not wait_until_gone(set(everybody), 1)
    assert set(os.listdir("/proc/self/fd")) <= before


def test_a_failing_worker_is_replaced_until_the_limit() -> None:
    fragments = []
    with (
        forked("random", "arena:Failing", num_workers=1, max_restarts=2) as workers,
        pytest.raises(WorkerError, match=r"worker 0 .* failed after sending 24 of 52 steps: RuntimeError: the baton"),
    ):
        fragments.extend(workers.fragments(n_step=100, fragment_length=8))
    assert sum(fragment.count for fragment in fragments) == 72
    incidents = workers.worker_stats.failures
    assert [(item.index, item.env_steps, item.lost_steps, item.replaced) for item in incidents] == [
        (0, 24, 5, True),
        (0, 24, 5, True),
        (0, 24, 5, False),
    ]
    assert str(incidents[0]).startswith(f"worker 0 (process {incidents[0].pid}) failed: RuntimeError: the baton")
    assert len({int(fragment["runner"]["unroll_id"][0]) for fragment in fragments}) == 9


def test_a_replacement_collects_the_missing_steps() -> None:
    with RolloutWorkers("random", "arena:Failing", num_workers=1, max_restarts=2, backend="inline") as workers:
        assert sum(fragment.count for fragment in workers.fragments(n_step=60, fragment_length=8)) == 60
    assert [item.lost_steps for item in workers.worker_stats.failures] == [5, 5]


def test_errors_of_inline_workers_have_a_cause() -> None:
    with (
        RolloutWorkers("actors:broken", "CartPole-v1", num_workers=1, backend="inline") as workers,
        pytest.raises(WorkerError, match="failed after sending 0 of 9 steps: RuntimeError: the policy broke") as caught,
    ):
        list(workers.fragments(n_step=9))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert workers.pids == []


@pytest.mark.parametrize("environment", ["CartPole-v1", "arena:Bazaar", "arena:vector_of_carts"])
def test_exactly_so_many_steps_or_episodes(environment: str) -> None:
    envs = 1 if "vector" in environment else 3
    options = {"num_workers": 2, "envs_per_worker": envs, "backend": "inline"}
    with RolloutWorkers("random", environment, **options) as workers:
        assert sum(fragment.env_steps() for fragment in workers.fragments(n_step=100, fragment_length=31)) == 100
    with RolloutWorkers("random", environment, **options) as workers:
        fragments = list(workers.fragments(n_episode=11, fragment_length=31))
    assert workers.stats.n_collected_episodes == 11
    aggregator = Aggregator(complete_episodes=True)
    for fragment in fragments:
        aggregator.add(fragment)
    assert aggregator.episodes == 11
    assert aggregator.env_steps == aggregator.build_and_reset(unfinished=False).env_steps()
    assert aggregator.env_steps == 0


@pytest.mark.parametrize("environment", ["arena:Bazaar", "arena:vector_of_carts"])
def test_process_and_inline_workers_collect_the_same_steps(environment: str) -> None:
    runs = []
    for backend in ("process", "inline"):
        with RolloutWorkers("random", environment, seed=6, backend=backend) as workers:
            runs.append(by_environment(workers.fragments(n_step=90, fragment_length=20)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("policy", "actions"),
    [
        ("actors:constant", {1}),
        (actors.constant, {1}),
        ("actors:lean", {0, 1}),
        ({"default_policy": actors.lean}, {0, 1}),
    ],
)
def test_policies_are_passed_by_name_function_or_object(policy: Any, actions: set[int]) -> None:
    with RolloutWorkers(policy, "CartPole-v1", num_workers=1, backend="inline") as workers:
        (steps,) = workers.fragments(n_step=60)
    assert set(steps["actions"].tolist()) == actions
    if actions == {0, 1}:
        assert steps["actions"].tolist() == (steps["obs"][:, 2] > 0).tolist()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("actors:lena", "no policy 'lena' in module 'actors'; did you mean 'lean'"),
        ("lean", "'random' or as 'module:function'"),
        ("nowhere:lean", "the module of policy 'nowhere:lean' must be importable: No module"),
        (lambda obs: obs, "must be 'random', a name, an importable function"),
    ],
)
def test_wrong_policies_are_detected_before_any_process_starts(policy: Any, words: str) -> None:
    with pytest.raises(PolicySpecError, match=words):
        RolloutWorkers(policy, "CartPole-v1")


def test_weights_for_a_policy_that_cannot_load_them_are_rejected() -> None:
    with RolloutWorkers(actors.lean, "CartPole-v1", num_workers=1, backend="inline") as workers:
        workers.publish({"mark": np.zeros(1)})
        with pytest.raises(WorkerError, match="load_state_dict or set_weights"):
            next(workers.fragments(n_step=1))


def test_several_policies_or_vectors_per_worker_are_rejected() -> None:
    with (
        RolloutWorkers({"a": "random"}, "CartPole-v1", backend="inline") as workers,
        pytest.raises(WorkerError, match="must have one policy"),
    ):
        next(workers.fragments(n_step=1))
    with (
        RolloutWorkers("random", "arena:vector_of_carts", envs_per_worker=2, backend="inline") as workers,
        pytest.raises(WorkerError, match="envs_per_worker must be 1"),
    ):
        next(workers.fragments(n_step=1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_restarts": -1}, "max_restarts must be a whole number from 0"),
        ({"backend": "threads"}, "backend must be one of 'process', 'inline'"),
    ],
)
def test_incompatible_arguments_are_rejected(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RolloutWorkers("random", "CartPole-v1", **options)


def test_fragments_are_counted_in_steps_or_in_episodes() -> None:
    with (
        RolloutWorkers("random", "CartPole-v1", backend="inline") as workers,
        pytest.raises(ValueError, match="one of n_step and n_episode"),
    ):
        workers.fragments(n_step=1, n_episode=1)


@pytest.mark.parametrize("name", ["num_workers", "stall_timeout_s"])
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a (whole number from 1|number above 0), got 0"):
        RolloutWorkers("random", SPREAD, **{name: 0})


@pytest.mark.parametrize("name", ["n_step", "n_episode", "fragment_length"])
def test_amounts_of_fragments_must_be_positive(name: str) -> None:
    with (
        RolloutWorkers("random", SPREAD, backend="inline") as workers,
        pytest.raises(ValueError, match=f"{name} must be a whole number from 1, got 0"),
    ):
        workers.fragments(**{name: 0})


def test_a_wrong_environment_is_detected_before_any_process_starts() -> None:
    with pytest.raises(EnvironmentSpecError, match="did you mean"):
        RolloutWorkers("random", "mpe2/simple_spraed_v3")


def test_objects_that_cannot_be_sent_to_a_process_are_rejected() -> None:
    with pytest.raises(EnvironmentSpecError, match="importable"), RolloutWorkers("random", lambda: arena.Relay()):
        pass


PARENT = """
    import sys
    sys.path.insert(0, {folder!r})
    from samplebatch.workers.workers import RolloutWorkers

    if __name__ == "__main__":
        with RolloutWorkers("random", {environment!r}, num_workers=2) as workers:
            fragments = workers.fragments(n_step=10**7, fragment_length=5)
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
def test_workers_end_when_their_parent_is_killed(tmp_path: Path, environment: str, then: str) -> None:
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


UNGUARDED = {
    "workers": """
from samplebatch import RolloutWorkers
with RolloutWorkers("random", "CartPole-v1", num_workers=2, start_method={method!r}) as workers:
    workers.collect(n_step=100)
""",
    "environments": """
from samplebatch import AsyncCollector
with AsyncCollector("random", "CartPole-v1", num_envs=2, start_method={method!r}) as collector:
    collector.collect(n_step=100)
""",
}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("of", UNGUARDED)
def test_a_script_without_main_guard_ends_with_advice(tmp_path: Path, of: str, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED[of].format(method=method))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("put the statements of the main module that start processes under ")
    assert '`if __name__ == "__main__":`' in run.stderr.splitlines()[-1]
    assert run.stderr.count("Traceback") == 1, run.stderr
