"""Data parallelism: the replicas of a model compute the same gradients.

The exchange and its order are in ``smp.data_parallel.reduction``.  The semantics are those of
torch's DistributedDataParallel:

- before the first step all replicas get the parameters and buffers of the first one;
- after a step, or after ``loss.backward()`` outside one (pipeline degree 1), the ``.grad`` of
  each parameter is the average over the replicas.  *All* of ``.grad`` is averaged, with the
  gradients of steps under ``no_sync()``.  An average of before is alike on all replicas and so
  stays;
- a replica with an unused parameter adds zeros; where no replica used it, ``.grad`` stays None;
- steps under ``torch.no_grad()``, and steps in evaluation mode without a backward,
  exchange nothing: one replica may evaluate alone (not with ``deterministic_server``).

All replicas make the same steps, with the same models under ``no_sync()``.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.utils.hooks import unserializable_hook

from smp.collectives import objects
from smp.data_parallel.buckets import Bucket, make_buckets, sparse_tables
from smp.data_parallel.group import Holders, Layout, Replicas, gradient_dtype
from smp.data_parallel.reduction import Reduction
from smp.modules import live_models
from smp.modules.live_models import LiveModel, record_of
from smp.precision import masters
from smp.ranks import CommGroup
from smp.runtime import microbatches
from smp.sharding import owners
from smp.sharding.shards import may_keep_averages
from smp.slicing.parameter_marks import attach_hooks
from smp.slicing.slices import is_scaled_batch
from smp.slicing.split_parameters import among_slices
from smp.state_mod import state

CommHook = Callable[[Any, Bucket], "torch.futures.Future[Any]"]


class DataParallel:
    """One model's part in the exchange.

    Args:
        model: its local parameters and buffers are exchanged.
        overlapping_allreduce: send gradients while backward still runs.
        backward_passes_per_step: only each so many-th step is followed by an exchange,
            of the sum of their gradients.
        bucket_cap_mb: MiB of gradients in a bucket.
        broadcast_buffers: each exchange begins with the first replica's buffers.
        gradient_as_bucket_view: ``.grad`` is part of a bucket's memory, from its making by
            backward on: no copies are made; buckets are then sent after backward.

    Attributes:
        reduction: the exchange under way.
        hook, hook_state: registered in place of the sum.
        is_joining: inside ``join()``.
        additions: by id of the parameter, the most additions by an exchanged backward.
        has_averages: the gradients are those of an exchange, so far.
        keeps_apart_at_once: the ledger does not tell of additions to a gradient already sent.
    """

    def __init__(
        self,
        model: LiveModel,
        overlapping_allreduce: bool,
        backward_passes_per_step: int,
        bucket_cap_mb: float,
        broadcast_buffers: bool,
        gradient_as_bucket_view: bool,
    ):
        if backward_passes_per_step < 1:
            raise ValueError(
                "smp.DistributedModel: backward_passes_per_step is at least 1, not "
                f"{backward_passes_per_step}"
            )
        if bucket_cap_mb <= 0:
            raise ValueError(
                f"smp.DistributedModel: bucket_cap_mb is above 0, not {bucket_cap_mb}"
            )
        # Weak, as the hooks below: a model ends with its last reference, on all replicas
        # at the same place of the script.
        self._model: LiveModel = weakref.proxy(model)  # type: ignore[assignment]
        self.replicas = Replicas()
        self._overlaps = overlapping_allreduce and not gradient_as_bucket_view
        self.broadcasts_buffers = broadcast_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.hook: CommHook | None = None
        self.hook_state: Any = None
        self.is_joining = False
        self.has_averages = False
        self.reduction: Reduction | None = None
        self.additions: dict[int, int] = {}
        self._rt = record_of(model).rt
        self.keeps_apart_at_once = self._rt.pp_size > 1
        self._bucket_cap_mb = bucket_cap_mb
        self._passes_per_step = backward_passes_per_step
        self._passes = 0
        self._synchronises = True
        self._divides_by_all = True
        # Names of those with gradients of the replica's own, of steps without an exchange.
        self._owing: set[str] = set()
        self._names: list[str] = []  # of the buckets' parameters
        self._may_owe: list[str] = []  # of a forward outside a step, until its backward
        self._buckets: list[Bucket] = []
        self._built_for: list[tuple] | None = None
        self._bucket_of: dict[int, Bucket] = {}
        self._grad_hooks: list[Any] = []
        self._last_active: int | None = None

    @property
    def overlaps(self) -> bool:
        """Whether to send gradients while backward still runs.

        Sparse ones wait for all replicas, and so does a gather of parameters in backward.
        """
        live = record_of(self._model).live_parameters
        waits = live is not None and live.is_tight and any(b.sparse for b in self._buckets)
        return self._overlaps and not waits

    # ---------------------------------------------------------------- the exchange

    def broadcast(self) -> None:
        """Give all replicas the first one's parameters and buffers.  Collective.

        Raises:
            ReplicasDiffer: on every replica; names the first difference.
        """
        objects.gather_bytes("smp.DistributedModel", CommGroup.DP_GROUP)
        named = [*self._model.local_named_parameters(), *self._model.local_named_buffers()]
        self.replicas.check_alike(Layout.of(named))
        self._broadcast_from(0)

    def _broadcast_from(self, source: int) -> None:
        tensors = [*self._model.local_parameters(), *self.buffers()]
        self.replicas.broadcast([t for t in tensors if not t.is_meta], source)
        masters.take_values_of(self._model.local_parameters())

    def buffers(self) -> list[Tensor]:
        """The buffers, alike on all replicas."""
        return [b for b in self._model.local_buffers() if not b.is_meta]

    def buckets(self) -> list[Bucket]:
        """The buckets of the parameters to exchange now."""
        self._prepare()
        return self._buckets

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The local parameters to exchange, in order of definition: those with requires_grad
        now, or in a step without an exchange since the last one.
        """
        named = self._model.local_named_parameters()
        return [(n, p) for n, p in named if p.requires_grad or n in self._owing]

    def has_exchanged(self) -> None:
        """An exchange is over."""
        self._owing.clear()

    def divisor(self, active: int) -> int:
        """The divisor of sums; ``active``: replicas with inputs left."""
        return self.replicas.size if self._divides_by_all else active

    def _prepare(self) -> None:
        self.assign_owners()
        named = self.named_parameters()
        computed = next((name for name, p in named if not p.is_leaf), None)
        if computed is not None:
            raise RuntimeError(
                f"smp: in the place of parameter {computed!r} is a computed tensor, as "
                "torch.func.functional_call puts it there, and the replicas average the "
                "gradients of parameters: make this call of the model in a @smp.step, or in "
                "the forward of a module of the model"
            )
        parameters, self._names = [p for _, p in named], [n for n, _ in named]
        # A conversion may exchange the tensor behind a parameter, and the hooks with it.
        now = [
            (
                *(id(p), p._cdata, p.dtype, gradient_dtype(p), p.device),
                *(owners.parts_of(p), may_keep_averages(p)),
            )
            for p in parameters
        ]
        if now == self._built_for:
            return
        self._built_for, self.additions = now, {}
        self._buckets = make_buckets(
            self._model.module,
            parameters,
            self._bucket_cap_mb,
            self._holders_of,
            self.gradient_as_bucket_view,
        )
        if self._rt.pp_size == 1:
            for handle in self._grad_hooks:
                handle.remove()
            self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters()}
            trained = (p for p in parameters if p.requires_grad)
            self._grad_hooks = [hook for p in trained for hook in self._watch_gradient(p)]

    def assign_owners(self) -> None:
        """Give owners to this rank's parameters, once it is known which these are."""
        if owners.is_on() and (self._rt.pp_size == 1 or self._model.partitioned):
            sparse = sparse_tables(self._model.module)
            owners.assign([p for _, p in self.named_parameters()], sparse)

    def spread_averages(self, back: bool = False) -> None:
        """Gradients are about to grow: make the replicas' mean the averages of the owners.

        Args:
            back: they have not grown.
        """
        self.has_averages = back
        replicas = len(self.replicas.of_slices.ranks)
        for bucket in self._buckets:
            if bucket.parts is None:
                continue
            is_here = owners.part_here(bucket.parts) is not None
            for parameter in bucket.parameters():
                if parameter.grad is not None and is_here:
                    parameter.grad.mul_(1 / replicas if back else replicas)
                elif parameter.grad is not None:
                    parameter.grad = None

    def _watch_gradient(self, parameter: nn.Parameter) -> list[Any]:
        """Hooks before and after each addition to a gradient; returns their handles."""
        this, its_parameter = weakref.ref(self), weakref.ref(parameter)

        @unserializable_hook
        def will_accumulate(gradient: Tensor | None) -> None:
            living, parameter = this(), its_parameter()
            if living is not None and living.has_averages:
                with torch.no_grad():
                    living.spread_averages()
            if living is not None and living.reduction is not None and parameter is not None:
                living.reduction.keep_apart(parameter)

        def accumulated(parameter: Tensor) -> None:
            if (living := this()) is not None:
                living._accumulated(parameter)

        attach_hooks(parameter)
        return [
            parameter.register_hook(will_accumulate),
            parameter.register_post_accumulate_grad_hook(accumulated),
        ]

    def _holders_of(self, parameter: nn.Parameter) -> Holders:
        if is_scaled_batch(parameter):
            return self.replicas.of_slices
        return self.replicas.of_all

    # ---------------------------------------------------------- without the C core's ledger

    @among_slices
    def _accumulated(self, parameter: Tensor) -> None:
        """A backward added to ``.grad``; pipeline degree 1."""
        step = self._rt.step
        step.saw_backward = True
        self._bucket_of[id(parameter)].adopt(parameter)
        if self.reduction is None:
            self._owing.update(self._may_owe)
            self._may_owe = []
            return
        if not step.is_under_way:
            self._finish_with_backward()
        # In a step, gradients grow until the last backward of the last microbatch.
        if self.reduction.is_launched(parameter) or step.in_last_backward():
            self.reduction.complete(parameter)

    def forward_outside_step(self, forward: Callable[[], Any]) -> Any:
        """Run a forward with an exchange after its backward (pipeline degree 1)."""
        if not torch.is_grad_enabled():
            return forward()
        rt = self._rt
        objects.refuse_if_forked("smp.DistributedModel.forward", rt.boot.rank, rt.pid)
        with_buffers = self.broadcasts_buffers and self._model.training
        inside = torch._C._current_graph_task_id() != -1
        if self.reduction is None:
            if not self._counts_as_last():
                self._prepare()
                self._may_owe = self._names
                return forward()
            begin([self], with_buffers)
        elif self._has_changed() and not inside:
            if self.is_joining:
                error = RuntimeError(
                    "smp: parameters were thawed inside of join(), after a forward without a "
                    "backward: replicas without inputs cannot know; thaw them before join(), "
                    "or make that forward under torch.no_grad()"
                )
                finish(self.reduction, error)
            self.reduction.active()  # ends what the others send with it
            begin([self], with_buffers)
        elif with_buffers and self._synchronises and not self.is_joining:
            self.reduction.exchange_buffers()
        return microbatches.map_tensors(forward(), self._watch)

    def _has_changed(self) -> bool:
        """Whether the exchange under way lacks parameters to train now: a forward began it, no
        backward came, and the script thawed some meanwhile.  Those of before may still get
        gradients, by a backward of that forward.
        """
        named = self._model.local_named_parameters()
        if all(
            id(p) in self._bucket_of
            for _, p in named
            if p.requires_grad and isinstance(p, nn.Parameter)
        ):
            return False
        named = self._model.local_named_parameters()
        self._owing.update(n for n, p in named if id(p) in self._bucket_of)
        return True

    def end_what_a_backward_left(self) -> None:
        """A forward outside of a step begins: end the exchange left by a backward's exception.
        The other replicas wait.

        Raises:
            RuntimeError: an exchange was left, and now has failed on every replica.
        """
        reduction, inside = self.reduction, torch._C._current_graph_task_id() != -1
        if reduction is not None and reduction.finishes_with_backward and not inside:
            if (live := record_of(self._model).live_parameters) is not None:
                live.tell_of_failure()
            finish(
                reduction,
                RuntimeError(
                    "smp: the backward before this forward raised, so its gradients were not "
                    "averaged over the replicas; put it into a @smp.step, which fails on all "
                    "of them at once"
                ),
            )

    def _watch(self, output: Tensor) -> Tensor:
        """Note when backward comes to an output of the model.

        From an output the end of the whole backward can be seen; from a parameter it cannot: a
        reentrant checkpoint runs a backward of its own.
        """
        if output.requires_grad:
            output.register_hook(self._hear_backward)
        return output

    def _hear_backward(self, gradient: Tensor) -> None:
        """A backward has come to an output.  The exchange does not await one for other
        gradients than the parameters', as that of ``torch.autograd.grad``.
        """
        reduction = self.reduction
        if reduction is None or reduction.finishes_with_backward:
            return
        if self._is_for_parameters():
            self._finish_with_backward()

    def _is_for_parameters(self) -> bool:
        """Whether the backward under way adds to the first parameter behind the output; also
        without any parameter there.
        """
        nodes = [torch._C._current_autograd_node()]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            if id(getattr(node, "variable", None)) in self._bucket_of:
                try:
                    return torch._C._will_engine_execute_node(node)
                except RuntimeError:  # torch.autograd.grad takes this one's
                    return False
            found = [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(found)
            nodes += found
        return True

    def _finish_with_backward(self) -> None:
        reduction = self.reduction
        if reduction is None or reduction.finishes_with_backward:
            return
        reduction.finishes_with_backward = True
        Variable._execution_engine.queue_callback(lambda: self._end_backward(reduction))

    def _end_backward(self, reduction: Reduction) -> None:
        live, error = record_of(self._model).live_parameters, None
        try:
            if live is not None:
                live.meet()
        except Exception as failure:  # noqa: BLE001 - the other replicas hear of it
            error = failure
        finish(reduction, error)

    # ------------------------------------------------------------ the user's settings

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Steps in the block leave ``.grad`` as it is; see DistributedModel.no_sync."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Have ``hook(state, bucket)`` exchange a bucket, in place of the sum."""
        if not callable(hook):
            raise TypeError(f"smp: a communication hook is a function, not {hook!r}")
        if self.hook is not None:
            raise RuntimeError("smp: the model has a communication hook already")
        self.hook, self.hook_state = hook, state

    @contextmanager
    def join(self, divide_by_all: bool, raise_early: bool) -> Iterator[None]:
        """Keep the others company once this replica has no inputs left."""
        if self._rt.in_sequence:
            raise NotImplementedError(
                "smp: join() with deterministic_server=True, where all replicas make the same "
                "steps: give each replica as many batches"
            )
        if owners.is_on():
            raise NotImplementedError(
                f"smp: join() with {owners.asked_for()}: a replica without inputs would "
                "not update the parameters that it owns; give each replica as many batches"
            )
        if sum(1 for m in live_models.living() if record_of(m).replicas) > 1:
            raise NotImplementedError(
                "smp: join() with several DistributedModels: which of them the other "
                "replicas use in a step is not known here; give each replica as many batches"
            )
        self.is_joining, self._divides_by_all = True, divide_by_all
        self._raises_early, self._last_active = raise_early, None
        try:
            yield
            self._accompany()
        finally:
            self.is_joining, self._divides_by_all = False, True

    def _accompany(self) -> None:
        """Take part in the others' exchanges, with nothing to give, until the last."""
        while True:
            reduction = Reduction([self], with_buffers=False, joined=True)
            if not reduction.active():
                break
            if self._raises_early:
                self._stop(reduction)
            self._check_tp_groups(reduction)
            self._last_active = reduction.active()[0]
            if reduction.with_buffers():
                reduction.exchange_buffers()
            reduction.finish()
        if self._last_active is not None:
            self._broadcast_from(self._last_active)

    def note_active(self, reduction: Reduction) -> None:
        """An exchange inside ``join`` begins: note the replicas in it."""
        self._check_tp_groups(reduction)
        self._last_active = reduction.active()[0]
        if self._raises_early and len(reduction.active()) < self.replicas.size:
            self._stop(reduction)

    def _check_tp_groups(self, reduction: Reduction) -> None:
        """The ranks of a TP_GROUP work together, and so must have as many inputs.

        Raises:
            RuntimeError: on every rank; a TP_GROUP has lost one of its ranks.
        """
        place = state.job("join").placement
        replicas: dict[int, list[int]] = {}
        for dp_rank, rank in enumerate(self.replicas.global_ranks):
            replicas.setdefault(place.coordinates(rank).rdp, []).append(dp_rank)
        for together in replicas.values():
            ended = sorted(set(together) - set(reduction.active()))
            if ended and len(ended) < len(together):
                raise RuntimeError(
                    f"smp: join(): dp_rank {', '.join(map(str, ended))} ran out of inputs "
                    f"before the other ranks of its TP_GROUP (dp_ranks {together}), which work "
                    "on each other's samples: give the ranks of a TP_GROUP as many batches"
                )

    def _stop(self, reduction: Reduction) -> None:
        gone = sorted(set(range(self.replicas.size)) - set(reduction.active()))
        raise RuntimeError(
            f"smp: dp_rank {', '.join(map(str, gone))} ran out of inputs, and join() was "
            "called with throw_on_early_termination=True"
        )

    def takes_part(self) -> bool:
        """Whether an exchange follows the step beginning now; counts steps."""
        if self._counts_as_last():
            return True
        self._prepare()
        self._owing.update(self._names)
        return False

    def _counts_as_last(self) -> bool:
        """Whether an exchange follows this step or backward; counts them."""
        if not self._synchronises:
            return False
        self._passes = (self._passes + 1) % self._passes_per_step
        return self._passes == 0


def members_of(models: Sequence[LiveModel]) -> list[DataParallel]:
    """The models' parts in exchanges; models without replicas have none."""
    members = (record_of(model).replicas for model in models)
    return [member for member in members if member is not None]


def due(models: Sequence[LiveModel]) -> list[DataParallel]:
    """The models to exchange gradients after the step beginning now; counts steps."""
    return [member for member in members_of(models) if member.takes_part()]


def assign_owners() -> None:
    """Give owners to parameters of models that have their replicas, outside of steps."""
    for member in members_of(live_models.living()):
        member.assign_owners()


@among_slices
@torch.no_grad()
def spread_averages(models: Sequence[LiveModel]) -> list[DataParallel]:
    """A step of a pipeline begins.

    Returns:
        the models whose gradients it changes, for `take_back_averages`.
    """
    members = [member for member in members_of(models) if member.has_averages]
    for member in members:
        member.spread_averages()
    return members


@among_slices
@torch.no_grad()
def take_back_averages(members: Sequence[DataParallel]) -> None:
    """The step has ended without a backward."""
    for member in members:
        member.spread_averages(back=True)


def watch(models: Sequence[LiveModel]) -> None:
    """A step begins: an exchange follows its backward, if any."""
    for member in members_of(models):
        member._prepare()


@among_slices
def begin(members: Sequence[DataParallel], with_buffers: bool = True) -> Reduction | None:
    """A step with an exchange of gradients after it begins.  Collective.

    Args:
        members: the models taking part, in order of creation; none: returns None.
    """
    if not members:
        return None
    reduction = Reduction(members, with_buffers)
    _keep_order(reduction)
    for member in members:
        if member.is_joining:
            member.note_active(reduction)
    if with_buffers:
        reduction.exchange_buffers()
    for member in members:
        member.reduction = reduction
    return reduction


def _keep_order(reduction: Reduction) -> None:
    """Exchanges of several models at a time, outside of steps, send after their backwards:
    before, each sends when it has room, which comes at another time on each replica.
    """
    members = members_of(live_models.living())
    others = [m.reduction for m in members if m.reduction is not None]
    for one in (reduction, *others) if others else ():
        one.send_after_backward()


@among_slices
def finish(
    reduction: Reduction,
    error: BaseException | None = None,
    description: tuple | None = None,
) -> None:
    """The step is over; see :meth:`Reduction.finish`."""
    for member in reduction.members:
        member.reduction = None
        if error is None and member.has_averages:  # there was no backward
            with torch.no_grad():
                member.spread_averages()
    try:
        reduction.finish(error, description)
    finally:
        for member in reduction.members:
            member.has_exchanged()
