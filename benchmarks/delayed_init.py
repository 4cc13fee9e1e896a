"""How much memory does a rank take before and after the partition of a delayed model?

    mpirun -np 2 python benchmarks/delayed_init.py

A GPT-2 of 355 M parameters (1,354 MiB) on two ranks, in processes of their own each: made
plainly, and under ``smp.delay_param_initialization``.  Measured: the peak of the resident set
(``VmHWM``) until the model is wrapped, and the resident set (``VmRSS``) and its peak after the
partition's hook; all over the resident set of a job that has imported the same and made no
model.  The partition is made without tracing: a microbatch's activations are not the subject.
"""

import sys

import torch
from torch import nn

import smp
from table import machine

MIB = 1 << 20
SIDES = ("plain", "delayed")


def resident(name: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


def forget_peak() -> None:
    """The peak counts from now."""
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")


def gpt2_medium() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16))


def main() -> None:
    side = sys.argv[1] if len(sys.argv) > 1 else "delayed"
    if side not in SIDES:
        sys.exit(f"one of {', '.join(SIDES)}, not {side!r}")
    smp.init({"pipeline_parallel_degree": 2, "skip_tracing": True})
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9))  # its modules load
    torch.randn(8, 8) @ torch.randn(8, 8)
    forget_peak()
    empty = resident("VmRSS")
    torch.manual_seed(0)
    with smp.delay_param_initialization(enabled=side == "delayed"):
        net = gpt2_medium()
    largest = max(p.numel() * p.element_size() for p in net.parameters())
    whole = sum(p.numel() * p.element_size() for p in net.parameters())
    model = smp.DistributedModel(net)
    before = resident("VmHWM") - empty
    seen = {}

    def look(*args: object) -> None:
        share = sum(p.numel() * p.element_size() for p in model.local_parameters())
        seen.update(share=share, now=resident("VmRSS") - empty, most=resident("VmHWM") - empty)

    forget_peak()
    model.register_post_partition_hook(look)

    @smp.step
    def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(ids).logits.mean()

    with torch.no_grad():
        step(model, torch.ones(1, 4, dtype=torch.long))
    told = (before, seen["share"], seen["now"], seen["most"])
    rows = smp.allgather(told, group=smp.WORLD)
    if smp.rank() == 0:
        print(f"{side}: the whole {whole // MIB} MiB, its largest tensor {largest // MIB} MiB")
        print(
            "| rank | peak before the partition | of the largest tensor | the rank's share | "
            "after it | of the share | peak in it | of the share |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for rank, (before, share, now, most) in enumerate(rows):
            cells = [
                rank,
                f"{before // MIB} MiB",
                f"{before / largest:.2f}",
                f"{share // MIB} MiB",
            ]
            for size in (now, most):
                cells += [f"{size // MIB} MiB", f"{size / share:.2f}"]
            print(f"| {' | '.join(map(str, cells))} |")
        print(machine())


if __name__ == "__main__":
    main()
