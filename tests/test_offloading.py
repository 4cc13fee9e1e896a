"""Spec: memory.md, section 2: inputs of checkpoints wait in host memory, with the same bits."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import smp
from smp.checkpointing import offloading
from tests.devices import DEVICES, use
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_same_bits

WIDTH, ROWS, LAYERS, MICROBATCHES = 128, 256, 6, 3  # an input has 128 KiB


class Inputs:
    """Memory of the layers' inputs on this rank."""

    def __init__(self) -> None:
        self.here: dict[int, StorageWeakRef] = {}
        self.most = 0

    def note(self, x: torch.Tensor) -> None:
        ref = StorageWeakRef(x.untyped_storage())
        self.here = {r.cdata: r for r in (*self.here.values(), ref) if not r.expired()}
        self.most = max(self.most, len(self.here))


class Layer(nn.Module):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.inputs, self.error = inputs, None

    def forward(self, pair, *, mask=None):
        x, number = pair
        self.inputs.note(x)
        if self.error is not None:
            raise self.error
        out = self.drop(self.linear(x).tanh())
        return (out if mask is None else out * mask) + x, number


class Net(nn.Module):
    def __init__(self, inputs: Inputs, masks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(inputs) for _ in range(LAYERS))
        self.masks = masks

    def forward(self, x):
        pair = (x.clone(), 0)  # no memory of the batch, which the step keeps
        mask = torch.ones_like(x) if self.masks else None
        for layer in self.layers:
            pair = layer(pair, mask=mask)
        return pair[0]


def made(device, offloads=True, masks=True, **config):
    """A net with checkpointed layers on all ranks, a step, its batch and the inputs seen."""
    smp.reset()
    smp.init(
        {
            "pipeline_parallel_degree": -1,
            "microbatches": MICROBATCHES,
            "offload_activations": offloads,
            **config,
        }
    )
    device, inputs = use(device), Inputs()
    torch.manual_seed(0)
    net = Net(inputs, masks).to(device)
    owners = {f"layers.{i}": smp.pp_size() - 1 for i in range(LAYERS // 2, LAYERS)}
    model = distributed(net, {"": 0, **owners})
    smp.set_activation_checkpointing(net.layers)
    batch = torch.randn(ROWS * MICROBATCHES, WIDTH).to(device)

    step = smp.step(mean_square)

    def run():
        model.zero_grad()
        step(model, batch)
        return {n: p.grad.clone() for n, p in model.local_named_parameters()}

    return net, run, inputs


@on_ranks(1, 2)
@pytest.mark.sample(6)
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
def test_at_most_a_horizon_of_inputs_is_on_the_device(device, horizon, pipeline):
    config = {"masks": False, "pipeline": pipeline}
    _, run, without = made(device, offloads=False, **config)
    want = [run(), run()]
    _, run, inputs = made(device, activation_loading_horizon=horizon, **config)

    for wanted in want:
        inputs.most = 0
        assert_same_bits(run(), wanted)
        assert inputs.most <= horizon
    assert without.most >= LAYERS // smp.pp_size()


@on_ranks(1)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_mask_of_all_layers_goes_once_a_microbatch(device, monkeypatch):
    copied = []
    on_host = offloading.Offloading._on_host
    monkeypatch.setattr(
        offloading.Offloading,
        "_on_host",
        lambda self, tensor: copied.append(tensor.shape) or on_host(self, tensor),
    )
    _, run, _ = made(device)
    run()
    assert len(copied) == MICROBATCHES * (LAYERS + 1)


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_step_after_a_failed_one_is_right(device):
    _, run, _ = made(device, offloads=False)
    want = [run(), run()]
    net, run, _ = made(device)
    assert_same_bits(run(), want[0])
    net.layers[LAYERS - 1].error = ValueError("of a layer") if smp.pp_rank() == 1 else None
    with pytest.raises(ValueError, match="of a layer"):
        run()
    net.layers[LAYERS - 1].error = None
    assert_same_bits(run(), want[1])


class Changes(nn.Module):
    """Changes the input of a checkpoint after its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = self.first(x)
        result = self.second(hidden)
        hidden.detach().add_(1.0)
        return result


@on_ranks(1)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [4, ROWS], ids=["that stays", "that goes"])
def test_an_input_changed_in_place_after_its_forward_raises(device, rows):
    smp.init({"offload_activations": True})
    net = Changes().to(use(device))
    model = smp.DistributedModel(net)
    smp.set_activation_checkpointing(net.second)

    @smp.step
    def step(model, x):
        model.backward(model(x).sum())

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, torch.randn(rows, WIDTH).to(use(device)))


@on_ranks(2)
def test_on_a_host_alone_it_warns_once_and_changes_nothing():
    _, run, _ = made("cpu", offloads=False)
    want = run()
    _, run, _ = made("cpu")
    with pytest.warns(UserWarning, match="offload_activations=True has no effect") as told:
        assert_same_bits(run(), want)
    run()
    assert len([w for w in told if "offload" in str(w.message)]) == 1
