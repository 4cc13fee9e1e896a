"""Spec: what may be asked of a parameter whose data another rank has, and what is an error."""

import io
import re

import pytest
import torch
from torch import nn

import smp
from tests.models.partition import distributed
from tests.ranks import on_ranks


def partitioned() -> tuple[smp.DistributedModel, nn.Parameter]:
    """A model whose first step is over, and a matrix of it that this rank does not have."""
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    model = distributed(net, range(len(net)))
    smp.step(lambda model, x: model(x))(model, torch.ones(2, 3))
    return model, net[1 - smp.pp_rank()].weight


def _twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def _without_functions(parameter: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.sum()


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
    "out": lambda p: torch.add(torch.ones(p.shape), torch.ones(p.shape), out=p.data),
    "in a list in a list": lambda p: torch.block_diag(*[p, p]) + torch._foreach_norm([p])[0],
    "in an index": lambda p: torch.ones(3, 3)[[p.data]],
    # Torch does not ask a class about these before it computes.
    "tensor": lambda p: torch.tensor(p),
    "tensor of data": lambda p: torch.tensor(p.data),
    "as_tensor": lambda p: torch.as_tensor(p, dtype=torch.float64),
    "asarray": lambda p: torch.asarray(p, dtype=torch.float64),
    "in a tensor": lambda p: torch.tensor([p[0, 0]]),
    "vmap": lambda p: torch.vmap(lambda row: 2 * row)(p),
    "as_subclass": lambda p: p.as_subclass(torch.Tensor).sum(),
    "_make_subclass": lambda p: torch.Tensor._make_subclass(torch.Tensor, p).sum(),
    "parameter": lambda p: nn.Parameter(p),
    "functional_call": lambda p: torch.func.functional_call(
        nn.Linear(*p.shape[::-1], bias=False), {"weight": p}, torch.ones(p.size(1))
    ),
    "trace": lambda p: torch.jit.trace(lambda x: x + p, torch.ones(p.shape)),
    "without functions": _without_functions,
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
def test_a_load_lets_nobody_copy_into_it_later():
    model, parameter = partitioned()
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="needs the data of parameter"):
        parameter.data.copy_(torch.ones(parameter.shape))


@on_ranks(2)
def test_a_scripted_function_of_it_is_an_error():
    """... without a word of ours: TorchScript keeps no message."""
    _, parameter = partitioned()
    with pytest.raises(RuntimeError, match="TorchScript"):
        torch.jit.script(_twice)(parameter)


@on_ranks(2)
def test_what_a_script_has_kept_of_it_stays_as_it_was():
    """A state dict from before the partition, and views."""
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    for rank, layer in enumerate(net):
        smp.set_partition(layer, rank)
    before, views = net.state_dict(), [p.data.view(-1) for p in net.parameters()]
    wanted = [p.data.view(-1).clone() for p in net.parameters()]
    model = smp.DistributedModel(net)
    smp.step(lambda model, x: model(x))(model, torch.ones(2, 3))

    for kept, view, value in zip(before.values(), views, wanted, strict=True):
        assert torch.equal(view, value) and torch.equal(kept.view(-1), value)


@on_ranks(2)
def test_after_a_first_step_in_inference_mode_it_can_be_trained():
    with torch.inference_mode():
        _, parameter = partitioned()
    parameter.requires_grad_(False)
    parameter.requires_grad_(True)
    assert parameter.requires_grad


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
