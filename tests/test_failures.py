"""Spec: what a user is promised when something goes wrong inside a step, and misuse."""

import contextlib
import copy
import functools
import gc
import os
import re
import signal
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp import _core
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.compare import assert_same_bits, gradients
from tests.reference.cut_loop import cut_loop


class Trouble(Exception):
    """Raised by a model; a class that every rank knows."""


class Final(BaseException):
    """What no caller of a module on another rank can catch: it ends the step at once."""


raised: list[BaseException] = []  # by this rank


def fail(text: str, kind: type[BaseException] = Trouble) -> None:
    raised.append(kind(text))
    raise raised[-1]


class RaiseInBackward(torch.autograd.Function):
    graphs: list[weakref.ref] = []  # of which it is a part, on this rank

    @staticmethod
    def forward(ctx, x):
        RaiseInBackward.graphs.append(weakref.ref(ctx))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail("in backward")


class Part(nn.Linear):
    """A layer that raises when it is told to."""

    trouble: str | None = None  # "forward" or "backward"
    before: Callable[[], None] | None = None  # called before each forward

    def forward(self, x):
        if self.before is not None:
            self.before()
        if self.trouble == "forward":
            fail(f"in forward of {self.in_features}")
        y = torch.tanh(super().forward(x))
        return RaiseInBackward.apply(y) if self.trouble == "backward" else y


@module_of(lambda: {"a": Part(8, 8), "b": Part(8, 8), "norm": nn.BatchNorm1d(8)})
def Net(self, x):
    return self.norm(self.b(self.a(x)))


RANK_OF = {"": 0, "a": 0, "b": 1, "norm": 1}


def make(pipeline: str = "interleaved") -> tuple[Net, smp.DistributedModel]:
    """The reference and the model, on two ranks."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": pipeline})
    net = Net()
    reference = copy.deepcopy(net)
    return reference, make_model(net)


def make_model(net: nn.Module | None = None) -> smp.DistributedModel:
    return distributed(net or Net(), RANK_OF)


def train(model, x):
    out = model(x)
    loss = out.pow(2).mean()
    model.backward(loss)
    return loss


@on_ranks(2)
@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_an_exception_is_raised_on_every_rank_and_the_next_step_works(where, phase, pipeline):
    """The original exception, with rank, module path, microbatch and phase; the queues
    drain, and the next step equals a run that never failed."""
    reference, model = make(pipeline)
    step = smp.step(train)
    x = torch.randn(6, 8)
    part = getattr(model.module, where)
    step(model, x)  # the partition is made while nothing fails
    for p in model.parameters():
        p.grad = None
    cut_loop(train, reference, (x,), rank_of=RANK_OF, ranks=2, microbatches=3)
    for p in reference.parameters():
        p.grad = None

    before = {n: b.clone() for n, b in model.local_named_buffers()}
    generator = torch.random.get_rng_state()
    part.trouble = phase
    with pytest.raises(Trouble, match=f"in {phase}") as caught:
        step(model, x)
    part.trouble = None
    note = "\n".join(caught.value.__notes__)
    assert re.search(rf"pp_rank {RANK_OF[where]} .*microbatch \d, {phase}", note), note
    assert where == "a" or "module 'b'" in note or phase == "backward", note
    assert all(p.grad is None for p in model.local_parameters())
    assert_same_bits(dict(model.local_named_buffers()), before)
    assert torch.equal(torch.random.get_rng_state(), generator)

    equals_a_run_that_never_failed(model, reference, x)


def equals_a_run_that_never_failed(model, reference, x) -> None:
    """One step of both: gradients and buffers have the same bits."""
    smp.step(train)(model, x)
    cut_loop(train, reference, (x,), rank_of=RANK_OF, ranks=2, microbatches=3)
    assert_same_bits(gradients(model), gradients(reference))
    assert_same_bits(dict(model.local_named_buffers()), dict(reference.named_buffers()))


@on_ranks(2)
@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_rank_that_raised_raises_the_very_object(where, phase):
    """... with the frames of the user's code; the other rank has their text in a note."""
    _, model = make()
    step = smp.step(train)
    x = torch.randn(6, 8)
    step(model, x)
    part = getattr(model.module, where)
    part.trouble = phase
    for _ in range(2):  # the second one is not the first
        raised.clear()
        with pytest.raises(Trouble) as caught:
            step(model, x)

        frames = traceback.extract_tb(caught.value.__traceback__)
        note = "\n".join(caught.value.__notes__)
        if smp.pp_rank() == RANK_OF[where]:
            # Another microbatch may have raised here, too, before the step ended.
            assert any(caught.value is one for one in raised)
            assert {phase, "fail"} <= {f.name for f in frames if f.filename == __file__}
            assert "there:" not in note
        else:
            assert not raised and type(caught.value) is Trouble
            for name in (phase, "fail"):
                assert re.search(rf'{__file__}", line \d+, in {name}\n', note), note


@on_ranks(2)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_is_gone_with_all_its_frames_when_the_script_lets_it_go(phase):
    _, model = make()
    step, x = smp.step(train), torch.randn(6, 8)
    step(model, x)
    raised.clear()
    model.module.b.trouble = phase
    with pytest.raises(Trouble) as caught:
        step(model, x)
    errors = [weakref.ref(error) for error in (caught.value, *raised)]
    raised.clear()
    del caught
    gc.collect()
    assert [error() for error in errors] == [None] * len(errors)


def by_number(x: torch.Tensor) -> int:
    """The microbatch that it is, of `numbered`."""
    return int(x[0, 0])


def numbered() -> torch.Tensor:
    return torch.arange(3.0).repeat_interleave(2).unsqueeze(1).expand(6, 8)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        os.sched_yield()
        assert time.monotonic() < deadline


@on_ranks(2)
@pytest.mark.parametrize("first", [0, 1])
def test_of_two_ranks_that_fail_the_first_is_heard_everywhere(first, tmp_path):
    """pp_rank 0 fails in the step function, 1 in its module; the second one does so when
    the first one's step is over."""
    reference, model = make()
    x = torch.randn(6, 8)
    equals_a_run_that_never_failed(model, reference, x)
    both_at_it, over = tmp_path / "both at it", tmp_path / "over"
    raised.clear()

    def fail_in_turn():
        if smp.pp_rank() == first:
            wait_for(both_at_it.exists)
            fail(f"on pp_rank {first}", Final)
        both_at_it.touch()
        wait_for(over.exists)
        fail("what follows", Final)

    def failing(model, x):
        if by_number(x) == 1:
            fail_in_turn()
        model(x)

    if smp.pp_rank() == 1:
        model.module.b.before = fail_in_turn
    with pytest.raises(Final, match=f"on pp_rank {first}") as caught:
        smp.step(failing)(model, numbered())
    over.touch()

    assert len(raised) == 1  # each has failed
    assert (caught.value is raised[0]) == (smp.pp_rank() == first)
    model.module.b.before = None
    equals_a_run_that_never_failed(model, reference, x)


@on_ranks(2)
def test_a_step_that_failed_leaves_no_graph_on_the_other_rank():
    """The forwards of its module get no backward any more."""
    _, model = make("simple")  # which has all forwards behind it before a backward
    smp.step(train)(model, torch.randn(6, 8))
    graphs = RaiseInBackward.graphs = []

    def failing(model, x):
        loss = model(x).sum()
        if by_number(x) == 2:  # 'norm' has let the others pass before
            fail("behind the modules")
        model.backward(loss)

    model.module.b.trouble = "backward"
    with pytest.raises(Trouble, match="behind the modules"):
        smp.step(failing)(model, numbered())
    gc.collect()
    assert len(graphs) == (3 if smp.pp_rank() == 1 else 0)
    assert all(graph() is None for graph in graphs)


class Together(Final):
    """On its way to the other ranks it waits for that of the other rank."""

    def __reduce__(self):
        folder, rank = self.args
        (folder / str(rank)).touch()
        wait_for((folder / str(1 - rank)).exists)
        return super().__reduce__()


@on_ranks(2)
def test_two_ranks_that_fail_at_once_raise_what_they_know(tmp_path):
    """Neither has heard of the other, whose word comes later, perhaps in the next step."""
    reference, model = make()
    x = torch.randn(6, 8)
    equals_a_run_that_never_failed(model, reference, x)

    def fail_together():
        raise Together(tmp_path, smp.pp_rank())

    def failing(model, x):
        if by_number(x) == 1:
            fail_together()
        model(x)

    if smp.pp_rank() == 1:
        model.module.b.before = fail_together
    with pytest.raises(Together) as caught:
        smp.step(failing)(model, numbered())
    assert caught.value.args == (tmp_path, smp.pp_rank())
    model.module.b.before = None
    for _ in range(3):
        equals_a_run_that_never_failed(model, reference, x)


@on_ranks(2)
def test_an_error_beside_ctrl_c_is_not_that_of_a_later_step():
    """The interrupted step raises KeyboardInterrupt; the error that its module raised then
    is not raised when another rank fails."""
    _, model = make()
    x = torch.randn(6, 8)
    smp.step(train)(model, x)
    heard = threading.Event()

    def handler(number, frame):
        heard.set()
        raise KeyboardInterrupt

    def interrupted():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert heard.wait(60)
        fail("beside Ctrl-C")

    before = signal.signal(signal.SIGINT, handler)
    try:
        if smp.pp_rank() == 1:
            model.module.b.before = interrupted
        with pytest.raises((KeyboardInterrupt, Trouble)) as caught:
            smp.step(train)(model, x)
        assert smp.pp_rank() == 0 or caught.type is KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
    model.module.b.before = None
    model.module.a.trouble = "forward"
    with pytest.raises(Trouble, match="in forward of 8"):
        smp.step(train)(model, x)


def interrupted_by(other: Path, monkeypatch) -> Callable[[Any], None]:
    """Rank 1 has said that all went well; only then it is interrupted, and rank 0 tells
    that the step is over when rank 1's handler has run."""
    send_end = _core.send_end
    if smp.rank() == 1:
        (other / "pid").write_text(str(os.getpid()))

    def send(value):
        monkeypatch.setattr(_core, "send_end", send_end)
        os.kill(int((other / "pid").read_text()), signal.SIGINT)
        until = time.monotonic() + 60
        while not (other / "heard").exists() and time.monotonic() < until:
            threading.Event().wait(0.001)
        threading.Event().wait(0.05)  # for what rank 1 may do wrong before the end comes
        send_end(value)

    return send


@on_ranks(2)
@pytest.mark.parametrize("noticed", ["in the step", "after it"])
def test_ctrl_c_at_the_end_of_a_step_ends_the_next_one(tmp_path, monkeypatch, noticed):
    """The step is over on the other rank, so it is on this one: its gradients count.  The
    interrupted rank raises at once; the other one in its next step."""
    reference, model = make()
    x = torch.randn(6, 8)
    step = smp.step(train)
    run_core = _core.step

    def interrupted(*args):
        monkeypatch.setattr(_core, "step", run_core)
        run_core(*args)
        raise KeyboardInterrupt

    def handler(number, frame):
        (tmp_path / "heard").touch()
        raise KeyboardInterrupt

    step(model, x)
    if noticed == "after it":
        if smp.rank() == 1:
            monkeypatch.setattr(_core, "step", interrupted)
    else:
        send_end = interrupted_by(tmp_path, monkeypatch)
        monkeypatch.setattr(_core, "send_end", send_end)
        signal.signal(signal.SIGINT, handler)
    smp.barrier()
    try:
        if smp.rank() == 0:
            step(model, x)
        with pytest.raises(KeyboardInterrupt):
            step(model, x)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for _ in range(2):
        cut_loop(train, reference, (x,), rank_of=RANK_OF, ranks=2, microbatches=3)
    equals_a_run_that_never_failed(model, reference, x)


def use_far_once(model, x):
    """Only microbatch 1 uses what 'b' gives; 0, whose backward is later, makes it wait."""
    model.module.a(x)
    unused = model.module.b(x)
    loss = unused.sum() if x[0, 0] == 1 else model.module.a(x).sum()
    model.backward(loss)
    return loss


def skip_far_once(model, x):
    """Microbatch 0 does not call 'b', which nobody knows before it is done."""
    loss = model.module.b(x).sum() if x[0, 0] == 1 else model.module.a(x).sum()
    model.backward(loss)
    return loss


@on_ranks(2)
@pytest.mark.parametrize("stepped", [use_far_once, skip_far_once])
def test_a_gradient_that_cannot_be_added_up_fails_the_step(stepped):
    """Also where that is tried for another reason than a request: a graph was released, a
    microbatch ended."""
    turns = [(0, 0), (1, 0), (2, 0), (1, 1), (0, 1), (2, 1)]
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": turns})
    model = distributed(Net(), RANK_OF)
    step = smp.step(stepped)
    x = torch.arange(3.0).repeat_interleave(2).unsqueeze(1).expand(6, 8)
    step(model, x)
    mine = dict(model.local_named_parameters())
    if smp.pp_rank() == 1:
        with torch.inference_mode():
            mine["b.weight"].grad = torch.zeros(8, 8)  # which nothing may be added to

    with pytest.raises(RuntimeError, match="Inplace update to inference tensor") as caught:
        step(model, x)

    assert re.search(r"pp_rank 1 .*microbatch \d, backward", "\n".join(caught.value.__notes__))
    for parameter in mine.values():
        parameter.grad = None
    step(model, x)
    assert smp.pp_rank() == 0 or mine["b.weight"].grad.abs().sum() > 0


class Two(Exception):
    """Of two arguments, of which its base gets one."""

    def __init__(self, a: int, b: object):
        super().__init__(f"only here: {a}")
        self.a, self.b = a, b


class NoFile(FileNotFoundError):
    def __init__(self, name: str, reason: object):
        super().__init__(2, f"only here: {reason}", name)


def of_a_local_class() -> Exception:
    class Local(Two):
        pass

    return Local(1, 2)


# The exception, the class that the other rank sees, whether it is that class, a check.
TRAVELS = {
    "two arguments": (lambda: Two(1, "b"), Two, True, lambda e: (e.a, e.b) == (1, "b")),
    "of the system": (lambda: NoFile("x", 1), NoFile, True, lambda e: e.filename == "x"),
    "a local class": (of_a_local_class, Two, False, lambda e: type(e).__name__ == "Local"),
    "a lock on it": (lambda: Two(1, threading.Lock()), Two, False, lambda e: e.a == 1),
    "a lock in it": (lambda: KeyError("only here", threading.Lock()), KeyError, False, str),
}


@on_ranks(2)
@pytest.mark.parametrize("case", TRAVELS)
def test_an_exception_that_pickle_cannot_carry_is_still_of_its_class(case):
    """Its caller's except clause catches it, as in one process."""
    raised, kind, is_itself, check = TRAVELS[case]
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = distributed(Net(), RANK_OF)
    caught = []

    def fails(module, args):
        raise raised()

    def step(model, x):
        try:
            model(x)
        except kind as error:
            caught.append(error)
        loss = x.sum().requires_grad_()
        model.backward(loss)
        return loss

    smp.step(step)(model, torch.randn(6, 8))
    assert not caught
    model.module.b.register_forward_pre_hook(fails)
    smp.step(step)(model, torch.randn(6, 8))
    assert len(caught) == (2 if smp.pp_rank() == 0 else 0)
    for error in caught:
        assert "only here" in str(error) and check(error)
        assert (type(error) is kind) == is_itself


@module_of(lambda: {"parts": nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})
def Three(self, x):
    """Layers, each on a rank of its own."""
    for part in self.parts:
        x = part(x)
    return x


class FailsAtFirst:
    """What cannot be packed the first time; then it is a string."""

    def __init__(self, *then: str):
        self.then = iter(then)
        self.failed = False

    def __reduce__(self):
        if not self.failed:
            self.failed = True
            raise Trouble("on the way to pp_rank 1")
        return str, (next(self.then),)


@on_ranks(3)
def test_a_rank_that_cannot_be_told_of_a_failure_does_not_keep_it_from_the_others():
    """The failure reaches pp_rank 2, though not 1; what went wrong is raised."""
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 3})
    model = distributed(Three(), {"": 0, "parts.1": 1, "parts.2": 2})
    step = smp.step(train)
    step(model, torch.randn(6, 8))
    if smp.pp_rank() == 0:
        text = FailsAtFirst("at once", "later", "later")
        failed = (0, None, 0, 0, "Trouble", text, "", b"")
        with pytest.raises(Trouble, match="on the way to pp_rank 1"):
            _core.skip_step(failed)
        _core.send_abort(failed)
    else:
        when = "later" if smp.pp_rank() == 1 else "at once"
        with pytest.raises(RuntimeError, match=f"Trouble: {when}"):
            step(model, torch.randn(6, 8))
    step(model, torch.randn(6, 8))


@on_ranks(2)
@pytest.mark.parametrize("where", [0, 1])
def test_a_worker_that_cannot_begin_fails_the_step(where):
    """Without autograd's threads turned off in it, a later backward could lock up."""
    reference, model = make()
    x = torch.randn(6, 8)
    refused = iter([True])

    def begin():
        if next(refused, False):
            fail("at a worker's begin")

    if smp.pp_rank() == where:
        _core.configure(worker_begin=begin)
    with pytest.raises(Trouble, match="at a worker's begin"):
        smp.step(train)(model, x)
    assert next(refused, None) is (None if smp.pp_rank() == where else True)
    equals_a_run_that_never_failed(model, reference, x)


@on_ranks(2)
def test_an_exception_while_tracing_is_raised_on_every_rank():
    """A model that fails in the traced run fails everywhere, not only where it was traced."""
    _, model = make()
    model.module.b.trouble = "forward"
    with pytest.raises(Trouble, match="in forward of 8"):
        smp.step(train)(model, torch.randn(6, 8))
    model.module.b.trouble = None
    smp.step(train)(model, torch.randn(6, 8))
    assert model.partitioned


@on_ranks(2)
def test_except_exception_in_a_model_does_not_hold_up_the_end_of_a_step():
    """A worker is unwound past the user's ``except Exception``."""
    _, model = make()

    def swallowing(model, x):
        try:
            return model(x)
        except Exception:
            return x

    step = smp.step(swallowing)
    step(model, torch.randn(6, 8))
    model.module.b.before = functools.partial(fail, "for good", Final)
    with pytest.raises(Final, match="for good"):
        step(model, torch.randn(6, 8))


@on_ranks(2)
def test_a_rank_that_is_busy_when_another_fails_and_leaves_hears_why():
    """What a rank cannot send to one that has left is no failure of its own: it raises
    what that one raised."""
    _, model = make()
    smp.step(train)(model, torch.randn(6, 8))

    def stay_until_the_other_has_left():
        deadline = time.monotonic() + 30
        while smp._core.counters()["left"] == 0:
            os.sched_yield()
            assert time.monotonic() < deadline

    def failing(model, x):
        if x[0, 0] == 1:
            raise Trouble("while another microbatch is in its module")
        model(x)

    if smp.pp_rank() == 1:
        model.module.b.before = stay_until_the_other_has_left
    x = torch.arange(3.0).repeat_interleave(2).unsqueeze(1).expand(6, 8)
    with pytest.raises(Trouble, match="while another microbatch"):
        smp.step(failing)(model, x)


# ------------------------------------------------------------------------------- misuse


@on_ranks(2)
def test_a_module_of_another_rank_called_outside_a_step_or_without_its_model_says_so():
    _, model = make()
    step, x = smp.step(train), torch.randn(6, 8)
    step(model, x)
    path, owner = ("b", 1) if smp.pp_rank() == 0 else ("a", 0)
    far = getattr(model.module, path)
    told = f"module '{path}' runs on pp_rank {owner} and can only be called inside a function"
    for call in (far, far.forward):
        with pytest.raises(RuntimeError, match=told):
            call(x)
    del model
    gc.collect()
    step(make_model(), x)
    with pytest.raises(RuntimeError, match="a Part that belongs to another rank was called"):
        far(x)


@on_ranks(2)
def test_backward_outside_a_step_says_so():
    _, model = make()
    with pytest.raises(RuntimeError, match="model.backward.* inside a function with @smp.step"):
        model.backward(torch.ones((), requires_grad=True))


@on_ranks(2)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("how", ["loss.backward", "autograd.grad"])
def test_a_backward_past_model_backward_says_so(how, first):
    """... in the traced run by its name, and then by the module that it comes to."""
    _, model = make()
    said = {
        "loss.backward": "write model.backward\\(loss\\), not loss.backward",
        "autograd.grad": "torch.autograd.grad was called .* come from model.backward",
    }[how]
    if not first:
        smp.step(train)(model, torch.randn(6, 8))
        said = "use model.backward .*: module 'norm' runs on pp_rank 1"

    def wrong(model, x):
        loss = model(x.requires_grad_()).sum()
        loss.backward() if how == "loss.backward" else torch.autograd.grad(loss, x)

    with pytest.raises(RuntimeError, match=said):
        smp.step(wrong)(model, torch.randn(6, 8))


@on_ranks(2)
def test_double_backward_through_a_remote_call_says_so():
    _, model = make()
    smp.step(train)(model, torch.randn(6, 8))

    def twice(model, x):
        loss = model(x).sum()
        model.backward(loss)
        model.backward(loss)

    told = "a second backward through one call of a module .*: module 'norm' runs on pp_rank 1"
    with pytest.raises(RuntimeError, match=told):
        smp.step(twice)(model, torch.randn(6, 8))


def test_an_output_used_as_a_tensor_says_what_makes_one():
    output = smp.StepOutput([torch.zeros(()), torch.ones(())])
    assert not hasattr(output, "item")
    with pytest.raises(AttributeError, match=r"'item': it holds .* reduce_mean\(\)"):
        output.item()
    assert copy.copy(output).reduce_mean() == 0.5


@on_ranks(2)
def test_an_empty_batch_names_the_argument():
    _, model = make()
    with pytest.raises(ValueError, match=r"'x' has 0 samples on axis 0 \(shape \(0, 8\)\)"):
        smp.step(train)(model, torch.randn(0, 8) if smp.pp_rank() == 0 else torch.Tensor(0))
    smp.step(train)(model, torch.randn(6, 8))


@on_ranks(2)
def test_a_parameter_of_another_rank_touched_names_owner_and_path():
    _, model = make()
    smp.step(train)(model, torch.randn(6, 8))
    remote = model.module.b.weight if smp.pp_rank() == 0 else model.module.a.weight
    path, owner = ("b.weight", 1) if smp.pp_rank() == 0 else ("a.weight", 0)
    assert remote.shape == (8, 8) and remote.dtype == torch.float32 and remote.requires_grad
    with pytest.raises(RuntimeError, match=rf"'{path}'.*pp_rank {owner}"):
        remote + 1
    with pytest.raises(RuntimeError, match=rf"'{path}'.*pp_rank {owner}"):
        torch.nn.functional.linear(torch.randn(2, 8), remote)


@on_ranks(2)
@pytest.mark.parametrize(
    "turns", [[(0, "forward")], [(0, "backward")] * 6, [(7, "forward")], ["what"]]
)
def test_an_impossible_schedule_says_so(turns):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": lambda n: turns})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="schedule"):
        smp.step(train)(model, torch.randn(6, 8))


def test_a_step_before_init_says_so():
    @smp.step
    def early(x):
        return x

    with pytest.raises(RuntimeError, match=r"early needs smp.init\(\)"):
        early(torch.randn(4))
    with pytest.raises(RuntimeError, match=r"smp.DistributedModel needs smp.init\(\)"):
        smp.DistributedModel(nn.Linear(2, 2))


class Slotted:
    """An argument that only pickle can take to another rank."""

    __slots__ = ("items", "weight")

    def __init__(self, weight):
        self.items, self.weight = [1], weight


@module_of()
def Changes(self, x, argument, how):
    """Changes its second argument in place, or only its tensor, or nothing."""
    if how == "object":
        argument.items.append(2)
    elif how == "deque":
        argument.append(2)
    elif how == "tensor":
        argument.weight += 1
    return x + 1, argument


@module_of(lambda: {"far": Changes()})
def Hands(self, x, how):
    argument = deque([1]) if how == "deque" else Slotted(torch.zeros(2))
    y, back = self.far(x, argument, how)
    assert back is argument  # the caller's own, as in one process
    return y, [] if how == "deque" else argument.weight


@on_ranks(2)
def test_a_change_that_cannot_travel_back_says_so():
    """Slots, deques: what only pickle describes must not be changed by the callee."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    model = distributed(Hands(), {"": 0, "far": 1})
    step = smp.step(lambda model, x, how: model(x, how))
    x = torch.zeros(2)
    step(model, x, "nothing")
    for how, name in (("deque", "deque"), ("object", "Slotted")):
        with pytest.raises(TypeError, match=f"'far' .* changed an argument of type .*{name}"):
            step(model, x, how)
    got = step(model, x, "tensor")
    if smp.pp_rank() == 0:
        assert torch.equal(got[1].outputs[0], torch.ones(2))


@module_of(lambda: {"linear": nn.Linear(4, 4), "state": None})
def Remembers(self, x):
    """Keeps a tensor with grad from one call to the next."""
    if self.state is None:
        self.state = self.linear(x)
        return None
    y, self.state = self.state * x, None
    return y


@module_of(lambda: {"first": nn.Linear(4, 4), "far": Remembers()})
def CallsTwice(self, x):
    self.far(self.first(x))
    return self.far(x)


@on_ranks(2)
def test_a_graph_that_a_module_keeps_between_calls_says_so():
    """The gradient of the first call's argument would be lost without a word."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    model = distributed(CallsTwice(), {"": 0, "first": 0, "far": 1, "far.linear": 1})
    told = "'far' on pp_rank 1 was called twice .* tensor with grad that the first one kept"
    with pytest.raises(RuntimeError, match=told):
        smp.step(train)(model, torch.randn(2, 4))


def keep_graphs(model, x) -> list[torch.Tensor]:
    """The outputs of a step without a backward; none but on pp_rank 0."""
    kept = []

    @smp.step
    def step(model, x):
        kept.append(model(x))

    step(model, x)
    return kept


@on_ranks(2)
def test_a_graph_that_outlives_its_session_is_dropped_without_a_word():
    """Its call has the number of one that a step of the next session is about."""
    _, model = make()
    x = torch.randn(6, 8)
    kept = keep_graphs(model, x)
    smp.reset()
    reference, model = make()

    def drops(model, x):
        loss = model(x).pow(2).mean()
        if model.partitioned:  # not while it is traced
            kept.clear()
        model.backward(loss)
        return loss

    smp.step(drops)(model, x)
    cut_loop(train, reference, (x,), rank_of=RANK_OF, ranks=2, microbatches=3)
    assert_same_bits(gradients(model), gradients(reference))


@on_ranks(2)
@pytest.mark.parametrize("how", ["loss.backward", "model.backward", "in one session"])
def test_a_backward_into_a_graph_of_an_earlier_session_says_so(how):
    """The session's table of modules has gone, or is another one; or of an earlier step."""
    _, model = make()
    kept = keep_graphs(model, torch.randn(6, 8))
    if how != "in one session":
        smp.reset()
    if how == "loss.backward":
        for output in kept[1:]:  # the first was traced
            with pytest.raises(RuntimeError, match="module 'norm' runs on pp_rank 1"):
                output.sum().backward()
        return
    if how == "model.backward":
        _, model = make()
    step = smp.step(lambda model, x: model.backward(kept[-1].sum() + model(x).sum()))
    with pytest.raises(RuntimeError, match="earlier step made; .*'norm' runs on pp_rank 1"):
        step(model, torch.randn(6, 8))


@on_ranks(2)
def test_a_pin_out_of_range_has_not_failed_in_the_step_function():
    smp.init({"pipeline_parallel_degree": 2})
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = distributed(net, {"1": 7})

    with pytest.raises(smp.PartitionError, match="'1' is pinned to partition 7") as error:
        smp.step(lambda model, x: model(x))(model, torch.zeros(1, 2))

    told = "".join(traceback.format_exception(error.value))
    assert "raised on pp_rank 0 in the partition of the model" in told
    assert "the step function" not in told


@on_ranks(2)
def test_a_name_that_a_model_lacks_is_said_of_the_model_and_of_the_module():
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(nn.Linear(2, 2))

    with pytest.raises(
        AttributeError,
        match="neither smp.DistributedModel nor its .* Linear, has 'no_such_name'",
    ):
        _ = model.no_such_name


@module_of(
    lambda: {
        "first": Part(8, 8),
        "second": nn.Linear(8, 8),
        "norm": nn.BatchNorm1d(8),
        "caught": [],
    }
)
def Fallback(self, x):
    """Tries one child, and then another."""
    x = self.norm(x)
    try:
        y = self.first(x)
    except Trouble as trouble:
        self.caught.append(trouble)
        y = self.second(x)
    return y


@module_of(lambda: {"linear": nn.Linear(8, 8), "part": Part(8, 8)})
def Wrapping(self, x):
    """Passes on what its child raises."""
    return self.part(self.linear(x))


class Tries(nn.Module):
    def __init__(self):
        super().__init__()
        self.fallback, self.wrapping, self.last = Fallback(), Wrapping(), nn.Linear(8, 8)
        self.fallback.first.trouble = self.wrapping.part.trouble = "forward"

    def forward(self, x):
        x = self.fallback(x)
        with contextlib.suppress(Trouble):
            x = self.wrapping(x)
        return self.last(x)


TRIES = [
    {"fallback.first": 1, "wrapping": 1},  # called by a module of pp_rank 0
    {"fallback": 1, "fallback.first": 0, "wrapping": 1, "wrapping.part": 0},
    {"fallback": 1, "wrapping.part": 1},
]


@on_ranks(2)
@pytest.mark.parametrize("where", TRIES)
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_what_a_remote_module_raises_its_caller_can_catch(where, pipeline):
    """Only what leaves the step function ends the step."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 3, "pipeline": pipeline})
    net = Tries()
    plain = copy.deepcopy(net)
    rank_of = {}
    for path, _ in net.named_modules():
        above = path.rpartition(".")[0]
        rank_of[path] = where.get(path, rank_of[above] if path else 0)
    model = distributed(net, rank_of)
    x = torch.randn(6, 8)

    step = smp.step(train)
    for _ in range(2):
        output = step(model, x)
        want = cut_loop(train, plain, (x,), rank_of=rank_of, ranks=2, microbatches=3)
        assert_same_bits(dict(enumerate(output)), dict(enumerate(want.tensors())))
    assert_same_bits(gradients(model), gradients(plain))
    if smp.pp_rank() == rank_of["fallback"]:
        caught = net.fallback.caught
        assert [str(e) for e in caught] == ["in forward of 8"] * 6
        if rank_of["fallback"] != rank_of["fallback.first"]:
            assert "module 'fallback.first', microbatch" in caught[0].__notes__[0]


@on_ranks(2)
def test_what_goes_through_several_ranks_is_still_that_of_the_first():
    """Its description is of where it was raised; there it is the very exception."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 1})
    net = Tries()
    rank_of = {path: 0 for path, _ in net.named_modules()} | {"wrapping": 1}
    rank_of |= {"wrapping.linear": 1}
    model = distributed(net, rank_of)
    net.wrapping.part.trouble = None

    @smp.step
    def step(model, x):
        return model.module.wrapping(model(x))

    x = torch.randn(2, 8)
    step(model, x)
    net.wrapping.part.trouble = "forward"
    with pytest.raises(Trouble, match="in forward of 8") as error:
        step(model, x)
    note = "\n".join(error.value.__notes__)
    assert note.count("raised on") == 1
    assert "raised on pp_rank 0 in module 'wrapping.part', microbatch 0, forward" in note
