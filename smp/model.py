"""``DistributedModel``: the user's module, partitioned over the PP_GROUP."""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from smp import _core, ranks
from smp.checkpointing import activation_checkpointing
from smp.compat.counterparts import counterparts, shapes_of
from smp.data_parallel import live_parameters
from smp.data_parallel.data_parallel import DataParallel
from smp.data_parallel.live_parameters import LiveParameters
from smp.modules import (
    conversion,
    delayed_init,
    device_placement,
    inner_module,
    late_modules,
    live_models,
)
from smp.modules.live_models import ModelRecord, TraceOptions
from smp.optimizers import clip_by_the_models_norm
from smp.partitioning.partition import make_partition
from smp.partitioning.report import PartitionReport
from smp.precision import conversion as half_precision
from smp.precision import loss_scale
from smp.pytorch.compiled_code import not_traced
from smp.runtime import (
    backward,
    collective_chain,
    core_tables,
    half_calls,
    microbatches,
    sync_batch_norm,
)
from smp.saving import state_dicts
from smp.sharding import owners
from smp.sharding.owners import model_parameter
from smp.slicing import parameter_marks
from smp.slicing.slices import (
    is_of_split_model,
    is_scaled_batch,
    mark_model,
    slices_of,
    whole_shape,
)
from smp.state_mod import state
from smp.tensor_parallel import group
from smp.tensor_parallel.backward import gradients, step_end
from smp.tensor_parallel.rows import random_streams
from smp.tensor_parallel.script_uses import gathers_of
from smp.tensor_parallel.splits import in_place, marking, replaced_parameters


class DistributedModel(live_models.LiveModel):
    """Wraps a module, to run its parts on the ranks of the PP_GROUP.

    It shares the module's parameters, buffers and children, so names are those of the
    wrapped module.  The partition is made in the first step.

    The names of the wrapper's own attributes begin with ``_smp_``: an attribute of the wrapped
    module may have any other name.

    Args:
        module: the model; all ranks build the same one.
        trace_device: ``"gpu"`` (the CPU where there is none) or ``"cpu"``: the device of the
            model's run before the decision on the partition.
        trace_execution_times: measure the modules' times in a second such run;
            ``memory_weight`` then weighs memory against these times.
        trace_memory_usage: measure the memory kept by autograd for each module: the memory of
            its activations, shown in the partition report.
        overlapping_allreduce: average gradients over the replicas while backward still runs.
        backward_passes_per_step: only each so many-th step is followed by the average, of the
            sum of their gradients.
        average_grads_across_microbatches: a microbatch counts by its share of the samples;
            False: its gradients are added as they are.
        bucket_cap_mb: MiB of gradients in one message between the replicas.
        broadcast_buffers: a step begins with the buffers of dp_rank 0.
        gradient_as_bucket_view: ``.grad`` is part of a message's memory, so there is no copy of
            gradients; they are then averaged after backward.
        find_unused_parameters: no effect: unused parameters are always found.

    Raises:
        TypeError: the module is none, or is wrapped already.
        ValueError: a number or ``trace_device`` is out of range.
        ReplicasDiffer: the replicas' models differ (with pipeline degree 1; else the first step
            says so).
    """

    _smp_module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        trace_memory_usage: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"smp.DistributedModel wraps a torch.nn.Module, not a {type(module).__name__}"
            )
        if isinstance(module, DistributedModel):
            raise TypeError(
                "smp.DistributedModel: the module is a DistributedModel already; wrap it once"
            )
        if trace_device not in ("cpu", "gpu"):
            raise ValueError(
                f"smp.DistributedModel: trace_device={trace_device!r}: must be 'cpu' or 'gpu'"
            )
        super().__init__()
        module = inner_module.wrapped_of(module)
        self._smp_wrap(module)
        rt = state.job("smp.DistributedModel").runtime
        trace = TraceOptions(trace_device, trace_execution_times, trace_memory_usage)
        record = self._smp_record = ModelRecord(rt, trace)
        self._smp_average_grads = average_grads_across_microbatches
        state.model = self
        live_models.add(self)
        record.half = half_precision.dtype_of_models(rt.cfg)
        half_precision.convert(module, rt.cfg)
        if rt.home is None and rt.cfg.device == "auto":
            rt.home = device_placement.home_of(module, rt.boot.local_rank)
        if rt.pp_size == 1:
            delayed_init.materialize(module, lambda name: True, lambda path: True)
            if rt.home is not None:
                device_placement.move(module, rt.home)
        # The outcomes of tensor parallelism's splits of modules.
        self._smp_split: list[in_place.Outcome] = []
        if group.size() > 1 or marking.is_marked(module):
            self._smp_split_over_the_tp_group()
        if rt.pp_size == 1:
            half_precision.accumulate_in_float32(self, rt.cfg)
        record.has_sync_norm = sync_batch_norm.is_in(module)
        if ranks.dp_size() > 1:
            record.replicas = DataParallel(
                self,
                overlapping_allreduce=overlapping_allreduce,
                backward_passes_per_step=backward_passes_per_step,
                bucket_cap_mb=bucket_cap_mb,
                broadcast_buffers=broadcast_buffers,
                gradient_as_bucket_view=gradient_as_bucket_view,
            )
            if rt.pp_size == 1:
                record.replicas.broadcast()
        if owners.shards_parameters():
            record.live_parameters = LiveParameters(self)

    def _smp_wrap(self, module: nn.Module) -> None:
        inner_module.give(module)
        self.__dict__["_smp_module"] = module
        # The same dicts: names, iteration, train() and zero_grad() are the module's own.
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = module.__dict__[shared]
        self.training = module.training

    def _smp_split_over_the_tp_group(self) -> None:
        plain = shapes_of(self._smp_module)
        module, self._smp_split = activation_checkpointing.split_in_place(self._smp_module)
        self._smp_record.split_paths = tuple(o.path for o in self._smp_split if not o.reason)
        self._smp_record.counterparts = counterparts(module, plain)
        if state.optimizer is not None:
            replaced_parameters.refuse(state.optimizer.param_groups)
        if module is not self._smp_module:
            self._smp_wrap(module)
        if group.size() == 1:
            return  # the modules in others' places have all of each parameter
        if not self._smp_split and not any(map(slices_of, self._smp_module.parameters())):
            warnings.warn(
                f"smp: tensor_parallel_degree is {group.size()} and no module of the model is "
                "marked, so that nothing is split: make it in smp.tensor_parallelism(), or "
                "mark modules by smp.set_tensor_parallelism",
                stacklevel=4,
            )
        mark_model(self._smp_module)
        parameter_marks.keep_from_now(self._smp_module)
        late_modules.refuse_from_now(self._smp_module, is_split=True)
        gradients.scale(self._smp_module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_smp_"):
                raise
        try:
            return getattr(self._smp_module, name)
        except AttributeError as error:
            kind = type(self._smp_module).__name__
            if str(error) != f"'{kind}' object has no attribute '{name}'":
                raise
        raise AttributeError(
            f"neither smp.DistributedModel nor its module, of type {kind}, has {name!r}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the wrapped module, of the user's class: values, as averaging wants them.

        Raises:
            RuntimeError: parts of the model are on other ranks.
            TypeError: parts of the model are split over the TP_GROUP.
        """
        with self.gathered_parameters():
            return copy.deepcopy(self._smp_module, memo)

    @property
    def module(self) -> nn.Module:
        """The wrapped module; ``model.module.module`` stands for it, too."""
        return self._smp_module

    @property
    def partitioned(self) -> bool:
        """Whether the partition has been made."""
        return self._smp_record.parts is not None

    @not_traced("a model that smp distributes", and_all_below=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; with pipeline parallelism only inside a step."""
        rt, replicas = self._smp_record.rt, self._smp_record.replicas
        if rt.pp_size > 1 and not rt.step.is_traced and _core.current() is None:
            raise RuntimeError(
                "smp: the model was called outside a step: with pipeline_parallel_degree "
                f"{rt.pp_size} call it inside a function with @smp.step"
            )
        if replicas is not None and rt.pp_size == 1 and not rt.step.is_under_way:
            replicas.assign_owners()
            if torch.is_grad_enabled():
                replicas.end_what_a_backward_left()
            with (
                live_parameters.in_use([self]),
                step_end.together(live_parameters.group_of_call([self])),
            ):
                return replicas.forward_outside_step(lambda: self._smp_call(*args, **kwargs))
        return self._smp_call(*args, **kwargs)

    @not_traced("a model that smp distributes", and_all_below=False)
    def _smp_call(self, *args: Any, **kwargs: Any) -> Any:
        half = self._smp_record.half
        if half is None:
            return self._smp_run(*args, **kwargs)
        return half_calls.call(self, half, self._smp_run, args, kwargs)

    @not_traced("a model that smp distributes", and_all_below=False)
    def _smp_run(self, *args: Any, **kwargs: Any) -> Any:
        rt = self._smp_record.rt
        if rt.pp_size > 1:
            _core.given(args, kwargs)
        if group.size() == 1 or rt.step.is_traced:
            return self._smp_module(*args, **kwargs)
        some = next(self._smp_module.parameters(), None)
        if not rt.step.is_under_way and some is not None and is_of_split_model(some):
            random_streams.share()
        with collective_chain.opened():
            out = self._smp_module(*args, **kwargs)
            return microbatches.map_tensors(
                out, partial(collective_chain.hang, behind=collective_chain.tokens())
            )

    @not_traced("the backward of a model that smp distributes")
    def backward(self, tensors: Tensor | tuple[Tensor, ...], grad_tensors: Any = None) -> None:
        """Run the backward of this microbatch, in place of ``loss.backward()``.

        Args:
            tensors: the loss (a scalar), or tensors of any shape with ``grad_tensors``.
            grad_tensors: their gradients; None for scalars.

        Raises:
            RuntimeError: outside a step, with pipeline parallelism.
        """
        record = self._smp_record
        is_scaled = record.half is torch.float16
        backward.run(record.rt, tensors, grad_tensors, self._smp_average_grads, is_scaled)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if (live := self._smp_record.live_parameters) is not None:
            live.dissolve()
        if not self.partitioned:
            super()._apply(fn, recurse)
            rt = self._smp_record.rt
            if rt.pp_size == 1:
                half_precision.accumulate_in_float32(self, rt.cfg)
            return self
        conversion.convert(self._smp_module, fn, set(self.local_modules()))
        core_tables.install_gradients(self._smp_record.rt, live_models.partitioned())
        return self

    # ---------------------------------------------------------------- data parallelism

    def no_sync(self) -> AbstractContextManager[None]:
        """Steps in the block do not exchange gradients with the other replicas.

        They add up in ``.grad``; the next step outside the block averages the sums.
        """
        replicas = self._smp_record.replicas
        return nullcontext() if replicas is None else replicas.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Replicas may have different numbers of batches in the block.

        A replica that leaves the block keeps the others company until all have left.  Then it
        gets the parameters and buffers of one with inputs to the end.  Without a step, one
        forward goes with one backward.

        Args:
            divide_by_initial_world_size: averages are over all replicas, not only those with
                inputs left.
            enable: False: the block does nothing.
            throw_on_early_termination: raise on every rank when one leaves the block
                before the others.

        Raises:
            NotImplementedError: there are several DistributedModels.
        """
        replicas = self._smp_record.replicas
        if replicas is None or not enable:
            return nullcontext()
        return replicas.join(divide_by_initial_world_size, throw_on_early_termination)

    def register_comm_hook(self, state: Any, callable: Callable) -> None:
        """Have ``callable(state, bucket)`` exchange gradients, in place of the sum.

        Args:
            state: given to each call.
            callable: gets a bucket like ``torch.distributed.GradBucket`` and returns a future
                of the averaged buffer (it divides by itself).  An exception on one replica
                fails the step on all ranks of its DP_GROUP, if the others' hooks wait for a sum
                of their buffers.  Other collectives are not completed.

        Raises:
            RuntimeError: a hook is registered already.
        """
        if self._smp_record.replicas is not None:
            self._smp_record.replicas.register_comm_hook(state, callable)

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """The parameters have all their values in the block, and may be changed there.

        Without ``sharded_data_parallel_degree`` they have them anyway.  Collective over the
        RDP_GROUP: all of its ranks enter the block, and make the same changes.
        """
        live = self._smp_record.live_parameters
        if live is None:
            yield
            return
        live.gather_all()
        try:
            yield
        finally:
            live.keep_within_limit()

    def get_module(self) -> nn.Module:
        """The wrapped module itself."""
        return self._smp_module

    def get_submodule(self, target: str) -> nn.Module:
        """The wrapped module's, as `get_parameter`, `get_buffer`: names there are its own.

        Args:
            target: its path, as in ``named_modules()`` of the wrapped module.

        Raises:
            AttributeError: no such module.
        """
        return self._smp_module.get_submodule(target)

    def get_parameter(self, target: str) -> nn.Parameter:
        """The wrapped module's parameter of that name.

        Args:
            target: its name, as in ``named_parameters()`` of the wrapped module.

        Raises:
            AttributeError: no such parameter.
        """
        return self._smp_module.get_parameter(target)

    def get_buffer(self, target: str) -> Tensor:
        """The wrapped module's buffer of that name.

        Args:
            target: its name, as in ``named_buffers()`` of the wrapped module.

        Raises:
            AttributeError: no such buffer.
        """
        return self._smp_module.get_buffer(target)

    def train(self, mode: bool = True) -> "DistributedModel":
        """Set training mode on the model and the wrapped module; returns self.

        Args:
            mode: False: evaluation mode.
        """
        self._smp_module.train(mode)
        self.training = mode
        return self

    def eval(self) -> "DistributedModel":
        """Set evaluation mode; returns self."""
        return self.train(False)

    # ------------------------------------------------------------------ the partition

    def register_post_partition_hook(self, hook: Callable) -> RemovableHandle:
        """Register ``hook(model, optimizer)``, called once, right after the partition."""
        self._smp_record.rt.hooks_wait = True
        return self._smp_record.post_partition_hooks.register(hook)

    def register_post_step_hook(self, hook: Callable) -> RemovableHandle:
        """Register ``hook(model, optimizer)``, called once, after the first step that ends."""
        self._smp_record.rt.hooks_wait = True
        return self._smp_record.post_step_hooks.register(hook)

    def partition_report(self) -> PartitionReport:
        """The partition as text, by rank, and as a picture; and the parts split over ranks.

        Raises:
            RuntimeError: before the first step: it makes the partition of a pipeline.
        """
        record = self._smp_record
        if record.parts is not None:
            decision: Any = record.parts.partition
        elif record.rt.pp_size == 1:
            decision = make_partition(self._smp_module, None, degree=1, memory_weight=0.8)
        else:
            raise RuntimeError(
                "smp: the model is partitioned in its first step, not before; use smp.plan to "
                "look ahead"
            )
        return PartitionReport(
            decision,
            self._smp_split,
            gathers_of(self._smp_module),
            core_tables.chains_of(self),
        )

    def state_dict(  # type: ignore[override]
        self, gather_to_rank0: bool = False, cast_to_cpu: bool = True
    ) -> "OrderedDict[str, Any]":
        """The whole model's state dict, with the names of the wrapped module.

        Collective over the MP_GROUP after the partition: one replica may call it alone.

        Args:
            gather_to_rank0: only mp_rank 0 gets it; the others get an empty dict.
            cast_to_cpu: all tensors in host memory.
        """
        return state_dicts.full_state_dict(self, gather_to_rank0, cast_to_cpu)

    def local_state_dict(self) -> "OrderedDict[str, Any]":
        """This rank's own entries; the key ``_smp_is_partial`` is True."""
        return state_dicts.local_state_dict(self)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
        translate_function: Callable | None = None,
    ) -> Any:
        """Load a full dict, or a partial one on every rank of the MP_GROUP.

        Before the partition every rank gets everything.  The values of delayed parameters
        wait for it; their keys and shapes are checked at once.

        Args:
            state_dict: partial where its key ``_smp_is_partial`` is True.
            same_partition_load: each rank's partial dict has just its own entries of now;
                otherwise entries go to their ranks of now.  Before the partition the two are
                alike.
            translate_function: from the given dict to one with the module's names.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, as torch does.

        Raises:
            RuntimeError: a missing or unexpected key, when ``strict``; another shape.
        """
        return state_dicts.load(
            self, state_dict, strict, same_partition_load, translate_function
        )

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters owned by this rank, with their names; tied ones once.

        Raises:
            RuntimeError: one has been added after the partition.
        """
        parts, pp_rank = self._smp_record.parts, self._smp_record.rt.pp_rank
        for name, parameter in self._smp_module.named_parameters():
            if parts is not None and name not in parts.owners:
                late_modules.refuse_parameter(name, parameter)
            if parts is None or parts.owners[name] == pp_rank:
                yield name, parameter

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters owned by this rank."""
        for _, parameter in self.local_named_parameters():
            yield parameter

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale this rank's gradients, for at most this norm of the whole model's.

        ``torch.nn.utils.clip_grad_norm_`` does the same for the parameters of one rank.
        Collective over the MP_GROUP.

        Args:
            max_norm: of all gradients of the model together.
            norm_type: the p of the p-norm, above 0; ``float("inf")`` for the largest value.

        Returns:
            the norm before, a float64 scalar, the same on every rank.
        """
        local = list(self.local_parameters())
        loss_scale.unscale(local)
        return clip_by_the_models_norm(local, max_norm, norm_type)

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules that run on this rank, with their paths."""
        parts, pp_rank = self._smp_record.parts, self._smp_record.rt.pp_rank
        for path, module in self._smp_module.named_modules():
            # A later module has no rank; it has no parameters either.
            if parts is None or parts.partition.rank_of.get(path) == pp_rank:
                yield path, module

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules that run on this rank."""
        for _, module in self.local_named_modules():
            yield module

    def local_named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of this rank's modules, with their names."""
        for path, module in self.local_named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (f"{path}.{name}" if path else name), buffer

    def local_buffers(self) -> Iterator[Tensor]:
        """The buffers of this rank's modules."""
        for _, buffer in self.local_named_buffers():
            yield buffer

    def get_module_partition(self, module: str | nn.Module) -> int:
        """The pp_rank of a module, by path or by the module itself.

        Args:
            module: its path, as in ``named_modules()`` of the wrapped module; or itself.

        Raises:
            KeyError: the model has no such module.
            RuntimeError: before the partition.
        """
        parts = self._smp_record.parts
        if parts is None:
            raise RuntimeError("smp: the model is partitioned in its first step, not before")
        wanted = module if isinstance(module, str) else inner_module.users_module(module)
        for path, candidate in self._smp_module.named_modules():
            if path == wanted or candidate is wanted:
                return parts.partition.rank_of[path]
        raise KeyError(f"smp: the model has no module {module!r}")

    def virtual_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters as the optimizer has them, with their names.

        They are the module's own, as long as `DistributedOptimizer.redefined_params` is False.
        """
        groups = [] if state.optimizer is None else state.optimizer.param_groups
        by_id = {id(model_parameter(p)): p for group in groups for p in group["params"]}
        for name, parameter in self.named_parameters():
            yield name, by_id.get(id(parameter), parameter)

    # -------------------------------------------------------------- tensor parallelism

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules of this rank with slices of parameters of their own."""
        for module in self.local_modules():
            if any(slices_of(p) is not None for p in module.parameters(recurse=False)):
                yield module

    def is_distributed_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether the ranks of the TP_GROUP have different parts of the parameter.

        Args:
            parameter: one of the model's.
        """
        return slices_of(parameter) is not None

    def is_distributed_buffer(self, buffer: Tensor) -> bool:
        """Whether the ranks of the TP_GROUP have different parts of the buffer.

        Args:
            buffer: one of the model's.
        """
        return slices_of(buffer) is not None

    def is_scaled_batch_parameter(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient is of the whole TP_GROUP's batch.

        Args:
            parameter: one of the model's.
        """
        return is_scaled_batch(parameter)

    def is_scaled_batch_buffer(self, buffer: Tensor) -> bool:
        """Whether the buffer is made of the whole TP_GROUP's batch.

        Args:
            buffer: one of the model's.
        """
        return is_scaled_batch(buffer)

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with gradients averaged over the DP_GROUP."""
        for name, parameter in self.named_parameters():
            if not is_scaled_batch(parameter):
                yield name, parameter

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters with gradients averaged over the RDP_GROUP."""
        for name, parameter in self.named_parameters():
            if is_scaled_batch(parameter):
                yield name, parameter

    def num_parameters(self) -> int:
        """Number of elements of all parameters, tied ones once and split ones whole."""
        return sum(_whole_size(p) for p in self._smp_module.parameters())


def _whole_size(parameter: nn.Parameter) -> int:
    return prod(whole_shape(parameter))


def clip_grad_norm_(model: DistributedModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """The same as ``model.clip_grad_norm_(max_norm, norm_type)``."""
    return model.clip_grad_norm_(max_norm, norm_type)
