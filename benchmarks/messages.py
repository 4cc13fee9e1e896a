"""How many messages and bytes has a step of a model that loops over its blocks?

    mpirun -np 2 python benchmarks/messages.py

The second half of the blocks is on pp_rank 1.  Both ranks' messages are counted, in the fourth
step, with chains and with a request for each block (``fast_mode=False``).
"""

import argparse
from collections.abc import Callable

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import smp
from smp import _core

WIDTH, WORDS, SAMPLES, LENGTH = 64, 99, 16, 32


class Loop(nn.Module):
    """Blocks in a loop, with the arguments and the loss of a language model."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input_ids, labels):
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": hidden.square().mean()}


def gpt2(count: int, cache: bool) -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=count,
            n_embd=WIDTH,
            n_head=4,
            vocab_size=WORDS,
            use_cache=cache,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama(count: int, cache: bool) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=count,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            vocab_size=WORDS,
            num_attention_heads=4,
            use_cache=cache,
        )
    )


def t5(count: int, cache: bool) -> nn.Module:
    return T5ForConditionalGeneration(
        T5Config(
            num_layers=count // 2,
            d_model=WIDTH,
            d_ff=2 * WIDTH,
            d_kv=WIDTH // 4,
            num_heads=4,
            vocab_size=WORDS,
            decoder_start_token_id=0,
            use_cache=cache,
        )
    )


MODELS: dict[str, tuple[Callable[[int, bool], nn.Module], tuple[str, ...]]] = {
    "a loop": (lambda count, cache: Loop(count), ("blocks",)),
    "GPT-2": (gpt2, ("transformer.h",)),
    "Llama": (llama, ("model.layers",)),
    "T5": (t5, ("encoder.block", "decoder.block")),
}


def counts(name: str, blocks: int, cache: bool, fast: bool) -> list[int]:
    """Messages and bytes of the fourth step, of both ranks."""
    if smp.is_initialized():
        smp.reset()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 8, "fast_mode": fast})
    torch.manual_seed(0)
    make, lists = MODELS[name]
    net = make(blocks, cache)
    smp.set_partition(net, 0)
    for path in lists:
        members = list(net.get_submodule(path))
        for block in members[len(members) // 2 :]:
            smp.set_partition(block, 1)
    model = smp.DistributedModel(net)

    @smp.step
    def step(model, ids):
        out = model(input_ids=ids, labels=ids)
        model.backward(out["loss"])
        return out["loss"]

    for _ in range(4):
        before = _core.counters()
        step(model, torch.randint(0, WORDS, (SAMPLES, LENGTH)))
        after = _core.counters()
    mine = [after[kind] - before[kind] for kind in ("messages", "bytes")]
    return [sum(kind) for kind in zip(*smp.allgather(mine, smp.WORLD), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    blocks = parser.parse_args().blocks
    rows = []
    for name in MODELS:
        for cache in (False, True) if name != "a loop" else (False,):
            chained, single = (counts(name, blocks, cache, fast) for fast in (True, False))
            ratios = [f"{a / b:.2f}" for a, b in zip(chained, single, strict=True)]
            row = [name + ", with a cache" * cache, *chained, *single, *ratios]
            rows.append(f"| {' | '.join(map(str, row))} |")
    if smp.rank() == 0:
        print("| model | messages, chains | bytes | a request each | bytes | ratios | |")
        print("|---|---|---|---|---|---|---|")
        print("\n".join(rows))


main()
