"""`mx.gluon`: blocks of torch's layers, `Trainer` and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from gangline.kvstore.context import Context
from gangline.kvstore.trainer import Trainer as _Trainer
from gangline.models.initializer import initialise
from gangline.mxnet import nd
from gangline.mxnet.init import Initializer, Uniform


class Block(nn.Module):
    """A network: a subclass with ``forward``, or ``Block(network)`` around a torch module."""

    def __init__(self, network: nn.Module | None = None, **_: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Any:
        """Run the network."""
        assert self.network is not None
        return self.network(*inputs)

    def collect_params(self) -> Parameters:
        """Return the parameters by name."""
        return Parameters(self)

    def initialize(
        self,
        init: Initializer = Uniform(),  # noqa: B008  a constant
        ctx: Any = None,
        verbose: bool = False,
        force_reinit: bool = False,
    ) -> None:
        """Set the weights, on a context."""
        del verbose, force_reinit
        initialise(self, init)
        if ctx is not None:
            self.to(_only(ctx).torch_device)

    def hybridize(self, active: bool = True, **_: Any) -> None:
        """Do nothing: torch runs networks as they are; `torch.compile` is a call of its own."""

    def save_parameters(self, filename: str) -> None:
        """Write the parameters and buffers."""
        nd.save(filename, self.state_dict())

    def load_parameters(self, filename: str, ctx: Any = None) -> None:
        """Replace the parameters and buffers."""
        self.load_state_dict(nd.load(filename))
        if ctx is not None:
            self.to(_only(ctx).torch_device)


HybridBlock = Block


class Parameters(dict[str, nn.Parameter]):
    """Parameters of a block by name."""

    def __init__(self, block: Block) -> None:
        super().__init__(block.named_parameters())
        self._block = block

    def initialize(self, init: Initializer = Uniform(), ctx: Any = None, **options: Any) -> None:  # noqa: B008
        """Set the weights, on a context."""
        self._block.initialize(init, ctx, **options)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._block.zero_grad()


class Trainer(_Trainer):
    """gangline's `Trainer` whose `step` divides the workers' sum of gradients by ``batch_size``, as MXNet's does.

    Gradients are those of a sum over samples. A step drops them, so that the next backward writes them afresh.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        optimizer: str,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "auto",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        given = dict(optimizer_params or {})
        given.setdefault("learning_rate", 0.01)
        super().__init__(params, optimizer, given, kvstore, compression_params, update_on_kvstore, loss_reduction="sum")

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update the parameters; ``batch_size`` is the number of samples of all workers."""
        super().step(batch_size / self.kvstore.num_workers, ignore_stale_grad)
        self.zero_grad()


class Loss:
    """A loss of each sample: the mean of those of its elements, see `losses`, times ``weight``."""

    losses: Callable[..., Tensor]
    """Function from predictions and labels to the losses of all elements."""

    def __init__(self, weight: float | None = None, batch_axis: int = 0) -> None:
        if batch_axis:
            raise ValueError(f"batch_axis is {batch_axis}; expected 0")
        self._weight = 1.0 if weight is None else weight

    def __call__(self, pred: Tensor, label: Tensor) -> nd.NDArray:
        """Return the losses of the samples."""
        losses = self.losses(pred, label)
        return nd.wrap(self._weight * (losses.flatten(1).mean(1) if losses.dim() > 1 else losses))


class L2Loss(Loss):
    """Half of the squared error."""

    losses = staticmethod(lambda pred, label: (pred - label.view(pred.shape)).square() / 2)


class L1Loss(Loss):
    """The absolute error."""

    losses = staticmethod(lambda pred, label: (pred - label.view(pred.shape)).abs())


class SigmoidBinaryCrossEntropyLoss(Loss):
    """Cross entropy of logits."""

    losses = staticmethod(
        lambda pred, label: F.binary_cross_entropy_with_logits(pred, label.view(pred.shape), reduction="none")
    )


class SoftmaxCrossEntropyLoss(Loss):
    """Cross entropy of logits, or of log probabilities, of the classes on an axis."""

    def __init__(
        self,
        axis: int = -1,
        sparse_label: bool = True,
        from_logits: bool = False,
        weight: float | None = None,
        batch_axis: int = 0,
    ) -> None:
        super().__init__(weight, batch_axis)

        def losses(pred: Tensor, label: Tensor) -> Tensor:
            logs = (pred if from_logits else pred.log_softmax(axis)).movedim(axis, -1)
            if sparse_label:
                return -logs.gather(-1, label.long().view(*logs.shape[:-1], 1)).squeeze(-1)
            return -(logs * label.movedim(axis, -1)).sum(-1)

        self.losses = losses


SoftmaxCELoss, SigmoidBCELoss = SoftmaxCrossEntropyLoss, SigmoidBinaryCrossEntropyLoss
loss = SimpleNamespace(
    **{one.__name__: one for one in (Loss, L1Loss, L2Loss, SigmoidBinaryCrossEntropyLoss, SoftmaxCrossEntropyLoss)},
    SoftmaxCELoss=SoftmaxCELoss,
    SigmoidBCELoss=SigmoidBCELoss,
)


def _only(ctx: Context | Sequence[Context]) -> Context:
    contexts = [ctx] if isinstance(ctx, Context) else list(ctx)
    if len(contexts) != 1:
        raise ValueError(f"ctx is {contexts}; expected one: a Block has one context, mx.mod.Module may have several")
    return contexts[0]


def split_and_load(data: Any, ctx_list: Any, batch_axis: int = 0, even_split: bool = True) -> list[nd.NDArray]:
    """Return a list of the batch, on the only context."""
    del batch_axis, even_split
    return [nd.array(data).as_in_context(_only(ctx_list))]


utils = SimpleNamespace(split_and_load=split_and_load)
