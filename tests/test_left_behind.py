"""What cannot go along with a call of a module of another rank is said once, with the
module's path."""

import contextvars
import random
import re
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import smp
from smp.pytorch import call_warnings
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks

variable: contextvars.ContextVar = contextvars.ContextVar("of_the_model")
variables = [contextvars.ContextVar("in_a_list")]  # of no name that leads to it


class Counting(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    pass


def saved():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


class Set:
    def __init__(self, value, variable=variable):
        self.value, self.variable = value, variable

    def __enter__(self):
        self.token = self.variable.set(self.value)

    def __exit__(self, *exception):
        self.variable.reset(self.token)


def counting_flops():
    return FlopCounterMode(display=False)


class Rolling:
    def __init__(self, roll):
        self.roll = roll

    def __enter__(self):
        self.roll()

    def __exit__(self, *exception):
        pass


def rolling():
    return Rolling(random.random)


def rolling_numpys():
    return Rolling(np.random.rand)


def three():
    return Set(3)


def a_list():
    return Set([])


def a_list_that_no_rank_finds():
    return Set([], variables[0])


def of_torch():
    return torch._dynamo.config.patch(cache_size_limit=9)


class OfDtype:
    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exception):
        torch.set_default_dtype(torch.float32)


def on_cpu():
    return torch.device("cpu")


def in_autocast():
    return torch.autocast("cpu")


def tagged(x):
    return x.as_subclass(Tagged)


def noted(x):
    x = x * 1
    x.note = "mine"
    return x


@module_of(lambda: {"linear": nn.Linear(3, 3), "does": ""})
def Far(self, x):
    if self.does == "hook":
        x.register_hook(lambda gradient: gradient)
    y = torch.tanh(self.linear(x))
    if self.does == "result":
        y.note = "mine"
    if self.does == "hooked result":
        y.register_hook(lambda gradient: gradient)
    if self.does == "no grad":
        torch.set_grad_enabled(False)
    return y


@module_of(
    lambda: {"near": nn.Linear(3, 3), "far": Far(), "around": nullcontext, "give": lambda x: x}
)
def Net(self, x):
    x = self.give(self.near(x))
    with self.around():
        return self.far(x).sum() + x.sum()


def said(net, around_step=nullcontext):
    """The warnings of three steps, on this rank."""
    model = distributed(net, {"": 0, "far": 1})

    @smp.step
    def step(model, x):
        loss = model(x)
        model.backward(loss)
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with around_step():
                step(model, torch.ones(4, 3))
    return [str(w.message) for w in caught if str(w.message).startswith("smp: ")]


@on_ranks(2)
@pytest.mark.parametrize(
    ("around", "says"),
    [
        (Counting, "Counting is active around module 'far'"),
        (Dispatching, "Dispatching is active around module 'far'"),
        (counting_flops, "FlopCounterMode is active around"),
        (saved, "saved_tensors_hooks is active around module 'far'"),
        (parametrize.cached, r"parametrize.cached\(\) is active around module 'far'"),
        (OfDtype, r"torch.set_default_dtype\(torch.float64\) is active around module 'far'"),
        (rolling, "draws random numbers from 'random'"),
        (rolling_numpys, "draws random numbers from 'numpy.random'"),
        (three, "context variable 'of_the_model'.*module 'far'"),
        (a_list_that_no_rank_finds, "context variable 'in_a_list' is no global of a module"),
    ],
)
def test_what_is_around_a_remote_call_is_named(around, says):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    net.around = around
    weight_norm(net.far.linear)
    found = said(net)
    if smp.pp_rank() == 0:
        (text,) = found
        assert re.search(says, text)
    else:
        assert found == []


@on_ranks(2)
@pytest.mark.parametrize("around", [Counting, Dispatching, saved, parametrize.cached])
def test_what_is_around_a_step_is_named(around):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    (text,) = said(Net(), around)
    assert "is active around step function" in text and "said.<locals>.step" in text


@on_ranks(2)
@pytest.mark.parametrize("around", [on_cpu, a_list, in_autocast, of_torch])
def test_what_goes_along_is_not(around):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    net.around = around
    smp.set_activation_checkpointing(net)
    net.far.linear.bias.note = "a parameter's, which does not cross"
    assert said(net) == []


@on_ranks(2)
@pytest.mark.parametrize(
    ("give", "does", "rank", "says"),
    [
        (tagged, "", 0, "a Tagged crosses ranks .* module 'far'"),
        (noted, "", 0, "a call of module 'far', and its attribute 'note' stays behind"),
        (None, "result", 1, "a call of module 'far', and its attribute 'note' stays behind"),
        (None, "hook", 1, "module 'far' calls register_hook on an argument"),
        (None, "hooked result", 1, "module 'far' calls register_hook on a tensor that it ret"),
    ],
)
def test_what_a_tensor_leaves_behind_is_named(give, does, rank, says):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    net.far.does = does
    net.give = give or net.give
    found = said(net)
    if smp.pp_rank() == rank:
        (text,) = found
        assert re.search(says, text)
    else:
        assert found == []


@on_ranks(2)
def test_a_gradient_mode_that_a_module_leaves_is_an_error():
    """... and none of the next call's."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Net()
    model = distributed(net, {"": 0, "far": 1})

    @smp.step
    def step(model, x):
        model.backward(model(x))

    def gradients():
        model.zero_grad()
        step(model, torch.ones(4, 3))
        return [p.grad.clone() for p in model.local_parameters()]

    want = gradients()
    net.far.does = "no grad"
    with pytest.raises(RuntimeError, match="module 'far' has left torch's gradient mode off"):
        gradients()
    net.far.does = ""
    assert all(map(torch.equal, gradients(), want))


def words(*paths):
    """What is said in calls of the modules."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for path in paths:
            call_warnings.warn_of_tensor(path, tagged(torch.ones(1)))
            call_warnings.warn_of_tensor(path, noted(torch.ones(1)))
            call_warnings.warn_of_attribute(path, "count", f"count of {path}")
            call_warnings.warn_of_attribute(path, "sum", f"sum of {path}")
            call_warnings.warn_of_hook(path, returned=False)
            call_warnings.warn_of_hook(path, returned=True)
            call_warnings.warn_of_variable(path, "mine")
    return [str(w.message) for w in caught]


def test_what_stays_behind_is_said_once_for_each_module_and_a_variable_once_in_a_job():
    call_warnings.forget()
    first = words("near", "far", "near")

    assert [re.findall("near|far", text) for text in first] == [["near"]] * 7 + [["far"]] * 6
    assert "a Tagged crosses" in first[7] and "attribute 'note'" in first[8]
    assert first[9:11] == ["smp: count of far", "smp: sum of far"]
    assert "on an argument that came" in first[11] and "on a tensor that it" in first[12]
    assert words("near", "far") == []
    call_warnings.forget()  # as smp.init does
    assert words("near", "far") == first
    call_warnings.forget()


def test_what_torch_itself_notes_on_a_tensor_is_not_spoken_of():
    buffer = nn.Buffer(torch.ones(1))
    assert "persistent" in vars(buffer)
    buffer._private = 1  # nor what looks like a library's own
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call_warnings.warn_of_tensor("far", buffer)
