"""Play episodes with the newest weights of policy.py: python rollouts.py HOST:PORT EPISODES PLAYER."""

import sys
import time
from pathlib import Path

import gangline
import torch
from torch import Tensor, nn

from policy import LENGTH, make_policy


def play(policy: nn.Module) -> dict[str, Tensor]:
    """Walk from the left end of the corridor to the right one, at most 30 steps; each step costs 1."""
    place, states, actions = 0, [], []
    while place < LENGTH - 1 and len(states) < 30:
        states.append(nn.functional.one_hot(torch.tensor(place), LENGTH).float())
        with torch.no_grad():
            actions.append(torch.multinomial(policy(states[-1]).softmax(0), 1)[0])
        place = max(place + (1 if actions[-1] else -1), 0)
    costs = torch.arange(len(states), 0, -1).float()
    return {"states": torch.stack(states), "actions": torch.stack(actions), "returns": 1 - costs / LENGTH}


def main(address: str, folder: Path, player: int) -> None:
    """Play until the job ends; leave a few episodes at a time in the folder."""
    policy, count = make_policy(), 0
    torch.manual_seed(player)
    with gangline.Reader(address) as reader:
        try:
            while True:
                version = reader.pull(policy)  # the newest one; only the first call waits
                if len(list(folder.glob(f"{player}-*.pt"))) > 3:  # the trainer is behind
                    time.sleep(0.01)
                    continue
                episode = play(policy)
                print(f"version {version}: {len(episode['states'])} steps", flush=True)
                torch.save(episode, folder / f"{player}-{count}.tmp")
                (folder / f"{player}-{count}.tmp").rename(folder / f"{player}-{count:06}.pt")
                count += 1
        except EOFError as end:
            print(end)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
