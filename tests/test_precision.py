"""Half precision (``bf16``, ``fp16``): float32 master weights, gradients and loss scales."""

import copy
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.precision.loss_scale import LossScale
from tests.models.partition import distributed
from tests.models.trained import assert_same, snapshot
from tests.ranks import on_ranks
from tests.reference.whole_job import own

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF = pytest.mark.parametrize("half", DTYPES)
STEPS, MICROBATCHES, BATCH = 5, 4, 8
CLIP = 0.5
SCALE = 1024.0


class Net(nn.Module):
    """Two halves for two ranks, with a table, a norm, a buffer and a float argument."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.second = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh())
        self.output = nn.Linear(8, 4)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(self.table(tokens) + x * self.shift)
        return {"scores": self.output(self.second(hidden))}


def net(split: bool = False) -> Net:
    torch.manual_seed(3)
    with smp.tensor_parallelism(enabled=split):
        made = Net()
    if smp.pp_size() > 1:
        for path, module in made.named_modules():
            smp.set_partition(module, int(path.startswith(("second", "output"))))
    return made


def batch(step: int, dp_rank: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(10 * step + dp_rank)
    tokens = torch.randint(11, (BATCH,), generator=source)
    return tokens, torch.randn(BATCH, 6, generator=source), tokens % 4


def loss_of(model: nn.Module, tokens: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    scores = model(tokens, x)["scores"]
    assert scores.dtype == torch.float32
    return F.cross_entropy(scores, labels)


@smp.step
def train_step(model: Any, *batch: Tensor) -> Tensor:
    loss = loss_of(model, *batch)
    model.backward(loss)
    return loss


class Plain(nn.Module):
    """By hand, in one process: a half model with float32 masters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = net().to(dtype)
        self.dtype = dtype
        for parameter in self.model.parameters():
            parameter.grad_dtype = torch.float32
        self.masters = [p.detach().float() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.02)

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        scores = self.model(tokens, x.to(self.dtype))["scores"]
        return {"scores": scores.float()}

    def backward(self, step: int, microbatches: int, scale: float) -> None:
        """The gradients of all replicas' mean."""
        sums: list[list[Tensor]] = []
        for dp_rank in range(smp.dp_size()):
            self.model.zero_grad()
            parts = [one.chunk(microbatches) for one in batch(step, dp_rank)]
            for part in zip(*parts, strict=True):
                loss_of(self, *part).backward(torch.tensor(scale / microbatches))
            sums.append([p.grad / scale for p in self.model.parameters()])
        for master, gradients in zip(self.masters, zip(*sums, strict=True), strict=True):
            master.grad = torch.stack(gradients).sum(0) / len(sums)

    def step(self, step: int, scale: float, clip: bool) -> Tensor | None:
        self.backward(step, MICROBATCHES, scale)
        norm = nn.utils.clip_grad_norm_(self.masters, CLIP) if clip else None
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master)
        return norm


CLIPS: dict[str, Callable[[Any, Any], Tensor | None]] = {
    "none": lambda model, optimizer: None,
    "optimizer": lambda model, optimizer: optimizer.clip_master_grads(CLIP),
    "model": lambda model, optimizer: model.clip_grad_norm_(CLIP),
    "torch": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), CLIP),
    "masters": lambda model, optimizer: nn.utils.clip_grad_norm_(
        [p for group in optimizer.param_groups for p in group["params"]], CLIP
    ),
}
JOBS = {
    "pp": {"pipeline_parallel_degree": 2},
    "dp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp tp": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
}


def job(kind: str, half: str) -> None:
    smp.init({**JOBS[kind], half: True, "microbatches": MICROBATCHES})


def wrapped(half: str, late: bool = False, **options: Any) -> tuple[Any, Any]:
    """Model and optimizer; the optimizer made after the model, or before."""
    module = net(split=smp.tp_size() > 1)
    options = {"static_loss_scale": SCALE if half == "fp16" else 1.0} | options
    early = None if late else torch.optim.AdamW(module.parameters(), lr=0.02)
    model = smp.DistributedModel(module)
    plain = early or torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, smp.DistributedOptimizer(plain, **options)


def check(model: Any, plain: Plain, exact: bool, tolerance: float) -> None:
    for (name, got), (_, value) in zip(
        model.state_dict().items(), plain.model.state_dict().items(), strict=True
    ):
        assert got.dtype == plain.dtype
        if exact:
            assert torch.equal(got, value), name
        torch.testing.assert_close(got, value, rtol=tolerance, atol=tolerance, msg=name)


def run_against_plain(kind: str, half: str, clip: str) -> None:
    job(kind, half)
    split = smp.tp_size() > 1
    model, optimizer = wrapped(half, late=split)
    plain = Plain(DTYPES[half])
    scale = optimizer.loss_scale
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(model, *batch(step, smp.dp_rank()))
        norm = CLIPS[clip](model, optimizer)
        optimizer.step()
        want = plain.step(step, scale, clip != "none")
        if norm is not None:
            near = 0.02 if split else 1e-4
            torch.testing.assert_close(norm.float(), want, rtol=near, atol=0)
    check(
        model, plain, exact=kind == "pp" and clip == "none", tolerance=0.02 if split else 8e-3
    )
    assert optimizer.redefined_params and not optimizer.overflow
    masters = dict(model.virtual_named_parameters())
    assert {p.dtype for p in model.parameters()} == {DTYPES[half]}
    for name, parameter in model.local_named_parameters():
        assert masters[name].dtype == torch.float32
        assert masters[name].grad is parameter.grad and parameter.grad.dtype == torch.float32
        assert torch.equal(masters[name].to(parameter.dtype), own(parameter))


@on_ranks(2)
@HALF
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kind", ["pp", "dp", "tp"])
@pytest.mark.sample(8)
def test_a_job_trains_as_masters_by_hand_do(kind, half, clip):
    run_against_plain(kind, half, clip)


@on_ranks(4)
@HALF
def test_a_pipeline_of_split_modules_trains_as_masters_by_hand_do(half):
    run_against_plain("pp tp", half, "optimizer")


@on_ranks(1, 2)
def test_gradients_of_many_microbatches_are_those_of_the_rounded_model():
    """Sums in bfloat16 would be eight times as far off."""
    smp.init({"pipeline_parallel_degree": ranks_of_job(), "bf16": True, "microbatches": 64})
    model, _ = wrapped("bf16")
    exact = net().bfloat16().double()
    parts = [batch(step) for step in range(64)]
    whole = [torch.cat(some) for some in zip(*parts, strict=True)]

    train_step(model, *whole)
    loss_of(Double(exact), *whole).backward()

    wanted = dict(exact.named_parameters())
    local = [(p.grad, wanted[name].grad) for name, p in model.local_named_parameters()]
    off = math.hypot(*((got - want).norm() for got, want in local))
    assert off < 1e-3 * math.hypot(*(want.norm() for _, want in local))


def ranks_of_job() -> int:
    return int(os.environ["OMPI_COMM_WORLD_SIZE"])


class Double(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, x: Tensor) -> dict[str, Tensor]:
        return {"scores": self.model(tokens, x.bfloat16().double())["scores"].float()}


# ------------------------------------------------------------------------ saving


@on_ranks(2)
@HALF
@pytest.mark.parametrize("partial", [True, False], ids=["partial", "full"])
@pytest.mark.parametrize("kind", ["pp", "tp"])
@pytest.mark.sample(4)
def test_a_run_resumes_with_the_bits_of_an_uninterrupted_one(kind, partial, half, tmp_path):
    """Masters and a dynamic scale are in the optimizer's state."""
    job(kind, half)
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 2}}
    whole, optimizer = wrapped(half, late=True, **options)
    train(whole, optimizer, 0, 3)
    smp.save_checkpoint(tmp_path, "three", partial, whole, optimizer)
    saved = snapshot([whole.state_dict(), optimizer.state_dict()])
    train(whole, optimizer, 3, 6)
    want, states = snapshot(whole.state_dict()), snapshot(optimizer.state_dict())

    resumed, again = wrapped(half, late=True, **options)
    smp.resume_from_checkpoint(tmp_path, partial=partial)
    assert_same([resumed.state_dict(), again.state_dict()], saved)  # without a step
    train(resumed, again, 3, 6)

    assert_same(resumed.state_dict(), want)
    assert_same(again.state_dict(), states)
    assert again.loss_scale == optimizer.loss_scale
    assert (tmp_path / "three_partial" / "fp16_states_0_0.pt").exists() == partial


def train(model: Any, optimizer: Any, first: int, end: int) -> None:
    for step in range(first, end):
        optimizer.zero_grad()
        train_step(model, *batch(step, smp.dp_rank()))
        optimizer.step()


@on_ranks(2)
def test_the_full_state_loads_into_the_plain_optimizer_of_the_plain_model():
    job("pp", "bf16")
    model, optimizer = wrapped("bf16")
    train(model, optimizer, 0, 2)
    states, plain = optimizer.state_dict(), net()

    plain.load_state_dict(model.state_dict())
    torch.optim.AdamW(plain.parameters()).load_state_dict(states)

    masters = states["fp16_states"]["master_weights"]
    for number, parameter in enumerate(plain.parameters()):
        assert torch.equal(masters[number].bfloat16().float(), parameter)


@on_ranks(2)
def test_masters_follow_what_others_do_to_the_model():
    job("pp", "bf16")
    model, optimizer = wrapped("bf16")
    train(model, optimizer, 0, 2)
    name, own_one = next(model.local_named_parameters())
    master = dict(model.virtual_named_parameters())[name]
    before = master.detach().clone()
    zero = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}

    with torch.no_grad():
        own_one.view(-1)[0] = 3
    optimizer.zero_grad()
    optimizer.step()  # no gradients: nothing else moves
    assert master.view(-1)[0] == 3 and own_one.view(-1)[0] == 3
    assert torch.equal(master.view(-1)[1:], before.view(-1)[1:])

    model.load_state_dict(zero)
    optimizer.step()
    assert not any(p.any() for p in model.local_parameters()) and not master.any()


@on_ranks(1)
def test_parameters_frozen_thawed_and_added_between_steps_train():
    smp.init({"bf16": True})
    module = net()
    model = smp.DistributedModel(module)
    late = list(module.output.parameters())
    early = [p for p in module.parameters() if not any(p is one for one in late)]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(early, lr=0.1, momentum=0.9))
    module.table.requires_grad_(False)
    values: list[dict[str, Tensor]] = []
    for step in range(4):
        values.append({n: p.detach().clone() for n, p in module.named_parameters()})
        if step == 1:
            module.table.requires_grad_(True)
        if step == 2:
            optimizer.add_param_group({"params": late, "lr": 0.2})
        optimizer.zero_grad()
        train_step(model, *batch(step))
        optimizer.step()
        named = dict(model.virtual_named_parameters())
        assert (named["table.weight"].dtype == torch.float32) == (step > 0)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": late})
    values.append({n: p.detach().clone() for n, p in module.named_parameters()})
    moved = [
        {n for n in values[0] if not torch.equal(a[n], b[n])}
        for a, b in zip(values, values[1:], strict=False)
    ]
    assert "table.weight" not in moved[0] and "table.weight" in moved[1]
    assert "output.weight" not in moved[1] and "output.weight" in moved[2]
    assert all(m.dtype == torch.float32 for _, m in model.virtual_named_parameters())


# ------------------------------------------------------------------------ the loss scale


@pytest.mark.parametrize(
    "args, overflows, want",
    [
        ({}, "o", [128]),
        ({"scale_window": 3}, "......", [256, 256, 512, 512, 512, 1024]),
        ({"scale_window": 2}, ".o...", [256, 128, 128, 256, 256]),
        ({"min_scale": 64, "scale_factor": 4}, "ooo", [64, 64, 64]),
        ({"scale_window": 2, "delayed_shift": 2}, "oo..o", [256, 128, 128, 256, 256]),
        ({"scale_window": 2, "delayed_shift": 2}, "oo.o.oo", [256, 128, 128, 64, 64, 32, 16]),
        (
            {"scale_window": 9, "delayed_shift": 2, "consecutive_hysteresis": True},
            "o.o.oo",
            [256, 256, 256, 256, 256, 128],
        ),
    ],
)
def test_the_scale_follows_the_overflows(args, overflows, want):
    """``o`` is a step with one."""
    scale = LossScale(None, True, {"init_scale": 256.0, **args})
    got = []
    for each in overflows:
        scale.update(each == "o")
        got.append(scale.value)
    assert got == want


@on_ranks(4)
def test_an_overflow_on_one_rank_skips_the_update_on_all():
    job("pp", "fp16")
    args = {"init_scale": 256.0, "scale_window": 2}
    model, optimizer = wrapped("fp16", dynamic_loss_scale=True, dynamic_loss_args=args)
    scales, moved = [], []
    for step in range(4):
        before = [p.detach().clone() for p in model.local_parameters()]
        optimizer.zero_grad()
        train_step(model, *batch(step, smp.dp_rank()))
        if step == 1 and smp.rank() == 3:
            next(model.local_parameters()).grad.view(-1)[0] = float("inf")
        if step == 2:
            optimizer.clip_master_grads(1.0)
        optimizer.step()
        scales.append(optimizer.loss_scale)
        pairs = zip(before, model.local_parameters(), strict=True)
        moved.append(not all(torch.equal(a, b) for a, b in pairs))
        assert optimizer.overflow == (step == 1)
    assert scales == [256, 128, 128, 256] and moved == [True, False, True, True]


@on_ranks(1)
def test_gradients_add_up_over_steps_and_clips_in_one_scale():
    smp.init({"fp16": True})
    model, optimizer = wrapped("fp16")
    sums, wanted = [], []
    for clip in (False, True):
        optimizer.zero_grad()
        for step in range(3):
            train_step(model, *batch(step))
            if clip:
                optimizer.clip_master_grads(1e9)
        optimizer.clip_master_grads(1e9)
        sums.append([p.grad.clone() for p in model.parameters()])
    for step in range(3):
        optimizer.zero_grad()
        train_step(model, *batch(step))
        optimizer.clip_master_grads(1e9)
        wanted.append([p.grad.clone() for p in model.parameters()])
    total = [torch.stack(some).sum(0) for some in zip(*wanted, strict=True)]
    for got in sums:
        torch.testing.assert_close(got, total, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------ other optimizers


class KeepsMasters(torch.optim.SGD):
    """As FP16_Optimizer of existing scripts: it scales, and has float32 weights itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.fp32_from_fp16_groups = [
            [p.detach().float() for p in self.param_groups[0]["params"]]
        ]
        self.loss_scale = 8.0


@on_ranks(1)
@HALF
def test_an_optimizer_with_masters_of_its_own_gets_no_second_ones(half):
    smp.init({half: True})
    model = smp.DistributedModel(net())
    optimizer = smp.DistributedOptimizer(KeepsMasters(model.parameters()))
    train_step(model, *batch(0))
    own_gradient = model.output.bias.grad.clone()
    optimizer.step()
    assert not optimizer.redefined_params and optimizer.loss_scale == 8.0
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert own_gradient.abs().max() < 1  # without a scale of ours


@on_ranks(1)
def test_an_optimizer_with_a_closure_sees_the_newest_weights():
    smp.init({"bf16": True})
    module = net()
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.5))
    seen = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = train_step(model, *batch(0)).reduce_mean()
        seen.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(set(seen)) > 3 and min(seen) < seen[0]


# ------------------------------------------------------------------------ models and errors


@on_ranks(2)
def test_a_model_of_delayed_values_and_of_a_half_dtype_trains_like_any():
    job("pp", "bf16")
    wanted = net().bfloat16().state_dict()
    with smp.delay_param_initialization():
        delayed = net()
    with smp.model_creation(dtype=torch.bfloat16):
        made_half = net()
    assert {p.dtype for p in made_half.parameters()} == {torch.bfloat16}
    for module in (delayed, made_half):
        model = smp.DistributedModel(module)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.02))
        start = made_half.state_dict() if module is made_half else wanted
        model.register_post_partition_hook(
            lambda model, _, start=start: assert_same(model.state_dict(), start)
        )
        train(model, optimizer, 0, 2)
        assert {p.grad.dtype for p in model.local_parameters()} == {torch.float32}
        assert optimizer.redefined_params


@on_ranks(1)
@pytest.mark.parametrize("wide", [False, True])
def test_parameters_of_float16_alone_leave_all_else_to_the_script(wide):
    smp.init({"fp16_params": True, "_fp32_grad_accumulation": wide})
    model, optimizer = wrapped("fp16")
    tokens, x, labels = batch(0)
    scores = model(tokens, x.half())["scores"]
    assert scores.dtype == torch.float16
    model.backward(F.cross_entropy(scores, labels))
    gradients = {p.grad.dtype for p in model.parameters()}
    assert gradients == {torch.float32 if wide else torch.float16}
    assert optimizer.loss_scale == 1 and not optimizer.redefined_params


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.eye(x.shape[-1])  # float32, whatever x is


@on_ranks(2)
def test_a_module_that_refuses_half_is_named():
    smp.init({"bf16": True, "pipeline_parallel_degree": 2})
    module = nn.Sequential(nn.Linear(3, 3), Wide(), nn.Linear(3, 3))
    model = distributed(module, [0, 1, 1])
    with pytest.raises(RuntimeError) as caught:
        smp.step(lambda model, x: model(x))(model, torch.ones(2, 3))
    notes = "".join(getattr(caught.value, "__notes__", []))
    assert "module '1' was called in half precision (bf16=True" in notes


@on_ranks(1)
@pytest.mark.parametrize(
    "options, text",
    [
        ({"static_loss_scale": 0}, "static_loss_scale=0: it must be a number above 0"),
        (
            {"dynamic_loss_scale": True, "dynamic_loss_args": {"min_scale": 0}},
            "min_scale=0: it must be",
        ),
        ({"dynamic_loss_args": {"window": 3}}, r"dynamic_loss_args has \['window'\]"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(options, text):
    smp.init({"fp16": True})
    with pytest.raises(ValueError, match=text):
        wrapped("fp16", **options)


@on_ranks(1)
def test_gradients_without_the_scale_and_optimizers_beside_it_are_refused():
    smp.init({"fp16": True})
    model, optimizer = wrapped("fp16")
    loss_of(model, *batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"call model.backward\(loss\) in place of"):
        optimizer.step()
    with pytest.raises(NotImplementedError, match="closure"):
        optimizer.step(lambda: None)
    other = smp.DistributedOptimizer(torch.optim.SGD(copy.deepcopy(net()).parameters()))
    with pytest.raises(NotImplementedError, match="give all parameters to one optimizer"):
        optimizer.step()
    other.step()


# ------------------------------------------------------------------------ what it learns


@on_ranks(1)
@pytest.mark.stress
@HALF
def test_a_small_gpt_learns_as_much_as_in_float32(half):
    """The mean loss of the last 20 of 300 steps."""
    from tests.test_demo import demo

    losses = {}
    for kind in ("float32", half):
        smp.reset()
        smp.init({} if kind == "float32" else {half: True})
        torch.manual_seed(0)
        script = demo()
        model = smp.DistributedModel(script.GPT(width=64, heads=4, layers=2, length=32))
        optimizer = smp.DistributedOptimizer(
            torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95)),
            dynamic_loss_scale=True,
            dynamic_loss_args={"init_scale": 2.0**16},
        )
        text, places = script.standard_library(), torch.Generator().manual_seed(0)
        seen = []
        for step in range(300):
            for group in optimizer.param_groups:
                group["lr"] = script.learning_rate(step, 300, 3e-3)
            optimizer.zero_grad()
            pieces = script.draw(text, 8, 32, places)
            seen.append(script.train_step(model, pieces).reduce_mean().item())
            optimizer.clip_master_grads(1.0)
            optimizer.step()
        losses[kind] = sum(seen[-20:]) / 20
    assert abs(losses[half] / losses["float32"] - 1) < 0.02, losses
