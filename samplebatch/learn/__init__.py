"""Learning on top of batches and buffers: policies, algorithms and trainers, in torch.

Every public name of the learning side, loaded when it is first used. Nothing below this package knows of it.
"""

from __future__ import annotations

from samplebatch.exports import exports

_HOMES: dict[str, str] = {
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
}

__all__ = [*_HOMES]

__getattr__, __dir__ = exports(__name__, _HOMES)
