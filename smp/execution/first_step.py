"""The time before the first step of a model: tracing, partition, agreement.

One rank traces and decides; every rank gets the decision, checks that it is about the
same model, and applies it.  Where modules may call collectives of their own
(``deterministic_server``) the first stage's other ranks trace along.
"""

import hashlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from smp import _core, ranks
from smp.collectives import objects
from smp.data_parallel import data_parallel
from smp.execution import applied_partition
from smp.modules import device_placement, live_models
from smp.modules.gates import Turns
from smp.modules.live_models import LiveModel, record_of
from smp.modules.pins import PartitionError, inherit_pin, pin_of
from smp.partitioning import first_forward, shared, traced_tensors, tracing
from smp.partitioning.partition import Partition, make_partition
from smp.partitioning.turns import turns_of
from smp.pytorch import call_warnings
from smp.ranks import CommGroup
from smp.runtime import core_tables, failures, pool, sync_batch_norm
from smp.runtime.forward_attributes import ForwardState
from smp.runtime_state import Runtime
from smp.saving import state_dicts
from smp.slicing.slices import slices_of
from smp.tensor_parallel import group
from smp.tensor_parallel.backward import sequence, step_end
from smp.tensor_parallel.backward.step_end import PeerFailed

_FIRST_STEP = "the first step of a model"


class PartitionMismatch(RuntimeError):
    """The ranks built different models."""


def partition_models(
    rt: Runtime,
    models: Sequence[LiveModel],
    run_traced: Callable[[torch.device | None], Any],
) -> None:
    """Partition the models and make this rank's part of it.  Collective over all ranks.

    Args:
        models: in order of creation.
        run_traced: runs the step function on one microbatch, without backward; its inputs on
            that device, or in place.

    Raises:
        NotImplementedError: the TP_GROUP's backend cannot serve a pipeline on this device.
        PartitionError: the pins cannot be met.
        PartitionMismatch: a rank has another model; on every rank.
        Exception: the traced run's; on every rank.
    """
    if rt.tp_size > 1 and rt.home is not None:
        group.refuse_gloo_on_gpus(rt.home)
        group.meet(rt.home)
    sync_batch_norm.prepare(models, rt)
    if rt.in_sequence:
        sequence.prepare()
    earlier: list[tracing.Trace | None] = []  # of a run that has made modules

    def decide() -> tuple | None:
        if not rt.traces:
            return None
        traces = _traces(rt, models, run_traced)
        if traces[0] is not None and traces[0].made:
            earlier.extend(traces)
            return traces[0].made, (), (), 0, ()
        return _decide(rt, models, traces)

    def decide_again() -> tuple | None:
        modules = [one.module for one in models]
        replaced, flags = first_forward.make(modules, packed)
        for old, new in replaced:
            inherit_pin(old, new)
        if not rt.traces:
            return None
        traces = _traces(rt, models, run_traced)
        for before, after in zip(earlier, traces, strict=True):
            _check_second(before, after, flags)
        return _decide(rt, models, traces)

    told, error, mine = _attempted(rt, decide)
    decision, others = _share_decision(rt, mine)
    packed, gates, states, backwards, pools = _core.unpack(decision)
    if isinstance(packed, bytes) and not others:
        told, error, mine = _attempted(rt, decide_again)
        decision, others = _share_decision(rt, mine)
        packed, gates, states, backwards, pools = _core.unpack(decision)
    if gates is None or others:
        everything = [_core.unpack(one) for one in (decision, *others)]
        first = _first_failure([what for what, gates, *_ in everything if gates is None])
        raise failures.rebuild(first, error if first == told else None)
    partitions = [Partition.from_bytes(one) for one in packed]
    turns = [Turns(*one) for one in gates]
    _check_models(models, partitions, turns)
    rt.step.backwards = max(1, backwards)
    for one, partition, its, state in zip(models, partitions, turns, states, strict=True):
        applied_partition.apply(one, partition, its, ForwardState(*state))
    _core.trim_heap()
    if rt.home is not None:
        device_placement.trim(rt.home)
    core_tables.install(rt)
    if not rt.staging.on_device():
        rt.expected_in_pool += pools[rt.pp_rank]
        _core.expect_in_pool(rt.expected_in_pool)
    for member in data_parallel.members_of(models):
        member.broadcast()
    for one in models:
        state_dicts.load_deferred(one)
    waiting = list(rt.after_partition)
    rt.after_partition.clear()
    for load in waiting:
        load()
    for one in models:
        record_of(one).post_partition_hooks.run(one)


def _share_decision(rt: Runtime, mine: bytes) -> tuple[bytes, list[bytes]]:
    """The deciding rank's bytes, and those of all others with some.

    Collective over all ranks.
    """
    everyone = objects.gather_bytes(_FIRST_STEP, CommGroup.WORLD, mine)
    decision = everyone.pop(rt.decider)
    return decision, [one for one in everyone if one]


def _attempted(
    rt: Runtime, decide: Callable[[], tuple | None]
) -> tuple[tuple | None, BaseException | None, bytes]:
    """How a failure is told to the other ranks, the failure, and the bytes for them."""
    try:
        decided = decide()
    except (Exception, SystemExit) as raised:  # the others wait for the decision
        error = failures.as_failure(raised)
        microbatch = failures.IN_PARTITION if isinstance(error, PartitionError) else 0
        told = failures.describe(error, None, microbatch, 0, rt.name)
        return told, error, _core.pack((told, None, (), 0, 0))
    return None, None, _core.pack(decided) if rt.decides else b""


def _check_second(
    first: tracing.Trace | None, second: tracing.Trace | None, flags: set[str]
) -> None:
    """The forward after the one with new modules must be like all later ones.

    Args:
        flags: names of attributes still at the first forward's values.

    Raises:
        RuntimeError: the second forward makes modules again; or it lacks changes of the first,
            other than the flags.  A process would have kept these.
    """
    if first is None or second is None:
        return
    instead = "so that the partition cannot decide about it: do so before smp.DistributedModel"
    if second.made:
        raise RuntimeError(
            f"smp: {first.makes} in the first forward, and in the next {second.makes} again, "
            f"{instead}"
        )
    before, after = first.changed(), second.changed()
    lost = {n for n in before.keys() - after.keys() if n.rpartition(".")[0] in second.modules}
    other = min((lost - flags) | (flags & after.keys()), default=None)
    if other is not None:
        raise RuntimeError(
            f"smp: {first.makes} in the first forward, which changes "
            f"{(before | after)[other]} '{other}' otherwise than the next one does, {instead}"
        )


def _first_failure(failed: Sequence[tuple]) -> tuple:
    """The first failure of the tracing ranks: not one that followed from another's."""
    follows = f".{PeerFailed.__name__}"
    return next((told for told in failed if not told[4].endswith(follows)), failed[0])


def _traces(
    rt: Runtime,
    models: Sequence[LiveModel],
    run_traced: Callable[[torch.device | None], Any],
) -> Sequence[tracing.Trace | None]:
    """The models' traces; None for each with ``skip_tracing``."""
    for one in models:
        _refuse_compiled_modules(one.module)
        if rt.boot.size > 1:
            _refuse_lazy_modules(one.module)
    if rt.cfg.skip_tracing:
        return [None] * len(models)
    if rt.in_sequence:
        return _trace_together(rt, models, run_traced)
    return _trace(rt, models, run_traced)


def _decide(
    rt: Runtime,
    models: Sequence[LiveModel],
    traces: Sequence[tracing.Trace | None],
) -> tuple[list[bytes], list[tuple], list[tuple], int, list[int]]:
    """The partition, `Turns` and `ForwardState` of each model, and numbers for the ranks.  The
    numbers are the backward calls of a step, and each rank's expected use of its pool.
    """
    drawn = next((trace.draws for trace in traces if trace is not None), ())
    if drawn and rt.pp_size > 1 and rt.active_microbatches > 1:
        call_warnings.warn_of_draws(drawn)
    states = [_forward_state(m, trace) for m, trace in zip(models, traces, strict=True)]
    partitions = _partitions(rt, models, traces, states)
    for trace, partition in zip(traces, partitions, strict=True):
        if trace is not None:
            _check_grad_flags(rt, trace, partition)
    gates = [tuple(turns_of(m.module, trace)) for m, trace in zip(models, traces, strict=True)]
    pools = [0] * rt.pp_size
    for m, trace, partition in zip(models, traces, partitions, strict=True):
        if trace is not None:
            more = pool.expected_bytes(
                m.module, partition.rank_of, trace, rt.pp_size, rt.active_microbatches
            )
            pools = [a + b for a, b in zip(pools, more, strict=True)]
    packed = [p.to_bytes() for p in partitions]
    return packed, gates, [tuple(state) for state in states], rt.step.traced_backwards, pools


def _partitions(
    rt: Runtime,
    models: Sequence[LiveModel],
    traces: Sequence[tracing.Trace | None],
    states: Sequence[ForwardState],
) -> list[Partition]:
    """The models' partitions, with parts of several models in one place."""
    cfg = rt.cfg
    homes = shared.homes_of(live_models.living())
    out = []
    for number, (m, trace) in enumerate(zip(models, traces, strict=True)):
        decision = make_partition(
            m.module,
            trace,
            degree=rt.pp_size,
            memory_weight=cfg.memory_weight,
            default=cfg.default_partition,
            auto=cfg.auto_partition,
            homes=shared.pinned_homes(models[number + 1 :]) | homes,
        )
        its = shared.homes_in(m.module, decision.rank_of, states[number].buffers)
        homes = its | homes
        out.append(decision)
    return out


def _check_grad_flags(rt: Runtime, trace: tracing.Trace, partition: Partition) -> None:
    """Changes of ``requires_grad`` travel with calls to other ranks; on one they are all's.

    Raises:
        PartitionError: a parameter's change would reach other microbatches, or not all ranks.
    """
    alone = rt.active_microbatches == 1
    for name, flag in trace.grad_flags.items():
        own = partition.rank_of[name.rpartition(".")[0]]
        for setter in flag.setters:
            rank = partition.rank_of.get(setter or "", 0)
            if rank != own and (alone or not flag.read_first):
                if rank == 0 or not flag.lasts:
                    continue
            elif alone and not flag.lasts:
                continue
            who = "the step function" if setter is None else f"module '{setter}'"
            raise PartitionError(
                f"smp: {who}, on pp_rank {rank}, changes requires_grad of parameter '{name}', "
                f"on pp_rank {own}, in the step: the microbatches that are under way there "
                "would not each have their own; change it between steps, on all ranks, or in "
                "code of pp_rank 0 for parameters of other ranks, which does not read it first "
                "(smp.set_partition)"
            )


def _trace_together(
    rt: Runtime,
    models: Sequence[LiveModel],
    run_traced: Callable[[torch.device | None], Any],
) -> list[tracing.Trace]:
    """The models' traces; their modules may meet the DP_GROUP's other ranks in collectives."""
    with step_end.together(ranks.get_dp_process_group()):
        try:
            return _trace(rt, models, run_traced)
        except Exception as error:
            step_end.hear("a collective in the traced run", error)
            raise


def _trace(
    rt: Runtime,
    models: Sequence[LiveModel],
    run_traced: Callable[[torch.device | None], Any],
) -> list[tracing.Trace]:
    """The models' traces, made on this rank's accelerator or on the CPU.

    For the run, the whole models are on the accelerator.  Where they do not fit, the trace is
    the CPU's; where the CPU cannot run them, the accelerator's.
    """
    placed = [m.module for m in live_models.partitioned()]
    with traced_tensors.as_in_one_process(placed):
        return _trace_whole(rt, models, placed, run_traced)


def _trace_whole(
    rt: Runtime,
    models: Sequence[LiveModel],
    placed: Sequence[nn.Module],
    run_traced: Callable[[torch.device | None], Any],
) -> list[tracing.Trace]:
    """The traces of models whole on this rank, beside other whole ones."""
    modules = [m.module for m in models]
    traced = [record_of(m).trace for m in models]
    meta = any(p.is_meta for module in modules for p in module.parameters())

    def trace_on(device: torch.device | None) -> list[tracing.Trace]:
        with sync_batch_norm.alone(models) if device is None else nullcontext():
            return tracing.trace_models(
                modules,
                lambda: run_traced(device),
                times=any(options.times for options in traced),
                memory=any(options.memory for options in traced),
                meta=meta,
                check=partial(_check_collective, rt),
            )

    home = rt.home
    if home is None or meta:
        return trace_on(None)
    if all(options.device == "gpu" for options in traced):
        try:
            return _traced_at(home, [*placed, *modules], trace_on)
        except torch.OutOfMemoryError:
            for module in modules:
                device_placement.move_back(module, home)
            why = f"the whole model does not fit on {home}"
            warnings.warn(f"smp: {why}; tracing on the CPU", stacklevel=2)
            return trace_on(None)
    try:
        return trace_on(None)
    except tracing.CollectiveRefused:
        raise
    except Exception as error:  # noqa: BLE001 - the model's own
        why = f"the model cannot run on the CPU ({type(error).__name__}: {error})"
        warnings.warn(f"smp: {why}; tracing on {home}", stacklevel=2)
        return _traced_at(home, [*placed, *modules], trace_on)


def _check_collective(rt: Runtime, where: str, members: list[int]) -> None:
    """The tracing ranks must be able to meet in a collective called by a module itself.

    Raises:
        tracing.CollectiveRefused: they cannot; the text names ``where``.
    """
    if len(members) == 1:
        return
    shown = ", ".join(map(str, members))
    calls = f"smp: {where} calls a collective of its own over ranks {shown}"
    if not set(members) <= set(ranks.get_dp_group()):
        raise tracing.CollectiveRefused(
            f"{calls}, of which some run other parts of the model and do not come: use ranks "
            f"of this DP_GROUP ({ranks.get_dp_group()})"
        )
    if not rt.in_sequence:
        raise tracing.CollectiveRefused(
            f"{calls}, and with pipeline_parallel_degree={rt.pp_size} these run microbatches "
            "in orders of their own: set 'deterministic_server': True in the configuration"
        )


def _traced_at(
    home: torch.device,
    modules: list[nn.Module],
    trace_on: Callable[[torch.device | None], list[tracing.Trace]],
) -> list[tracing.Trace]:
    for module in modules:
        device_placement.move(module, home)
    return trace_on(home)


def _refuse_lazy_modules(root: nn.Module) -> None:
    """
    Raises:
        RuntimeError: a parameter gets its shape in the first forward; there each rank would
            draw values of its own.
    """
    for path, module in root.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and is_lazy(tensor):
                what = f"'{f'{path}.{name}'.lstrip('.')}' of a {type(module).__name__}"
                raise RuntimeError(
                    f"smp: {what} has no shape before the first forward, and ranks need it "
                    "before: call the model once, on every rank with the same seed, before "
                    "smp.DistributedModel"
                )


def _refuse_compiled_modules(root: nn.Module) -> None:
    """A ScriptModule runs in C++, without a way to call another rank.

    Raises:
        NotImplementedError: ``root`` is one, or has one.
    """
    for path, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"smp: module {path!r} is a torch.jit.ScriptModule ({module.original_name}), "
                "which cannot be part of a pipeline; wrap the plain module, or compile it with "
                "torch.compile"
            )


def _forward_state(one: LiveModel, trace: tracing.Trace | None) -> ForwardState:
    if trace is None:
        return ForwardState({}, {})
    attributes: dict[str, tuple[str, ...]] = {}
    buffers: dict[str, tuple[str, ...]] = {}
    for path, module in one.module.named_modules():
        seen = trace.modules[path]
        if seen.set_attributes:
            attributes[path] = seen.set_attributes
        # As in turns_of(): BatchNorm's may stay as they are in a traced evaluation.
        tracked = seen.executions > 0 and hasattr(module, "track_running_stats")
        names = tuple(module._buffers) if tracked else seen.changed_buffers
        if names:
            buffers[path] = names
    return ForwardState(attributes, buffers)


def _check_models(
    models: Sequence[LiveModel],
    partitions: Sequence[Partition],
    turns: Sequence[Turns],
) -> None:
    """Compare this rank's models and decisions with the other ranks'.

    Raises:
        PartitionMismatch: on every rank; the text names the first difference.
    """
    mine = _description(models, partitions, turns)
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    digests = objects.gather_bytes(_FIRST_STEP, CommGroup.WORLD, digest)
    if len(set(digests)) == 1:
        return
    everyone = [
        told.decode().split("\n")
        for told in objects.gather_bytes(_FIRST_STEP, CommGroup.WORLD, "\n".join(mine).encode())
    ]
    first = everyone[0]
    rank, other = next((i, lines) for i, lines in enumerate(everyone) if lines != first)
    pairs = itertools.zip_longest(first, other, fillvalue="nothing more")
    here, there = next(pair for pair in pairs if pair[0] != pair[1])
    raise PartitionMismatch(
        f"smp: the ranks have different models: rank 0 has {here}; rank {rank} has {there}"
    )


def _description(
    models: Sequence[LiveModel],
    partitions: Sequence[Partition],
    turns: Sequence[Turns],
) -> list[str]:
    """A line for each thing to be alike on all ranks."""
    lines = [f"{len(models)} models to partition, {len(partitions)} partitions"]
    for number, (one, partition, its) in enumerate(
        zip(models, partitions, turns, strict=False)
    ):
        for path, module in one.module.named_modules():
            where = f"on pp_rank {partition.rank_of.get(path, 'none')}"
            if (pin := pin_of(module)) is not None:
                where += f", pinned to {pin}"
            if path in its.modules:
                where += ", passed in order"
            lines.append(f"module '{path}' ({type(module).__name__}) {where}, model {number}")
            lines += [_line("parameter", path, *one) for one in module._parameters.items()]
            lines += [
                _line("buffer", path, name, buffer)
                for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            ]
    return lines


def _line(kind: str, path: str, name: str, tensor: Tensor | None) -> str:
    name = f"{path}.{name}" if path else name
    if tensor is None or is_lazy(tensor):
        return f"{kind} '{name}' without a value"
    dtype = str(tensor.dtype).removeprefix("torch.")
    slices = slices_of(tensor)
    shape = list(tensor.shape) if slices is None else slices.full_shape(tensor.shape)
    dtype += "" if slices is None else f", cut along axis {slices.axis}"
    frozen = ", frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{kind} '{name}' {shape} {dtype}{frozen}"
