"""What does a traced forward pass cost beside a plain one?

    python benchmarks/tracing_cost.py

About 1000 modules whose forward takes about 100 ms; the trace is checked first.
"""

import statistics
import time

import torch
from t5_11b_partition import machine
from torch import nn

from smp.tracing import trace

REPEATS = 15


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)
        self.act, self.down = nn.GELU(), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def milliseconds(run) -> list[float]:
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    model = nn.Sequential(*(Block(160) for _ in range(200)))
    x = torch.randn(64, 160)
    traced = trace(model, lambda: model(x))
    assert [t.first for t in traced.modules.values()] == list(range(1001))
    runs = {
        "plain": lambda: model(x),
        "traced": lambda: trace(model, lambda: model(x)),
        "traced on meta tensors": lambda: trace(model, lambda: model(x), meta=True),
        "traced with times": lambda: trace(model, lambda: model(x), times=True),
    }
    print(f"{len(traced.modules)} modules, best and median of {REPEATS}, {machine()}\n")
    print(f"| {'forward':<22} | {'min ms':>7} | {'median ms':>9} | x plain |")
    print("|---|---|---|---|")
    base = None
    for name, run in runs.items():
        times = milliseconds(run)
        base = base or min(times)
        print(
            f"| {name:<22} | {min(times):>7.1f} | {statistics.median(times):>9.1f} "
            f"| {min(times) / base:>7.2f} |"
        )


if __name__ == "__main__":
    main()
