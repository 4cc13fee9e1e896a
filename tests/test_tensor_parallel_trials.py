"""What is not as PyTorch's or transformers' class has it is split only where that is right.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import functools
import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.models import families
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.models.steps import model_outputs
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks

# -------------------------------------------------- linears and embeddings of a user's class


class Threefold(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Gained(nn.Embedding):
    """With a parameter and a buffer of its own, in a forward of its own module."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.norm = nn.LayerNorm(sizes[1])
        self.shift = nn.Parameter(torch.ones(()))
        self.register_buffer("factor", torch.tensor(2.0))
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(super().forward(ids) * self.factor) + self.shift


class Shifted(nn.Embedding):
    """As learned positions of BART: of other rows than it is asked for."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        _samples, _positions = ids.shape
        return super().forward((ids + 2) % self.rows)


class Sparsely(nn.Embedding):
    def forward(self, ids: Tensor, more: Tensor | None = None) -> Any:
        return {"found": super().forward(ids), "ids": ids}


class Reading(nn.Embedding):
    """Its forward reads the weight by itself."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) * 3.0


class Centred(nn.Embedding):
    """Its forward is the parent's but for a mean over the weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) - self.weight.detach().mean()


class Demanding(nn.Embedding):
    """Its forward cannot be called with indices alone."""

    def forward(self, ids: Tensor, *, factor: float) -> Tensor:
        return super().forward(ids) * factor


class Failing(nn.Embedding):
    """Its forward fails on one rank, as long as the model is not wrapped."""

    is_wrapped = False

    def forward(self, ids: Tensor) -> Tensor:
        if smp.rank() == 1 and not Failing.is_wrapped:
            raise ValueError("no")
        return super().forward(ids)


class LinearThreefold(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 3.0


class LinearBounded(nn.Linear):
    """Of vectors of length 1, with a softmax over the outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=-1)).softmax(-1)


class LinearReading(nn.Linear):
    """As weight standardization: its forward reads the weight by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight - self.weight.mean(), self.bias)


class Net(nn.Module):
    """An embedding, a linear and a head of these classes."""

    def __init__(
        self, embedding: type[nn.Embedding], linear: type[nn.Linear], tied: bool
    ) -> None:
        super().__init__()
        self.embedding = embedding(VOCABULARY, 4)
        self.inner = linear(4, 4)
        self.head = linear(4, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.given = {"factor": 3.0} if embedding is Demanding else {}

    def forward(self, ids: Tensor) -> Tensor:
        found = self.embedding(ids, **self.given)
        found = found["found"] if isinstance(found, dict) else found
        return self.head(torch.tanh(self.inner(found)))


VOCABULARY = 7
SPLIT = (Threefold, Gained, Shifted, Sparsely), (LinearThreefold, LinearBounded)
REASONS = {
    Reading: "which does not give the same when the weight is split",
    Centred: "which does not give the same when the weight is split",
    Demanding: "which cannot be tried with rows alone (TypeError",
    Failing: "which cannot be tried with rows alone (",
    LinearReading: "which does not give the same when the weight is split",
}


def net_of(embedding: type[nn.Embedding], linear: type[nn.Linear], tied: bool) -> Net:
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    with smp.tensor_parallelism():
        return Net(embedding, linear, tied)


def cross_entropy(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, -2), ids.flatten())


def ids_of(rank: int, step: int, prescaled: bool) -> tuple[Tensor]:
    draw = torch.Generator().manual_seed(10 * step + rank * (not prescaled))
    return (torch.randint(0, VOCABULARY, (2 + rank * (not prescaled), 3), generator=draw),)


CLASSES = [
    *((one, nn.Linear) for one in (*SPLIT[0], Reading, Centred, Demanding, Failing)),
    *((nn.Embedding, one) for one in (*SPLIT[1], LinearReading)),
    (Threefold, LinearThreefold),
    (Threefold, LinearReading),
]


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("embedding", "linear"), CLASSES)
@pytest.mark.sample(12)
@on_ranks(2)
def test_a_leaf_of_a_users_class_is_split_where_it_has_proved_itself(
    embedding, linear, tied, prescaled
):
    split_over_all_ranks(prescaled_batch=prescaled)
    net = net_of(embedding, linear, tied)
    Failing.is_wrapped = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = WholeJob(net, cross_entropy, lambda rank, step: ids_of(rank, step, prescaled))
    Failing.is_wrapped = True
    reasons = {one.path: one.reason for one in job.model._smp_split}
    failing = [cls for cls in (embedding, linear) if cls in REASONS]
    warned = [str(w.message) for w in caught if "left whole" in str(w.message)]
    assert len(warned) == len(failing)
    for path, cls in (("embedding", embedding), ("inner", linear), ("head", linear)):
        shares = tied and path != "inner"
        why = cls if cls in failing else failing[0] if failing and shares else None
        assert (reasons[path] == "") == (why is None), reasons
        if why is not None:
            assert f"class {why.__name__} has a forward of its own" in reasons[path]
            assert REASONS[why] in reasons[path]
    if isinstance(net.embedding, Gained):
        assert net.embedding.calls == 0  # copies were tried
    job.run(2)


@on_ranks(4)
def test_a_leaf_of_a_users_class_whose_values_are_made_later():
    """A trial needs none of them."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    plain = net_of(Threefold, LinearBounded, True)
    with smp.delay_param_initialization():
        net = net_of(Threefold, LinearBounded, True)
    model = distributed(net, {"inner": 1})
    assert [one.reason for one in model._smp_split] == [""] * 3
    ids = ids_of(smp.dp_rank(), 0, False)[0]
    assert_near(smp.step(model_outputs)(model, ids).concat(), plain(ids), "logits")


# ------------------------------------------------------- modules of families that are changed


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def of_channels(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@module_of()
def OfBatch(self, x: Tensor) -> Tensor:
    return x.tanh() * x.mean(0, keepdim=True)


def forward_of_instance(self: Any, x: Tensor) -> Tensor:
    inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(of_channels(inner))


def another_forward(mlp: Any) -> None:
    mlp.forward = types.MethodType(forward_of_instance, mlp)


def another_forward_inside(mlp: Any) -> None:
    mlp.down_proj.forward = types.MethodType(
        lambda self, x: F.linear(of_channels(x), self.weight), mlp.down_proj
    )


def another_linear(mlp: Any) -> None:
    mlp.down_proj = Halved(mlp.down_proj.in_features, mlp.down_proj.out_features)


def two_in_place_of_one(mlp: Any) -> None:
    mlp.down_proj = nn.Sequential(nn.LayerNorm(mlp.down_proj.in_features), mlp.down_proj)


def normed(mlp: Any) -> None:
    nn.utils.parametrizations.weight_norm(mlp.down_proj)


def parametrized(mlp: Any) -> None:
    nn.utils.parametrize.register_parametrization(mlp.down_proj, "weight", nn.Identity())


def an_activation(act: Any) -> Callable[[Any], None]:
    def change(mlp: Any) -> None:
        del mlp.act_fn
        mlp.act_fn = act

    return change


def hook_before(mlp: Any) -> None:
    mlp.down_proj.register_forward_pre_hook(lambda _, args: of_channels(*args))


def hook_behind(mlp: Any) -> None:
    mlp.act_fn.register_forward_hook(functools.partial(lambda _, args, out: of_channels(out)))


def hook_of_gradients(mlp: Any) -> None:
    mlp.up_proj.register_full_backward_hook(lambda _, into, of: (of_channels(*into),))


def hook_of_a_rank(mlp: Any) -> None:
    if smp.rank() == 1:
        mlp.down_proj.register_forward_hook(lambda *_: None)


def hook_outside(mlp: Any) -> None:
    mlp.register_forward_hook(lambda _, args, out: of_channels(out))


LEFT_WHOLE = {
    another_forward: "it has another forward than its class",
    another_forward_inside: "its 'down_proj' has another forward than its class",
    another_linear: "its 'down_proj' is a Halved",
    two_in_place_of_one: "its 'down_proj' is a Sequential",
    normed: "its 'down_proj' has a parametrization",
    an_activation(nn.Softmax(-1)): "its 'act_fn' does not act on each channel",
    an_activation(of_channels): "its 'act_fn' does not act on each channel",
    an_activation(OfBatch()): "its 'act_fn' does not act on each channel",
    an_activation(nn.PReLU(dtype=torch.float64)): "its 'act_fn' does not act on each channel",
    hook_before: "its 'down_proj' has a forward pre-hook",
    hook_behind: "its 'act_fn' has a forward hook",
    hook_of_gradients: "its 'up_proj' has a backward hook",
    hook_of_a_rank: "its 'down_proj' has a forward hook",
    an_activation(nn.Tanh()): "",
    an_activation(torch.tanh): "",
    hook_outside: "",
}


@pytest.mark.parametrize("prescaled", [False, True])
@pytest.mark.parametrize("number", range(len(LEFT_WHOLE)))
@pytest.mark.sample(12)
@on_ranks(2, timeout_s=120)
def test_a_module_of_a_family_that_is_changed_is_left_whole(number, prescaled, monkeypatch):
    change, reason = list(LEFT_WHOLE.items())[number]
    families.compute_in_float64(monkeypatch, "llama")
    split_over_all_ranks(prescaled_batch=prescaled)
    net = families.made("llama")
    change(net.model.layers[1].mlp)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = families.whole_job("llama", net, same=prescaled)
    reasons = {one.path: one.reason for one in job.model._smp_split}
    path = "model.layers.1.mlp"
    if change is hook_of_a_rank and smp.rank() == 0:
        reason = "it is changed on another rank"
    assert reasons[path].startswith(reason) and bool(reasons[path]) == bool(reason)
    warned = [str(w.message) for w in caught if "left whole" in str(w.message)]
    assert len(warned) == bool(reason)
    assert all(f"'{path}' is left whole: {reason}" in message for message in warned)
    job.run(2)


@on_ranks(4, timeout_s=120)
def test_a_hook_of_one_rank_of_a_pipeline(monkeypatch):
    """All stages and replicas of them leave the same modules whole."""
    families.compute_in_float64(monkeypatch, "llama")
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    net = families.made("llama")
    hook_of_a_rank(net.model.layers[0].mlp)
    job = families.whole_job("llama", net)
    left = [one.path for one in job.model._smp_split if one.reason]
    assert left == ["model.layers.0.mlp"]
    job.step(0)


@on_ranks(2, timeout_s=120)
def test_a_leaf_with_another_forward_is_left_whole():
    split_over_all_ranks()
    net = net_of(nn.Embedding, nn.Linear, True)
    net.head.forward = types.MethodType(
        lambda self, x: F.linear(x, of_channels(self.weight)), net.head
    )
    job = WholeJob(net, cross_entropy, lambda r, s: ids_of(r, s, False))
    reasons = {one.path: one.reason for one in job.model._smp_split}
    assert reasons["head"] == "it has another forward than its class"
    assert reasons["embedding"].startswith("it shares its weight with a Linear: it has another")
    job.step(0)


class Shift(nn.Module):
    """Adds a number for each of the last channels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class OfParameter(nn.Module):
    """As peft's adapter of ``target_parameters``."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = base, name
        self.shift = Shift(base.get_parameter(name).size(-1))

    def forward(self, *args: Any) -> Any:
        given = self.base_layer, self.parameter_name
        nn.utils.parametrize.register_parametrization(*given, self.shift)
        try:
            return self.base_layer(*args)
        finally:
            nn.utils.parametrize.remove_parametrizations(*given, leave_parametrized=False)


class Prompted(nn.Module):
    """As peft's attention with an adaption prompt, of a llama."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.model = attention
        self.adaption_prompt = nn.Parameter(torch.linspace(-1.0, 1.0, 48).view(1, 2, 24))

    def forward(self, **given: Any) -> Any:
        out, *rest = self.model(**given)
        values = self.model.v_proj(self.adaption_prompt).view(1, 2, 3, 4)
        prompted = self.model.o_proj(values.repeat_interleave(2, 2).flatten(2))
        return out + prompted.mean(1, keepdim=True), *rest


def adapt_experts(layer: Any) -> None:
    layer.mlp.experts = OfParameter(layer.mlp.experts, "gate_up_proj")


def adapt_linear(layer: Any) -> None:
    layer.self_attn.o_proj = OfParameter(layer.self_attn.o_proj, "weight")


def parametrize_experts(layer: Any) -> None:
    nn.utils.parametrize.register_parametrization(
        layer.mlp.experts, "down_proj", Shift(layer.mlp.experts.down_proj.size(-1))
    )


def prompt_attention(layer: Any) -> None:
    layer.self_attn = Prompted(layer.self_attn)


ADAPTED = {
    adapt_experts: ("mlp.experts.base_layer", "a OfParameter, parametrizes its 'gate_up"),
    adapt_linear: ("self_attn", "its 'o_proj' is a OfParameter"),
    parametrize_experts: ("mlp.experts", "it has a parametrization"),
    prompt_attention: ("self_attn.model", "a Prompted, calls its linears by itself"),
}


@pytest.mark.parametrize("number", range(len(ADAPTED)))
@on_ranks(2, timeout_s=120)
def test_a_module_stays_whole_in_an_adapter_that_needs_all_of_it(number, monkeypatch):
    change, (path, reason) = list(ADAPTED.items())[number]
    families.compute_in_float64(monkeypatch, "mixtral")
    split_over_all_ranks()
    net = families.made("mixtral")
    change(net.model.layers[1])
    path = f"model.layers.1.{path}"
    with pytest.warns(UserWarning, match=f"'{path}' is left whole: .*{reason}"):
        job = families.whole_job("mixtral", net)
    assert [one.path for one in job.model._smp_split if one.reason] == [path]
    job.run(2)
    nn.utils.parametrize.register_parametrization(
        net.model.layers[0].mlp.experts, "down_proj", nn.Identity()
    )
    with pytest.raises(RuntimeError, match="'model.layers.0.mlp.experts' has a parametri"):
        job.model(**families.batch_of("mixtral", smp.rank(), 0)[0])


LATER = {
    hook_before: "down_proj' has a forward pre-hook",
    an_activation(nn.Softmax(-1)): "act_fn' is another module than before",
    another_forward_inside: "down_proj' has another forward than its class",
}


def refuse_in_the_next_step(change: Callable, what: str, monkeypatch: Any) -> None:
    families.compute_in_float64(monkeypatch, "llama")
    stages = int(os.environ["OMPI_COMM_WORLD_SIZE"]) // 2
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": stages})
    job = families.whole_job("llama")
    mlp = job.net.model.layers[0].mlp
    mlp.register_forward_hook(lambda *_: None)
    job.step(0)
    change(mlp)
    with pytest.raises(RuntimeError, match=f"'model.layers.0.mlp.{what}"):
        job.step(1)


@pytest.mark.parametrize("number", range(len(LATER)))
@on_ranks(2, 4, timeout_s=120)
def test_what_is_changed_inside_of_what_is_split_already_is_refused(number, monkeypatch):
    refuse_in_the_next_step(*list(LATER.items())[number], monkeypatch)


@on_ranks(2)
def test_a_parametrization_inside_of_what_is_split_already_is_refused(monkeypatch):
    refuse_in_the_next_step(parametrized, "down_proj' has a parametrization", monkeypatch)
