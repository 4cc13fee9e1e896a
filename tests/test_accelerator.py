"""Models on an accelerator: what crosses between ranks, and what a rank's threads share.

Spec: design.md, sections 3 (state that threads do not inherit) and 6 (staging).  Random
trees on an accelerator are in ``tests/test_equality.py``.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import smp
from smp import _core
from smp.pytorch import accelerator as devices_of_torch
from smp.pytorch import staging
from tests import accelerator
from tests.devices import DEVICES, SEVERAL, use
from tests.models.modules import in_backward, module_of
from tests.models.partition import distributed
from tests.models.steps import total
from tests.ranks import on_ranks
from tests.test_device_pool import WIDTH, chain_on
from tests.test_device_pool import begin as begin_with_pool

on_accelerators = pytest.mark.parametrize("device", DEVICES[1:])


@module_of(lambda: {"weight": nn.Parameter(torch.arange(12.0).reshape(3, 4))})
def Giver(self, x):
    """Returns tensors of many layouts, made of its parameter and its input."""
    wide = torch.arange(10_000, device=x.device, dtype=torch.float32).reshape(100, 100)
    return {
        "same": x,
        "transposed": (x * self.weight).t(),
        "expanded": self.weight.sum(0, keepdim=True).expand(5, 4),
        "column": wide[:, 7],
        "large": wide.t(),
        "offset": wide[3:50].clone()[2:, 5:],
        "empty": x[:0],
        "scalar": self.weight.sum(),
        "bools": x > 0,
        "halves": x.to(torch.bfloat16),
        "integers": torch.arange(7, device=x.device),
        "host": torch.ones(3000),
    }


@module_of(lambda: {"giver": Giver()})
def Root(self, x):
    return self.giver(x)


def begin(device: str, **config) -> torch.device:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, **config})
    return use(device)


@on_ranks(2)
@on_accelerators
@pytest.mark.parametrize("way", ["shm", "mpi", "device pool"])
def test_tensors_of_any_layout_arrive_as_they_were(device, way):
    """Every tensor carries dtype, shape and strides; one object arrives as one."""
    if way == "device pool":
        on = begin_with_pool(device, microbatches=1)
    else:
        on = begin(device, microbatches=1, comm_transports=[way])
    root = Root().to(on)
    x = torch.randn(3, 4).to(on)
    want = root(x)
    model = distributed(root, {"": 0, "giver": 1})
    got = {}

    @smp.step
    def step(model, x):
        got.update(model(x), x=x)
        return 0

    for _ in range(4):
        step(model, x)

    assert way != "device pool" or _core.counters()["device_tensors"] > 0
    if smp.pp_rank() == 0:
        assert got["same"] is got["x"]
        for name, tensor in want.items():
            mine = got[name]
            assert mine.device == tensor.device and mine.dtype == tensor.dtype, name
            assert mine.shape == tensor.shape, name
            assert torch.equal(mine.cpu(), tensor.cpu()), name
            if name not in ("column", "offset"):  # those with gaps travel without them
                assert mine.stride() == tensor.stride(), name
            assert mine._version == 0 or name == "same", name


@on_ranks(2)
@on_accelerators
def test_what_a_module_changes_in_place_comes_back(device):
    """What the callee changes in place is written back to the caller's object."""
    on = begin(device)

    @module_of(lambda: {"linear": nn.Linear(WIDTH, WIDTH)})
    def Doubles(self, x):
        x.mul_(2)
        return self.linear(x)

    model = chain_on(on, Doubles())

    @smp.step
    def step(model, x):
        before = x.clone()
        model.module.second(x)
        return (x - 2 * before).abs().sum()

    got = step(model, torch.randn(4, WIDTH).to(on))

    assert all(one.item() == 0 for one in got)
    assert all(one.device == on for one in got)


@on_ranks(2)
@pytest.mark.parametrize("device", SEVERAL)
def test_tensors_arrive_on_the_device_of_the_ranks_own_parameters(device):
    """Device 1 of one rank is device 0 of another, and neither need be the current one."""
    on = begin(device)
    mine = torch.device(on.type, 1 - smp.pp_rank())
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(x.device)
            return super().forward(x)

    model = chain_on(mine, Looks(WIDTH, WIDTH))

    @smp.step
    def step(model, x):
        x.requires_grad_()
        loss = model(x).sum()
        model.backward(loss)
        assert smp.is_tracing() or x.grad.device == mine
        return loss

    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(smp.pp_rank())  # the other one
    try:
        loss = step(model, torch.randn(4, WIDTH).to(mine))
        seen.clear()
        loss = step(model, torch.randn(4, WIDTH).to(mine))
    finally:
        torch.accelerator.set_device_index(before)

    assert seen == [mine] * 2 if smp.pp_rank() == 1 else not seen
    assert all(one.device == mine for one in loss)
    assert all(p.grad.device == mine for p in model.local_parameters())


@on_ranks(2)
@on_accelerators
def test_workers_use_the_stream_and_device_of_the_steps_caller(device):
    """A thread does not inherit device and stream: its rank's tasks are given them."""
    on = begin(device)
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(torch.accelerator.current_stream())
            return super().forward(x)

    model = chain_on(on, Looks(WIDTH, WIDTH))

    @smp.step
    def step(model, x):
        seen.append(torch.accelerator.current_stream())
        return model(x).sum()

    x = torch.randn(4, WIDTH).to(on)
    step(model, x)
    seen.clear()
    before = torch.accelerator.current_stream()
    mine = torch.Stream(on)
    try:
        torch.accelerator.set_stream(mine)
        step(model, x)
    finally:
        torch.accelerator.set_stream(before)

    assert mine != before
    assert seen == [mine] * 2
    seen.clear()
    step(model, x)
    assert seen == [before] * 2


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", [True, False])
def test_autograd_has_no_device_threads_in_a_step_and_the_users_setting_after_it(
    device, setting
):
    """Workers call set_multithreading_enabled(False); the user's choice is the user's."""
    on = begin(device)
    seen = []

    def look(gradient):
        seen.append((torch._C._is_multithreading_enabled(), _core.current() is not None))

    class Second(nn.Linear):
        def forward(self, x):
            return in_backward(super().forward(x), look)

    model = chain_on(on, Second(WIDTH, WIDTH))

    @smp.step
    def step(model, x):
        loss = in_backward(model(x), look).sum()
        model.backward(loss)
        return loss

    with torch.autograd.set_multithreading_enabled(setting):
        step(model, torch.randn(4, WIDTH).to(on))

        assert torch._C._is_multithreading_enabled() is setting
    # In a worker of this rank, not in a device's thread, which runs no task.
    assert seen == [(False, True)] * 2


@on_ranks(2)
@on_accelerators
def test_random_numbers_of_the_device_follow_the_microbatch(device):
    """A microbatch has a stream of its own; the user's generators go on as after no step."""
    on = begin(device, pipeline=[(1, 0), (0, 0), (1, 1), (0, 1)])
    model = chain_on(on)

    def draw():
        return nn.functional.dropout(torch.ones(WIDTH, device=on), 0.5).cpu()

    @smp.step
    def step(model, x):
        first = draw()
        model(x)  # other microbatches run meanwhile
        return torch.stack([first, draw()])

    torch.manual_seed(5)
    users = draw()
    torch.manual_seed(5)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    want = []
    for microbatch in range(2):
        torch.manual_seed(_core.mix(seed, microbatch))
        want.append(torch.stack([draw(), draw()]))
    torch.manual_seed(5)

    got = step(model, torch.randn(4, WIDTH, generator=torch.Generator()).to(on))

    for mine, its in zip(got, want, strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(draw(), users), "the step drew from the user's numbers"


@on_ranks(2)
@on_accelerators
def test_host_memory_goes_back_when_the_device_has_read_it(device):
    """Memory that a device still reads is held; nothing is held for longer."""
    on = begin(device)
    model = chain_on(on)

    step = smp.step(total)

    for _ in range(3):
        step(model, torch.randn(64, WIDTH).to(on))
    smp.barrier()
    smp.state.runtime.staging.end()
    smp.barrier()

    assert _core.counters()["pool_blocks"] > 0
    assert _core.counters()["pool_in_use"] == 0


@on_ranks(2)
@on_accelerators
def test_the_codec_by_itself_takes_tensors_of_a_device(device):
    """Bytes of smp's codec hold a device's tensors too."""
    on = begin(device)
    value = [torch.arange(6.0).reshape(2, 3).t().to(on), torch.ones(5000).to(on)]
    for tensor in value:
        tensor.add_(1)

    got = _core.unpack(_core.pack(value))

    for mine, tensor in zip(got, value, strict=True):
        assert mine.device == tensor.device and mine.stride() == tensor.stride()
        assert torch.equal(mine.cpu(), tensor.cpu())


# Calls with a tensor ``x`` of a device, and a mask ``m`` of it, that wait for the device.
WAITS = {
    "item": lambda x, m: x.sum().item(),
    "truth": lambda x, m: bool(m.any()),
    "list": lambda x, m: x.tolist(),
    "to the host": lambda x, m: x.cpu(),
    "from the host": lambda x, m: torch.ones(3, device="cpu").to(x.device),
    "made of numbers": lambda x, m: x.new_tensor([1, 2]),
    "nonzero": lambda x, m: x.nonzero(),
    "masked": lambda x, m: x[m],
    "written by mask": lambda x, m: x.index_put_((m,), x[:4]),
    "unique": lambda x, m: x.unique(),
    "equal": lambda x, m: torch.equal(x, x),
    "stream": lambda x, m: torch.accelerator.current_stream().synchronize(),
}
WAITS_OF_PRETENDED = {  # torch.cuda does not tell of these
    "device": lambda x, m: torch.accelerator.synchronize(),
    "event": lambda x, m: torch.accelerator.current_stream().record_event().synchronize(),
}
ON_HOST = torch.ones(6)  # stays until it is copied
NO_WAITS = {
    "from the host": lambda x, m: x.copy_(ON_HOST, non_blocking=True),
    "indices": lambda x, m: x[x.long()],
    "a number by mask": lambda x, m: x.index_put_((m,), x.sum()),
    "where": lambda x, m: torch.where(m, x, 0).masked_fill(m, 1),
    "with a number of the host": lambda x, m: x + torch.tensor(1.0, device="cpu"),
    "cast": lambda x, m: x.double(),
    "dropout": lambda x, m: nn.functional.dropout(x, 0.5),
    "assertion": lambda x, m: torch._assert_async((x == x).all()),
    "event": lambda x, m: torch.accelerator.current_stream().record_event().query(),
}


@on_ranks(1)
@on_accelerators
@pytest.mark.parametrize("mode", ["error", "warn"])
def test_waits_of_the_host_are_told(device, mode):
    smp.init()
    on = use(device)
    module = torch.get_device_module(on)
    x = torch.arange(6.0).to(on)
    mask = x > 1
    waits, kind = WAITS, RuntimeError if mode == "error" else UserWarning
    if device == accelerator.NAME and mode == "error":  # torch prints warnings of these
        waits = {**WAITS, **WAITS_OF_PRETENDED}

    def is_told(call):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                call(x, mask)
        except kind as told:
            assert "host waits for" in str(told) or "synchronizing" in str(told)
            return True
        return False

    module.set_sync_debug_mode(mode)
    try:
        assert [name for name, call in waits.items() if not is_told(call)] == []
        assert [name for name, call in NO_WAITS.items() if is_told(call)] == []
    finally:
        module.set_sync_debug_mode("default")
    assert not any(map(is_told, waits.values()))


def test_a_compiled_accelerator_is_compiled_once():
    if accelerator.compiler() is None:
        pytest.skip("no C++ compiler")
    first = accelerator.build().stat().st_mtime_ns

    assert accelerator.build().stat().st_mtime_ns == first


class Module:
    """What ``torch.get_device_module`` gives, of a device with one number as its state."""

    def __init__(self) -> None:
        self.started, self.states = True, [10, 11]

    def is_initialized(self) -> bool:
        return self.started

    def get_rng_state(self, index: int) -> torch.Tensor:
        return torch.tensor(self.states[index])

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = int(state)


@pytest.fixture
def module(monkeypatch) -> Module:
    """Of a host with two devices, of which the second is the current one."""
    made = Module()
    kind = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: kind)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: "a stream")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


@pytest.mark.parametrize("every", [False, True])
def test_random_numbers_of_the_current_device_or_of_every_one_are_put_back(module, every):
    users = torch.random.get_rng_state()
    state = devices_of_torch.RandomState(every_device=every)
    module.states = [20, 21]
    torch.rand(1)
    state.restore()
    assert module.states == [10 if every else 20, 11]
    assert torch.equal(torch.random.get_rng_state(), users)


def test_a_device_that_nobody_has_started_is_left_alone(module):
    assert devices_of_torch.place() == (1, "a stream")
    host, device = devices_of_torch.generators()
    assert host is torch.default_generator and int(device.get_state()) == 11
    module.default_generators = ["the first one's", "the second one's"]
    assert devices_of_torch.generator() == "the second one's"
    assert devices_of_torch.generator(0) == "the first one's"
    module.started = False
    assert devices_of_torch.in_use() is None and devices_of_torch.place() is None
    assert devices_of_torch.generator() is None
    assert devices_of_torch.generators() == [torch.default_generator]


def test_what_arrives_goes_to_where_the_parameters_are(module):
    """To the current device if some are there."""
    cpu, meta, *devices = map(torch.device, ("cpu", "meta", "xpu:0", "xpu:1", "xpu:2"))
    arrives = staging.Staging()
    for homes, home in (
        ([], torch.device("xpu")),
        ([cpu, meta], torch.device("xpu")),
        ([cpu, devices[0]], devices[0]),
        ([devices[2], devices[0]], devices[2]),
        ([devices[0], devices[1], meta], devices[1]),
    ):
        arrives.live_with(SimpleNamespace(device=device) for device in homes)
        assert arrives._home() == home


def test_what_is_in_host_memory_stays_there_without_a_device(monkeypatch):
    """As a tensor of its own: no view, and changed by nobody."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    memory = torch.arange(6.0).add_(1)
    arrives = staging.Staging()
    for take in (arrives.into, arrives.placed):
        got = take(memory, (3, 2), (1, 3))
        assert torch.equal(got, torch.tensor([[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]))
        assert got._base is None and got._version == 0
        assert got.data_ptr() == memory.data_ptr()


def test_what_leaves_is_written_as_it_lies_in_memory():
    leaves, turned = staging.Staging(), torch.arange(6.0, requires_grad=True).view(2, 3).t()
    host = torch.empty(6)
    leaves.out(turned, host)
    assert host.tolist() == list(range(6))
    with_gaps = torch.arange(24.0, requires_grad=True).view(4, 6)[:, :3].t()
    copied = staging.dense(with_gaps)
    assert torch.equal(copied, with_gaps) and not copied.requires_grad
    assert copied.stride() == (1, 3)
