"""Spec: tensor.md 1.7: with ``deterministic_server`` modules that call collectives of their own
over data-parallel ranks give what one process gives, and other programs on other ranks are an
error."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import smp
from tests.ranks import on_ranks

WIDTH = 3
MICROBATCHES = 4
ROWS = 3  # a microbatch of dp_rank 0 has; of the next one more


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum over the DP_GROUP, by a collective that holds the baton."""
    out = x.clone()
    dist.all_reduce(out, group=smp.get_dp_process_group())
    return out


class SumOverReplicas(torch.autograd.Function):
    """The loss is the mean of the replicas' losses, so gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return summed(gradient)


class SharedNorm(nn.Module):
    """What nn.SyncBatchNorm does, which refuses tensors of the CPU."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, dtype=torch.float64) + 0.5)
        self.register_buffer("running_mean", torch.zeros(width, dtype=torch.float64))
        self.shares = True

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return SumOverReplicas.apply(x) if self.shares else x

    def forward(self, x):
        count = torch.full((1,), float(len(x)), dtype=torch.float64)
        count = self.total(count)
        mean = self.total(x.sum(0)) / count
        var = self.total((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = SharedNorm()

    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """Modules with collectives on both stages, called forth and back between them."""

    def __init__(self):
        super().__init__()
        self.near = Block()
        self.far = Block()
        self.quiet = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.again = Block()

    def forward(self, x):
        x = x + self.far(self.near(x))
        x = x + self.quiet(x)
        return self.again(x) + self.far(x)


def make(kind: type[Net] = Net) -> Any:
    torch.manual_seed(7)
    return kind()


def on_two_stages(net: Net) -> smp.DistributedModel:
    smp.set_partition(net, 0)
    smp.set_partition(net.near, 0)
    for module in (net.far, net.quiet, net.again):
        smp.set_partition(module, 1)
    # A bucket for each parameter: none goes among the modules' collectives.
    return smp.DistributedModel(net, bucket_cap_mb=1e-6, broadcast_buffers=False)


def data_of(dp_rank: int, step: int = 0) -> torch.Tensor:
    """Samples of the replica, other numbers of them."""
    torch.manual_seed(50 + dp_rank + 10 * step)
    return torch.randn((ROWS + dp_rank) * MICROBATCHES, WIDTH, dtype=torch.float64)


@smp.step
def train(model, x):
    y = model(x)
    model.backward(y.square().mean())
    return y


@smp.step
def forward(model, x):
    return model(x)


class Reference:
    """All replicas' samples in one process, microbatch by microbatch."""

    def __init__(self) -> None:
        self.net = make()
        for module in self.net.modules():
            if isinstance(module, SharedNorm):
                module.shares = False

    def train(self, step: int, dp_size: int) -> list[torch.Tensor]:
        """Gradients of the mean loss; the replicas' outputs."""
        self.net.zero_grad()
        pieces = [data_of(dp, step).chunk(MICROBATCHES) for dp in range(dp_size)]
        outputs: list[list[torch.Tensor]] = [[] for _ in range(dp_size)]
        for xs in zip(*pieces, strict=True):
            ys = self.net(torch.cat(xs)).split([len(x) for x in xs])
            loss = sum(y.square().mean() for y in ys) / (dp_size * MICROBATCHES)
            loss.backward()
            for output, y in zip(outputs, ys, strict=True):
                output.append(y.detach())
        return [torch.cat(output) for output in outputs]


def check_step(model: smp.DistributedModel, reference: Reference, step: int) -> None:
    """One step gives what one process gives."""
    model.zero_grad()
    got = train(model, data_of(smp.dp_rank(), step)).concat()
    want = reference.train(step, smp.dp_size())
    torch.testing.assert_close(got, want[smp.dp_rank()], rtol=1e-10, atol=1e-10)
    check_state(model, reference)


def check_state(model: smp.DistributedModel, reference: Reference) -> None:
    parameters = dict(reference.net.named_parameters())
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(
            parameter.grad, parameters[name].grad, rtol=1e-10, atol=1e-10
        )
    buffers = dict(reference.net.named_buffers())
    for name, buffer in model.local_named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-10, atol=1e-10)


def begin(**config: Any) -> None:
    os.environ["SMP_JITTER"] = str(11 + int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "active_microbatches": MICROBATCHES,
            "deterministic_server": True,
            "ddp": True,
            **config,
        }
    )


@on_ranks(4)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("tp", [1, 2])
def test_statistics_are_those_of_all_replicas(pipeline, tp):
    begin(pipeline=pipeline, tensor_parallel_degree=tp)
    model, reference = on_two_stages(make()), Reference()
    for step in range(6):
        check_step(model, reference, step)
