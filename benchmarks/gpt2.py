"""How close to the ideal pipeline does GPT-2 of transformers come, with its defaults?

    mpirun -np 2 python benchmarks/gpt2.py [--relay]

GPT-2 medium: the partition is smp's own, the cache goes along.  The ideal of two ranks is
T1 (m + 1) / (2 m), with T1 the time of one process for all microbatches, on both ranks at once.
"""

import argparse
import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import smp
from table import alternate, best_and_median, machine, timed

MICROBATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--relay", action="store_true", help="a request for each block")
    args = parser.parse_args()
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "active_microbatches": MICROBATCHES,
            "memory_weight": 0.2,
            "fast_mode": not args.relay,
        }
    )
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(n_layer=args.layers, n_embd=args.width, n_head=16))
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    ids = torch.randint(0, 50257, (16, 64))

    @smp.step
    def step(model, ids):
        loss = model(ids, labels=ids).loss
        model.backward(loss)
        return loss

    def piped() -> float:
        smp.barrier()
        seconds = timed(lambda: (step(model, ids), smp.barrier()))
        model.zero_grad()
        return seconds

    def alone() -> float:
        def run() -> None:
            for part in ids.chunk(MICROBATCHES):
                plain(part, labels=part).loss.backward()
            smp.barrier()

        smp.barrier()
        seconds = timed(run)
        plain.zero_grad()
        return seconds

    piped()
    times = alternate({"one process": alone, "two ranks": piped}, args.rounds)
    summary = smp.trace_summary()
    if smp.rank() == 0:
        best = {name: best_and_median(rounds)[0] for name, rounds in times.items()}
        ideal = best["one process"] * (MICROBATCHES + 1) / (2 * MICROBATCHES)
        print(f"{machine()}, torch {torch.__version__}\n\n| side | best (s) |\n|---|---|")
        for name, seconds in best.items():
            print(f"| {name} | {seconds:.2f} |")
        print(f"\n{ideal / best['two ranks']:.2f} of ideal\n{summary}")


main()
