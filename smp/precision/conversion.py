"""Models in half precision (``bf16``, ``fp16``): their tensors, arguments and results.

The model's parameters and buffers become half; its arguments are cast on the way in, its
results back to float32 on the way out.  Gradients of half parameters add up in float32
(``grad_dtype``).
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from smp.marks import HAS_MASTER
from smp.modules.live_models import LiveModel
from smp.modules.remote_tensors import RemoteTensor
from smp.slicing.split_parameters import among_slices

if TYPE_CHECKING:
    from smp.job.config import Config

HALF = (torch.bfloat16, torch.float16)
WIDE = (torch.float32, torch.float64)


def dtype_of_models(cfg: "Config") -> torch.dtype | None:
    """The half dtype of all models; None: each model keeps its own."""
    return torch.bfloat16 if cfg.bf16 else torch.float16 if cfg.fp16 else None


def convert(module: nn.Module, cfg: "Config") -> None:
    """Make the floating parameters and buffers half; parameters stay the same objects.

    Integers, complex numbers and float8 stay.  ``fp16_params`` alone makes them float16; all
    else is the script's then.
    """
    dtype = dtype_of_models(cfg) or (torch.float16 if cfg.fp16_params else None)
    if dtype is None:
        return
    kinds = (*HALF, *WIDE)
    module._apply(lambda tensor: tensor.to(dtype) if tensor.dtype in kinds else tensor)


@among_slices
def accumulate_in_float32(model: LiveModel, cfg: "Config") -> None:
    """Have gradients of this rank's half parameters add up in float32, from now on.

    Copies of a parameter, and exchanges of the tensor behind it, lose this.
    """
    converted = dtype_of_models(cfg) is not None
    if not converted and not cfg._fp32_grad_accumulation:
        return
    for parameter in model.local_parameters():
        if parameter.dtype not in HALF or isinstance(parameter, RemoteTensor):
            continue
        if parameter.grad_dtype is not torch.float32:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = torch.float32
            if gradient is not None:
                parameter.grad = gradient.float()
        if converted:
            setattr(parameter, HAS_MASTER, True)
