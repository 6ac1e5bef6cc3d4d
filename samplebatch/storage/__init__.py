"""Batches and buffers in files.

The door of this layer: methods of the layers below hand over to these functions, loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

_HOMES = {
    "save": "samplebatch.storage.saving",
    "load_buffer": "samplebatch.storage.saving",
    "save_hdf5_buffer": "samplebatch.storage.hdf5_buffer",
    "load_hdf5_buffer": "samplebatch.storage.hdf5_buffer",
    "store_in_folder": "samplebatch.storage.buffer_folder.buffers",
    "open_buffer": "samplebatch.storage.buffer_folder.buffers",
    "export_state": "samplebatch.storage.state_dict",
    "load_state": "samplebatch.storage.state_dict",
    "export_multi_agent_state": "samplebatch.storage.multi_agent_state",
    "load_multi_agent_state": "samplebatch.storage.multi_agent_state",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from samplebatch.storage.buffer_folder.buffers import open_buffer as open_buffer
    from samplebatch.storage.buffer_folder.buffers import store_in_folder as store_in_folder
    from samplebatch.storage.hdf5_buffer import load_hdf5_buffer as load_hdf5_buffer
    from samplebatch.storage.hdf5_buffer import save_hdf5_buffer as save_hdf5_buffer
    from samplebatch.storage.multi_agent_state import export_multi_agent_state as export_multi_agent_state
    from samplebatch.storage.multi_agent_state import load_multi_agent_state as load_multi_agent_state
    from samplebatch.storage.saving import load_buffer as load_buffer
    from samplebatch.storage.saving import save as save
    from samplebatch.storage.state_dict import export_state as export_state
    from samplebatch.storage.state_dict import load_state as load_state

__getattr__, __dir__ = exports(__name__, _HOMES)
