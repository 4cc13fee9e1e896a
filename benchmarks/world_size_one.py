"""What do the wrapper and the step cost on one rank, against the bare loop?

    python benchmarks/world_size_one.py

A small MLP whose training step takes about 1 ms, with AdamW.
"""

import copy

import torch
from torch import nn

import smp
from table import alternate, show, timed

STEPS = 200
ROUNDS = 15


def main() -> None:
    torch.set_num_threads(1)
    smp.init({"microbatches": 1})
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    bare = torch.optim.AdamW(plain.parameters())
    x, y = torch.randn(32, 256), torch.randn(32, 64)

    @smp.step
    def train(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    def wrapped_loop():
        for _ in range(STEPS):
            optimizer.zero_grad()
            train(x, y)
            optimizer.step()

    def bare_loop():
        for _ in range(STEPS):
            bare.zero_grad()
            nn.functional.mse_loss(plain(x), y).backward()
            bare.step()

    sides = {
        "bare loop": lambda: timed(bare_loop) / STEPS,
        "smp": lambda: timed(wrapped_loop) / STEPS,
    }
    for side in sides.values():
        side()
    show("One rank, one step", "ms", 1e3, alternate(sides, ROUNDS), "bare loop")


main()
