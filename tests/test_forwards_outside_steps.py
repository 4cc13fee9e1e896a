"""Replicas without ``@smp.step``: a forward, ``loss.backward()``, and the average is there.

The reference is DistributedDataParallel, or the replicas in this process.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, assert_same_bits, gradients
from tests.test_data_parallel import (
    WIDTH,
    averaged,
    batch_of,
    of_replicas,
    plain_model,
)


@module_of(lambda: {"inner": plain_model(), "mean": nn.Buffer(torch.zeros(WIDTH))})
def Counted(self, x: Tensor) -> Tensor:
    """A buffer that each forward changes, and that no backward needs."""
    self.mean.mul_(0.5).add_(x.mean(0))
    return self.inner(x)


@on_ranks(2)
def test_several_forwards_before_a_backward_are_those_of_ddp():
    """Each begins with the first replica's buffers."""
    smp.init({"ddp": True})
    group = smp.get_dp_process_group()
    model = smp.DistributedModel(Counted())
    reference = DistributedDataParallel(Counted(), process_group=group)
    for number in range(2):
        for net in (model, reference):
            losses = [net(batch_of(smp.rank(), 3 * number + n)).square().mean() for n in (0, 1)]
            sum(losses).backward()
        assert_close(gradients(model), gradients(reference.module), 1e-6)
        assert_same_bits(
            dict(model.module.named_buffers()), dict(reference.module.named_buffers())
        )


@on_ranks(2)
def test_a_forward_without_gradients_between_forward_and_backward_exchanges_nothing():
    """One replica alone may make it, in training mode, too."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    for number in range(2):
        model.zero_grad()
        loss = model(batch_of(smp.rank(), number)).square().mean()
        if smp.rank() == number:
            with torch.no_grad():
                model(batch_of(5))
        loss.backward()
        want = of_replicas(plain_model, number)
        assert_same_bits(gradients(model), want)


@pytest.mark.parametrize("is_reentrant", [True, False])
@on_ranks(2)
def test_a_checkpoint_around_the_whole_model(is_reentrant):
    """Its forward runs again inside of the backward."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-5)
    for number in range(2):
        model.zero_grad()
        replicas = [plain_model(), plain_model()]
        x = batch_of(smp.rank(), number).requires_grad_()
        checkpoint(model, x, use_reentrant=is_reentrant).square().mean().backward()
        for rank, replica in enumerate(replicas):
            replica(batch_of(rank, number)).square().mean().backward()
        assert_same_bits(gradients(model), averaged(replicas))


@module_of(lambda: {"inner": plain_model()})
def Nested(self, x: Tensor) -> dict:
    """Outputs in containers, some without gradients."""
    out = self.inner(x)
    return {"all": [(out, out.detach())], "number": 3, "least": out.min(), "none": None}


@pytest.mark.parametrize("used", [["least"], ["all"], ["all", "least"]])
@on_ranks(2)
def test_backward_may_begin_at_any_output(used):
    smp.init({"ddp": True})
    model = smp.DistributedModel(Nested())

    def loss_of(outputs: dict) -> Tensor:
        terms = {"all": outputs["all"][0][0].square().mean(), "least": outputs["least"]}
        return sum(terms[name] for name in used)

    outputs = model(batch_of(smp.rank()))
    assert outputs["number"] == 3 and not outputs["all"][0][1].requires_grad
    loss_of(outputs).backward()
    replicas = [Nested(), Nested()]
    for rank, replica in enumerate(replicas):
        loss_of(replica(batch_of(rank))).backward()
    assert_same_bits(gradients(model), averaged(replicas))


@on_ranks(2)
def test_a_forward_without_a_backward_is_made_up_for_by_the_next():
    """Both begin their exchange with a forward, and end it with a backward."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    lost = model(batch_of(smp.rank()))
    del lost
    model(batch_of(smp.rank(), 1)).square().mean().backward()
    want = of_replicas(plain_model, 1)
    assert_same_bits(gradients(model), want)
