"""Tianshou's algorithms over networks, policies, buffers and optimizers of this library, as in its example scripts."""

from __future__ import annotations

import copy
import pickle
import warnings
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from samplebatch import Batch, VectorReplayBuffer
from samplebatch.errors import ArgumentError
from tests.optional import torch

pytest.importorskip("tianshou.data")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tianshou.data
    from tianshou.algorithm import BCQ, GAIL, TD3BC
    from tianshou.algorithm.imitation.bcq import BCQPolicy
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy as PeerPolicy
    from tianshou.utils.net.common import ModuleWithVectorOutput
    from tianshou.utils.net.continuous import VAE, Perturbation
    from tianshou.utils.torch_utils import policy_within_training_step

from samplebatch.learn import (
    DQN,
    MLP,
    AdamOptimizerFactory,
    ContinuousActorDeterministic,
    ContinuousCritic,
    ContinuousDeterministicPolicy,
    DiscreteActor,
    DiscreteActorPolicy,
    DiscreteCritic,
    Net,
)

OBS, BOX = 3, spaces.Box(-2.0, 2.0, (1,))


def filled(discrete: bool = False) -> VectorReplayBuffer:
    rng, buffer = np.random.default_rng(0), VectorReplayBuffer(64, 2)
    for t in range(20):
        ends = np.full(2, t % 7 == 6)
        act = rng.integers(2, size=2) if discrete else rng.uniform(-1, 1, (2, 1)).astype(np.float32)
        obs, after = rng.normal(size=(2, 2, OBS)).astype(np.float32)
        flags = {"terminated": ends, "truncated": np.zeros(2, bool)}
        buffer.add(Batch(obs=obs, act=act, rew=rng.normal(size=2), obs_next=after, **flags), buffer_ids=[0, 1])
    return buffer


def critic() -> ContinuousCritic:
    return ContinuousCritic(preprocess_net=Net(OBS, 1, [8], concat=True))


def td3bc() -> Any:
    actor = ContinuousActorDeterministic(preprocess_net=Net(OBS, hidden_sizes=[8]), action_shape=1, max_action=2.0)
    policy: Any = ContinuousDeterministicPolicy(actor=actor, action_space=BOX)
    adam: Any = AdamOptimizerFactory(lr=1e-3)
    return TD3BC(policy=policy, policy_optim=adam, critic=critic(), critic_optim=adam), {"sample_size": 8}


def bcq() -> Any:
    vae = VAE(
        encoder=MLP(input_dim=OBS + 1, hidden_sizes=[8]),  # type: ignore[arg-type]
        decoder=MLP(input_dim=OBS + 2, output_dim=1, hidden_sizes=[8]),  # type: ignore[arg-type]
        hidden_dim=8,
        latent_dim=2,
        max_action=2.0,
    )
    body: Any = MLP(input_dim=OBS + 1, output_dim=1, hidden_sizes=[8])
    moves = Perturbation(preprocess_net=body, max_action=2.0)
    policy = BCQPolicy(actor_perturbation=moves, critic=critic(), vae=vae, action_space=BOX)
    adam: Any = AdamOptimizerFactory(lr=1e-3)
    return BCQ(policy=policy, actor_perturbation_optim=adam, critic_optim=adam, vae_optim=adam), {"sample_size": 8}


def gail() -> Any:
    actor = DiscreteActor(preprocess_net=Net(OBS, hidden_sizes=[8]), action_shape=2)
    policy: Any = DiscreteActorPolicy(actor=actor, action_space=spaces.Discrete(2))
    options: dict[str, Any] = {
        "critic": DiscreteCritic(preprocess_net=Net(OBS, hidden_sizes=[8])),
        "optim": AdamOptimizerFactory(lr=1e-3),
        "expert_buffer": filled(discrete=True),
        "disc_net": Net(OBS + 2, 1, [8], concat=False).model,
        "disc_optim": AdamOptimizerFactory(lr=1e-3),
    }
    return GAIL(policy=policy, **options), {"batch_size": 16, "repeat": 1}


@pytest.mark.parametrize("make", [td3bc, bcq])
def test_tianshou_algorithms_update_networks_from_replay_buffers(make: Any) -> None:
    torch.manual_seed(0)
    algorithm, options = make()
    before = copy.deepcopy(algorithm.policy.state_dict())
    with policy_within_training_step(algorithm.policy):
        losses = algorithm.update(buffer=filled(), **options).get_loss_stats_dict()
    assert np.isfinite(list(losses.values())).all()
    after = algorithm.policy.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_tianshou_policy_in_an_algorithm_is_reported() -> None:
    theirs = PeerPolicy(model=Net(OBS, 2, [8]), action_space=spaces.Discrete(2))
    with pytest.raises(ArgumentError, match="instance of DiscreteQLearningPolicy, got a DiscreteQL"):
        DQN(policy=theirs, optim=AdamOptimizerFactory())  # type: ignore[arg-type]


def test_gail_determines_the_width_of_an_actor() -> None:
    algorithm, _ = gail()
    assert algorithm.action_dim == 2


def test_tianshou_recognizes_batches_and_networks_by_isinstance() -> None:
    batch = Batch(obs=Batch(image=np.ones(3, np.float32)))
    assert isinstance(batch, tianshou.data.Batch)
    assert isinstance(batch.obs, tianshou.data.Batch)
    assert not isinstance(batch, dict)
    tensors: Any = tianshou.data.to_torch(batch)
    assert isinstance(tensors.obs.image, torch.Tensor)
    assert isinstance(Net(3, 2), ModuleWithVectorOutput)
    assert isinstance(DiscreteActor(preprocess_net=Net(3, 2), action_shape=2), ModuleWithVectorOutput)

    class Wide(Net):
        pass

    assert Wide(3, 2).__class__ is Wide


def test_recognized_batches_and_networks_keep_their_class_in_copies() -> None:
    batch, net = Batch(a=np.ones(3), b=Batch(c=[1])), Net(3, 2, [4])
    pickles = [pickle.loads(pickle.dumps(batch, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for same in (copy.copy(batch), copy.deepcopy(batch), *pickles):
        assert type(same) is type(same.b) is Batch
        assert same == batch
    file = BytesIO()
    torch.save(net, file)
    file.seek(0)
    for module in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)):
        assert type(module) is Net
        assert type(module.model) is MLP
        assert torch.equal(module(np.ones((1, 3)))[0], net(np.ones((1, 3)))[0])
