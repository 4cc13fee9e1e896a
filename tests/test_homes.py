"""Models that a script leaves on the CPU, on a host with an accelerator (a pretended one)."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import smp
from smp.modules import device_placement
from tests.devices import DEVICES, use
from tests.models.modules import module_of
from tests.ranks import on_ranks

WIDTH = 16
STEPS = 3
on_the_pretended = pytest.mark.parametrize("device", DEVICES[1:2])

traced_on: list[str] = []


@module_of(
    lambda: {
        "first": nn.Linear(WIDTH, WIDTH),
        "second": nn.Linear(WIDTH, WIDTH),
        "scale": nn.Buffer(torch.full((WIDTH,), 1.5)),
    }
)
def Net(self, x: torch.Tensor) -> torch.Tensor:
    if smp.is_tracing():
        traced_on.append(x.device.type)  # the run leaves no mark on the module
    return self.second(torch.tanh(self.first(x)) * self.scale)


def begin(device: str, degree: int = 2, **config) -> torch.device:
    traced_on.clear()
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, **config})
    return torch.device(use(device).type, smp.local_rank())


def net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def split(module: Net) -> Net:
    smp.set_partition(module, 0)
    smp.set_partition(module.second, 1)
    return module


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH)


@smp.step
def train_step(model, x, y):
    loss = F.mse_loss(model(x), y)
    model.backward(loss)
    return loss


def train(model, optimizer, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(train_step(model, *data()).reduce_mean().item())
        optimizer.step()
    return losses


def losses_on_the_cpu(steps: int = STEPS) -> list[float]:
    plain, (x, y) = net(), data()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def close(losses: list[float], want: list[float]) -> bool:
    return losses == pytest.approx(want, rel=1e-5)


def assert_at_home(model: smp.DistributedModel, home: torch.device) -> None:
    mine = [*model.local_parameters(), *model.local_buffers()]
    assert mine and all(tensor.device == home for tensor in mine)
    assert torch.accelerator.current_device_index() == home.index


@on_ranks(1)
@on_the_pretended
def test_without_a_pipeline_it_moves_at_once(device):
    home = begin(device, degree=1)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)  # before the model is wrapped
    model = smp.DistributedModel(module)

    assert_at_home(model, home)
    assert close(train(model, smp.DistributedOptimizer(optimizer)), losses_on_the_cpu())
    assert_at_home(model, home)


@on_ranks(2)
@on_the_pretended
@pytest.mark.parametrize("made", ["before", "after"])
def test_each_rank_moves_what_it_owns_at_the_partition(device, made):
    home = begin(device)
    module = split(net())
    if made == "before":
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model = smp.DistributedModel(module)
    if made == "after":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    assert close(train(model, smp.DistributedOptimizer(optimizer)), losses_on_the_cpu())
    assert_at_home(model, home)
    assert all(p.device.type == device for p in model.parameters())
    mine = {name for name, _ in model.local_named_parameters()}
    for name, value in model.state_dict(cast_to_cpu=False).items():
        assert name not in mine or value.device == home
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert len(optimizer.state) == 2
    assert all(
        v.device == home for s in optimizer.state.values() for v in s.values() if v.dim()
    )


@on_ranks(2)
@on_the_pretended
def test_delayed_parameters_are_made_at_home(device):
    home = begin(device)
    with smp.delay_param_initialization():
        torch.manual_seed(3)
        module = split(Net())
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    assert close(train(model, optimizer), losses_on_the_cpu())
    assert_at_home(model, home)


@on_ranks(2)
@on_the_pretended
def test_several_models_of_one_script_move(device):
    home = begin(device)
    models = [smp.DistributedModel(split(net(seed))) for seed in (3, 5)]

    @smp.step
    def both(models, x):
        return models[1](models[0](x)).sum()

    x, _ = data()
    got = both(models, x).reduce_sum()

    plain = net(5)(net(3)(x)).sum()
    assert got.device.type == device
    assert got.item() == pytest.approx(plain.item(), rel=1e-5)
    for model in models:
        assert_at_home(model, home)


@on_ranks(1, 2)
@on_the_pretended
def test_a_resumed_job_goes_on_at_home(device, tmp_path):
    degree = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    home = begin(device, degree)

    def begun() -> tuple[smp.DistributedModel, smp.DistributedOptimizer]:
        model = smp.DistributedModel(split(net()) if degree == 2 else net())
        return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    model, optimizer = begun()
    train(model, optimizer, 2)
    smp.save_checkpoint(tmp_path, tag="two", model=model, optimizer=optimizer)
    del model, optimizer
    model, optimizer = begun()
    smp.resume_from_checkpoint(tmp_path, tag="two")

    assert close(train(model, optimizer, 1), losses_on_the_cpu(3)[2:])
    assert_at_home(model, home)


@on_ranks(2)
@on_the_pretended
@pytest.mark.parametrize("trace_device, seen", [("cpu", "cpu"), ("gpu", "pretend")])
def test_the_tracing_runs_where_it_shall(device, trace_device, seen):
    begin(device)
    model = smp.DistributedModel(split(net()), trace_device=trace_device)

    train(model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), 1)

    if smp.pp_rank() == 0:
        assert traced_on == [seen]


class OnlyThere(Net):
    def forward(self, x):
        if x.device.type == "cpu":
            raise RuntimeError("no kernel for the CPU")
        return super().forward(x)


@on_ranks(2)
@on_the_pretended
def test_what_the_cpu_cannot_run_is_traced_on_the_device(device):
    home = begin(device)
    model = smp.DistributedModel(split(OnlyThere()), trace_device="cpu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), 1)

    assert_at_home(model, home)
    told = [str(w.message) for w in warned if "cannot run on the CPU" in str(w.message)]
    assert len(told) == (smp.pp_rank() == 0)
    assert all(
        "no kernel for the CPU" in text and "tracing on pretend:0" in text for text in told
    )


@on_ranks(2)
@on_the_pretended
def test_a_model_that_does_not_fit_is_traced_on_the_cpu(device):
    home = begin(device)
    module = split(net())
    model = smp.DistributedModel(module)
    there = []

    def full(function, recurse=True):
        there.append(function)
        if len(there) == 1:
            raise torch.OutOfMemoryError("the device is full")
        return nn.Module._apply(module, function, recurse)

    if smp.pp_rank() == 0:
        module._apply = full
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        train(model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), 1)

    assert_at_home(model, home)
    if smp.pp_rank() == 0:
        assert any("does not fit on pretend:0" in str(w.message) for w in warned)
        assert traced_on == ["cpu"]


@on_ranks(2)
@on_the_pretended
def test_a_model_that_is_on_a_device_stays_there(device):
    begin(device)
    there = torch.device(device, 1)
    model = smp.DistributedModel(split(net()).to(there))
    train(model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), 1)

    assert all(p.device == there for p in model.local_parameters())


@on_ranks(2)
@on_the_pretended
def test_the_device_that_a_script_has_chosen_is_its_home(device):
    begin(device)
    torch.accelerator.set_device_index(1)
    model = smp.DistributedModel(split(net()))
    train(model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters())), 1)

    assert_at_home(model, torch.device(device, 1))


@pytest.mark.parametrize("swaps", [False, True])
def test_how_torch_converts_modules_is_after_a_move_as_it_was(swaps):
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        with (
            pytest.raises(ArithmeticError),
            device_placement.keeping_parameters(torch.device("meta")),
        ):
            assert torch.__future__.get_swap_module_params_on_conversion()
            raise ArithmeticError
        assert torch.__future__.get_swap_module_params_on_conversion() is swaps
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@on_ranks(2)
@on_the_pretended
def test_the_cpu_may_be_asked_for(device):
    smp.init({"pipeline_parallel_degree": 2, "device": "cpu"})
    use(device)
    model = smp.DistributedModel(split(net()))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    assert close(train(model, optimizer), losses_on_the_cpu())
    assert all(p.device.type == "cpu" for p in model.local_parameters())


def test_a_place_for_tracing_that_does_not_exist():
    smp.init()
    with pytest.raises(ValueError, match="trace_device='tpu': must be 'cpu' or 'gpu'"):
        smp.DistributedModel(net(), trace_device="tpu")
    smp.reset()


# ------------------------------------------------------------------------- empty_cache


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@on_ranks(2)
def test_empty_cache_gives_the_system_the_free_pages_of_the_heap():
    begin("cpu")
    smp.empty_cache()
    before = resident()
    blocks = [bytearray(b"x" * (32 << 10)) for _ in range(2000)]
    del blocks
    kept = resident() - before
    smp.empty_cache()
    assert kept > 32 << 20  # or this test shows nothing
    assert resident() - before < 16 << 20


@on_ranks(2)
@on_the_pretended
def test_empty_cache_gives_the_accelerator_what_it_kept(device, monkeypatch):
    home = begin(device)
    emptied: list[int] = []
    module = torch.get_device_module(home)
    monkeypatch.setattr(module, "empty_cache", lambda: emptied.append(1), raising=False)
    model = smp.DistributedModel(split(net()))
    train_step(model, *data())
    emptied.clear()
    smp.empty_cache()
    assert emptied == [1]
    train_step(model, *data())
