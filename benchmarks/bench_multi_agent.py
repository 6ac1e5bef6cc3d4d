"""`ma.*`: operations on batches of several policies.

In the row `ma.aggregate.8`, our aggregator concatenates eight fragments to one train batch. It checks that the columns
of the fragments match, and numbers the environment steps in order to split fragments between them. The peers only
concatenate.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import bare, data
from benchmarks.compare import plain
from benchmarks.harness import Row, Way, row


def _agents_batch(lib: Any, policies: Any) -> Any:
    steps = sum(len(columns["t"]) for columns in policies.values()) // len(policies)
    return lib.MultiAgentBatch({p: lib.batch(columns) for p, columns in policies.items()}, steps)


def _by_policy(lib: Any, policies: Any) -> Any:
    """Create a dict of batches by policy, for libraries that have no multi-agent batch."""
    return {p: lib.batch(columns) for p, columns in policies.items()}


def _concat_by_policy(concat: Any) -> Way:
    def setup(lib: Any, fragments: Any) -> Any:
        by_policy = {p: [lib.batch(f[p]) for f in fragments] for p in fragments[0]}
        return lambda: {p: concat(lib, batches) for p, batches in by_policy.items()}

    return Way(setup)


def _without_unroll_id(result: Any) -> Any:
    """Remove the `unroll_id` column, which RLlib's batch builder adds."""
    return [
        {p: {k: v for k, v in columns.items() if k != "unroll_id"} for p, columns in part.items()}
        for part in plain(result)
    ]


def _timeslices(k: int) -> Row:
    return row(
        f"ma.timeslices{k}.500x8",
        lambda: data.agents(500),
        view=_without_unroll_id,
        batch=Way(_agents_batch, lambda b: b.timeslices(k)),
        bare=Way(bare.lockstep_setup, lambda state: bare.lockstep(state, k)),
    )


def _concat(lib: Any, fragments: Any) -> Any:
    return partial(lib.concat_samples, [_agents_batch(lib, f) for f in fragments])


def _aggregate(lib: Any, fragments: Any) -> Any:
    from samplebatch import Aggregator

    batches = [_agents_batch(lib, f) for f in fragments]
    aggregator = Aggregator(sum(batch.agent_steps() for batch in batches))

    def aggregate() -> Any:
        for batch in batches:
            aggregator.add(batch)
        return next(aggregator.batches())

    return aggregate


_CONCAT = {
    "tensordict": _concat_by_policy(lambda lib, batches: lib.TensorDict.cat(batches, 0)),
    "pyarrow": _concat_by_policy(lambda lib, tables: lib.pa.concat_tables(tables).combine_chunks()),
    "bare": Way(
        lambda lib, fragments: {p: bare.concat_setup(lib, [f[p] for f in fragments]) for p in fragments[0]},
        lambda policies: {p: bare.concat(state) for p, state in policies.items()},
    ),
}

ROWS = [
    _timeslices(1),
    _timeslices(20),
    row(
        "ma.concat.16",
        lambda: [data.policies(200, seed) for seed in range(16)],
        traffic=True,
        batch=Way(_concat),
        **_CONCAT,
    ),
    row(
        "ma.aggregate.8",
        lambda: [data.policies(200, seed) for seed in range(8)],
        traffic=True,
        ours=Way(_aggregate),
        rllib=Way(_concat),
        **_CONCAT,
    ),
    row(
        "ma.as_multi_agent",
        data.flat(200),
        batch=lambda b: b.as_multi_agent(),
    ),
    row(
        "ma.copy",
        lambda: data.policies(200),
        traffic=True,
        batch=Way(_agents_batch, lambda b: b.copy()),
        tensordict=Way(_by_policy, lambda policies: {p: t.clone() for p, t in policies.items()}),
        bare=Way(
            lambda lib, policies: {p: bare.copy_setup(lib, columns) for p, columns in policies.items()},
            lambda policies: {p: bare.copy(state) for p, state in policies.items()},
        ),
    ),
    row(
        "ma.size_bytes",
        lambda: data.policies(200),
        batch=Way(_agents_batch, lambda b: b.size_bytes()),
        tensordict=Way(_by_policy, lambda policies: sum(t.bytes() for t in policies.values())),
        pyarrow=Way(_by_policy, lambda policies: sum(t.nbytes for t in policies.values())),
        bare=lambda policies: sum(v.nbytes for columns in policies.values() for v in columns.values()),
    ),
]
