"""The running system of one rank: the C core, the models it serves, the steps so far.

``smp.init`` starts it after the groups are formed, ``smp.shutdown`` stops it first.
"""

import os
import secrets
import weakref
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smp import _core, autograd, failures, hooks, pickling, thread_state

if TYPE_CHECKING:
    from smp.model import DistributedModel

CONNECT_TIMEOUT_MS = 60_000


class Runtime:
    """One rank's core and what Python keeps beside it.

    Args:
        cfg: the configuration of :func:`smp.init`.
        pp_rank: this rank in its PP_GROUP, which the core's messages stay within.
        pp_size: number of ranks in the PP_GROUP.
        exchange: gives each rank of the PP_GROUP the bytes of all, by pp_rank.
        spin_us: how long a waiting thread polls; -1: the core decides.
    """

    def __init__(
        self,
        cfg: Any,
        pp_rank: int,
        pp_size: int,
        exchange: Callable[[bytes], list[bytes]],
        spin_us: int = -1,
    ):
        self.cfg = cfg
        self.pp_rank = pp_rank
        self.pp_size = pp_size
        self.exchange = exchange
        self.models: list[weakref.ref[DistributedModel]] = []
        self.local_error: BaseException | None = None
        self.tracing = False
        self.in_step = False
        self.traced_backwards = 0  # model.backward calls while tracing
        self.backwards = 1  # ... that a step function makes, as far as known
        self.trains = b""  # by entry: has parameters that require grad
        self.grad_flags = b""  # by parameter, when trains was made
        self.weights: list[float] = [1.0]  # samples by microbatch, of the step under way
        self.microbatch = 0  # under way, without pipeline parallelism
        self.gates = array("i")  # by gate: calls a microbatch, 0 where not known
        self.threads = torch.get_num_threads()
        self.core_is_open = False
        if pp_size > 1:
            self._open_core(spin_us)

    def _open_core(self, spin_us: int) -> None:
        job = self.exchange(secrets.token_hex(16).encode() if self.pp_rank == 0 else b"")[0]
        transports = getattr(self.cfg, "comm_transports", None)
        card = _core.open(
            self.pp_rank,
            self.pp_size,
            int(getattr(self.cfg, "comm_pool_bytes", 0) or 0),
            spin_us,
            ",".join(transports) if transports else None,
            job.decode(),
        )
        self.core_is_open = True
        _core.connect(self.exchange(card), CONNECT_TIMEOUT_MS)
        self.exchange(b"")  # nobody sends before everybody listens
        _core.configure(
            send_apply=autograd.apply_of(autograd.Send),
            recv_apply=autograd.apply_of(autograd.Recv),
            enter_apply=autograd.apply_of(autograd.Enter),
            leaf=torch.zeros((), requires_grad=True),
            seed_tensor=torch.empty((), dtype=torch.int64),
            describe_error=self._describe,
            call_hooked=hooks.call_hooked,
            serve_hooked=hooks.serve_hooked,
            capture_state=thread_state.capture,
            with_state=thread_state.with_state,
            worker_begin=self._worker_begin,
            aborted=failures.StepAborted,
            dumps=pickling.dumps,
            loads=pickling.loads,
            to_host=pickling.to_host,
            to_device=pickling.to_device,
        )

    def _worker_begin(self) -> None:
        torch.set_num_threads(self.threads)  # OpenMP keeps this by thread

    def _describe(
        self, error: BaseException, path: str | None, microbatch: int, phase: int
    ) -> tuple:
        self.local_error = error
        return failures.describe(error, path, microbatch, phase, self.pp_rank)

    def seeds(self, tensors: tuple[Tensor, ...], given: Any, average: bool) -> list:
        """The gradients that a backward starts with.

        With averaging, microbatch i starts with its share n_i/N of the samples, so that
        the gradients are those of the whole batch's mean.
        """
        if given is None or isinstance(given, Tensor):
            given = [given] * len(tensors)
        here = _core.current()
        share = 1.0
        if average and len(self.weights) > 1:
            share = self.weights[here[0] if here else self.microbatch] / sum(self.weights)
        seeds = []
        for tensor, seed in zip(tensors, given, strict=True):
            if seed is None:
                if tensor.numel() != 1:
                    raise RuntimeError(
                        f"smp: model.backward got a tensor of shape {tuple(tensor.shape)}; "
                        "give a scalar loss, or grad_tensors"
                    )
                seed = torch.ones_like(tensor)
            seeds.append(seed * share if share != 1.0 else seed)
        return seeds

    def next_gate(self, calls: int) -> int:
        """The number of a new gate that a microbatch passes ``calls`` times."""
        self.gates.append(calls)
        return len(self.gates) - 1

    def live_models(self) -> list["DistributedModel"]:
        """The models that still exist, in order of creation: alike on all ranks."""
        return [m for m in (ref() for ref in self.models) if m is not None]

    def close(self) -> None:
        """Stop the core's threads and leave the other ranks; never waits for them."""
        if self.core_is_open:
            self.core_is_open = False
            _core.close()


current: Runtime | None = None
_owner_pid = os.getpid()


def get(caller: str) -> Runtime:
    """The running system.

    Raises:
        RuntimeError: before ``smp.init``; names what was called.
    """
    if current is None:
        raise RuntimeError(f"{caller} needs smp.init(): call it at the start of the script")
    return current
