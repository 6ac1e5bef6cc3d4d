"""Actor-critic algorithms on policy: advantages by a critic, and minibatches of steps or of sequences."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributions import Distribution

from samplebatch.arguments import fraction, whole
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.sequences import chop, pack
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.errors import ArgumentError, ColumnNotFoundError
from samplebatch.learn.algorithm import Indices, OnPolicyAlgorithm
from samplebatch.learn.networks import ask, recurrent_parts
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability, require_critic
from samplebatch.policy.state import state_of

Floats = npt.NDArray[np.float64]
Evaluated = Iterator[tuple[Batch, Distribution, torch.Tensor]]
"""Minibatches with the distributions of actions and the values of their rows."""
_LEARNED = ("obs", "act", "adv", "returns", "v_s", "logp_old")
"""The columns of minibatches."""


class ActorCriticOnPolicyAlgorithm(OnPolicyAlgorithm[ProbabilisticActorPolicy], ABC):
    """An update rule that weighs actions by advantages, generalized by a critic: the base of `PPO`.

    With a recurrent policy, minibatches are of sequences: episodes are cut into parts of `sequence_length` steps, and
    each goes on from the state that the policy had when it collected its first step.

    Parameters
    ----------
    policy
        The trained policy.
    critic
        From observations to their values. One that is recurrent shares the actor's body, whose state is known.
    optim
        Optimizer factory for both.
    max_grad_norm
        Maximum L2 norm of gradients; None for no clipping.
    gae_lambda, gamma
        The decay of advantages, and the discount of a step.
    max_batchsize
        Rows that are estimated at once.
    return_scaling
        Whether the critic's targets are divided by the standard deviation of all returns so far.
    sequence_length
        The most steps of a sequence, for recurrent policies.
    allow_nonfinite
        See `Algorithm`.

    Raises
    ------
    ArgumentError
        If an argument is out of its range, or the critic has a recurrent body of its own.
    """

    def __init__(
        self,
        *,
        policy: ProbabilisticActorPolicy,
        critic: nn.Module,
        optim: OptimizerFactory,
        max_grad_norm: float | None = None,
        gae_lambda: float = 0.95,
        max_batchsize: int = 256,
        gamma: float = 0.99,
        return_scaling: bool = False,
        sequence_length: int = 32,
        allow_nonfinite: bool = False,
    ) -> None:
        require_critic(critic)
        super().__init__(policy=policy, allow_nonfinite=allow_nonfinite)
        if not set(recurrent_parts(critic)) <= set(policy.modules()):
            raise ArgumentError("critic must share the actor's body to be recurrent, as only its state is collected")
        self._is_recurrent = bool(recurrent_parts(policy))
        self.critic = critic
        self.gae_lambda, self.gamma = fraction("gae_lambda", gae_lambda), fraction("gamma", gamma)
        self.max_batchsize = whole("max_batchsize", max_batchsize, 1)
        self.sequence_length = whole("sequence_length", sequence_length, 1)
        self.ret_rms = RunningMoments() if return_scaling else None
        self.optim = self._create_optimizer(nn.ModuleList([policy, critic]), optim, max_grad_norm)

    # Estimates

    @torch.no_grad()
    def _add_returns_and_advantages(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        values, next_values = [], []
        for rows in batch.split(self.max_batchsize, shuffle=False, merge_last=True):
            before = state_of(rows)
            after = None if before is None else self.policy.distribution(rows, before)[1]
            values.append(self._values(rows.obs, before))
            next_values.append(self._values(rows.obs_next, after))
        batch.v_s = torch.cat(values)
        scale = 1.0 if self.ret_rms is None else self.ret_rms.std
        estimates = (torch.cat(parts).cpu().numpy() * scale for parts in (values, next_values))
        returns, advantages = self._estimate(batch, buffer, indices, *estimates)
        if self.ret_rms is not None:
            self.ret_rms.add(returns)
        batch.returns = torch.as_tensor(returns / scale).to(batch.v_s)
        batch.adv = torch.as_tensor(advantages).to(batch.v_s)
        return batch

    def _estimate(
        self, batch: Batch, buffer: ReplayBuffer, indices: Indices, values: Floats, next_values: Floats
    ) -> tuple[Floats, Floats]:
        return self.compute_episodic_return(
            batch, buffer, indices, v_s_=next_values, v_s=values, gamma=self.gamma, gae_lambda=self.gae_lambda
        )

    @torch.no_grad()
    def _add_log_probabilities(self, batch: Batch) -> Batch:
        found = [
            log_probability(self.policy.distribution(rows, state_of(rows))[0], rows.act)
            for rows in batch.split(self.max_batchsize, shuffle=False, merge_last=True)
        ]
        batch.logp_old = torch.cat(found)
        return batch

    def _values(self, obs: Any, state: Any = None, steps: torch.Tensor | None = None) -> torch.Tensor:
        """Ask the critic for the values of rows, or of the steps of sequences that are there, shape (n,)."""
        tensors, _ = self.policy.observations(Batch(obs=obs))
        found = ask(self.critic, tensors, state)[0]
        values: torch.Tensor = (found if steps is None else found[steps]).flatten()
        return values

    # Minibatches

    def _evaluated(self, batch: Batch, batch_size: int | None) -> Evaluated:
        if state_of(batch) is not None:
            yield from self._evaluated_sequences(batch, batch_size)
            return
        for rows in self._minibatches(batch, batch_size, _LEARNED):
            yield rows, self.policy.distribution(rows)[0], self._values(rows.obs)

    def _evaluated_sequences(self, batch: Batch, batch_size: int | None) -> Evaluated:
        """Do as `_evaluated` does, with sequences: as many whole ones as fit, but at least one."""
        lengths = chop(np.flatnonzero(batch.begins), len(batch), self.sequence_length)
        firsts = lengths.cumsum() - lengths
        order = torch.randperm(len(lengths)).numpy()
        place = np.arange(lengths.max())
        learned = Batch({name: batch[name] for name in _LEARNED})
        for part in pack(lengths[order], batch_size or len(batch)):
            first = firsts[order[part]][:, None]
            there = place < lengths[order[part]][:, None]
            at = torch.from_numpy(np.where(there, first + place, first))
            steps, state = torch.from_numpy(there), state_of(batch[at[:, 0]])
            obs = learned[at].obs
            dist, _ = self.policy.distribution(Batch(obs=obs), state, steps)
            yield learned[at[steps]], dist, self._values(obs, state, steps)

    def _add_beginnings(self, batch: Batch, buffer: ReplayBuffer, indices: Indices) -> Batch:
        """Add the column `begins`: whether a row begins an episode, or the part of it that the buffer has.

        Raises
        ------
        ColumnNotFoundError
            If the policy is recurrent and the rows have no states.
        """
        if self._is_recurrent and state_of(batch) is None:
            raise ColumnNotFoundError(
                "rows of a recurrent policy must have a column 'state_in' or 'state_in_0', the state before each step, "
                "as Collector stores it; got none"
            )
        batch.begins = buffer.prev(indices) == indices
        return batch


class RunningMoments(nn.Module):
    """Mean and variance of all numbers so far, kept by algorithms that scale returns; its buffers are in `state_dict`.

    Examples
    --------
    >>> moments = RunningMoments()
    >>> for numbers in ([1.0, 3.0], [5.0]):
    ...     moments.add(np.array(numbers))
    >>> moments.mean, round(moments.std**2, 4)
    (3.0, 2.6667)
    """

    count: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, start in (("count", 0.0), ("first", 0.0), ("second", 1.0)):
            self.register_buffer(name, torch.tensor(start, dtype=torch.float64))

    @property
    def mean(self) -> float:
        """The mean; 0 before the first number."""
        return self.first.item()

    @property
    def std(self) -> float:
        """The standard deviation, a little above 0; 1 before the first number."""
        return float(np.sqrt(self.second.item() + 1e-8))

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Take more numbers in (Chan, Golub and LeVeque, 1979: the pairwise update)."""
        count, first, second = (buffer.item() for buffer in (self.count, self.first, self.second))
        total, shift = count + numbers.size, float(numbers.mean()) - first
        squares = second * count + float(numbers.var()) * numbers.size + shift**2 * count * numbers.size / total
        self.count.fill_(total)
        self.first.fill_(first + shift * numbers.size / total)
        self.second.fill_(squares / total)
