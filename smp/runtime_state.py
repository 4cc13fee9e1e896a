"""The state of this rank's steps and models in one job, as plain data.

``smp.init`` makes it with the job; ``smp.start.core_session`` starts the core beside it.
"""

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from smp.job.bootstrap import Bootstrap
from smp.job.config import Config
from smp.job.placement import Placement
from smp.pytorch.accelerator import Place
from smp.pytorch.staging import Staging

_ERRORS_KEPT = 8  # of a step, with their frames' objects


class StepPhase(Enum):
    """The place of the script's thread in a step."""

    OUTSIDE = auto()
    TRACED = auto()  # the step function runs for the trace of new models
    RUNNING = auto()  # at any other place in a step
    BACKWARD = auto()  # without a pipeline: model.backward runs, or has failed


class CurrentStep:
    """The step under way on this rank; outside of one, the last one.

    Its methods alone change the phase.

    Attributes:
        phase: read-only.
        weights: samples by microbatch.
        microbatch: under way, without pipeline parallelism.
        backward_calls: calls of ``model.backward`` in it so far.
        saw_backward: the step called backward.
        backwards: calls of ``model.backward`` for each microbatch, as far as known.
        traced_backwards: those of the last traced run.
    """

    def __init__(self) -> None:
        self._phase = StepPhase.OUTSIDE
        self.weights: list[float] = [1.0]
        self.microbatch = 0
        self.backward_calls = 0
        self.saw_backward = False
        self.backwards = 1
        self.traced_backwards = 0

    @property
    def phase(self) -> StepPhase:
        return self._phase

    @property
    def is_under_way(self) -> bool:
        return self._phase is not StepPhase.OUTSIDE

    @property
    def is_traced(self) -> bool:
        return self._phase is StepPhase.TRACED

    def begin(self) -> None:
        """A step begins; none is under way."""
        self._phase = StepPhase.RUNNING
        self.saw_backward = False

    def end(self) -> None:
        """The step is over, well or not."""
        self._phase = StepPhase.OUTSIDE

    @contextmanager
    def traced_run(self) -> Iterator[None]:
        """In the block the step function runs for the trace."""
        self._phase = StepPhase.TRACED
        self.traced_backwards = 0
        try:
            yield
        finally:
            self._phase = StepPhase.RUNNING

    def enter_backward(self) -> None:
        """``model.backward`` begins, without a pipeline."""
        if self.is_under_way:
            self._phase = StepPhase.BACKWARD

    def leave_backward(self) -> None:
        """``model.backward`` has gone well."""
        if self.is_under_way:
            self._phase = StepPhase.RUNNING

    def in_last_backward(self) -> bool:
        """Whether no later backward of the step is expected (pipeline degree 1)."""
        if not self.is_under_way:
            return True
        last = self.microbatch == len(self.weights) - 1
        return last and self.backward_calls >= self.backwards


@dataclass
class CoreTables:
    """The core's tables of all models, as ``smp.runtime.core_tables`` gave them last."""

    parameters: list[nn.Parameter] = field(default_factory=list)  # local, by ledger's number
    entry_flags: bytes = b""  # by entry: remote_modules.TRAINS and CHAINS
    holders: list[dict[str, nn.Parameter | None]] = field(
        default_factory=list
    )  # modules' own parameters
    grad_flags: bytes = b""  # of all of these, at the making of entry_flags
    others: list[nn.Parameter] = field(default_factory=list)  # those not in the ledger
    hooks_on_others: list[dict] = field(default_factory=list)  # their hooks on sums
    grad_told: str = ""  # ... in words
    gates: array = field(default_factory=lambda: array("i"))  # calls a microbatch, 0: unknown


class Runtime:
    """This rank among the ranks of its models, its step, and facts of its models.

    Attributes:
        in_sequence: all replicas run alike in one order: for modules with collectives of
            their own.
        core_group: the ranks within the core's reach, by its numbers.
        decider: the one rank with the decision about the partition, the same for all replicas.
        compared_steps: steps with a comparison of inputs on the TP_GROUP's ranks.
        after_partition: loads deferred until the partition.
        hooks_wait: a model has hooks for its next step.
        expected_in_pool: expected bytes in this rank's pool for the models.
        home: the device of models and inputs.
        place: of the last step's caller.
        core_is_open: the core's threads run.
        local_errors: this rank's last described exceptions, with their descriptions.
    """

    def __init__(self, cfg: Config, boot: Bootstrap, placement: Placement, pid: int):
        self.cfg = cfg
        self.boot = boot
        self.pid = pid
        stages = placement.group("pp", boot.rank)
        self.pp_size = len(stages)
        self.pp_rank = stages.index(boot.rank)
        self.tp_size = placement.tp
        self.alone = boot.size == 1
        replicated = len(placement.group("dp", boot.rank)) > 1
        self.in_sequence = cfg.deterministic_server and self.pp_size > 1 and replicated
        if self.in_sequence:
            self.core_group = placement.replicas(boot.rank)
        else:
            self.core_group = placement.pipelines(boot.rank)
        self.decider = next(r for r in range(boot.size) if placement.coordinates(r).pp == 0)
        self.step = CurrentStep()
        self.tables = CoreTables()
        self.staging = Staging()
        self.compared_steps = 0
        self.after_partition: list[Callable[[], None]] = []
        self.hooks_wait = False
        self.expected_in_pool = 0
        self.home: torch.device | None = None
        self.place: Place | None = None
        self.core_is_open = False
        self.local_errors: deque[tuple[tuple, BaseException]] = deque(maxlen=_ERRORS_KEPT)

    @property
    def name(self) -> str:
        """This rank, for errors."""
        return self.name_of(self.boot.rank)

    def name_of(self, rank: int) -> str:
        """The name of a rank of ``core_group`` in messages.  The name is its pp_rank, or the
        global rank where several ranks of the job have one pp_rank.
        """
        pipeline, pp_rank = divmod(self.core_group.index(rank), self.pp_size)
        place = f"pp_rank {pp_rank}"
        if self.boot.size == self.pp_size:
            return place
        if len(self.core_group) > self.pp_size:
            place = f"{'dp' if self.in_sequence else 'tp'}_rank {pipeline}, {place}"
        return f"rank {rank} ({place})"

    @property
    def decides(self) -> bool:
        """Whether this rank traces and partitions."""
        return self.boot.rank == self.decider

    @property
    def traces(self) -> bool:
        """Whether this rank traces: with the deciding one, where modules call each other."""
        return self.decides or (self.in_sequence and self.pp_rank == 0)

    @property
    def active_microbatches(self) -> int:
        """The most microbatches under way at a time."""
        return min(self.cfg.active_microbatches, self.cfg.microbatches)
