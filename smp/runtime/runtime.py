"""The running system of one rank: the C core, the models it serves, the steps so far.

``smp.init`` starts it after the groups are formed, ``smp.shutdown`` stops it first.
"""

import gc
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smp import _core
from smp.collectives import objects
from smp.job import core_warnings, transports
from smp.modules import (
    hooks,
    late_hooks,
    late_modules,
    live_models,
    placeholders,
    travelling_changes,
)
from smp.pytorch import (
    accelerator,
    autograd,
    call_warnings,
    pickling,
    shared_memory,
    staging,
)
from smp.pytorch.compiled_code import not_traced
from smp.ranks import CommGroup
from smp.runtime import failures, thread_state
from smp.slicing import split_parameters

if TYPE_CHECKING:
    from smp.modules.live_models import LiveModel
    from smp.state_mod import Job, State

CONNECT_TIMEOUT_MS = 60_000
SPIN_DECIDED_BY_CORE = -1
_ERRORS_KEPT = 8  # of a step, with their frames' objects
FIRST_STEP = "the first step of a model"


class Runtime:
    """One rank's core and Python's records beside it.

    Args:
        job: from ``smp.init``.
    """

    def __init__(self, job: "Job"):
        self.cfg = job.cfg
        self.boot = job.boot
        self.pid = job.pid
        self.placement = job.placement
        self.pp_group = job.groups["pp"]
        self.pp_size = len(self.pp_group)
        self.alone = job.boot.size == 1
        self.pp_rank = self.pp_group.index(job.boot.rank)
        self.tp_size = len(job.groups["tp"])
        # All replicas run alike in one order: for modules with collectives of their own.
        self.in_sequence = (
            job.cfg.deterministic_server and self.pp_size > 1 and len(job.groups["dp"]) > 1
        )
        # The ranks within the core's reach, by its numbers.
        if self.in_sequence:
            self.core_group = job.placement.replicas(job.boot.rank)
        else:
            self.core_group = job.placement.pipelines(job.boot.rank)
        # One rank decides about the partition, the same for all replicas.
        self._decider = next(
            r for r in range(job.boot.size) if job.placement.coordinates(r).pp == 0
        )
        self.has_new_model = False  # since the last step
        self.after_partition: list[Callable[[], None]] = []  # loads deferred until it
        # This rank's last described exceptions, with their descriptions.
        self.local_errors: deque[tuple[tuple, BaseException]] = deque(maxlen=_ERRORS_KEPT)
        self.tracing = False
        self.in_step = False
        self.traced_backwards = 0  # model.backward calls while tracing
        self.backwards = 1  # ... of a step function, as far as known
        self.expected_in_pool = 0  # expected bytes in this rank's pool for the models
        self.entry_flags = b""  # by entry: remote_modules.TRAINS and CHAINS
        self.grad_flags = b""  # by parameter, at the making of entry_flags
        self.grad_told = ""  # ... in words
        self.weights: list[float] = [1.0]  # samples by microbatch, of the step under way
        self.microbatch = 0  # under way, without pipeline parallelism
        self.backward_calls = 0  # model.backward calls in it so far
        self.saw_backward = False  # the step called backward
        self.compared_steps = 0  # steps with a comparison of inputs on the TP_GROUP's ranks
        self.in_backward = False  # without a pipeline: model.backward runs, or has failed
        self.hooks_wait = False  # a model has hooks for its next step
        self.parameters: list[nn.Parameter] = []  # local ones, by the ledger's numbers
        self.gates = array("i")  # by gate: calls a microbatch, 0: unknown
        self.threads = torch.get_num_threads()
        self.place: accelerator.Place | None = None  # of the last step's caller
        self.home: torch.device | None = None  # the place of models and inputs
        self.staging = staging.Staging()
        self.core_is_open = False
        travelling_changes.forget()
        call_warnings.forget()
        if self.pp_size > 1:
            self._open_core()

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
        return self.boot.rank == self._decider

    @property
    def active_microbatches(self) -> int:
        """The most microbatches under way at a time."""
        return min(self.cfg.active_microbatches, self.cfg.microbatches)

    @property
    def traces(self) -> bool:
        """Whether this rank traces: with the deciding one, where modules call each other."""
        return self.decides or (self.in_sequence and self.pp_rank == 0)

    def share_decision(self, mine: bytes) -> tuple[bytes, list[bytes]]:
        """The deciding rank's bytes, and those of all others with some.

        Collective over all ranks.
        """
        everyone = objects.gather_bytes(FIRST_STEP, CommGroup.WORLD, mine)
        decision = everyone.pop(self._decider)
        return decision, [one for one in everyone if one]

    def _exchange(self, mine: bytes) -> list[bytes]:
        """The bytes of each rank within the core's reach.  Collective over all ranks."""
        everyone = self.boot.allgather_bytes(mine)
        return [everyone[rank] for rank in self.core_group]

    def _open_core(self) -> None:
        rank = self.core_group.index(self.boot.rank)
        token = self._exchange(secrets.token_hex(16).encode() if rank == 0 else b"")[0]
        wanted = self.cfg.comm_transports
        transports.offer(self.boot, wanted)
        transports.check_interface(self.cfg.comm_interface)
        card = _core.open(
            rank,
            len(self.core_group),
            len(self.core_group) // self.pp_size,
            self.cfg.comm_pool_bytes or 0,
            self.cfg.comm_device_pool_bytes,
            SPIN_DECIDED_BY_CORE,
            ",".join(wanted) if wanted else None,
            self.cfg.comm_interface,
            transports.job_secret(self.boot, token),
            self.cfg.watchdog_report_s,
            self.cfg.watchdog_end_s,
            tuple(map(self.name_of, self.core_group)),
            self.in_sequence,
        )
        self.core_is_open = True
        try:
            _core.connect(self._exchange(card), CONNECT_TIMEOUT_MS)
            self._exchange(b"")  # a rank sends after all listen
        except BaseException:
            self.close()
            raise
        core_warnings.pass_on()
        calls: dict[str, Any] = {
            "describe_error": self._describe,
            "raised_there": failures.raised_there,
            "refuse_changed": shared_memory.refuse_changed,
            "call_hooked": hooks.call_hooked,
            "serve_hooked": hooks.serve_hooked,
            "warn_of_tensor": call_warnings.warn_of_tensor,
            "warn_of_hook": call_warnings.warn_of_hook,
            "capture_state": thread_state.capture_for_call,
            "capture_backward": thread_state.capture_for_backward,
            "with_state": thread_state.serve_with_state,
            "worker_begin": self._worker_begin,
            "dumps": pickling.dumps,
            "loads": pickling.loads,
            "dense": staging.dense,
            "whole": split_parameters.whole_of,
            "unsendable": staging.unsendable,
            "stage_out": self.staging.out,
            "stage_wait": self.staging.wait,
            "stage_in": self.staging.into,
            "stage_placed": self.staging.placed,
        }
        for function in calls.values():
            not_traced("a function of smp's, which the core calls")(function)
        _core.configure(
            send_apply=autograd.apply_of(autograd.Send),
            recv_apply=autograd.apply_of(autograd.Recv),
            change_apply=autograd.apply_of(autograd.Change),
            enter_apply=autograd.apply_of(autograd.Enter),
            leaf=torch.zeros((), requires_grad=True, device="cpu"),
            seed_tensor=torch.empty((), dtype=torch.int64, device="cpu"),
            aborted=failures.StepAborted,
            placeholder=placeholders.Placeholder,
            hollow=placeholders.Placeholder,
            split_tensor=split_parameters.SplitTensor,
            **calls,
        )

    def share_place(self) -> None:
        """Have the workers use the calling thread's device, stream and generator."""
        place = accelerator.place()
        if place != self.place:
            self.place = place
            _core.configure(
                enter_device=None if place is None else place.enter,
                device_generator=accelerator.generator(),
            )

    def _worker_begin(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps this by thread

    def _describe(
        self, error: BaseException, path: str | None, microbatch: int, phase: int
    ) -> tuple:
        error = failures.as_failure(error)
        if failures.is_out_of_memory(error) and failures.told_of(error) is None:
            failures.add_note(error, self._memory())
        if path is None:
            path = failures.module_of(error, self.live_models())
        told = failures.describe(error, path, microbatch, phase, self.name)
        self.local_errors.append((told, error))
        return told

    def _memory(self) -> str:
        """The contents of this rank's memory, by kind."""

        def mib(tensors: Iterable[Tensor | None]) -> int:
            return sum(t.nbytes for t in tensors if t is not None) >> 20

        parameters = [p for m in self.live_models() for p in m.local_parameters()]
        buffers = [b for m in self.live_models() for _, b in m.local_named_buffers()]
        gradients = [*(p.grad for p in parameters), *_core.gradients_taken()]
        pool = _core.counters()
        return (
            f"memory of {self.name}: parameters {mib(parameters)} MiB, gradients "
            f"{mib(gradients)} MiB, buffers {mib(buffers)} MiB, pool for "
            f"messages {pool['pool_in_use'] >> 20} of {pool['pool_size'] >> 20} MiB in use"
        )

    def seeds(
        self, tensors: tuple[Tensor, ...], given: Any, average: bool, scale: float = 1.0
    ) -> list:
        """The first gradients of a backward; None is a scalar's 1.

        With averaging, microbatch i starts with its share n_i/N of the samples: the gradients
        are those of the whole batch's mean.

        Args:
            scale: of the loss.
        """
        if given is None or isinstance(given, Tensor):
            given = [given] * len(tensors)
        here = _core.current()
        share = scale
        if average and len(self.weights) > 1:
            share *= self.weights[self.microbatch if here is None else here] / sum(self.weights)
        seeds = []
        for tensor, seed in zip(tensors, given, strict=True):
            if seed is None:
                if tensor.numel() != 1:
                    raise RuntimeError(
                        f"smp: model.backward got a tensor of shape {tuple(tensor.shape)}; "
                        "give a scalar loss, or grad_tensors"
                    )
                seed = None if share == 1.0 else torch.full_like(tensor, share)
            elif share != 1.0:
                seed = seed * share
            seeds.append(seed)
        return seeds

    def in_last_backward(self) -> bool:
        """Whether no later backward of the step is expected (pipeline degree 1)."""
        if not self.in_step:
            return True
        last = self.microbatch == len(self.weights) - 1
        return last and self.backward_calls >= self.backwards

    def next_gate(self, calls: int) -> int:
        """The number of a new gate, passed by a microbatch ``calls`` times."""
        self.gates.append(calls)
        return len(self.gates) - 1

    def add_model(self, model: "LiveModel") -> None:
        """Register a model, made on all ranks."""
        live_models.add(model)
        self.has_new_model = True

    def forget_old_models(self) -> None:
        """Before the first step after a model was made: forget the models replaced by it.

        A dropped model may live in a cycle of references until the garbage is collected, on
        each rank at moments of its own.  Here all ranks collect.
        """
        if self.has_new_model and live_models.made() > 1:
            gc.collect()
            travelling_changes.forget_others(self.live_models())
        self.has_new_model = False

    def live_models(self) -> list["LiveModel"]:
        """The models still in existence, in order of creation: alike on all ranks."""
        return live_models.living()

    def close(self) -> None:
        """Stop the core's threads and leave the other ranks; never waits for them."""
        if self.core_is_open:
            self.core_is_open = False
            try:
                self.staging.end()
            finally:  # a failed device must not keep the core's threads
                _core.close()


current: Runtime | None = None


def start(state: "State") -> None:
    """Start the core.  Collective over all ranks."""
    global current
    current = Runtime(state.job("smp.runtime.runtime.start()"))


def stop() -> None:
    """Stop the core on this rank; never waits for the others."""
    global current
    if current is not None:
        running, current = current, None
        late_modules.forget()
        late_hooks.forget()
        live_models.forget()
        running.close()


def get(caller: str) -> Runtime:
    """The running system.

    Raises:
        RuntimeError: before ``smp.init``; the text names the caller.
    """
    if current is None:
        raise RuntimeError(f"{caller} needs smp.init(): call it at the start of the script")
    return current
