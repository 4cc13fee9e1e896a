"""``DistributedOptimizer``: the user's optimizer, on the parameters of this rank."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from smp import memory, optimizer_trial, ranks
from smp.data_parallel import data_parallel, live_parameters
from smp.modules import live_models
from smp.optimizers import FusedLAMB, clip_by_the_models_norm
from smp.precision.loss_scale import LossScale, ScaledGradients
from smp.precision.masters import Masters, keeps_its_own
from smp.saving import optimizer_state
from smp.sharding import owners, rules
from smp.sharding.owners import model_parameter
from smp.sharding.sharded_optimizer import ShardedOptimizer
from smp.slicing.slices import slices_of, whole_shape
from smp.state_mod import state
from smp.tensor_parallel import group
from smp.tensor_parallel.splits import replaced_parameters

_OWN = {
    "optimizer", "step", "zero_grad", "overflow", "masters", "scaled", "sharded", "waiting",
}  # fmt: skip


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot act on a part of the parameters.

    Raises:
        NotImplementedError: the optimizer looks at all of them as one vector.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotImplementedError(
            "smp: torch.optim.LBFGS takes all parameters as one vector, and with pipeline "
            "parallelism no rank has all of them; use an optimizer that updates each by itself"
        )


# By class name, in small letters: optimizers with norms of each parameter, or of its rows and
# columns.
_BY_TENSOR = {
    "adafactor", "cpulamb", "fusedlamb", "fusednovograd", "lamb", "larc", "lars", "muon",
    "novograd", "nvnovograd", "onebitlamb", "shampoo", "soap",
}  # fmt: skip


def _refuse_norms_of_slices(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]
) -> None:
    """Refuse an optimizer that looks at a whole tensor, where a rank has a slice of it.

    Args:
        groups: of its parameters.

    Raises:
        NotImplementedError: the optimizer takes norms, or rows and columns, of each parameter,
            or has made other steps with slices than with the whole.
    """
    if group.size() == 1:
        return  # a slice is the whole
    with_slices = (
        (p, members)
        for members in groups
        for p in members["params"]
        if slices_of(p) is not None
    )
    cut, members = next(with_slices, (None, {}))
    if cut is None or type(optimizer) is FusedLAMB:  # with norms of the whole
        return
    if {cls.__name__.lower() for cls in type(optimizer).__mro__} & _BY_TENSOR:
        why = "scales each parameter by norms of the whole of it"
    elif optimizer_trial.differs_on_slices(optimizer, members):
        why = "has updated slices of a small parameter otherwise than the whole"
    else:
        return
    raise NotImplementedError(
        f"smp: {type(optimizer).__name__} {why}, "
        f"and with tensor parallelism this rank has a slice of {_name_of(cut)}, "
        f"{list(cut.shape)} of {whole_shape(cut)}: use an optimizer that updates each element "
        "by itself, as torch.optim.AdamW does, or smp.optimizers.FusedLAMB, or that one for "
        "whole parameters alone"
    )


def _cut_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut state from before the cut of the parameters, as these are cut.

    The values are tp_rank 0's, as those of the parameters are.  Collective over the TP_GROUP if
    this rank has slices.
    """
    for members in optimizer.param_groups:
        for parameter in members["params"]:
            slices = slices_of(parameter)
            if slices is None or parameter not in optimizer.state:
                continue
            whole = whole_shape(parameter)
            kept = optimizer.state[parameter]
            for name, value in kept.items():
                if isinstance(value, torch.Tensor) and list(value.shape) == whole:
                    kept[name] = group.own_slice(slices, value)


def _sharded(optimizer: torch.optim.Optimizer) -> ShardedOptimizer | None:
    """The share of this rank, where the job shares out optimizer state.

    Raises:
        NotImplementedError: the optimizer looks at several parameters at once.
    """
    if not state.is_initialized:
        return None
    if not owners.is_on():
        if not state.cfg.shard_optimizer_state:
            return None
        warnings.warn(
            "smp: shard_optimizer_state=True has no effect: rdp_size is 1, so no two ranks "
            f"hold the same parameter ({ranks.size()} ranks, pipeline_parallel_degree="
            f"{ranks.pp_size()}, tensor_parallel_degree={ranks.tp_size()})",
            stacklevel=3,
        )
        return None
    if keeps_its_own(optimizer):
        warnings.warn(
            f"smp: {owners.asked_for()} has no effect on {type(optimizer).__name__}, "
            "which has master weights of its own: each replica keeps all of its state; use "
            "bf16 or fp16 with a plain optimizer to share it out",
            stacklevel=3,
        )
        return None
    rules.refuse(optimizer)
    return ShardedOptimizer(optimizer)


def _name_of(parameter: torch.Tensor) -> str:
    for model in live_models.of_job("smp.DistributedOptimizer"):
        for name, one in model.named_parameters():
            if one is model_parameter(parameter):
                return f"'{name}'"
    return "a parameter"


def _refusing_released() -> AbstractContextManager[None]:
    """A block in which the optimizer's hooks may ask for any parameter of a model."""
    if owners.shards_parameters():
        return nullcontext()
    return torch._C.DisableTorchFunctionSubclass()


class _FirstFailure:
    """Blocks whose exceptions wait; the first one is kept."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer; attributes unknown here are the optimizer's own.

    Parameters of other ranks never get a gradient here, so the wrapped optimizer acts on
    the local ones, and keeps state for these alone.

    Args:
        optimizer: any ``torch.optim.Optimizer``, made before or after the model was wrapped;
            after, if distributed modules replace some of the model's.
        static_loss_scale: the factor of the loss with ``fp16``; None: 1.
        dynamic_loss_scale: with ``fp16`` the factor follows the overflows instead.
        dynamic_loss_args: ``init_scale`` (2**32), ``scale_factor`` (2), ``scale_window``
            (1000), ``min_scale`` (1), ``delayed_shift`` (1) and ``consecutive_hysteresis``
            (False) of a dynamic one.

    Attributes:
        optimizer: the wrapped one.
        overflow: whether the last step was skipped (``fp16`` only).
        masters: the float32 weights of half parameters, in their places in the wrapped
            optimizer's groups.
        sharded: with ``shard_optimizer_state``, this rank's share of the updates.

    Raises:
        ValueError: a scale that is not above 0, or an unknown name in ``dynamic_loss_args``.
        NotImplementedError: LBFGS in a pipeline; or an optimizer with norms of whole
            parameters, or with another update of slices, where this rank has slices.  Or one
            with a look at several parameters at once, with ``shard_optimizer_state``.
    """

    optimizer: Any
    masters: Masters
    scaled: ScaledGradients | None  # with a loss scale of ours
    sharded: ShardedOptimizer | None
    waiting: optimizer_state.Waiting | None = None  # a state, for the partition

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        static_loss_scale: float | None = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict | None = None,
    ):
        if state.is_initialized and ranks.pp_size() > 1:
            _refuse(optimizer)
        _refuse_norms_of_slices(optimizer, optimizer.param_groups)
        replaced_parameters.refuse(optimizer.param_groups)
        _cut_state(optimizer)
        # Not super().__init__(): the groups and the state are the wrapped optimizer's.
        self.__dict__["optimizer"] = optimizer
        self.__dict__["overflow"] = False
        self.__dict__["masters"] = Masters(optimizer)
        scale = LossScale(static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        scaled = None
        if state.is_initialized and state.cfg.fp16 and not keeps_its_own(optimizer):
            scaled = ScaledGradients(scale, optimizer)
        self.__dict__["scaled"] = scaled
        self.__dict__["sharded"] = _sharded(optimizer)
        state.optimizer = self

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            self.__dict__[name] = value
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN:
            del self.__dict__[name]
        else:
            delattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    def step(self, closure: Any = None) -> Any:
        """Update the local parameters.

        With ``fp16`` collective over all ranks: an overflow on one of them skips the update
        on all.  With ``shard_optimizer_state`` collective over the RDP_GROUP, and an exception
        on one rank of it raises on all.

        Args:
            closure: given to the wrapped optimizer, if there is one.

        Returns:
            the wrapped optimizer's result.

        Raises:
            NotImplementedError: a closure, or several DistributedOptimizers, with ``fp16``; a
                closure with ``shard_optimizer_state``.
            RuntimeError: with a loss scale, gradients of ``loss.backward()``.  With
                ``shard_optimizer_state``, an exception on another replica; the text has both.
        """
        try:
            return self._step(closure)
        except Exception as error:
            if state.is_initialized:
                memory.tell_if_out_of_memory(error)
            raise

    def _step(self, closure: Any) -> Any:
        if closure is not None and self.scaled is not None:
            raise NotImplementedError(
                "smp: optimizer.step(closure) with fp16: an overflow is known after all "
                "backwards alone; call backward before step(), or use bf16"
            )
        if self.sharded is not None:
            if closure is not None:
                raise NotImplementedError(
                    f"smp: optimizer.step(closure) with {owners.asked_for()}: gradients "
                    "that a closure makes are not with their owners alone; call backward "
                    "before step()"
                )
            return self._step_of_share(self.sharded)
        self.masters.make()
        if self._overflows():
            return None
        self.masters.follow()
        if closure is not None:
            result = self.optimizer.step(self.masters.closure(closure))
        else:
            # Slices are as fast as plain tensors.
            with torch._C.DisableTorchFunctionSubclass(), self._failing_together():
                result = self.optimizer.step()
        self.masters.give()
        return result

    def _step_of_share(self, sharded: ShardedOptimizer) -> Any:
        """Update this rank's share.  An exception of one replica's ends the step of all."""
        failure = _FirstFailure()
        with failure:
            data_parallel.assign_owners()
            sharded.take_share()
            self.masters.make()
        with failure:  # alike on all replicas
            live_parameters.release_for_update(sharded.has)
        if self._overflows():  # collective, also after a failure
            sharded.end_step(failure.error)
            return None
        if owners.shards_parameters() and state.cfg.sdp_gradient_clipping > 0:
            with failure:
                self._clip_whole_models(state.cfg.sdp_gradient_clipping)
        result = None
        with failure, self._failing_together():
            if failure.error is not None:
                raise failure.error
            self.masters.follow()
            with _refusing_released(), sharded.others_hidden():
                result = self.optimizer.step()
        with failure:
            self.masters.give()
        sharded.end_step(failure.error)
        return result

    def _clip_whole_models(self, max_norm: float) -> None:
        """Clip by the norm over the models with parameters of this optimizer.

        Another optimizer may have the rest of a model, whose gradients are clipped, too.
        """
        members = [p for group in self.param_groups for p in group["params"]]
        own = {id(model_parameter(p)) for p in members}
        for model in live_models.living():
            here = list(model.local_parameters())
            if any(id(p) in own for p in here):
                members += [p for p in here if id(p) not in own]
        clip_by_the_models_norm(members, max_norm, 2.0)

    def _overflows(self) -> bool:
        """Whether the update is skipped; collective over all ranks with a loss scale."""
        if self.scaled is None:
            return False
        self.__dict__["overflow"] = overflow = self.scaled.overflows()
        self.scaled.scale.update(overflow)
        self.scaled.used()
        return overflow

    def _failing_together(self) -> AbstractContextManager[None]:
        """A block around the wrapped optimizer's step, which may have collectives."""
        optimizer = self.optimizer
        return optimizer.failing_together() if type(optimizer) is FusedLAMB else nullcontext()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters.

        Args:
            set_to_none: have no gradients, rather than zeros.
        """
        self.optimizer.zero_grad(set_to_none=set_to_none)
        if self.sharded is not None:
            self.sharded.zero_rest()
        if self.scaled is not None:
            self.scaled.forget()

    @property
    def loss_scale(self) -> float:
        """The factor of the loss: with ``fp16`` ours, else the wrapped optimizer's, or 1."""
        if self.scaled is not None:
            return self.scaled.scale.value
        return getattr(self.optimizer, "loss_scale", 1.0)

    @property
    def redefined_params(self) -> bool:
        """Whether its parameters are others than the module's: master weights, or slices.

        ``model.virtual_named_parameters()`` has both's names.
        """
        has_slices = self.sharded is not None and self.sharded.has_slices
        return has_slices or bool(self.masters.by_number())

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> Any:
        """Clip the gradients of the update, by the norm over the whole model.

        An optimizer with master weights of its own clips these.  Else the call is collective
        over the MP_GROUP, with ``fp16`` or ``shard_optimizer_state`` over all ranks.

        Args:
            max_norm: of all gradients of the model together.
            norm_type: the p of the p-norm, above 0; ``float("inf")`` for the largest value.

        Returns:
            the norm before, a scalar.
        """
        if hasattr(self.optimizer, "clip_master_grads"):
            return self.optimizer.clip_master_grads(max_norm, norm_type)
        if self.scaled is not None:
            self.scaled.overflows()
        parameters = [p for group in self.param_groups for p in group["params"]]
        return clip_by_the_models_norm(parameters, max_norm, norm_type)

    def add_param_group(self, param_group: dict) -> None:
        """Add a group to the wrapped optimizer.

        Args:
            param_group: ``"params"`` and the group's options, as in torch.

        Raises:
            NotImplementedError: as when it was made.
            ValueError: a parameter has a group already.
        """
        given = param_group["params"]
        if not isinstance(given, torch.Tensor):
            param_group["params"] = given = list(given)  # perhaps a generator
        self.masters.refuse_second([given] if isinstance(given, torch.Tensor) else given)
        self.optimizer.add_param_group(param_group)
        try:
            _refuse_norms_of_slices(self.optimizer, self.optimizer.param_groups[-1:])
            replaced_parameters.refuse(self.optimizer.param_groups[-1:])
        except (NotImplementedError, ValueError):
            self.optimizer.param_groups.pop()
            raise

    def state_dict(self) -> dict:
        """The whole state; it loads into the plain optimizer of the plain model.

        Also where distributed modules have taken the place of its modules.  Collective over the
        MP_GROUP after the partition, with ``shard_optimizer_state`` over all ranks.  Before the
        partition it is so after the load of a partial state.

        Raises:
            NotImplementedError: one parameter of the plain model is in different groups here.
        """
        return optimizer_state.full_state_dict(self)

    def local_state_dict(self, gather_if_shard: bool = True) -> dict:
        """The state of this rank's parameters; its key ``_smp_is_partial`` is True.

        Args:
            gather_if_shard: with ``shard_optimizer_state``, whether the state of all owners
                is gathered.  Collective over the RDP_GROUP; False: this rank's shard, for the
                same rank of as many replicas.
        """
        return optimizer_state.local_state_dict(self, gather_if_shard)

    def save_optimizer_backcompat(self, gather_if_shard: bool = True) -> dict:
        """The result of `local_state_dict`; an older name of the original.

        Args:
            gather_if_shard: as there.
        """
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict: dict) -> None:
        """Call `load_state_dict`; an older name of the original.

        Args:
            state_dict: as there.
        """
        self.load_state_dict(state_dict)

    def orig_state_dict(self) -> dict:
        """The wrapped optimizer's own state dict, of this rank alone."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a full dict, or a partial one on every rank of the MP_GROUP.

        Before the partition the groups are loaded at once and the state waits for it; until
        then `state_dict` and `local_state_dict` return it.

        Args:
            state_dict: that of any plain optimizer of the plain model, or this rank's of
                `local_state_dict`; partial where its key ``_smp_is_partial`` is True.  A
                shard's load is collective over all ranks.

        Raises:
            ValueError: groups of other sizes, or slices of another tp_rank or
                tensor_parallel_degree, or shards of another number of replicas.
        """
        optimizer_state.load(self, state_dict)
