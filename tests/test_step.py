"""Spec: api.md, section 3: what goes into a step, what comes out, and the modes it runs in.

Everything goes through the real ``@smp.step``, and equals the same model in plain PyTorch
in one process.
"""

import copy
import functools
import gc
import inspect
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import smp
from smp import _core
from smp.runtime import thread_state
from tests.models.modules import in_backward, module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.compare import (
    assert_close,
    assert_same_bits,
    assert_same_outputs,
    gradients,
)
from tests.reference.cut_loop import cut_loop
from tests.reference.split import split_sizes

WIDTH = 6

MODES = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "no inference_mode": partial(torch.inference_mode, False),
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "float16": partial(torch.autocast, "cpu", torch.float16),
    "uncached": partial(torch.autocast, "cpu", torch.float16, cache_enabled=False),
    "no autocast": partial(torch.autocast, "cpu", enabled=False),
    "meta": partial(torch.device, "meta"),
}


def modes() -> dict[str, Any]:
    """What PyTorch keeps for the thread that asks."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu")
        and (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "device": torch.empty(()).device.type,
    }


class Layer(nn.Linear):
    """A layer that notes, on the rank where it runs, the modes it runs in."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.notes: list[dict[str, Any]] = []
        self.backward_notes: list[dict[str, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x.clone().to(self.weight.dtype)))
        if smp.is_tracing():
            return y
        self.notes.append(modes() | {"dtype": y.dtype, "graph": y.requires_grad})
        return in_backward(y, lambda _: self.backward_notes.append(modes()))


@module_of(lambda: {"there": Layer(), "back": Layer()})
def Far(self, x: Tensor, mode: str = "nothing") -> Tensor:
    x = self.there(x)
    with MODES[mode]():
        return self.back(x)


@module_of(lambda: {"near": Layer(), "far": Far()})
def Net(self, x: Tensor, mode: str = "nothing") -> Tensor:
    """``far`` may be on another rank; its child ``back`` is on rank 0 again."""
    return self.far(self.near(x), mode)


class Alone:
    """The model of a step function in plain PyTorch."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.share = 1.0

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: Tensor) -> None:
        # Tensor.backward() has no function modes in PyTorch 2.10.
        torch.autograd.backward((loss,), (torch.full_like(loss, self.share),))


def make(degree: int, dtype: torch.dtype = torch.float32, **config: Any):
    """The model with that many pipeline ranks, and its reference; replicas are alike."""
    replicated = degree < smp.job.bootstrap.mpi_size()
    smp.init({"pipeline_parallel_degree": degree, "ddp": replicated, **config})
    torch.manual_seed(0)
    net = Net().to(dtype)
    reference = copy.deepcopy(net)
    for path, module in net.named_modules():
        smp.set_partition(module, degree - 1 if path in ("far", "far.there") else 0)
    return smp.DistributedModel(net), reference


def each_degree() -> Iterator[int]:
    """Pipeline degree 1 (with replicas, where there are ranks for them), and all ranks."""
    for degree in sorted({1, smp.job.bootstrap.mpi_size()}):
        yield degree
        smp.reset()


# ------------------------------------------------------------------------- outputs


@on_ranks(1, 2)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("rows", [1, 3, 8, 10, 11])
def test_outputs_of_microbatches_make_those_of_the_batch(rows, microbatches):
    """reduce_mean weights each microbatch by its samples; so do the gradients.

    The first tensor that is cut has the samples.  Fewer of them are as many microbatches.
    """

    @smp.step(non_split_inputs=["first"], input_split_axes={"columns": 1})
    def train(model, first, columns, other):
        x = columns.T
        y = model(x)
        loss = y.pow(2).mean()
        model.backward(loss)
        return {"loss": loss, "total": y.sum(), "y": y, "rows": len(x)}

    x = torch.randn(rows, WIDTH, dtype=torch.float64)
    for degree in each_degree():
        model, reference = make(degree, torch.float64, microbatches=microbatches)
        y = reference(x)
        loss = y.pow(2).mean()
        loss.backward()
        count = min(rows, microbatches)
        sizes = split_sizes(rows, count)
        losses = [part.pow(2).mean() for part in y.split(sizes)]

        out = train(model, x[:7], x.T, x[:4])

        want = {"mean": loss, "detached": loss, "sum": sum(losses), "total": y.sum(), "y": y}
        got = {
            "mean": out["loss"].reduce_mean(),
            "detached": out["loss"].detach().reduce_mean(),
            "sum": out["loss"].reduce_sum(),
            "total": out["total"].reduce_sum(),
            "y": out["y"].concat(),
        }
        assert_close(got, want, 1e-12)
        assert_close({"losses": out["loss"].stack()}, {"losses": torch.stack(losses)}, 1e-12)
        assert torch.equal(out["loss"].concat(), out["loss"].stack())
        assert type(out["rows"]) is list and out["rows"] == sizes
        assert [len(part) for part in out["y"]] == sizes and len(out["y"]) == count
        assert out["y"][-1] is out["y"].outputs[count - 1]
        assert_close(gradients(model), gradients(reference), 1e-12)


@on_ranks(1, 2)
@pytest.mark.parametrize("detach", [True, False])
def test_outputs_keep_their_types_and_have_a_graph_if_asked_for(detach):
    """Every rank gets them; a graph ends where another rank's modules begin."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)

    @smp.step(detach_outputs=detach)
    def evaluate(model, x):
        y = (x * scale).pow(3)
        seen = Output(rows=y, label="text", nothing=None)
        seen["inner"] = Batch(y, "label", labelled([y.max(1)], "best"))
        rows = len(x)  # 3, 2
        differ = [[y] * rows, {f"{rows} rows": y}, None if rows == 3 else y]
        return [Pair(y, {"y": (y, {y})}), seen, differ, y.shape, rows, model(x)]

    x = torch.randn(5, WIDTH, dtype=torch.float64)
    for degree in each_degree():
        model, reference = make(degree, torch.float64, microbatches=2)
        scale.grad = None
        here = smp.pp_rank() == 0  # where the graph is

        out = evaluate(model, x)

        (one, two), seen, differ, shapes, sizes, of_model = out
        assert type(out) is list and type(out[0]) is Pair and type(seen) is Output
        assert shapes == [(3, WIDTH), (2, WIDTH)] and sizes == [3, 2]
        assert list(seen) == ["rows", "label", "nothing", "inner"] and seen.rows is seen["rows"]
        assert seen.label == ["text"] * 2 and seen.nothing is None
        assert all(type(each) is list for each in differ)
        assert [len(part) for part in differ[0]] == [3, 2] and differ[2][0] is None
        assert [list(part) for part in differ[1]] == [["3 rows"], ["2 rows"]]
        inner = seen["inner"]
        assert type(inner) is Batch and inner.label == ["label"] * 2
        assert type(inner.more) is Rows and inner.more.label == "best"
        best = inner.more[0]
        assert type(best) is type(x.max(1))
        ((y, sets),) = two.values()
        alike = [one, y, seen.rows, inner.rows]
        alike.append(smp.StepOutput([only for each in sets for only in each]))
        for output in alike:
            assert type(output) is smp.StepOutput and torch.equal(output.concat(), x.pow(3))
        assert torch.equal(best.values.concat(), x.pow(3).max(1).values)
        assert torch.equal(best.indices.concat(), x.max(1).indices)
        assert torch.allclose(of_model.concat(), reference(x))

        of_step = [*alike, best.values]
        for output in [*of_step, of_model]:
            kept = not detach and here
            assert all(tensor.requires_grad == kept for tensor in output), output
            assert not any(tensor.requires_grad for tensor in output.detach())
        if not detach and here:
            sum(output.concat().sum() for output in of_step).backward()
            want = 5 * 3 * x.pow(3).sum() + 3 * x.pow(3).max(1).values.sum()
            assert torch.allclose(scale.grad, want)
        if not detach and degree == 1:
            of_model.concat().pow(2).mean().backward()
            reference(x).pow(2).mean().backward()
            assert_close(gradients(model.module), gradients(reference), 1e-12)
        elif not detach and here:
            with pytest.raises(RuntimeError, match=r"use model.backward inside the step"):
                of_model.concat().sum().backward()


# -------------------------------------------------------------------------- inputs


class Sliced:
    """Slices itself, and says how it was asked to."""

    def __init__(self, asked: tuple | None = None) -> None:
        self.asked = asked

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> "Sliced":
        return Sliced((num_mb, mb, axis))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sliced) and self.asked == other.asked

    def __repr__(self) -> str:
        return f"Sliced({self.asked})"


Pair = namedtuple("Pair", "one two")


class Output(OrderedDict):
    """A dict that has its items as attributes too, as transformers' ModelOutput."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        setattr(self, name, value)


class Rows(list):
    """A list with an attribute."""

    label = ""


@dataclass(frozen=True)
class Batch:
    rows: Tensor
    label: str
    more: Any = field(default=None)


def labelled(items: list, label: str) -> Rows:
    made = Rows(items)
    made.label = label
    return made


def rows(number: int, *shape: int) -> Tensor:
    """Tensors of which no two have an element in common."""
    shape = shape or (5,)
    return 100.0 * number + torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def taken(value: Any, number: int, axis: int = 0, count: int = 2) -> Any:
    """What microbatch ``number`` gets of a batch of five."""

    def part(value: Any) -> Any:
        return taken(value, number, axis, count)

    if isinstance(value, Tensor):
        return value if value.dim() == 0 else value.tensor_split(count, axis)[number]
    if isinstance(value, Sliced):
        return Sliced((count, number, axis))
    if isinstance(value, UserDict):
        return part(dict(value))
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, part(dict(value)))
    if isinstance(value, dict):
        made = type(value)((k, part(v)) for k, v in value.items())
        if isinstance(value, Output):
            made.note = value.note
        return made
    if isinstance(value, Pair):
        return Pair(*map(part, value))
    if isinstance(value, Rows):
        return labelled(part(list(value)), value.label)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, list | tuple | set):
        return type(value)(map(part, value))
    if isinstance(value, Batch):
        return Batch(part(value.rows), value.label, part(value.more))
    return value


def assert_alike(got: Any, want: Any, where: str) -> None:
    """The same types and tensors; Sliced, and what has no tensors, is equal."""
    assert type(got) is type(want), f"{where}: {got} instead of {want}"
    if isinstance(want, Tensor):
        assert torch.equal(got, want), f"{where}: {got} instead of {want}"
    elif isinstance(want, set):
        assert_alike(sorted(got, key=torch.sum), sorted(want, key=torch.sum), where)
    elif isinstance(want, Batch):
        assert_alike(vars(got), vars(want), where)
    elif isinstance(want, dict):
        assert list(got) == list(want), where
        if isinstance(want, defaultdict):
            assert got.default_factory is want.default_factory, where
        if isinstance(want, Output):
            assert_alike(vars(got), vars(want), where)
        for key in want:
            assert_alike(got[key], want[key], f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), where
        if isinstance(want, Rows):
            assert got.label == want.label, where
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_alike(one, other, f"{where}[{i}]")
    else:
        assert got == want, f"{where}: {got!r} instead of {want!r}"


def inputs(axis: int) -> Any:
    """Tensors with five entries on that axis, in everything that is looked into."""
    shape = (5, 3) if axis == 0 else (2, 5)
    output = Output(x=rows(10, *shape), y=Sliced())
    output.note = "an attribute that is no item"
    return {
        "tensor": rows(1, *shape),
        "list": [rows(2, *shape), (rows(3, *shape), "text"), None],
        "set": {rows(4, *shape), rows(5, *shape)},
        "pair": Pair(rows(6, *shape), 7),
        "ordered": OrderedDict(b=rows(8, *shape), a=rows(9, *shape)),
        "output": output,
        "default": defaultdict(list, x=rows(15, *shape)),
        "rows": labelled([rows(16, *shape)], "label"),
        "best": rows(17, *shape, 2).max(2),
        "size": torch.Size([2, 5]),
        "user": UserDict(x=rows(11, *shape)),
        "batch": Batch(rows(12, *shape), "label", [rows(13, *shape)]),
        "scalar": rows(14).sum(),
        "sliced": Sliced(),
        "number": 3.5,
    }


NOTED: list[dict[str, Any]] = []


def noted(model, x, columns, whole, *rest, keyword, last=None, **more):
    """Notes what each microbatch gets."""
    NOTED.append(
        {
            "model": model,
            "x": x,
            "columns": columns,
            "whole": whole,
            "rest": rest,
            "keyword": keyword,
            "last": last,
            "more": more,
        }
    )


@on_ranks(1, 2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_argument_is_cut_as_its_name_says(microbatches):
    """By position or keyword, at any depth; what ranks other than pp_rank 0 give is not
    looked at."""
    step = smp.step(
        noted,
        non_split_inputs=["whole", "kept"],
        input_split_axes={"columns": 1, "rest": 1, "keyword": -2, "extra": 1},
    )
    for degree in each_degree():
        model, _ = make(degree, microbatches=microbatches)
        given = {"x": inputs(0), "columns": inputs(1), "whole": inputs(0)}
        named = {
            "keyword": inputs(0),
            "extra": inputs(1),
            "kept": inputs(0),
            "other": inputs(0),
        }
        rest = (inputs(1), rows(20, 2, 5))
        if smp.pp_rank() != 0:
            empty = torch.zeros(0)
            given, named = dict.fromkeys(given, empty), dict.fromkeys(named, empty)

        for _ in range(2):  # the first step is traced
            NOTED.clear()
            step(model, *given.values(), *rest, **named)

        got = NOTED[-microbatches:]
        assert len(got) == (microbatches if smp.pp_rank() == 0 else 0)
        for number, one in enumerate(got):
            taken_here = partial(taken, number=number, count=microbatches)
            want = {
                "x": taken_here(given["x"]),
                "columns": taken_here(given["columns"], axis=1),
                "whole": given["whole"],
                "rest": taken_here(rest, axis=1),
                "keyword": taken_here(named["keyword"], axis=-2),
                "more": {
                    "extra": taken_here(named["extra"], axis=1),
                    "kept": named["kept"],
                    "other": taken_here(named["other"]),
                },
            }
            assert one.pop("model") is model and one.pop("last") is None
            assert_alike(one, want, f"microbatch {number}")


# --------------------------------------------------------------------------- modes


def in_mode(model: Any, x: Tensor, inner: str, deep: str) -> Tensor:
    with MODES[inner]():
        y = model(x, deep)
    loss = y.clone().float().pow(2).mean()
    if loss.requires_grad:
        model.backward(loss)
    return y


def notes_of(net: Net) -> dict[str, list]:
    layers = {"near": net.near, "far.there": net.far.there, "far.back": net.far.back}
    return {
        f"{path}, {phase}": notes
        for path, layer in layers.items()
        for phase, notes in (("forward", layer.notes), ("backward", layer.backward_notes))
    }


@on_ranks(1, 2)
@pytest.mark.parametrize("outer", MODES)
def test_modules_of_every_rank_run_in_the_callers_modes(outer):
    """Around the step, around the call in it, and around a call in a module elsewhere."""
    step = smp.step(in_mode)
    x = torch.randn(5, WIDTH)
    for degree in each_degree():
        model, reference = make(degree, microbatches=2)
        net, alone = model.module, Alone(reference)
        net.far.back.register_forward_pre_hook(lambda module, args: None)
        for number, inner in enumerate(MODES):
            deep = [*MODES][(3 * number + [*MODES].index(outer)) % len(MODES)]
            with MODES[outer](), MODES[inner]():
                grad = torch.is_grad_enabled()
                with MODES[deep]():
                    deep = deep if grad or not torch.is_grad_enabled() else "nothing"
            where = f"{outer}, {inner}, {deep}"
            outputs = []
            with MODES[outer]():
                before = modes()
                got = step(model, x, inner, deep)
                assert modes() == before, where
                for part in x.split([3, 2]):
                    alone.share = len(part) / len(x)
                    outputs.append(in_mode(alone, part, inner, deep))
            assert_same_outputs([y.detach() for y in got], [y.detach() for y in outputs])
            want = notes_of(reference)
            for name, notes in notes_of(net).items():
                there = degree == 1 or smp.pp_rank() == (name.startswith("far.there"))
                assert notes == (want[name] if there else []), f"{where}: {name}"
                notes.clear()
                want[name].clear()
            assert_same_bits(gradients(model), gradients(reference))


class Counting(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inner", ["cpu", "meta"])
def test_what_a_thread_has_beside_a_fresh_one_is_the_innermost(inner):
    assert thread_state.capture() is None
    with torch.device("cpu"), torch.device("meta"), torch.device(inner):
        assert thread_state.capture() == (False, (), torch.device(inner))
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            autocast = ("cpu", torch.float16, False)
            assert thread_state.capture() == (False, (autocast,), torch.device(inner))
    with torch.inference_mode():
        assert thread_state.capture() == (True, (), None)
    with Counting():  # no mode that travels
        assert thread_state.capture() is None


def test_a_remote_call_carries_what_differs_here_and_a_backward_what_it_can_see(monkeypatch):
    """Of modes and changes both, of collected values and the chain of collectives a call."""
    assert thread_state.capture_for_call("far") is None
    assert thread_state.capture_for_backward() is None
    torchs = ContextVar("torchs")
    monkeypatch.setattr(torch.fx, "noted_while_compiling", torchs, raising=False)
    given = torchs.set({1})
    assert thread_state.capture_for_call("far") is None
    torchs.reset(given)
    meta = (False, (), torch.device("meta"))
    with torch.device("meta"):
        assert thread_state.capture_for_call("far") == ((meta, (), (), False), None, True)
        assert thread_state.capture_for_backward() == (meta, (), (), False)

    changed = (("a module", "training", False),)
    monkeypatch.setattr(thread_state.travelling_changes, "travelling", lambda: changed)
    assert thread_state.capture_for_call("far") == ((None, (), changed, False), None, True)
    assert thread_state.capture_for_backward() == (None, (), changed, False)

    calls = []
    collected = SimpleNamespace(values=("a list",), settle=lambda: calls.append("settled"))
    monkeypatch.setattr(thread_state.context_variables, "collect", lambda path: collected)
    monkeypatch.setattr(thread_state, "_copy_context", lambda: {"a variable": []})
    carried, settle, _ = thread_state.capture_for_call("far")
    assert carried == (None, ("a list",), changed, False)
    assert settle("its result") == "its result" and calls == ["settled"]

    monkeypatch.setattr(thread_state.collective_chain, "is_carried", lambda: True)
    monkeypatch.setattr(thread_state.collective_chain, "take", calls.append)
    carried, settle, _ = thread_state.capture_for_call("far")
    assert carried == (None, ("a list",), changed, True)
    assert settle(("its result", "a token")) == "its result"
    assert calls == ["settled", "settled", "a token"]
    assert thread_state.capture_for_backward() == (None, (), changed, False)


# ---------------------------------------------------------------- from step to step


def train(model: Any, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    if loss.requires_grad:
        model.backward(loss)
    return loss.detach()


@on_ranks(1, 2)
def test_what_is_frozen_between_steps_gets_no_gradient_until_it_is_thawed():
    """Also when a whole module of another rank is, so that its calls have no graph."""
    step = smp.step(train)
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    for degree in each_degree():
        model, reference = make(degree, torch.float64, microbatches=2)
        for frozen in ["", "near", "far", "far.there.weight", "far.back", "nothing"]:
            for module in (model.module, reference):
                module.zero_grad(set_to_none=True)
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(not name.startswith(frozen))
            step(model, x)
            loss = reference(x).pow(2).mean()
            if loss.requires_grad:
                loss.backward()
            assert_close(gradients(model), gradients(reference), 1e-12)


class Draws(nn.Linear):
    """A layer that draws random numbers."""

    def forward(self, x: Tensor, count: int) -> Tensor:
        return super().forward(x) + sum(torch.rand_like(x) for _ in range(count))


@on_ranks(2)
def test_a_step_leaves_the_scripts_random_numbers_alike_whatever_its_modules_draw():
    """Data that are drawn after it are the same on every rank, wherever modules are."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = nn.ModuleList([Draws(WIDTH, WIDTH), Draws(WIDTH, WIDTH)])
    model = distributed(net, [0, 1])

    @smp.step
    def step(model, x, counts):
        for layer, count in zip(model.module, counts, strict=True):
            x = layer(x, count)
        return x

    after, outputs = [], []
    for counts in [(1, 1), (1, 1), (3, 1), (1, 4), (2, 2)]:
        torch.manual_seed(3)
        outputs.append(step(model, torch.zeros(4, WIDTH), counts).concat())
        after.append(torch.rand(3))

    everyone = smp.allgather(after, smp.WORLD)
    assert all(torch.equal(one, after[1]) for each in everyone for one in each)
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    assert not torch.equal(step(model, torch.zeros(4, WIDTH), (2, 2)).concat(), outputs[-1])


class Shared(nn.Module):
    """``near`` is called by the root, and by ``far`` on another rank."""

    @module_of(lambda near: {"there": nn.Linear(WIDTH, WIDTH), "near": near})
    def Far(self, x: Tensor) -> Tensor:
        return self.near(torch.tanh(self.there(x)))

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Linear(WIDTH, WIDTH)
        self.far = self.Far(self.near)

    def forward(self, x: Tensor) -> Tensor:
        return self.far(torch.tanh(self.near(x)))


def several_backwards(model: Any, x: Tensor) -> None:
    for factor in (1.0, 0.3, 0.07):
        model.backward(model(factor * x).pow(2).mean())


@on_ranks(2)
def test_gradients_of_each_backward_of_a_microbatch_are_summed_by_themselves():
    """Bit by bit as the cut loop, for parameters of both ranks."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = Shared()
    reference = copy.deepcopy(net)
    rank_of = {"": 0, "near": 0, "far": 1, "far.there": 1}
    model = distributed(net, rank_of)
    step = smp.step(several_backwards)
    for _ in range(3):  # into gradients that are there
        x = torch.randn(5, WIDTH)
        step(model, x)
        cut_loop(several_backwards, reference, (x,), rank_of=rank_of, microbatches=2)

        assert_same_bits(gradients(model), gradients(reference))


class Kept(torch.autograd.Function):
    """The identity; tells who keeps its graph."""

    graphs: list[weakref.ref] = []

    @staticmethod
    def forward(ctx, x):
        ctx.marker = nn.Module()
        Kept.graphs.append(weakref.ref(ctx.marker))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Keeping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Kept.apply(super().forward(x))


@on_ranks(2)
def test_a_graph_whose_backward_never_came_is_gone_after_the_step():
    """Even if the script keeps the output, on whose other rank the graph was."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Keeping(WIDTH, WIDTH))
    model = distributed(net, [0, 1])
    outputs = []

    @smp.step(detach_outputs=False)
    def step(model, x):
        outputs.append(model(x))
        return outputs[-1]

    kept = [step(model, torch.randn(4, WIDTH)) for _ in range(2)]

    assert len(kept) == 2 and (smp.pp_rank() == 1 or outputs[-1].requires_grad)
    assert len(Kept.graphs) >= 4 or smp.pp_rank() == 0
    gc.collect()
    assert smp.pp_rank() == 0 or not any(graph() for graph in Kept.graphs)
    Kept.graphs.clear()


@on_ranks(2)
def test_a_backward_in_a_backward_is_an_error_and_the_next_step_works():
    model, _ = make(2, microbatches=2)
    x = torch.randn(4, WIDTH)

    @smp.step
    def nested(model, x):
        other = torch.ones((), requires_grad=True)
        model.backward(in_backward(model(x).sum(), lambda _: model.backward(other)))

    with pytest.raises(RuntimeError, match="model.backward\\(\\) was called inside a backward"):
        nested(model, x)
    assert len(smp.step(train)(model, x)) == 2


@on_ranks(1, 2)
def test_a_step_in_a_step_is_an_error_and_the_next_step_works():
    inner = smp.step(train)

    @smp.step
    def outer(model, x):
        inner(model, x)

    for degree in each_degree():
        model, reference = make(degree, microbatches=2)
        x = torch.randn(4, WIDTH)
        with pytest.raises(RuntimeError, match="train was called inside another"):
            outer(model, x)
        loss = inner(model, x).reduce_mean()
        assert torch.allclose(loss, reference(x).pow(2).mean())


def test_a_decorated_function_is_known_by_its_name():
    decorated = smp.step(non_split_inputs=["x"])(train)

    assert inspect.unwrap(decorated) is train and decorated.__name__ == "train"
    assert inspect.signature(decorated) == inspect.signature(train)


@pytest.mark.parametrize("how", [{"non_split_inputs": ["y"]}, {"input_split_axes": {"y": 1}}])
def test_a_name_that_is_no_argument_is_refused(how):
    with pytest.raises(ValueError, match=r"'y' is no argument of train\(model"):
        smp.step(train, **how)

    with pytest.raises(ValueError, match=r"'y' is no argument of partial\(model"):
        smp.step(partial(train), **how)

    smp.step(lambda model, **arguments: None, **how)  # which may have it


class Trainer:
    """A script's own, whose step functions are attributes of the class."""

    scale = 2.0

    plain = smp.step(lambda x: x + 1)

    @smp.step
    def decorated(x):
        return x + 2

    @smp.step(non_split_inputs=["y"])
    def method(self, x, y):
        return self.scale * x + y

    @classmethod
    @smp.step
    def of_the_class(cls, x):
        return cls.scale * x


@on_ranks(1)
def test_a_step_function_may_be_an_attribute_of_a_class():
    """It gets the instance if its first parameter is ``self``, and not otherwise; a
    class method gets the class."""
    smp.init({})
    trainer, x = Trainer(), torch.ones(2)

    assert torch.equal(trainer.plain(x).concat(), x + 1)
    assert torch.equal(trainer.decorated(x).concat(), x + 2)
    assert torch.equal(Trainer.decorated(x).concat(), x + 2)
    assert torch.equal(trainer.method(x, x).concat(), 2 * x + x)
    assert torch.equal(Trainer.of_the_class(x).concat(), 2 * x)
    assert torch.equal(trainer.of_the_class(x).concat(), 2 * x)
    assert Trainer.decorated.__name__ == "decorated"


@on_ranks(1, 2)
def test_hooks_after_a_step_run_once_each_also_those_that_come_later():
    size = smp.job.bootstrap.mpi_size()
    model, _ = make(size)
    heard = []
    step = smp.step(lambda model, x: model(x))

    for number in range(3):
        handle = model.register_post_step_hook(lambda model, _, n=number: heard.append(n))
        removed = model.register_post_step_hook(lambda model, _: heard.append("removed"))
        removed.remove()
        step(model, rows(0, 2, WIDTH))
        assert heard == list(range(number + 1))
        handle.remove()


@on_ranks(1)
def test_a_callable_object_without_a_name_is_named_by_its_class():
    smp.init({})
    inner = smp.step(functools.partial(lambda x: x))
    with pytest.raises(RuntimeError, match="the step function partial was called inside"):
        smp.step(lambda x: inner(x))(torch.ones(1))
    smp.shutdown()
    with pytest.raises(RuntimeError, match="@smp.step function partial needs smp.init"):
        inner(torch.ones(1))


@on_ranks(1)
def test_a_model_is_wrapped_once():
    model, _ = make(1)

    with pytest.raises(TypeError, match="a DistributedModel already; wrap it once"):
        smp.DistributedModel(model)


@on_ranks(2)
def test_a_schedule_that_needs_more_microbatches_in_flight_than_may_be_is_refused():
    turns = [(0, "forward"), (1, "forward"), (2, "forward")]
    turns += [(i, "backward") for i in range(3)]
    for pipeline in (turns, lambda count: turns):
        for active in (2, 3):
            model, _ = make(2, microbatches=3, active_microbatches=active, pipeline=pipeline)
            refused = pytest.raises(
                smp.ConfigError, match="active_microbatches=2 is too few .* has 3 microbatches"
            )
            with refused if active == 2 else nullcontext():
                smp.step(train)(model, rows(0, 3, WIDTH))
            smp.reset()


@on_ranks(2)
@pytest.mark.parametrize("active", [1, 2])
def test_no_more_microbatches_are_in_flight_than_may_be(active):
    """... of which one may wait for the other rank while the next one begins."""
    model, _ = make(2, microbatches=4, active_microbatches=active, pipeline="interleaved")
    in_flight: set[int] = set()
    most = []

    @smp.step
    def step(model, x):
        number = int(x[0, 0])
        in_flight.add(number)
        most.append(len(in_flight))
        model.backward(model(x).sum())
        in_flight.discard(number)

    x = torch.arange(4.0)[:, None].expand(4, WIDTH).clone()
    step(model, x)
    assert not most or max(most) <= active
    assert len(most) == (0 if smp.pp_rank() else 1 + 4)  # the first run is traced


@on_ranks(2)
def test_what_the_core_has_to_warn_of_in_a_step_is_a_warning_of_its_caller(monkeypatch):
    model, _ = make(2, microbatches=2)
    step, x = smp.step(train), rows(0, 2, WIDTH)
    step(model, x)
    waiting = ["the card is slow", "there is no memory"]
    monkeypatch.setattr(_core, "take_warning", lambda: waiting.pop() if waiting else None)
    with pytest.warns(UserWarning) as caught:
        step(model, x)
    texts = [str(warning.message) for warning in caught]
    assert texts == ["smp: there is no memory", "smp: the card is slow"]
