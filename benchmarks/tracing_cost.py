"""What does a traced forward pass cost beside a plain one?

    python benchmarks/tracing_cost.py

About 1000 modules whose forward takes about 100 ms; the trace is checked first.
"""

import argparse

import torch
from torch import nn

from smp.partitioning.tracing import trace
from table import alternate, show, timed


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.act, self.down = nn.GELU(), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    model = nn.Sequential(*(Block(160) for _ in range(200)))
    x = torch.randn(64, 160)
    traced = trace(model, lambda: model(x))
    assert [t.first for t in traced.modules.values()] == list(range(1001))
    sides = {
        "plain": lambda: timed(lambda: model(x)),
        "traced": lambda: timed(lambda: trace(model, lambda: model(x))),
        "on meta tensors": lambda: timed(lambda: trace(model, lambda: model(x), meta=True)),
        "with times": lambda: timed(lambda: trace(model, lambda: model(x), times=True)),
    }
    times = alternate(sides, rounds)
    show(f"A forward pass of {len(traced.modules)} modules", "ms", 1e3, times, "plain")


if __name__ == "__main__":
    main()
