"""Spec: smp.optimizers (api section 10), against plain loops over one tensor at a time;
smp.DistributedOptimizer, which is the optimizer that it wraps.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, norm_over_the_model
from tests.models.partition import distributed
from tests.models.steps import mean_square
from tests.ranks import on_ranks

STEPS = 5
HALF_AND_WIDE = (torch.float16, torch.float32)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def with_gradients(*gradients: Tensor) -> list[Tensor]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return list(parameters)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        x = torch.randn(5, 3, generator=generator)
        optimizer.zero_grad()
        (net(x).square().mean() * scale).backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("more", [{}, {"betas": (0.6, 0.7), "eps": 0.1}], ids=["", "betas"])
def test_adam_equals_torchs(decay, amsgrad, adam_w_mode, more):
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    ours, theirs = model(), model()

    got = train(
        ours,
        FusedAdam(
            ours.parameters(),
            lr=0.02,
            weight_decay=decay,
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            **more,
        ),
    )

    want = train(
        theirs, kind(theirs.parameters(), lr=0.02, weight_decay=decay, amsgrad=amsgrad, **more)
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


class Lamb(torch.optim.Optimizer):
    """The definition: You et al., algorithm 2, one tensor at a time."""

    def __init__(self, params, **settings):
        super().__init__(params, {"averaging": True, "decoupled": True, **settings})

    @torch.no_grad()
    def step(self):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = sum((p.grad**2).sum() for p in params) ** 0.5
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad, st = p.grad, self.state[p]
                limit = group["max_norm"]
                if limit and norm > limit:
                    grad = grad * limit / norm
                if not group["decoupled"]:
                    grad = grad + group["decay"] * p
                st["t"] = st.get("t", 0) + 1
                st["m"] = (
                    beta1 * st.get("m", 0) + ((1 - beta1) if group["averaging"] else 1) * grad
                )
                st["v"] = beta2 * st.get("v", 0) + (1 - beta2) * grad**2
                m, v = st["m"], st["v"]
                if group["correct"]:
                    m, v = m / (1 - beta1 ** st["t"]), v / (1 - beta2 ** st["t"])
                update = m / (v.sqrt() + group["eps"])
                if group["decoupled"]:
                    update = update + group["decay"] * p
                ratio = 1.0
                if (group["decay"] or group["always"]) and p.norm() > 0 and update.norm() > 0:
                    ratio = p.norm() / update.norm()
                p -= group["lr"] * ratio * update


def test_lamb_moves_what_is_zero_and_leaves_what_has_no_update():
    """Their ratio is 1, as in the definition."""
    zero, still = with_gradients(torch.tensor([3.0, 4.0]), torch.zeros(2))
    with torch.no_grad():
        still.fill_(2)

    FusedLAMB([zero, still], lr=0.1, weight_decay=0.0, use_nvlamb=True).step()

    torch.testing.assert_close(zero.detach(), torch.tensor([-0.1, -0.1]))
    assert still.eq(2).all()


class NovoGrad(torch.optim.Optimizer):
    """The definition: Ginsburg et al., algorithm 1, one tensor at a time."""

    def __init__(self, params, **settings):
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                grad, st = p.grad, self.state[p]
                st["t"] = t = st.get("t", 0) + 1
                if group["largest"]:
                    norm = grad.abs().max()
                    v = st.get("v", 0 * norm if group["zero"] else norm)
                    st["v"] = beta2 * v + (1 - beta2) * norm
                else:
                    norm = grad.norm()
                    v = st.get("v", 0 * norm if group["zero"] else norm)
                    st["v"] = (beta2 * v**2 + (1 - beta2) * norm**2) ** 0.5
                correct = group["correct"]
                below = st["v"] / ((1 - beta2**t) ** 0.5 if correct else 1) + group["eps"]
                if group["inside"]:
                    grad = grad / below + group["decay"] * p
                share = 1 - beta1 if group["averaging"] else 1
                st["m"] = beta1 * st.get("m", 0) + share * grad
                update = st["m"] / (1 - beta1**t if correct else 1)
                if not group["inside"]:
                    update = update / below + group["decay"] * p
                p -= group["lr"] * update


DEFINED = {  # ours, the definition, its settings by default and a scale of the loss
    "lamb": (
        FusedLAMB,
        Lamb,
        {"eps": 1e-6, "decay": 0.01, "max_norm": 1.0, "correct": True, "always": False},
        5.0,
    ),
    "novograd": (
        FusedNovoGrad,
        NovoGrad,
        {"eps": 1e-8, "decay": 0.0, "inside": False, "largest": False, "zero": False}
        | {"correct": True, "averaging": True},
        1.0,
    ),
}


@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("lamb", {}, {}),
        ("lamb", {"weight_decay": 0.0}, {"decay": 0.0}),
        ("lamb", {"weight_decay": 0.0, "use_nvlamb": True}, {"decay": 0.0, "always": True}),
        ("lamb", {"bias_correction": False}, {"correct": False}),
        ("lamb", {"max_grad_norm": 0.01}, {"max_norm": 0.01}),
        ("lamb", {"max_grad_norm": 0}, {"max_norm": 0}),
        ("lamb", {"adam_w_mode": False}, {"decoupled": False}),
        ("lamb", {"grad_averaging": False}, {"averaging": False}),
        ("lamb", {"betas": (0.6, 0.7), "eps": 0.1}, {"betas": (0.6, 0.7), "eps": 0.1}),
        ("novograd", {}, {}),
        ("novograd", {"weight_decay": 0.1}, {"decay": 0.1}),
        (
            "novograd",
            {"weight_decay": 0.1, "reg_inside_moment": True},
            {"decay": 0.1, "inside": True},
        ),
        ("novograd", {"norm_type": 0}, {"largest": True}),
        ("novograd", {"init_zero": True}, {"zero": True}),
        ("novograd", {"bias_correction": False}, {"correct": False}),
        ("novograd", {"grad_averaging": False}, {"averaging": False}),
        ("novograd", {"betas": (0.6, 0.7), "eps": 0.1}, {"betas": (0.6, 0.7), "eps": 0.1}),
    ],
)
def test_it_equals_its_definition(name, ours, theirs):
    fused, definition, settings, scale = DEFINED[name]
    a, b = model(), model()

    got = train(a, fused(a.parameters(), lr=0.05, **ours), scale)

    settings = {"betas": (0.9, 0.999), **settings, **theirs}
    want = train(b, definition(b.parameters(), lr=0.05, **settings), scale)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedNovoGrad])
class TestEach:
    def test_a_parameter_without_gradient_is_left_alone(self, kind):
        used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = kind([used, unused])

        used.sum().backward()
        optimizer.step()

        assert unused.tolist() == [1, 1]
        assert (used != 1).all()
        assert unused not in optimizer.state

    def test_nothing_at_all_is_a_step_too(self, kind):
        parameter = nn.Parameter(torch.ones(2))
        kind([parameter]).step()
        assert parameter.tolist() == [1, 1] and parameter.grad is None

    def test_it_goes_on_from_its_state(self, kind):
        net = model()
        optimizer = kind(net.parameters(), lr=0.05)
        train(net, optimizer)
        other = copy.deepcopy(net)
        resumed = kind(other.parameters(), lr=0.05)

        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        assert all(map(torch.equal, train(net, optimizer), train(other, resumed)))

    def test_a_scheduler_takes_it(self, kind):
        optimizer = kind(model().parameters(), lr=1.0)

        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.step()
        scheduler.step()

        assert optimizer.param_groups[0]["lr"] == 0.5

    @pytest.mark.parametrize("told", [{}, {"set_to_none": True}, {"set_to_none": False}])
    @pytest.mark.parametrize("none", [False, True])
    def test_zero_grad_follows_set_grad_none_or_what_it_is_told(self, kind, none, told):
        parameter = nn.Parameter(torch.ones(1))
        parameter.sum().backward()
        kind([parameter], set_grad_none=none).zero_grad(**told)
        assert parameter.grad == (None if told.get("set_to_none", none) else 0)

    def test_a_closure_computes_the_gradients_of_its_step(self, kind):
        ours, theirs = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        first, second = kind([ours], lr=0.1), kind([theirs], lr=0.1)

        def closure():
            first.zero_grad()
            loss = ours.square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            second.zero_grad()
            loss = theirs.square().sum()
            loss.backward()
            with torch.no_grad():
                assert first.step(closure).item() == loss.item()
            assert second.step() is None
            assert torch.equal(ours, theirs)

    def test_a_group_that_waits_for_its_gradients_counts_its_steps(self, kind):
        """A group's counter is of the optimizer's steps; torch's Adam has one by parameter."""
        early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        optimizer = kind([{"params": [early]}, {"params": [late]}], lr=0.1)
        for parameters in ([early], [early, late]):
            optimizer.zero_grad()
            sum(p.square().sum() for p in parameters).backward()
            optimizer.step()
        if kind is not FusedAdam:
            assert [group["step"] for group in optimizer.param_groups] == [2, 2]
        assert (late != 1).all()

    def test_its_defaults_are_apexs(self, kind):
        decay = 0.01 if kind is FusedLAMB else 0.0
        eps = 1e-6 if kind is FusedLAMB else 1e-8
        (group,) = kind([nn.Parameter(torch.ones(1))]).param_groups
        assert (group["lr"], group["betas"], group["eps"]) == (1e-3, (0.9, 0.999), eps)
        assert group["weight_decay"] == decay and not group["amsgrad"]


@pytest.mark.parametrize("name", DEFINED)
def test_groups_have_settings_of_their_own(name):
    """The norm that LAMB clips by is that of all groups."""
    ours, theirs, settings, _ = DEFINED[name]
    a, b = model(), model()

    def groups(net: nn.Module, decay: str, limit: str) -> list[dict]:
        first = {"lr": 0.05, "betas": (0.9, 0.99), decay: 0.1}
        second = {"lr": 0.02, "betas": (0.6, 0.7), decay: 0.0}
        if theirs is Lamb:
            first[limit], second[limit] = 0.5, 2.0
        return [
            {"params": list(net[0].parameters()), **first},
            {"params": list(net[2].parameters()), **second},
        ]

    got = train(a, ours(groups(a, "weight_decay", "max_grad_norm"), eps=1e-6), scale=20.0)
    want = train(
        b, theirs(groups(b, "decay", "max_norm"), **settings | {"eps": 1e-6}), scale=20.0
    )
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_moments_have_their_parameters_precision_and_float32_at_least(kind, dtype, wide):
    parameter = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = kind([parameter], lr=1.0)

    parameter.square().sum().backward()
    optimizer.step()

    resumed = kind([parameter], lr=1.0)
    resumed.load_state_dict(optimizer.state_dict())

    assert parameter.dtype == dtype and (parameter != 1).all()
    for each in (optimizer, resumed):
        assert {moment.dtype for moment in each.state[parameter].values()} == {wide}


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_half_precision_parameters_are_updated_as_in_float32(kind):
    """With norms and sums that half precision cannot hold."""
    half, wide = (nn.Parameter(torch.full((4096,), 2e3, dtype=d)) for d in HALF_AND_WIDE)
    for parameter in (half, wide):
        optimizer = kind([parameter], lr=0.05, weight_decay=0.1)
        for _ in range(2):
            parameter.grad = torch.linspace(-5e2, 5e2, 4096).to(parameter.dtype)
            optimizer.step()
    assert (wide - 2e3).abs().min() > 4  # more than what is between two numbers there
    torch.testing.assert_close(half.float(), wide.detach(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", [FusedLAMB, FusedNovoGrad])
def test_a_dict_that_was_loaded_stays_as_it_is(kind):
    """The next steps change the optimizer's state, and not what a script keeps."""
    net = model()
    optimizer = kind(net.parameters(), lr=0.05)
    train(net, optimizer)
    kept = optimizer.state_dict()
    before = copy.deepcopy(kept["state"])
    resumed = kind(net.parameters(), lr=0.05)
    given = {**kept, "state": {n: {**one, "step": 3} for n, one in kept["state"].items()}}

    resumed.load_state_dict(given)  # a script's own number is as good as a tensor
    train(net, resumed)

    assert all(one["step"] == 3 for one in resumed.state_dict()["state"].values())
    for number, moments in before.items():
        for name, value in moments.items():
            assert torch.equal(kept["state"][number][name], value)


def test_what_apex_refuses_is_refused():
    parameters = [nn.Parameter(torch.ones(1))]

    with pytest.raises(ValueError, match="FusedLAMB: there is no AMSGrad"):
        FusedLAMB(parameters, amsgrad=True)
    with pytest.raises(ValueError, match="norm_type must be 0 or 2, got 1"):
        FusedNovoGrad(parameters, norm_type=1)
    with pytest.raises(NotImplementedError, match="bias_correction=False"):
        FusedAdam(parameters, bias_correction=False)


def test_a_wrapped_optimizer_does_what_it_does_itself():
    """Closures, groups that are added or replaced, gradients that are kept as zeros."""
    results = []
    for wrap in (lambda optimizer: optimizer, smp.DistributedOptimizer):
        first, second = (nn.Parameter(torch.full((2,), value)) for value in (1.0, 2.0))
        sgd = torch.optim.SGD([first], lr=0.5, momentum=0.5)
        optimizer = wrap(sgd)

        def closure(optimizer=optimizer, first=first):
            optimizer.zero_grad(set_to_none=False)
            loss = first.square().sum()
            loss.backward()
            return loss.detach()

        losses = [optimizer.step(closure).item() for _ in range(2)]
        optimizer.add_param_group({"params": [second], "lr": 0.25})
        assert sgd.param_groups[1]["params"] == [second]
        second.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        kept = [p.grad.tolist() for p in (first, second)]
        optimizer.zero_grad()
        assert first.grad is None and second.grad is None
        optimizer.param_groups = optimizer.param_groups[1:]
        assert sgd.param_groups is optimizer.param_groups
        results.append((losses, first.tolist(), second.tolist(), kept))

    assert results[0] == results[1]
    assert results[0][3] == [[0, 0], [0, 0]]
    smp.reset()


@on_ranks(2)
def test_the_norm_is_over_the_whole_model():
    smp.init({"pipeline_parallel_degree": 2})

    norm = norm_over_the_model(with_gradients(torch.tensor([3.0, 4.0])[smp.rank() :][:1]))

    assert norm.item() == pytest.approx(5.0)


@on_ranks(2)
def test_lamb_on_parts_of_a_model_equals_lamb_on_the_whole():
    smp.init({"pipeline_parallel_degree": 2})
    values = [torch.full((3,), 2.0), torch.full((2,), -1.0)]
    grads = [torch.full((3,), 30.0), torch.full((2,), 40.0)]
    parts = [nn.Parameter(v.clone()) for v in values]
    parts[smp.rank()].grad = grads[smp.rank()].clone()
    optimizer = FusedLAMB(parts, lr=0.1)
    optimizer.step()
    mine = parts[smp.rank()].detach()

    smp.shutdown()
    whole = [nn.Parameter(v.clone()) for v in values]
    for parameter, grad in zip(whole, grads, strict=True):
        parameter.grad = grad.clone()
    FusedLAMB(whole, lr=0.1).step()
    expected = whole[len(mine) == 2]  # the second tensor has two elements
    torch.testing.assert_close(mine, expected.detach())


class Tied(nn.Module):
    """Two layers on different ranks, a weight that is used on both sides, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)
        self.again.weight = self.first.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_what_an_optimizer_for_half_precision_has_is_its_own():
    """... as scripts wrap their own: loss_scale, and master weights that are clipped."""

    class Scaled(torch.optim.SGD):
        loss_scale = 8.0

        def clip_master_grads(self, max_norm, norm_type=2.0):
            return max_norm, norm_type

    wrapped = Scaled([torch.ones(1)])
    optimizer = smp.DistributedOptimizer(wrapped)
    assert optimizer.loss_scale == 8.0 and optimizer.clip_master_grads(3.0) == (3.0, 2.0)
    optimizer.loss_scale = 4.0
    assert wrapped.loss_scale == optimizer.loss_scale == 4.0
    assert smp.DistributedOptimizer(torch.optim.SGD([torch.ones(1)])).loss_scale == 1.0
    smp.reset()


@on_ranks(2, 4)
@pytest.mark.parametrize("by", ["smp", "optimizer", "torch", "total norm"])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 1e3])
@pytest.mark.sample(12)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(norm_type, max_norm, by):
    """As torch's clip_grad_norm_ on the plain model, within rounding of float64."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    torch.manual_seed(3)
    net = Tied().double()
    plain = copy.deepcopy(net)
    model = distributed(net, {"first": 0, "again": 0, "second": 1})
    step = smp.step(mean_square)

    x = torch.randn(8, 4, dtype=torch.float64)  # the same on all replicas
    step(model, x)
    if by == "smp":
        norm = smp.clip_grad_norm_(model, max_norm, norm_type)
    elif by == "torch":
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    elif by == "total norm":
        mine = [p for p in model.parameters() if p.grad is not None]
        other = nn.Parameter(torch.ones(1))
        assert nn.utils.clip_grad_norm_(other, max_norm, norm_type) == 0
        assert nn.utils.get_total_norm([torch.ones(1)], norm_type) == 1
        if mine:
            with pytest.raises(ValueError, match=f"{len(mine)} gradients of a model that sev"):
                nn.utils.get_total_norm([torch.ones(1), *(p.grad for p in mine)], norm_type)
        norm = nn.utils.get_total_norm([p.grad for p in mine], norm_type)
        nn.utils.clip_grads_with_norm_(mine, max_norm, norm)
    else:
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        norm = optimizer.clip_master_grads(max_norm, norm_type)

    plain(x).square().mean().backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    torch.testing.assert_close(norm, want)
    for name, parameter in model.local_named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
    assert {name for name, _ in model.local_named_parameters()} != set(plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("degree", [1, 2])
def test_an_optimizer_of_all_parameters_at_once_needs_them_on_one_rank(degree):
    smp.init({"pipeline_parallel_degree": degree, "ddp": True})
    model = smp.DistributedModel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.LBFGS(model.parameters())
    if degree == 1:
        assert smp.DistributedOptimizer(optimizer).optimizer is optimizer
        return
    with pytest.raises(NotImplementedError, match="LBFGS takes all parameters as one vector"):
        smp.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_a_norm_that_half_precision_cannot_hold_is_right(norm_type):
    grads = [torch.full((1 << 16,), 500.0, dtype=torch.float16)] * 2
    want = torch.full((1 << 17,), 500.0, dtype=torch.float64).norm(norm_type)
    norm = norm_over_the_model(with_gradients(*grads), norm_type)
    assert norm.item() == pytest.approx(want.item(), rel=1e-3)
