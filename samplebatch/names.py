"""Names of columns in RLlib, Tianshou and other libraries, and functions that classify and rename columns.

The constants are the column names of flat batches (`SampleBatch.OBS` is `names.OBS`). `PEERS` maps these column names
to the names in other libraries; dots denote nesting. `TO_NESTED` maps these column names to Tianshou's names, which are
the keys of a `Batch`; `TO_FLAT` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from numbers import Integral
from typing import Any, Final, Literal, TypeAlias, TypeVar

from samplebatch.arguments import choice
from samplebatch.errors import ColumnMismatchError

V = TypeVar("V")

OBS: Final = "obs"
NEXT_OBS: Final = "new_obs"
ACTIONS: Final = "actions"
REWARDS: Final = "rewards"
TERMINATEDS: Final = "terminateds"
TRUNCATEDS: Final = "truncateds"
DONES: Final = "dones"
INFOS: Final = "infos"
EPS_ID: Final = "eps_id"
ENV_ID: Final = "env_id"
AGENT_INDEX: Final = "agent_index"
UNROLL_ID: Final = "unroll_id"
T: Final = "t"
EPS_DONE: Final = "eps_done"
"""Marks the last step of an episode in the rows of all agents that act in it. In environments with joining, leaving or
turn-based agents, an agent's flags do not indicate whether the episode continues.
"""
WEIGHTS_VERSION: Final = "weights_version"
"""Version of the published weights that computed a step, 0 before the first."""
SEQ_LENS: Final = "seq_lens"
PREV_ACTIONS: Final = "prev_actions"
PREV_REWARDS: Final = "prev_rewards"
ACTION_DIST: Final = "action_dist"
ACTION_DIST_INPUTS: Final = "action_dist_inputs"
ACTION_PROB: Final = "action_prob"
ACTION_LOGP: Final = "action_logp"
VF_PREDS: Final = "vf_preds"
VALUES_BOOTSTRAPPED: Final = "values_bootstrapped"
RETURNS_TO_GO: Final = "returns_to_go"
ATTENTION_MASKS: Final = "attention_masks"
OBS_EMBEDS: Final = "obs_embeds"
ADVANTAGES: Final = "advantages"
VALUE_TARGETS: Final = "value_targets"
RETURNS: Final = "returns"
DISCOUNT: Final = "discount"

BATCH_INDEXES: Final = "batch_indexes"
WEIGHT: Final = "weight"
GENERATION: Final = "generation"
PRIORITY: Final = "priority"
MASK: Final = "mask"
BURN_IN: Final = "burn_in"

STATE_IN: Final = "state_in"
STATE_OUT: Final = "state_out"

_UNCOUNTED = ("infos", "state")
"""Prefixes of the names of columns that do not count steps."""

DEFAULT_POLICY_ID: Final = "default_policy"

PolicyID: TypeAlias = Any
"""Id of a policy: a string or an integer, stored unchanged; 1 and "1" are two policies.

It is `Any` because type checkers reject a dict with string keys as a dict with string or integer keys.
"""

Convention = Literal["rllib", "tianshou"]
"""Library of the column names that `convention=` selects."""

PEERS: Final[dict[str, dict[str, str]]] = {
    "tianshou": {
        OBS: "obs",
        NEXT_OBS: "obs_next",
        ACTIONS: "act",
        REWARDS: "rew",
        TERMINATEDS: "terminated",
        TRUNCATEDS: "truncated",
        DONES: "done",
        INFOS: "info",
    },
    "minari": {
        OBS: "observations",
        ACTIONS: "actions",
        REWARDS: "rewards",
        TERMINATEDS: "terminations",
        TRUNCATEDS: "truncations",
        INFOS: "infos",
    },
    "torchrl": {
        OBS: "observation",
        NEXT_OBS: "next.observation",
        ACTIONS: "action",
        REWARDS: "next.reward",
        TERMINATEDS: "next.terminated",
        TRUNCATEDS: "next.truncated",
        DONES: "next.done",
        EPS_ID: "collector.traj_ids",
        ACTION_LOGP: "action_log_prob",
        VF_PREDS: "state_value",
        ADVANTAGES: "advantage",
        VALUE_TARGETS: "value_target",
    },
    "stable_baselines3": {
        OBS: "observations",
        NEXT_OBS: "next_observations",
        ACTIONS: "actions",
        REWARDS: "rewards",
        DONES: "dones",
        TRUNCATEDS: "timeouts",
        ACTION_LOGP: "log_probs",
        VF_PREDS: "values",
        ADVANTAGES: "advantages",
        VALUE_TARGETS: "returns",
    },
    "d4rl": {
        OBS: "observations",
        NEXT_OBS: "next_observations",
        ACTIONS: "actions",
        REWARDS: "rewards",
        TERMINATEDS: "terminals",
        TRUNCATEDS: "timeouts",
    },
    "cpprb": {
        OBS: "obs",
        NEXT_OBS: "next_obs",
        ACTIONS: "act",
        REWARDS: "rew",
        TERMINATEDS: "done",
    },
    "rlds": {
        OBS: "observation",
        ACTIONS: "action",
        REWARDS: "reward",
        TERMINATEDS: "is_terminal",
        DISCOUNT: "discount",
    },
    "lerobot": {
        OBS: "observation",
        ACTIONS: "action",
        REWARDS: "next.reward",
        TRUNCATEDS: "next.truncated",
        DONES: "next.done",
        EPS_ID: "episode_index",
        T: "frame_index",
    },
}
"""Column names of each library, by RLlib's name."""

TO_NESTED: Final = PEERS["tianshou"]
"""Tianshou's column names by RLlib's name, for common columns."""

TO_FLAT: Final[dict[str, str]] = {nested: flat for flat, nested in TO_NESTED.items()}
"""RLlib's column names by Tianshou's name."""

_RENAMED: Final[dict[str, Mapping[str, str]]] = {"rllib": TO_FLAT, "tianshou": TO_NESTED}
"""Renamed columns of each `Convention`."""


def rename(columns: Mapping[str, V], convention: Convention | None) -> dict[str, V]:
    """Rename columns to the names of one library, and preserve their order; None keeps all names.

    Raises
    ------
    ArgumentError
        If the convention is unknown.
    ColumnMismatchError
        If two columns would have the same name after renaming.

    Examples
    --------
    >>> rename({"obs": 1, "new_obs": 2}, "tianshou")
    {'obs': 1, 'obs_next': 2}
    >>> rename({"rewards": 1, "rew": 2}, "rllib")
    Traceback (most recent call last):
    samplebatch.errors.ColumnMismatchError: columns 'rewards' and 'rew' would both be named
        'rewards'; drop one
    """
    if convention is None:
        return dict(columns)
    renamed = _RENAMED[choice("convention", convention, _RENAMED)]
    owners: dict[str, str] = {}
    for name in columns:
        if (owner := owners.setdefault(renamed.get(name, name), name)) != name:
            raise ColumnMismatchError(
                f"columns {owner!r} and {name!r} would both be named {renamed.get(name, name)!r}; drop one"
            )
    return {new: columns[old] for new, old in owners.items()}


def is_state_in(name: str) -> bool:
    """Return whether a column contains the recurrent states before the first steps of sequences.

    >>> is_state_in("state_in_0"), is_state_in("state_in_0.h"), is_state_in("state_into")
    (True, True, False)
    """
    return name.startswith(STATE_IN) and (len(name) == 8 or name[8] in "_.")


def is_state_out(name: str) -> bool:
    """Return whether a column contains the recurrent states after steps."""
    return name.startswith(STATE_OUT) and (len(name) == 9 or name[9] in "_.")


def is_per_sequence(name: str) -> bool:
    """Return whether a column has one row per sequence, and not one row per step, in a batch with sequences.

    >>> [n for n in ("obs", "seq_lens", "state_in_0", "state_out_0") if is_per_sequence(n)]
    ['seq_lens', 'state_in_0']
    """
    return name == SEQ_LENS or is_state_in(name)


def counts_steps(name: str) -> bool:
    """Return whether a column's number of rows determines the number of steps in its batch.

    >>> [n for n in ("obs", "infos", "state_in_0", "state_out_0") if counts_steps(n)]
    ['obs']
    """
    return name[:5] not in _UNCOUNTED or not (
        name.partition(".")[0] == INFOS or is_state_in(name) or is_state_out(name)
    )


def covers(names: Iterable[str], name: str) -> bool:
    """Return whether a dotted name is one of `names`, or is nested under one of `names`.

    >>> [
    ...     covers(("obs", "info.path"), name)
    ...     for name in ("obs", "obs.camera", "observed", "info.path", "info")
    ... ]
    [True, True, False, True, False]
    """
    return any(name == parent or name.startswith(f"{parent}.") for parent in names)


def is_policy_id(value: object) -> bool:
    """Return whether a value is a valid policy id.

    >>> is_policy_id("walker"), is_policy_id(0), is_policy_id(True), is_policy_id(None)
    (True, True, False, False)
    """
    return isinstance(value, str | Integral) and not isinstance(value, bool)


def policy_seed(policy: PolicyID) -> bytes:
    r"""Return seed bytes that are unique per policy id, for the random generators of a policy.

    >>> policy_seed("1"), policy_seed(1)
    (b'1', b'\x001')
    """
    return policy.encode() if isinstance(policy, str) else b"\0%d" % policy


def label_policies(policies: Iterable[PolicyID]) -> dict[PolicyID, str]:
    """Return a unique string for each policy id, for formats with string keys; a string id is returned unchanged.

    >>> label_policies(["walker", 0, 1, "1"])
    {'walker': 'walker', 0: '0', 1: '1_', '1': '1'}
    """
    policies = list(policies)
    used = {policy for policy in policies if isinstance(policy, str)}
    labels: dict[PolicyID, str] = {}
    for policy in policies:
        label = str(policy)
        while label in used and label != policy:
            label += "_"
        used.add(label)
        labels[policy] = label
    return labels


_MAX_SHOWN = 100
"""Maximum characters of a displayed name."""


def for_terminal(name: object, max_chars: int = _MAX_SHOWN) -> str:
    r"""Escape untrusted text, such as a name from a file, for a terminal.

    Control characters, line breaks, bidirectional marks and other unprintable characters become escape sequences, as in
    `repr`. Long text is truncated.

    >>> print(
    ...     for_terminal("obs\x1b[31m"), for_terminal("a\u202eb"), for_terminal("x" * 200, 10)
    ... )
    obs\x1b[31m a\u202eb xxxxxxx...
    """
    text = str(name)
    printable = text[:max_chars]
    if not printable.isprintable():
        printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in printable)
    return printable if len(text) <= max_chars and len(printable) <= max_chars else f"{printable[: max_chars - 3]}..."


def for_rich(name: object, max_chars: int = _MAX_SHOWN) -> Any:
    """Return untrusted text as Rich's `Text` without markup."""
    from rich.text import Text

    return Text(for_terminal(name, max_chars))


def for_html(name: object, max_chars: int = _MAX_SHOWN) -> str:
    """Escape untrusted text for HTML.

    >>> for_html("<b>&")
    '&lt;b&gt;&amp;'
    """
    return escape(for_terminal(name, max_chars))


def for_matplotlib(name: object, max_chars: int = _MAX_SHOWN) -> str:
    r"""Escape untrusted text for matplotlib, so that dollar signs do not start a formula.

    >>> print(for_matplotlib("$x$"))
    \$x\$
    """
    return for_terminal(name, max_chars).replace("$", r"\$")
