"""What does averaging gradients cost a training step of DistributedDataParallel?

    mpirun -np 2 --bind-to core python benchmarks/ddp_step.py [--trace step.json]

An MLP of 30 M parameters with DDP as it comes: over gloo, over smddp, and with PyTorch's
hook that leaves gradients as they are (``noop_hook``).  What a side takes above that one is
what communication costs it, after what DDP hides behind the backward.  How much that is a
profile of one step tells; ``--trace`` keeps it, for ui.perfetto.dev.
"""

import argparse
import copy
import json
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
from table import alternate, best_and_median, show, timed

WIDTH, LAYERS = 1732, 10
BATCHES = (16, 64, 256)
NOTHING = "no communication"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("smddp")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    net = nn.Sequential(*layers)

    def replicated(group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
        return DistributedDataParallel(
            copy.deepcopy(net), process_group=group, gradient_as_bucket_view=True
        )

    models = {
        NOTHING: replicated(),
        "gloo": replicated(dist.new_group(backend="gloo")),
        "smddp": replicated(),
    }
    models[NOTHING].register_comm_hook(None, noop_hook)
    for batch in BATCHES:
        x = torch.randn(batch, WIDTH)

        def side(model: nn.Module, x=x) -> float:
            model.zero_grad()
            dist.barrier()
            return timed(lambda: (model(x).square().mean().backward(), dist.barrier()))

        sides = {name: lambda m=model: side(m) for name, model in models.items()}
        for one in sides.values():
            one(), one()
        times = alternate(sides, args.rounds)
        if dist.get_rank() == 0:
            show(f"DDP step, 30 M parameters, batch {batch}", "ms", 1e3, times, "gloo")
            report(times)
        events = trace(models["smddp"], x, args.trace if dist.get_rank() == 0 else None)
        if dist.get_rank() == 0:
            report_overlap(events)
    dist.destroy_process_group()


def trace(model: nn.Module, x: torch.Tensor, path: Path | None) -> list[dict]:
    """The events of one step, as Chrome's trace format has them."""
    for _ in range(2):  # the first one pays for the profiler's own beginning
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss = model(x).square().mean()
            with record_function("backward"):
                loss.backward()
    with tempfile.TemporaryDirectory() as folder:
        path = path or Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def report_overlap(events: list[dict]) -> None:
    """How much of the time of all-reduces autograd computed in."""

    def spans(wanted) -> list[tuple[float, float]]:
        kept = [e for e in events if e.get("ph") == "X" and wanted(e["name"])]
        return sorted((e["ts"], e["ts"] + e["dur"]) for e in kept)

    reduces = spans(lambda name: name == "smddp:all_reduce")
    computing = spans(
        lambda name: name in ("aten::mm", "aten::threshold_backward", "aten::sum")
    )
    both = sum(
        max(0.0, min(end, e) - max(start, s)) for start, end in reduces for s, e in computing
    )
    total = sum(end - start for start, end in reduces)
    print(
        f"{len(reduces)} all-reduces of {total / 1e3:.1f} ms in all; in {both / total:.0%} of "
        "that time autograd computed"
    )


def report(times: dict[str, list[float]]) -> None:
    least = best_and_median(times[NOTHING])
    ours, theirs = (
        [a - b for a, b in zip(best_and_median(times[name]), least, strict=True)]
        for name in ("smddp", "gloo")
    )
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    print(f"\nabove {NOTHING}, smddp / gloo: best {ratios[0]:.2f}, median {ratios[1]:.2f}")


main()
