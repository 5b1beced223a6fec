"""Score each version that publisher.py publishes, while it trains: python evaluator.py HOST:PORT."""

import sys

import gangline
import torch

from publisher import make_network


def main(address: str) -> None:
    """Print the accuracy of each version."""
    _, (images, labels), _ = gangline.data.digits((1, 8, 8), torch.float32)
    network = make_network().eval()
    with gangline.Reader(address) as reader:
        try:
            while True:
                version = reader.pull(network, newer_than=reader.version)
                with torch.no_grad():
                    accuracy = (network(images).argmax(1) == labels).float().mean().item()
                print(f"version {version}: accuracy {accuracy:.4f}", flush=True)
        except EOFError as end:
            print(end)


if __name__ == "__main__":
    main(sys.argv[1])
