"""GRPO in one file: a small transformer learns to sort digits from rewards alone.

    python docs/examples/grpo.py

Workers generate a group of answers for each prompt, a judge adds rewards, and the
learner reads complete groups from the same table of rows. The learner packs the answers
without padding, runs a gradient step, and publishes the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import time

import numpy as np
import torch
from torch import nn

from samplebatch import SampleBatch
from samplebatch.column import RaggedColumn
from samplebatch.service import ReplayServer, RowClient, RowTable
from samplebatch.tokens import PackedBatch

SORT, END, TOKENS = 10, 11, 12  # digits are tokens themselves
LONGEST, GROUP, PROMPTS, BIN, HEADS, CLIP = 4, 16, 16, 128, 4, 0.2
COLUMNS = ["uid", "prompt", "answer", "logp", "version", "reward"]
torch.set_num_threads(1)  # in all processes: each has a core


class Model(nn.Module):
    """Transformer with 0.1 million parameters and causal attention within segments."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(TOKENS, 64),
            nn.Embedding(2 * LONGEST + 2, 64),
        )
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, HEADS, 256, **how) for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, TOKENS))

    def forward(
        self, ids: torch.Tensor, places: torch.Tensor, segments: torch.Tensor
    ) -> torch.Tensor:
        """Return the log-probabilities of the token after each token."""
        x = self.tokens(ids) + self.places(places)
        hidden = (segments[:, :, None] != segments[:, None]) | torch.ones(
            2 * ids.shape[1:], dtype=torch.bool
        ).triu(1)
        for block in self.blocks:
            x = block(x, hidden.repeat_interleave(HEADS, 0))
        return self.head(x).log_softmax(-1)


@torch.no_grad()
def generate(model: Model, prompts: RaggedColumn) -> SampleBatch:
    """Continue prompts up to END; return answers and log-probabilities of tokens."""
    padded = (
        prompts.pad(side="left"),
        prompts.positions(side="left"),
        prompts.mask(side="left").astype(int),
    )
    ids, places, segments = map(torch.as_tensor, padded)
    logps = []
    for _ in range(LONGEST + 1):
        logp = model(ids, places, segments)[:, -1]
        ids = torch.cat([ids, logp.exp().multinomial(1)], 1)
        logps.append(logp.gather(1, ids[:, -1:]))
        places, segments = (
            torch.cat([places, places[:, -1:] + 1], 1),
            torch.cat([segments, segments[:, -1:]], 1),
        )
    answers = ids[:, prompts.max_seqlen :].numpy()
    ends = np.where(
        (answers == END).any(1), (answers == END).argmax(1) + 1, answers.shape[1]
    )
    columns = {"answer": answers, "logp": torch.cat(logps, 1).numpy()}
    return SampleBatch(
        {
            name: RaggedColumn.from_array(rows).truncate(ends)
            for name, rows in columns.items()
        }
    )


def draw_prompts(rng: np.random.Generator, count: int) -> RaggedColumn:
    """Draw rows of two or more digits, each followed by SORT."""
    lengths = rng.integers(2, LONGEST + 1, count)
    digits = RaggedColumn.from_lengths(rng.integers(0, 10, lengths.sum()), lengths)
    return digits.join(
        RaggedColumn.from_lengths(np.full(count, SORT), np.ones(count, int))
    )


def score(prompts: RaggedColumn, answers: RaggedColumn) -> np.ndarray:
    """Return the fraction of tokens that match the sorted digits followed by END."""
    solved = RaggedColumn.from_rows(
        [np.append(np.sort(prompt[:-1]), END) for prompt in prompts]
    )
    right = solved.pad(-1, length=LONGEST + 1) == answers.pad(-2, length=LONGEST + 1)
    return right.sum(1) / np.maximum(prompts.lengths, answers.lengths)


def roll_out(uri: str, worker: int, workers: int) -> None:
    """Generate groups of answers with the newest weights until stopped."""
    torch.manual_seed(worker)
    rng, model, version = np.random.default_rng(worker), Model(), 0
    with RowClient(uri, "rollouts") as rows:
        for uids in (
            np.arange(PROMPTS) + PROMPTS * step
            for step in itertools.count(worker, workers)
        ):
            if (newest := rows.latest(newer_than=version)) is not None:
                version = newest.version
                model.load_state_dict(
                    {name: torch.tensor(value) for name, value in newest.value.items()}
                )
            batch = SampleBatch(uid=uids, prompt=draw_prompts(rng, PROMPTS)).repeat(
                GROUP
            )
            batch = batch.union(generate(model, batch["prompt"]))
            rows.put(None, batch.assign(version=np.full(len(batch), version)))


def judge(uri: str) -> None:
    """Add rewards to rows without rewards until stopped."""
    with RowClient(uri, "rollouts") as rows:
        while True:
            batch = rows.take(
                1024, at_least=1, columns=["prompt", "answer"], consumer="judge"
            )
            rows.put(batch["key"], {"reward": score(batch["prompt"], batch["answer"])})


def learn(
    model: Model, optimizer: torch.optim.Optimizer, batch: SampleBatch
) -> PackedBatch:
    """Perform one gradient step on groups of answers; the loss excludes prompts."""
    prompts, answers, blank = batch["prompt"], batch["answer"], batch["prompt"] * 0.0
    advantages = answers * 0.0 + batch.group_by("uid").normalize("reward")
    logp, advantages = (
        blank.astype("f4").join(batch["logp"]),
        blank.join(advantages).astype("f4"),
    )
    tokens = SampleBatch(ids=prompts.join(answers), logp=logp, advantages=advantages)
    packed = tokens.assign(is_answer=(prompts < 0).join(answers >= 0)).pack(BIN)
    own = {
        name: torch.as_tensor(rows.pad(-(name == "segment_ids")))
        for name, rows in packed.batch.items()
    }
    following = model(own["ids"], own["position_ids"], own["segment_ids"])[
        :, :-1
    ].gather(2, own["ids"][:, 1:, None])
    gains, ratio = (
        own["advantages"][:, 1:],
        (following.squeeze(2) - own["logp"][:, 1:]).exp(),
    )
    loss = -torch.minimum(ratio * gains, ratio.clamp(1 - CLIP, 1 + CLIP) * gains)[
        own["is_answer"][:, 1:]
    ].mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return packed


def main(steps: int, workers: int) -> list[float]:
    """Train the model and return the mean reward of the answers in each step."""
    torch.manual_seed(0)
    model, rewards, start, size = Model(), [], time.monotonic(), PROMPTS * GROUP
    optimizer, context = (
        torch.optim.Adam(model.parameters(), lr=2e-3),
        multiprocessing.get_context("forkserver"),
    )
    # Workers wait while the table is full, which bounds the lag of the weights.
    table = RowTable(
        "rollouts",
        3 * size,
        consumers=("judge", "trainer"),
        group="uid",
        group_size=GROUP,
    )
    with (
        ReplayServer([table]) as server,
        RowClient(server.uri, "rollouts") as rows,
        contextlib.ExitStack() as stack,
    ):
        processes = [
            context.Process(target=roll_out, args=(server.uri, i, workers))
            for i in range(workers)
        ]
        for process in (*processes, context.Process(target=judge, args=(server.uri,))):
            process.start()
            stack.callback(process.terminate)
        for step in range(1, steps + 1):
            newest = rows.publish(
                {name: value.numpy() for name, value in model.state_dict().items()}
            )
            batch = rows.take(size, columns=COLUMNS, by_group=True, timeout_s=120)
            rewards.append(float(batch["reward"].mean()))
            packed = learn(model, optimizer, batch)
            if step % 20 == 1 or step == steps:
                lag = newest - batch["version"].mean()
                figures = (
                    f"reward {np.mean(rewards[-20:]):.3f}, {lag:.1f} versions behind"
                )
                print(
                    f"{step:4d} steps, {time.monotonic() - start:3.0f} s: "
                    f"{figures}, {packed}"
                )
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps",
        type=int,
        default=400,
        help="gradient steps, one per 16 groups of 16 answers",
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that generate answers"
    )
    main(**vars(parser.parse_args()))
