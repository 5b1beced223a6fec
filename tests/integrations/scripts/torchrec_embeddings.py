"""torchrec on CPUs: embedding tables distributed over the ranks, trained for some steps; prints the last loss."""

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES, ROWS, WIDTH, SAMPLES = 4, 100, 16, 32


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"table{i}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f"feature{i}"]
            )
            for i in range(FEATURES)
        ]
        self.embeddings = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
        self.top = torch.nn.Linear(FEATURES * WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.embeddings(features).values()).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = DistributedModelParallel(Network(), device=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(5):
        lengths = torch.randint(0, 4, (FEATURES * SAMPLES,))
        features = KeyedJaggedTensor.from_lengths_sync(
            [f"feature{i}" for i in range(FEATURES)], torch.randint(ROWS, (int(lengths.sum()),)), lengths
        )
        optimizer.zero_grad()
        loss = model(features)
        loss.backward()
        optimizer.step()
    total = torch.tensor([float(loss.detach())], dtype=torch.float64)
    dist.all_reduce(total)
    if rank == 0:
        print(dist.get_backend(), f"{total.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
