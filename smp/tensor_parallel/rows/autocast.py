"""Whether autocast is on, also for meta tensors: a model may be traced on these."""

import torch
from torch import Tensor


def is_on(device: torch.device) -> bool:
    """Whether autocast is on for tensors there; of meta tensors it casts none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def computed_in(x: Tensor) -> torch.dtype:
    """The dtype of a linear's result: autocast's, while on."""
    if is_on(x.device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
