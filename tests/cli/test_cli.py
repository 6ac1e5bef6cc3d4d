"""The command, run as people run it: in a process of its own, with a real Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from samplebatch import (
    Batch,
    MultiAgentBatch,
    MultiAgentReplayBuffer,
    ReplayBuffer,
    SampleBatch,
    __version__,
    read_arrow,
    read_parquet,
    write_arrow,
    write_parquet,
)
from samplebatch.cli import application

ARENA = Path(__file__).parents[1] / "rollout"
"""Where the module `arena` lies; the command looks for modules in the folder that it is called from."""


def start(*arguments: str, started: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "samplebatch.cli", *arguments],
        cwd=ARENA,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ARENA.parents[1]), "ARENA_STARTED": str(started)},
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(pid: int, count: int) -> list[int]:
    """Wait until a command has `count` workers; return their process ids."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        # The first child of all is multiprocessing's tracker of resources.
        actual = [child for child in children(pid) if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
        if len(actual) == count:
            return actual
        time.sleep(0.02)
    raise AssertionError("the workers did not start")


def wait_for(started: Path) -> None:
    """Wait until a worker has written four fragments of five steps, and a short time longer."""
    deadline = time.monotonic() + 20
    while not started.exists():
        assert time.monotonic() < deadline, "no worker made a step"
        time.sleep(0.02)
    time.sleep(0.3)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(application(), list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_collect_and_inspect(tmp_path: Path) -> None:
    out = tmp_path / "tag.arrow"
    process = start("collect", "mpe2/simple_tag_v3", "--workers=2", "--steps=120", "--seed=3", f"--out={out}")
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Wrote 120 environment steps, 480 agent steps from 2 fragments" in printed
    assert str(out) in printed
    batch = read_arrow(out)
    assert isinstance(batch, MultiAgentBatch)
    assert batch.count == 120
    code, again = invoke("inspect", str(out))
    assert code == 0
    for words in ("policy adversary: 360 agent steps", "policy agent: 120 agent steps", "4 episodes ended, 2 did not"):
        assert words in printed
        assert words in again
    for name in ("obs", "rewards", "infos", "eps_id"):
        assert re.search(rf"│ {name} +│", printed)
    finished = [row for row in printed.splitlines() if row.startswith("│ agent  ")][-1]
    steps = batch["agent"]
    returns = [steps["rewards"][steps["eps_id"] == e].sum() for e in np.unique(steps["eps_id"][steps["truncateds"]])]
    assert f"{np.mean(returns):.4g}" in finished


def test_episodes_of_any_environment_are_collected_with_a_picture(tmp_path: Path) -> None:
    out, picture = tmp_path / "cart.parquet", tmp_path / "cart.png"
    process = start(
        "collect", "CartPole-v1", "-w2", "--envs-per-worker=3", "--episodes=20", f"--out={out}", f"--plot={picture}"
    )
    printed, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
    batch = read_parquet(out)
    assert isinstance(batch, SampleBatch)
    ended = int((batch["terminateds"] | batch["truncateds"]).sum())
    assert ended >= 20
    assert f"{ended} episodes ended" in printed
    assert f"Wrote {len(batch)} environment steps" in printed
    assert set(batch["env_id"].tolist()) == set(range(6))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in printed


def test_one_file_per_fragment_is_written_to_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "tag"
    for run in (1, 2):
        process = start(
            "collect", "mpe2/simple_tag_v3", "-w1", "--steps=100", "--fragment-length=50", f"--out={out}", "--seed=1"
        )
        printed, complaints = process.communicate(timeout=60)
        assert process.returncode == 0, complaints
        assert len(list(out.glob("part-*.parquet"))) == 2 * run
    assert "Wrote 100 environment steps, 400 agent steps from 2 fragments" in printed
    code, again = invoke("inspect", str(out))
    assert code == 0
    assert "policy adversary: 600 agent steps" in again
    assert "8 episodes ended, 0 did not" in again


@pytest.mark.long
def test_policies_are_read_from_functions_and_files(tmp_path: Path) -> None:
    import torch

    # Its scores are the same wherever the cart is, the first one higher.
    still = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(still.weight)
    still.bias.data = torch.tensor([1.0, 0.0])
    saved, out = tmp_path / "still.pt", tmp_path / "cart.arrow"
    torch.save(still, saved)
    command = ("collect", "CartPole-v1", "-w1", "--steps=60", f"--policy={saved}", f"--out={out}")
    process = start(*command)
    _, complaints = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "add --allow-pickle" in complaints
    process = start(*command, "--allow-pickle")
    _, complaints = process.communicate(timeout=180)
    assert process.returncode == 0, complaints
    assert not read_arrow(out)["actions"].any()

    process = start(
        "collect",
        "arena:Relay",
        "-w1",
        "--steps=20",
        "--policy=runner=arena:steady",
        f"--out={tmp_path / 'relay.arrow'}",
    )
    _, complaints = process.communicate(timeout=180)
    assert process.returncode == 0, complaints
    assert set(read_arrow(tmp_path / "relay.arrow")["runner"]["actions"].tolist()) == {1}


def test_a_page_and_a_picture_of_a_file(tmp_path: Path) -> None:
    steps = SampleBatch(eps_id=[7, 7], t=[0, 1], agent_index=[0, 0], rewards=[1.0, 2.0], dones=[False, True])
    write_parquet(steps, tmp_path / "steps.parquet")
    page, picture = tmp_path / "page.html", tmp_path / "picture.svg"
    code, printed = invoke("inspect", str(tmp_path / "steps.parquet"), "--html", str(page), "--plot", str(picture))
    assert code == 0, printed
    assert "<h1>steps.parquet: Parquet file, 2 steps of one policy</h1>" in page.read_text()
    assert picture.read_text().startswith("<?xml")
    assert "1 episodes ended, 0 did not" in printed


def test_inspect_reads_files_of_other_writers(tmp_path: Path) -> None:
    write_arrow(SampleBatch(obs=[[1.0, 2.0]], note=["a"]), tmp_path / "plain.arrow")
    code, printed = invoke("inspect", str(tmp_path / "plain.arrow"))
    assert code == 0
    assert "1 steps" in printed
    assert "episodes" not in printed
    write_arrow(SampleBatch(infos=[{"x": {1}}]), tmp_path / "pickled.arrow")
    code, printed = invoke("inspect", str(tmp_path / "pickled.arrow"))
    assert (code, "--allow-pickle" in printed) == (1, True)
    assert invoke("inspect", str(tmp_path / "pickled.arrow"), "--allow-pickle")[0] == 0


@pytest.mark.parametrize("ending", [".arrow", ".parquet", ".hdf5", ""])
def test_batches_and_buffers_of_every_format_are_inspected_and_verified(tmp_path: Path, ending: str) -> None:
    buffer = ReplayBuffer(10)
    for i in range(14):
        buffer.add(Batch(obs=i, act=0, rew=1.0, terminated=i % 5 == 4, truncated=False))
    values = {"batch": Batch(obs=np.arange(10), rew=np.ones(10)), "buffer": buffer}
    for name, value in values.items():
        path = tmp_path / f"{name}{ending}"
        value.save(path)
        code, printed = invoke("inspect", str(path))
        assert code == 0, printed
        assert "10 steps" in printed
        assert "rewards" in printed
        assert invoke("verify", str(path))[0] == 0


def test_a_buffer_of_several_agents_is_inspected_and_verified(tmp_path: Path) -> None:
    buffer = MultiAgentReplayBuffer(10)
    rows = SampleBatch(obs=[1, 2], actions=[0, 0], rewards=[1.0, 2.0], terminateds=[False, True])
    buffer.add(MultiAgentBatch({"wolf": rows, "sheep": rows}, 2))
    buffer.save(tmp_path / "agents")
    code, printed = invoke("inspect", str(tmp_path / "agents"))
    assert (code, "policy wolf: 2 agent steps" in printed) == (0, True)
    assert invoke("verify", str(tmp_path / "agents"))[0] == 0


def test_wrong_arguments_are_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.arrow").write_text("hello")
    for arguments, words in (
        (("collect", "mpe2/simple_spraed_v3"), "did you mean 'mpe2/simple_spread_v3'"),
        (("collect", "--workers", "0"), "--workers"),
        (("collect", "--steps", "-3"), "--steps"),
        (("collect", "--out", "missing/x.arrow"), "create it first"),
        (("collect", "--out", "x.csv"), "must end in one of .arrow"),
        (("collect", "--out", "./x.arrow/y.arrow"), "create it first"),
        (("collect", "--steps", "5", "--episodes", "5"), "not both"),
        (("collect", "--plot", "x.txt"), "must end in one of .png"),
        (("collect", "--policy", "nowhere.pt"), "a policy file must exist, got 'nowhere.pt'"),
        (("collect", "--policy", "nowhere"), "must be named"),
        (("collect", "--policy", "a=random", "--policy", "random"), "each of several policies must have an id"),
        (("inspect", "text.arrow", "--plot", "x.txt"), "must end in one of .png"),
        (("inspect", "nowhere.arrow"), "No such file or directory: 'nowhere.arrow'"),
        (("inspect", "text.arrow"), "must be an Arrow file"),
        (("inspect",), "FILE"),
    ):
        code, printed = invoke(*arguments)
        assert code == 2, printed
        assert words in printed
        assert "Traceback" not in printed
    assert os.listdir(tmp_path) == ["text.arrow"]


def test_an_unwritable_folder_is_rejected_before_collection_starts() -> None:
    # Not even root makes files there.
    code, printed = invoke("collect", "--out", "/proc/x.arrow")
    assert code == 2
    assert "'/proc/x.arrow' must be in a writable folder" in printed


def test_help_and_version() -> None:
    assert invoke("--version") == (0, f"samplebatch {__version__}")
    code, printed = invoke("--help")
    assert code == 0
    assert "samplebatch collect mpe2/simple_spread_v3 --workers 4" in printed
    assert "samplebatch inspect spread.arrow" in printed
    for option in ("--workers", "--envs-per-worker", "--steps", "--episodes", "--policy", "--out", "--seed", "--plot"):
        assert option in invoke("collect", "--help")[1]


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "samplebatch", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == __version__


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_a_missing_package_is_reported_with_its_extra(module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['samplebatch']; import samplebatch.cli as c; c.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install 'samplebatch[cli]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("whole_group", "number"),
    [
        pytest.param(True, signal.SIGINT, id="Ctrl-C"),
        pytest.param(False, signal.SIGTERM, id="kill"),
        pytest.param(True, signal.SIGTERM, id="SIGTERM to the group", marks=pytest.mark.long),
        pytest.param(False, signal.SIGINT, id="SIGINT to the parent", marks=pytest.mark.long),
    ],
)
def test_a_signal_writes_the_collected_steps(tmp_path: Path, whole_group: bool, number: signal.Signals) -> None:
    out, started = tmp_path / "cut.arrow", tmp_path / "started"
    process = start(
        "collect", "arena:Announcing", "--steps=1000000", "--fragment-length=5", f"--out={out}", started=started
    )
    workers = workers_of(process.pid, 2)
    wait_for(started)
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    printed, complaints = process.communicate(timeout=20)
    assert process.returncode == 128 + number, complaints
    assert "Traceback" not in complaints
    actual = re.search(r"Interrupted after (\d+) of 1000000 steps", complaints)
    assert actual is not None
    batch = read_arrow(out)
    assert batch.count == int(actual[1]) > 0
    assert f"Wrote {batch.count} environment steps" in printed
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert sorted(os.listdir(tmp_path)) == ["cut.arrow", "started"]


def test_ctrl_c_before_the_first_step_writes_no_file(tmp_path: Path) -> None:
    process = start("collect", "arena:slow_relay", "--steps=1000000", f"--out={tmp_path / 'none.arrow'}")
    workers_of(process.pid, 2)
    os.killpg(process.pid, signal.SIGINT)
    _, complaints = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "nothing was collected" in complaints
    assert "Traceback" not in complaints
    assert os.listdir(tmp_path) == []


def test_a_killed_worker_ends_the_run_and_collected_steps_are_written(tmp_path: Path) -> None:
    out, started = tmp_path / "cut.arrow", tmp_path / "started"
    process = start(
        "collect", "arena:Announcing", "--steps=1000000", "--fragment-length=5", f"--out={out}", started=started
    )
    victim = workers_of(process.pid, 2)[1]
    wait_for(started)
    os.kill(victim, signal.SIGKILL)
    printed, complaints = process.communicate(timeout=20)
    assert process.returncode == 1
    assert re.search(rf"\(process {victim}\) was killed by SIGKILL after sending \d+ of 500000", complaints)
    assert "Traceback" not in complaints
    assert f"Wrote {read_arrow(out).count} environment steps" in printed


def test_an_environment_error_ends_the_run_and_steps_are_written(tmp_path: Path) -> None:
    process = start("collect", "arena:Failing", "-n100", "-w1", "--fragment-length=8", f"--out={tmp_path / 'x.arrow'}")
    printed, complaints = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "RuntimeError: the baton was dropped" in complaints
    assert "Traceback" not in complaints
    assert "Wrote 24 environment steps" in printed
