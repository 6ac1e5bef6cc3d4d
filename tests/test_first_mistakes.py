"""Beginners' mistakes: each raises one sentence that names the solution."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from typer.testing import CliRunner

import samplebatch
from samplebatch import (
    Batch,
    Collector,
    ReplayBuffer,
    RolloutWorkers,
    SampleBatch,
    VectorReplayBuffer,
)
from samplebatch.cli import application
from samplebatch.returns import gae
from samplebatch.rollout.postprocessing import GAE
from samplebatch.service import ReplayClient, ReplayServer, ReplayTable, RowTable


def steps() -> SampleBatch[Any]:
    """Return an episode of four steps."""
    flags = {"terminateds": [0, 0, 0, 1], "truncateds": [0] * 4}
    return SampleBatch(obs=np.zeros((4, 2)), actions=[0, 1, 0, 1], rewards=np.ones(4), eps_id=[0] * 4, **flags)


def step(size: int = 3) -> Batch:
    """Return one step with an observation of a size."""
    obs = np.zeros(size)
    return Batch(obs=obs, act=0, rew=1.0, terminated=False, truncated=False, obs_next=obs, info={})


def filled() -> Any:
    """Return a buffer of one step."""
    buffer = ReplayBuffer(10)
    buffer.add(step())
    return buffer


def env() -> gym.Env[Any, Any]:
    return gym.make("CartPole-v1")


def learn() -> Any:
    """Return `samplebatch.learn`, which requires torch."""
    pytest.importorskip("torch")
    import samplebatch.learn

    return samplebatch.learn


def network(outputs: int) -> Any:
    return learn().MLP(4, outputs, hidden_sizes=[8])


def q_policy() -> Any:
    return learn().DiscreteQLearningPolicy(model=network(2), action_space=env().action_space)


def actor_policy() -> Any:
    return learn().ProbabilisticActorPolicy(actor=network(2), action_space=env().action_space)


def optimizer() -> Any:
    torch = pytest.importorskip("torch")
    return torch.optim.Adam([torch.zeros(1)])


def report() -> Any:
    """Return the report of a collector."""
    return Collector("random", env()).collect(n_step=2)


def use_closed_collector() -> None:
    collector = Collector("random", env())
    collector.close()
    collector.collect(n_step=2)


def write_and_load(name: str) -> None:
    Path(name).write_text("no table")
    samplebatch.load(name)


def ask_for_unknown_table() -> None:
    with ReplayServer([ReplayTable("train", capacity=10)]) as server, ReplayClient(server.uri, "tain") as client:
        client.info()


lib: Any = samplebatch

MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # Batches
    "append": (lambda: lib_steps().append(steps()), r"batch.concat\(other\) joins two batches"),
    "steps on a device": (lambda: lib_steps().to("cpu"), "to_torch"),
    "first steps": (lambda: lib_steps().head(), r"batch\[:5\] has the first five steps"),
    "steps by position": (lambda: lib_steps().iloc[0], r"batch\[2:5\] and batch\[indices\]"),
    "file by the class": (lambda: lib.SampleBatch.load("steps.arrow"), r"samplebatch.load\(path\)"),
    "seed of a shuffle": (lambda: lib_steps().shuffle(seed=3), "did you mean 'rng'"),
    "column as attribute": (lambda: steps().obs, r"columns are items, batch\['obs'\]"),  # type: ignore[attr-defined]
    "Tianshou's attribute": (lambda: steps().rew, r"columns are items, batch\['rewards'\]"),  # type: ignore[attr-defined]
    "Tianshou's name": (lambda: steps()["rew"], "did you mean 'rewards'"),
    "singular name": (lambda: steps()["reward"], "did you mean 'rewards'"),
    "column that is not there": (lambda: steps()["obs_next"], "no column 'obs_next'; there are 'obs', 'actions'"),
    "columns of two lengths": (lambda: SampleBatch(obs=[1, 2], rewards=[1]), "'rewards' must have 2 rows as 'obs' has"),
    "list for columns": (lambda: SampleBatch([1, 2]), "columns must be a mapping"),
    "number for a column": (lambda: SampleBatch(obs=1.0), "wrap it in a list for a batch of one row"),
    "list of batches for concat": (lambda: lib.SampleBatch.concat(steps(), [steps()]), "only SampleBatch and"),
    "batches one by one": (lambda: lib.concat_samples(steps(), steps()), "accepts at most 1 positional arguments"),
    "number among batches": (lambda: lib.concat_samples([steps(), 3]), "only SampleBatch and MultiAgentBatch"),
    "minibatch_size": (lambda: lib.SampleBatch.minibatches(steps(), minibatch_size=2), "did you mean 'size'"),
    "batch_size": (lambda: lib.SampleBatch.minibatches(steps(), batch_size=2), "did you mean 'size'"),
    "misspelt argument": (lambda: lib.SampleBatch.minibatches(steps(), 2, shufle=True), "did you mean 'shuffle'"),
    "minibatches of nothing": (lambda: list(steps().minibatches(0)), "size must be a whole number from 1, got 0"),
    "row beyond the end": (lambda: steps()[10], r"row 10 must be in \[-4, 4\)"),
    "two columns at once": (
        lambda: lib.SampleBatch.__getitem__(steps(), ("obs", "rewards")),
        "rows must be indexed by",
    ),
    "no env_steps": (lambda: lib.MultiAgentBatch({"a": steps()}), "MultiAgentBatch requires 'env_steps'"),
    "unknown convention": (lambda: lib.SampleBatch.as_batch(steps(), convention="tianshu"), "did you mean 'tianshou'"),
    "pack without tokens": (lambda: steps().pack(max_tokens=8), "lengths must be .* without ragged columns"),
    "unknown group": (lambda: steps().group_by("eps"), "did you mean 'eps_id'"),
    "Gymnasium's name": (lambda: steps()["observations"], "did you mean 'obs'"),
    "column set as an attribute": (
        lambda: setattr(lib_steps(), "rewards", 0),
        r"columns are items, batch\['rewards'\]",
    ),
    "NumPy's method": (lambda: lib_steps().numpy(), r"batch\['obs'\] is a NumPy array"),
    "RLlib's static method": (lambda: lib.SampleBatch.concat_samples([]), "from samplebatch import concat_samples"),
    "array for columns": (lambda: lib.SampleBatch(np.zeros((4, 2))), "columns must be a mapping, .* got a ndarray"),
    "rows for columns": (lambda: lib.SampleBatch([{"obs": 1}]), "convert.from_dicts accepts a list of dicts"),
    "column of several policies": (
        lambda: lib.MultiAgentBatch({"a": steps()}, 4).obs,
        r"columns belong to the batch of a policy, batch\['policy_id'\]\['obs'\]",
    ),
    "RLlib's name of a nested batch": (lambda: Batch(rew=[1]).reward, "no attribute 'reward': did you mean 'rew'"),
    "array for a nested batch": (lambda: lib.Batch(np.zeros((2, 4))), "got ndarray; name the value"),
    "tensors of a nested batch": (lambda: Batch(obs=[1]).to_tensor(), r"to_torch\(\) has tensors"),
    "rows of a nested batch": (lambda: Batch(obs=[1]).sample(2), r"split\(64\) all of them in random order"),
    "nested batches one by one": (
        lambda: lib.Batch.cat(Batch(a=[1]), Batch(a=[2])),
        r"one list, Batch.cat\(\[a, b\]\)",
    ),
    # Buffers
    "rows by another name": (lambda: filled().sample(n=4), "sample has no argument 'n'; did you mean 'batch_size'"),
    "sample without a size": (lambda: filled().sample(), "sample requires 'batch_size'"),
    "two numbers for a sample": (lambda: filled().sample(4, 8), "batch_size only by position, got 2 values"),
    "unknown option of a sample": (lambda: filled().sample(4, n_steps=3), "did you mean 'n_step'"),
    "step by position": (lambda: filled().add(np.zeros(3), 0, 1.0, np.zeros(3), False), "got 5 values by position"),
    "steps of two rings by position": (
        lambda: lib.VectorReplayBuffer(10, 2).add(np.zeros((2, 3)), [0, 0], [1.0, 1.0]),
        r"values by name, add\(obs=..., .* got 3 values by position",
    ),
    "push": (lambda: filled().push(step()), r"add\(Batch\(obs=..., act=..., rew=..., ...\)\) adds a step"),
    "size of a buffer": (lambda: filled().size(), r"len\(buffer\) rows are stored, of maxsize"),
    "clear": (lambda: filled().clear(), r"reset\(\) removes all rows"),
    "sample_batch": (lambda: filled().sample_batch(4), r"sample\(batch_size\) returns sampled rows and their indices"),
    "update_priorities": (
        lambda: lib.PrioritizedReplayBuffer(9, 0.6, 0.4).update_priorities([0], [1.0]),
        r"update_weight\(indices, priorities\) sets priorities",
    ),
    "RLlib's name of a buffer's column": (lambda: filled().rewards, "did you mean 'rew'"),
    "size of a vector buffer": (lambda: lib.VectorReplayBuffer(size=100), "did you mean 'total_size'"),
    "vector buffer without rings": (lambda: lib.VectorReplayBuffer(100), "VectorReplayBuffer requires 'buffer_num'"),
    "num_envs": (lambda: lib.VectorReplayBuffer(100, num_envs=4), "did you mean 'buffer_num'"),
    "capacity": (lambda: lib.ReplayBuffer(capacity=100), "did you mean 'size'"),
    "float as a size": (lambda: lib.ReplayBuffer(1e6), "size must be a whole number from 0, got 1000000.0"),
    "misspelt option": (lambda: lib.ReplayBuffer(10, ignore_obs_nxt=True), "did you mean 'ignore_obs_next'"),
    "priorities without exponents": (lambda: lib.PrioritizedReplayBuffer(10), "requires 'alpha' and 'beta'"),
    "sample of nothing": (lambda: ReplayBuffer(10).sample(4), "must have rows to sample, .*add some first"),
    "text for a batch size": (lambda: filled().sample("all"), "batch_size must be a whole number, got 'all'"),
    "observation for a step": (lambda: filled().add(np.zeros(3)), "Batch must be built from a dict"),
    "step without flags": (lambda: filled().add(Batch(obs=np.zeros(3), act=0, rew=1.0)), "column 'terminated'"),
    "another observation": (lambda: filled().add(step(5)), r"'obs' must have rows of shape \(3,\), got \(5,\)"),
    "one step for four rings": (lambda: VectorReplayBuffer(100, 4).add(step()), "'rew' must have 4 rows"),
    "slot beyond the end": (lambda: filled()[20], "index 20 must "),
    # Collectors and workers
    "swapped arguments": (lambda: lib.Collector(env(), "random", ReplayBuffer(10)), r"be called with \(policy, env"),
    "swapped workers' arguments": (lambda: lib.RolloutWorkers("CartPole-v1", "random"), r"\(policy, env, buffer\)"),
    "nothing to collect": (lambda: Collector("random", env()).collect(), "exactly one of n_step and n_episode"),
    "n_steps": (lambda: lib.Collector("random", env()).collect(n_steps=5), "did you mean 'n_step'"),
    "unknown environment": (lambda: Collector("random", "CartPol-v1"), "did you mean 'CartPole-v1'"),
    "unknown version": (lambda: Collector("random", "CartPole-v9"), "did you mean 'CartPole-v1'"),
    "no environment": (lambda: lib.Collector("random", None), "env must be a Gymnasium environment"),
    "unknown policy": (lambda: lib.Collector("randm", env()), "a policy must be .* or 'random', got 'randm'"),
    "one action for all": (lambda: Collector(lambda o: 7, env()).collect(n_step=5), "an action for each of 1 env"),
    "too few rings": (lambda: Collector("random", [env(), env()], ReplayBuffer(9)), "use a VectorReplayBuffer with"),
    "size for a buffer": (lambda: lib.Collector("random", env(), 100), "buffer must be a ReplayBuffer"),
    "misspelt buffer": (lambda: lib.Collector("random", env(), bufer=None), "did you mean 'buffer'"),
    "closed collector": (use_closed_collector, "the collector must be open"),
    "environment for processes": (lambda: lib.RolloutWorkers("random", env(), num_workers=1), "pass functions that"),
    "n_workers": (lambda: lib.RolloutWorkers("random", "CartPole-v1", n_workers=1), "did you mean 'num_workers'"),
    "workers not started": (lambda: RolloutWorkers("random", "CartPole-v1").collect(n_step=3), "in a with statement"),
    "run": (lambda: lib.Collector("random", env()).run(100), r"collect\(n_step=...\) or collect\(n_episode=...\)"),
    "sample of a collector": (
        lambda: lib.Collector("random", env()).sample(),
        r"collector.buffer.sample\(batch_size\)",
    ),
    "steps of a report": (lambda: report().obs, "stats.batch has the steps of a collector without a buffer"),
    "item of a report": (lambda: report()["rew"], "a report has attributes, got the item 'rew'"),
    "method of a space": (lambda: lib.Collector(env().action_space.sample, env()), "pass env.action_space or 'random'"),
    "version of an older id": (lambda: lib.Collector("random", "PongNoFrameskip-v5"), "did you mean 'ALE/Pong-v5'"),
    # Returns and learning
    "gae by position": (lambda: untyped_gae([1.0], [0.5]), "gae requires 'values'"),
    "Tianshou's older name": (lambda: learn().PPOPolicy, "no attribute 'PPOPolicy'; did you mean 'PPO'"),
    "GAE(lam=)": (lambda: lib_gae(lam=0.9), "did you mean 'lambda_'"),
    "gae(lam=)": (lambda: untyped_gae([1.0], values=[1.0], lam=0.9), "did you mean 'gae_lambda'"),
    "optimizer for its factory": (
        lambda: learn().DQN(policy=q_policy(), optim=optimizer()),
        "pass AdamOptimizerFactory",
    ),
    "policy of another algorithm": (
        lambda: learn().DQN(policy=actor_policy(), optim=learn().AdamOptimizerFactory()),
        "policy of DQN must be an instance of DiscreteQLearningPolicy, got a ProbabilisticActorPolicy",
    ),
    "values for a policy of actions": (
        lambda: learn().PPO(policy=q_policy(), critic=network(1), optim=learn().AdamOptimizerFactory()),
        "policy of PPO must be an instance of ProbabilisticActorPolicy, got a DiscreteQLearningPolicy",
    ),
    "algorithm without a policy": (lambda: learn().DQN(optim=optimizer()), "DQN requires 'policy'"),
    "sizes of layers": (lambda: learn().MLP(4, [64]), "pass hidden_sizes= by name"),
    "algorithm by position": (lambda: learn().DQN("CartPole-v1"), "must get its arguments by name, policy="),
    "learning_rate": (lambda: learn().AdamOptimizerFactory(learning_rate=0.1), "did you mean 'lr'"),
    "clip": (lambda: learn().PPO(clip=0.2), "did you mean 'eps_clip'"),
    # Service, storage, names
    "address without a scheme": (lambda: ReplayClient("localhost:5000", "t"), "an address such as 'grpc://host:5000'"),
    "client without a table": (lambda: lib_client("grpc://127.0.0.1:1"), "ReplayClient requires 'table'"),
    "unknown table": (ask_for_unknown_table, "did you mean 'train'"),
    "table for a list": (lambda: ReplayServer(lib_table("t", capacity=9)), r"got a ReplayTable; pass \[table\]"),
    "name for a table": (lambda: ReplayServer("t"), "tables must be a list of ReplayTable"),  # type: ignore[arg-type]
    "table without a capacity": (lambda: lib_table("t"), "ReplayTable requires 'capacity'"),
    "capacity by position": (lambda: lib_table("t", 10), "pass others by name: kind=..., capacity="),
    "unknown kind": (lambda: lib_table("t", capacity=9, kind="uniformm"), "did you mean 'uniform'"),
    "objects in rows": (lambda: RowTable("t", 9).put([1], {"x": [object()]}), "numbers, flags or text"),
    "unknown suffix": (lambda: steps().save("x.csv"), "must end in one of .arrow"),
    "file of another format": (lambda: write_and_load("x.parquet"), "must be a Parquet file"),
    "algorithm of another module": (lambda: lib.PPO, "from samplebatch.learn import PPO"),
    "error class of another module": (lambda: lib.PeerDiedError, "from samplebatch.errors import PeerDiedError"),
    "list for the batches of policies": (
        lambda: lib.MultiAgentBatch([steps()], 4),
        "must be a dict of a SampleBatch for each policy id",
    ),
    "misspelt class": (lambda: lib.SampelBatch, "did you mean 'SampleBatch'"),
}

lib_gae: Any = GAE
lib_steps: Any = steps
untyped_gae: Any = gae
lib_client: Any = ReplayClient
lib_table: Any = ReplayTable


@pytest.mark.parametrize("mistake", MISTAKES)
def test_common_mistakes_are_reported_with_the_fix(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, way_out = MISTAKES[mistake]
    with pytest.raises(Exception, match=way_out) as answer:
        call()
    assert "\n" not in str(answer.value)


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (["train", "dqnn", "CartPole-v1"], "did you mean 'dqn'"),
        (["train", "CartPole-v1", "dqn"], "the order is: train ALGORITHM ENVIRONMENT"),
        (["train", "dqn", "CartPol-v1"], "did you mean 'CartPole-v1'"),
        (["serve", "-t", "t"], "NAME=KIND:CAPACITY"),
        (["trian"], "Did you mean 'train'"),
    ],
    ids=["algorithm", "swapped", "environment", "table", "command"],
)
def test_common_mistakes_of_commands_are_reported_with_the_fix(arguments: list[str], way_out: str) -> None:
    if arguments[0] == "train":
        pytest.importorskip("torch")
    result = CliRunner().invoke(application(), arguments)
    assert result.exit_code
    assert way_out in result.output + (result.stderr or "")


def test_a_missing_main_guard_is_reported(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from samplebatch import RolloutWorkers\n"
        "with RolloutWorkers('random', 'CartPole-v1', num_workers=1) as workers:\n"
        "    workers.collect(n_step=10)\n"
    )
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=100, check=False)
    assert 'under `if __name__ == "__main__":`' in result.stderr


def test_a_missing_extra_is_reported() -> None:
    program = "import sys; sys.modules['torch'] = None; from samplebatch.learn import PPO"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert "pip install 'samplebatch[torch]'" in result.stderr
