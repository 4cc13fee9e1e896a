"""Trains a small GPT, byte by byte, on the source of Python's standard library.

    mpirun -np 2 python examples/train_gpt.py
    mpirun -np 2 python examples/train_gpt.py --tensor-parallel 2
    mpirun -np 2 python examples/train_gpt.py --bf16

The model is plain PyTorch.  Its modules are spread over however many ranks there are: 1
(also without mpirun), 2 or 4; with --tensor-parallel each of them is split instead, and
every rank trains on pieces of its own.  Stop it whenever you like: the same command goes on
from the last checkpoint.  At its end it writes a few lines of Python of its own, and leaves
in the folder --output how the model was partitioned (partition.txt, partition.svg) and
what each rank did in the last step (trace.json for ui.perfetto.dev, timeline.svg).
"""

import argparse
import math
import os
import time
from collections import deque
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp

BYTES = 256
PROMPTS = [b"    def ", b"\n\nclass ", b"\nimport ", b"    for "]  # of one length
CHECKPOINT_EVERY = 25  # steps
REPORT_EVERY = 25  # steps


# ------------------------------------------------------------------------------ the model


class Attention(nn.Module):
    """Causal self-attention: [batch, length, width] -> the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inputs(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Recent(nn.Module):
    """Adds to each place a mixture of the few up to it: [batch, length, width] -> the same.

    Letters mean little by themselves; with this the first layer sees pieces of words.
    """

    def __init__(self, width: int, reach: int = 6):
        super().__init__()
        self.reach = reach
        self.mix = nn.Conv1d(width, width, reach)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.transpose(1, 2), (self.reach - 1, 0))
        return x + self.mix(padded).transpose(1, 2)


class GPT(nn.Module):
    """Bytes [batch, length] -> scores of the next byte [batch, length, 256].

    The output layer's weight is the embedding's: the two share one parameter.
    """

    def __init__(self, width: int = 160, heads: int = 5, layers: int = 4, length: int = 128):
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(length, width)
        self.recent = Recent(width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.recent(self.embedding(x) + self.position(places))
        return self.head(self.norm(self.blocks(x)))


# ------------------------------------------------------------------------------- the data


def standard_library() -> Tensor:
    """The source of the standard library, one file after the other: uint8 [bytes]."""
    root = Path(os.__file__).parent
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.parts)
    )
    text = b"\n".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Pieces of the text from random places: int64 [batch, length + 1]."""
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    return torch.stack([text[s : s + length + 1] for s in starts]).long()


# -------------------------------------------------------------------------------- the run


@smp.step
def train_step(model: nn.Module, pieces: Tensor) -> Tensor:
    scores = model(pieces[:, :-1])
    loss = F.cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())
    model.backward(loss)
    return loss


@smp.step
def next_scores(model: nn.Module, text: Tensor) -> Tensor:
    with torch.no_grad():
        return model(text)[:, -1]


def learning_rate(step: int, steps: int, peak: float, warm_up: int = 30) -> float:
    """Up in a straight line, then down along a cosine to a tenth."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    part = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.55 + 0.45 * math.cos(math.pi * min(1.0, part)))


def write_some(model: nn.Module, length: int, count: int) -> list[bytes]:
    """What the model writes after each prompt; the same each time."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt) for prompt in PROMPTS])
    for _ in range(count):
        scores = next_scores(model, text[:, -length:]).concat().cpu() / 0.6
        drawn = torch.multinomial(F.softmax(scores, dim=-1), 1, generator=generator)
        text = torch.cat([text, drawn], dim=1)
    model.train()
    return [bytes(row.tolist()) for row in text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo"))
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8, help="pieces in a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--write", type=int, default=120, metavar="BYTES", help="at its end")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="T")
    parser.add_argument("--bf16", action="store_true", help="train in half precision")
    options = parser.parse_args()

    torch.set_num_threads(1)  # for each rank; the model is small
    splits = options.tensor_parallel > 1
    smp.init(
        {
            "pipeline_parallel_degree": -1,  # over the ranks that are left
            "tensor_parallel_degree": options.tensor_parallel,
            "microbatches": 4,
            "bf16": options.bf16,
        }
    )
    ranks = smp.size()
    torch.manual_seed(0)
    with smp.tensor_parallelism(enabled=splits):
        net = GPT()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95))
    )
    length = model.module.length
    places = torch.Generator().manual_seed(0)
    first, losses = 0, deque(maxlen=20)

    options.output.mkdir(parents=True, exist_ok=True)
    checkpoints = options.output / "checkpoints"
    if (checkpoints / "newest").exists():
        saved = smp.resume_from_checkpoint(checkpoints)
        first, losses = saved["step"], deque(saved["losses"], maxlen=20)
        places.set_state(saved["places"])
        torch.set_rng_state(saved["random"])

    def say(text: str) -> None:
        if smp.rank() == 0:
            print(text, flush=True)

    text = standard_library()
    say(
        f"{model.num_parameters():,} parameters on {ranks} rank{'s' * (ranks > 1)}, "
        f"{len(text):,} bytes of Python, step {first} of {options.steps}"
    )
    since, begun = first, time.monotonic()
    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps, options.rate)
        optimizer.zero_grad()
        pieces = draw(text, options.batch * smp.dp_size(), length, places)
        loss = train_step(model, pieces.tensor_split(smp.dp_size())[smp.dp_rank()])
        optimizer.step()
        losses.append(loss.reduce_mean().item())
        done = step + 1
        if done % REPORT_EVERY == 0 or done == options.steps:
            took = (time.monotonic() - begun) / (done - since)
            left = round(took * (options.steps - done))
            say(
                f"step {done:4d}  loss {sum(losses) / len(losses):.3f}  "
                f"{len(pieces) * length / took:7,.0f} bytes/s  "
                f"{left // 60}:{left % 60:02d} left"
            )
        if done == options.steps:
            report(model, options.output)
        if done % CHECKPOINT_EVERY == 0 or done == options.steps:
            smp.save_checkpoint(
                checkpoints,
                tag=f"step{done}",
                model=model,
                optimizer=optimizer,
                user_content={
                    "step": done,
                    "losses": list(losses),
                    "places": places.get_state(),
                    "random": torch.get_rng_state(),
                },
                num_kept_partial_checkpoints=1,
            )
    mean = sum(losses) / len(losses)
    say(f"mean loss of the last {len(losses)} steps: {mean:.3f} nats a byte")
    for written in write_some(model, length, options.write):
        say("\n" + written.decode(errors="replace").strip("\n"))


def report(model: smp.DistributedModel, folder: Path) -> None:
    """Leave how the model was partitioned, and the last step, in a folder."""
    if smp.pp_size() == 1:
        return  # one rank has everything and waits for nobody
    if smp.rank() == 0:
        partition = model.partition_report()
        (folder / "partition.txt").write_text(f"{partition}\n")
        partition.svg(folder / "partition.svg")
    smp.save_trace(folder / "trace.json")
    smp.save_trace(folder / "timeline.svg")


if __name__ == "__main__":
    main()
