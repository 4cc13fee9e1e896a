"""Scripts and models with sharded parameters (``sharded_data_parallel_degree``)."""

import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.tensor_parallel.backward.step_end import PeerFailed
from tests.models.trained import assert_same
from tests.ranks import on_ranks

SHARDED = {
    "sharded_data_parallel_degree": 2,
    "sdp_param_persistence_threshold": 0,
    "sdp_gradient_clipping": 0,
}
KINDS = {"whole": SHARDED, "on demand": {**SHARDED, "sdp_max_live_parameters": 600}}
WIDTH = 16


def linears(count: int = 5) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def wrapped(module: nn.Module) -> tuple[Any, Any]:
    model = smp.DistributedModel(module)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, smp.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.01))


@smp.step
def train_step(model: Any, inputs: Tensor, loss_of: Callable) -> Tensor:
    loss = loss_of(model(inputs))
    model.backward(loss)
    return loss


def mean_square(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def batches(count: int, first: int = 0) -> Iterator[Tensor]:
    for seed in range(first, first + count):
        source = torch.Generator().manual_seed(seed + 100 * smp.dp_rank())
        yield torch.randn(8, 5, WIDTH, generator=source)


def train(
    model: Any, optimizer: Any, inputs: Tensor, loss_of: Callable = mean_square
) -> Tensor:
    optimizer.zero_grad()
    loss = train_step(model, inputs, loss_of).reduce_mean()
    optimizer.step()
    return loss


def train_outside(model: Any, optimizer: Any, inputs: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mean_square(model(inputs))
    loss.backward()
    optimizer.step()
    return loss.detach()


# ------------------------------------------------------------------- the bits of plain ones


def evaluated(module: nn.Module) -> list[Any]:
    """Trained, with evaluations between."""
    model, optimizer = wrapped(module)
    seen = []
    for inputs in batches(4):
        seen.append(train(model, optimizer, inputs))
        model.eval()
        with torch.no_grad():
            seen.append(model(inputs))
        model.train()
    return [*seen, *model.state_dict().values()]


def attention() -> list[Any]:
    return evaluated(
        nn.Sequential(
            nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True),
            nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True),
        )
    )


def scripted() -> list[Any]:
    return evaluated(nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(linears(3))))


class Tangents(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, inputs: Tensor) -> Tensor:
        slope = torch.func.jvp(lambda x: self.layers[0](x).tanh(), (inputs,), (inputs,))[1]
        return self.layers(inputs) + slope


def sparse() -> list[Any]:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, WIDTH, sparse=True)
            self.layers = linears(4)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layers(self.table((inputs[..., 0] * 7).long().abs()))

    model = smp.DistributedModel(Table())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    seen = [train(model, optimizer, inputs) for inputs in batches(8)]
    return [*seen, *model.state_dict().values()]


def inference_mode() -> list[Any]:
    model, optimizer = wrapped(linears())
    seen = []
    for inputs in batches(3):
        seen.append(train(model, optimizer, inputs))
        with torch.inference_mode():
            seen.append(model(inputs).clone())
    return [*seen, *model.state_dict().values()]


def views() -> list[Any]:
    """The script, and a module, have views of parameters from before."""
    module = linears()
    module[0].turned = module[3].weight.data.t()
    module[0].register_forward_hook(lambda owner, _, output: output @ owner.turned)
    model, optimizer = wrapped(module)
    view = model.module[1].weight.detach()
    seen = []
    for inputs in batches(4):
        seen.append(train(model, optimizer, inputs, lambda out: mean_square(out @ view)))
        seen.append(view.clone())
    return [*seen, *model.state_dict().values()]


def bare_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def two_models() -> list[Any]:
    """A graph of one model, kept across the update of the other."""
    first, its_optimizer = wrapped(nn.Sequential(*[bare_linear() for _ in range(2)]))
    second, other = wrapped(bare_linear())
    seen = []
    for inputs in batches(3):
        made = first(inputs).tanh()
        other.zero_grad()
        loss = second(made.detach()).mean() - second(inputs).pow(2).mean()
        loss.backward()
        other.step()
        its_optimizer.zero_grad()
        answer = -second(made).mean()
        answer.backward()
        its_optimizer.step()
        seen += [loss.detach(), answer.detach()]
    return [*seen, *first.state_dict().values(), *second.state_dict().values()]


def removed() -> list[Any]:
    module = linears()
    module[4].requires_grad_(False)
    model, optimizer = wrapped(module)
    seen = []
    for step, inputs in enumerate(batches(4)):
        seen.append(train(model, optimizer, inputs))
        if step == 1:
            model.module[4] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            gc.collect()
            seen += list(model.state_dict().values())
        if step == 2:
            del model.module[4]
            gc.collect()
    return [*seen, *model.state_dict().values()]


class Held(torch.autograd.Function):
    """Has its weight as an attribute, not among the saved tensors."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.inputs, ctx.weight = inputs, weight
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows = ctx.inputs.flatten(0, -2)
        return gradient @ ctx.weight.t(), rows.t() @ gradient.flatten(0, -2)


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = Held.apply(inputs, layer.weight).tanh()
        return inputs


def values_in_backward() -> list[Any]:
    """Also in hooks, and outside of steps."""
    module = Holding()
    for parameter in module.parameters():
        parameter.register_hook(lambda grad, of=parameter: grad + 0.01 * of.detach())
    model, optimizer = wrapped(module)
    seen = [train_outside(model, optimizer, inputs) for inputs in batches(3)]
    seen += [train(model, optimizer, inputs) for inputs in batches(3, 3)]
    return [*seen, *model.state_dict().values()]


def second_order() -> list[Any]:
    """Gradients with respect to parameters, with a graph, outside of steps."""
    model, optimizer = wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), linears(3)))
    seen = []
    for inputs in batches(3):
        optimizer.zero_grad()
        loss = mean_square(model(inputs))
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(slope.pow(2).sum() for slope in slopes)).backward()
        optimizer.step()
        seen.append(loss.detach())
    return [*seen, *model.state_dict().values()]


def pickled() -> list[Any]:
    model, optimizer = wrapped(linears())
    seen = []
    for inputs in batches(2):
        seen.append(train(model, optimizer, inputs))
        with model.gathered_parameters():
            copy = pickle.loads(pickle.dumps(model.module))
        seen.append(copy(inputs).detach())
    return seen


def clipped_weights() -> list[Any]:
    """Weights changed in forward, and between steps."""

    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = linears()

        def forward(self, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                self.layers[3].weight.clamp_(-0.1, 0.1)
                self.layers[2].weight.data = self.layers[2].weight.data * 0.9
            return self.layers(inputs)

    model, optimizer = wrapped(Clipped())
    seen = []
    for inputs in batches(3):
        seen.append(train(model, optimizer, inputs))
        with model.gathered_parameters(), torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    return [*seen, *model.state_dict().values()]


SCRIPTS: dict[str, Callable[[], list[Any]]] = {
    "attention": attention,
    "scripted": scripted,
    "jvp": lambda: evaluated(Tangents()),
    "sparse": sparse,
    "inference mode": inference_mode,
    "views": views,
    "two models": two_models,
    "removed": removed,
    "values in backward": values_in_backward,
    "second order": second_order,
    "pickled": pickled,
    "clipped weights": clipped_weights,
}


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_have_the_bits_of_plain_data_parallelism(script, kind):
    results = []
    for options in ({}, KINDS[kind]):
        smp.reset()
        smp.init({"ddp": True, "microbatches": 2, **options})
        torch.manual_seed(0)
        results.append(SCRIPTS[script]())
    assert_same(results[1], results[0])


@on_ranks(2)
def test_a_replica_with_fewer_samples_has_fewer_microbatches_on_all():
    results = []
    for options in ({}, KINDS["on demand"]):
        smp.reset()
        smp.init({"ddp": True, "microbatches": 4, **options})
        torch.manual_seed(0)
        model, optimizer = wrapped(linears())
        for inputs in batches(3):
            train(model, optimizer, inputs[: 8 if smp.rank() == 0 else 1])
        results.append(list(model.state_dict().values()))
    for sharded, plain in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(sharded, plain, rtol=1e-4, atol=1e-5)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_leaves_no_memory_of_others_elements(kind):
    smp.init({"ddp": True, "microbatches": 2, **KINDS[kind]})
    model, optimizer = wrapped(linears())
    for inputs in batches(3):
        train(model, optimizer, inputs)
        weights = [layer.weight for layer in model.module]
        with torch._C.DisableTorchFunctionSubclass():
            assert [w.untyped_storage().nbytes() for w in weights] == [0] * len(weights)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_its_share_of_gradients_and_no_more_weights_than_the_limit(kind):
    smp.init({"ddp": True, **KINDS[kind]})
    model, optimizer = wrapped(linears())
    weights = [layer.weight for layer in model.module]
    held = []

    def count(*_: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            held.append(sum(w.untyped_storage().nbytes() // 4 for w in weights))

    for layer in model.module:
        layer.register_forward_hook(count)
        layer.register_full_backward_hook(count)
    for inputs in batches(3):
        optimizer.zero_grad()
        held.clear()
        train_step(model, inputs, mean_square)
        (here,) = smp.memory_report().every
        assert here.gradients <= 4 * sum(w.numel() // 2 + WIDTH for w in weights)
        optimizer.step()
    assert len(held) == 10
    assert max(held) <= KINDS[kind].get("sdp_max_live_parameters", 5 * WIDTH**2)


# ----------------------------------------------------------------------- refused, by name


class Faulty(nn.Module):
    """Fails on rank 1, where it is told to; or runs other layers there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()
        self.fault = ""
        self.place = 2

    def forward(self, inputs: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            here = number == self.place and smp.rank() == 1
            if here and self.fault == "forward":
                raise ValueError("a fault")
            inputs = (self.layers[3] if here and self.fault == "branch" else layer)(inputs)
            if here and self.fault == "backward":
                inputs.register_hook(fail)
        return inputs


def fail(gradient: Tensor) -> None:
    raise ValueError("a fault")


@on_ranks(2)
@pytest.mark.parametrize("place", ["forward", "backward", "branch", "evaluation"])
def test_training_goes_on_after_a_failure_of_one_replica(place):
    results = []
    for options in ({}, KINDS["on demand"]):
        if not options and place == "branch":
            continue
        smp.reset()
        smp.init({"ddp": True, "microbatches": 2, **options})
        torch.manual_seed(0)
        model, optimizer = wrapped(Faulty())
        for step, inputs in enumerate(batches(4)):
            model.module.fault = place if step == 1 and place != "evaluation" else ""
            optimizer.zero_grad()
            if model.module.fault:
                with pytest.raises(Exception) as caught:
                    train_step(model, inputs, mean_square)
                if place == "branch":
                    assert isinstance(caught.value, PeerFailed)
                    assert "for parameter 'layers.2.weight'" in str(caught.value)
                    assert "for parameter 'layers.3.weight'" in str(caught.value)
                else:
                    assert "a fault" in str(caught.value)
                model.module.fault = ""
                optimizer.zero_grad()
                continue
            train(model, optimizer, inputs)
            if place == "evaluation" and step == 1:
                model.module.fault = "forward"
                with torch.no_grad():
                    if options or smp.rank() == 1:
                        with pytest.raises(ValueError if smp.rank() == 1 else PeerFailed):
                            model(inputs)
                model.module.fault = ""
        results.append(list(model.state_dict().values()))
    assert_same(results[-1], results[0])


@on_ranks(2)
@pytest.mark.parametrize("place", [2, 0])
def test_a_failed_backward_outside_of_steps_is_heard_by_the_others(place):
    """Also where no gather follows, as after the first layer's."""
    smp.init({"ddp": True, **KINDS["on demand"]})
    model, optimizer = wrapped(Faulty())
    model.module.place = place
    first, second, third = batches(3)
    train_outside(model, optimizer, first)
    model.module.fault = "backward"
    with pytest.raises(ValueError if smp.rank() == 1 else RuntimeError):
        train_outside(model, optimizer, second)
    model.module.fault = ""
    # Rank 0 heard of it in a gather, whose backward has no end, or at the end of its own.
    if smp.rank() == 1 or place > 0:
        with pytest.raises(RuntimeError, match="the backward before this forward raised"):
            train_outside(model, optimizer, third)
    train_outside(model, optimizer, third)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_an_optimizer_meet_released_parameters_by_name(kind):
    smp.init({"ddp": True, **KINDS[kind]})
    model, optimizer = wrapped(linears())
    inputs = next(batches(1))
    norms = lambda *_: [float(p.detach().norm()) for p in model.parameters()]  # noqa: E731
    handle = optimizer.register_step_post_hook(norms)
    with pytest.raises(RuntimeError, match=r"detach needs the values of parameter '0\.weight'"):
        train(model, optimizer, inputs)
    handle.remove()
    train(model, optimizer, inputs)


@on_ranks(2)
def test_an_activation_changed_before_its_backward_is_refused():
    smp.init({"ddp": True, **KINDS["on demand"]})
    model, optimizer = wrapped(nn.Sequential(*linears(), nn.Tanh()))

    def changed(output: Tensor) -> Tensor:
        loss = mean_square(output)
        with torch.no_grad():
            output.add_(1)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(model, optimizer, next(batches(1)), changed)


@on_ranks(2)
def test_a_change_between_forward_and_backward_is_refused():
    smp.init({"ddp": True, **KINDS["on demand"]})
    model, optimizer = wrapped(linears())
    inputs = next(batches(1))

    def changed(output: Tensor) -> Tensor:
        with torch.no_grad():
            model.module[2].weight.mul_(2)
        return mean_square(output)

    with pytest.raises(RuntimeError, match=r"'2\.weight' was changed by opt.*, or"):
        train(model, optimizer, inputs, changed)
    loss = mean_square(model(inputs))
    train(model, optimizer, inputs)
    with pytest.raises(RuntimeError, match=r"was changed by optimizer\.step\(\)"):
        loss.backward()


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_other_layouts_are_refused(kind):
    smp.init({"ddp": True, **KINDS[kind]})
    model, optimizer = wrapped(linears())
    inputs = next(batches(1))
    train(model, optimizer, inputs)
    refused = pytest.raises(RuntimeError, match=r"'1\.weight' has .* strides \[32, 2\] now")
    with refused, model.gathered_parameters():
        model.module[1].weight.data = torch.ones(WIDTH, WIDTH * 2)[:, ::2]
    with pytest.raises(RuntimeError, match=r"'1\.weight' has .* strides"):
        train(model, optimizer, inputs)


@on_ranks(2)
def test_transforms_by_saved_tensors_are_refused():
    smp.init({"ddp": True, **KINDS["on demand"]})
    model, optimizer = wrapped(linears())
    inputs = next(batches(1))

    def sloped(output: Tensor) -> Tensor:
        return mean_square(torch.func.grad(lambda x: x.sin().sum())(output))

    with pytest.raises(NotImplementedError, match=r"_parameters to at least 1360"):
        train(model, optimizer, inputs, sloped)
