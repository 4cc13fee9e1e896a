"""Spec: smp/partitioning/tracing.py, smp/pytorch/restore.py; paper, C.1."""

import collections
import copy
import random
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from smp.partitioning.tracing import trace
from tests.models.modules import module_of
from tests.test_tracing_forms import assert_same, run_of


@module_of(
    lambda: {
        "second": nn.Linear(8, 8),
        "first": nn.Linear(8, 8),
        "never": nn.Linear(8, 8),
        "act": nn.ReLU(),
    }
)
def Net(self, x):
    """Two layers called out of order, one of them twice, one never."""
    return self.second(self.act(self.second(self.first(x))))


def test_order_and_number_of_executions_are_those_of_the_run():
    net = Net()
    modules = trace(net, run_of(net, torch.randn(4, 8))).modules

    assert {path: (m.first, m.executions) for path, m in modules.items()} == {
        "": (0, 1),
        "first": (1, 1),
        "second": (2, 2),
        "act": (3, 1),
        "never": (-1, 0),
    }


def test_activation_bytes_are_what_operators_produce_anew():
    """Views and the results of in-place operators are not new."""

    @module_of(lambda: {"layer": nn.Linear(8, 16)})
    def Body(self, x):
        y = self.layer(x)  # 4 x 16 floats, the layer's
        z = y.view(-1).relu_().view(4, 16)  # nothing new
        return z + z.exp()  # two times 4 x 16 floats

    body = Body()
    modules = trace(body, run_of(body, torch.randn(4, 8))).modules

    assert modules["layer"].activation_bytes == 4 * 16 * 4
    assert modules[""].activation_bytes == 2 * 4 * 16 * 4
    assert modules["layer"].input_bytes == 4 * 8 * 4
    assert modules["layer"].output_bytes == 4 * 16 * 4


def kept_by_autograd(model, x):
    """Bytes of the distinct pieces of memory that one forward leaves to autograd."""
    state = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(x)
    assert output.requires_grad
    sizes = {place: t.untyped_storage().nbytes() for place, t in kept.items()}
    return sum(size for place, size in sizes.items() if place not in state)


@module_of(lambda inner, reentrant: {"inner": inner, "reentrant": reentrant})
def Checkpointed(self, x):
    return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU())


def frozen_layers():
    made = layers()
    made[0].requires_grad_(False)
    return made


MODELS = {
    "layers": layers,
    "frozen layers": frozen_layers,
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 32, batch_first=True),
    "norm": lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.Flatten()),
    "checkpoint": lambda: nn.Sequential(
        nn.Linear(8, 8), Checkpointed(layers(), False), nn.Linear(16, 4)
    ),
    "reentrant checkpoint": lambda: nn.Sequential(
        nn.Linear(8, 8), Checkpointed(layers(), True), nn.Linear(16, 4)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_kept_bytes_are_what_autograd_keeps(name):
    """Each piece once, of the run as it would be; the traced one keeps nothing itself."""
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(4, 3, 8)
    want = kept_by_autograd(model, x)
    for meta in (False, True):
        traced = trace(model, run_of(model, x), meta=meta, memory=True)
        assert traced.weighed
        assert sum(m.kept_bytes for m in traced.modules.values()) == want, meta
    assert not any(m.kept_bytes for m in trace(model, run_of(model, x)).modules.values())


def test_kept_bytes_count_for_the_module_that_needs_them_first():
    """A linear keeps its input; tanh its output, which the next linear keeps, too."""
    traced = trace(net := layers(), run_of(net, torch.randn(4, 8)), memory=True)
    kept = {path: m.kept_bytes for path, m in traced.modules.items()}
    assert kept == {"": 0, "0": 4 * 4 * 8, "1": 4 * 4 * 16, "2": 0, "3": 4 * 4 * 16}


def test_nothing_is_weighed_where_autograd_keeps_nothing():
    net = layers()
    with torch.no_grad():
        assert not trace(net, run_of(net, torch.randn(4, 8)), memory=True).weighed


@module_of(lambda: {"layer": nn.Linear(8, 1)})
def Penalty(self, x):
    """Has a backward of its own."""
    x = x.detach().requires_grad_()
    y = self.layer(x).square()
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope.square().sum(1, keepdim=True)


@module_of(lambda: {"layer": nn.Linear(8, 8)})
def Mapped(self, x):
    """Uses torch.func, which refuses hooks on what is saved."""
    return torch.func.grad(lambda x: self.layer(x).sum())(x).sum()


def test_kept_bytes_of_a_module_with_a_backward_of_its_own():
    net = nn.Sequential(Penalty(), nn.Tanh())
    traced = trace(net, run_of(net, torch.randn(4, 8)), memory=True)
    assert traced.modules["1"].kept_bytes == 4 * 4


def test_what_cannot_be_weighed_is_said():
    net = Mapped()
    with pytest.warns(UserWarning, match="is not measured.*torch.func"):
        traced = trace(net, run_of(net, torch.randn(4, 8)), memory=True)
    assert not traced.weighed


def test_only_an_operator_uses_a_parameter():
    """Reading a child's weight.dtype or .shape is no use, computing with it is."""

    @module_of(
        lambda: {
            "called": nn.Linear(8, 8),
            "read": nn.Linear(8, 8),
            "taken": nn.Linear(8, 8, bias=False),
        }
    )
    def Parent(self, x):
        x = self.called(x).to(self.read.weight.dtype)[:, : self.read.weight.shape[0]]
        return torch.nn.functional.linear(x, self.taken.weight)

    parent = Parent()
    modules = trace(parent, run_of(parent, torch.randn(4, 8))).modules

    assert modules[""].parameters == ("taken.weight",)
    assert modules["called"].parameters == ("called.bias", "called.weight")
    assert modules["read"].parameters == modules["taken"].parameters == ()


@pytest.mark.parametrize("meta", [False, True])
def test_a_parameter_that_is_passed_in_is_used_by_who_passes_it(meta):
    @module_of()
    def Scale(self, x, by):
        return x * by["factor"]

    @module_of(lambda: {"scale": Scale()})
    def Inner(self, x, by):
        return self.scale(x, by={"factor": by})

    @module_of(lambda: {"layer": nn.Linear(8, 8), "inner": Inner()})
    def Outer(self, x):
        return self.inner(self.layer(x), by=self.layer.bias)

    outer = Outer()
    modules = trace(outer, run_of(outer, torch.randn(4, 8)), meta=meta).modules
    assert modules[""].parameters == ("layer.bias",)
    assert modules["inner"].parameters == modules["inner.scale"].parameters == ()


def test_attention_and_the_fast_path_of_an_encoder_use_their_childrens_weights():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = torch.randn(2, 3, 8)
    modules = trace(layer, run_of(layer, x)).modules
    assert "self_attn.out_proj.weight" in modules["self_attn"].parameters
    assert modules[""].parameters == ()

    layer.eval()
    with torch.no_grad():
        modules = trace(layer, run_of(layer, x)).modules
    assert "linear1.weight" in modules[""].parameters
    assert "forward" not in layer.__dict__


def test_use_outside_every_module_is_kept_apart():
    net = Net()

    def run():
        return net(torch.randn(4, 8)) + net.never.weight.sum()

    traced = trace(net, run)
    assert traced.parameters_outside == ("never.weight",)
    assert traced.modules[""].parameters == ()


@pytest.mark.parametrize("meta", [False, True])
def test_drawing_is_noticed_and_not_drawing_too(meta):
    net = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.0), nn.Sequential(nn.Dropout(0.1)))
    x = torch.randn(4, 8, device="meta" if meta else "cpu")
    modules = trace(net, run_of(net, x), meta=meta).modules
    drew = {path for path, m in modules.items() if m.random}
    assert {"", "0", "2", "2.0"} <= drew
    if not meta:
        assert "1" not in drew

    net.eval()
    assert not any(m.random for m in trace(net, run_of(net, x), meta=meta).modules.values())


def test_times_add_up():
    @module_of(lambda: {"child": nn.Linear(64, 64)})
    def Sleepless(self, x):
        return self.child(self.child(x)) @ x.mT

    net = Sleepless()
    modules = trace(net, run_of(net, torch.randn(64, 64)), times=True).modules

    root, child = modules[""], modules["child"]
    assert root.executions == 1 and child.executions == 2
    assert child.seconds == child.total_seconds > 0
    assert root.total_seconds == pytest.approx(root.seconds + child.total_seconds)
    assert 0 < root.seconds < root.total_seconds


def test_two_roots_are_traced_in_one_run():
    from smp.partitioning.tracing import trace_models

    a, b = Net(), nn.Linear(8, 8)
    x = torch.randn(4, 8)
    first, second = trace_models([a, b], lambda: b(a(x)))

    assert set(first.modules) == {"", "first", "second", "never", "act"}
    assert set(second.modules) == {""}
    assert second.modules[""].first == 5
    assert second.modules[""].parameters == ("bias", "weight")


# ------------------------------------------------------------------------ leaving no mark


@module_of(
    lambda: {
        "norm": nn.BatchNorm1d(8),
        "drop": nn.Dropout(0.5),
        "ids": nn.Buffer(torch.zeros(3)),
        "swapped": nn.Buffer(torch.ones(3)),
        "plain": torch.zeros(3),
        "slots": torch.zeros(2, 3),
        "calls": 0,
        "seen": {"all": []},
        "own": torch.Generator().manual_seed(5),
    }
)
def Careless(self, x, log, cache):
    """Changes everything that a forward pass can reach."""
    self.calls += 1
    self.seen["all"].append(x)
    self.late = x
    self.plain.add_(1)
    for slot in self.slots:
        slot.add_(1)
    self.ids[1] = 7
    self.swapped = torch.zeros(3)
    log.append(1)
    cache.count += 1
    cache.layers[0].append(x)
    x.mul_(2)
    np.random.rand()
    random.random()
    torch.randn(3, generator=self.own)
    return self.drop(self.norm(x))


class Cache:
    def __init__(self):
        self.count = 0
        self.layers = [[]]


def state_of(net):
    tensors = ("own", "plain", "slots")
    plain = {k: v for k, v in net.__dict__.items() if k not in tensors}
    return copy.deepcopy(plain), net.plain.clone(), net.slots.clone(), net.own.get_state()


def global_random_states():
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()]


@pytest.mark.parametrize("times", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_leaves_no_mark(times, fails):
    net = Careless()
    net.norm.weight.grad = gradient = torch.ones(8)
    x = torch.randn(4, 8)
    log, cache = collections.deque([5]), Cache()
    before = state_of(net), global_random_states(), x.clone(), gradient.clone()
    buffer, layers = net.swapped, cache.layers

    def run():
        net(x, log=log, cache=cache)
        if fails:
            raise KeyError("after the fact")

    if fails:
        with pytest.raises(KeyError):
            trace(net, run, times=times)
    else:
        traced = trace(net, run, times=times).modules
        assert traced["norm"].changed_buffers == (
            "running_mean",
            "running_var",
            "num_batches_tracked",
        )
        assert traced[""].changed_buffers == ("ids", "swapped")

    assert_same((state_of(net), global_random_states(), x, net.norm.weight.grad), before)
    assert net.swapped is buffer and net.norm.weight.grad is gradient
    assert log == collections.deque([5]) and cache.count == 0
    assert cache.layers is layers and layers == [[]]
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_the_models_own_hooks_run_as_usual():
    net = Net()
    calls = []
    net.first.register_forward_pre_hook(lambda m, args: calls.append("pre"))
    net.first.register_forward_hook(lambda m, args, out: out * 0)
    out = []
    trace(net, lambda: out.append(net(torch.randn(4, 8))))

    want = net.second(torch.relu(net.second(torch.zeros(4, 8))))
    assert calls == ["pre"]
    assert torch.equal(out[0], want)


def test_what_lies_in_a_tuple_is_put_back_too():
    @module_of(lambda: {"state": ([1], ({"calls": 0}, "name"))})
    def Counting(self, x):
        calls, (counts, _) = self.state
        calls.append(len(calls))
        counts["calls"] += 1
        return x * counts["calls"]

    net = Counting()
    trace(net, run_of(net, torch.ones(2)))

    assert net.state == ([1], ({"calls": 0}, "name"))


def test_the_grad_mode_is_the_users_and_nothing_is_saved():
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    out = []
    trace(net, lambda: out.append(net(torch.randn(4, 8))))
    assert out[0].requires_grad
    with pytest.raises(RuntimeError, match=r"model\.backward"):
        out[0].sum().backward()

    with torch.no_grad():
        trace(net, lambda: out.append(net(torch.randn(4, 8))))
    assert not out[1].requires_grad


@module_of(
    lambda how: {
        "how": how,
        "inner": nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        "outer": nn.Linear(8, 8),
    }
)
def Penalised(self, x):
    """Its forward runs a backward of its own, through another module and through itself."""
    if self.how == "jacrev":
        slope = torch.func.jacrev(lambda v: self.inner(v).square().sum())(x)
    else:
        x = x.detach().requires_grad_()
        value = self.inner(x).square().sum()
        if self.how == "grad":
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
        else:
            value.backward()
            slope = x.grad
    return self.outer(slope)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("how", ["grad", "jacrev", "backward"])
def test_a_module_may_run_a_backward_of_its_own(how, meta):
    net = Penalised(how)
    parameters = {n: (p, p.detach().clone()) for n, p in net.named_parameters()}
    traced = trace(net, run_of(net, torch.randn(4, 8)), meta=meta)
    assert {path: m.executions for path, m in traced.modules.items()} == {
        "": 1,
        "inner": 1,
        "inner.0": 1,
        "inner.1": 1,
        "outer": 1,
    }
    assert traced.modules["inner.0"].parameters == ("inner.0.bias", "inner.0.weight")
    assert traced.meta == meta
    for name, parameter in net.named_parameters():
        kept, value = parameters[name]
        assert parameter is kept and torch.equal(parameter, value) and parameter.grad is None


def test_tensors_of_a_second_run_are_not_taken_for_what_the_first_had():
    """... whose meta tensors are gone: the ids of theirs may be any tensor's."""

    class Busy(Penalised):
        def forward(self, x):
            made = [torch.zeros(()) for _ in range(2000)]
            return super().forward(x) + torch.stack(made).sum() + sum(t + 1 for t in made)

    net = nn.Sequential(nn.Linear(8, 8), Busy("jacrev"), nn.Linear(8, 8))
    modules = trace(net, run_of(net, torch.randn(4, 8)), meta=True).modules

    assert modules["1"].parameters == ()
    assert modules["0"].parameters == ("0.bias", "0.weight")


def test_checkpointed_modules_are_traced():
    @module_of(lambda: {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    def Checkpointed(self, x):
        x = checkpoint(self.a, x, use_reentrant=False)
        return checkpoint(self.b, x, use_reentrant=True)

    net = Checkpointed()
    modules = trace(net, run_of(net, torch.randn(4, 8, requires_grad=True))).modules
    assert modules["a"].executions == modules["b"].executions == 1


def test_a_compiled_module_is_run_as_written():
    net = Net()
    net.first = torch.compile(net.first, backend="eager")
    modules = trace(net, run_of(net, torch.randn(4, 8))).modules
    used = {p for m in modules.values() for p in m.parameters}
    assert "first._orig_mod.weight" in used


def test_a_trace_does_not_load_the_compiler():
    """Loading dynamo takes longer than most traces."""
    script = (
        "import sys, torch; from smp.partitioning.tracing import trace; "
        "net = torch.nn.Linear(2, 2); trace(net, lambda: net(torch.ones(1, 2))); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_caught_exception_in_a_module_does_not_confuse_the_record():
    @module_of()
    def Fails(self, x):
        raise ValueError

    @module_of(lambda: {"fails": Fails(), "layer": nn.Linear(8, 8)})
    def Tries(self, x):
        try:
            x = self.fails(x)
        except ValueError:
            x = self.layer(x)
        return x.exp()

    net = nn.Sequential(Tries(), nn.Linear(8, 8))
    modules = trace(net, run_of(net, torch.randn(4, 8))).modules
    assert modules["0.layer"].parameters == ("0.layer.bias", "0.layer.weight")
    assert modules["1"].parameters == ("1.bias", "1.weight")


# ------------------------------------------------------------------------------- on meta


def test_a_trace_on_meta_tensors_sees_the_same_and_computes_nothing():
    net = nn.Sequential(nn.Embedding(50, 8), nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True))
    ids = torch.randint(0, 50, (4, 6))
    real, meta = trace(net, run_of(net, ids)), trace(net, run_of(net, ids), meta=True)
    outputs = []
    trace(net, lambda: outputs.append(net(ids)[0]), meta=True)

    assert meta.meta and not real.meta
    assert outputs[0].is_meta and outputs[0].shape == (4, 6, 8)
    for path in ("0", "1"):
        assert meta.modules[path] == real.modules[path]
    assert all(not p.is_meta for p in net.parameters())


def test_real_inputs_work_with_a_model_on_the_meta_device():
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    traced = trace(net, run_of(net, torch.randn(2, 3, 8, 8)), meta=True)
    assert traced.modules["2"].activation_bytes == 2 * 4 * 6 * 6 * 4


@module_of(lambda: {"inner": nn.Linear(8, 8)})
def Branches(self, x):
    x = self.inner(x)
    return x if x.sum() > 0 else -x


def test_what_meta_tensors_do_not_allow_is_run_for_real_with_a_warning():
    net = nn.Sequential(nn.Linear(8, 8), Branches())
    with pytest.warns(UserWarning, match=r"1 cannot run on meta tensors .*; tracing on"):
        traced = trace(net, run_of(net, torch.randn(4, 8)), meta=True)
    assert not traced.meta and traced.modules["1.inner"].executions == 1


def test_a_meta_model_that_cannot_run_on_them_runs_on_zeros():
    net = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), Branches())
    x = torch.randn(4, 8)
    real = trace(net, run_of(net, x))
    net = net.to("meta")
    before = dict(net.state_dict(keep_vars=True))
    with pytest.warns(
        UserWarning, match="smp: 2 cannot run on meta tensors .*; tracing on zeros"
    ):
        traced = trace(net, run_of(net, x), meta=True)

    for path in ("0", "1", "2.inner"):
        assert traced.modules[path] == real.modules[path]
    assert traced.modules["0"].changed_buffers and not traced.meta
    after = net.state_dict(keep_vars=True)
    assert all(after[name] is tensor and tensor.is_meta for name, tensor in before.items())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_zeros_of_a_large_model_take_no_memory():
    """... and tied ones stay tied."""
    rows = 1 << 20  # 256 MiB each, and there are eight
    with torch.device("meta"):
        net = nn.ModuleList([nn.Embedding(rows, 64) for _ in range(8)])
    net[7].weight = net[6].weight

    def run():
        assert net[7].weight is net[6].weight and not net[0].weight.is_meta
        assert not any(part(torch.arange(rows - 9, rows)).any() for part in net)
        assert net[0].weight.view(-1).max() == 0
        meanwhile.append(resident_bytes())

    before, meanwhile = resident_bytes(), []
    with pytest.warns(UserWarning, match="tracing on zeros"):
        trace(net, run, meta=True)
    assert max(meanwhile) - before < 200e6


@module_of(lambda rows: {"weight": nn.Parameter(torch.empty(rows, 1 << 10, device="meta"))})
def Huge(self):
    """Looks at a value; its weight is larger than machines are."""
    assert self.weight[-1].sum().item() == 0


@pytest.mark.filterwarnings("ignore:.*tracing on zeros")
def test_zeros_are_there_for_more_than_the_machine_has():
    net = Huge(1 << 28)  # 1 TiB
    assert trace(net, net, meta=True).modules[""].executions == 1


@pytest.mark.filterwarnings("ignore:.*tracing on zeros")
def test_where_there_is_no_address_space_for_zeros_the_error_says_so():
    net, before = Huge(1 << 28), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, before[1]))
    try:
        with pytest.raises(RuntimeError, match=f"tensor of {1 << 40} bytes .*ulimit -v"):
            trace(net, net, meta=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert net.weight.is_meta


@module_of(lambda: {"inner": nn.Linear(8, 8)})
def Masked(self, x, mask):
    """Looks at the values of masks that it has put where its parameters are."""
    mask = mask.to(device=self.inner.weight.device, dtype=torch.bool)
    places = torch.arange(x.size(1), device=self.inner.weight.device)
    x = self.inner(x)
    return x if mask.all() and places.max() < 8 else x.masked_fill(~mask, 0.0) * places


def test_the_values_of_masks_are_there_on_meta_too():
    net = Masked().to("meta")
    x, mask, outputs = torch.randn(4, 8), torch.ones(4, 8, dtype=torch.long), []
    trace(net, lambda: outputs.append(net(x, mask)), meta=True)
    mask[1] = 0
    traced = trace(net, lambda: outputs.append(net(x, mask)), meta=True)

    assert traced.meta and all(out.is_meta and out.shape == x.shape for out in outputs)


class Counts(nn.Module):
    """Looks at integers that it has counted from what meta tensors do not have."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.__dict__["unregistered"] = nn.Parameter(torch.ones(2, device="meta"))

    def forward(self, x):
        counts = torch.zeros(8, dtype=torch.long, device=self.inner.weight.device)
        counts.scatter_add_(0, self.inner(x).argmax(-1), counts.new_ones(x.size(0)))
        has_all = sum(counts.tolist()) == x.size(0) and not self.unregistered.any()
        return x if has_all else x.missing


def test_integers_that_meta_tensors_were_written_into_have_no_values():
    net = Counts().to("meta")
    with pytest.warns(UserWarning, match="writes what is not known.*tracing on zeros"):
        traced = trace(net, run_of(net, torch.randn(4, 8)), meta=True)
    assert traced.modules["inner"].executions == 1
    assert net.unregistered.is_meta and "unregistered" not in dict(net.named_parameters())


def test_a_recurrent_module_of_a_model_on_meta_keeps_its_weights():
    """nn.LSTM keeps its parameters in a list, too, which gets their meta twins."""
    net = nn.Sequential(nn.Linear(8, 8).to("meta"), nn.LSTM(8, 8))
    traced = trace(net, run_of(net, torch.randn(4, 2, 8)), meta=True)
    assert traced.meta and "_flat_weights" not in traced.modules["1"].set_attributes


@module_of(lambda: {"scale": nn.Parameter(torch.ones(()))})
def Picky(self, x):
    return x / self.scale if self.scale > 0 else x.missing


def test_a_meta_model_that_cannot_run_names_the_module():
    net = nn.Sequential(nn.Linear(8, 8), Picky()).to("meta")
    told = "smp: 1 cannot run on meta tensors .*, and 1 cannot run on zeros .*skip_tracing"
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=told):
        trace(net, run_of(net, torch.randn(4, 8)), meta=True)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_run_says_how_far_it_is(monkeypatch, capsys, terminal):
    """On a terminal the line is renewed, in a log it is written once."""
    monkeypatch.setattr("smp.partitioning.tracing._PATIENCE_S", 0.0)
    monkeypatch.setattr("smp.partitioning.tracing._NOTE_EVERY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    net = Net()
    trace(net, run_of(net, torch.randn(4, 8)))

    error = capsys.readouterr().err
    assert error.count("tracing the model") == (5 if terminal else 1)
    assert ("(second)" in error) == terminal
    assert error.count("traced the model in") == 1 and error.endswith("\n")
