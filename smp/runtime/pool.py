"""Each rank's memory for messages, expected from the trace.

The tensors sent with a call stay in the sender's pool as long as the receiver keeps them for
its backward.  So forward tensors count once for each microbatch under way.  Gradients are used
up at once.
"""

from collections.abc import Mapping

from torch import nn

from smp.partitioning.tracing import Trace


def expected_bytes(
    root: nn.Module, rank_of: Mapping[str, int], trace: Trace, degree: int, active: int
) -> list[int]:
    """The most bytes in each rank's pool, by pp_rank.

    Args:
        rank_of: pp_rank of each module, by path.
        trace: of ``root``, on one microbatch.
        degree: number of ranks.
        active: microbatches under way at a time.

    Returns:
        an estimate: a module called by others than its parent counts as called
        by its parent, and values other than tensors do not count.
    """
    kept, passing = [0] * degree, [0] * degree
    for path, module in root.named_modules():
        for name, child in module._modules.items():
            child_path = f"{path}.{name}" if path else name
            owner = rank_of.get(child_path)  # a shared module counts at its first path
            if child is None or owner is None or owner == rank_of[path]:
                continue
            record, caller = trace.modules[child_path], rank_of[path]
            goes_in, comes_out = _ends_of_a_run(module, name, path, rank_of)
            given = record.input_bytes * record.executions * goes_in
            returned = record.output_bytes * record.executions * comes_out
            kept[caller] += given
            kept[owner] += returned
            passing[owner] += given  # their gradients, on the way back
            passing[caller] += returned
    return [k * active + p for k, p in zip(kept, passing, strict=True)]


def _ends_of_a_run(
    parent: nn.Module, name: str, path: str, rank_of: Mapping[str, int]
) -> tuple[bool, bool]:
    """Whether the arguments and the result of this child cross; an ``nn.Sequential``
    sends consecutive children of one rank a single request."""
    if not isinstance(parent, nn.Sequential):
        return True, True
    ranks = [rank_of.get(f"{path}.{n}" if path else n) for n in parent._modules]
    at = list(parent._modules).index(name)
    return (
        at == 0 or ranks[at - 1] != ranks[at],
        at + 1 == len(ranks) or ranks[at + 1] != ranks[at],
    )
