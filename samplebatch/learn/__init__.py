"""Learning on top of batches and buffers: policies, algorithms and trainers, in torch.

Every public name of the learning side, loaded when it is first used. Nothing below this package knows of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

_HOMES = {
    "EpochStats": "samplebatch.learn.trainer_stats",
    "InfoStats": "samplebatch.learn.trainer_stats",
    "LearningCurve": "samplebatch.learn.training_log",
    "Logger": "samplebatch.learn.loggers",
    "OffPolicyTrainer": "samplebatch.learn.trainer",
    "OffPolicyTrainerParams": "samplebatch.learn.trainer_params",
    "OfflineTrainer": "samplebatch.learn.trainer",
    "OfflineTrainerParams": "samplebatch.learn.trainer_params",
    "OnPolicyTrainer": "samplebatch.learn.trainer",
    "OnPolicyTrainerParams": "samplebatch.learn.trainer_params",
    "OnlineTrainer": "samplebatch.learn.trainer",
    "OnlineTrainerParams": "samplebatch.learn.trainer_params",
    "TensorboardLogger": "samplebatch.learn.loggers",
    "TimingStats": "samplebatch.learn.trainer_stats",
    "Trainer": "samplebatch.learn.training_loop",
    "TrainerParams": "samplebatch.learn.trainer_params",
    "TrainingLog": "samplebatch.learn.training_log",
    "WandbLogger": "samplebatch.learn.loggers",
    "learning_curves": "samplebatch.learn.training_log",
    "load_checkpoint": "samplebatch.learn.checkpoint",
    "read_log": "samplebatch.learn.training_log",
    "save_checkpoint": "samplebatch.learn.checkpoint",
    "Policy": "samplebatch.learn.policy",
    "policy_within_training_step": "samplebatch.learn.policy",
    "torch_train_mode": "samplebatch.learn.policy",
    "Algorithm": "samplebatch.learn.algorithm",
    "OnPolicyAlgorithm": "samplebatch.learn.algorithm",
    "OffPolicyAlgorithm": "samplebatch.learn.algorithm",
    "OfflineAlgorithm": "samplebatch.learn.algorithm",
    "TrainingStats": "samplebatch.learn.algorithm",
    "SimpleLossTrainingStats": "samplebatch.learn.algorithm",
    "Optimizer": "samplebatch.learn.optimizer",
    "OptimizerFactory": "samplebatch.learn.optimizer",
    "TorchOptimizerFactory": "samplebatch.learn.optimizer",
    "AdamOptimizerFactory": "samplebatch.learn.optimizer",
    "RMSpropOptimizerFactory": "samplebatch.learn.optimizer",
    "LRSchedulerFactory": "samplebatch.learn.optimizer",
    "LRSchedulerFactoryLinear": "samplebatch.learn.optimizer",
    "LaggedNetwork": "samplebatch.learn.lagged",
    "BaseNoise": "samplebatch.learn.exploration",
    "GaussianNoise": "samplebatch.learn.exploration",
    "OUNoise": "samplebatch.learn.exploration",
    "Schedule": "samplebatch.learn.exploration",
    "LinearSchedule": "samplebatch.learn.exploration",
    "ExponentialSchedule": "samplebatch.learn.exploration",
    "Flatten": "samplebatch.learn.networks",
    "MLP": "samplebatch.learn.networks",
    "Convolutional": "samplebatch.learn.networks",
    "Recurrent": "samplebatch.learn.networks",
    "DiscreteActor": "samplebatch.learn.heads",
    "ContinuousActorProbabilistic": "samplebatch.learn.heads",
    "ContinuousActorDeterministic": "samplebatch.learn.heads",
    "DiscreteCritic": "samplebatch.learn.heads",
    "DuelingCritic": "samplebatch.learn.heads",
    "ValueCritic": "samplebatch.learn.heads",
    "ContinuousCritic": "samplebatch.learn.heads",
    "ask": "samplebatch.learn.networks",
    "initialize_orthogonally": "samplebatch.learn.heads",
    "DiscreteQLearningPolicy": "samplebatch.learn.dqn",
    "DQN": "samplebatch.learn.dqn",
    "TwinCritics": "samplebatch.learn.twin_critics",
    "ContinuousPolicyWithExplorationNoise": "samplebatch.learn.noisy_policy",
    "ContinuousDeterministicPolicy": "samplebatch.learn.td3",
    "TD3": "samplebatch.learn.td3",
    "TD3TrainingStats": "samplebatch.learn.td3",
    "SACPolicy": "samplebatch.learn.sac",
    "SoftActorCritic": "samplebatch.learn.sac",
    "SAC": "samplebatch.learn.sac",
    "SACTrainingStats": "samplebatch.learn.sac",
    "Alpha": "samplebatch.learn.temperature",
    "FixedAlpha": "samplebatch.learn.temperature",
    "AutoAlpha": "samplebatch.learn.temperature",
    "CQL": "samplebatch.learn.cql",
    "CQLTrainingStats": "samplebatch.learn.cql",
    "ImitationPolicy": "samplebatch.learn.behaviour_cloning",
    "BehaviourCloning": "samplebatch.learn.behaviour_cloning",
    "DiscreteBCQPolicy": "samplebatch.learn.discrete_bcq",
    "DiscreteBCQ": "samplebatch.learn.discrete_bcq",
    "DiscreteBCQTrainingStats": "samplebatch.learn.discrete_bcq",
    "ProbabilisticActorPolicy": "samplebatch.learn.actor_policy",
    "DiscreteActorPolicy": "samplebatch.learn.actor_policy",
    "Reinforce": "samplebatch.learn.reinforce",
    "LossSequenceTrainingStats": "samplebatch.learn.reinforce",
    "ActorCriticOnPolicyAlgorithm": "samplebatch.learn.actor_critic",
    "PPO": "samplebatch.learn.ppo",
    "ActorCriticTrainingStats": "samplebatch.learn.ppo",
    "JointCritic": "samplebatch.learn.heads",
    "MAPPO": "samplebatch.learn.mappo",
    "MultiAgentOffPolicyAlgorithm": "samplebatch.learn.independent",
    "MultiAgentOnPolicyAlgorithm": "samplebatch.learn.independent",
    "MultiAgentPolicy": "samplebatch.learn.independent",
    "MultiAgentTrainingStats": "samplebatch.learn.independent",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from samplebatch.learn.actor_critic import ActorCriticOnPolicyAlgorithm as ActorCriticOnPolicyAlgorithm
    from samplebatch.learn.actor_policy import DiscreteActorPolicy as DiscreteActorPolicy
    from samplebatch.learn.actor_policy import ProbabilisticActorPolicy as ProbabilisticActorPolicy
    from samplebatch.learn.algorithm import Algorithm as Algorithm
    from samplebatch.learn.algorithm import OfflineAlgorithm as OfflineAlgorithm
    from samplebatch.learn.algorithm import OffPolicyAlgorithm as OffPolicyAlgorithm
    from samplebatch.learn.algorithm import OnPolicyAlgorithm as OnPolicyAlgorithm
    from samplebatch.learn.algorithm import SimpleLossTrainingStats as SimpleLossTrainingStats
    from samplebatch.learn.algorithm import TrainingStats as TrainingStats
    from samplebatch.learn.behaviour_cloning import BehaviourCloning as BehaviourCloning
    from samplebatch.learn.behaviour_cloning import ImitationPolicy as ImitationPolicy
    from samplebatch.learn.checkpoint import load_checkpoint as load_checkpoint
    from samplebatch.learn.checkpoint import save_checkpoint as save_checkpoint
    from samplebatch.learn.cql import CQL as CQL
    from samplebatch.learn.cql import CQLTrainingStats as CQLTrainingStats
    from samplebatch.learn.discrete_bcq import DiscreteBCQ as DiscreteBCQ
    from samplebatch.learn.discrete_bcq import DiscreteBCQPolicy as DiscreteBCQPolicy
    from samplebatch.learn.discrete_bcq import DiscreteBCQTrainingStats as DiscreteBCQTrainingStats
    from samplebatch.learn.dqn import DQN as DQN
    from samplebatch.learn.dqn import DiscreteQLearningPolicy as DiscreteQLearningPolicy
    from samplebatch.learn.exploration import BaseNoise as BaseNoise
    from samplebatch.learn.exploration import ExponentialSchedule as ExponentialSchedule
    from samplebatch.learn.exploration import GaussianNoise as GaussianNoise
    from samplebatch.learn.exploration import LinearSchedule as LinearSchedule
    from samplebatch.learn.exploration import OUNoise as OUNoise
    from samplebatch.learn.exploration import Schedule as Schedule
    from samplebatch.learn.heads import ContinuousActorDeterministic as ContinuousActorDeterministic
    from samplebatch.learn.heads import ContinuousActorProbabilistic as ContinuousActorProbabilistic
    from samplebatch.learn.heads import ContinuousCritic as ContinuousCritic
    from samplebatch.learn.heads import DiscreteActor as DiscreteActor
    from samplebatch.learn.heads import DiscreteCritic as DiscreteCritic
    from samplebatch.learn.heads import DuelingCritic as DuelingCritic
    from samplebatch.learn.heads import JointCritic as JointCritic
    from samplebatch.learn.heads import ValueCritic as ValueCritic
    from samplebatch.learn.heads import initialize_orthogonally as initialize_orthogonally
    from samplebatch.learn.independent import MultiAgentOffPolicyAlgorithm as MultiAgentOffPolicyAlgorithm
    from samplebatch.learn.independent import MultiAgentOnPolicyAlgorithm as MultiAgentOnPolicyAlgorithm
    from samplebatch.learn.independent import MultiAgentPolicy as MultiAgentPolicy
    from samplebatch.learn.independent import MultiAgentTrainingStats as MultiAgentTrainingStats
    from samplebatch.learn.lagged import LaggedNetwork as LaggedNetwork
    from samplebatch.learn.loggers import Logger as Logger
    from samplebatch.learn.loggers import TensorboardLogger as TensorboardLogger
    from samplebatch.learn.loggers import WandbLogger as WandbLogger
    from samplebatch.learn.mappo import MAPPO as MAPPO
    from samplebatch.learn.networks import MLP as MLP
    from samplebatch.learn.networks import Convolutional as Convolutional
    from samplebatch.learn.networks import Flatten as Flatten
    from samplebatch.learn.networks import Recurrent as Recurrent
    from samplebatch.learn.networks import ask as ask
    from samplebatch.learn.noisy_policy import (
        ContinuousPolicyWithExplorationNoise as ContinuousPolicyWithExplorationNoise,
    )
    from samplebatch.learn.optimizer import AdamOptimizerFactory as AdamOptimizerFactory
    from samplebatch.learn.optimizer import LRSchedulerFactory as LRSchedulerFactory
    from samplebatch.learn.optimizer import LRSchedulerFactoryLinear as LRSchedulerFactoryLinear
    from samplebatch.learn.optimizer import Optimizer as Optimizer
    from samplebatch.learn.optimizer import OptimizerFactory as OptimizerFactory
    from samplebatch.learn.optimizer import RMSpropOptimizerFactory as RMSpropOptimizerFactory
    from samplebatch.learn.optimizer import TorchOptimizerFactory as TorchOptimizerFactory
    from samplebatch.learn.policy import Policy as Policy
    from samplebatch.learn.policy import policy_within_training_step as policy_within_training_step
    from samplebatch.learn.policy import torch_train_mode as torch_train_mode
    from samplebatch.learn.ppo import PPO as PPO
    from samplebatch.learn.ppo import ActorCriticTrainingStats as ActorCriticTrainingStats
    from samplebatch.learn.reinforce import LossSequenceTrainingStats as LossSequenceTrainingStats
    from samplebatch.learn.reinforce import Reinforce as Reinforce
    from samplebatch.learn.sac import SAC as SAC
    from samplebatch.learn.sac import SACPolicy as SACPolicy
    from samplebatch.learn.sac import SACTrainingStats as SACTrainingStats
    from samplebatch.learn.sac import SoftActorCritic as SoftActorCritic
    from samplebatch.learn.td3 import TD3 as TD3
    from samplebatch.learn.td3 import ContinuousDeterministicPolicy as ContinuousDeterministicPolicy
    from samplebatch.learn.td3 import TD3TrainingStats as TD3TrainingStats
    from samplebatch.learn.temperature import Alpha as Alpha
    from samplebatch.learn.temperature import AutoAlpha as AutoAlpha
    from samplebatch.learn.temperature import FixedAlpha as FixedAlpha
    from samplebatch.learn.trainer import OfflineTrainer as OfflineTrainer
    from samplebatch.learn.trainer import OffPolicyTrainer as OffPolicyTrainer
    from samplebatch.learn.trainer import OnlineTrainer as OnlineTrainer
    from samplebatch.learn.trainer import OnPolicyTrainer as OnPolicyTrainer
    from samplebatch.learn.trainer_params import OfflineTrainerParams as OfflineTrainerParams
    from samplebatch.learn.trainer_params import OffPolicyTrainerParams as OffPolicyTrainerParams
    from samplebatch.learn.trainer_params import OnlineTrainerParams as OnlineTrainerParams
    from samplebatch.learn.trainer_params import OnPolicyTrainerParams as OnPolicyTrainerParams
    from samplebatch.learn.trainer_params import TrainerParams as TrainerParams
    from samplebatch.learn.trainer_stats import EpochStats as EpochStats
    from samplebatch.learn.trainer_stats import InfoStats as InfoStats
    from samplebatch.learn.trainer_stats import TimingStats as TimingStats
    from samplebatch.learn.training_log import LearningCurve as LearningCurve
    from samplebatch.learn.training_log import TrainingLog as TrainingLog
    from samplebatch.learn.training_log import learning_curves as learning_curves
    from samplebatch.learn.training_log import read_log as read_log
    from samplebatch.learn.training_loop import Trainer as Trainer
    from samplebatch.learn.twin_critics import TwinCritics as TwinCritics

__getattr__, __dir__ = exports(__name__, _HOMES)
