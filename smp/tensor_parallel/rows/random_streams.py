"""Random numbers of ranks with the same batch (``prescaled_batch``).

Outside of regions the ranks of a TP_GROUP work on the same values, so tp_rank 0's stream of
random numbers is common.  Inside of one each has other heads or channels, and a stream of its
own from the state of the common one.  The common one goes on alike, for any number of draws by
each.
"""

import torch
from torch import Tensor

from smp import _core, ranks
from smp.collectives.torch_process_groups import device_of_numbers
from smp.pytorch import accelerator
from smp.tensor_parallel import group
from smp.tensor_parallel.backward import step_end


def are_common() -> bool:
    """Whether the tp_ranks draw the same numbers outside of regions."""
    return group.size() > 1 and group.same_samples() and not group.is_traced()


def share() -> None:
    """Go on with tp_rank 0's stream.  Collective over the TP_GROUP where it is common."""
    if are_common():
        for generator in accelerator.generators():
            generator.set_state(_of_tp_rank_0(generator.get_state()))


def shared_seed(seed: int) -> int:
    """tp_rank 0's.  Collective over the TP_GROUP where the streams are common."""
    if not are_common():
        return seed
    return int(_of_tp_rank_0(torch.tensor(seed, dtype=torch.int64, device="cpu")))


def fork() -> accelerator.RandomState | None:
    """Draw from a stream of this tp_rank's own from now on.

    Returns:
        the common stream, to be restored; None: there is none.
    """
    if not are_common():
        return None
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    common = accelerator.RandomState()
    for generator in accelerator.generators():
        generator.manual_seed(_core.mix(seed, group.rank()))
    return common


def _of_tp_rank_0(value: Tensor) -> Tensor:
    sent = value.to(device_of_numbers(ranks.get_tp_process_group()))
    try:
        group.broadcast(sent)
    except Exception as error:
        step_end.hear("the random numbers of a step", error)
        raise
    return sent.cpu()
