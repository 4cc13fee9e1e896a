"""Communication hooks: what they may ask of a bucket, and what becomes of what they return.

The reference is torch's DistributedDataParallel with the same hook.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import smp
from tests.models.steps import mean_square, train_mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, assert_same_bits, gradients
from tests.test_data_parallel import (
    averaged,
    batch_of,
    plain_model,
)


def power_sgd(group: dist.ProcessGroup) -> tuple:
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    return state, powerSGD_hook.powerSGD_hook


# What registers each: a group -> state and hook.
HOOKS = {
    "allreduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "fp16 around": lambda group: (
        group,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "power sgd": power_sgd,
}


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_torchs_hooks_do_what_they_do_in_ddp(name):
    """Several steps: some keep what they left out for the next one."""
    smp.init({"ddp": True})
    group = smp.get_dp_process_group()
    reference = DistributedDataParallel(plain_model(), process_group=group)
    reference.register_comm_hook(*HOOKS[name](group))
    model = smp.DistributedModel(plain_model())
    model.register_comm_hook(*HOOKS[name](group))
    for number in range(4):
        x = batch_of(smp.rank(), number)
        for net in (reference, model):
            net.zero_grad()
            net(x).square().mean().backward()
        assert_close(gradients(model), gradients(reference.module), 1e-2)


def done(value: object) -> torch.futures.Future:
    future = torch.futures.Future()
    future.set_result(value)
    return future


def summed(group: dist.ProcessGroup, bucket: object) -> torch.futures.Future:
    """The sum, although hooks return averages: it tells who was asked."""
    dist.all_reduce(bucket.buffer(), group=group)
    return done(bucket.buffer())


@pytest.mark.parametrize("as_views", [False, True])
@on_ranks(2)
def test_a_bucket_shows_gradients_in_their_shapes_as_parts_of_its_buffer(as_views):
    """As long as it is on its way; later it says that it has none, unless they lie in it."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model(), gradient_as_bucket_view=as_views)
    group, kept = smp.get_dp_process_group(), []

    def hook(state, bucket):
        assert bucket.process_group() is group and bucket.index() == 0 and bucket.is_last()
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert gradient.shape == parameter.shape
            assert torch.equal(gradient, parameter.grad)
        numbers = torch.arange(bucket.buffer().numel(), dtype=torch.float32)
        bucket.set_buffer(numbers)
        assert torch.equal(torch.cat([g.reshape(-1) for g in bucket.gradients()]), numbers)
        bucket.set_buffer(bucket.buffer())
        kept.append(bucket)
        return done([bucket.buffer()])  # as the future of a collective has it

    model.register_comm_hook(None, hook)
    smp.step(mean_square)(model, batch_of(smp.rank()))
    (bucket,) = kept
    got = torch.cat([p.grad.reshape(-1) for p in bucket.parameters()])
    assert torch.equal(got, torch.arange(got.numel(), dtype=torch.float32))
    if as_views:
        assert torch.equal(bucket.buffer(), got)
    else:
        with pytest.raises(RuntimeError, match="bucket 0 has no gradients now"):
            bucket.buffer()


@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_a_hook_hears_of_exchanges_alone_and_nobody_divides_what_it_returns(in_step):
    """Not of steps under no_sync(), whose gradients the next exchange has, too."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    calls = []

    def hook(group, bucket):
        calls.append(bucket.index())
        return summed(group, bucket)

    model.register_comm_hook(smp.get_dp_process_group(), hook)

    with model.no_sync():
        train_mean_square(model, batch_of(smp.rank(), 0), in_step)
    assert calls == []
    train_mean_square(model, batch_of(smp.rank(), 1), in_step)
    assert calls == [0]
    replicas = [plain_model(), plain_model()]
    for rank, replica in enumerate(replicas):
        for number in range(2):
            replica(batch_of(rank, number)).square().mean().backward()
    want = {name: 2 * gradient for name, gradient in averaged(replicas).items()}
    assert_same_bits(gradients(model), want)


@on_ranks(2)
def test_who_has_joined_calls_the_hook_with_zeros():
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    model.register_comm_hook(smp.get_dp_process_group(), summed)
    with model.join(divide_by_initial_world_size=False):
        for number in range(1 + smp.rank()):
            model.zero_grad()
            smp.step(mean_square)(model, batch_of(smp.rank(), number))
    if smp.rank() == 1:
        alone = plain_model()
        alone(batch_of(1, 1)).square().mean().backward()
        assert_same_bits(gradients(model), gradients(alone))


@pytest.mark.parametrize("overlaps", [True, False])
@on_ranks(2)
def test_a_future_that_ends_with_an_error_fails_the_step_and_the_next_one_works(overlaps):
    """On the replica whose future it is, after the others have all that they wait for."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model(), overlapping_allreduce=overlaps)
    fails = [True]

    def hook(group, bucket):
        future = summed(group, bucket)
        if fails[0]:
            future = torch.futures.Future()
            future.set_exception(LookupError("lost"))
        return future

    model.register_comm_hook(smp.get_dp_process_group(), hook)
    with pytest.raises(LookupError, match="lost"):
        smp.step(mean_square)(model, batch_of(smp.rank()))
    model.zero_grad()
    fails[0] = False
    smp.step(mean_square)(model, batch_of(smp.rank(), 1))
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_what_is_no_hook_is_refused_and_does_not_count():
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    with pytest.raises(TypeError, match="communication hook is a function, not 'fp16'"):
        model.register_comm_hook(None, "fp16")
    model.register_comm_hook(smp.get_dp_process_group(), summed)
    with pytest.raises(RuntimeError, match="hook already"):
        model.register_comm_hook(None, summed)
