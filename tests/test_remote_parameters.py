"""Spec: what may be asked of a parameter whose data another rank has, and what is an error."""

import io
import re

import pytest
import torch
from torch import nn

import smp
from tests.ranks import on_ranks


def partitioned() -> tuple[smp.DistributedModel, nn.Parameter]:
    """A model whose first step is over, and a matrix of it that this rank does not have."""
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    for rank, layer in enumerate(net):
        smp.set_partition(layer, rank)
    model = smp.DistributedModel(net)
    smp.step(lambda model, x: model(x))(model, torch.ones(2, 3))
    return model, net[1 - smp.pp_rank()].weight


NEEDS_DATA = {
    "norm": lambda p: p.norm(),
    "sum of data": lambda p: p.data.sum(),
    "norm of data": lambda p: p.data.norm(),
    "copy_": lambda p: p.data.copy_(torch.ones(p.shape)),
    "clamp_": lambda p: p.data.clamp_(0, 1),
    "into": lambda p: torch.ones(p.shape).copy_(p.data),
    "numpy": lambda p: p.data.numpy(),
    "data of data": lambda p: p.data.data.add_(1),
    "index": lambda p: p.data[0],
    "item": lambda p: p.data[0, 0].item(),
    "data_ptr": lambda p: p.data.data_ptr(),
    "T": lambda p: p.T,
    "mT": lambda p: p.data.mT,
    "H": lambda p: p.H,
    "real": lambda p: p.real,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.data.clone(),
    "by keyword": lambda p: torch.add(torch.ones(p.shape), other=p),
    "in a list in a list": lambda p: torch.block_diag(*[p, p]) + torch._foreach_norm([p])[0],
    "in an index": lambda p: torch.ones(3, 3)[[p.data]],
}


@on_ranks(2)
@pytest.mark.parametrize("name", NEEDS_DATA)
def test_what_needs_the_data_is_an_error_that_names_the_owner(name):
    _, parameter = partitioned()
    path, owner = f"{1 - smp.pp_rank()}.weight", 1 - smp.pp_rank()

    told = rf"needs the data of parameter '{path}' .* lives on pp_rank {owner}"
    with pytest.raises(RuntimeError, match=told):
        NEEDS_DATA[name](parameter)


@on_ranks(2)
def test_what_needs_no_data_is_answered():
    """... also by what scripts ask of ``p.data``; and printing tells where it is."""
    _, parameter = partitioned()
    owner = 1 - smp.pp_rank()
    like = nn.Linear(3, 2).weight if owner == 0 else nn.Linear(2, 3).weight

    for mine, its in ((parameter, like), (parameter.data, like.data)):
        assert mine.shape == its.shape and mine.numel() == its.numel()
        assert (mine.dtype, mine.device, mine.dim()) == (its.dtype, its.device, its.dim())
        assert mine.requires_grad == its.requires_grad
        assert mine.is_leaf and mine.grad is None
        assert isinstance(mine, nn.Parameter) == isinstance(its, nn.Parameter)
        assert re.fullmatch(
            rf"Remote\w+\('{owner}.weight', shape=\({its.size(0)}, {its.size(1)}\), "
            rf"pp_rank={owner}\)",
            repr(mine),
        )
    parameter.data = torch.ones(parameter.shape)  # of no effect here, as on load


@on_ranks(2)
@pytest.mark.parametrize("what", ["module", "parameter", "data"])
def test_it_is_not_pickled_without_its_data(what):
    model, parameter = partitioned()
    saved = {"module": model.module, "parameter": parameter, "data": parameter.data}[what]

    with pytest.raises(RuntimeError, match=r"save model.state_dict\(\).*smp.save_checkpoint"):
        torch.save(saved, io.BytesIO())
