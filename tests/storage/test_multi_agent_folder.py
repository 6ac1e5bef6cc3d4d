"""Multi-agent buffers in folders, whose stored rows differ from the added rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from samplebatch import Batch, MultiAgentReplayBuffer, ReplayBuffer, load
from samplebatch.batch.arrow import METADATA_KEY
from samplebatch.errors import FormatError
from tests.storage.test_saving import agents


def _without_fragments(file: Path) -> None:
    buffer = ReplayBuffer(9)
    buffer.add(Batch(obs=0, act=0, rew=1.0, terminated=False, truncated=False, obs_next=1))
    buffer.save(file)


def _with_nested_rewards(file: Path) -> None:
    with pa.OSFile(str(file)) as source:
        table = pa.ipc.open_file(source).read_all()
    about = json.loads(table.schema.metadata[METADATA_KEY])
    places = about["structure"]["tree"]
    about["structure"]["tree"] = {**places, "rew": {"first": places["rew"]}}
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(about)})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(("damage", "column"), [(_without_fragments, "fragment_end"), (_with_nested_rewards, "rew")])
def test_rows_of_a_policy_that_are_not_fragments_are_rejected(
    tmp_path: Path, damage: Callable[[Path], None], column: str
) -> None:
    buffer = MultiAgentReplayBuffer(9)
    buffer.add(agents(0))
    buffer.save(tmp_path)
    damage(next(tmp_path.glob("0-*.arrow")))
    with pytest.raises(FormatError, match=f"'{column}'"):
        load(tmp_path)


def test_a_policy_without_a_stored_layout_is_rejected(tmp_path: Path) -> None:
    buffer = MultiAgentReplayBuffer(9)
    buffer.add(agents(0))
    state = buffer.state_dict()
    del state["forms"]["guard"]
    with pytest.raises(FormatError, match="'guard'"):
        MultiAgentReplayBuffer(9).load_state_dict(state, verify=False)
