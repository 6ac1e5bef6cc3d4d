"""Optimizers of algorithms: torch optimizer factories, learning-rate schedules and gradient clipping."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from samplebatch.arguments import positive, suggest_names, whole
from samplebatch.errors import ArgumentError, NonFiniteLossError


class LRSchedulerFactory(ABC):
    """Base class of factories of learning-rate schedules."""

    @abstractmethod
    def create_scheduler(self, optim: torch.optim.Optimizer) -> LRScheduler:
        """Create the learning-rate schedule of an optimizer; algorithms step the schedule once per update."""


class LRSchedulerFactoryLinear(LRSchedulerFactory):
    """Factory of learning-rate schedules that decay linearly to 0 over a training run.

    Parameters
    ----------
    max_epochs, epoch_num_steps, collection_step_num_env_steps
        As in `TrainerParams`: the run has `max_epochs * ceil(epoch_num_steps / collection_step_num_env_steps)` updates.

    Raises
    ------
    ArgumentError
        If an argument is not a whole number of at least 1.

    Examples
    --------
    >>> parameter = nn.Parameter(torch.zeros(1))
    >>> optimizer = torch.optim.SGD([parameter], lr=0.5)
    >>> schedule = LRSchedulerFactoryLinear(1, 30, 10).create_scheduler(optimizer)
    >>> optimizer.step()
    >>> schedule.step()
    >>> round(optimizer.param_groups[0]["lr"], 4)
    0.3333
    """

    def __init__(self, max_epochs: int, epoch_num_steps: int, collection_step_num_env_steps: int) -> None:
        whole("max_epochs", max_epochs, 1)
        whole("epoch_num_steps", epoch_num_steps, 1)
        whole("collection_step_num_env_steps", collection_step_num_env_steps, 1)
        self.max_updates = max_epochs * math.ceil(epoch_num_steps / collection_step_num_env_steps)

    def create_scheduler(self, optim: torch.optim.Optimizer) -> LRScheduler:
        """Create the schedule of an optimizer."""
        return LambdaLR(optim, self.factor)

    def factor(self, update: int) -> float:
        """Return the factor by which the initial learning rate is multiplied after a number of updates."""
        return max(0.0, 1.0 - update / self.max_updates)


class OptimizerFactory(ABC):
    """Base class of optimizer factories, which algorithms call with the parameters to optimize."""

    lr_scheduler_factory: LRSchedulerFactory | None = None

    def with_lr_scheduler_factory(self, lr_scheduler_factory: LRSchedulerFactory) -> Self:
        """Set the learning-rate schedule of optimizers created afterwards, and return the factory."""
        self.lr_scheduler_factory = lr_scheduler_factory
        return self

    def create_instances(self, module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
        """Create the optimizer of a module's parameters, and its learning-rate schedule or None."""
        optimizer = self._create_optimizer_for_params(module.parameters())
        factory = self.lr_scheduler_factory
        return optimizer, None if factory is None else factory.create_scheduler(optimizer)

    @abstractmethod
    def _create_optimizer_for_params(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer: ...


def require_factory(factory: Any) -> None:
    """Raise ArgumentError if a value is not an optimizer factory; for torch optimizers, the message contains a hint."""
    if not callable(getattr(factory, "create_instances", None)):
        hint = "AdamOptimizerFactory(lr=1e-3)"
        optimizer = factory if isinstance(factory, type) else type(factory)
        if issubclass(optimizer, torch.optim.Optimizer):
            rate = "..." if isinstance(factory, type) else factory.param_groups[0]["lr"]
            is_adam = optimizer is torch.optim.Adam
            hint = f"{'AdamOptimizerFactory(' if is_adam else f'TorchOptimizerFactory({_path(optimizer)}, '}lr={rate})"
        value = f"the class {factory.__name__}" if isinstance(factory, type) else f"a {type(factory).__name__}"
        raise ArgumentError(
            f"optim must be an optimizer factory, got {value}; pass {hint}, as the algorithm knows the parameters"
        )


def _path(optimizer: type) -> str:
    is_public = vars(torch.optim).get(optimizer.__name__) is optimizer
    return f"torch.optim.{optimizer.__name__}" if is_public else optimizer.__name__


class TorchOptimizerFactory(OptimizerFactory):
    """Factory of torch optimizers of any class.

    Parameters
    ----------
    optim_class, **kwargs
        The optimizer's class, or a function that receives parameters and returns an optimizer; and further arguments of
        the class or function.

    Examples
    --------
    >>> factory = TorchOptimizerFactory(torch.optim.SGD, lr=0.1, momentum=0.9)
    >>> factory.create_instances(nn.Linear(2, 1))[0].defaults["momentum"]
    0.9
    """

    def __init__(self, optim_class: Callable[..., torch.optim.Optimizer], **kwargs: Any) -> None:
        self.optim_class, self.kwargs = optim_class, kwargs

    def _create_optimizer_for_params(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return self.optim_class(params, **self.kwargs)


class AdamOptimizerFactory(TorchOptimizerFactory):
    """Factory of Adam optimizers (arXiv:1412.6980), which are fused if torch supports fusion for the parameters.

    Raises
    ------
    ArgumentError
        If `lr` is not a positive number.
    """

    @suggest_names(learning_rate="lr")
    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(torch.optim.Adam, lr=positive("lr", lr), betas=betas, eps=eps, weight_decay=weight_decay)

    def _create_optimizer_for_params(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        params = list(params)
        try:
            # The fused step avoids the overhead per operation, which dominates for small networks.
            return self.optim_class(params, fused=True, **self.kwargs)
        except RuntimeError:
            return self.optim_class(params, **self.kwargs)


class RMSpropOptimizerFactory(TorchOptimizerFactory):
    """Factory of RMSprop optimizers.

    Raises
    ------
    ArgumentError
        If `lr` is not a positive number.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
    ) -> None:
        options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum, "centered": centered}
        super().__init__(torch.optim.RMSprop, lr=positive("lr", lr), **options)


class Optimizer:
    """Optimizer of an algorithm, which performs a gradient step with clipping in one call.

    optim, module: the torch optimizer, and the module with the optimized parameters.
    max_grad_norm: maximum L2 norm of all gradients; None for no clipping.

    requires_finite: whether gradient steps require a finite loss if the loss is on the host; set by the algorithm.

    Raises ArgumentError if `max_grad_norm` is not a positive number.

    >>> module = nn.Linear(1, 1, bias=False)
    >>> optimizer = Optimizer(
    ...     torch.optim.SGD(module.parameters(), lr=1.0), module, max_grad_norm=0.5
    ... )
    >>> before = module.weight.item()
    >>> optimizer.step(module(torch.tensor([[8.0]])).sum())
    >>> round(before - module.weight.item(), 4)
    0.5
    """

    def __init__(self, optim: torch.optim.Optimizer, module: nn.Module, max_grad_norm: float | None = None) -> None:
        self.optim, self.requires_finite = optim, False
        self.max_grad_norm = None if max_grad_norm is None else positive("max_grad_norm", max_grad_norm)
        self.parameters = list(module.parameters())

    def step(self, loss: torch.Tensor, retain_graph: bool | None = None, create_graph: bool = False) -> None:
        """Perform a gradient step; only the optimizer's parameters receive gradients.

        If a policy's loss also depends on a critic, omitting the critic's gradients saves a third of the duration of
        the backward pass.

        See `torch.Tensor.backward` for arguments.

        Raises NonFiniteLossError in the same cases as `descend`.
        """
        descend([(self, loss)], retain_graph, create_graph)

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state."""
        return self.optim.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a torch optimizer with the same parameters as this optimizer."""
        self.optim.load_state_dict(state)


def descend(
    steps: Sequence[tuple[Optimizer, torch.Tensor]], retain_graph: bool | None = None, create_graph: bool = False
) -> None:
    """Perform the gradient steps of several optimizers with one backward pass.

    steps: optimizers and their losses, tensors with one element. A loss must not depend on the parameters of another
        optimizer, because gradients of all losses are added.
    retain_graph, create_graph: see `torch.Tensor.backward`.

    Raises NonFiniteLossError if a loss on the host is not finite and its optimizer requires a finite loss; parameters
    are unchanged. Losses on other devices are not checked, because a check would synchronize the device.

    >>> modules = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    >>> before = [module.weight.item() for module in modules]
    >>> optimizers = [
    ...     Optimizer(torch.optim.SGD(module.parameters(), lr=1.0), module)
    ...     for module in modules
    ... ]
    >>> losses = [
    ...     modules[0](torch.tensor([[2.0]])).sum(),
    ...     modules[1](torch.tensor([[3.0]])).sum(),
    ... ]
    >>> descend([*zip(optimizers, losses, strict=True)])
    >>> [
    ...     round(old - module.weight.item(), 4)
    ...     for old, module in zip(before, modules, strict=True)
    ... ]
    [2.0, 3.0]
    """
    for optimizer, loss in steps:
        if optimizer.requires_finite and loss.is_cpu and not math.isfinite(value := loss.item()):
            raise NonFiniteLossError(f"a loss must be finite, got {value}")
    parameters = [parameter for optimizer, _ in steps for parameter in optimizer.parameters if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    losses = [loss for _, loss in steps]
    torch.autograd.backward(losses, retain_graph=retain_graph, create_graph=create_graph, inputs=parameters)
    for optimizer, _ in steps:
        if optimizer.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(optimizer.parameters, optimizer.max_grad_norm)
        optimizer.optim.step()
