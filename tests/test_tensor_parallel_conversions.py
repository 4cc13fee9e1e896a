"""Split models that are converted: how they are cut, and the factors of gradients, are kept.

The reference is ``tests/reference/whole_job.py``.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.slicing.slices import Slices, mark, slices_of
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near

WORDS, WIDTH = 11, 6


@module_of(
    lambda: {
        "table": nn.Embedding(WORDS, WIDTH),
        "first": nn.Linear(WIDTH, 7),
        "norm": nn.LayerNorm(7),
        "second": nn.Linear(7, WORDS),
        "scale": nn.Buffer(torch.arange(1.0, 8)),
    }
)
def Net(self, ids: Tensor) -> Tensor:
    """What is cut by inputs, by outputs and by rows; what is whole; a buffer."""
    return self.second(self.norm(self.first(self.table(ids))) * self.scale.sum())


def made() -> Net:
    torch.manual_seed(3)
    net = Net().float()
    for module in (net.table, net.first, net.second):
        smp.set_tensor_parallelism(module, by_outputs=module is net.second)
    return net


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).log_softmax(-1)[..., 0].square().mean()


def batch(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(0, WORDS, (4, 3), generator=generator),)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def convert(job: WholeJob, whose: str, swapping: bool) -> None:
    """To float64, and once more: that changes nothing but perhaps what is behind them."""
    torch.__future__.set_swap_module_params_on_conversion(swapping)
    try:
        converted = job.model if whose == "model" else job.net
        converted.double()
        converted.to("cpu")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    job.plain.double()


@pytest.mark.parametrize("swapping", [False, True], ids=["other data", "swapping"])
@pytest.mark.parametrize("whose", ["model", "module"])
@on_ranks(2, 4)
def test_a_split_model_that_is_converted_trains_as_the_plain_one(whose, swapping):
    """Of 4 ranks, two have each slice."""
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(made(), loss, batch)
    convert(job, whose, swapping)
    for step in range(2):
        job.step(step, max_norm=0.3)
        if not swapping:  # torch refuses it of parameters that are known elsewhere
            convert(job, whose, swapping)
    job.check_parameters()
    assert all(slices_of(w) is not None for w in (job.net.table.weight, job.net.second.bias))
    job.check_state()


@on_ranks(2)
def test_the_slice_of_a_buffer_stays_one():
    smp.init({"tensor_parallel_degree": 2})
    net = made()
    model = smp.DistributedModel(net)
    slices = Slices.even(0, 7, 2)
    net.scale = slices.take(net.scale, smp.tp_rank())
    mark(net.scale, slices, scaled_batch=False)
    model.double()
    assert model.is_distributed_buffer(net.scale)
    assert_near(model.state_dict()["scale"], torch.arange(1.0, 8), "scale")
    with pytest.raises(RuntimeError, match=r"slices of 'table.weight' and 4 other parameters"):
        net.state_dict()


@pytest.mark.parametrize("whose", ["model", "module"])
@on_ranks(2)
def test_gradients_of_new_parameters_have_their_factors(whose):
    """As torch makes them where it overwrites what it converts."""
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(made(), loss, batch)
    before = dict(job.net.named_parameters())
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        convert(job, whose, False)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert not any(before[name] is p for name, p in job.net.named_parameters())
    job.train(0)
    job.check_gradients()


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize("swapping", [False, True], ids=["other data", "swapping"])
def test_a_pipeline_of_split_modules_that_is_converted(swapping):
    """Before the partition, and after it where torch does it."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2})
    net = made()
    smp.set_partition(net, 0)
    smp.set_partition(net.first, 1)
    job = WholeJob(net, loss, batch)
    for step in range(2):
        if not (step and swapping):
            convert(job, "model", swapping)
        job.step(step, max_norm=0.3)
    job.check_parameters()
    job.check_state()
