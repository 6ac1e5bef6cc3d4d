"""MAPPO: PPO with decentralized actors and a centralized critic (Yu et al., arXiv:2103.01955).

The critic maps the concatenated observations of all agents at an environment step to one value per agent; minibatches
consist of complete environment steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from samplebatch import names
from samplebatch.arguments import fraction, positive
from samplebatch.batch.episodes import number_env_steps, order_streams
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node, set_unit
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.multi_agent import MultiAgentReplayBuffer
from samplebatch.errors import ArgumentError
from samplebatch.learn.algorithm import OnPolicyAlgorithm, require_steps
from samplebatch.learn.heads import JointCritic
from samplebatch.learn.independent import MultiAgentPolicy
from samplebatch.learn.networks import recurrent_parts
from samplebatch.learn.normalization import RunningMeanStd
from samplebatch.learn.optimizer import OptimizerFactory, descend
from samplebatch.learn.policy import ProbabilisticActorPolicy, log_probability
from samplebatch.learn.ppo import ActorCriticTrainingStats, summarize_steps
from samplebatch.names import PolicyID, label_policies
from samplebatch.returns.batches import compute_episodic_return

_ENV_STEP, _LOGP = "env_step", "logp_old"
"""Columns added by an update: number of the environment step, and log-probability of the action before the update."""
_COLLECTED_COLUMNS = (names.OBS, names.ACTIONS, names.AGENT_INDEX, names.EPS_ID, names.T)
"""Collected columns of minibatches."""


class MAPPO(OnPolicyAlgorithm[Any]):
    """Multi-agent PPO: one actor per policy, and one critic that receives the observations of all agents.

    The critic learns normalized returns (arXiv:2103.01955, section 5.1) with a Huber loss.

    Parameters
    ----------
    policies
        Policies by id. Several agents may share a policy; different policies may have different spaces. The attribute
        `policy` contains the policies as a `MultiAgentPolicy`, for collectors, workers and trainers.
    critic, optim
        The centralized critic, and the factory of two optimizers: one for the policies and one for the critic.
    eps_clip, ent_coef, gae_lambda, gamma, allow_nonfinite
        See `PPO`.
    huber_loss_delta
        Threshold between quadratic and linear loss of the critic.
    max_grad_norm
        Maximum L2 norm of the gradients of the policies and of the critic; None for no clipping.

    Raises
    ------
    ArgumentError
        If an argument is out of range, there are no policies, or a policy is recurrent or not a
        `ProbabilisticActorPolicy`.
    """

    _policy_class = MultiAgentPolicy

    def __init__(
        self,
        *,
        policies: Mapping[PolicyID, ProbabilisticActorPolicy],
        critic: JointCritic,
        optim: OptimizerFactory,
        eps_clip: float = 0.2,
        ent_coef: float = 0.01,
        huber_loss_delta: float = 10.0,
        max_grad_norm: float | None = 10.0,
        gae_lambda: float = 0.95,
        gamma: float = 0.99,
        allow_nonfinite: bool = False,
    ) -> None:
        super().__init__(policy=MultiAgentPolicy(policies), allow_nonfinite=allow_nonfinite)
        for policy_id, policy in policies.items():
            if not isinstance(policy, ProbabilisticActorPolicy):
                raise ArgumentError(
                    f"policy {policy_id!r} must be an instance of ProbabilisticActorPolicy, got a "
                    f"{type(policy).__name__}"
                )
            if recurrent_parts(policy):
                raise ArgumentError(
                    f"policy {policy_id!r} must not be recurrent, because MAPPO learns from single steps"
                )
        labels = label_policies(policies)
        self.actors = nn.ModuleDict({labels[policy_id]: policy for policy_id, policy in policies.items()})
        self.critic, self.moments = critic, RunningMeanStd()
        self.eps_clip, self.ent_coef = positive("eps_clip", eps_clip), ent_coef
        self.huber_loss_delta = positive("huber_loss_delta", huber_loss_delta)
        self.gae_lambda, self.gamma = fraction("gae_lambda", gae_lambda), fraction("gamma", gamma)
        self.optim = self._create_optimizer(self.actors, optim, max_grad_norm)
        self.critic_optim = self._create_optimizer(critic, optim, max_grad_norm)

    def update(
        self, buffer: MultiAgentReplayBuffer | MultiAgentBatch, batch_size: int | None = None, repeat: int = 1
    ) -> ActorCriticTrainingStats:
        """Update policies and critic with all steps of a buffer, or of a batch from a collector or workers.

        Parameters
        ----------
        buffer
            Source of the steps, which must have columns `eps_id`, `agent_index` and `t`.
        batch_size, repeat
            Number of environment steps per minibatch (None for all), and number of passes over the steps.

        Raises
        ------
        EmptyBufferError
            If there are no steps.
        ColumnNotFoundError
            If a column is missing.
        ArgumentError
            If `buffer` is not a multi-agent buffer or batch.
        """
        if not isinstance(buffer, MultiAgentReplayBuffer | MultiAgentBatch):
            raise ArgumentError(
                f"buffer must be a MultiAgentReplayBuffer or a MultiAgentBatch, got a {type(buffer).__name__}"
            )

        def update() -> ActorCriticTrainingStats:
            batch = buffer.sample(0).batch if isinstance(buffer, MultiAgentReplayBuffer) else buffer
            require_steps(batch.agent_steps())
            batch = self._in_policy_units(batch)
            batch = self._add_targets(batch)
            self.train()
            stats = self._require_finite(lambda: self._update_with_batch(batch, batch_size, repeat), batch)
            # After the gradient steps: the behaviour policy and the updated policy use the same normalization.
            for policy_id, rows in batch.policy_batches.items():
                self.policy[policy_id].update_statistics(node(Batch, {"obs": rows[names.OBS]}))
            return stats

        return self._run_update(update)

    def _in_policy_units(self, batch: MultiAgentBatch) -> MultiAgentBatch:
        converted = {}
        for policy_id, rows in batch.policy_batches.items():
            actions = node(Batch, {"act": rows[names.ACTIONS]})
            if rows.action_unit is not None:
                set_unit(actions, rows.action_unit)
            policy_actions = self.policy[policy_id].in_policy_unit(actions)
            if policy_actions is not actions:
                rows = rows.copy(shallow=True)
                rows[names.ACTIONS], rows.action_unit = policy_actions.act, policy_actions.action_unit
            converted[policy_id] = rows
        return MultiAgentBatch(converted, batch.count)

    @torch.no_grad()
    def _add_targets(self, batch: MultiAgentBatch) -> MultiAgentBatch:
        """Return rows in stream order with environment steps, advantages, normalized returns and log-probabilities."""
        parts = order_streams(batch.policy_batches)
        eps_id, t = (np.concatenate([rows[name] for rows in parts.values()]) for name in (names.EPS_ID, names.T))
        numbered, steps = number_env_steps(eps_id, t).step, {}
        for policy_id, rows in parts.items():
            steps[policy_id], numbered = numbered[: rows.count], numbered[rows.count :]
        values, following = (self._values(parts, steps, name) for name in (names.OBS, names.NEXT_OBS))
        prepared = {}
        for policy_id, rows in parts.items():
            index = steps[policy_id], rows[names.AGENT_INDEX]
            returns, advantages = compute_episodic_return(
                rows, v_s_=following[index], v_s=values[index], gamma=self.gamma, gae_lambda=self.gae_lambda
            )
            prepared[policy_id] = columns = rows.select(*_COLLECTED_COLUMNS)
            columns[_ENV_STEP] = steps[policy_id]
            columns[names.VALUE_TARGETS] = returns
            columns[names.ADVANTAGES] = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            columns[_LOGP] = self._log_probability(policy_id, rows).cpu().numpy()
        targets = np.concatenate([columns[names.VALUE_TARGETS] for columns in prepared.values()])
        self.moments.update(targets[np.isfinite(targets)])
        mean, std = self.moments.mean.item(), self.moments.std.item()
        for columns in prepared.values():
            columns[names.VALUE_TARGETS] = (columns[names.VALUE_TARGETS] - mean) / std
        return MultiAgentBatch(prepared, batch.count)

    def _values(self, parts: Mapping[PolicyID, SampleBatch], steps: Mapping[PolicyID, Any], name: str) -> Any:
        """Estimate the returns of all agents at each environment step, shape (steps, agents)."""
        inputs = [self._critic_input(policy_id, rows, name, steps[policy_id]) for policy_id, rows in parts.items()]
        values = self.critic(self.critic.join(inputs)).double().cpu().numpy()
        return values * self.moments.std.item() + self.moments.mean.item()

    def _critic_input(self, policy_id: PolicyID, rows: Any, name: str, step: Any) -> tuple[Any, Any, Any]:
        """Return the observations, environment steps and agent indices of a policy's rows as tensors."""
        obs, _ = self.policy[policy_id].observations(Batch(obs=rows[name]))
        return (obs, *(torch.as_tensor(values, device=obs.device) for values in (step, rows[names.AGENT_INDEX])))

    def _log_probability(self, policy_id: PolicyID, rows: Any) -> torch.Tensor:
        dist, _ = self.policy[policy_id].distribution(Batch(obs=rows[names.OBS]))
        return log_probability(dist, torch.as_tensor(rows[names.ACTIONS], device=self.critic.head.weight.device))

    def _update_with_batch(self, batch: Any, batch_size: int | None, repeat: int) -> ActorCriticTrainingStats:
        weight = self.critic.head.weight
        metrics: list[torch.Tensor] = []
        for part in batch.minibatches(
            batch_size or batch.count,
            epochs=repeat,
            rng=int(torch.randint(2**31, ())),
            lockstep=True,
            device=weight.device,
            floats=weight.dtype,
        ):
            actor_loss, entropy, kl = self._actor_losses(part)
            vf_loss = self._critic_loss(part)
            loss = actor_loss - self.ent_coef * entropy
            descend([(self.optim, loss), (self.critic_optim, vf_loss)])
            metrics.append(torch.stack([loss + vf_loss, actor_loss, vf_loss, entropy, kl]).detach())
        return summarize_steps(metrics)

    def _actor_losses(self, part: MultiAgentBatch[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the means of the clipped loss (arXiv:1707.06347, equation 7), entropy and estimated KL divergence."""
        gains, entropies, divergences = [], [], []
        for policy_id, rows in part.items():
            dist, _ = self.policy[policy_id].distribution(Batch(obs=rows[names.OBS]))
            log_ratio = log_probability(dist, rows[names.ACTIONS]) - rows[_LOGP]
            ratio, advantages = log_ratio.exp(), rows[names.ADVANTAGES]
            clipped = ratio.clamp(1.0 - self.eps_clip, 1.0 + self.eps_clip)
            gains.append(torch.min(ratio * advantages, clipped * advantages))
            entropies.append(dist.entropy())
            divergences.append(ratio.detach() - 1.0 - log_ratio.detach())
        return -torch.cat(gains).mean(), torch.cat(entropies).mean(), torch.cat(divergences).mean()

    def _critic_loss(self, part: MultiAgentBatch[torch.Tensor]) -> torch.Tensor:
        batches = list(part.values())
        _, step = torch.unique(torch.cat([rows[_ENV_STEP] for rows in batches]), return_inverse=True)
        steps = step.split([rows.count for rows in batches])
        inputs = [
            self._critic_input(policy_id, rows, names.OBS, row_steps)
            for (policy_id, rows), row_steps in zip(part.items(), steps, strict=True)
        ]
        agent, target = (
            torch.cat([rows[name] for rows in batches]) for name in (names.AGENT_INDEX, names.VALUE_TARGETS)
        )
        values = self.critic(self.critic.join(inputs))[step, agent]
        return nn.functional.huber_loss(values, target, delta=self.huber_loss_delta)
