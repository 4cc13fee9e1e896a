"""Spec: smp.amp.GradScaler has torch's interface and agrees on overflow."""

import pytest
import torch
from torch import nn

import smp
from tests.models.partition import distributed
from tests.ranks import on_ranks


def one_step(scaler, overflow: bool, fused: bool = False) -> tuple[float, float]:
    """The parameter and the scale after a step with gradient 1, or infinity."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=fused)
    loss = parameter.sum() * (float("inf") if overflow else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return parameter.item(), scaler.get_scale()


@pytest.mark.parametrize("overflow", [False, True])
def test_alone_it_is_torchs(overflow):
    smp.reset()

    ours = one_step(smp.amp.GradScaler(init_scale=8.0), overflow)

    assert ours == one_step(torch.amp.GradScaler("cpu", init_scale=8.0), overflow)
    assert ours == ((0.0, 4.0) if overflow else (-1.0, 8.0))


@pytest.mark.parametrize(
    "settings",
    [
        {"growth_interval": 2},
        {"growth_interval": 1, "growth_factor": 3.0},
        {"backoff_factor": 0.25},
        {"enabled": False},
    ],
)
def test_its_settings_are_torchs(settings):
    smp.reset()
    ours = smp.amp.GradScaler("cpu", init_scale=8.0, **settings)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, **settings)

    for overflow in (False, False, True, False):
        got, want = one_step(ours, overflow), one_step(theirs, overflow)
        assert got == want
    assert ours.is_enabled() == theirs.is_enabled()


def test_it_is_a_torch_scaler():
    assert issubclass(smp.amp.GradScaler, torch.amp.GradScaler)
    assert smp.amp.GradScaler().is_enabled()


def test_its_device_is_the_accelerator_that_there_is_unless_another_is_named(monkeypatch):
    found: list = [None, torch.device("xpu", 0)]
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: found.pop()
    )
    assert [smp.amp.GradScaler()._device for _ in range(2)] == ["xpu", "cpu"]
    assert smp.amp.GradScaler("meta")._device == "meta"


@on_ranks(2)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(which, fused):
    smp.init({"pipeline_parallel_degree": 2})
    scaler = smp.amp.GradScaler(init_scale=8.0)

    assert one_step(scaler, overflow=smp.rank() == which, fused=fused) == (0.0, 4.0)
    assert one_step(scaler, overflow=False, fused=fused) == (-1.0, 4.0)


@on_ranks(2)
def test_an_overflow_in_another_replica_is_its_own_affair():
    smp.init()
    scaler = smp.amp.GradScaler(init_scale=8.0)

    got = one_step(scaler, overflow=smp.rank() == 1)

    assert got == ((0.0, 4.0) if smp.rank() == 1 else (-1.0, 8.0))


@on_ranks(2)
def test_a_rank_without_gradients_takes_part():
    """Only the rank that runs the step function has called scale()."""
    smp.init({"pipeline_parallel_degree": 2})
    scaler = smp.amp.GradScaler(init_scale=8.0)

    if smp.rank() == 0:
        got = one_step(scaler, overflow=True)[1]
    else:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        got = scaler.get_scale()

    assert got == 4.0


@on_ranks(2)
@pytest.mark.parametrize("listed", [False, True])
def test_a_delayed_model_is_traced_with_a_scaled_loss(listed):
    """Its first run has no values; the scale has."""
    smp.init({"pipeline_parallel_degree": 2})
    scaler = smp.amp.GradScaler(init_scale=8.0)
    with smp.delay_param_initialization():
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = distributed(net, [0, 1])
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def step(model, x):
        loss = model(x).sum()
        model.backward(scaler.scale([loss])[0] if listed else scaler.scale(loss))
        return loss

    step(model, torch.ones(2, 3))
    assert smp.pp_rank() == 0 or torch.equal(net[1].bias.grad, torch.full((3,), 16.0))
    scaler.step(optimizer)
    scaler.update()

    assert scaler.get_scale() == 8.0
    assert smp.pp_rank() == 0 or torch.equal(net[1].bias.grad, torch.full((3,), 2.0))


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, smp.amp.GradScaler])
@pytest.mark.parametrize("degree", ["pipeline_parallel_degree", "tensor_parallel_degree"])
def test_torchs_scaler_agrees_for_a_model_of_several_ranks(kind, degree):
    """As a script for one process has it; an optimizer of other parameters is on its own."""
    smp.init({degree: 2})
    scaler, own = (torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2))
    if kind is smp.amp.GradScaler:
        scaler = kind("cpu", init_scale=8.0)
    with smp.tensor_parallelism(enabled=degree == "tensor_parallel_degree"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = distributed(net, [0, smp.pp_size() - 1])
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))

    @smp.step
    def step(model, x):
        loss = model(x).sum()
        model.backward(scaler.scale(loss))
        return loss

    for overflows in (True, False):
        optimizer.zero_grad()
        step(model, torch.ones(2, 4))
        mine = [name for name, _ in model.local_named_parameters()]
        before = {name: model.local_state_dict()[name].clone() for name in mine}
        if overflows and smp.rank() == 1:
            next(iter(model.local_parameters())).grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        after = model.local_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in mine) == overflows
        assert scaler.get_scale() == 4.0
    if smp.rank() == 0:  # alone
        assert one_step(own, overflow=True) == (0.0, 4.0)
    smp.shutdown()
    with pytest.raises(AssertionError, match="_scale is None"):
        torch.amp.GradScaler("cpu").update()


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, smp.amp.GradScaler])
@pytest.mark.parametrize("make", [torch.optim.AdamW, smp.optimizers.FusedAdam])
@pytest.mark.parametrize(
    ("job", "value"),
    [
        ("pipeline_parallel_degree", 2),
        ("tensor_parallel_degree", 2),
        ("shard_optimizer_state", True),
    ],
)
def test_a_fused_optimizer_takes_the_scale_as_a_plain_ones_does(job, value, make, kind):
    """Its step divides by the scale and skips; torch sets and deletes its attributes."""
    smp.init({job: value})
    torch.manual_seed(0)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = distributed(net, [0, smp.pp_size() - 1])
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict(model.state_dict())
    options = {"fused": True} if make is torch.optim.AdamW else {}
    optimizer = smp.DistributedOptimizer(make(model.parameters(), lr=0.1, **options))
    theirs = make(plain.parameters(), lr=0.1, **options)
    scaler, their_scaler = kind("cpu", 8.0), torch.amp.GradScaler("cpu", 8.0)

    @smp.step
    def step(model, x):
        model.backward(scaler.scale(model(x).square().mean()))

    for number in range(4):
        optimizer.zero_grad()
        theirs.zero_grad()
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        step(model, x)
        their_scaler.scale(plain(x).square().mean()).backward()
        if number == 1:
            plain[1].bias.grad.fill_(float("inf"))
            if smp.rank() == 1:
                parameters = optimizer.param_groups[0]["params"]  # of owners, with shards
                next(p for p in parameters if p.grad is not None).grad.fill_(float("inf"))
        for each, its in ((scaler, optimizer), (their_scaler, theirs)):
            each.step(its)
            each.update()
        assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
        assert scaler.get_scale() == their_scaler.get_scale()
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    torch.testing.assert_close(optimizer.state_dict()["state"], theirs.state_dict()["state"])
