"""Linears of a region with slices of their weights, in the user's own class.

The first ones are cut by their outputs: each tp_rank computes some of the channels (or heads)
for all samples.  The last one is cut by its inputs.  The sum over the tp_ranks goes back to
each sample's own rank, and the whole bias is added there.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smp.marks import CHOSEN_OUTPUTS, HELD, PATH, REFUSES_COPIES, set_class
from smp.modules import delayed_init
from smp.modules.stand_ins import stand_in
from smp.pytorch.compiled_code import not_traced
from smp.slicing import split_parameters
from smp.slicing.slices import Slices, mark, refuse_copies, slices_of
from smp.tensor_parallel import group, primitives, script_uses
from smp.tensor_parallel.rows import adapters
from smp.tensor_parallel.rows.regions import draw_alike, give_back, rows_to_give_back


class TooShort(ValueError):
    """A tp_rank would hold nothing of a parameter."""


def is_transposed(linear: nn.Module) -> bool:
    """Whether the weight is ``[in, out]``, as in transformers' Conv1D."""
    return not isinstance(linear, nn.Linear)


def keep_slice(module: nn.Module, name: str, slices: Slices | None) -> None:
    """Have a parameter be this tp_rank's slice of tp_rank 0's, seeing all samples.

    The parameter stays the same object, for an optimizer with it.  Collective over the
    TP_GROUP.

    Args:
        slices: None: every tp_rank keeps all of it.

    Raises:
        TooShort: a tp_rank would hold nothing.
    """
    parameter = module.get_parameter(name)
    if slices is not None and slices_of(parameter) == slices:
        return  # tied, and cut with the other module
    if slices is not None:
        if not all(slices.local_size(rank) for rank in range(group.size())):
            raise TooShort(
                f"smp: '{name}' of {type(module).__name__} has shape {list(parameter.shape)}, "
                f"and axis {slices.axis} is too short to be split over "
                f"tensor_parallel_degree={group.size()} ranks"
            )
        own = functools.partial(group.own_slice, slices)
        with torch.no_grad():
            parameter.data = delayed_init.applied(own, parameter.data)
        module.__dict__.setdefault(HELD, {})[name] = slices
        if not hasattr(module, REFUSES_COPIES):
            set_class(module, stand_in(type(module), _holds_slices))
    mark(parameter, slices, scaled_batch=True)


def _holds_slices(cls: type[nn.Module]) -> dict[str, Any]:
    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return cls.forward(self, *args, **kwargs)
        with split_parameters.own_call(self):
            return script_uses.called_with_slices(self, cls.forward, args, kwargs)

    return {"forward": forward, REFUSES_COPIES: refuse_copies}


def cut_weights(module: Any, slices: Slices, cut_bias: bool = False) -> None:
    """Keep this tp_rank's slice of a module's weight, and of a bias with the same cut."""
    keep_slice(module, "weight", slices)
    if cut_bias and module.bias is not None:
        keep_slice(module, "bias", slices._replace(axis=0))


def cut_outputs(linear: Any, unit: int = 1, blocks: int = 1) -> None:
    """Keep this tp_rank's output channels.

    Args:
        linear: an ``nn.Linear`` or a Conv1D of transformers.
        unit: channels to keep together: the size of a head.
        blocks: parts of the output, each cut by itself (3 for q|k|v).
    """
    if (parts := adapters.adapted(linear)) is not None:
        for one in (parts.base, *parts.ups):
            cut_outputs(one, unit, blocks)
        _compute_for_cut_outputs(parts.downs)
        return
    axis = 1 if is_transposed(linear) else 0
    size = linear.weight.size(axis)
    slices = Slices.even(axis, size, group.size(), unit, blocks)
    cut_weights(linear, slices, cut_bias=True)
    setattr(
        linear,
        "nf" if is_transposed(linear) else "out_features",
        slices.local_size(group.rank()),
    )


def cut_inputs(linear: Any, path: str, unit: int = 1) -> int:
    """Keep this tp_rank's input channels; the sum goes back to the samples' own ranks.

    Args:
        linear: an ``nn.Linear`` or a Conv1D of transformers.
        path: of the linear, for errors.
        unit: channels to keep together: the size of a head.

    Returns:
        the number of channels kept by this tp_rank.
    """
    if (parts := adapters.adapted(linear)) is not None:
        own = cut_inputs(parts.base, path, unit)
        for down in parts.downs:
            keep_slice(down, "weight", Slices.even(1, down.in_features, group.size(), unit))
            down.in_features = own
        for up in parts.ups:  # of a part of the sum, like the base
            _lead_out(up, path)
        return own
    axis = 0 if is_transposed(linear) else 1
    size = linear.weight.size(axis)
    slices = Slices.even(axis, size, group.size(), unit)
    keep_slice(linear, "weight", slices)
    own = slices.local_size(group.rank())
    setattr(linear, "nx" if is_transposed(linear) else "in_features", own)
    _lead_out(linear, path)
    return own


def _lead_out(linear: nn.Module, path: str) -> None:
    linear.__dict__[PATH] = path
    set_class(linear, stand_in(type(linear), _leads_out))


def choose_outputs(linear: Any, unit: int, chosen: list[int]) -> None:
    """Compute some output channels of a linear with whole weights.

    A tp_rank's gradient is the part from its own outputs, and the sum over the TP_GROUP is the
    whole one.  So the parameters are like those with own samples: their gradients are summed
    over the DP_GROUP.

    Args:
        linear: an ``nn.Linear`` in a region.
        unit: channels to keep together: the size of a head.
        chosen: the units, in this order; one may come more than once.
    """
    if (parts := adapters.adapted(linear)) is not None:
        for one in (parts.base, *parts.ups):
            choose_outputs(one, unit, chosen)
        _compute_for_cut_outputs(parts.downs)
        return
    linear.__dict__[CHOSEN_OUTPUTS] = unit, chosen
    set_class(linear, stand_in(type(linear), _computes_some))


def _compute_for_cut_outputs(linears: list[Any]) -> None:
    """Whole linears with outputs for this tp_rank's channels alone."""
    for linear in linears:
        choose_outputs(linear, linear.out_features, [0])


_not_traced = not_traced("a linear that smp splits over the TP_GROUP")


def _computes_some(cls: type[nn.Module]) -> dict[str, Any]:
    def some(self: Any, whole: Tensor) -> Tensor:
        unit, chosen = self.__dict__[CHOSEN_OUTPUTS]
        if group.same_samples():
            # Gradients are averaged there, but each rank has a part of the sum.
            whole = primitives.bwd_allreduce_for_tp(whole)
        return torch.cat([whole.narrow(0, i * unit, unit) for i in chosen])

    @_not_traced
    @functools.wraps(cls.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        bias = None if self.bias is None else some(self, self.bias)
        return F.linear(x, some(self, self.weight), bias)

    return {"forward": forward}


def _leads_out(cls: type[nn.Module]) -> dict[str, Any]:
    @_not_traced
    @functools.wraps(cls.forward)
    def forward(self: Any, x: Tensor) -> Tensor:
        rows = rows_to_give_back(self.__dict__[PATH])
        weight = self.weight.t() if is_transposed(self) else self.weight
        if slices_of(self.weight) is None and group.same_samples():
            # As for chosen outputs: a tp_rank has a part of the gradient.
            weight = primitives.bwd_allreduce_for_tp(weight)
        y = give_back(F.linear(x, weight), rows)
        draw_alike()
        return y if self.bias is None else y + self.bias.to(y.dtype)  # under autocast

    return {"forward": forward}
