"""A decided partition, applied: this rank's part of the model with its classes and entries."""

from smp import marks
from smp.checkpointing import activation_checkpointing, users_checkpoints
from smp.modules import (
    delayed_init,
    device_placement,
    late_hooks,
    late_modules,
    microbatch_attributes,
    parametrizations,
    remote_modules,
)
from smp.modules.gates import Turns
from smp.modules.live_models import LiveModel, Parts, record_of
from smp.partitioning.partition import Partition
from smp.runtime import forward_attributes
from smp.runtime.forward_attributes import ForwardState
from smp.runtime_state import CoreTables
from smp.tensor_parallel.backward import gradients


def apply(model: LiveModel, partition: Partition, turns: Turns, when_run: ForwardState) -> None:
    """Make this rank's part of a decided partition: classes, parameters, entries.

    Args:
        turns: the places passed by microbatches in order.
        when_run: other changes of its modules when run.
    """
    record = record_of(model)
    rt, root, rank_of = record.rt, model.module, partition.rank_of
    owners = remote_modules.parameter_owners(root, rank_of)
    delayed_init.materialize(
        root,
        lambda name: owners[name] == rt.pp_rank,
        lambda path: rank_of[path] == rt.pp_rank,
    )
    if rt.tp_size > 1:
        gradients.scale(root)  # of parameters with fresh values
    entries, runs = remote_modules.make_entries(
        root, rank_of, activation_checkpointing.run_groups
    )
    stateful = [
        module
        for path, module in root.named_modules()
        if path in turns.modules and rank_of[path] == rt.pp_rank
    ]
    gates = _make_gates(model, turns, rt.tables)
    remote_modules.swap_classes(
        root,
        rank_of,
        rt.pp_rank,
        runs,
        {path: gates[number] for path, number in turns.modules.items()},
    )
    if rt.pp_rank == 0:
        forward_attributes.warn_of_shared(root, when_run.attributes, rank_of)
    forward_attributes.watch(root, when_run.attributes)
    microbatch_attributes.keep_apart(
        root,
        {path for path, rank in rank_of.items() if rank == rt.pp_rank},
        turns,
        gates,
        record.split_paths,
    )
    remote_modules.free_remote_parameters(root, owners, rt.pp_rank)
    remote_modules.mark_remote_buffers(root, rank_of, rt.pp_rank, when_run.buffers)
    changing = {*when_run.attributes, *when_run.buffers}
    late_modules.refuse_from_now(root)
    late_modules.refuse_from_now(model)  # the same children
    late_hooks.notice_from_now(root, gates[-1], rt.pp_rank == 0)
    users_checkpoints.number_alike()
    parametrizations.keep_apart()
    chainable = remote_modules.chainable(root, entries, turns, changing)
    if rt.tp_size > 1:
        collective = remote_modules.collective(root, entries)
    else:
        collective = [False] * len(entries)
    record.parts = Parts(
        partition, owners, entries, chainable, collective, runs, when_run.buffers, stateful
    )
    if rt.home is not None:
        device_placement.move(root, rt.home, set(model.local_modules()))


def _make_gates(model: LiveModel, turns: Turns, tables: CoreTables) -> list[int]:
    """The numbers in this job of the model's gates, and of one more.

    A microbatch passes that one at the end of its forward.  The number of a microbatch's
    passes is unknown where another model's trace saw another number of calls.
    """
    named = dict(model.module.named_modules())
    expected = list(turns.expected)
    for path, gate in turns.modules.items():
        earlier = named[path].__dict__.get(marks.GATE)
        if earlier is not None and tables.gates[earlier] != expected[gate]:
            expected[gate] = 0
    first = len(tables.gates)
    tables.gates.extend((*expected, 0))
    return list(range(first, len(tables.gates)))
