"""Spec: what may be asked of a parameter whose data another rank has, and what is an error."""

import copy
import io
import re

import pytest
import torch
from torch import nn

import smp
from smp.modules.pins import PartitionError
from tests.models.partition import distributed
from tests.models.steps import model_outputs
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

    told = rf"needs the data of parameter '{path}' .* lives on pp_rank {owner}; outside "
    told += r"of steps .* loop over model\.local_named_parameters\(\)"
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


WIDTH = 6


class Changes(nn.Module):
    """Changes tensors of its children for their calls, from a microbatch on."""

    def __init__(self, change, begins: int) -> None:
        super().__init__()
        self.hyper, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.main = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)), Shifted())
        self.change, self.calls, self.begins = change, 0, begins

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        now = self.calls > self.begins
        x = torch.tanh(self.hyper(x))
        y = self.change(self.main, x) if now else self.main(x)
        return self.out(y + self.main(x))


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.shift


def _with(name: str, value=lambda x: x.mean(0), call=torch.func.functional_call):
    return lambda main, x: call(main, {name: value(x)}, (x,))


def _one_child(main, x):
    swapped = torch.func.functional_call(main[1], {"weight": x.t() @ x}, (main[0](x),))
    return main[2](swapped)


def _without_bias(main, x):
    bias, main[1].bias = main[1].bias, None
    y = main(x)
    main[1].bias = bias
    return y


def _without_entry(main, x):
    bias = main[1]._parameters.pop("bias")
    main[1].bias = None
    y = main(x)
    main[1].bias = bias
    return y


def _set_data(main, x):
    main[1].weight.data = torch.eye(WIDTH)
    return main(x)


def _set_and_write_data(main, x):
    _set_data(main, x)
    main[1].weight.data.mul_(2)
    return main(x)


CHANGES = {
    "a bias": (_with("1.bias"), "parameter 'main.1.bias' is replaced in a step"),
    "a weight": (
        _with("2.weight", lambda x: x.t() @ x),
        "parameter 'main.2.weight' is replaced in a step",
    ),
    "a buffer": (_with("2.shift"), "buffer 'main.2.shift' is replaced in a step"),
    "stateless": (
        _with("1.bias", call=nn.utils.stateless.functional_call),
        "parameter 'main.1.bias' is replaced in a step",
    ),
    "of one child": (_one_child, "parameter 'main.1.weight' is replaced in a step"),
    "taken out": (_without_bias, "parameter 'main.1.bias' is replaced in a step"),
    "no entry": (_without_entry, "parameter 'main.1.bias' is taken out in a step"),
    "data": (_set_data, "set of data needs the data of parameter 'main.1.weight'"),
    "data, in place": (_set_and_write_data, "set of data needs the data of parameter"),
}


def _compare(change, pins: dict[str, int], begins: int, **config) -> None:
    """Outputs and gradients of three steps with those of one process."""
    torch.set_default_dtype(torch.float64)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    torch.manual_seed(0)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        net = Changes(change, begins)
    with torch.no_grad():
        for parameter in net.parameters():  # alike on all ranks
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    plain = copy.deepcopy(net)
    model = distributed(net, pins)
    step = smp.step(model_outputs)
    for number in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        got, want = step(model, x).concat(), torch.cat([plain(part) for part in x.chunk(2)])
        want.square().mean().backward()
        torch.testing.assert_close(got, want.detach())
    whole = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in model.local_named_parameters():
        if parameter.shape == whole[name].shape:  # not split
            torch.testing.assert_close(parameter.grad, whole[name])


@on_ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_a_caller_that_changes_a_childs_tensors_is_on_its_rank(name):
    _compare(CHANGES[name][0], {"out": 1, "main.0": 1}, begins=0)


@on_ranks(2)
@pytest.mark.parametrize("begins", [0, 2], ids=["traced", "later"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_childs_tensors_elsewhere_is_refused_by_name(name, begins):
    """Where pins keep them apart; or the trace has not seen it."""
    change, told = CHANGES[name]
    if not begins and "data" not in name:
        told = r"the tensors of 'main\.\d', replaced by '' for a call"
    with pytest.raises((RuntimeError, PartitionError), match=told):
        _compare(change, {"": 0, "main": 1}, begins)


@on_ranks(4)
@pytest.mark.parametrize("name", ["a bias", "taken out"])
def test_a_caller_that_changes_a_split_childs_tensors(name):
    _compare(CHANGES[name][0], {"out": 1, "main.0": 1}, 0, tensor_parallel_degree=2)
