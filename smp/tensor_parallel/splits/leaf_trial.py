"""A trial of a linear or embedding of a user's class: split, it must act as whole.

Such a class has a ``forward`` around that of PyTorch's class, a factor for example, with
unknown effects.  So two small copies with random weights get a few rows, one of them split.
Outputs and gradients must be the same.  The split copy's weight is no more than this rank's
slice: a ``forward`` with its own read of it fails the trial.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from smp import ranks
from smp.collectives.torch_process_groups import device_of_numbers
from smp.marks import PATH
from smp.modules import delayed_init
from smp.modules.stand_ins import users_class
from smp.slicing.slices import slices_of
from smp.tensor_parallel import group

_LARGE = 1 << 20  # elements of a weight; a copy of a larger one has fewer rows
_SEED = 20_011
# Effects of nn.Embedding's forward on all samples at once; they are not in question.
_OF_ALL_SAMPLES = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}


def why_whole(module: nn.Module, path: str, split: Callable[[nn.Module], None]) -> str:
    """The reason for a module to stay whole; "": it has proved itself.

    Collective over the TP_GROUP; under planning, every module is taken to pass.

    Args:
        module: of a subclass of ``nn.Linear`` or ``nn.Embedding``; stays as it is.
        path: of it.
        split: splits such a module.
    """
    if group.is_traced():
        return ""
    device = device_of_numbers(ranks.get_tp_process_group())
    devices = [] if device.type == "cpu" else [torch.cuda.current_device()]
    its = f"its class {users_class(type(module)).__name__} has a forward of its own"
    with (
        torch.random.fork_rng(devices),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        failed = ""
        try:
            whole, part = (_copy(module, device) for _ in range(2))
            wanted = _of_whole(whole)
        except Exception as error:  # any exception of a user's code
            failed = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if _somewhere(bool(failed)):
            failed = failed or "an error on another rank"
            return f"{its}, which cannot be tried with rows alone ({failed})"
        part.__dict__[PATH] = path
        split(part)
        if _differs(part, wanted):
            return f"{its}, which does not give the same when the weight is split"
    return ""


# ---------------------------------------------------------------------------------- copies


def _copy(module: nn.Module, device: torch.device) -> nn.Module:
    """A module of the same class without hooks, in float64, with values alike on all ranks."""
    draw = torch.Generator("cpu").manual_seed(_SEED)
    made: dict[int, nn.Module] = {}
    values: dict[int, nn.Parameter] = {}

    def parameter(one: nn.Parameter) -> nn.Parameter:
        if id(one) not in values:
            shape = list(one.shape)
            if any(one is named for named in (weight, module._parameters.get("bias"))):
                shape[0] = rows
            # Those of few axes are factors and norms: they may have to be positive.
            value = torch.empty(shape, dtype=torch.float64, device="cpu")
            if len(shape) > 1:
                value.normal_(generator=draw)
            else:
                value.uniform_(0.5, 1.5, generator=draw)
            values[id(one)] = nn.Parameter(value.to(device))
        return values[id(one)]

    def copied(one: nn.Module) -> nn.Module:
        if id(one) in made:
            return made[id(one)]
        twin = made[id(one)] = object.__new__(users_class(type(one)))
        nn.Module.__init__(twin)
        tables = vars(twin).keys()
        for name, value in vars(one).items():
            if name not in tables:
                twin.__dict__[name] = _attribute(value, device)
        twin.__dict__["training"] = one.training
        for name, p in one._parameters.items():
            twin._parameters[name] = None if p is None else parameter(p)
        for name, buffer in one._buffers.items():
            value = None if buffer is None else delayed_init.value_of(buffer).to(device)
            twin._buffers[name] = value
        for name, child in one._modules.items():
            twin._modules[name] = None if child is None else copied(child)
        return twin

    weight = module._parameters["weight"]
    assert weight is not None
    most = max(_LARGE // weight[0].numel(), 8 * group.size())
    rows = min(len(weight), most)
    twin = copied(module)
    for name in ("num_embeddings", "out_features"):
        if name in twin.__dict__:
            twin.__dict__[name] = rows
    if isinstance(module, nn.Embedding):
        twin.__dict__.update(_OF_ALL_SAMPLES)
        padding = module.padding_idx
        twin.__dict__["padding_idx"] = None if padding is None else min(padding, rows - 1)
    return twin


def _attribute(value: Any, device: torch.device) -> Any:
    """A plain attribute's value, where changes are not seen in the module itself."""
    if isinstance(value, Tensor):
        return delayed_init.value_of(value).to(device)
    return value.copy() if isinstance(value, list | dict | set) else value


# ------------------------------------------------------------------------------- the trial


class _Wanted(NamedTuple):
    """The whole module's results for this rank's input.

    Attributes:
        form: of the input.
        outputs: the tensors in them.
        own, all: gradients of the input and the parameters, by name, of this rank's outputs;
            and of those of all ranks.
    """

    form: tuple[int, ...]
    outputs: list[Tensor]
    own: dict[str, Tensor | None]
    all: dict[str, Tensor | None]


def _of_whole(module: nn.Module) -> _Wanted:
    forms = _forms(module)
    for number, form in enumerate(forms, 1):
        try:
            runs = [_run(module, form, rank) for rank in range(group.size())]
            break
        except Exception:  # any exception of a user's code
            if number == len(forms):
                raise
    outputs, own = runs[group.rank()]
    total = own
    if not group.same_samples():
        total = {name: _sum([of[name] for _, of in runs]) for name in own}
    return _Wanted(form, outputs, own, total)


def _sum(gradients: list[Tensor | None]) -> Tensor | None:
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(there).sum(0) if there else None


def _forms(module: Any) -> list[tuple[int, ...]]:
    """The possible shapes of inputs: samples, positions and channels, or some of them."""
    if isinstance(module, nn.Embedding):
        return [(2, 2 * group.size() + 3), (4 * group.size() + 6,)]
    return [(2, 3, module.in_features), (6, module.in_features)]


def _input(module: Any, form: tuple[int, ...], rank: int) -> Tensor:
    """A rank's input; under ``prescaled_batch`` all have the same."""
    rank = 0 if group.same_samples() else rank
    draw = torch.Generator("cpu").manual_seed(_SEED + rank)
    device = module.weight.device
    if not isinstance(module, nn.Embedding):
        values = torch.randn(form, dtype=torch.float64, generator=draw, device="cpu")
        return values.to(device).requires_grad_()
    rows = module.num_embeddings
    # Indices of every slice of the rows.
    spread = torch.linspace(0, rows - 1, math.prod(form), device="cpu").long()
    shifts = torch.randint(0, rows, form, generator=draw, device="cpu") * (rank % 2)
    return ((spread.view(form) + shifts) % rows).to(device)


def _run(
    module: nn.Module, form: tuple[int, ...], rank: int, meet: Callable[[], None] | None = None
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Outputs for a rank's input, and gradients of their sum with weights.

    Args:
        meet: called between forward and backward.
    """
    x = _input(module, form, rank)
    torch.default_generator.manual_seed(_SEED)
    if not x.is_cpu:
        torch.cuda.manual_seed(_SEED)
    outputs = [leaf for leaf in tree_leaves(module(x)) if isinstance(leaf, Tensor)]
    if meet is not None:
        meet()
    learned = [out for out in outputs if out.requires_grad]
    named = dict(module.named_parameters())
    if x.requires_grad:
        named["input"] = x  # type: ignore[assignment]
    if not learned:
        return outputs, dict.fromkeys(named)
    weights = (torch.arange(out.numel(), device=out.device).cos() for out in learned)
    loss = sum((out * w.view_as(out)).sum() for out, w in zip(learned, weights, strict=True))
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)  # type: ignore[arg-type]
    return outputs, dict(zip(named, gradients, strict=True))


class _OthersFailed(Exception):
    pass


def _differs(part: nn.Module, wanted: _Wanted) -> bool:
    """Whether on some rank the split module differs, or fails."""
    before = group.call_of(part.__dict__[PATH])

    def meet() -> None:
        if _somewhere(False):
            raise _OthersFailed

    try:
        outputs, gradients = _run(part, wanted.form, group.rank(), meet)
    except _OthersFailed:
        return True
    except Exception:  # any exception of a user's code
        return _somewhere(True)
    finally:
        group.call_of(before)
    return _somewhere(not _are_as_wanted(part, outputs, gradients, wanted))


def _somewhere(happened: bool) -> bool:
    """Whether something happened on any rank.  Collective over the TP_GROUP."""
    return any(flag for (flag,) in group.gather_numbers([int(happened)]))


def _are_as_wanted(
    part: nn.Module, outputs: list[Tensor], gradients: dict[str, Tensor | None], wanted: _Wanted
) -> bool:
    if len(outputs) != len(wanted.outputs):
        return False
    parameters = dict(part.named_parameters())
    pairs: list[tuple[Tensor | None, Tensor | None]]
    pairs = list(zip(outputs, wanted.outputs, strict=True))
    for name, gradient in gradients.items():
        slices = slices_of(parameters[name]) if name in parameters else None
        whole = wanted.own[name] if slices is None else wanted.all[name]
        if slices is not None and whole is not None:
            whole = slices.take(whole, group.rank())
        pairs.append((gradient, whole))
    return all(_are_near(a, b) for a, b in pairs)


def _are_near(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        # A used split weight has a gradient, if only of zeros.
        there = next((t for t in (a, b) if t is not None), None)
        return there is None or not there.any()
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    scale = max(float(b.detach().abs().max()), 1e-3) if b.numel() else 0.0
    close = torch.finfo(a.dtype).eps ** 0.7 * scale
    return torch.allclose(a, b, rtol=0.0, atol=close, equal_nan=True)
