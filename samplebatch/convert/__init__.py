"""Experience in the forms of other libraries, and back: one module for each of them, imported when it is used.

A function `to_x` takes a batch, a buffer, columns by name or an iterable of fragments; a function `from_x` makes a
`SampleBatch`. Each imports its library, or names the extra to be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

_HOMES = {
    "from_minari": "samplebatch.convert.minari",
    "episodes_from_minari": "samplebatch.convert.minari",
    "to_minari": "samplebatch.convert.minari",
    "from_tensordict": "samplebatch.convert.tensordict",
    "to_tensordict": "samplebatch.convert.tensordict",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from samplebatch.convert.minari import episodes_from_minari as episodes_from_minari
    from samplebatch.convert.minari import from_minari as from_minari
    from samplebatch.convert.minari import to_minari as to_minari
    from samplebatch.convert.tensordict import from_tensordict as from_tensordict
    from samplebatch.convert.tensordict import to_tensordict as to_tensordict

__getattr__, __dir__ = exports(__name__, _HOMES)
