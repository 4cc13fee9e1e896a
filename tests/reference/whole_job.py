"""The plain model in one process over all ranks' samples: what a split model must equal.

The loss is the mean over the ranks of each rank's own, which is the mean over its microbatches,
by their share of its samples.  Everything is in float64; where there is an accelerator, the
split model is on it, and the plain one in host memory.
"""

import copy
import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

import smp
from smp.slicing.slices import slices_of
from smp.state_mod import state
from tests.reference.split import split_batch

Loss = Callable[..., Tensor]  # (model, *batch) -> a rank's own loss, or a microbatch's
Batch = Callable[[int, int], tuple]  # (dp_rank, step) -> arguments of the loss

TOLERANCE = 1e-10  # of the largest element
# ... of a parameter, at least: AdamW moves it by the learning rate, however small its gradient
# and with it that gradient's relative error.
MOVED = 0.1


def split_over_all_ranks(**config: Any) -> None:
    """``smp.init`` with one TP_GROUP."""
    smp.init({"tensor_parallel_degree": int(os.environ["OMPI_COMM_WORLD_SIZE"]), **config})


def in_float64(seed: int) -> None:
    """What is made from here on is of float64, and of this seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)


class WholeJob:
    """A split model and its reference, side by side.

    Args:
        net: the user's module, marked; the reference is a copy of it.
        loss: of a rank's own samples.
        batch: every rank's arguments, known to all.
        optimizer: makes one for a model's parameters.
        plain: the reference, where ``net`` is none: it gets the split model's weights.
        options: for ``smp.DistributedModel``.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        batch: Batch,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        plain: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.net, self.loss, self.batch = net, loss, batch
        self.plain = copy.deepcopy(net) if plain is None else plain
        self.model = smp.DistributedModel(net, **options)
        if plain is not None:
            plain.load_state_dict(self.model.state_dict())
        make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
        self.optimizer = smp.DistributedOptimizer(make(self.model.parameters()))
        self.plain_optimizer = make(self.plain.parameters())

        @smp.step
        def train(model: smp.DistributedModel, *batch: Any) -> Tensor:
            loss = self.loss(model, *batch)
            model.backward(loss)
            return loss

        self._train = train

    def train(self, step: int) -> None:
        """Forward and backward of one step on both; losses must be equal."""
        loss = self._train(self.model, *self.batch(smp.dp_rank(), step)).reduce_mean()
        own = self.train_plain(step)
        assert_near(loss, own[smp.dp_rank()], f"loss of step {step}")

    def train_plain(
        self, step: int, ended: Collection[int] = (), divide_by_all: bool = True
    ) -> list[Tensor]:
        """Forward and backward of one step on the reference.

        Args:
            ended: dp_ranks that have no samples any more.
            divide_by_all: the mean is over all ranks, not only those that have samples.

        Returns:
            by dp_rank the ranks' own losses; of those that have ended, zeros.
        """
        own = [
            torch.zeros(()) if rank in ended else self._own_loss(*self.batch(rank, step))
            for rank in range(smp.dp_size())
        ]
        count = len(own) if divide_by_all else len(own) - len(ended)
        (torch.stack(own).sum() / count).backward()
        return [loss.detach() for loss in own]

    def _own_loss(self, *batch: Any) -> Tensor:
        """The reference's loss of a rank's samples, a microbatch at a time."""
        microbatches = state.job("WholeJob").cfg.microbatches
        if microbatches == 1:
            return self.loss(self.plain, *batch)
        parts = split_batch(self.loss, self.plain, batch, {}, microbatches)
        return torch.stack([p.weight * self.loss(self.plain, *p.args) for p in parts]).sum()

    def check_gradients(self) -> None:
        """Each local gradient is the reference's, or this rank's slice of it."""
        wanted = dict(self.plain.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            compare_slice(parameter.grad, wanted[name].grad, parameter, f"gradient of {name}")

    def check_parameters(self) -> None:
        """Likewise for the parameters themselves, and the buffers."""
        wanted = dict(self.plain.named_parameters())
        for name, parameter in self.model.local_named_parameters():
            compare_slice(own(parameter), wanted[name].detach(), parameter, name, MOVED)
        buffers = dict(self.plain.named_buffers())
        for name, buffer in self.model.local_named_buffers():
            if buffer.is_floating_point():
                compare_slice(buffer, buffers[name], buffer, name)

    def check_state(self) -> dict[str, Tensor]:
        """The model's whole state, which has the reference's values."""
        whole = self.model.state_dict()
        for name, value in self.plain.state_dict().items():
            assert_near(whole[name], value, name)
        return whole

    def step(self, step: int, max_norm: float | None = None) -> None:
        """One whole step with its checks; gradients clipped to a norm, if one is given."""
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()
        self.train(step)
        self.check_gradients()
        if max_norm is not None:
            want = nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)
            assert_near(self.model.clip_grad_norm_(max_norm), want, f"norm of step {step}")
        self.optimizer.step()
        self.plain_optimizer.step()

    def run(self, steps: int, max_norm: float | None = None) -> "WholeJob":
        """So many steps, and the parameters after them."""
        for step in range(steps):
            self.step(step, max_norm)
        self.check_parameters()
        return self


def own(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter, as a tensor of no class of ours."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().as_subclass(Tensor)


def compare_slice(
    got: Tensor | None, whole: Tensor | None, like: Tensor, what: str, least: float = 0.0
) -> None:
    """What a rank has is its slice (as ``like`` is cut) of the whole.

    Args:
        least: what the largest element counts as if it is smaller.
    """
    if got is None or whole is None:
        assert got is whole, f"{what}: {'none' if got is None else 'one'}"
        return
    slices = slices_of(like)
    want = whole if slices is None else slices.take(whole, smp.tp_rank())
    assert got.shape == want.shape, f"{what}: {got.shape}, not {want.shape}"
    scale = whole.abs().max().item() if whole.numel() else 0.0
    assert_near(got, want, what, max(scale, least))


def assert_near(got: Tensor, want: Tensor, what: str, scale: float | None = None) -> None:
    """Equal but for rounding."""
    got, want = (tensor.detach().cpu().double() for tensor in (got, want))
    scale = max(want.abs().max().item() if scale is None else scale, 1e-3)
    worst = (got - want).abs().max().item() if want.numel() else 0.0
    assert worst <= TOLERANCE * scale, f"{what}: {worst:.2e} off, of {scale:.2e}"
