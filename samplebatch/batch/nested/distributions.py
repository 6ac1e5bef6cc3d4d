"""Slicing and length of torch distributions that declare `arg_constraints`, wrapped in `Independent` or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from samplebatch.batch.nested.node import Selection
from samplebatch.errors import ColumnTypeError

if TYPE_CHECKING:
    from torch.distributions import Distribution

D = TypeVar("D", bound="Distribution")

_EITHER = (("probs", "logits"), ("scale_tril", "covariance_matrix", "precision_matrix"))
"""Groups of alternative parameters: a distribution is constructed with exactly one parameter per group."""


def parameters_of(dist: Distribution) -> dict[str, Any]:
    """Return the parameters that a distribution was constructed with, by name.

    >>> import torch
    >>> parameters_of(torch.distributions.Categorical(logits=torch.zeros(3)))
    {'logits': tensor([-1.0986, -1.0986, -1.0986])}
    """
    attributes = dist.__dict__
    # torch caches derived parameters next to the constructor's; among alternatives, skip the derived one.
    names = list(dist.arg_constraints)
    for group in _EITHER:
        alternatives = [name for name in group if name in names]
        constructor_argument = next(
            (name for name in alternatives if attributes.get(name) is attributes.get("_param", attributes)), None
        )
        chosen = constructor_argument or next((name for name in alternatives if name in attributes), None)
        names = [name for name in names if name not in alternatives or name == chosen]
    return {name: getattr(dist, name) for name in names}


def get_sliced_dist(dist: D, index: Any) -> D:
    """Index a distribution along its batch dimensions.

    Parameters
    ----------
    dist
        A distribution with at least one batch dimension.
    index
        A NumPy index of the batch dimensions only.

    Raises
    ------
    ColumnTypeError
        If the distribution's class does not declare its parameters as tensors.

    Examples
    --------
    >>> import torch
    >>> get_sliced_dist(torch.distributions.Normal(torch.zeros(4), torch.ones(4)), slice(1, 3))
    Normal(loc: torch.Size([2]), scale: torch.Size([2]))
    """
    try:
        return slice_distribution(dist, Selection(index))
    except TypeError as error:
        raise ColumnTypeError(f"{type(dist).__name__} cannot be sliced: {error}") from error


def slice_distribution(dist: D, selection: Selection) -> D:
    """Index a distribution along its batch dimensions.

    Raises TypeError if the distribution's class does not declare its parameters as tensors.
    """
    import torch
    from torch.distributions import Independent

    if isinstance(dist, Independent):
        inner = slice_distribution(dist.base_dist, selection)
        return type(dist)(inner, dist.reinterpreted_batch_ndims, validate_args=False)
    if hasattr(type(dist), "take_rows"):
        return type(dist).take_rows(dist, selection.of_tensor)  # type: ignore[attr-defined, no-any-return]
    parameters = parameters_of(dist)
    if not parameters or not all(isinstance(value, torch.Tensor) for value in parameters.values()):
        raise TypeError(
            f"a distribution must declare its parameters as tensors to be indexed, got a {type(dist).__name__}"
        )
    batch_ndim = len(dist.batch_shape)
    chosen = {}
    for name, value in parameters.items():
        event_shape = value.shape[batch_ndim:] if value.ndim >= batch_ndim else ()
        rows = value.expand(dist.batch_shape + event_shape)
        chosen[name] = rows[selection.of_tensor(rows)]
    return type(dist)(**chosen, validate_args=False)


def get_len_of_dist(dist: Distribution) -> int:
    """Return the number of rows of a distribution: the extent of the first batch dimension.

    Raises
    ------
    ColumnTypeError
        If the distribution has no batch dimension.

    Examples
    --------
    >>> import torch
    >>> get_len_of_dist(torch.distributions.Categorical(logits=torch.zeros(4, 3)))
    4
    """
    if not dist.batch_shape:
        raise ColumnTypeError(
            f"a distribution must have a batch dimension to have a length, {type(dist).__name__} has none"
        )
    return int(dist.batch_shape[0])


def dist_to_atleast_2d(dist: D) -> D:
    """Add a one-row batch dimension to a distribution without batch dimensions; return other distributions unchanged.

    Examples
    --------
    >>> import torch
    >>> dist_to_atleast_2d(
    ...     torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0))
    ... ).batch_shape
    torch.Size([1])
    """
    return dist if dist.batch_shape else get_sliced_dist(dist, None)


def distributions_equal(a: Distribution, b: Distribution) -> bool:
    """Return whether two distributions have the same class, batch shape and parameters."""
    import torch
    from torch.distributions import Independent

    if type(a) is not type(b) or a.batch_shape != b.batch_shape:
        return False
    if isinstance(a, Independent) and isinstance(b, Independent):
        same_ndims = a.reinterpreted_batch_ndims == b.reinterpreted_batch_ndims
        return same_ndims and distributions_equal(a.base_dist, b.base_dist)
    mine, theirs = parameters_of(a), parameters_of(b)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
