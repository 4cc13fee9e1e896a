"""Start and end of the job on this rank: ``smp.init``, ``smp.shutdown``.

``init`` finds the other ranks, agrees with them on the configuration, forms the groups and
starts the core.  From then on an uncaught exception ends the job.  ``shutdown`` undoes these
steps in reverse and never waits for another rank.
"""

import atexit
import json
import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from smp import _core, amp
from smp._version import __version__
from smp.collectives import torch_process_groups
from smp.job import bootstrap, config
from smp.job.bootstrap import Bootstrap, OverMPI
from smp.job.config import Config, ConfigError
from smp.job.job_end import Watch
from smp.job.placement import AXES_OF_GROUP, Placement
from smp.precision import loss_scale
from smp.sharding import owners
from smp.start import core_session, whereabouts
from smp.state_mod import Job, state
from smp.tensor_parallel.backward import norms


def init(config: Mapping[str, Any] | None = None) -> None:
    """Start the library.  Every rank calls it; a second call is a no-op.

    Args:
        config: parameters by name; the environment may override them (`smp.job.config`).

    Raises:
        ConfigError: a wrong configuration, or one that differs between ranks; then on every
            rank.
        NotImplementedError: a parameter is not built yet.
        RuntimeError: the ranks cannot be connected.
    """
    if state.is_initialized:
        _warn_of_another(config)
        return
    _core.share_heap()  # before other threads allocate
    boot = bootstrap.connect()
    _core.log_rank(boot.rank)
    _core.log(
        f"{boot.size} ranks, found by {type(boot).__name__}; host {boot.host} of {boot.hosts}, "
        f"rank {boot.local_rank} of its {boot.local_size}"
    )
    _stop_failed()
    with ExitStack() as undo:
        watch = Watch(boot)
        undo.push(lambda kind, *_: _end_watch(watch, kind))
        watch.start()
        cfg = _agreed(boot, config)
        placement = Placement(
            boot.size,
            cfg.pipeline_parallel_degree,
            cfg.tensor_parallel_degree,
            cfg.placement_strategy,
        )
        torch_groups = torch_process_groups.form(boot, placement, cfg)
        undo.callback(torch_process_groups.destroy, torch_groups)
        groups = {kind: placement.group(kind, boot.rank) for kind in AXES_OF_GROUP}
        job = Job(cfg, boot, placement, groups, torch_groups)
        state.begin(job)
        undo.callback(state.end)
        undo.callback(core_session.stop, job.runtime)
        undo.callback(loss_scale.forget)
        undo.callback(owners.forget)
        if len(groups["mp"]) > 1 or cfg.fp16 or owners.is_on():
            undo.callback(norms.take_the_models_norm_from_now())
        if len(groups["mp"]) > 1 or owners.is_on():
            undo.callback(amp.agree_from_now())
        core_session.start(job.runtime)
        if boot.size > 1:
            undo.enter_context(whereabouts.shared(job))
        job.undo = undo.pop_all()


def is_initialized() -> bool:
    """Between ``smp.init`` and ``smp.shutdown``."""
    return state.is_initialized


def shutdown() -> None:
    """Stop the library on this rank; ``init`` may follow.  Never waits for other ranks.

    Also runs when the interpreter exits.  In a forked child it does nothing: the child
    is not a rank.
    """
    _stop_failed()
    if state.is_initialized:
        job = state.job("smp.shutdown()")
        if job.pid == os.getpid():
            job.undo.close()


def reset() -> None:
    """For tests: shut down, and forget the warnings given."""
    shutdown()
    config.forget_warnings()


# Watches of failed calls of init: an uncaught exception ends the job.  MPI would else hold up
# the end until all ranks reach theirs.  A configuration refused on all ranks is shown by one.
_failed_watches: list[Watch] = []


def _end_watch(watch: Watch, failed: type[BaseException] | None) -> None:
    if failed and (isinstance(watch.boot, OverMPI) or issubclass(failed, ConfigError)):
        _failed_watches.append(watch)
    else:
        watch.stop()


def _stop_failed() -> None:
    while _failed_watches:
        _failed_watches.pop().stop()


def _warn_of_another(given: Mapping[str, Any] | None) -> None:
    job = state.job("smp.init()")
    before, now = job.cfg.as_texts(), config.load(given, job.boot.size).as_texts()
    changes = [
        f"{key}={now[key]} (was {before[key]})" for key in now if now[key] != before[key]
    ]
    if given and changes:
        warnings.warn(
            f"smp.init() was called before; the new {', '.join(changes)} has no effect",
            stacklevel=3,
        )


def _agreed(boot: Bootstrap, given: Mapping[str, Any] | None) -> Config:
    """The configuration, after a check for the same one on every rank.

    A rank with a refused configuration tells the others: else these would wait.
    """
    error: ValueError | NotImplementedError | None = None
    try:
        cfg = config.load(given, boot.size)
    except (ConfigError, NotImplementedError) as refused:
        error = refused
        mine: dict[str, Any] = {"error": [type(refused).__name__, str(refused)]}
    else:
        mine = {"texts": {**cfg.as_texts(), "version": __version__}}
    everyone = [json.loads(b) for b in boot.allgather_bytes(json.dumps(mine).encode())]
    if error is not None:
        raise error
    for rank, other in enumerate(everyone):
        if "error" in other:
            kind, said = other["error"]
            raise {"NotImplementedError": NotImplementedError}.get(kind, ConfigError)(
                f"on rank {rank}: {said}"
            )
    differences = []  # all of them: one value may follow from another
    for key in mine["texts"]:
        values: dict[str, list[int]] = {}
        for rank, other in enumerate(everyone):
            values.setdefault(other["texts"][key], []).append(rank)
        if len(values) > 1:
            differences += [f"{key}={value} on {_ranks(on)}" for value, on in values.items()]
    if differences:
        raise ConfigError(f"the ranks' configurations differ: {'; '.join(differences)}")
    return cfg


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _end() -> None:
    """At the interpreter's exit."""
    bootstrap.look_for_the_dead()
    shutdown()


atexit.register(_end)
