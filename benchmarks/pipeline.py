"""How close to the ideal pipeline does a GPT come, against torch.distributed.pipelining?

    mpirun -np 2 python benchmarks/pipeline.py [--shape hf --family t5] [--active 4]

p = 2 stages, m = 8 microbatches, the same split for all sides: embedding and half of the
layers on rank 0, the other half and the head on rank 1.  The loss is there, too, but in
the shape of transformers, whose root computes it.  The shapes:

    nested      the root calls one child a rank
    flat        the root loops over its layers
    sequential  the layers are one nn.Sequential over both ranks
    hf          a model of transformers, by --family

The relay (``fast_mode=False``: each remote layer is a request) runs beside.  The ideal is
T1 (m + p - 1) / (m p), with T1 the time of one process for all microbatches, measured in
the same run: on rank 0 while rank 1 waits, and on both ranks at once, each for itself, as
busy as the machine is in a pipeline (the slower one counts; on shared machines cores differ).
"""

import argparse
import copy
import statistics
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

import smp
from hand_cut import FAMILIES, VOCAB, in_parts
from smp.modules.remote_modules import TRAINS
from table import alternate, machine, timed

MICROBATCHES = 8


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Part(nn.Module):
    """Some layers in a row, of the first part behind the embedding, of the last with a head."""

    def __init__(self, layers, embedding=None, head=None):
        super().__init__()
        self.embedding, self.layers, self.head = embedding, nn.Sequential(*layers), head

    def forward(self, x):
        x = self.layers(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x)


def loss_of(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class WithLoss(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, x, ids):
        return loss_of(self.part(x), ids)


class Gpt(nn.Module):
    """The layers, to be called in one of the shapes."""

    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2 * layers))

    def stages(self, count: int) -> list[nn.Module]:
        parts = [Part(layers) for layers in in_parts(self.layers, count)]
        parts[0].embedding, parts[-1].head = self.embedding, self.head
        return parts


class Nested(nn.Module):
    def __init__(self, of: Gpt):
        super().__init__()
        self.first, last = of.stages(2)
        self.last = WithLoss(last)

    def forward(self, ids):
        return self.last(self.first(ids), ids)

    def there(self) -> list[nn.Module]:
        """The modules on rank 1."""
        return [self.last]


class Flat(nn.Module):
    def __init__(self, of: Gpt):
        super().__init__()
        self.embedding, self.layers, self.head = of.embedding, of.layers, WithLoss(of.head)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, ids)

    def there(self) -> list[nn.Module]:
        return [*self.layers[len(self.layers) // 2 :], self.head]


class Sequential(Flat):
    def __init__(self, of: Gpt):
        super().__init__(of)
        self.layers = nn.Sequential(*self.layers)

    def forward(self, ids):
        return self.head(self.layers(self.embedding(ids)), ids)


SHAPES = {"nested": Nested, "flat": Flat, "sequential": Sequential}


def sizes_for(stage_ms: float) -> tuple[int, int, int, int]:
    """Width, layers a stage, sequence and samples a microbatch for about that time."""
    return (256, 3, 64, 4) if stage_ms >= 8 else (128, 1, 64, 2)


NAMES = {
    Schedule1F1B: "pipelining 1F1B",
    ScheduleGPipe: "pipelining GPipe",
    ScheduleInterleaved1F1B: "pipelining interleaved 1F1B",
}


def peers(cut: nn.Module) -> dict[type, int]:
    """torch's schedules, and their number of stages: the interleaved one has two a rank."""
    both = {Schedule1F1B: 2, ScheduleGPipe: 2}
    return both | ({ScheduleInterleaved1F1B: 4} if len(getattr(cut, "layers", ())) > 2 else {})


def scheduled(kind: type, stages: list[nn.Module]):
    """The schedule with this rank's of all stages."""
    mine = [
        PipelineStage(stage, number, len(stages), torch.device("cpu"))
        for number, stage in enumerate(stages)
        if number % 2 == smp.rank()
    ]
    return kind(mine if len(stages) > 2 else mine[0], MICROBATCHES, loss_fn=loss_of)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=[*SHAPES, "hf"], default="nested")
    parser.add_argument("--family", choices=FAMILIES, default="gpt2", help="of the shape hf")
    parser.add_argument("--layers", type=int, help="of each stage; else by --stage-ms")
    parser.add_argument("--stage-ms", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--active", type=int, default=MICROBATCHES, help="smp's active_microbatches"
    )
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "active_microbatches": args.active,
        }
    )
    torch.manual_seed(0)
    width, layers, length, samples = sizes_for(args.stage_ms)
    layers = args.layers or layers
    if args.shape == "hf":
        net = cut = FAMILIES[args.family](width, layers, length, loss_of)
    else:
        cut = Gpt(width, layers)
        net = SHAPES[args.shape](cut)
    by_hand = {schedule: copy.deepcopy(cut.stages(n)) for schedule, n in peers(cut).items()}
    ids = torch.randint(VOCAB, (MICROBATCHES * samples, length))
    alone = copy.deepcopy(net)
    smp.set_partition(net, 0)
    for module in net.there():
        smp.set_partition(module, 1)
    model = smp.DistributedModel(net)

    @smp.step
    def train(ids):
        loss = model(ids)
        model.backward(loss)
        return loss

    train(ids)
    tables = smp.state.job("the benchmark").runtime.tables
    its_flags = tables.entry_flags
    schedules = {kind: scheduled(kind, stages) for kind, stages in by_hand.items()}

    def one_process(ranks: int) -> float:
        """T1: all microbatches in one process, on so many ranks at once."""

        def loop():
            for part in ids.chunk(MICROBATCHES):
                (alone(part) / MICROBATCHES).backward()

        alone.zero_grad()
        dist.barrier()
        return timed(lambda: (loop() if smp.rank() < ranks else None, dist.barrier()))

    def ours(chains: bool) -> float:
        tables.entry_flags = its_flags if chains else bytes(f & TRAINS for f in its_flags)
        model.zero_grad()
        dist.barrier()
        return timed(lambda: (train(ids), dist.barrier()))

    def theirs(kind) -> float:
        for stage in by_hand[kind]:
            stage.zero_grad()
        given = (ids,) if smp.rank() == 0 else ()
        target = {"target": ids} if smp.rank() == 1 else {}
        dist.barrier()
        return timed(lambda: (schedules[kind].step(*given, **target), dist.barrier()))

    sides = {
        "one process": lambda: one_process(1),
        "one process on each rank": lambda: one_process(2),
        "smp": lambda: ours(True),
        "smp, relay": lambda: ours(False),
    }
    sides |= {NAMES[kind]: lambda kind=kind: theirs(kind) for kind in schedules}
    for side in sides.values():
        side(), side()
    times = alternate(sides, args.rounds)
    summaries = {}
    for name, chains in (("smp", True), ("smp, relay", False)):
        ours(chains)
        summaries[name] = smp.trace_summary()
    if smp.rank() == 0:
        report(args.family if args.shape == "hf" else f"GPT, {args.shape}", times)
        for name, summary in summaries.items():
            print(f"\n{name}: {summary}")


def report(model: str, times: dict[str, list[float]]) -> None:
    m, p = MICROBATCHES, 2
    t1 = times.pop("one process on each rank")
    share = (m + p - 1) / (m * p)
    ideal = [t * share for t in t1]
    alone = [t * share for t in times.pop("one process")]
    print(f"\n{model}, p = {p}, m = {m}, one stage takes {min(t1) / m / p * 1e3:.1f} ms")
    print(f"{machine()}, torch {torch.__version__}\n")
    print("| side | min (ms) | median (ms) | best / ideal | median of ideal reached |")
    print("|---|---|---|---|---|")
    sides = {"ideal, other rank idle": alone, "ideal": ideal, **times}
    for name, rounds in sides.items():
        reached = statistics.median(i / t for i, t in zip(ideal, rounds, strict=True))
        print(
            f"| {name} | {min(rounds) * 1e3:.1f} | {statistics.median(rounds) * 1e3:.1f} "
            f"| {min(ideal) / min(rounds):.3f} | {reached:.3f} |"
        )


main()
