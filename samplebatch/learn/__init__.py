"""Policies, algorithms and trainers in torch.

Public names are imported on first use, because most of them import torch. Lower packages do not import
`samplebatch.learn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.learn.a2c import A2C as A2C
    from samplebatch.learn.action_values import ContinuousDeterministicPolicy as ContinuousDeterministicPolicy
    from samplebatch.learn.action_values import (
        ContinuousPolicyWithExplorationNoise as ContinuousPolicyWithExplorationNoise,
    )
    from samplebatch.learn.actor_critic import ActorCriticOnPolicyAlgorithm as ActorCriticOnPolicyAlgorithm
    from samplebatch.learn.algorithm import Algorithm as Algorithm
    from samplebatch.learn.algorithm import OfflineAlgorithm as OfflineAlgorithm
    from samplebatch.learn.algorithm import OffPolicyAlgorithm as OffPolicyAlgorithm
    from samplebatch.learn.algorithm import OnPolicyAlgorithm as OnPolicyAlgorithm
    from samplebatch.learn.algorithm import SimpleLossTrainingStats as SimpleLossTrainingStats
    from samplebatch.learn.algorithm import TrainingStats as TrainingStats
    from samplebatch.learn.augmentation import RandomShift as RandomShift
    from samplebatch.learn.behaviour_cloning import BehaviourCloning as BehaviourCloning
    from samplebatch.learn.behaviour_cloning import ImitationPolicy as ImitationPolicy
    from samplebatch.learn.behaviour_cloning import OffPolicyImitationLearning as OffPolicyImitationLearning
    from samplebatch.learn.checkpoint import load_checkpoint as load_checkpoint
    from samplebatch.learn.checkpoint import save_checkpoint as save_checkpoint
    from samplebatch.learn.cql import CQL as CQL
    from samplebatch.learn.ddpg import DDPG as DDPG
    from samplebatch.learn.discrete_bcq import DiscreteBCQ as DiscreteBCQ
    from samplebatch.learn.discrete_bcq import DiscreteBCQPolicy as DiscreteBCQPolicy
    from samplebatch.learn.distributional import C51 as C51
    from samplebatch.learn.distributional import QRDQN as QRDQN
    from samplebatch.learn.distributional import C51Policy as C51Policy
    from samplebatch.learn.distributional import QRDQNPolicy as QRDQNPolicy
    from samplebatch.learn.dqn import DQN as DQN
    from samplebatch.learn.dqn import DiscreteQLearningPolicy as DiscreteQLearningPolicy
    from samplebatch.learn.dqn import QLearningOffPolicyAlgorithm as QLearningOffPolicyAlgorithm
    from samplebatch.learn.exploration import BaseNoise as BaseNoise
    from samplebatch.learn.exploration import GaussianNoise as GaussianNoise
    from samplebatch.learn.exploration import OUNoise as OUNoise
    from samplebatch.learn.heads import ActorCritic as ActorCritic
    from samplebatch.learn.heads import ContinuousActorDeterministic as ContinuousActorDeterministic
    from samplebatch.learn.heads import ContinuousActorProbabilistic as ContinuousActorProbabilistic
    from samplebatch.learn.heads import ContinuousCritic as ContinuousCritic
    from samplebatch.learn.heads import DiscreteActor as DiscreteActor
    from samplebatch.learn.heads import DiscreteCritic as DiscreteCritic
    from samplebatch.learn.heads import DuelingCritic as DuelingCritic
    from samplebatch.learn.heads import JointCritic as JointCritic
    from samplebatch.learn.heads import ValueCritic as ValueCritic
    from samplebatch.learn.impala import APPO as APPO
    from samplebatch.learn.impala import IMPALA as IMPALA
    from samplebatch.learn.independent import MultiAgentOffPolicyAlgorithm as MultiAgentOffPolicyAlgorithm
    from samplebatch.learn.independent import MultiAgentOnPolicyAlgorithm as MultiAgentOnPolicyAlgorithm
    from samplebatch.learn.independent import MultiAgentPolicy as MultiAgentPolicy
    from samplebatch.learn.iql import IQL as IQL
    from samplebatch.learn.joint_actions import JointActions as JointActions
    from samplebatch.learn.mappo import MAPPO as MAPPO
    from samplebatch.learn.networks import MLP as MLP
    from samplebatch.learn.networks import Convolutional as Convolutional
    from samplebatch.learn.networks import Net as Net
    from samplebatch.learn.networks import NoisyLinear as NoisyLinear
    from samplebatch.learn.networks import Recurrent as Recurrent
    from samplebatch.learn.networks import RecurrentBody as RecurrentBody
    from samplebatch.learn.normalization import RunningMeanStd as RunningMeanStd
    from samplebatch.learn.older_trainers import offpolicy_trainer as offpolicy_trainer
    from samplebatch.learn.older_trainers import onpolicy_trainer as onpolicy_trainer
    from samplebatch.learn.optimizer import AdamOptimizerFactory as AdamOptimizerFactory
    from samplebatch.learn.optimizer import LRSchedulerFactory as LRSchedulerFactory
    from samplebatch.learn.optimizer import LRSchedulerFactoryLinear as LRSchedulerFactoryLinear
    from samplebatch.learn.optimizer import OptimizerFactory as OptimizerFactory
    from samplebatch.learn.optimizer import RMSpropOptimizerFactory as RMSpropOptimizerFactory
    from samplebatch.learn.optimizer import TorchOptimizerFactory as TorchOptimizerFactory
    from samplebatch.learn.policy import DiscreteActorPolicy as DiscreteActorPolicy
    from samplebatch.learn.policy import Policy as Policy
    from samplebatch.learn.policy import ProbabilisticActorPolicy as ProbabilisticActorPolicy
    from samplebatch.learn.policy import policy_within_training_step as policy_within_training_step
    from samplebatch.learn.policy import torch_train_mode as torch_train_mode
    from samplebatch.learn.ppo import PPO as PPO
    from samplebatch.learn.reinforce import Reinforce as Reinforce
    from samplebatch.learn.sac import SAC as SAC
    from samplebatch.learn.sac import Alpha as Alpha
    from samplebatch.learn.sac import AutoAlpha as AutoAlpha
    from samplebatch.learn.sac import DiscreteSAC as DiscreteSAC
    from samplebatch.learn.sac import DiscreteSACPolicy as DiscreteSACPolicy
    from samplebatch.learn.sac import FixedAlpha as FixedAlpha
    from samplebatch.learn.sac import SACPolicy as SACPolicy
    from samplebatch.learn.td3 import TD3 as TD3
    from samplebatch.learn.trainer import EpochStats as EpochStats
    from samplebatch.learn.trainer import InfoStats as InfoStats
    from samplebatch.learn.trainer import OfflineTrainer as OfflineTrainer
    from samplebatch.learn.trainer import OfflineTrainerParams as OfflineTrainerParams
    from samplebatch.learn.trainer import OffPolicyTrainer as OffPolicyTrainer
    from samplebatch.learn.trainer import OffPolicyTrainerParams as OffPolicyTrainerParams
    from samplebatch.learn.trainer import OnlineTrainerParams as OnlineTrainerParams
    from samplebatch.learn.trainer import OnPolicyTrainer as OnPolicyTrainer
    from samplebatch.learn.trainer import OnPolicyTrainerParams as OnPolicyTrainerParams
    from samplebatch.learn.trainer import TimingStats as TimingStats
    from samplebatch.learn.trainer import Trainer as Trainer
    from samplebatch.learn.trainer import TrainerParams as TrainerParams
    from samplebatch.loggers.logger import Logger as Logger
    from samplebatch.loggers.logger import TensorboardLogger as TensorboardLogger
    from samplebatch.loggers.logger import WandbLogger as WandbLogger
    from samplebatch.loggers.training_log import TrainingLog as TrainingLog
    from samplebatch.loggers.training_log import learning_curves as learning_curves
    from samplebatch.loggers.training_log import read_log as read_log
    from samplebatch.policy.schedules import ExponentialSchedule as ExponentialSchedule
    from samplebatch.policy.schedules import LinearSchedule as LinearSchedule
    from samplebatch.policy.schedules import Schedule as Schedule

__getattr__, __dir__, __all__ = exports(__name__)
