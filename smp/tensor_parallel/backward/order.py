"""The order of modules' collectives in a step, alike on all ranks of the TP_GROUP.

The servers of the tp_ranks run requests in orders of their own, and microbatches overtake one
another.  So a module's collective has a key from the program alone.  It begins when the
TP_GROUP's other ranks begin the one with the same key (csrc/server/lineup.h).  While it is
under way this rank runs other tasks.

A module makes collectives in an autograd function::

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, path):
            ctx.call = order.Call.of_module(path)
            return _sum(x, ctx.call)

        @staticmethod
        def backward(ctx, gradient):
            return _sum(gradient, ctx.call.backward()), None


    def _sum(x, call):
        out = x.clone()
        call.run(lambda is_async: dist.all_reduce(out, group=tp_group, async_op=is_async))
        return out

Outside a step, while a model is traced, and without a pipeline, the order is the program's and
a collective is simply made.  Over ``smddp`` the collective then sends its key
(``smp.tensor_parallel.backward.keys``): ranks in different modules hear of it.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from smp import _core, ranks
from smp.collectives.objects import refuse_if_forked
from smp.collectives.process_group import ProcessGroup
from smp.tensor_parallel.backward import keys, step_end

_LOOK_S = 0.1  # between two looks for signals
_HEAR_S = 1.0  # for word of a failure known to another rank


class Call:
    """One call of a module with collectives, or the backward of one.

    All ranks of the TP_GROUP must make the call, and in it the same collectives.

    Args:
        path: the module's, alike on all ranks of the TP_GROUP.
        made: number, microbatch, phase and its task's number of earlier calls of the module;
            None where the program's order is the order.
        before: in that order, the number of the TP_GROUP's operations before the call.
        is_backward: in that order, whether it is the backward of one.
    """

    __slots__ = ("_backwards", "_before", "_collectives", "_is_backward", "_made", "_path")

    def __init__(
        self,
        path: str,
        made: tuple[int, int, int, int] | None,
        before: int = 0,
        is_backward: bool = False,
    ):
        self._path = path
        self._made = made
        self._before = before
        self._is_backward = is_backward
        self._collectives = 0
        self._backwards = 0

    @property
    def path(self) -> str:
        """The module's."""
        return self._path

    @staticmethod
    def of_module(path: str | int) -> "Call":
        """A call of the module, beginning now.

        Raises:
            RuntimeError: in a step, by a thread of the script.
        """
        path = str(path)
        made = _core.distributed_call(path)
        return Call(path, made, _begun() if made is None else 0)

    def backward(self) -> "Call":
        """The backward of this call, from its autograd node; one more with each run."""
        made = None
        if self._made is not None:
            number, microbatch, _, call = self._made
            number = _core.mix(_core.mix(number, _BACKWARD), self._backwards)
            made = number, microbatch, _BACKWARD, call
        before = self._before + self._backwards
        self._backwards += 1
        return Call(self._path, made, before, is_backward=True)

    def run(self, start: Callable[[bool], dist.Work | None]) -> None:
        """Begin a collective at its turn, and wait for its end.

        Args:
            start: begins it on the TP_GROUP; told whether it is to return without waiting
                (``async_op``).

        Raises:
            RuntimeError: in a backward not begun by ``model.backward``.
            Exception: raised by ``start``, or the operation's error.
        """
        collective = self._collectives
        self._collectives += 1
        if self._made is None:
            job = ranks.state.job("smp")
            refuse_if_forked(f"smp: module '{self._path}'", job.boot.rank, job.pid)
            try:
                self._run_in_order(start, collective)
            except Exception as error:
                step_end.hear(self._in_words(), error)
                raise
            return
        turn = _core.line_up(*self._made, collective, self._path)
        work = start(True)
        turn.issued()
        if work is None or work.is_completed():
            turn()
        else:
            work.get_future().add_done_callback(turn)
        turn.wait()
        if work is not None:
            try:
                work.wait()
            except Exception as error:
                if step_end.is_mismatch(error):
                    _core.hear_failure(_HEAR_S)
                raise

    def _run_in_order(self, start: Callable[[bool], dist.Work | None], collective: int) -> None:
        """Make a collective, with its key where the backend takes one."""
        group: Any = ranks.get_tp_process_group()
        _core.moved()
        if not isinstance(group, ProcessGroup):
            start(False)
            return
        phase = _BACKWARD if self._is_backward else _FORWARD
        group.key = keys.of_collective(self._path, phase, self._before, collective)
        try:
            start(False)
        finally:
            group.key = 0

    def _in_words(self) -> str:
        rt = ranks.state.runtime
        of_step = ""
        if rt is not None and rt.step.is_under_way:
            of_step = f"microbatch {rt.step.microbatch}, "
        phase = "backward" if self._is_backward else "forward"
        return f"module '{self._path}' ({of_step}{phase})"


_FORWARD = _core.phases.index("forward")
_BACKWARD = _core.phases.index("backward")


def _begun() -> int:
    """The number of operations begun by the TP_GROUP: the same on each of its ranks."""
    if not ranks.state.is_initialized:
        return 0
    group: Any = ranks.get_tp_process_group()
    return group.issued() if isinstance(group, ProcessGroup) else 0


def await_ends() -> tuple[int, int, int]:
    """Wait until the ranks of this pp_rank have ended the failed step.

    Returns:
        the number of collectives begun by this one, and the fewest and the most of any.
    """
    ended = None
    while ended is None:  # a signal raises here
        ended = _core.collectives_ended(_LOOK_S)
    return ended


def finish_failed_step() -> None:
    """Bring the TP_GROUP's ranks, after a failed step, to one number of collectives.

    Some ranks had begun collectives out of reach for the others.  The others call another
    operation in their place: they end, with an error heard by no rank.  Collective over the
    TP_GROUP: its ranks all fail the step.

    Raises:
        RuntimeError: the group's backend cannot do this.
    """
    own, fewest, most = await_ends()
    if fewest == most:
        return
    group: Any = ranks.get_tp_process_group()
    if not isinstance(group, ProcessGroup):
        raise RuntimeError(
            "smp: the step failed within collectives of distributed modules, which the backend "
            f"'{dist.get_backend(group)}' cannot end: this job cannot go on "
            "(ddp_dist_backend='smddp' can)"
        )
    for _ in range(own, most):
        dist.barrier(group, async_op=True)
