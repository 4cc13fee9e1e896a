"""The part of ``python -m smp --test`` on each of its ranks.

A model over all ranks is trained for a few steps, beside the same model in one process; the
losses must be the same.
"""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp

STEPS, MICROBATCHES, BATCH, WIDTH = 3, 4, 16, 32


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def losses_of_one_process(x: Tensor, y: Tensor) -> list[float]:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    smp.init({"pipeline_parallel_degree": -1, "microbatches": MICROBATCHES})
    distributed = smp.DistributedModel(model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(distributed.parameters(), lr=0.1))
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    @smp.step
    def train_step(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(net(x), y)
        distributed.backward(loss)
        return loss

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(train_step(distributed, x, y).reduce_mean().item())
        optimizer.step()

    want = losses_of_one_process(x, y)
    same = bool(torch.allclose(torch.tensor(losses), torch.tensor(want), atol=1e-6))
    if smp.rank() == 0:
        print("losses        ", *(f"{loss:.6f}" for loss in losses))
        print("in one process", *(f"{loss:.6f}" for loss in want))
        for peer in smp.comm_report().peers:
            print(f"rank {peer.rank} is reached by {peer.transport}: {peer.messages} messages")
    smp.barrier()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
