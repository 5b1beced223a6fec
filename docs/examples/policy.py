"""Learn to walk to the end of a corridor, from the episodes that rollouts.py plays with the published weights.

gangline launch -n 2 -s 1 -- python policy.py EPISODES
"""

import sys
import time
from pathlib import Path

import gangline
import torch
from torch import nn

LENGTH, UPDATES = 6, 40


def make_policy() -> nn.Module:
    """Return the network that chooses between a step to the left, 0, and one to the right, 1."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LENGTH, 16), nn.Tanh(), nn.Linear(16, 2))


def take_episodes(folder: Path, rank: int) -> list[dict[str, torch.Tensor]]:
    """Wait for episodes of the player with this worker's rank; remove them from the folder."""
    while not (found := sorted(folder.glob(f"{rank}-*.pt"))):
        time.sleep(0.01)
    episodes = [torch.load(path) for path in found]
    for path in found:
        path.unlink()
    return episodes


def main(folder: Path) -> None:
    """Train; publish the weights before and after each update."""
    policy = make_policy()
    trainer = gangline.Trainer(policy, "adam", {"learning_rate": 0.03}, "dist_sync")
    kv = trainer.kvstore
    if kv.rank == 0:
        kv.publish(0)
    for update in range(1, UPDATES + 1):
        episodes = take_episodes(folder, kv.rank)
        states, actions, returns = (
            torch.cat([one[name] for one in episodes]) for name in ("states", "actions", "returns")
        )
        trainer.zero_grad()
        chances = policy(states).log_softmax(1).gather(1, actions[:, None])[:, 0]
        trainer.backward(-(chances * returns).mean(), len(states))
        trainer.step(len(states))
        if kv.rank == 0:
            kv.publish(update)
    kv.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
