"""A PPO loop with a collector, `GAE` and `minibatches` learns exactly what the same loop with plain arrays learns."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks import loops  # noqa: E402


@pytest.mark.parametrize("seed", [1, 2])
def test_ppo_learns_the_same_parameters_as_a_loop_with_arrays(seed: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        env_seeds = [100 * seed + env for env in range(loops.NUM_ENVS)]
        plain, ours = (train(seed, 6, env_seeds) for train in (loops.ppo_with_arrays, loops.ppo_with_collector))
    finally:
        torch.set_num_threads(threads)
    start, _, _ = loops.new_agent(seed)
    for first, expected, parameter in zip(start.parameters(), plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        assert not torch.equal(parameter, first)


def test_truncated_episodes_are_bootstrapped_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    make = loops.gymnasium.make_vec
    # Episodes of at most 12 steps, most of which end by this limit.
    monkeypatch.setattr(
        loops.gymnasium, "make_vec", lambda *args, **kwargs: make(*args, **kwargs, max_episode_steps=12)
    )
    plain, ours = (
        train(3, 3, list(range(loops.NUM_ENVS))) for train in (loops.ppo_with_arrays, loops.ppo_with_collector)
    )
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def test_dqn_trains_with_either_buffer() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    steps = loops.DQN_STARTS + 200
    for network in (loops.dqn_with_sb3(buffers, 1, steps), loops.dqn_with_collector(1, steps)):
        start = loops.DQNLearner(1).online
        changed = [not torch.equal(*pair) for pair in zip(network.parameters(), start.parameters(), strict=True)]
        assert all(changed)


def test_sac_trains_with_either_buffer() -> None:
    buffers = pytest.importorskip("stable_baselines3.common.buffers")
    steps = loops.SAC_STARTS + 4
    start = loops.SACLearner(1)
    for learner in (loops.sac_with_sb3(buffers, 1, steps), loops.sac_with_collector(1, steps)):
        for module in ("actor", "critics", "targets"):
            pairs = zip(getattr(learner, module).parameters(), getattr(start, module).parameters(), strict=True)
            assert all(not torch.equal(*pair) for pair in pairs), module
        assert learner.log_alpha.item() != 0.0
