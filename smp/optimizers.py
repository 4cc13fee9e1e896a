"""Optimizers for large batches, each tensor list updated at once.

``FusedAdam`` is PyTorch's own fused kernel; ``FusedLAMB`` and ``FusedNovoGrad`` use its
multi-tensor operations.  Names and arguments are those of NVIDIA's apex, as scripts expect.
Parameters on other ranks have no gradient here and are left alone.

Sources: LAMB, You et al. 2020, algorithm 2; NovoGrad, Ginsburg et al. 2019, algorithm 1.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp import ranks
from smp.collectives.objects import refuse_if_forked
from smp.sharding import owners
from smp.sharding.shards import averages_of, gradient_of
from smp.slicing.slices import slices_of
from smp.state_mod import state

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class FusedAdam(torch.optim.Adam):
    """Adam, with decoupled weight decay (AdamW) unless ``adam_w_mode`` is False.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay, amsgrad: as in ``torch.optim.AdamW``.
        bias_correction: must be True.
        adam_w_mode: decay the weights themselves, not through the gradient.
        set_grad_none: the default of ``zero_grad``.

    Raises:
        NotImplementedError: ``bias_correction=False``.
    """

    updates_by_element = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise NotImplementedError("FusedAdam: bias_correction=False is not built")
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            fused=True,
            decoupled_weight_decay=adam_w_mode,
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: have none, rather than zeros; None: as ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)


class _Updates(NamedTuple):
    """The updates of a group's parameters."""

    group: dict[str, Any]
    params: list[Tensor]
    updates: list[Tensor]


class _MultiTensor(torch.optim.Optimizer):
    """The common part of LAMB and NovoGrad: a step over the gradients present."""

    def __init__(self, params: Params, defaults: dict[str, Any], set_grad_none: bool) -> None:
        if defaults["amsgrad"]:
            raise ValueError(f"{type(self).__name__}: there is no AMSGrad variant")
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: have none, rather than zeros; None: as ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the parameters; returns the result of ``closure``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        todo = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        self._prepare([p for _, params in todo for p in params])
        done = []
        for group, params in todo:
            group["step"] = group.get("step", 0) + 1
            if params:
                updates = self._updates(group, params, [wide(p.grad) for p in params])
                done.append(_Updates(group, params, updates))
        self._scale(done)
        for each in done:
            apply(each.params, each.updates, each.group["lr"])
        return loss

    def _prepare(self, params: list[Tensor]) -> None:
        """Look at all gradients of this rank before the first group's updates."""

    def _updates(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """The updates of a group, before the learning rate."""
        raise NotImplementedError

    def _scale(self, done: list[_Updates]) -> None:
        """Scale the updates of all groups, before the first parameter changes."""

    def _moments(self, params: list[Tensor], name: str) -> list[Tensor]:
        """A state tensor for each parameter, zeros at first, never in half precision."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = torch.zeros_like(wide(p))
        return [self.state[p][name] for p in params]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but without its cast of the state to its parameter's dtype."""
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if not isinstance(value, Tensor):
                    continue  # a script's own: torch has taken it as it is
                self.state[p][name] = value.to(p.device, wide(p).dtype, copy=True)


class FusedLAMB(_MultiTensor):
    """LAMB: Adam's direction, with a step length in proportion to each tensor's norm.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as in AdamW.
        bias_correction: correct the moments for their start at zero.
        amsgrad: must be False.
        adam_w_mode: decay the weights themselves, not through the gradient.
        grad_averaging: weigh a new gradient with ``1 - beta1`` in the first moment.
        set_grad_none: the default of ``zero_grad``.
        max_grad_norm: the most for the norm over the whole model; larger gradients are scaled;
            0 turns this off.  With ``smp`` running that norm is over the MP_GROUP, so every
            rank of it must call ``step``; with sharded optimizer state, over all ranks.  Norms
            of tensors cut by tensor parallelism are over the TP_GROUP, in one all-reduce.
        use_nvlamb: scale the step of tensors without weight decay too.

    Raises:
        ValueError: ``amsgrad=True``.
    """

    takes_the_models_norm = True
    _sums_left: tuple | list = ()  # in a block: the all-reduces of the step, group and size

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": adam_w_mode,
            "grad_averaging": grad_averaging,
            "max_grad_norm": max_grad_norm,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults, set_grad_none)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """In the block, around ``step``, an exception on one rank ends the step of all.

        The other ranks hear of it in their next all-reduce of the step.
        """
        self._sums_left = [(owners.group_with_each_element(), 1)]
        if slices := self._slices():
            self._sums_left.append(("tp", 2 * len(slices)))
        try:
            yield
        except Exception:
            for kind, count in self._sums_left[:1]:
                with suppress(Exception):  # the block's is raised
                    _sum_over(kind, torch.zeros(count, dtype=torch.float64), has_failed=True)
            raise
        finally:
            self._sums_left = []

    def _sum(self, kind: str, numbers: Tensor) -> Tensor:
        """The sums over a group of ranks, of the next all-reduce of the step."""
        left, self._sums_left = self._sums_left[1:], []
        sums = _sum_over(kind, numbers)
        self._sums_left = left
        return sums

    def _slices(self) -> list[Tensor]:
        """The parameters cut by tensor parallelism, as many on every tp_rank."""
        if not state.is_initialized or ranks.tp_size() == 1:
            return []
        members = (p for group in self.param_groups for p in group["params"])
        return [p for p in members if slices_of(p) is not None]

    def _prepare(self, params: list[Tensor]) -> None:
        power = _own_power(params, 2.0)
        self._norm = self._sum(owners.group_with_each_element(), power.view(1))[0].sqrt()

    def _updates(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        decay, step = group["weight_decay"], group["step"]
        first, second = self._moments(params, "exp_avg"), self._moments(params, "exp_avg_sq")
        weights = [wide(p) for p in params]

        if group["max_grad_norm"] > 0 and self._norm > group["max_grad_norm"]:
            grads = list(torch._foreach_mul(grads, group["max_grad_norm"] / self._norm))
        if decay and not group["adam_w_mode"]:
            grads = list(torch._foreach_add(grads, weights, alpha=decay))
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, value=1 - beta2)

        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1 - beta2**step if group["bias_correction"] else 1.0
        below = torch._foreach_sqrt(torch._foreach_div(second, correction2))
        torch._foreach_add_(below, group["eps"])
        updates = torch._foreach_div(torch._foreach_div(first, correction1), below)
        if decay and group["adam_w_mode"]:
            torch._foreach_add_(updates, weights, alpha=decay)
        return list(updates)

    def _scale(self, done: list[_Updates]) -> None:
        params: list[Tensor] = []
        updates: list[Tensor] = []
        sizes: list[Tensor] = []  # of the weights
        lengths: list[Tensor] = []  # of the updates
        for group, members, directions in done:
            if group["weight_decay"] or group["use_nvlamb"]:
                params += members
                updates += directions
                sizes += torch._foreach_norm([wide(p) for p in members])
                lengths += torch._foreach_norm(directions)
        self._make_norms_of_wholes(params, [sizes, lengths])
        ratios = [
            torch.where((size > 0) & (length > 0), size / length, 1.0)
            for size, length in zip(sizes, lengths, strict=True)
        ]
        if ratios:
            torch._foreach_mul_(updates, ratios)

    def _make_norms_of_wholes(self, params: list[Tensor], norms: list[list[Tensor]]) -> None:
        """Replace the norms of slices by those of the whole parameters.

        Args:
            norms: lists of norms, one of each of ``params``.
        """
        slices = self._slices()
        if not slices:
            return
        device = accelerator_or_cpu()
        # Zeros where a slice has no norm: the sum has the same size on all tp_ranks.
        squares = torch.zeros((len(norms), len(slices)), dtype=torch.float64, device=device)
        column = {id(p): number for number, p in enumerate(slices)}
        at = [place for place, p in enumerate(params) if id(p) in column]
        columns = [column[id(params[place])] for place in at]
        if at:
            for row, each in zip(squares, norms, strict=True):
                own = torch.stack([each[place].to(device).double() for place in at])
                row[columns] = own.square()
        wholes = self._sum("tp", squares.view(-1)).view_as(squares).sqrt()
        for row, each in zip(wholes, norms, strict=True):
            for place, norm in zip(at, row[columns], strict=True):
                each[place] = norm.to(each[place])


class FusedNovoGrad(_MultiTensor):
    """NovoGrad: the second moment is one number for each tensor, the norm of its gradient.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as in AdamW.
        bias_correction: correct the moments for their start at zero.
        amsgrad: must be False.
        reg_inside_moment: normalise and decay before the first moment, as the paper
            does, instead of after.
        grad_averaging: weigh a new gradient with ``1 - beta1`` in the first moment.
        norm_type: 2, or 0 for the largest absolute value.
        init_zero: start the second moment at zero, not at the first gradient's norm.
        set_grad_none: the default of ``zero_grad``.

    Raises:
        ValueError: ``amsgrad=True``, or another ``norm_type``.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise ValueError(f"FusedNovoGrad: norm_type must be 0 or 2, got {norm_type!r}")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "reg_inside_moment": reg_inside_moment,
            "grad_averaging": grad_averaging,
            "norm_type": norm_type,
            "init_zero": init_zero,
        }
        super().__init__(params, defaults, set_grad_none)

    def _updates(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        beta1, beta2 = group["betas"]
        decay, step = group["weight_decay"], group["step"]
        share = 1 - beta1 if group["grad_averaging"] else 1.0
        correction1 = 1 - beta1**step if group["bias_correction"] else 1.0
        correction2 = (1 - beta2**step) ** 0.5 if group["bias_correction"] else 1.0
        first = self._moments(params, "exp_avg")
        weights = [wide(p) for p in params]

        below = torch._foreach_div(self._norms(group, params, grads), correction2)
        torch._foreach_add_(below, group["eps"])
        if group["reg_inside_moment"]:
            grads = list(torch._foreach_div(grads, below))
            torch._foreach_add_(grads, weights, alpha=decay)
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, grads, alpha=share)
        updates = torch._foreach_div(first, correction1)
        if not group["reg_inside_moment"]:
            torch._foreach_div_(updates, below)
            torch._foreach_add_(updates, weights, alpha=decay)
        return list(updates)

    def _norms(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """The running norm of each tensor's gradient, this one's blended in."""
        beta2 = group["betas"][1]
        largest = group["norm_type"] == 0
        now = torch._foreach_norm(grads, float("inf") if largest else 2)
        for p, norm in zip(params, now, strict=True):
            before = self.state[p].get("norm")
            if before is None:
                before = torch.zeros_like(norm) if group["init_zero"] else norm
            self.state[p]["norm"] = (
                beta2 * before + (1 - beta2) * norm
                if largest
                else (beta2 * before**2 + (1 - beta2) * norm**2).sqrt()
            )
        return [self.state[p]["norm"] for p in params]


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least float32."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def apply(params: list[Tensor], updates: Iterable[Tensor], lr: float) -> None:
    """``p -= lr * update``, in each parameter's dtype."""
    for p, update in zip(params, updates, strict=True):
        p.add_(update.to(p.dtype), alpha=-lr)


def norm_over_the_model(parameters: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all gradients of the model, a float64 scalar; over the MP_GROUP with smp.

    Gradients held by every rank of a TP_GROUP count once, on tp_rank 0; with sharded optimizer
    state those of each owner, over all ranks.
    """
    largest, total = math.isinf(norm_type), _own_power(parameters, norm_type)
    if state.is_initialized:
        job = state.job("smp.optimizers")
        kind = owners.group_with_each_element()
        if len(job.groups[kind]) > 1:
            caller = "smp: the norm of the model's gradients"
            refuse_if_forked(caller, job.boot.rank, job.pid)
            total = total.to(accelerator_or_cpu())
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(total, op, group=job.torch_groups.by_kind[kind])
    return total if largest else total.pow(1 / norm_type)


def _own_power(parameters: list[Tensor], norm_type: float) -> Tensor:
    """This rank's part of that norm, to the power of its type; of the maximum itself."""
    counts_here = not state.is_initialized or ranks.tp_rank() == 0
    grads = [
        gradient
        for p in parameters
        if (counts_here or slices_of(p) is not None)
        and (gradient := owners.own_gradient(p)) is not None
    ]
    total = torch.zeros((), dtype=torch.float64)  # the same dtype on every rank
    if grads:
        grads = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
        norms = torch._foreach_norm([wide(grad) for grad in grads], norm_type)
        each = torch.stack([norm.to(norms[0].device) for norm in norms]).double()
        total = each.max() if math.isinf(norm_type) else each.pow(norm_type).sum()
    return total


def _sum_over(kind: str, numbers: Tensor, has_failed: bool = False) -> Tensor:
    """The sums over a group of ranks, each of which may tell of a failure instead.

    Raises:
        RuntimeError: a rank has failed; the text names it.
    """
    if not state.is_initialized:
        return numbers
    job = state.job("smp.optimizers")
    members = job.groups[kind]
    if len(members) == 1:
        return numbers
    refuse_if_forked("smp.optimizers.FusedLAMB.step", job.boot.rank, job.pid)
    flags = numbers.new_zeros(len(members))
    flags[members.index(job.boot.rank)] = has_failed
    both = torch.cat([numbers, flags]).to(accelerator_or_cpu())
    dist.all_reduce(both, group=job.torch_groups.by_kind[kind])
    sums, flags = both.split([len(numbers), len(members)])
    if failed := [
        str(rank) for rank, flag in zip(members, flags.tolist(), strict=True) if flag
    ]:
        raise RuntimeError(
            f"smp: optimizer.step() failed on rank {', '.join(failed)}, with an exception told "
            "there; this rank has updated no parameter, and may go on or load a checkpoint"
        )
    return sums


def clip_by_the_models_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Scale the parameters' gradients, for at most this norm of the whole model's.

    Returns:
        the norm before; see `norm_over_the_model`.
    """
    with_grad = [p for p in parameters if gradient_of(p) is not None]
    norm = norm_over_the_model(with_grad, float(norm_type))
    dense, others = [], []
    for p in with_grad:
        averages = averages_of(p)
        if averages is not None:
            others.append(averages)
        elif p.grad is not None and p.grad.is_sparse:
            others.append(p.grad._values())
        else:
            dense.append(p)
    nn.utils.clip_grads_with_norm_(dense, float(max_norm), norm)
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)  # torch's
    for gradient in others:
        gradient.mul_(factor.to(gradient.device))
    return norm


def accelerator_or_cpu() -> torch.device:
    """The place of a collective's tensor: the GPU, or else the CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
