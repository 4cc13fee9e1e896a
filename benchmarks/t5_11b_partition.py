"""Does the partition of T5-11B over 8 ranks look like the paper's Figures 9 and 10?

    python benchmarks/t5_11b_partition.py
    python benchmarks/t5_11b_partition.py sweep    # which inputs give both figures

The model is transformers' T5 with the sizes of T5-11B, on the meta device: nothing is
downloaded, and it takes no memory.  The paper does not say for which input it traced, so
several are tried.
"""

import math
import sys
import warnings

import torch
from transformers import T5Config, T5ForConditionalGeneration

import smp
from table import machine

RANKS = 8
LAYERS = 24
# memory_weight -> encoder and decoder ranks, least and greatest cost of a rank (paper, D)
PAPER = {1.0: (4, 4, 0.114, 0.134), 0.2: (3, 5, 0.107, 0.131)}
SHAPES = [  # samples in a microbatch, source tokens, target tokens
    (1, 256, 128),
    (4, 256, 128),
    (8, 384, 288),
    (1, 512, 256),
    (1, 512, 512),
    (1, 512, 128),
]


def t5_11b() -> T5ForConditionalGeneration:
    """T5-11B without numbers in its weights."""
    config = T5Config(
        d_model=1024,
        d_kv=128,
        d_ff=65536,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=128,
        vocab_size=32128,
        feed_forward_proj="relu",
        tie_word_embeddings=True,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    with torch.device("meta"):
        return T5ForConditionalGeneration(config)


def inputs(samples: int, source: int, target: int) -> dict[str, torch.Tensor]:
    """One microbatch: token ids, shape [samples, source] and [samples, target]."""
    return {
        "input_ids": torch.zeros(samples, source, dtype=torch.long),
        "labels": torch.zeros(samples, target, dtype=torch.long),
    }


def ranks_of(report, stack: str) -> int:
    return len({report.rank_of(f"{stack}.block.{i}") for i in range(LAYERS)})


def stacks(model: T5ForConditionalGeneration, shape: tuple | None, weight: float) -> tuple:
    """The report, and the numbers of encoder and decoder ranks."""
    given = inputs(*shape) if shape else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if shape is None else "default")
        report = smp.plan(model, **given, pipeline_parallel_degree=RANKS, memory_weight=weight)
    assert math.isclose(sum(report.costs), 1), report.costs
    return report, (ranks_of(report, "encoder"), ranks_of(report, "decoder"))


def row(model: T5ForConditionalGeneration, shape: tuple | None, weight: float) -> str:
    report, (encoder, decoder) = stacks(model, shape, weight)
    same = "yes" if (encoder, decoder) == PAPER[weight][:2] else "no"
    cells = [
        "parameters only" if shape is None else " x ".join(map(str, shape)),
        f"{weight:g}",
        f"{encoder} + {decoder}",
        same,
        " ".join(f"{cost:.3f}" for cost in report.costs),
        f"{min(report.costs):.3f}-{max(report.costs):.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def sweep(model: T5ForConditionalGeneration) -> None:
    """For each source length and number of samples, the targets that give both figures."""
    for source in (128, 256, 512):
        for samples in (1, 2, 4, 8):
            targets = [
                target
                for target in range(source // 8, source + 1, source // 8)
                if all(
                    stacks(model, (samples, source, target), weight)[1] == PAPER[weight][:2]
                    for weight in PAPER
                )
            ]
            print(f"source {source}, samples {samples}: target {targets}")


def main() -> None:
    model = t5_11b()
    if sys.argv[1:] == ["sweep"]:
        sweep(model)
        return
    elements = sum(p.numel() for p in model.parameters())
    print(f"T5-11B ({elements / 1e9:.2f} B parameters) over {RANKS} ranks")
    print(f"{machine()}, torch {torch.__version__}\n")
    head = ("samples x source x target", "memory_weight", "ranks", "as paper", "cost by rank")
    print(f"| {' | '.join(head)} | range |\n{'|---' * 6}|")
    for weight, (encoder, decoder, least, greatest) in PAPER.items():
        print(f"| paper | {weight:g} | {encoder} + {decoder} | | | {least}-{greatest} |")
        for shape in [*SHAPES, None]:
            print(row(model, shape, weight))


if __name__ == "__main__":
    main()
