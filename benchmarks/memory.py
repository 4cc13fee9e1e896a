"""How much memory does a rank take over what its part of the model needs?

    mpirun -np 2 python benchmarks/memory.py [--transport mpi]

A GPT on two ranks with AdamW.  Measured: the proportional set size (PSS) over that before
the model, after ``smp.init`` and one step of a toy without smp (torch loads tens of MB of
Python modules then, which the table shows apart); each step's maximum, as another process
reads it from ``/proc``.  Counted: this rank's parameters, their gradients and moments,
what autograd keeps of the microbatches under way, at its peak, and the pools, whose pages
both ranks use: half of both for each.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import smp
from smp import _core
from table import machine

WIDTH, HEADS, LAYERS, VOCAB, LENGTH = 640, 10, 12, 4096, 128
MICROBATCHES, SAMPLES = 8, 1
MIB = 1 << 20

# Reads the PSS again and again; a line asks for the maximum and begins the next.
SAMPLER = """
import os, select, sys
most, path = 0, f"/proc/{sys.argv[1]}/smaps_rollup"
while True:
    with open(path) as rollup:
        now = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    most = max(most, now)
    if select.select([0], [], [], 0.02)[0]:
        if not os.read(0, 1):
            break
        print(most, flush=True)
        most = 0
"""


class Sampler:
    """Maxima of this process's PSS."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", SAMPLER, str(os.getpid())]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )

    def most(self) -> int:
        """Bytes at the peak since the last call."""
        self.process.stdin.write(b"\n")
        return int(self.process.stdout.readline()) << 10

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


class Kept:
    """A tensor that autograd keeps; counts its storage while it is kept."""

    live: dict[int, list[int]] = {}  # address of the storage -> [how often kept, bytes]
    own: set[int] = set()  # storages that are counted elsewhere: the parameters
    now = peak = 0
    lock = threading.Lock()

    def __init__(self, tensor: Tensor):
        self.tensor = tensor
        storage = tensor.untyped_storage()
        self.address = storage.data_ptr()
        # What came from the other rank is memory of its pool.
        if self.address in Kept.own or not storage.resizable():
            self.address = 0
            return
        with Kept.lock:
            entry = Kept.live.setdefault(self.address, [0, storage.nbytes()])
            entry[0] += 1
            if entry[0] == 1:
                Kept.now += entry[1]
                Kept.peak = max(Kept.peak, Kept.now)

    def __del__(self) -> None:
        if self.address:
            with Kept.lock:
                entry = Kept.live[self.address]
                entry[0] -= 1
                if entry[0] == 0:
                    del Kept.live[self.address]
                    Kept.now -= entry[1]


def counted() -> contextlib.AbstractContextManager:
    """While it is entered, what autograd keeps is counted; the traced run keeps nothing."""
    if smp.is_tracing():
        return contextlib.nullcontext()
    return saved_tensors_hooks(Kept, lambda kept: kept.tensor)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with counted():
            b, s, w = x.shape
            qkv = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, w // HEADS)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
            return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with counted():
            return F.cross_entropy(self.linear(self.norm(x)).flatten(0, 1), ids.flatten())


class GPT(nn.Module):
    """Token ids (samples, length) -> their loss; no positions, which weigh nothing."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.head = Head()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids)), ids)


def load_torch() -> None:
    """What torch loads at the first step of any training: tens of MB of Python modules."""
    toy = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(toy.parameters())
    toy(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--transport", choices=("shm", "mpi"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=LAYERS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    config = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES}
    if args.transport:
        config["comm_transports"] = [args.transport]
    smp.init(config)
    torch.manual_seed(0)
    sampler = Sampler()
    cold = sampler.most()
    load_torch()
    sampler.most()
    baseline = sampler.most()

    net = GPT(args.layers)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    Kept.own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    @smp.step
    def train(ids):
        loss = model(ids)
        model.backward(loss)
        return loss

    ids = torch.randint(VOCAB, (MICROBATCHES * SAMPLES, LENGTH))
    steps = []
    for _ in range(args.steps):
        before = _core.counters()["pool_fallbacks"]
        dist.barrier()
        train(ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        dist.barrier()
        fallbacks = _core.counters()["pool_fallbacks"] - before
        steps.append((sampler.most() - baseline, fallbacks))
    sampler.close()
    report(model, optimizer, baseline - cold, steps)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def report(model, optimizer, loaded: int, steps: list[tuple[int, int]]) -> None:
    own = list(model.local_parameters())
    counted = {
        "parameters": nbytes(own),
        "gradients": nbytes(p.grad for p in own),
        "optimizer state": nbytes(
            t for of in optimizer.optimizer.state.values() for t in of.values()
        ),
        "activations, at their peak": Kept.peak,
    }
    everyone: list = [None] * smp.size()
    pool = _core.counters()["pool_made"]
    dist.all_gather_object(everyone, (counted, pool, loaded, steps))
    if smp.rank() != 0:
        return
    pools = sum(pool for _, pool, _, _ in everyone) / len(everyone)
    size = model.num_parameters() / 1e6
    print(f"\nGPT of {size:.0f} M parameters, AdamW, {len(steps)} steps")
    print(f"{machine()}, torch {torch.__version__}\n")
    print("| MiB | " + " | ".join(f"rank {r}" for r in range(len(everyone))) + " |")
    print("|---" * (len(everyone) + 1) + "|")

    def row(name: str, values: Iterable[float], form: str = ".0f") -> None:
        print(f"| {name} | " + " | ".join(format(v, form) for v in values) + " |")

    for name in counted:
        row(name, (c[name] / MIB for c, _, _, _ in everyone))
    row("half of both pools", [pools / MIB] * len(everyone))
    sums = [sum(c.values()) + pools for c, _, _, _ in everyone]
    row("counted", (s / MIB for s in sums))
    for i in range(len(steps)):
        row(f"measured, step {i + 1}", (s[i][0] / MIB for _, _, _, s in everyone))
    last = [s[-1][0] for _, _, _, s in everyone]
    row("last / counted", (m / s for m, s in zip(last, sums, strict=True)), ".3f")
    row("torch's own, at its first step", (x / MIB for _, _, x, _ in everyone))
    for i in range(len(steps)):
        row(f"pool fallbacks, step {i + 1}", (s[i][1] for _, _, _, s in everyone))


main()
