"""What do the CPU kernels of tensor parallelism cost, against torch's?

    python benchmarks/tp_kernels.py [--only residual] [--rounds 20] [--no-compile]

One thread, forward and backward, float32.  Peers: torch's operators, the same under
torch.compile, and one fused operator where torch has it.  All sides run in turn in one
process; the last column is our best time over the best of theirs.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F

from smp import _core
from smp.tensor_parallel.rows import kernels
from smp.tensor_parallel.rows.kernels import Dropout
from table import alternate, machine, timed

P = 0.1
SIZES = ((256, 256), (1024, 1024), (4096, 1024))
SIZES_OF = {
    "attention": ((256, 64), (512, 64), (1024, 64)),
    "cross_entropy": ((2048, 4096), (256, 12_500), (256, 50_257)),
}

Sides = dict[str, Callable[..., torch.Tensor]]


def drop() -> Dropout:
    return Dropout(P, 1)


def residual(rows: int, columns: int) -> tuple[list[torch.Tensor], Sides]:
    """Bias, dropout and residual."""
    inputs = [torch.randn(rows, columns), torch.randn(columns), torch.randn(rows, columns)]

    def eager(x, bias, residual):
        return residual + F.dropout(x + bias, P)

    def ours(x, bias, residual):
        return kernels.bias_dropout_residual(x, bias, residual, drop())

    return inputs, {"smp": ours, "eager": eager}


def softmax(rows: int, columns: int) -> tuple[list[torch.Tensor], Sides]:
    """Mask, softmax and dropout."""
    inputs = [torch.randn(1, 4, rows // 4, columns)]
    mask = torch.zeros(1, 1, 1, columns)
    mask[..., columns - columns // 8 :] = -10000.0

    def eager(x):
        return F.dropout(torch.softmax(x * 0.125 + mask, -1), P)

    def ours(x):
        return kernels.masked_softmax_dropout(x, mask, scale=0.125, drop=drop())

    return inputs, {"smp": ours, "eager": eager}


def attention(rows: int, columns: int) -> tuple[list[torch.Tensor], Sides]:
    """Causal attention with dropout, 64 a head."""
    del columns
    inputs = [torch.randn(2, 4, rows, 64) for _ in range(3)]
    above = torch.full((rows, rows), -torch.inf).triu(1)

    def eager(q, k, v):
        return F.dropout(torch.softmax(q @ k.mT * 0.125 + above, -1), P) @ v

    def ours(q, k, v):
        scores = q @ k.mT
        return kernels.masked_softmax_dropout(scores, scale=0.125, causal=True, drop=drop()) @ v

    def fused(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=True)

    return inputs, {"smp": ours, "eager": eager, "fused": fused}


def norm(rows: int, columns: int) -> tuple[list[torch.Tensor], Sides]:
    """Bias, dropout, residual and layer norm."""
    inputs, _ = residual(rows, columns)
    inputs += [torch.randn(columns), torch.randn(columns)]

    def eager(x, bias, residual, weight, shift):
        return F.layer_norm(residual + F.dropout(x + bias, P), (columns,), weight, shift)

    def ours(*inputs):
        return kernels.bias_dropout_residual_layer_norm(*inputs, drop=drop())[0]

    return inputs, {"smp": ours, "eager": eager}


def cross_entropy(rows: int, columns: int) -> tuple[list[torch.Tensor], Sides]:
    """Cross-entropy; the gradient written over the logits."""
    inputs = [torch.randn(rows, columns)]
    targets = torch.randint(columns, (rows,))

    def eager(x):
        return F.cross_entropy(x, targets, reduction="none")

    def ours(x):
        return kernels.split_cross_entropy(
            x, targets, 0, columns, lambda own: own, in_place=True
        )

    return inputs, {"smp": ours, "eager": eager}


CASES = {
    "softmax": softmax,
    "attention": attention,
    "residual": residual,
    "norm": norm,
    "cross_entropy": cross_entropy,
}


def measure(case: Callable, size: tuple[int, ...], rounds: int, compiled: bool) -> None:
    """Print one row of the table."""
    inputs, sides = case(*size)
    if compiled:
        sides["compiled"] = torch.compile(sides["eager"], dynamic=False)
    inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
    wanted = [t for t in inputs if t.requires_grad]
    rounds *= max(1, 2**21 // inputs[0].numel())
    calls = max(1, 2**19 // inputs[0].numel())  # of a turn: the first is behind another side

    def both(side: Callable[..., torch.Tensor]) -> Callable[[], None]:
        seed = torch.ones_like(side(*inputs))

        def run() -> None:
            for _ in range(calls):
                torch.autograd.grad(side(*inputs), wanted, seed)

        run()
        return run

    runs = {name: both(side) for name, side in sides.items()}
    times = alternate({n: (lambda r=r: timed(r)) for n, r in runs.items()}, rounds)
    best = {name: min(t) / calls * 1e3 for name, t in times.items()}
    ours = best.pop("smp")
    cells = [f"{best[n]:.3f}" if n in best else "" for n in ("eager", "compiled", "fused")]
    name, shape = case.__doc__.rstrip("."), " x ".join(map(str, size))
    ratio = ours / min(best.values())
    print(f"| {name}, {shape} | {ours:.3f} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    _core.share_heap()  # as smp.init does: memory that was freed keeps its pages
    torch.manual_seed(0)
    print(f"{machine()}, torch {torch.__version__}\ncommand: {' '.join(sys.orig_argv[1:])}\n")
    print("| best, in ms | smp | eager | compiled | fused | smp / best |")
    print("|---|---|---|---|---|---|")
    for name, case in CASES.items():
        if options.only in (None, name):
            for size in SIZES_OF.get(name, SIZES):
                measure(case, size, options.rounds, not options.no_compile)


if __name__ == "__main__":
    main()
