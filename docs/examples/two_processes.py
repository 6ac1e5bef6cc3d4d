"""Two processes: a writer of steps in shared memory, and a reader without copies.

python docs/examples/two_processes.py
"""

from __future__ import annotations

import multiprocessing

import gymnasium

import samplebatch

FRAGMENT = 200
COLUMNS = {
    "obs": ("f4", (4,)),
    "actions": "i8",
    "rewards": "f4",
    "terminateds": "?",
    "truncateds": "?",
}


def play(producer: samplebatch.Producer, fragments: int) -> None:
    """Step CartPole with random actions; write each step directly into a block."""
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=1)
    with producer:
        for _ in range(fragments):
            with producer.reserve(COLUMNS, FRAGMENT) as block:
                for t in range(FRAGMENT):
                    action = env.action_space.sample()
                    block["obs"][t] = obs
                    obs, block["rewards"][t], terminated, truncated, _ = env.step(
                        action
                    )
                    (
                        block["actions"][t],
                        block["terminateds"][t],
                        block["truncateds"][t],
                    ) = action, terminated, truncated
                    if terminated or truncated:
                        obs, _ = env.reset()


if __name__ == "__main__":
    producer, consumer = samplebatch.channel(1 << 20)
    worker = multiprocessing.get_context("spawn").Process(
        target=play, args=(producer, 10)
    )
    worker.start()
    producer.close()  # this process only reads
    steps = 0
    for batch in consumer:  # ends when the worker closes its end
        steps += len(batch)
        print(
            f"{steps:5d} steps, {int(batch['terminateds'].sum()):2d} episodes ended "
            f"in the last {len(batch)}"
        )
    worker.join()
