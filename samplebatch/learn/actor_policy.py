"""Policies that draw actions from the distributions of an actor network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import torch
from gymnasium import spaces
from torch import nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from samplebatch.batch.nested.batch import Batch
from samplebatch.learn.networks import ask
from samplebatch.learn.policy import Policy
from samplebatch.policy.state import zeros_like


def categorical(logits: torch.Tensor) -> Categorical:
    """Make the distribution of discrete actions, of their logits."""
    # Networks that diverge are found when actions are drawn; looking at all logits each time takes longer than that.
    return Categorical(logits=logits, validate_args=False)


def diagonal_normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Independent[Normal]:
    """Make the distribution of continuous actions, of their means and standard deviations."""
    return Independent(Normal(*parameters, validate_args=False), 1, validate_args=False)


class ProbabilisticActorPolicy(Policy):
    """A policy that draws its actions from a distribution, or takes the most likely ones when it is evaluated.

    Parameters
    ----------
    actor
        From observations to the parameters of a distribution, and to a state if it is recurrent.
    dist_fn
        From these parameters to a torch distribution; by default `categorical` for discrete actions and
        `diagonal_normal` for a Box.
    deterministic_eval
        Whether the most likely action is taken outside of training steps.
    action_space, observation_space, action_scaling, action_bound_method
        As of `Policy`. Actions of a Box with bounds are scaled by default.

    Examples
    --------
    >>> policy = ProbabilisticActorPolicy(
    ...     actor=nn.Linear(2, 3), action_space=spaces.Discrete(3), deterministic_eval=True
    ... )
    >>> policy(Batch(obs=torch.zeros(4, 2))).act.shape
    torch.Size([4])
    """

    def __init__(
        self,
        *,
        actor: nn.Module,
        dist_fn: Callable[[Any], Distribution] | None = None,
        deterministic_eval: bool = False,
        action_space: gymnasium.Space[Any],
        observation_space: gymnasium.Space[Any] | None = None,
        action_scaling: bool | None = None,
        action_bound_method: Literal["clip", "tanh"] | None = "clip",
    ) -> None:
        box = isinstance(action_space, spaces.Box)
        scaling = box and action_space.is_bounded() if action_scaling is None else action_scaling  # type: ignore[attr-defined]
        super().__init__(action_space, observation_space, scaling, action_bound_method if box else None)
        self.actor = actor
        self.dist_fn = dist_fn if dist_fn is not None else diagonal_normal if box else categorical
        self.deterministic_eval = deterministic_eval

    def distribution(
        self, batch: Batch, state: Any = None, steps: torch.Tensor | None = None
    ) -> tuple[Distribution, Any]:
        """Return the distribution of the actions of each row, and the state after it.

        Discrete actions that a mask forbids have probability 0.

        Parameters
        ----------
        batch
            Rows with `obs`, or sequences of them, an axis more.
        state
            The state before each row or sequence; None for one without.
        steps
            Which steps of sequences are there, shape (n, length): the distribution is of these, one after the other.
        """
        obs, mask = self.observations(batch)
        output, after = ask(self.actor, obs, state)
        if mask is not None:
            output = output.masked_fill(~mask, torch.finfo(output.dtype).min)
        if steps is not None:
            output = tuple(part[steps] for part in output) if isinstance(output, tuple) else output[steps]
        return self.dist_fn(output), after

    def forward(self, batch: Batch, state: Any = None) -> Batch:
        """Return actions as `act`, their distribution as `dist`, and the state.

        The state that a recurrent actor began with is stored with the steps, as `policy.state_in`: learners begin
        sequences with it.
        """
        dist, after = self.distribution(batch, state)
        act = dist.mode if self.deterministic_eval and not self.is_within_training_step else dist.sample()
        if after is None:
            return Batch(act=act, dist=dist)
        before = zeros_like(after) if state is None else state
        return Batch(act=act, dist=dist, state=after, policy={"state_in": before})


class DiscreteActorPolicy(ProbabilisticActorPolicy):
    """A policy that draws discrete actions by the logits of an actor network.

    Parameters
    ----------
    actor, action_space, **options
        As of `ProbabilisticActorPolicy`; actions are Discrete.

    Raises
    ------
    PolicySpecError
        If actions are not Discrete.
    """

    _action_spaces = spaces.Discrete
    _action_words = "a Discrete space"


def log_probability(dist: Distribution, act: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each action, shape (n,), summed over its parts where the distribution has some.

    >>> log_probability(categorical(torch.zeros(2, 4)), torch.tensor([0, 3])).exp()
    tensor([0.2500, 0.2500])
    """
    found: torch.Tensor = dist.log_prob(act)
    return found if found.ndim == 1 else found.flatten(1).sum(-1)
