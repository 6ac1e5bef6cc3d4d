"""The names of columns, in RLlib's words and in Tianshou's.

The constants are the vocabulary of the flat types (`SampleBatch.OBS` is `names.OBS`). `TO_NESTED` and `TO_FLAT`
translate between them and the keys of a nested `Batch`.
"""

from __future__ import annotations

from typing import Final

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
"""Marks the last step of an episode in the rows of all agents that act in it: where agents come and go, or take turns,
their own flags do not tell whether others go on."""
WEIGHTS_VERSION: Final = "weights_version"
"""The number of the published weights that a step was made with, 0 before the first."""
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
MASK: Final = "mask"
BURN_IN: Final = "burn_in"

STATE_IN: Final = "state_in"
STATE_OUT: Final = "state_out"

DEFAULT_POLICY_ID: Final = "default_policy"

TO_NESTED: Final[dict[str, str]] = {
    OBS: "obs",
    NEXT_OBS: "obs_next",
    ACTIONS: "act",
    REWARDS: "rew",
    TERMINATEDS: "terminated",
    TRUNCATEDS: "truncated",
    DONES: "done",
    INFOS: "info",
}
"""RLlib's name to Tianshou's, for the columns that both have."""

TO_FLAT: Final[dict[str, str]] = {nested: flat for flat, nested in TO_NESTED.items()}
"""Tianshou's name to RLlib's."""


def is_state_in(name: str) -> bool:
    """Tell whether a column holds recurrent states at the start of sequences.

    >>> is_state_in("state_in_0"), is_state_in("state_in_0.h"), is_state_in("state_into")
    (True, True, False)
    """
    return name.startswith(STATE_IN) and (len(name) == 8 or name[8] in "_.")


def is_state_out(name: str) -> bool:
    """Tell whether a column holds recurrent states at the end of steps."""
    return name.startswith(STATE_OUT) and (len(name) == 9 or name[9] in "_.")


def is_per_sequence(name: str) -> bool:
    """Tell whether a column has one row per sequence wherever a batch has sequences.

    >>> [n for n in ("obs", "seq_lens", "state_in_0", "state_out_0") if is_per_sequence(n)]
    ['seq_lens', 'state_in_0']
    """
    return name == SEQ_LENS or is_state_in(name)
