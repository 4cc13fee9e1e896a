"""Tensors of a GPU between ranks of one host: the device pool, in the whole message path.

Spec: design.md, section 6 (same host, GPU); ``csrc/comm/device/port.h``.  Without a GPU
the pretended accelerator's driver is the stand-in of ``tests/core/stand_in.c``, whose
copies are late; with one the same tests run on ``"cuda"``.  The C library by itself is in
``tests/core/device_test.c`` and ``landings_test.c``.
"""

import ctypes
import os
import warnings
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

import smp
from smp import _core
from tests import accelerator
from tests.devices import DEVICES, use
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks

WIDTH = 64
BATCH = 256  # rows: tensors of 64 KiB
LARGE = 4096  # rows of tensors that land, in a microbatch of two as well

on_gpus = pytest.mark.parametrize("device", DEVICES[1:])
of_each_size = pytest.mark.parametrize("rows", [BATCH, LARGE])


def begin(device: str, **config) -> torch.device:
    if device == accelerator.NAME:
        accelerator.use_driver()
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    return use(device)


@module_of(lambda: {"first": nn.Linear(WIDTH, WIDTH), "second": nn.Linear(WIDTH, WIDTH)})
def Chain(self, x):
    """``first`` is beside its caller, ``second`` on the other rank."""
    return self.second(torch.tanh(self.first(x)))


def chain_on(device: torch.device, second: nn.Module | None = None) -> smp.DistributedModel:
    """The model of a chain there; ``second`` takes the place of its own second part."""
    chain = Chain()
    if second is not None:
        chain.second = second
    return distributed(chain.to(device), {"": 0, "second": 1})


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss.detach()


def train(device: str, steps: int, rows: int = BATCH, **config) -> list[torch.Tensor]:
    """Losses and then parameters of this rank, on the host."""
    on = begin(device, **config)
    torch.manual_seed(3)
    model = chain_on(on)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = [torch.randn(rows, WIDTH) for _ in range(steps)]
    got = []
    for x in inputs:
        optimizer.zero_grad()
        got.append(train_step(model, x.to(on)).stack().cpu())
        optimizer.step()
    return got + [p.detach().cpu() for p in model.local_parameters()]


def memory(device: str, rows: int = LARGE) -> AbstractContextManager[None]:
    """In the block large tensors can land: they lie where the driver knows them."""
    pretended = device == accelerator.NAME and rows == LARGE
    return accelerator.memory_of_driver() if pretended else nullcontext()


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@on_ranks(2)
@on_gpus
@of_each_size
def test_results_are_those_of_the_way_through_host_memory(device, rows):
    """The device pool moves bytes and changes none; the report says that it was used."""
    through_host = train(device, steps=6, rows=rows, comm_device_pool_bytes=0)
    assert _core.counters()["device_tensors"] == 0
    assert "device pool" not in str(smp.comm_report())
    assert "pinned in the pool: 64.0 MiB" in str(smp.comm_report())
    smp.reset()

    with memory(device, rows):
        got = train(device, steps=6, rows=rows)

    assert same(got, through_host)
    report = smp.comm_report()
    assert report.device_pool_why == ""
    assert (report.device_pool_landed > 0) == (rows == LARGE)
    assert report.device_pool_tensors >= 8
    assert report.device_pool_fallbacks <= 4  # before both know each other's pools
    assert 0 < report.device_pool_high <= report.device_pool_bytes == 256 << 20
    assert f"device pool: {report.device_pool_tensors} tensors" in str(report)


@on_ranks(2)
@on_gpus
def test_a_full_pool_is_slower_and_counted(device):
    through_host = train(device, steps=4, comm_device_pool_bytes=0)
    smp.reset()

    got = train(device, steps=4, comm_device_pool_bytes=10_000)

    assert same(got, through_host)
    report = smp.comm_report()
    assert report.device_pool_high <= report.device_pool_bytes <= 10_048
    assert report.device_pool_fallbacks >= 8


@module_of(lambda: {"linear": nn.Linear(1, 1), "kept": None})
def Keeps(self, x):
    """Gives back what it got the call before."""
    before, self.kept = self.kept, x
    return x.clone() if before is None else before


@on_ranks(2)
@on_gpus
@of_each_size
def test_neither_side_sees_what_the_other_writes(device, rows):
    """Zero copy never aliases."""
    on = begin(device, microbatches=1)
    model = chain_on(on, Keeps())

    @smp.step
    def step(model, x):
        seen = []
        for i in range(6):
            mine = x + i
            seen.append(model.module.second(mine))
            mine.fill_(-1)
            if i > 1:
                seen[-1].add_(0)  # what came back is this rank's own
        return torch.stack([one.sum() for one in seen])

    with torch.no_grad(), memory(device, rows):
        step(model, torch.zeros(rows, WIDTH).to(on))  # it keeps 5
        sums = step(model, torch.zeros(rows, WIDTH).to(on)).outputs[0].cpu()

    assert _core.counters()["device_tensors"] > 4
    assert (sums / (rows * WIDTH)).tolist() == [5, 0, 1, 2, 3, 4]
    assert (_core.counters()["device_landed"] > 0) == (rows == LARGE)


@module_of(lambda: {"linear": nn.Linear(1, 1)})
def Turns(self, x):
    """The same bytes in another dtype."""
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.float32)


@on_ranks(2)
@on_gpus
def test_training_goes_on_after_an_evaluation_in_inference_mode(device):
    """Memory offered in inference mode is of tensors that autograd refuses."""
    on = begin(device)
    torch.manual_seed(3)
    model = chain_on(on)

    @smp.step
    def evaluate(model, x):
        return model(x).square().mean()

    x = torch.randn(LARGE, WIDTH)
    losses = []
    with memory(device):
        for _ in range(6):
            losses.append(train_step(model, x.to(on)).stack().cpu())
            with torch.inference_mode():
                losses.append(evaluate(model, x.to(on)).stack().cpu())

    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert _core.counters()["device_landed"] > 0


@on_ranks(2)
@on_gpus
def test_a_tensor_lands_where_one_of_another_dtype_was_expected(device):
    on = begin(device, microbatches=1)
    model = chain_on(on, Turns())

    @smp.step
    def step(model, x):
        turned = [model.module.second(x.view(dtype) + i) for i, dtype in enumerate(dtypes)]
        return [one.sum(dtype=torch.float64) for one in turned]

    x = torch.arange(LARGE * WIDTH, dtype=torch.float32).reshape(LARGE, WIDTH)
    dtypes = [torch.float32, torch.float32, torch.int32, torch.int32, torch.float32]
    with torch.no_grad(), memory(device):
        for _ in range(3):
            got = [one.outputs[0].cpu() for one in step(model, x.to(on))]

    want = [Turns()(x.view(d) + i).sum(dtype=torch.float64) for i, d in enumerate(dtypes)]
    assert torch.equal(torch.stack(got), torch.stack(want))
    assert _core.counters()["device_landed"] > 0


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES[1:2])
def test_a_failure_of_the_driver_is_raised_and_the_next_step_works(device):
    """Never a wrong tensor: what cannot be read is an error in the driver's words."""
    on = begin(device)
    torch.manual_seed(3)
    model = chain_on(on)
    x = torch.randn(BATCH, WIDTH)
    want = train_step(model, x.to(on)).stack().cpu()
    train_step(model, x.to(on))
    stand_in = ctypes.CDLL(os.environ[accelerator.DRIVER])
    table = (ctypes.c_void_p * 6).in_dll(stand_in, "stand_in")
    fail = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(table[0])
    name = b"cuMemcpyDtoDAsync_v2"  # kept by the stand-in
    if smp.pp_rank() == 1:
        fail(name, 1, 2)

    with pytest.raises(RuntimeError, match="cuMemcpyDtoDAsync: CUDA_ERROR_OUT_OF_MEMORY"):
        train_step(model, x.to(on))
    smp.barrier()
    assert torch.equal(train_step(model, x.to(on)).stack().cpu(), want)

    report = smp.comm_report()
    assert ("CUDA_ERROR_OUT_OF_MEMORY" in str(report)) == (smp.pp_rank() == 1)


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES[1:2])
def test_copies_that_change_bytes_are_found_out_before_a_tensor_travels(device):
    """The way is tried first: results are right, one rank warns, the reports say why."""
    through_host = train(device, steps=4, comm_device_pool_bytes=0)
    rank = smp.pp_rank()
    smp.reset()

    with (
        accelerator.spoilt_copies(rank == 1),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        got = train(device, steps=4)

    assert same(got, through_host)
    told = [str(w.message) for w in caught if "go through host memory" in str(w.message)]
    report = smp.comm_report()
    assert report.device_pool_tensors == 0
    if rank == 1:
        assert len(told) == 1
        assert "from the device pool of rank 0 to rank 1 was tried and cannot" in told[0]
        assert "other bytes" in report.device_pool_why
    else:
        assert told == []
        assert report.device_pool_why == "a trial failed on rank 1"
