"""The differences between the supported versions of PyTorch, and the private names used.

The oldest version stands in ``pyproject.toml``, too.  Each function here names the oldest
version that makes it superfluous.  ``PRIVATE`` has the names used by smp without a promise of
PyTorch's.  ``tests/test_torch_versions.py`` looks every name up, so a new version's differences
show by name.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint

OLDEST = (2, 10)


def refuse_older(version: str) -> None:
    """Refuse an older version of PyTorch, before any use of its missing parts.

    Args:
        version: ``torch.__version__``.

    Raises:
        ImportError: PyTorch is older than `OLDEST`.
    """
    major, minor = version.split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(
            f"smp needs PyTorch {wanted} or newer, and this is {version}: "
            f"pip install 'torch>={wanted}'"
        )


refuse_older(torch.__version__)

# torch.distributed's collectives of one tensor for all ranks.  Without the older names when
# 2.13 is the oldest version.
all_gather_single: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)

NAMES_BEFORE_2_13 = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def operation_of(group: dist.ProcessGroup, name: str) -> Callable[..., Any]:
    """A group's operation by its name in PyTorch 2.13.

    Superfluous when 2.13 is the oldest version.
    """
    if name in NAMES_BEFORE_2_13 and not hasattr(group, name):
        name = NAMES_BEFORE_2_13[name]
    return getattr(group, name)


def is_made(group: dist.ProcessGroup) -> bool:
    """Whether ``torch.distributed`` has made a group and knows it.

    Needed from 2.15 on: torch attaches a recorder to a group in the making for any device.  The
    recorder fails for a group like smddp's, without a backend in C++.
    """
    return group in dist.distributed_c10d._world.pg_map


# The begin of a checkpoint without re-entrance.  With "_impl" alone when 2.14 is the oldest
# version.
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{CHECKPOINT_GENERATOR}_impl"):
    CHECKPOINT_GENERATOR += "_impl"

# Whether a profile shows an event with its end in another thread than its begin.  Superfluous
# when 2.12 is the oldest version.
EVENTS_CROSS_THREADS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


# By owner: names subject to change in any version of PyTorch.
PRIVATE: dict[str, tuple[str, ...]] = {
    "torch": (
        "_amp_foreach_non_finite_check_and_unscale_",
        "_assert_async",
        "_foreach_add",
        "_foreach_add_",
        "_foreach_addcmul_",
        "_foreach_copy_",
        "_foreach_div",
        "_foreach_div_",
        "_foreach_mul",
        "_foreach_mul_",
        "_foreach_norm",
        "_foreach_sqrt",
        "_has_compatible_shallow_copy_type",
    ),
    "torch._C": (
        "DisableTorchFunction",
        "DisableTorchFunctionSubclass",
        "TensorBase",
        "_are_functorch_transforms_active",
        "_current_autograd_node",
        "_current_graph_task_id",
        "_disabled_torch_dispatch_impl",
        "_disabled_torch_function_impl",
        "_get_dispatch_stack_at",
        "_get_function_stack_at",
        "_is_any_autocast_enabled",
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_storage_Use_Count",
        "_swap_tensor_impl",
        "_will_engine_execute_node",
    ),
    "torch._C._FunctionBase": ("_raw_saved_tensors",),
    "torch._C._autograd": (
        "_get_sequence_nr",
        "_top_saved_tensors_default_hooks",
        "_unsafe_set_version_counter",
    ),
    "torch._C._distributed_c10d": (
        "_allow_inflight_collective_as_graph_input",
        "_register_work",
    ),
    "torch._C._dynamo": ("eval_frame",),
    "torch._dynamo.OptimizedModule": ("_initialize",),
    "torch._functorch.pyfunctorch": ("temporarily_clear_interpreter_stack",),
    "torch._C._functorch": ("is_functorch_wrapped_tensor", "peek_interpreter_stack"),
    "torch.Tensor": (
        "__dlpack_c_exchange_api__",
        "_backward_hooks",
        "_base",
        "_cdata",
        "_indices",
        "_is_view",
        "_make_subclass",
        "_make_wrapper_subclass",
        "_nnz",
        "_post_accumulate_grad_hooks",
        "_values",
        "_version",
    ),
    "torch.amp.GradScaler": (
        "_check_scale_growth_tracker",
        "_lazy_init_scale_growth_tracker",
        "_unscale_grads_",
    ),
    "torch.autograd": ("_record_function_with_args_enter", "_record_function_with_args_exit"),
    "torch.autograd.Variable": ("_execution_engine",),
    "torch.autograd.profiler": ("_is_profiler_enabled",),
    "torch.distributed.ProcessGroup": (
        "_get_backend",
        "_register_backend",
        "_set_default_backend",
        "_set_group_name",
    ),
    "torch.distributed._functional_collectives": ("AsyncCollectiveTensor",),
    "torch.distributed.distributed_c10d": (
        "_get_default_store",
        "_resolve_process_group",
        "_world",
    ),
    "torch.nn.Module": (
        "_apply",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_buffers",
        "_call_impl",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_get_backward_hooks",
        "_get_backward_pre_hooks",
        "_is_full_backward_hook",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
        "_state_dict_pre_hooks",
    ),
    "torch.nn.modules.batchnorm": ("_BatchNorm", "_NormBase"),
    "torch.nn.modules.module": ("_IncompatibleKeys",),
    "torch.nn.utils.parametrize": ("_cache", "_cache_enabled"),
    "torch.ops.aten._to_copy.default": ("_overloadpacket", "_schema"),
    "torch.optim.optimizer": ("_foreach_supported_types",),
    "torch.utils": ("_device", "_pytree"),
    "torch.utils.checkpoint": (
        "_checkpoint_hook",
        "_checkpoint_without_reentrant_generator",
        "_recomputation_hook",
    ),
    "torch.utils._python_dispatch": (
        "TorchDispatchMode",
        "_disable_current_modes",
        "_get_current_dispatch_mode_stack",
    ),
    "torch.utils._pytree": (
        "tree_flatten",
        "tree_leaves",
        "tree_map",
        "tree_map_only",
        "tree_unflatten",
    ),
}
