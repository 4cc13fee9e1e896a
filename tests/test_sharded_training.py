"""Training with sharded data parallelism is that of plain data parallelism, bit by bit."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.devices import DEVICES, use
from tests.models.trained import assert_same, snapshot
from tests.ranks import on_ranks

SHARDED: dict[str, dict[str, Any]] = {
    "whole": {},
    "small whole": {"sdp_param_persistence_threshold": 500},
    "on demand": {"sdp_max_live_parameters": 2500},
}


class Net(nn.Module):
    """Layers that run from the last to the first, and a parameter smaller than a part."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(53, 24, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(9, 31)
        self.output = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 53))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for layer in reversed(self.layers):
            hidden = hidden + torch.tanh(layer(hidden))
        return self.output(hidden) * self.scale.prod()


class Run:
    """One training."""

    def __init__(self, kind: str | None, device: str = "cpu", **options: Any) -> None:
        smp.reset()
        clip = options.pop("clip", 0.0)
        sparse, two = options.pop("sparse", False), options.pop("two_optimizers", False)
        if kind is not None:
            options |= {
                "sharded_data_parallel_degree": smp_size(),
                "sdp_param_persistence_threshold": 0,
                "sdp_gradient_clipping": clip,
                **SHARDED[kind],
            }
        smp.init({"ddp": True, "microbatches": 2, **options})
        use(device)
        torch.manual_seed(0)
        self.clip = clip if kind is None else 0.0
        self.model = smp.DistributedModel(Net(sparse))
        parameters = list(self.model.parameters())
        halves = [parameters[:5], parameters[5:]] if two else [parameters]
        make = torch.optim.SGD if sparse else torch.optim.AdamW
        self.optimizers = [smp.DistributedOptimizer(make(half, lr=0.01)) for half in halves]
        self.steps = 0
        self.seen: list[Tensor] = []

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.seen.append(train_step(self.model, self.batch()).reduce_mean().detach())
            if self.clip:
                clip_gradients(self.model, self.clip)
            for optimizer in self.optimizers:
                optimizer.step()

    def batch(self) -> Tensor:
        self.steps += 1
        source = torch.Generator().manual_seed(100 * self.steps + smp.dp_rank())
        return torch.randint(53, (4,), generator=source)

    def everything(self) -> list[Any]:
        states = []
        for optimizer in self.optimizers:
            found = snapshot(optimizer.state_dict())
            states.append(dict(sorted(found["state"].items())))
            masters = found.get("fp16_states", {}).get("master_weights", {})
            states.append(dict(sorted(masters.items())))
        return [torch.stack(self.seen), snapshot(self.model.state_dict()), states]


def smp_size() -> int:
    smp.init({"ddp": True})
    size = smp.size()
    smp.reset()
    return size


def clip_gradients(model: Any, largest: float) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    norm = torch.stack([g.double().norm() for g in dense]).norm()
    for gradient in grads:
        gradient.mul_(min(1.0, largest / (float(norm) + 1e-6)))


@smp.step
def train_step(model: Any, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens).float(), tokens)
    model.backward(loss)
    return loss


@smp.step
def evaluate(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens)


@smp.step
def fail_on_one_replica(model: Any, tokens: Tensor) -> None:
    if smp.rank() == 1:
        model.module.layers[2].register_forward_pre_hook(refuse)
    model.backward(model(tokens).sum())


def refuse(module: nn.Module, args: Any) -> None:
    raise ValueError("not on this rank")


# ------------------------------------------------------------- between two trainings


def scale_parameters(run: Run) -> None:
    with run.model.gathered_parameters(), torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.5)


def give_other_memory(run: Run) -> None:
    with run.model.gathered_parameters():
        for parameter in run.model.parameters():
            parameter.data = parameter.data.clone()


def flatten(run: Run) -> None:
    with run.model.gathered_parameters(), torch.no_grad():
        every = list(run.model.parameters())
        pieces = torch.cat([p.reshape(-1) for p in every]).split([p.numel() for p in every])
        for parameter, piece in zip(every, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)


def tie(run: Run) -> None:
    layers = run.model.module.layers
    with run.model.gathered_parameters():
        layers[3].weight.data = layers[0].weight.data


def load(run: Run) -> None:
    values = snapshot(run.model.state_dict())
    run.train(1)
    run.model.load_state_dict(values)


def evaluate_in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.seen.append(evaluate(run.model, run.batch()).concat().sum().clone())


def fail(run: Run) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="not on this rank"):
            fail_on_one_replica(run.model, run.batch())
    run.model.module.layers[2]._forward_pre_hooks.clear()


BETWEEN: dict[str, tuple[Callable[[Run], None], dict[str, Any]]] = {
    "nothing": (lambda run: None, {"bf16": True}),
    "scaled": (scale_parameters, {"bf16": True}),
    "other memory": (give_other_memory, {}),
    "flattened": (flatten, {}),
    "tied": (tie, {}),
    "loaded": (load, {"bf16": True}),
    "inference": (evaluate_in_inference_mode, {}),
    "failed step": (fail, {}),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("kind", ["whole", "on demand"])
def test_what_a_script_does_between_steps_changes_no_bit(kind, name):
    between, options = BETWEEN[name]
    results = []
    for sharded in (None, kind):
        run = Run(sharded, **options)
        run.train(2)
        between(run)
        run.train(3)
        results.append(run.everything())
    assert_same(results[1], results[0])


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"two_optimizers": True}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("kind", SHARDED)
def test_an_update_clips_by_the_norm_of_the_whole_model(kind, options):
    results = []
    for sharded in (None, kind):
        run = Run(sharded, clip=0.1, **options)
        run.train(4)
        results.append(run.everything()[1])
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-6, msg=name)


@on_ranks(2)
def test_a_replica_that_reads_alone_is_told_by_the_names_of_parameters():
    run = Run("on demand")
    run.train(2)
    with pytest.raises(RuntimeError) as caught:
        if smp.rdp_rank() == 0:
            run.model.state_dict()
        run.train(1)
    if smp.rdp_rank() == 0:
        names = r"gathering of 'scale'.* model\.state_dict\(\).*for parameter 'scale'"
        assert re.search(names, str(caught.value)), str(caught.value)
        smp.reset()  # the other waits


@on_ranks(2)
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("kind", SHARDED)
def test_an_accelerator_has_the_bits_of_plain_data_parallelism(kind, device):
    results = []
    for sharded in (None, kind):
        run = Run(sharded, device)
        run.train(4)
        assert all(p.device.type == device for p in run.model.parameters())
        results.append(run.everything())
    assert_same(results[1], results[0])


@on_ranks(2)
def test_a_training_without_an_optimizer_of_smp_is_told_that_its_parameters_are_whole():
    smp.init({"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 500})
    model = smp.DistributedModel(Net())
    with pytest.warns(UserWarning, match=r"'table\.weight' and 6 other parameters in training"):
        train_step(model, torch.arange(4))
