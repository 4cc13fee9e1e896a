"""Spec: how an error becomes the same one on every rank: what its notes say, and the memory of
a rank that has none left."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp import _core, runtime_state
from smp.execution import first_step
from smp.pytorch import pickling, staging
from smp.runtime import failures
from smp.tensor_parallel.backward.step_end import PeerFailed
from tests.models.modules import in_backward
from tests.models.partition import distributed
from tests.ranks import on_ranks

MIB = 1 << 20
NO_MEMORY = [
    MemoryError("no memory"),
    torch.OutOfMemoryError("no memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
]


class Layer(nn.Module):
    """1 MiB of parameters and 2 MiB of buffers; ``error``: what it raises."""

    error: Exception | None = None
    phase = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, MIB // 32))
        self.register_buffer("table", torch.zeros(2 * MIB, dtype=torch.uint8))

    def forward(self, x):
        if self.error is not None and not smp.is_tracing():
            x = self.fail(x) if self.phase == "forward" else in_backward(x, self.fail)
        return x * self.weight.mean()

    def fail(self, _):
        raise self.error


def make(**config: Any) -> smp.DistributedModel:
    """A layer on each of two ranks."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    net = nn.Sequential(Layer(), Layer())
    return distributed(net, range(len(net)))


@smp.step
def train(model, x):
    model.backward(model(x.requires_grad_()).sum())


def notes_of_failed_step(model: smp.DistributedModel, error: Exception) -> str:
    with pytest.raises(type(error)) as caught:
        train(model, torch.ones(4, 2))
    return "\n".join(caught.value.__notes__)


@on_ranks(2)
@pytest.mark.sample(3)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(len(NO_MEMORY)))
def test_without_memory_every_rank_hears_what_the_ranks_memory_holds(rank, number):
    model = make()
    train(model, torch.ones(4, 2))
    if smp.pp_rank() == rank:
        model.module[rank].error = NO_MEMORY[number]

    notes = notes_of_failed_step(model, NO_MEMORY[number])

    assert notes.count("memory of") == notes.count(f"memory of pp_rank {rank}") > 0
    assert "parameters 1 MiB, buffers 2 MiB, gradients 1 MiB, buckets 0 MiB" in notes


@on_ranks(2)
@pytest.mark.parametrize("before", [0, 1])
def test_gradients_that_no_parameter_shows_yet_count_as_memory(before):
    """The layer's weight has its gradient when the backward fails further on; ``before``:
    MiB that it had when the step began."""
    model = make(microbatches=1)
    layer = model.module[1]
    layer.phase, layer.error = "backward", MemoryError()
    if before:
        layer.weight.grad = torch.ones_like(layer.weight)

    assert f"gradients {before + 1} MiB" in notes_of_failed_step(model, MemoryError())


@on_ranks(2)
def test_an_error_of_another_kind_says_nothing_of_memory():
    model = make()
    train(model, torch.ones(4, 2))
    if smp.pp_rank() == 1:
        model.module[1].error = RuntimeError("no good")

    assert "memory of" not in notes_of_failed_step(model, RuntimeError("no good"))


@on_ranks(2)
def test_an_error_before_the_first_step_says_whether_the_model_ran():
    model = make()

    @smp.step
    def fails(model, x):
        raise ValueError("in the traced run")

    with pytest.raises(ValueError) as caught:
        fails(model, torch.ones(4, 2))
    where = "raised on pp_rank 0 in the step function, microbatch 0, forward"
    assert any(note.startswith(where) for note in caught.value.__notes__)

    model.module[1].weight = model.module[0].weight  # they are pinned apart
    with pytest.raises(smp.PartitionError) as caught:
        train(model, torch.ones(4, 2))
    where = "raised on pp_rank 0 in the partition of the model"
    assert any(note.startswith(where) for note in caught.value.__notes__)


WHO, MICROBATCH = "pp_rank 1", 3


class Odd(Exception):
    """Cannot be made again of its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("path", [None, "net.far"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_says_on_which_rank_and_where_it_was_raised(path, phase):
    """The rank that raised it has the traceback already; others get it in the note."""
    where = "the step function" if path is None else f"module '{path}'"
    note = f"raised on {WHO} in {where}, microbatch {MICROBATCH}, {phase}"
    error = ValueError("no good", 7)
    number = _core.phases.index(phase)
    told = failures.describe(error, path, MICROBATCH, number, WHO)

    here = failures.rebuild(told, error)
    assert here is error and here.__notes__ == [note]
    there = failures.rebuild(told, None)
    assert type(there) is ValueError and there.args == ("no good", 7)
    [said] = there.__notes__
    assert said == f"{note}; there:\nValueError: ('no good', 7)\n"

    odd = Odd(1, 2)
    there = failures.rebuild(failures.describe(odd, path, MICROBATCH, number, WHO), None)
    assert type(there) is Odd and str(there) == "1 and 2"
    assert there.__notes__[0].startswith(note)


class Once(Exception):
    """Can be made again of its arguments on the rank that raised it alone."""

    there = True

    def __reduce__(self):
        return Once.make, self.args

    @classmethod
    def make(cls, *args: Any) -> "Once":
        if not cls.there:
            raise ImportError("no such module here")
        return cls(*args)


def test_an_error_that_this_rank_cannot_make_is_told_in_words(monkeypatch):
    told = failures.describe(Once("no good"), "far", MICROBATCH, 0, WHO)
    assert type(failures.rebuild(told, None)) is Once
    monkeypatch.setattr(Once, "there", False)
    there = failures.rebuild(told, None)
    assert type(there) is RuntimeError and str(there) == f"{__name__}.Once: no good"
    assert there.__notes__[0].startswith(f"raised on {WHO} in module 'far', microbatch")


def test_an_error_on_its_way_is_still_that_of_the_rank_that_raised_it():
    told = failures.describe(ValueError("no good"), "far", MICROBATCH, 0, WHO)
    passing = failures.raised_there(told)

    again = failures.describe(passing, "near", 5, 1, "pp_rank 0")
    assert again == told and failures.told_of(passing) == told
    assert failures.rebuild(again, passing) is passing and len(passing.__notes__) == 1
    assert failures.told_of(ValueError()) is None


def test_the_partition_has_no_microbatch():
    told = failures.describe(ValueError("no"), None, failures.IN_PARTITION, 0, WHO)
    [note] = failures.rebuild(told, None).__notes__
    assert note.startswith(f"raised on {WHO} in the partition of the model; there:")


@pytest.mark.parametrize(("code", "shown"), [(None, ""), (0, "0"), (False, "False")])
def test_an_exit_that_would_pass_for_success_is_an_error(code, shown):
    given = SystemExit(code)
    failure = failures.as_failure(given)
    assert type(failure) is RuntimeError and failure.__cause__ is given
    assert str(failure).startswith(f"smp: sys.exit({shown}) inside a step, which the other")
    for other in (SystemExit(3), SystemExit("why"), KeyboardInterrupt(), ValueError()):
        assert failures.as_failure(other) is other


class Parcel:
    """Of a class that the codec does not know."""

    def __init__(self, **contents: Any) -> None:
        self.__dict__.update(contents)


def test_what_is_pickled_has_its_tensors_and_modules_beside_it():
    tensor, module = torch.ones(2, requires_grad=True), nn.Linear(1, 1)
    data, outside = pickling.dumps(Parcel(inner=[tensor, {"m": module}], number=3))

    assert [id(one) for one in outside] == [id(tensor), id(module)]
    got = pickling.loads(data, outside)
    assert type(got) is Parcel and got.number == 3
    assert got.inner[0] is tensor and got.inner[1]["m"] is module
    other = torch.zeros(1)
    assert pickling.loads(data, [other, module]).inner[0] is other


def test_a_tensor_that_cannot_be_sent_for_another_reason_is_described_with_it():
    said = staging.unsendable(torch.ones(2, 3), RuntimeError("no memory\nfrom there"))
    assert said == (
        "a tensor of shape (2, 3) and torch.float32 cannot be sent to another rank: no memory"
    )


@pytest.mark.parametrize("inside", [lambda: 1, threading.Lock()], ids=["lambda", "lock"])
def test_what_cannot_be_pickled_is_named_by_its_class(inside):
    told = f"a {__name__}.Parcel cannot be sent to another rank: .*"
    with pytest.raises(TypeError, match=told) as caught:
        pickling.dumps(Parcel(inside=inside))
    assert str(caught.value.__cause__) in str(caught.value)


def test_of_ranks_that_failed_in_the_traced_run_the_one_that_began_it_is_heard():
    followed, also = (
        failures.describe(PeerFailed("another one"), None, 0, 0, f"rank {n}") for n in (0, 1)
    )
    began = failures.describe(ValueError("no good"), None, 0, 0, "rank 2")
    assert first_step._first_failure([followed, began, also]) is began
    assert first_step._first_failure([began, followed]) is began
    assert first_step._first_failure([followed, also]) is followed


@pytest.mark.parametrize(
    ("size", "group", "in_sequence", "name"),
    [
        (2, [0, 1], False, "pp_rank 1"),
        (4, [0, 1], False, "rank 1 (pp_rank 1)"),
        (4, [3, 1], False, "rank 1 (pp_rank 1)"),
        (4, [3, 2, 1, 0], False, "rank 1 (tp_rank 1, pp_rank 0)"),
        (4, [0, 1, 2, 3], False, "rank 1 (tp_rank 0, pp_rank 1)"),
        (4, [3, 2, 1, 0], True, "rank 1 (dp_rank 1, pp_rank 0)"),
    ],
)
def test_a_rank_is_named_as_closely_as_the_job_needs(size, group, in_sequence, name):
    one = SimpleNamespace(
        core_group=group, pp_size=2, boot=SimpleNamespace(size=size), in_sequence=in_sequence
    )
    assert runtime_state.Runtime.name_of(one, 1) == name
