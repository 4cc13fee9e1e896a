"""``join()``: replicas with fewer batches, compared with DistributedDataParallel's."""

import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import smp
from tests.models.steps import mean_square, train_mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, assert_same_bits, gradients
from tests.test_data_parallel import (
    BACKENDS,
    WIDTH,
    averaged,
    batch_of,
    of_replicas,
    plain_model,
)


def with_statistics() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def assert_alike(model: smp.DistributedModel) -> None:
    """Parameters and buffers have the same bits on all replicas."""
    mine = [p.detach() for p in (*model.local_parameters(), *model.local_buffers())]
    for theirs in smp.allgather(mine, smp.DP_GROUP):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_join_that_stops_early_does_nothing_where_all_end_at_once(in_step):
    """An epoch of as many batches on each replica; join() may come again."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    for epoch in range(2):
        with model.join(throw_on_early_termination=True):
            for number in range(2):
                model.zero_grad()
                train_mean_square(model, batch_of(smp.rank(), 2 * epoch + number), in_step)
        want = of_replicas(plain_model, 2 * epoch + 1)
        assert_same_bits(gradients(model), want)


@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2, 4)
def test_join_that_stops_early_raises_on_all_before_the_step_and_training_goes_on(in_step):
    """Who ran out leaves with it at the block's end; the others have not begun the step."""
    pp = smp.job.bootstrap.mpi_size() // 2
    smp.init({"pipeline_parallel_degree": pp, "ddp": True})
    model = smp.DistributedModel(plain_model())
    step = smp.step(mean_square)
    begun = 0

    def train(number: int) -> None:
        if in_step or pp > 1:
            step(model, batch_of(smp.dp_rank(), number))
        else:
            model(batch_of(smp.dp_rank(), number)).square().mean().backward()

    with (
        pytest.raises(RuntimeError, match="dp_rank 1 ran out of inputs.*early_termination"),
        model.join(throw_on_early_termination=True),
    ):
        for number in range(3 - smp.dp_rank()):
            begun = number
            before = gradients(model)
            train(number)
            model.zero_grad()
    assert begun == 2 - smp.dp_rank() and all(g is None for g in before.values())

    train(5)
    want = of_replicas(plain_model, 5)
    assert_same_bits(gradients(model), want)


@on_ranks(3)
def test_join_with_any_numbers_of_batches_equals_ddp():
    """Parameters after every epoch; no replica's first to leave is special."""
    smp.init({"ddp": True})
    draw = random.Random(3)
    group = smp.get_dp_process_group()
    for by_all, options in (
        (True, {}),
        (False, {}),
        (True, {"overlapping_allreduce": False}),
        (False, {"gradient_as_bucket_view": True}),
    ):
        model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-4, **options)
        reference = DistributedDataParallel(plain_model(), process_group=group)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
        for epoch in range(2):
            batches = [draw.randrange(4) for _ in range(3)]
            for net, optimizer in ((model, ours), (reference, theirs)):
                with net.join(divide_by_initial_world_size=by_all):
                    for number in range(batches[smp.rank()]):
                        optimizer.zero_grad()
                        x = batch_of(smp.rank(), 10 * epoch + number)
                        net(x).square().mean().backward()
                        optimizer.step()
            assert_close(
                dict(model.named_parameters()), dict(reference.module.named_parameters()), 1e-6
            )
            assert_alike(model)


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trains", [True, False])
@on_ranks(2, 4)
def test_who_has_joined_takes_part_whether_buffers_are_exchanged_or_not(trains, backend):
    """They are in training mode alone; all end with the buffers of who had inputs last."""
    pp = smp.job.bootstrap.mpi_size() // 2
    smp.init({"pipeline_parallel_degree": pp, "ddp": True, "ddp_dist_backend": backend})
    model = smp.DistributedModel(with_statistics())
    model.train(trains)
    step = smp.step(mean_square)
    with model.join():
        for number in range(1 + 2 * smp.dp_rank()):
            model.zero_grad()
            step(model, batch_of(smp.dp_rank(), number))
    assert_alike(model)
    if smp.dp_rank() == 1:
        replica = with_statistics().train(trains)
        with torch.no_grad():
            for number in range(2):
                replica(batch_of(0 if number == 0 else 1, number))
        replica(batch_of(1, 2)).square().mean().backward()
        got = gradients(model)
        for name, parameter in replica.named_parameters():
            if name in got:
                torch.testing.assert_close(got[name], parameter.grad / 2)


@on_ranks(2)
def test_join_that_is_not_enabled_does_nothing():
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    with model.join(enable=False):
        for number in range(1 + smp.rank()):
            with model.no_sync():
                smp.step(mean_square)(model, batch_of(smp.rank(), number))
    smp.step(mean_square)(model, batch_of(smp.rank(), 5))


@on_ranks(2)
def test_an_error_in_the_block_ends_join_and_the_next_exchange_is_whole():
    """Averages are over all replicas again."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    with (
        pytest.raises(LookupError, match="mine"),
        model.join(divide_by_initial_world_size=False),
    ):
        raise LookupError("mine")
    model(batch_of(smp.rank())).square().mean().backward()
    want = of_replicas(plain_model)
    assert_same_bits(gradients(model), want)


@on_ranks(2)
def test_parameters_thawed_after_a_forward_without_a_backward_are_refused_on_all_replicas():
    """Also on one that keeps the others company."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    model.module[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"thawed inside of join\(\)"), model.join():
        if smp.rank() == 0:
            model(batch_of(0))
            model.module[0].requires_grad_(True)
            model(batch_of(0))


def own_backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("in_join", [False, True])
@on_ranks(2)
def test_a_first_step_in_evaluation_mode_with_the_scripts_own_backward_is_averaged(
    in_join, microbatches
):
    """``loss.backward()``, not ``model.backward(loss)``."""
    smp.init({"ddp": True, "microbatches": microbatches})
    model = smp.DistributedModel(plain_model())
    model.eval()
    with model.join(enable=in_join):
        smp.step(own_backward)(model, batch_of(smp.rank()))
    replicas = [plain_model(), plain_model()]
    for rank, replica in enumerate(replicas):
        for x in batch_of(rank).chunk(microbatches):
            replica(x).square().mean().backward()
    assert_same_bits(gradients(model), averaged(replicas))
