"""Behaviour cloning: supervised learning of recorded actions (Pomerleau, Neural Computation 3, 1991)."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from samplebatch.batch.nested.batch import Batch
from samplebatch.learn.algorithm import OfflineAlgorithm, OffPolicyAlgorithm, SimpleLossTrainingStats
from samplebatch.learn.networks import call_network
from samplebatch.learn.optimizer import Optimizer, OptimizerFactory
from samplebatch.learn.policy import Policy, mask_logits


class ImitationPolicy(Policy):
    """Deterministic policy for behaviour cloning.

    Parameters
    ----------
    actor
        Network from observations to the logits of discrete actions, or to continuous actions.
    action_space, **options
        See `Policy`. With `action_scaling`, continuous actions in the environment's unit are converted to [-1, 1].
        Without `action_scaling`, actions are learned as stored; actions in the environment's unit then require
        `action_bound_method=None`.

    Raises
    ------
    PolicySpecError
        If the action space is neither Discrete nor a Box.

    Examples
    --------
    >>> policy = ImitationPolicy(actor=nn.Identity(), action_space=spaces.Discrete(3))
    >>> policy.compute_action([0.1, 0.5, 0.2])
    1
    """

    _action_spaces = (spaces.Discrete, spaces.Box)
    _action_words = "a Discrete space or a Box"

    def __init__(self, *, actor: nn.Module, action_space: gymnasium.Space[Any], **options: Any) -> None:
        super().__init__(action_space, **options)
        self.actor = actor

    def forward(self, batch: Batch, state: Any = None, **unused: Any) -> Batch:
        """Return actions as `act`, the network's output as `logits`, and the new state as `state`.

        Logits of masked discrete actions are lower than the logits of all allowed actions. Additional keyword arguments
        are ignored, as in Tianshou.
        """
        obs, mask = self.observations(batch)
        logits, state = call_network(self.actor, obs, state)
        if self.action_type == "continuous":
            return Batch(act=logits, logits=logits, state=state)
        if mask is not None:
            logits = mask_logits(logits, mask)
        return Batch(act=logits.argmax(-1), logits=logits, state=state)


class BehaviourCloning(OfflineAlgorithm[ImitationPolicy]):
    """Behaviour cloning from data, for discrete and continuous actions, as in Tianshou's `OfflineImitationLearning`.

    The loss is the cross entropy for discrete actions, and the mean squared error for continuous actions. Only the
    columns `obs` and `act` are required.

    Parameters
    ----------
    policy, optim, allow_nonfinite
        Policy to train, and its optimizer factory; see `Algorithm` for `allow_nonfinite`.
    """

    _policy_class = ImitationPolicy

    def __init__(self, *, policy: ImitationPolicy, optim: OptimizerFactory, allow_nonfinite: bool = False) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        self.optim = self._create_optimizer(policy, optim)

    def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
        return _cloning_step(self.policy, self.optim, batch)


class OffPolicyImitationLearning(OffPolicyAlgorithm[ImitationPolicy]):
    """Online behaviour cloning of the policy that collects the steps, for discrete and continuous actions.

    The trainer's collector must run the expert policy that is imitated.

    Parameters
    ----------
    policy, optim, allow_nonfinite
        See `BehaviourCloning`.
    """

    _policy_class = ImitationPolicy

    def __init__(self, *, policy: ImitationPolicy, optim: OptimizerFactory, allow_nonfinite: bool = False) -> None:
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        self.optim = self._create_optimizer(policy, optim)

    def _update_with_batch(self, batch: Batch) -> SimpleLossTrainingStats:
        return _cloning_step(self.policy, self.optim, batch)


def _cloning_step(policy: ImitationPolicy, optim: Optimizer, batch: Batch) -> SimpleLossTrainingStats:
    output = policy(batch).logits
    if policy.action_type == "continuous":
        loss = mse_loss(output, batch.act)
    else:
        loss = cross_entropy(output, batch.act.long())
    optim.step(loss)
    return SimpleLossTrainingStats(loss=loss.item())
