"""Spec: memory.md, section 7: the bytes of a rank by kind, and of whom they are told."""

import ctypes
import os

import pytest
import torch
from torch import nn

import smp
from smp import memory
from smp.memory import Bytes, MemoryReport
from tests.devices import DEVICES, use
from tests.models.partition import distributed
from tests.ranks import on_ranks

WIDTH, LAYERS = 256, 4
MATRIX = WIDTH * WIDTH


class Net(nn.Module):
    """Tied layers, one of which has a buffer; half of the layers are another rank's."""

    def __init__(self, peak: list) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.layers[3].register_buffer("there", torch.zeros(MATRIX))
        self.layers[3].register_forward_pre_hook(
            lambda module, args: peak.append(smp.memory_report().every[0].kept_outputs)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def made(device="cpu", **config):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    kept = []
    net = Net(kept).to(use(device))
    net.layers[1].weight = net.layers[0].weight
    owners = {f"layers.{i}": 1 for i in range(2, len(net.layers))}
    model = distributed(net, {"": 0, **owners})
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    return model, optimizer, step, kept


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bf16", [False, True])
def test_each_kind_is_counted_once_on_its_rank_and_device(device, bf16):
    model, optimizer, step, _ = made(device, bf16=bf16)
    device = use(device)
    for _ in range(3):
        step(model, torch.randn(4, WIDTH, device=device))
        optimizer.step()
    at, count, size = smp.pp_rank(), 1 + smp.pp_rank(), 2 if bf16 else 4

    every = smp.memory_report(everyone=True).every
    assert {one.rank for one in every} == {0, 1}
    (one,) = (one for one in every if one.rank == at and one.device == str(device))

    assert one.parameters == count * MATRIX * size
    assert one.buffers == at * MATRIX * size
    assert one.gradients == count * MATRIX * 4
    assert one.masters == (count * MATRIX * 4 if bf16 else 0)
    # AdamW's steps are on the host, of 4 bytes each.
    moments = 2 * count * MATRIX * 4
    assert moments <= one.optimizer_state <= moments + 4 * count
    assert one.peak >= one.in_use > 0
    if one.device != "cpu":
        assert not any(b.parameters or b.gradients for b in every if b.device == "cpu")


@on_ranks(2)
def test_outputs_kept_for_a_caller_that_may_fetch_them_are_counted():
    model, _, step, kept = made(pipeline="simple")
    for _ in range(3):
        step(model, torch.randn(4, WIDTH))
    if smp.pp_rank() == 1:  # the second microbatch sees the first call's output
        assert kept[-2:] == [0, 2 * WIDTH * 4]


@on_ranks(2)
def test_a_peak_is_of_the_time_since_its_reset():
    smp.init({})
    torch.ones(64 << 20, dtype=torch.uint8).sum()
    before = smp.memory_report(reset_peak=True).every[0]
    after = smp.memory_report().every[0]
    assert before.peak >= before.in_use + (32 << 20) > after.peak


@on_ranks(2)
def test_holes_of_the_heap_are_pages_that_the_process_has():
    smp.init({})
    tensors = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(192)]
    before = smp.memory_report().every[0].holes
    del tensors[::2]
    free = smp.memory_report().every[0].holes
    smp.empty_cache()
    assert free >= before + (72 << 20)
    assert smp.memory_report().every[0].holes <= free - (72 << 20)


def test_the_heap_of_a_forked_process_is_several_mappings():
    child = os.fork()
    if child == 0:
        blocks = [bytearray(b"x") * 100_000 for _ in range(2000)]
        del blocks[::2]
        before = memory._given_back()
        ctypes.CDLL(None).malloc_trim(0)
        os._exit(memory._given_back() - before < (64 << 20))
    assert os.waitpid(child, 0)[1] == 0


@on_ranks(2)
@pytest.mark.parametrize("for_report", [True, False], ids=["", "none for the report either"])
def test_without_memory_in_the_optimizer_the_note_has_it_by_kind(for_report, monkeypatch):
    model, optimizer, step, _ = made()
    step(model, torch.randn(4, WIDTH))

    def no_memory():
        raise MemoryError("no more")

    if not for_report:
        monkeypatch.setattr(memory, "_of_this_rank", no_memory)

    optimizer.optimizer.step = no_memory
    with pytest.raises(MemoryError) as caught:
        optimizer.step()
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == for_report
    assert not notes or notes[0].startswith(
        f"memory of pp_rank {smp.pp_rank()}: parameters 0 MiB, buffers"
    )


def test_a_report_is_a_table_and_needs_a_job():
    report = MemoryReport((Bytes(3, "cpu", parameters=3 << 19, optimizer_state=1 << 20),))
    head, names, row = str(report).split("\n")
    assert head == "memory in MiB" and len(names) == len(row)
    assert "optimizer state" in names and row.split()[:4] == ["3", "cpu", "1.5", "0.0"]
    smp.reset()
    with pytest.raises(RuntimeError, match="smp.memory_report"):
        smp.memory_report()
