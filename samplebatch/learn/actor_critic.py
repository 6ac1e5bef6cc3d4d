"""Actor-critic algorithms on policy: advantages by a critic, and minibatches of steps or of sequences."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
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
from samplebatch.learn.networks import call_network, recurrent_parts
from samplebatch.learn.normalization import RunningMeanStd
from samplebatch.learn.optimizer import OptimizerFactory
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability, require_critic
from samplebatch.policy.state import state_of

Floats = npt.NDArray[np.float64]
Evaluated = Iterator[tuple[Batch, Distribution, torch.Tensor]]
"""Minibatches with the distributions of actions and the values of their rows."""
_LEARNED = ("obs", "act", "adv", "returns", "v_s", "logp_old")
"""The columns of minibatches, of those that an algorithm adds."""


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
    normalize_rewards
        Whether rewards are divided by the running standard deviation of discounted returns, and clipped to [-10, 10];
        Engstrom et al., arXiv:2005.12729, section 3. The return of each ring of the buffer, that is, of each
        environment, starts from 0 in each episode: `R = gamma * R + reward`. Buffers store rewards as collected.
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
        normalize_rewards: bool = False,
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
        self.ret_rms = RunningMeanStd() if return_scaling else None
        self.rew_rms = RunningMeanStd() if normalize_rewards else None
        self._discounted_returns: list[float] = []
        self.optim = self._create_optimizer(nn.ModuleList([policy, critic]), optim, max_grad_norm)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the part of `state_dict` beside parameters, with the discounted returns of running episodes."""
        return {**super().get_extra_state(), "discounted_returns": list(self._discounted_returns)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `get_extra_state` returned.

        Raises
        ------
        ArgumentError
            If it has another number of optimizers or schedules.
        """
        super().set_extra_state(state)
        self._discounted_returns = list(state.get("discounted_returns", ()))

    # Rewards

    def _sample_batch(self, buffer: Any, sample_size: int | None) -> tuple[Batch, Indices]:
        batch, indices = super()._sample_batch(buffer, sample_size)
        if self.rew_rms is not None:
            returns = self._discount_forward(batch, buffer, indices)
            self.rew_rms.update(returns[np.isfinite(returns)])
            batch.rew = (batch.rew / self.rew_rms.std.to(batch.rew)).clamp(-10.0, 10.0)
        return batch, indices

    def _discount_forward(self, batch: Batch, buffer: Any, indices: Indices) -> Floats:
        """Return the discounted sum of each step's reward and those before it in its episode, shape (n,)."""
        rewards = batch.rew.double().cpu().numpy()
        if rewards.ndim != 1:
            raise ArgumentError(f"rewards must be numbers to be normalized, got shape {rewards.shape[1:]} per step")
        ends = (batch.terminated | batch.truncated).cpu().numpy()
        sizes = [part.maxsize for part in getattr(buffer, "buffers", [buffer])]
        rings = np.searchsorted(np.cumsum(sizes), indices, side="right")
        running = [*self._discounted_returns, *[0.0] * (len(sizes) - len(self._discounted_returns))]
        returns: Floats = np.empty(len(rewards))
        for row, (ring, reward, end) in enumerate(zip(rings.tolist(), rewards.tolist(), ends.tolist(), strict=True)):
            returns[row] = running[ring] = self.gamma * running[ring] + reward
            if end or not np.isfinite(returns[row]):
                running[ring] = 0.0
        self._discounted_returns = running
        return returns

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
        scale = 1.0 if self.ret_rms is None else self.ret_rms.std.item()
        estimates = (torch.cat(parts).cpu().numpy() * scale for parts in (values, next_values))
        returns, advantages = self._estimate(batch, buffer, indices, *estimates)
        if self.ret_rms is not None:
            # Returns that are not finite are reported with the loss.
            self.ret_rms.update(returns[np.isfinite(returns)])
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
        found = call_network(self.critic, tensors, state)[0]
        values: torch.Tensor = (found if steps is None else found[steps]).flatten()
        return values

    # Minibatches

    def _evaluated(self, batch: Batch, batch_size: int | None) -> Evaluated:
        if state_of(batch) is not None:
            yield from self._evaluated_sequences(batch, batch_size)
            return
        for rows in self._minibatches(batch, batch_size, [name for name in _LEARNED if name in batch]):
            yield rows, self.policy.distribution(rows)[0], self._values(rows.obs)

    def _evaluated_sequences(self, batch: Batch, batch_size: int | None) -> Evaluated:
        """Do as `_evaluated` does, with sequences: as many whole ones as fit, but at least one."""
        lengths = chop(np.flatnonzero(batch.begins), len(batch), self.sequence_length)
        firsts = lengths.cumsum() - lengths
        order = torch.randperm(len(lengths)).numpy()
        place = np.arange(lengths.max())
        learned = Batch({name: batch[name] for name in _LEARNED if name in batch})
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
