"""``smp.state``: this rank's knowledge of its job.

Also reachable as ``smp.state_mod.state``, the name in the original.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smp.job.collective_calls import Calls
from smp.runtime_state import Runtime

if TYPE_CHECKING:
    from smp.job.bootstrap import Bootstrap
    from smp.job.config import Config
    from smp.job.placement import Groups, Placement


@dataclass
class Job:
    """Everything made by ``smp.init`` and ended by ``smp.shutdown``."""

    cfg: "Config"
    boot: "Bootstrap"
    placement: "Placement"
    groups: dict[str, list[int]]  # global ranks of this rank's group, by kind
    torch_groups: "Groups"
    calls: Calls = field(default_factory=Calls)  # collective ones, outside steps
    undo: ExitStack = field(default_factory=ExitStack)  # the work of smp.shutdown
    pid: int = field(default_factory=os.getpid)  # a forked child is not a rank
    runtime: Runtime = field(init=False)  # of steps and models

    def __post_init__(self) -> None:
        self.runtime = Runtime(self.cfg, self.boot, self.placement, self.pid)


class ModuleManager:
    """Questions of Hugging Face's Trainer about the model's modules."""

    def __init__(self) -> None:
        # (smp -> hf, hf -> smp) pairs of functions between state dicts, one for each kind of
        # Hugging Face model replaced for tensor parallelism.
        self.translate_functions: list[tuple[Callable, Callable]] = []


class PatchManager:
    """Scripts' questions about the methods of their classes."""

    def get_original_method(self, name: str, cls: type) -> Callable:
        """The method as its class defines it: nothing here replaces methods of classes."""
        return getattr(cls, name)


class Core:
    """``smp.core``: the job as the original's backend shows it."""

    def __init__(self, state: "State") -> None:
        self._state = state

    def initialized(self) -> bool:
        """Between ``smp.init`` and ``smp.shutdown``."""
        return self._state.is_initialized

    def rank(self) -> int:
        """As ``smp.rank()``."""
        return self._state.job("smp.core.rank()").boot.rank

    def size(self) -> int:
        """As ``smp.size()``."""
        return self._state.job("smp.core.size()").boot.size

    def local_rank(self) -> int:
        """As ``smp.local_rank()``."""
        return self._state.job("smp.core.local_rank()").boot.local_rank

    def local_size(self) -> int:
        """As ``smp.local_size()``."""
        return self._state.job("smp.core.local_size()").boot.local_size


class State:
    """One per process; empty until ``smp.init`` and after ``smp.shutdown``."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self.model: Any = None  # the latest DistributedModel
        self.optimizer: Any = None  # the latest DistributedOptimizer
        self.core = Core(self)
        self.module_manager = ModuleManager()
        self.patch_manager = PatchManager()

    @property
    def is_initialized(self) -> bool:
        return self._job is not None

    @property
    def runtime(self) -> Runtime | None:
        """The state of steps and models, in a job."""
        return None if self._job is None else self._job.runtime

    @property
    def is_tracing(self) -> bool:
        """Whether the step function runs for the trace, before the first real step."""
        return self._job is not None and self._job.runtime.step.is_traced

    def job(self, caller: str) -> Job:
        """The job, for a function in need of one.

        Args:
            caller: the function, for the error.

        Raises:
            RuntimeError: before ``smp.init``; the text names the caller.
        """
        if self._job is None:
            raise RuntimeError(f"{caller} needs smp.init(): call it at the start of the script")
        return self._job

    def begin(self, job: Job) -> None:
        """``smp.init`` has made a job.

        Args:
            job: the result of `job` from now on.
        """
        self._job = job

    def end(self) -> None:
        """The job is over."""
        self._job = None
        self.model = self.optimizer = None
        self.module_manager = ModuleManager()

    @property
    def cfg(self) -> "Config":
        return self.job("smp.state.cfg").cfg

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """By tp_rank, the names of the latest model's parameters, in their order.

        Slices keep the names of their whole parameters, so the tp_ranks have the same.
        """
        size = len(self.job("smp.state.param_index_to_name_tp_group").groups["tp"])
        names = [] if self.model is None else [n for n, _ in self.model.named_parameters()]
        return [dict(enumerate(names)) for _ in range(size)]

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """The same the other way round."""
        return [
            {name: index for index, name in one.items()}
            for one in self.param_index_to_name_tp_group
        ]


state = State()
core = state.core
