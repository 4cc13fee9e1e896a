"""The session of the core on this rank: its start, the functions that it calls, its end."""

import secrets
from collections.abc import Callable
from typing import Any

import torch

from smp import _core, memory
from smp.checkpointing import users_checkpoints
from smp.job import core_warnings, transports
from smp.modules import (
    hooks,
    late_hooks,
    late_modules,
    live_models,
    parametrizations,
    placeholders,
    travelling_changes,
)
from smp.precision import masters
from smp.pytorch import autograd, call_warnings, pickling, shared_memory, staging
from smp.pytorch.compiled_code import not_traced
from smp.runtime import failures, thread_state
from smp.runtime_state import Runtime
from smp.slicing import split_parameters

CONNECT_TIMEOUT_MS = 60_000
SPIN_DECIDED_BY_CORE = -1


def start(rt: Runtime) -> None:
    """Start the core, where this rank has a pipeline.  Collective over all ranks."""
    travelling_changes.forget()
    call_warnings.forget()
    if rt.pp_size > 1:
        _open(rt)


def stop(rt: Runtime) -> None:
    """Forget the models, stop the core's threads and leave the other ranks; never waits for
    them.
    """
    late_modules.forget()
    late_hooks.forget()
    users_checkpoints.forget()
    parametrizations.forget()
    live_models.forget()
    masters.forget()
    if rt.core_is_open:
        rt.core_is_open = False
        try:
            rt.staging.end()
        finally:  # a failed device must not keep the core's threads
            _core.close()


def _open(rt: Runtime) -> None:
    rank = rt.core_group.index(rt.boot.rank)
    token = _exchange(rt, secrets.token_hex(16).encode() if rank == 0 else b"")[0]
    wanted = rt.cfg.comm_transports
    transports.offer(rt.boot, wanted)
    transports.check_interface(rt.cfg.comm_interface)
    card = _core.open(
        rank,
        len(rt.core_group),
        len(rt.core_group) // rt.pp_size,
        rt.cfg.comm_pool_bytes or 0,
        rt.cfg.comm_device_pool_bytes,
        SPIN_DECIDED_BY_CORE,
        ",".join(wanted) if wanted else None,
        rt.cfg.comm_interface,
        transports.job_secret(rt.boot, token),
        rt.cfg.watchdog_report_s,
        rt.cfg.watchdog_end_s,
        tuple(map(rt.name_of, rt.core_group)),
        rt.in_sequence,
        rt.cfg.static_mode_recording_steps if rt.cfg.static_mode else 0,
    )
    rt.core_is_open = True
    _core.connect(_exchange(rt, card), CONNECT_TIMEOUT_MS)
    _exchange(rt, b"")  # a rank sends after all listen
    core_warnings.pass_on()
    calls = _functions(rt)
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


def _exchange(rt: Runtime, mine: bytes) -> list[bytes]:
    """The bytes of each rank within the core's reach.  Collective over all ranks."""
    everyone = rt.boot.allgather_bytes(mine)
    return [everyone[rank] for rank in rt.core_group]


def _functions(rt: Runtime) -> dict[str, Callable[..., Any]]:
    """The functions that the core calls, by its names for them."""
    threads = torch.get_num_threads()

    def begin_worker() -> None:
        torch.set_num_threads(threads)  # OpenMP keeps this by thread

    def describe(error: BaseException, path: str | None, microbatch: int, phase: int) -> tuple:
        memory.tell_if_out_of_memory(error)
        return failures.describe_of_task(rt, error, path, microbatch, phase)

    return {
        "describe_error": describe,
        "raised_there": failures.raised_there,
        "refuse_changed": shared_memory.refuse_changed,
        "call_hooked": hooks.call_hooked,
        "serve": hooks.serve,
        "serve_hooked": hooks.serve_hooked,
        "warn_of_tensor": call_warnings.warn_of_tensor,
        "warn_of_hook": call_warnings.warn_of_hook,
        "capture_state": thread_state.capture_for_call,
        "capture_backward": thread_state.capture_for_backward,
        "with_state": thread_state.serve_with_state,
        "run_first": users_checkpoints.run_first,
        "checkpoint_of": users_checkpoints.checkpoint_of,
        "worker_begin": begin_worker,
        "dumps": pickling.dumps,
        "loads": pickling.loads,
        "dense": staging.dense,
        "whole": split_parameters.whole_of,
        "unsendable": staging.unsendable,
        "stage_out": rt.staging.out,
        "stage_wait": rt.staging.wait,
        "stage_in": rt.staging.into,
        "stage_placed": rt.staging.placed,
    }
