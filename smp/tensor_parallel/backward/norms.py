"""``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` of a model on several ranks.

Torch sees another norm on each rank: the ranks would scale their gradients differently, and
common parameters would drift apart.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from smp.modules import live_models
from smp.optimizers import clip_by_the_models_norm, norm_over_the_model
from smp.precision import loss_scale
from smp.pytorch import patches
from smp.sharding import owners
from smp.slicing.slices import is_of_split_model
from smp.state_mod import state


def take_the_models_norm_from_now() -> Callable[[], None]:
    """Have torch take the whole model's norm where the model is split or in a pipeline.

    All ranks of the MP_GROUP must call it then, a stage without parameters, too; with sharded
    optimizer state all ranks.
    ``clip_grads_with_norm_`` needs no change: it scales by the given norm.

    Returns:
        undoes it.
    """
    return live_models.change_from_now(patches.norms, _clipping, _norm)


def _clipping(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function inside ``clip_grad_norm_``."""

    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        some = [owners.model_parameter(one) for one in _listed(parameters)]
        loss_scale.unscale(some)
        of_models = shared_parameters()
        # A stage may have no parameters; it decides as the others do.
        if some and not any(id(p) in of_models for p in some) or not of_models:
            if all(p.grad is None for p in some):
                return torch.tensor(0.0)  # torch asks for the norm of no gradients
            return plain(some, max_norm, norm_type, error_if_nonfinite, foreach)
        norm = clip_by_the_models_norm(some, max_norm, norm_type)
        _check(norm, norm_type, error_if_nonfinite)
        return norm

    return clip_grad_norm_


def _norm(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function inside ``get_total_norm``."""

    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        some = _listed(tensors)
        loss_scale.unscale(some)
        of_models = shared_parameters()
        by_gradient = {id(p.grad): p for p in of_models.values() if p.grad is not None}
        found = [by_gradient[id(tensor)] for tensor in some if id(tensor) in by_gradient]
        if some and not found or not of_models:
            return plain(some, norm_type, error_if_nonfinite, foreach)
        if len(found) < len(some):
            raise ValueError(
                f"smp: get_total_norm got {len(found)} gradients of a model that several ranks "
                f"have, and {len(some) - len(found)} other tensors: which ranks have these is "
                "not known; call it with each of the two"
            )
        norm = norm_over_the_model(found, float(norm_type))
        _check(norm, norm_type, error_if_nonfinite)
        return norm

    return get_total_norm


def _listed(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def shared_parameters() -> dict[int, Tensor]:
    """By id, the parameters of models with a part on this rank."""
    rt = state.job("a function of torch's that takes gradients").runtime
    return {
        id(parameter): parameter
        for model in live_models.living()
        for parameter in model.parameters()
        if rt.pp_size > 1 or is_of_split_model(parameter) or owners.is_on()
    }


def _check(norm: Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise torch's error for a norm that is not finite, if asked for."""
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the total norm of order {norm_type} for the gradients of the model is "
            "non-finite, so it cannot be clipped"
        )
