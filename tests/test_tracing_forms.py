"""What a traced run sees and puts back, of models of many forms."""

import collections
import copy
import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp.partitioning.tracing import trace
from smp.pytorch.restore import Restore
from tests.models.modules import module_of

ON = pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])


def run_of(model, *args, **kwargs):
    return lambda: model(*args, **kwargs)


@module_of(lambda: {"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
def Linears(self, x):
    """Two layers, whose parameters ``forward`` uses itself."""
    weight = torch.cat([self.one.weight, self.two.weight])
    return x @ weight.T + torch.stack((self.one.bias, self.two.bias)).sum()


@ON
def test_parameters_in_a_list_are_used(meta):
    net = Linears()
    modules = trace(net, run_of(net, torch.randn(2, 4)), meta=meta).modules
    assert modules[""].parameters == ("one.bias", "one.weight", "two.bias", "two.weight")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(self.embed(ids)))


def test_a_tied_parameter_is_that_of_all_its_users_on_meta_too():
    net, ids = Tied(), torch.arange(6)
    seen = trace(net, run_of(net, ids), meta=True)
    assert seen.modules == trace(net, run_of(net, ids)).modules
    for path in ("embed", "head"):
        assert seen.modules[path].parameters == ("embed.weight",)
    assert net.head.weight is net.embed.weight


@ON
def test_parameters_of_integers_are_traced(meta):
    """Quantized models have such."""

    class Quantized(nn.Module):
        def __init__(self):
            super().__init__()
            codes = torch.ones(4, 4, dtype=torch.int8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x @ (self.codes.to(x.dtype) * self.scale)

    net = Quantized().to("meta" if meta else "cpu")
    modules = trace(net, run_of(net, torch.randn(2, 4)), meta=meta).modules
    assert modules[""].parameters == ("codes", "scale")
    assert net.codes.dtype is torch.int8 and not net.codes.requires_grad


def test_tensors_on_meta_have_the_strides_of_the_models_own():
    @module_of(lambda: {"weight": nn.Parameter(torch.ones(4, 2).t())})
    def Transposed(self, x):
        return x @ self.weight + self.weight.t().view(8).sum()

    net = Transposed()
    seen = trace(net, run_of(net, torch.randn(3, 2)), meta=True)
    assert seen.meta and seen.modules[""].parameters == ("weight",)


def test_what_a_forward_makes_meets_meta_tensors_in_lists_and_in_place():
    @module_of(lambda: {"layer": nn.Linear(4, 4)})
    def Makes(self, x):
        x = torch.cat([torch.ones(1, 4), self.layer(x)])
        sums = torch.zeros(4, dtype=torch.complex64, device=self.layer.weight.device)
        return x + sums.add_(x[0]).real

    net = Makes()
    seen = trace(net, run_of(net, torch.randn(2, 4)), meta=True)
    assert seen.meta and seen.modules[""].activation_bytes >= 4 * 12 + 8 * 4


def test_a_model_of_which_a_part_is_on_meta_and_that_cannot_run_there_runs_on_zeros():
    @module_of(lambda: {"layer": nn.Linear(4, 4)})
    def Branches(self, x):
        x = self.layer(x)
        return x if x.sum() > 0 else -x

    net = nn.Sequential(nn.Linear(4, 4), Branches().to("meta"))
    with pytest.warns(UserWarning, match="smp: 1 cannot run on meta .*; tracing on zeros"):
        seen = trace(net, run_of(net, torch.randn(2, 4)), meta=True)
    assert seen.modules["1.layer"].executions == 1 and net[1].layer.weight.is_meta


@dataclasses.dataclass
class Pair:
    a: Tensor
    rest: dict


@module_of()
def Sized(self, x, *, more=None):
    return Pair(x * 2, {"it": [x.sum(), more]})


@module_of(lambda: {"sized": Sized()})
def CallsSized(self, x):
    self.sized(x[:1])
    self.sized(x, more=Pair(x, {"it": (x,)}))
    return self.sized(x[:2]).a


def test_bytes_in_and_out_are_those_of_the_execution_that_had_most():
    """Whatever holds the tensors, and however they are passed."""
    net = CallsSized()
    seen = trace(net, run_of(net, torch.randn(4, 8))).modules["sized"]
    row = 4 * 8
    assert seen.input_bytes == 3 * 4 * row
    assert seen.output_bytes == 3 * 4 * row + 4
    assert seen.activation_bytes == (1 + 4 + 2) * row + 3 * 4


def test_everything_that_an_operator_returns_counts():
    @module_of()
    def Largest(self, x):
        values, places = x.max(dim=1)
        return values[places.clamp(max=1)]

    net = Largest()
    seen = trace(net, run_of(net, torch.randn(4, 8))).modules[""]
    assert seen.activation_bytes == 4 * (4 + 8) + 4 * 8 + 4 * 4


@module_of(
    lambda: {
        "branches": nn.ModuleList(nn.Linear(4, 4) for _ in range(2)),
        "last": nn.Linear(4, 4),
    }
)
def Threaded(self, x):
    """Its branches run in threads of their own."""
    out = [None, None]

    def run(i):
        out[i] = self.branches[i](x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    return self.last(out[0] + out[1])


@pytest.mark.parametrize("times", [False, True])
def test_modules_that_run_in_threads_are_counted_and_confuse_nothing(times):
    net = Threaded()
    modules = trace(net, run_of(net, torch.randn(2, 4)), times=times, memory=True).modules
    executions = {path: m.executions for path, m in modules.items()}
    assert executions == {"": 1, "branches": 0, "branches.0": 1, "branches.1": 1, "last": 1}
    assert [modules[p].first for p in ("", "branches.0", "branches.1", "last")] == [0, 1, 2, 3]
    assert modules["last"].parameters == ("last.bias", "last.weight")
    assert modules["last"].kept_bytes == 4 * 8
    assert modules[""].activation_bytes == 4 * 8, "what ran in threads has left its mark"


def test_what_a_forward_used_before_it_raised_is_its_own():
    @module_of(lambda: {"scale": nn.Parameter(torch.ones(()))})
    def Fails(self, x, other):
        if (x * self.scale + other).numel():
            raise ValueError

    @module_of(lambda: {"fails": Fails(), "layer": nn.Linear(4, 4)})
    def Tries(self, x):
        try:
            self.fails(x, self.layer.weight[0])
        except ValueError:
            return self.layer(x)

    net = Tries()
    modules = trace(net, run_of(net, torch.randn(2, 4))).modules
    assert modules["fails"].parameters == ("fails.scale",)
    assert modules[""].parameters == ("layer.weight",)


@module_of(lambda: {"layer": nn.Linear(4, 4), "calls": 0})
def Notes(self, x):
    """Sets an attribute, as what may not be run again elsewhere does."""
    self.calls += 1
    return self.layer(x)


def test_what_others_change_in_place_between_executions_is_noted_and_what_they_set_is_not():
    @module_of(lambda: {"log": [], "level": 0})
    def Child(self, x):
        return x + self.level + len(self.log)

    @module_of(lambda: {"child": Child()})
    def Parent(self, x):
        x = self.child(x)
        self.child.log.append(1)
        self.child.level = 2
        return self.child(x)

    net = Parent()
    modules = trace(net, run_of(net, torch.ones(2))).modules
    assert modules["child"].set_attributes == ("log",) and modules[""].set_attributes == ()
    assert (net.child.log, net.child.level) == ([], 0)


def test_who_sets_a_buffer_uses_it():
    @module_of(lambda: {"level": nn.Buffer(torch.zeros(()))})
    def Child(self, x):
        return x + 1

    @module_of(lambda: {"child": Child()})
    def Parent(self, x):
        self.child.level = x.detach().sum()
        return self.child(x)

    net = Parent()
    level = net.child.level
    modules = trace(net, run_of(net, torch.ones(2))).modules
    assert modules[""].buffers == ("child.level",) and modules["child"].buffers == ()
    assert modules["child"].changed_buffers == ("level",) and net.child.level is level


def test_a_backward_in_the_run_that_is_no_modules_is_an_error():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with pytest.raises(RuntimeError, match=r"write model\.backward\(loss\)"):
        trace(net, lambda: net(torch.ones(1, 2)).sum().backward())
    assert net[0].weight.grad is None


def test_what_torch_checkpoints_is_not_given_away():
    @module_of(lambda: {"notes": Notes()})
    def Checkpoints(self, x):
        return checkpoint(self.notes, x, use_reentrant=True)

    net = Checkpoints()
    modules = trace(net, run_of(net, torch.randn(2, 4, requires_grad=True))).modules
    assert modules["notes"].set_attributes == ("calls",)
    assert modules[""].reruns == ()


class Runs(torch.autograd.Function):
    """Runs a module that it is given."""

    @staticmethod
    def forward(ctx, module, x):
        return module(x)


@pytest.mark.parametrize("package", ["torchgpipe.checkpoint", "torchvision", "checkpoints"])
def test_what_another_packages_function_is_given_is_given_away(package, monkeypatch):
    monkeypatch.setattr(Runs, "__module__", package)

    @module_of(lambda: {"notes": Notes()})
    def Gives(self, x):
        return Runs.apply(self.notes, x)

    net = Gives()
    modules = trace(net, run_of(net, torch.randn(2, 4))).modules
    assert modules[""].reruns == ("notes", "notes.layer")


def test_kept_bytes_are_measured_once_though_times_are_too():
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    x = torch.randn(4, 8)
    both = trace(net, run_of(net, x), times=True, memory=True)
    alone = trace(net, run_of(net, x), memory=True)
    assert both.timed and both.weighed and not alone.timed
    for path, seen in alone.modules.items():
        assert both.modules[path].kept_bytes == seen.kept_bytes
        assert both.modules[path].executions == 1


@pytest.mark.filterwarnings("ignore:.*tracing on zeros")
def test_kept_bytes_are_measured_on_zeros_too():
    @module_of()
    def Looks(self, x):
        return x if x.sum() > 0 else x * 2

    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Looks())
    net[0].weight.requires_grad_(False)
    x = torch.randn(4, 8)
    want = {
        path: m.kept_bytes
        for path, m in trace(net, run_of(net, x), memory=True).modules.items()
    }
    seen = trace(net.to("meta"), run_of(net, x), meta=True, memory=True)
    assert seen.weighed
    assert {path: m.kept_bytes for path, m in seen.modules.items()} == want


@module_of(lambda own: {"layer": nn.Linear(4, 4), "own": nn.Buffer(own)})
def Graph(self, x, given):
    """Has a sparse matrix, is given another, and multiplies with both."""
    return torch.sparse.mm(given, torch.sparse.mm(self.own, self.layer(x)))


@pytest.mark.filterwarnings("ignore:.*Sparse .* tensor support is in beta")
def test_a_sparse_tensor_has_the_bytes_of_its_indices_and_values():
    """... and a buffer is there whether autograd keeps it or not."""
    net, x = Graph(torch.eye(100).to_sparse()), torch.randn(100, 4)
    seen = trace(net, run_of(net, x, torch.eye(100).to_sparse()), memory=True).modules
    held = 100 * (4 + 2 * 8)
    assert (seen[""].kept_bytes, seen[""].input_bytes) == (held, held + 4 * 400)
    assert seen["layer"].kept_bytes == seen["layer"].activation_bytes == 4 * 400
    seen = trace(net, run_of(net, x, torch.eye(100).to_sparse_csr())).modules
    assert seen[""].input_bytes == 100 * (4 + 8) + 101 * 8 + 4 * 400


# --------------------------------------------------------------------------- left as it was


@module_of(
    lambda: {
        "layer": nn.Linear(4, 4),
        "names": {"a", "b"},
        "ordered": collections.OrderedDict(x=1, y=2),
        "renamed": {"before": None},
        "counts": collections.defaultdict(int, seen=3),
        "queue": collections.deque([1, 2], maxlen=2),
        "array": np.zeros((2, 3)),
        "arrays": {"strided": np.arange(6.0)[::2], "objects": np.array([1, "a"], object)},
        "overlapping": torch.arange(4.0),
        "grown": torch.ones(2),
        "given_out": torch.ones(3),
        "many": [torch.ones(2), torch.ones(3)],
        "complex": torch.zeros(2, dtype=torch.complex64),
    }
)
def Kinds(self, x, seen=None):
    """Changes containers of many kinds, and tensors in many ways."""
    self.names.discard("a")
    self.names.add("c")
    self.ordered.move_to_end("x")
    self.renamed["after"] = self.renamed.pop("before")
    self.layer.weight.grad, self.layer.bias.grad = None, torch.ones(4)
    self.counts["seen"] += 1
    self.counts["new"] += 1
    self.queue.append(3)
    self.array[0] += 1
    self.arrays["strided"][1] = 7
    self.arrays["objects"][0] = "b"
    self.overlapping[1].mul_(3)
    self.overlapping.add_(1)
    self.overlapping[1:].zero_()
    self.grown.resize_(5).fill_(2)
    torch.add(self.given_out, 1, out=self.given_out)
    torch._foreach_add_(self.many, 1.0)
    self.complex.fill_(1j)
    if seen is not None:
        seen.append(x)
    return self.layer(x)


def test_an_array_that_is_mapped_from_a_file_is_not_copied(tmp_path):
    """... nor one that is a part of it: it may be larger than memory."""
    path = tmp_path / "data"
    path.write_bytes(bytes(32))
    net = nn.Identity()
    net.data = np.memmap(path, dtype=np.float64, mode="r+")
    net.part, net.own = np.asarray(net.data)[1:], np.ones(2)
    with Restore([net]):
        for array in (net.data, net.own):
            array[0] = 7
    assert net.data.tolist() == [7, 0, 0, 0] and net.own.tolist() == [1, 1]


def what_it_has(net):
    return {k: copy.deepcopy(v) for k, v in net.__dict__.items() if not k.startswith("_")}


def assert_same(got, want):
    assert type(got) is type(want)
    if isinstance(want, (Tensor, np.ndarray)):
        assert got.dtype == want.dtype and got.tolist() == want.tolist()
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, (list, tuple, collections.deque)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    elif isinstance(want, nn.Module):
        assert_same(got.__dict__, want.__dict__)
    else:
        assert got == want


@pytest.mark.parametrize("times", [False, True])
def test_whatever_a_forward_changes_is_as_before(times):
    net, seen = Kinds(), [1]
    objects = {k: v for k, v in net.__dict__.items() if not k.startswith("_")}
    before = what_it_has(net)
    net.layer.weight.grad = gradient = torch.ones(4, 4)
    trace(net, run_of(net, torch.ones(2, 4), seen), times=times)

    assert_same(what_it_has(net), before)
    assert net.layer.weight.grad is gradient and net.layer.bias.grad is None
    assert all(net.__dict__[name] is thing for name, thing in objects.items())
    assert net.queue.maxlen == 2 and net.counts.default_factory is int
    assert seen == [1], "a list that is passed by position was changed"


@module_of(
    lambda before, after: {
        "layer": nn.Linear(2, 2),
        "after": after,
        "level": nn.Buffer(torch.tensor([before, 1.0])),
    }
)
def Fills(self, x):
    """Changes one element of a buffer."""
    self.level[0] = self.after
    return self.layer(x)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("before", "after"),
    [(NAN, NAN), (NAN, 0.0), (0.0, NAN), (INF, 3.4028234663852886e38), (2.0, 2.0)],
)
def test_what_is_no_number_changes_as_numbers_do(before, after):
    """A buffer that has none yet is filled in the first forward, which traces."""
    net = Fills(before, after)
    modules = trace(net, run_of(net, torch.ones(1, 2))).modules
    is_changed = repr(before) != repr(after)
    assert modules[""].changed_buffers == (("level",) if is_changed else ())
    assert repr(net.level[0].item()) == repr(before)


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_watched_in_torch_is_put_back(fails):
    net = nn.Linear(2, 2)
    before = vars(torch.autograd.Function)["apply"], Tensor.register_hook, net.forward

    def run():
        net(torch.ones(1, 2))
        if fails:
            raise KeyError

    try:
        trace(net, run, times=True)
    except KeyError:
        assert fails
    hooks = nn.modules.module
    assert (vars(torch.autograd.Function)["apply"], Tensor.register_hook, net.forward) == before
    assert not hooks._global_buffer_registration_hooks and not hooks._global_forward_hooks


# -------------------------------------------------------------------------- what cannot run


@module_of(lambda: {"scale": nn.Parameter(torch.ones(()))})
def Looks(self, x):
    return x * self.scale if self.scale > 0 else x.missing


def test_a_root_module_that_cannot_run_on_meta_tensors_is_named_by_its_class():
    net = Looks()
    with pytest.warns(UserWarning, match="smp: the root module Looks cannot run on meta"):
        assert not trace(net, run_of(net, torch.ones(2)), meta=True).meta


def test_code_outside_the_model_that_cannot_run_on_meta_tensors_is_not_a_modules():
    net = nn.Linear(2, 2)

    def run():
        return net(torch.ones(1, 2)).sum().item()

    with pytest.warns(UserWarning, match="smp: the code outside the model cannot run on meta"):
        assert trace(net, run, meta=True).modules[""].executions == 1
