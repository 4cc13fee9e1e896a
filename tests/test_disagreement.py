"""Spec: ranks that disagree (configuration, model, partition, calls) are told so.

The error is raised on every rank and names both sides; nobody waits for ever.
"""

import re

import pytest
import torch
from torch import nn

import smp
from smp.execution.first_step import PartitionMismatch
from smp.job.collective_calls import CallMismatch
from smp.partitioning.partition import Partition
from tests.models.modules import module_of
from tests.models.steps import total
from tests.ranks import on_ranks

WIDTH = 4


@module_of(
    lambda: {
        "first": nn.Linear(WIDTH, WIDTH),
        "second": nn.Linear(WIDTH, WIDTH),
        "norm": nn.BatchNorm1d(WIDTH),
    }
)
def Net(self, x: torch.Tensor) -> torch.Tensor:
    return self.norm(self.second(self.first(x)))


class Other(nn.Linear):
    pass


def another_class(net: Net) -> None:
    net.second = Other(WIDTH, WIDTH)


def another_shape(net: Net) -> None:
    net.second.weight = nn.Parameter(torch.ones(WIDTH, WIDTH + 1))


def another_dtype(net: Net) -> None:
    net.second.to(torch.float64)


def another_name(net: Net) -> None:
    del net.second.bias
    net.second.register_parameter("offset", nn.Parameter(torch.ones(WIDTH)))


def no_bias(net: Net) -> None:
    net.second.bias = None


def another_buffer(net: Net) -> None:
    net.norm.register_buffer("running_mean", torch.zeros(WIDTH + 1))


def frozen(net: Net) -> None:
    net.second.requires_grad_(False)


def one_more(net: Net) -> None:
    net.third = nn.Linear(1, 1)


def another_pin(net: Net) -> None:
    smp.set_partition(net.second, 0)


DIFFERENCES = {
    another_class: ("module 'second' (Linear)", "module 'second' (Other)"),
    another_shape: (
        "parameter 'second.weight' [4, 4] float32",
        "parameter 'second.weight' [4, 5] float32",
    ),
    another_dtype: ("'second.weight' [4, 4] float32", "'second.weight' [4, 4] float64"),
    another_name: ("parameter 'second.bias' [4]", "parameter 'second.offset' [4]"),
    no_bias: ("parameter 'second.bias' [4]", "parameter 'second.bias' without a value"),
    another_buffer: ("'norm.running_mean' [4]", "'norm.running_mean' [5]"),
    frozen: ("'second.weight' [4, 4] float32", "'second.weight' [4, 4] float32, frozen"),
    one_more: ("nothing more", "module 'third' (Linear)"),
    another_pin: ("'second' (Linear) on pp_rank 1, pinned to 1", "on pp_rank 1, pinned to 0"),
}


@on_ranks(2, 4)
@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_rank_with_another_model_is_named_on_every_rank(change):
    """Rank 1 has it; the others hear what it has."""
    smp.init({"pipeline_parallel_degree": 2})
    net = Net()
    smp.set_partition(net, 0)
    smp.set_partition(net.second, 1)
    if smp.rank() == 1:
        change(net)
    model = smp.DistributedModel(net)
    first, other = map(re.escape, DIFFERENCES[change])

    told = f"rank 0 has .*{first}.*; rank 1 has .*{other}"
    with pytest.raises(PartitionMismatch, match=told):
        smp.step(total)(model, torch.randn(2, WIDTH))


@on_ranks(2)
def test_a_rank_with_one_model_more_is_named():
    smp.init({"pipeline_parallel_degree": 2})
    model = smp.DistributedModel(Net())
    more = smp.DistributedModel(Net()) if smp.rank() == 1 else None

    with pytest.raises(PartitionMismatch, match="rank 0 has 1 models .*; rank 1 has 2 models"):
        smp.step(total)(model, torch.randn(2, WIDTH))
    assert more is None or not more.partitioned


@on_ranks(2)
def test_a_rank_that_would_apply_another_partition_is_named():
    """Bytes that were changed without their hash are refused as damaged; these were not."""
    smp.init({"pipeline_parallel_degree": 2})
    read = Partition.from_bytes
    if smp.rank() == 1:

        def misread(data):
            partition = read(data)
            partition.rank_of["second"] ^= 1
            return partition

        Partition.from_bytes = misread
    try:
        with pytest.raises(
            PartitionMismatch, match=r"rank 0 has module 'second' .* on pp_rank (\d).*; rank 1"
        ):
            smp.step(total)(smp.DistributedModel(Net()), torch.randn(2, WIDTH))
    finally:
        Partition.from_bytes = read


# ------------------------------------------------------------------- different calls


def trained_model() -> smp.DistributedModel:
    model = smp.DistributedModel(Net())
    smp.step(total)(model, torch.randn(2, WIDTH))
    return model


def first_step(model, path):
    smp.step(total)(smp.DistributedModel(Net()), torch.randn(2, WIDTH))


CALLS = {
    "smp.barrier": lambda model, path: smp.barrier(),
    "smp.barrier of MP_GROUP": lambda model, path: smp.barrier(smp.MP_GROUP),
    "smp.allgather": lambda model, path: smp.allgather(torch.ones(1000), smp.WORLD),
    "smp.allgather of MP_GROUP": lambda model, path: smp.allgather([1], smp.MP_GROUP),
    "smp.save_checkpoint": lambda model, path: smp.save_checkpoint(path, "a", model=model),
    "smp.resume_from_checkpoint": lambda model, path: smp.resume_from_checkpoint(path),
    "model.state_dict": lambda model, path: model.state_dict(),
    "the first step of a model": first_step,
}


@on_ranks(2, 3)
@pytest.mark.parametrize(
    "calls",
    [
        ("smp.barrier", "smp.allgather"),
        ("smp.allgather", "smp.barrier of MP_GROUP"),
        ("smp.allgather of MP_GROUP", "smp.allgather"),
        ("smp.allgather", "smp.save_checkpoint"),
        ("smp.resume_from_checkpoint", "smp.save_checkpoint"),
        ("model.state_dict", "smp.barrier"),
        ("the first step of a model", "smp.allgather"),
        ("smp.barrier", "the first step of a model"),
    ],
)
def test_ranks_that_make_different_calls_raise_and_name_both(calls, tmp_path):
    """The first rank makes one call, the others make the other: all raise, with what,
    which of the group's, and where in the script."""
    smp.init({"pipeline_parallel_degree": smp_size()})
    model = trained_model()
    mine = calls[min(smp.rank(), 1)]
    told = [re.escape(name.partition(" of MP")[0]) for name in calls]
    where = r"\(call \d+ of (WORLD|MP_GROUP), [^;]*test_disagreement.py:\d+\)"

    with pytest.raises(
        CallMismatch, match=rf"rank 0: {told[0]} {where}; rank [12]: {told[1]} {where}"
    ):
        CALLS[mine](model, tmp_path)
    with pytest.raises(CallMismatch, match="an earlier call failed: the ranks make different"):
        smp.barrier()


def smp_size() -> int:
    """The number of ranks before ``smp.init``."""
    from smp.job import bootstrap

    return bootstrap.connect().size
