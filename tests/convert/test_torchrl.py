"""TorchRL's training loops with our replay buffers: collectors' TensorDicts in, samples for loss modules out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samplebatch import PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer
from samplebatch.convert import TorchRLReplayBuffer, from_tensordict, to_tensordict
from samplebatch.errors import ArgumentError, ColumnNotFoundError, ColumnTypeError, EmptyBufferError, PriorityError
from tests.optional import torch

tensordict = pytest.importorskip("tensordict")


def steps_of(n: int, *, start: int = 0, ends: tuple[int, ...] = (), lead: tuple[int, ...] = ()) -> Any:
    """Return a collector's TensorDict; step i has observation i and reward i."""
    number = torch.arange(start, start + n, dtype=torch.float32).expand(*lead, n).unsqueeze(-1)
    done = torch.tensor([i in ends for i in range(start, start + n)]).expand(*lead, n).unsqueeze(-1)
    never = torch.zeros_like(done)
    following = {"observation": number + 1, "reward": number, "done": done, "terminated": done, "truncated": never}
    action = torch.nn.functional.one_hot(torch.zeros(*lead, n, dtype=torch.int64), 2)
    entries = {"observation": number, "action": action, "next": following}
    return tensordict.TensorDict(entries, batch_size=[*lead, n])


def test_a_dqn_loop_learns_from_samples() -> None:
    pytest.importorskip("torchrl")
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    torch.manual_seed(0)
    buffer = PrioritizedReplayBuffer(100, alpha=0.6, beta=0.4, random_seed=1)
    rb = TorchRLReplayBuffer(buffer, batch_size=32, n_step=2, gamma=0.2)
    steps = steps_of(40, ends=(9, 19, 29, 39))
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        steps[key] = steps[key] / 40
    rb.extend(steps)
    actor = QValueActor(
        MLP(in_features=1, out_features=2, num_cells=[16]), in_keys=["observation"], action_space="one_hot"
    )
    loss_module = DQNLoss(actor, action_space="one_hot", delay_value=True)
    loss_module.make_value_estimator(gamma=0.2)
    updater = SoftUpdate(loss_module, tau=0.1)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    before = rb.buffer.weight[:40].copy()
    losses = []
    for _ in range(150):
        td = rb.sample()
        loss = loss_module(td)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updater.step()
        rb.update_tensordict_priority(td)
        losses.append(loss.item())
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:10])
    assert not np.array_equal(rb.buffer.weight[:40], before)


def test_a_ppo_loop_has_the_losses_of_the_collected_rows() -> None:
    pytest.importorskip("torchrl")
    pytest.importorskip("gymnasium")
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.envs import GymEnv
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(0)
    logits = TensorDictModule(MLP(in_features=4, out_features=2, num_cells=[16]), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    critic = ValueOperator(MLP(in_features=4, out_features=1, num_cells=[16]), in_keys=["observation"])
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), 3e-3)
    rb = TorchRLReplayBuffer(ReplayBuffer(256), batch_size=64)
    options = {"auto_register_policy_transforms": False}
    collector = Collector(GymEnv("CartPole-v1"), actor, frames_per_batch=256, total_frames=512, **options)
    rounds = 0
    for data in collector:
        with torch.no_grad():
            advantage(data)
        rb.empty()
        rb.extend(data)
        for _ in range(4):
            td = rb.sample()
            losses, expected = loss_module(td), loss_module(data[td["index"]])
            for name in ("loss_objective", "loss_critic", "loss_entropy"):
                torch.testing.assert_close(losses[name], expected[name])
            optimizer.zero_grad()
            sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
            optimizer.step()
        rounds += 1
    collector.shutdown()
    assert rounds == 2
    # No entries for names without values, such as the infos of a buffer's rows.
    assert set(td.keys()) - set(data.keys()) == {"index"}


def test_collected_steps_are_sampled_unchanged() -> None:
    rb = TorchRLReplayBuffer(ReplayBuffer(100))
    td = steps_of(40, ends=(9, 25))
    assert rb.extend(td).tolist() == list(range(40))
    data = rb.sample(64)
    assert data.batch_size == (64,)
    expected = td[data["index"]]
    for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated")):
        assert torch.equal(data[key], expected[key]), key
        assert data[key].dtype == expected[key].dtype
    assert torch.equal(data["next", "done"], expected["next", "done"])


@pytest.mark.parametrize("rings", [1, 3])
def test_environments_of_a_batch_dimension_are_separate_streams(rings: int) -> None:
    td = steps_of(10, lead=(3,))
    td["observation"] = td["observation"] + 100 * torch.arange(3).reshape(3, 1, 1)
    td["next", "observation"] = td["observation"] + 1
    if rings == 1:
        td["collector", "traj_ids"] = torch.arange(3).reshape(3, 1).expand(3, 10)
    rb = TorchRLReplayBuffer(VectorReplayBuffer(60, 3) if rings == 3 else ReplayBuffer(60), n_step=20, gamma=1.0)
    rb.extend(td)
    data = rb.sample(300)
    steps = data["steps_to_next_obs"]
    assert torch.equal(data["next", "observation"], data["observation"] + steps)
    assert int(steps.max()) == 10


def test_n_step_rows_end_with_their_episodes() -> None:
    rb = TorchRLReplayBuffer(ReplayBuffer(100), n_step=3, gamma=0.5)
    rb.extend(steps_of(8, start=1, ends=(5,)))
    data = rb.sample(100)
    for row in data:
        first, count = int(row["observation"]), int(row["steps_to_next_obs"])
        assert count == min(3, (5 if first <= 5 else 8) - first + 1)
        assert row["next", "reward"].item() == pytest.approx(sum(0.5**k * (first + k) for k in range(count)))
        assert bool(row["next", "terminated"]) == (first + count - 1 == 5)


def test_single_steps_are_added() -> None:
    rb = TorchRLReplayBuffer(ReplayBuffer(10))
    assert [rb.add(step) for step in steps_of(3)] == [0, 1, 2]
    assert len(rb) == 3
    rb.empty()
    assert len(rb) == 0


def test_unsupported_arguments_are_reported() -> None:
    with pytest.raises(ColumnTypeError, match="buffer must be a samplebatch ReplayBuffer, got a list"):
        TorchRLReplayBuffer([])  # type: ignore[arg-type]
    rb = TorchRLReplayBuffer(ReplayBuffer(10))
    with pytest.raises(EmptyBufferError):
        rb.sample(1)
    with pytest.raises(ArgumentError, match="batch_size must be passed"):
        rb.sample()
    with pytest.raises(ArgumentError, match="must have 3 rings, one per environment, got 1"):
        rb.extend(steps_of(4, lead=(3,)))
    rb.extend(steps_of(4))
    with pytest.raises(ColumnNotFoundError, match="'td_error'"):
        rb.update_tensordict_priority(rb.sample(2))
    with pytest.raises(PriorityError, match="must be prioritized to update priorities, got a ReplayBuffer"):
        rb.update_priority([0], [1.0])


@pytest.mark.parametrize("count", [1, 2])
def test_the_steps_of_a_collector_of_torchrl_are_shared(count: int) -> None:
    pytest.importorskip("torchrl")
    import torchrl.collectors
    from torchrl.envs import GymEnv, SerialEnv

    environment = GymEnv("CartPole-v1") if count == 1 else SerialEnv(count, lambda: GymEnv("CartPole-v1"))
    kind = getattr(torchrl.collectors, "Collector", None) or torchrl.collectors.SyncDataCollector
    collector = kind(environment, None, frames_per_batch=20 * count, total_frames=20 * count)
    try:
        td = next(iter(collector))
    finally:
        collector.shutdown()
    steps = from_tensordict(td)
    again = to_tensordict(steps)
    for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("collector", "traj_ids")):
        assert again[key].data_ptr() == td[key].data_ptr(), key
        assert torch.equal(again[key].reshape(td[key].shape), td[key]), key
    rb = TorchRLReplayBuffer(VectorReplayBuffer(100, count) if count > 1 else ReplayBuffer(100))
    indices = rb.extend(td)
    assert np.array_equal(rb.buffer[indices.numpy()].obs, steps["obs"].numpy())
