"""State that modules keep on themselves in a pipeline: each microbatch finds what it would in
one process, where microbatches run one after another."""

import copy
import random
import types

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import smp
from smp.modules import microbatch_attributes
from tests.models.partition import distributed
from tests.ranks import on_ranks

WIDTH = 6
MICROBATCHES = 4


class Block(nn.Module):
    """Keeps something over a call of another rank's module; its kinds are below."""

    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Tmp(Block):
    def forward(self, x):
        self.tmp = x * 2
        return torch.tanh(self.far(x)) + self.tmp


class Deleted(Block):
    def forward(self, x):
        self.tmp = x * 2
        y = self.far(x) + self.tmp
        del self.tmp
        return y


class Counter(Block):
    calls = 0

    def forward(self, x):
        self.calls = self.calls + 1
        return self.far(x) * self.calls


class RunningMean(Block):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return self.far(x) - self.mean


class InPlace(Block):
    def __init__(self):
        super().__init__()
        self.total = torch.zeros(WIDTH)

    def forward(self, x):
        self.total += x.detach().mean(0)
        return self.far(x) - self.total


class Log(Block):
    def __init__(self):
        super().__init__()
        self.log = []

    def forward(self, x):
        self.log.append(float(x.detach().sum()))
        return self.far(x) + sum(self.log)


class LogOfChild(Block):
    """Its child, on its own rank, does not touch the list."""

    def __init__(self):
        super().__init__()
        self.near.log = []

    def forward(self, x):
        y = self.far(self.near(x))
        self.near.log.append(float(x.detach().sum()))
        return self.far(y) + sum(self.near.log)


class Flag(Block):
    scale = 1.0

    def forward(self, x):
        self.scale = 1 + float(x[0, 0].detach())
        y = self.far(x) * self.scale
        self.scale = 1.0
        return y


class Mode(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (0.5 if self.training else 2)


class Modes(Block):
    def __init__(self):
        super().__init__()
        self.near = Mode(WIDTH, WIDTH)

    def forward(self, x):
        y = self.near(self.far(x))
        self.near.eval()
        z = self.near(self.far(y))
        self.near.train()
        return self.near(self.far(z))


class Once(Block):
    table = None

    def forward(self, x):
        if self.table is None:
            self.table = x.detach().sum(0)
        return self.far(x) + self.table


class Aux(nn.Linear):
    def forward(self, x):
        self.aux = x.square().mean()
        return super().forward(x)


class AuxOfChild(Block):
    def __init__(self):
        super().__init__()
        self.near = Aux(WIDTH, WIDTH)

    def forward(self, x):
        return self.far(self.near(x)) + self.near.aux


class Scaled(nn.Linear):
    def forward(self, weight):
        return torch.tanh(super().forward(weight))


class Cached(Block):
    """The parametrized weight has one graph and one value in the block of each microbatch."""

    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.near, "weight", Scaled(WIDTH, WIDTH))

    def forward(self, x):
        with parametrize.cached():
            return self.near(self.far(self.near(x)))


class Dice(Block):
    """Draws over a call of another rank's module, with a generator of its own."""

    def forward(self, x):
        first = self.draw()
        return self.far(x) * first + self.draw()


class PythonDice(Dice):
    def __init__(self):
        super().__init__()
        self._dice = random.Random(3)

    def draw(self):
        return self._dice.random()


class NumPyDice(Dice):
    def __init__(self):
        super().__init__()
        self._dice = [np.random.default_rng(3), np.random.RandomState(3)]

    def draw(self):
        return self._dice[0].random() + self._dice[1].rand()


class TorchDice(Dice):
    def __init__(self):
        super().__init__()
        self._dice = torch.Generator()

    def draw(self):
        return torch.rand((), generator=self._dice)


class Functional(Block):
    """For the call, the module has other tensors in its parameters' places."""

    def __init__(self):
        super().__init__()
        self.both = nn.Sequential(self.near, self.far)

    def forward(self, x):
        scaled = {"0.weight": self.near.weight * x.detach().mean()}
        return torch.func.functional_call(self.both, scaled, (x,)) + self.near(x)


class Momentum(Block):
    """Each forward moves parameters towards others."""

    def __init__(self):
        super().__init__()
        self.moving = copy.deepcopy(self.near).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.near.parameters(), self.moving.parameters(), strict=True):
                q.data.mul_(0.5).add_(p.data, alpha=float(x[0, 0].detach()))
        return self.far(self.near(x)) - self.moving(x)


class Adds(nn.Linear):
    def __init__(self, total):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("total", total)

    def forward(self, x):
        self.total += x.detach().mean(0)
        return super().forward(x)


class Reads(Adds):
    def forward(self, x):
        return nn.Linear.forward(self, x) - self.total


class BufferOfTwo(Block):
    def __init__(self):
        super().__init__()
        total = torch.zeros(WIDTH)
        self.near, self.other = Adds(total), Reads(total)

    def forward(self, x):
        return self.other(self.far(self.near(x)))


class BufferOfChild(Block):
    def __init__(self):
        super().__init__()
        self.near = Adds(torch.zeros(WIDTH))

    def forward(self, x):
        return self.far(self.near(x)) - self.near.total


class Hooked(Block):
    """What a hook keeps is the script's, not a module's."""

    def __init__(self):
        super().__init__()
        store = {}
        self.near.register_forward_hook(lambda module, args, out: store.update(out=out))
        self.read = lambda: store["out"]

    def forward(self, x):
        return self.far(self.near(x)) + self.read()


class Extractor:
    def keep(self, module, args, out):
        self.out = out

    def read(self):
        return self.out


class HookedByMethod(Block):
    def __init__(self):
        super().__init__()
        extractor = Extractor()
        self.far.register_forward_hook(extractor.keep)
        self.read = extractor.read

    def forward(self, x):
        return self.far(self.near(self.far(x))) + self.read()


class MayBeLate(Block):
    late = False


class Late(MayBeLate):
    """Sets what the traced microbatch did not."""

    def forward(self, x):
        if self.late:
            self.tmp = x * 2
        y = torch.tanh(self.far(x))
        return y + self.tmp if self.late else y


class LateByMethod(MayBeLate):
    note = 0.0

    def put(self, note):
        self.note = note

    def forward(self, x):
        if self.late:
            self.put(x.square().mean())
        return self.far(self.far(x)) + self.note


class LateOfChild(MayBeLate):
    """Its child calls nobody."""

    def __init__(self):
        super().__init__()
        self.near.note = 0.0

    def forward(self, x):
        if self.late:
            self.near.note = x.square().mean()
        return self.far(self.near(x)) + self.near.note


class LateAux(nn.Linear):
    late, aux = False, 0.0

    def forward(self, x):
        if self.late:
            self.aux = x.square().mean()
        return super().forward(x)


class LateInChild(MayBeLate):
    def __init__(self):
        super().__init__()
        self.near = LateAux(WIDTH, WIDTH)

    def forward(self, x):
        self.near.late = self.late
        return self.far(self.near(x)) + self.near.aux


KINDS = [
    Tmp,
    Deleted,
    Counter,
    RunningMean,
    InPlace,
    Log,
    LogOfChild,
    Flag,
    Modes,
    Once,
    AuxOfChild,
    Cached,
    PythonDice,
    NumPyDice,
    TorchDice,
    Functional,
    Momentum,
    BufferOfTwo,
    BufferOfChild,
    Hooked,
    HookedByMethod,
    Late,
    LateByMethod,
    LateOfChild,
    LateInChild,
]


def state_of(net: nn.Module) -> dict:
    """Plain attributes and buffers, by path."""
    return {
        f"{path}.{name}": value
        for path, module in net.named_modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if name[0] != "_" and name != "training" and not callable(value)
    }


def assert_equal_state(got: dict, want: dict, paths: list[str]) -> None:
    for name, value in want.items():
        if name.rpartition(".")[0] in paths:
            equal = torch.allclose if isinstance(value, Tensor) else type(value).__eq__
            assert equal(got[name], value), (name, got[name], value)


def train_and_evaluate(kind: type[Block], trains: bool, pins: dict[str, int], **config) -> None:
    torch.set_default_dtype(torch.float64)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, **config})
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        net = nn.Sequential(kind(), kind())
    with torch.no_grad():
        for parameter in net.parameters():  # alike on all ranks, and with a plain class
            parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view_as(parameter))
    plain = copy.deepcopy(net)
    model = distributed(net, pins)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    model.train(trains)
    plain.train(trains)

    def forward(model, x):
        y = model(x)
        if torch.is_grad_enabled():
            loss = y.square().mean()
            model.backward(loss) if model is not plain else (loss / MICROBATCHES).backward()
        return y.detach()

    step = smp.step(forward)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2 * MICROBATCHES, WIDTH, generator=generator)
        for block in (*net, *plain):
            if isinstance(block, MayBeLate):
                block.late = number > 0
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        with torch.set_grad_enabled(trains):
            got = step(model, x).concat()
            want = torch.cat([forward(plain, part) for part in x.chunk(MICROBATCHES)])
        torch.testing.assert_close(got, want)
        here = [path for path, one in net.named_modules() if one in set(model.local_modules())]
        assert_equal_state(state_of(net), state_of(plain), here)
        optimizer.step()
        plain_optimizer.step()


@pytest.mark.parametrize("trains", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@on_ranks(2)
def test_over_a_call_of_another_rank(kind, trains):
    train_and_evaluate(kind, trains, {"": 0, "0.far": 1, "1.far": 1})


@pytest.mark.parametrize(
    "kind", [Tmp, Counter, Log, Functional], ids=lambda kind: kind.__name__
)
@on_ranks(4)
def test_over_a_call_of_a_split_child(kind):
    pins = {"": 0, "1": 1}
    train_and_evaluate(kind, True, pins, tensor_parallel_degree=2, prescaled_batch=True)


class LateCounter(MayBeLate):
    calls = 0

    def forward(self, x):
        calls = self.calls if self.late else 1
        y = self.far(x) * calls
        if self.late:
            self.calls = calls + 1
        return y


@on_ranks(2)
def test_what_microbatches_leave_to_one_another_in_a_branch_not_traced_is_refused():
    """Where one has read it that runs ahead; else it is as in one process."""
    with pytest.raises(RuntimeError, match="'0.calls' on pp_rank 0 is set in microbatch 0"):
        train_and_evaluate(LateCounter, True, {"": 0, "0.far": 1, "1.far": 1})


def of_a_step(module, x, model, store):
    kept = []
    handle = module.register_forward_hook(lambda module, args, out: kept.append(out))
    y = model(x)
    handle.remove()
    return y + kept[0]


def of_a_step_and_its_backward(module, x, model, store):
    kept = []
    module.register_forward_hook(lambda module, args, out: kept.append(out))
    return model(x) + kept[0] - kept[-1]


def of_a_step_for_all(module, x, model, store):
    handle = module.register_forward_hook(lambda module, args, out: store.update(out=out))
    y = model(x)
    handle.remove()
    return y + store["out"]


def of_the_script(module, x, model, store):
    y = model(x)
    return y + store["out"] if module._forward_hooks else y


def on_the_module(module, x, model, store):
    y = model(x)
    return y + module.kept if module._forward_hooks else y


@pytest.mark.parametrize(
    "read",
    [of_a_step, of_a_step_and_its_backward, of_a_step_for_all, of_the_script, on_the_module],
)
@pytest.mark.parametrize("where", ["near", "far"])
@on_ranks(2)
def test_hooks_that_are_registered_after_the_first_step(where, read):
    """Microbatches read what their own calls have kept."""
    torch.set_default_dtype(torch.float64)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES})
    torch.manual_seed(0)
    net = LateOfChild()
    plain = copy.deepcopy(net)
    model = distributed(net, {"": 0, "far": 1})
    stores: dict = {net: {}, plain: {}}

    def forward(model, x):
        inner = plain if model is plain else net
        y = read(inner.get_submodule(where), x, model, stores[inner])
        loss = y.square().mean()
        model.backward(loss) if model is not plain else (loss / MICROBATCHES).backward()
        return y.detach()

    step = smp.step(forward)
    for number in range(3):
        x = torch.randn(2 * MICROBATCHES, WIDTH)
        if number == 1:
            for one, store in stores.items():
                hook = {
                    of_the_script: lambda m, args, out, store=store: store.update(out=out),
                    on_the_module: lambda m, args, out: setattr(m, "kept", out),
                }.get(read)
                if hook is not None:
                    one.get_submodule(where).register_forward_hook(hook)
        got = step(model, x).concat()
        want = torch.cat([forward(plain, part) for part in x.chunk(MICROBATCHES)])
        if smp.pp_rank() == 0:  # all ranks have drawn the same
            torch.testing.assert_close(got, want)


@on_ranks(2)
def test_a_hook_that_would_not_run_is_refused_in_a_step():
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(Tmp())
    model = distributed(net, {"0": 1})
    for module, register in ((net[0].near, "forward_hook"), (net[0], "forward_pre_hook")):

        def forward(model, x, module=module, register=register):
            getattr(module, f"register_{register}")(lambda *args: None)
            return model(x)

        with pytest.raises(RuntimeError, match=r"a hook of module '0.* would not run: reg"):
            smp.step(forward)(model, torch.ones(4, WIDTH))


def test_an_attribute_is_each_microbatchs_own_until_the_step_is_over(monkeypatch):
    """... where none leaves it to the next; its class may have another value."""
    at: dict = {"microbatch": None}
    core = types.SimpleNamespace(
        current=lambda: at["microbatch"],
        await_turn=lambda gate: None,
        in_backward=lambda: False,
    )
    monkeypatch.setattr(microbatch_attributes, "_core", core)
    module = Counter()
    microbatch_attributes.watch(module, {"calls": microbatch_attributes.Kept(7)})

    for at["microbatch"] in (0, 2):
        module.calls = at["microbatch"]
    assert module.calls == 2
    at["microbatch"] = 1
    assert module.calls == 0  # those of the microbatch before it
    del module.calls
    assert module.calls == 0  # its class's
    module.calls = "own"
    with pytest.raises(
        RuntimeError, match="calls' on pp_rank 0 is set in microbatch 0, after "
    ):
        at["microbatch"] = 0
        module.calls = 5
    at["microbatch"] = None
    for went_well, last in ((False, 0), (True, 3)):
        at["microbatch"] = 3
        module.calls = 3
        at["microbatch"] = None
        microbatch_attributes.finish(went_well)
        assert module.calls == last
