"""Resumable: the state of a collector, from which another one that was made alike continues exactly."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Protocol

from samplebatch.column.unpickling import require_permission
from samplebatch.errors import ArgumentError, ColumnTypeError, FormatError
from samplebatch.policy.state import detach

_RECURRENT = "_state"
"""The attribute that holds the recurrent state of a policy, where a collector keeps that."""
_NAMES = ("collector", "num_envs", "values", "parts", "environments")


class _Part(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Uncopied:
    """An object with environments and a policy, which has a state, and is neither copied nor pickled itself."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ColumnTypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it has environments and a policy; take its "
            "state_dict(), and load that into one that is made alike"
        )


class Resumable(Uncopied, ABC):
    """A collector with a state that can be saved, and loaded by another one that was made with the same arguments."""

    _kept: ClassVar[Sequence[str]]
    """Attributes of plain values that belong to the state."""

    num_envs: int

    def _values(self) -> dict[str, Any]:
        """Return copies of the attributes of plain values, by name; recurrent states without their graph."""
        kept = {name: getattr(self, name) for name in self._kept}
        return copy.deepcopy({name: detach(own) if name == _RECURRENT else own for name, own in kept.items()})

    @abstractmethod
    def _parts(self) -> Mapping[str, _Part]:
        """Return the parts that have a state of their own, by name."""

    @abstractmethod
    def _environment_parts(self) -> Sequence[_Part]:
        """Return the adapters of the environments; their `load_state_dict` tells whether these could be saved."""

    @abstractmethod
    def _begin_with_new_seeds(self) -> None:
        """Leave the episodes under way, and let all environments be reset with seeds that they have not had."""

    def _settle(self) -> None:
        """Wait for steps that are under way."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the collector, for `load_state_dict`.

        It has the generators of random actions and of environments, the counts, the episodes under way with their
        returns and lengths, and the states of recurrent policies; not the policy, the hooks and the buffer, which have
        states of their own. Environments are pickled, by value where they are of no module. Where one of them cannot
        be, which those of processes and of some simulators cannot, all are left out, `why_reset` tells the reason, and
        a collector that loads the state resets its environments.

        Returns
        -------
        dict
            Plain values, arrays and tensors, which can be pickled, and `why_reset`: None if environments go on exactly.

        Examples
        --------
        >>> from samplebatch import Collector
        >>> collector, again = (Collector("random", "CartPole-v1", seed=seed) for seed in (1, 2))
        >>> _ = collector.collect(n_step=100)
        >>> again.load_state_dict(collector.state_dict(), allow_pickle=True)
        >>> one, other = (c.collect(n_step=100).batch for c in (collector, again))
        >>> (one["obs"] == other["obs"]).all(), (one["t"] == other["t"]).all()
        (np.True_, np.True_)
        """
        self._settle()
        environments = [one.state_dict() for one in self._environment_parts()]
        return {
            "collector": type(self).__name__,
            "num_envs": self.num_envs,
            "values": self._values(),
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
            "environments": environments,
            "why_reset": next((own["saved"]["why"] for own in environments if own["saved"]["why"]), None),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Continue where a collector was that was made with the same arguments; the seed is the one of that.

        Parameters
        ----------
        state
            A state that `state_dict` returned.
        allow_pickle
            Whether the environments in it may be unpickled, which runs code that the state's writer chose.

        Raises
        ------
        UntrustedPickleError
            If there are environments in it and `allow_pickle` is false. Nothing has changed then.
        FormatError
            If the state is not whole. Nothing has changed then.
        ArgumentError
            If it is of another kind of collector, or of another number of environments. Nothing has changed then.
        EnvironmentSpecError
            If it is of environments of other classes. The episodes under way are over then.
        """
        missing = [name for name in _NAMES if name not in state]
        if missing:
            raise FormatError(f"the state of a collector must have {missing[0]!r}, got one without it")
        found, wanted = (state["collector"], state["num_envs"]), (type(self).__name__, self.num_envs)
        if found != wanted:
            raise ArgumentError(
                f"the state must be of a {wanted[0]} of {wanted[1]} environments, got one of a {found[0]} of {found[1]}"
            )
        if has_pickles(state):
            require_permission(f"the state of a {type(self).__name__}", allow_pickle=allow_pickle)
        self._settle()
        try:
            pairs = zip(self._environment_parts(), state["environments"], strict=True)
            loaded = [one.load_state_dict(own) for one, own in pairs]
        except BaseException:
            self._begin_with_new_seeds()
            raise
        for name, value in copy.deepcopy(state["values"]).items():
            setattr(self, name, value)
        for name, part in self._parts().items():
            part.load_state_dict(state["parts"][name])
        if not all(loaded):
            self._begin_with_new_seeds()


def has_pickles(state: Mapping[str, Any]) -> bool:
    """Tell whether there are environments in the state of a collector."""
    return any(own["saved"]["pickles"] is not None for own in state["environments"])
