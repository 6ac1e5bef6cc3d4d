"""Many workers with one channel each, one broadcast of weights, one gathering process.

python docs/examples/many_workers.py --workers 64
"""

from __future__ import annotations

import argparse
import multiprocessing

import gymnasium
import numpy as np

import samplebatch

FRAGMENT = 50
COLUMNS = {
    "obs": ("f4", (4,)),
    "actions": "i8",
    "rewards": "f4",
    "terminateds": "?",
    "weights_version": "i8",
}


def play(
    producer: samplebatch.Producer,
    weights: samplebatch.Subscription,
    worker: int,
    fragments: int,
) -> None:
    """Step CartPole with the newest weights; store their version with every step."""
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=worker)
    with producer, weights:
        for _ in range(fragments):
            newest = weights.latest()
            with producer.reserve(COLUMNS, FRAGMENT) as block:
                block["weights_version"][:] = newest.version
                for t in range(FRAGMENT):
                    block["obs"][t] = obs
                    block["actions"][t] = action = int(obs @ newest.value["w"] > 0)
                    obs, block["rewards"][t], terminated, truncated, _ = env.step(
                        action
                    )
                    block["terminateds"][t] = terminated
                    if terminated or truncated:
                        obs, _ = env.reset()


def main(workers: int, fragments: int) -> None:
    """Start the workers, publish weights repeatedly, and gather the batches."""
    publisher, subscription = samplebatch.broadcast(1 << 12)
    publisher.publish({"w": np.zeros(4, np.float32)})
    context = multiprocessing.get_context("forkserver")
    processes, consumers = [], []
    for worker in range(workers):
        producer, consumer = samplebatch.channel(1 << 16)
        process = context.Process(
            target=play, args=(producer, subscription, worker, fragments)
        )
        process.start()
        producer.close()
        processes.append(process)
        consumers.append(consumer)
    rng, steps, falls = np.random.default_rng(0), 0, 0
    with publisher:
        for batch in samplebatch.gather(consumers):
            steps += len(batch)
            falls += int(batch["terminateds"].sum())
            if steps % (workers * FRAGMENT) == 0:
                newest = publisher.publish({"w": rng.standard_normal(4, np.float32)})
                print(
                    f"{steps:6d} steps, {falls:4d} falls; "
                    f"these by version {batch['weights_version'][0]} of {newest}"
                )
    for process in processes:
        process.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument(
        "--fragments", type=int, default=20, help="fragments that each worker sends"
    )
    options = parser.parse_args()
    main(options.workers, options.fragments)
