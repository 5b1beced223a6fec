"""A graph network learns from graphs of unequal size, whose batches are cut by their number of nodes."""

import gangline
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

Graph = tuple[Tensor, Tensor, Tensor]  # features of nodes, edges as (2, edges), and the value to learn


class Network(nn.Module):
    """One layer of messages along the edges, and a value of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.node, self.head = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        """Return one value for each graph; `graph` is the number of each node's graph."""
        hidden = self.node(nodes).relu()
        hidden = hidden.index_add(0, edges[1], hidden[edges[0]])
        return self.head(hidden.new_zeros(int(graph[-1]) + 1, 16).index_add(0, graph, hidden))[:, 0]


def collate(graphs: list[Graph]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Join graphs to a single one."""
    nodes, edges, values = zip(*graphs, strict=True)
    sizes = torch.tensor([len(one) for one in nodes])
    first = sizes.cumsum(0) - sizes
    joined = torch.cat([one + begin for one, begin in zip(edges, first, strict=True)], 1)
    return torch.cat(nodes), joined, torch.arange(len(sizes)).repeat_interleave(sizes), torch.stack(values)


torch.manual_seed(0)
graphs = []
for size in (3 + 60 * torch.rand(128) ** 3).int().tolist():
    nodes = torch.randn(size, 4, dtype=torch.float64)
    graphs.append((nodes, torch.randint(size, (2, 3 * size)), nodes[:, 0].abs().sum()))

dist.init_process_group("gloo")
model = DistributedDataParallel(Network().double())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = DataLoader(graphs, batch_size=16, shuffle=True, collate_fn=collate)
sizes = [len(nodes) for nodes, _, _ in graphs]
loader = gangline.balance(model, loader, global_batch=32, lengths=sizes, padding=False)
for nodes, edges, graph, values in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(nodes, edges, graph), values).backward()
    optimizer.step()
dist.destroy_process_group()
