"""One exchange of gradients among the replicas, from the begin of a step to its end.

The exchange sends, in this order on every replica:

1. the header: each replica's layout of gradients, whether it takes part and whether it
   wants buffers;
2. buffers of modules, from the first replica taking part, if one wants them;
3. the buckets, each as soon as backward has completed its gradients and those of the
   buckets before it;
4. the report: the failed replicas, the parameters with a gradient, and the buckets to send
   again, for gradients added after they were sent.

A bucket is a copy of gradients, in memory reused by the next one: two are on their way at most,
and the next waits for the first to arrive.  Backward does not wait: buckets without room are
sent later.  An arrived bucket becomes the ``.grad`` of its parameters, in new memory where
there was none before the step: the engine may still need the memory of a fresh gradient.

A parameter is complete after as many additions by backward as ever before: reentrant
checkpoints add several times.  So nothing is sent in the first backward before its end.  A
further addition is kept apart and sent by itself.

A failed replica sends zeros for the rest, so no replica waits.  Gradients are summed, then
divided once.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp import _core, ranks
from smp.collectives.work import AllOf
from smp.data_parallel.buckets import Bucket, Memory
from smp.data_parallel.group import Layout, Replicas, ReplicasDiffer
from smp.runtime import failures
from smp.sharding.owners import part_here
from smp.sharding.shards import has_gradient, keep_averages
from smp.tensor_parallel.backward import unused_collectives
from smp.tensor_parallel.backward.step_end import PeerFailed

MOST_ON_THEIR_WAY = 2  # buckets


class Member(Protocol):
    """A `smp.data_parallel.data_parallel.DataParallel`, as an exchange knows it."""

    replicas: Replicas
    broadcasts_buffers: bool
    gradient_as_bucket_view: bool
    keeps_apart_at_once: bool
    has_averages: bool
    additions: dict[int, int]
    hook: Callable[[Any, Any], Any] | None
    hook_state: Any
    reduction: "Reduction | None"

    @property
    def overlaps(self) -> bool: ...
    def buckets(self) -> list[Bucket]: ...
    def buffers(self) -> list[Tensor]: ...
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]: ...
    def divisor(self, active: int) -> int: ...
    def spread_averages(self, back: bool = False) -> None: ...
    def has_exchanged(self) -> None: ...


class Reduction:
    """An exchange under way.

    Args:
        members: the models taking part, in order of creation.
        with_buffers: this replica's step begins with the first one's buffers.
        joined: this replica has no inputs left and only keeps the others company.
    """

    def __init__(self, members: Sequence[Member], with_buffers: bool, joined: bool = False):
        self.members = members
        self.replicas = members[0].replicas
        # Backward reaches the last model first.
        self._buckets = [(m, b) for m in reversed(members) for b in m.buckets()]
        self._place = {
            id(p): i for i, (_, b) in enumerate(self._buckets) for p in b.parameters()
        }
        self._additions: Counter[int] = Counter()  # by id of the parameter
        self._missing = [{id(p) for p in b.parameters()} for _, b in self._buckets]
        self._had: dict[Tensor, bool] = {
            p: has_gradient(p) for _, b in self._buckets for p in b.parameters()
        }
        self._overlaps = all(m.overlaps for m in members)
        self._joined = joined
        self._wants_buffers = with_buffers and any(m.broadcasts_buffers for m in members)
        unused_collectives.begin_step()
        self.finishes_with_backward = False  # backward has been told to call finish
        self._sent = 0
        self._memory = Memory()
        self._late: set[int] = set()
        self._under_way: deque[tuple[int, Any]] = deque()  # place, work or future
        # The gradient already sent of a parameter with a later addition: its .grad is the
        # addition.
        self._apart: dict[Tensor, Tensor] = {}
        self._results: dict[Tensor, Tensor] = {}  # of parameters without a gradient here
        self._without: set[Tensor] = set()  # had no gradient when they were sent
        self._given_away: set[Tensor] = set()  # their gradients went into a bucket
        self._averages: dict[Tensor, Tensor] = {}  # for this rank's elements alone
        self._own_sums: dict[int, Tensor] = {}  # by place of a bucket that scatters
        self._taken_in: set[int] = set()
        self._failure: Exception | None = None
        self._active: list[int] | None = None  # dp_ranks taking part, once known
        self._some_want_buffers = False
        self._alike = True
        for _, bucket in self._buckets:
            bucket.is_launched = False
        self._send_header()

    # ------------------------------------------------------------------ before backward

    def _send_header(self) -> None:
        self._layout = Layout.of(
            [
                (name if len(self.members) == 1 else f"model {number}: {name}", parameter)
                for number, member in enumerate(self.members)
                for name, parameter in member.named_parameters()
            ]
        )
        self._header = self.replicas.numbers(self.replicas.size, 3)
        self._header[self.replicas.rank, 0] = self._layout.signature()
        self._header[self.replicas.rank, 1] = not self._joined
        self._header[self.replicas.rank, 2] = self._wants_buffers
        self._header_work = self.replicas.sum(self._header)

    def active(self) -> list[int]:
        """The dp_ranks taking part; waits for the header."""
        if self._active is None:
            self._header_work.wait()
            rows = self._header.tolist()
            self._active = [rank for rank, row in enumerate(rows) if row[1]]
            self._alike = len({row[0] for row in rows}) == 1
            self._some_want_buffers = any(row[2] for row in rows)
        return self._active

    def send_after_backward(self) -> None:
        """Send no bucket while backward runs, unless some have gone."""
        if self._sent == 0:
            self._overlaps = False

    def with_buffers(self) -> bool:
        """Whether a replica wants buffers; the header tells joined replicas."""
        self.active()
        return self._some_want_buffers

    def exchange_buffers(self) -> None:
        """Give all replicas the buffers of the first one taking part."""
        tensors = [b for m in self.members if m.broadcasts_buffers for b in m.buffers()]
        if tensors and self.active() and self._alike:
            self.replicas.broadcast(tensors, self.active()[0])

    # ------------------------------------------------------------------- during backward

    def complete(self, parameter: Tensor) -> None:
        """Backward added to a parameter for good: send the complete buckets.

        Does not raise: an error is the step's, and comes out of :meth:`finish`.
        """
        place = self._place.get(id(parameter))
        if place is None:
            return
        member, bucket = self._buckets[place]
        bucket.adopt(parameter)
        self._additions[id(parameter)] += 1
        if bucket.is_launched:
            self._late.add(place)
            return
        if self._additions[id(parameter)] == member.additions.get(id(parameter)):
            self._missing[place].discard(id(parameter))
        try:
            self._check_dtype(member, bucket, parameter)
            while self._overlaps and self._may_send():
                self._send(self._sent, zeros=False)
                self._sent += 1
        except Exception as error:  # noqa: BLE001 - a hook of the user's, or a connection
            self._failure = error

    def keep_apart(self, parameter: Tensor) -> None:
        """Before an addition to the gradient: if already sent, take it off ``.grad``."""
        if not self.is_launched(parameter) or parameter in self._apart:
            return
        if parameter.grad is not None:
            self._apart[parameter], parameter.grad = parameter.grad, None

    def is_launched(self, parameter: Tensor) -> bool:
        """Whether the parameter's bucket was sent."""
        place = self._place.get(id(parameter))
        return place is not None and self._buckets[place][1].is_launched

    def _check_dtype(self, member: Member, bucket: Bucket, parameter: Tensor) -> None:
        """Raises TypeError where the bucket's dtype cannot hold the gradient's values."""
        gradient = parameter.grad
        if (
            gradient is None
            or torch.promote_types(bucket.dtype, gradient.dtype) == bucket.dtype
        ):
            return
        name = next(name for name, one in member.named_parameters() if one is parameter)
        raise TypeError(
            f"smp: parameter {name!r} has a gradient of {gradient.dtype}, where all replicas "
            f"exchange {bucket.dtype}: set its grad_dtype to {gradient.dtype} on every rank, "
            "before the step"
        )

    def _may_send(self) -> bool:
        if self._failure is not None or self._sent == len(self._buckets):
            return False
        if self._missing[self._sent]:
            return False
        if self._buckets[self._sent][1].sparse and not self.replicas.have_one_rank:
            # A sparse bucket's sizes are exchanged first, and waited for: where another rank of
            # this step sends the bucket later, the two would wait in a circle.
            return False
        self.active()
        return self._alike and self._has_room()

    def _has_room(self) -> bool:
        """Whether one more bucket may go; takes in arrived ones, without a wait.

        Replicas of several ranks, all in one step, would wait in circles if one skipped a
        parameter used by another.  Without such ranks an accelerator's stream waits, as the
        host is ahead of it.
        """
        while len(self._under_way) == MOST_ON_THEIR_WAY:
            place, work = self._under_way[0]
            on_host = self._buckets[place][1].buffer().device.type == "cpu"
            if (on_host or not self.replicas.have_one_rank) and not _is_over(work):
                return False
            self._take_in()
        return True

    def _send(self, place: int, zeros: bool) -> None:
        """Send a bucket: ``.grad``, or the additions after the first sending."""
        while len(self._under_way) >= MOST_ON_THEIR_WAY:
            self._take_in()
        member, bucket = self._buckets[place]
        again = bucket.is_launched
        gradients = [
            p.grad if not zeros and (not again or self._is_addition(p)) else None
            for p in bucket.parameters()
        ]
        with torch.no_grad():
            bucket.fill(gradients, self._memory)
            bucket.is_launched = True
            if not again:
                self._note_sent(member, bucket)
            if member.hook is None and bucket.scatters:
                self._give_away(bucket)
                work, self._own_sums[place] = bucket.scatter()
                self._under_way.append((place, work))
                return
            if member.hook is None:
                self._under_way.append((place, self._sum(bucket)))
                return
            bucket.named_its_group = False
            try:
                self._under_way.append((place, member.hook(member.hook_state, bucket)))
                if len(bucket.holders.ranks) < self.replicas.size:
                    _check_hooks_group(bucket)
            except BaseException:
                # The others' hooks most likely wait for a sum.
                bucket.fill([None] * len(gradients), self._memory)
                self._sum(bucket).wait()
                bucket.empty(self._memory)
                raise

    def _note_sent(self, member: Member, bucket: Bucket) -> None:
        for parameter in bucket.parameters():
            if parameter.grad is None:
                self._without.add(parameter)
            elif member.keeps_apart_at_once and self._overlaps:
                self.keep_apart(parameter)

    def _give_away(self, bucket: Bucket) -> None:
        """The gradient is in the bucket: free its memory, where a failure makes it None again.

        In a pipeline the ledger has it.
        """
        (parameter,) = bucket.parameters()
        is_free = self.replicas.have_one_rank and self._overlaps and not self._had[parameter]
        if is_free and parameter.grad is not None:
            self._given_away.add(parameter)
            parameter.grad = None

    def _is_addition(self, parameter: Tensor) -> bool:
        """Whether the ``.grad`` of a parameter already sent is a later addition."""
        return any(parameter in some for some in (self._apart, self._without, self._given_away))

    def _sum(self, bucket: Bucket) -> Any:
        if len(bucket.holders.ranks) == 1:
            return _Nothing()
        group = bucket.process_group()
        if bucket.parts is None or bucket.sparse:
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            assert work is not None
            return work
        return AllOf(
            [
                dist.reduce(
                    bucket.buffer()[start:end],
                    bucket.holders.owners[owner],
                    group=group,
                    async_op=True,
                )
                for owner, start, end in bucket.parts
            ]
        )

    # -------------------------------------------------------------------- after backward

    def finish(
        self, error: BaseException | None = None, description: tuple | None = None
    ) -> None:
        """Complete the exchange.

        Args:
            error: the exception of this replica's step.
            description: of the error, as :func:`smp.runtime.failures.describe` makes it.

        Raises:
            BaseException: ``error``; or that of another replica's step; or ReplicasDiffer,
                where the parameters are not the same.
        """
        self.active()
        if not self._alike:
            self._put_back()
            self._compare_layouts(error or self._failure)
        self._check_dtypes()
        if self._overlaps:
            self._send_rest(error)
            self._take_in_all()
            self._rejoin()
        error = error or self._failure
        failed, used, again = self._exchange_report(error)
        if any(failed):
            self._put_back()
            self._raise(error, description, failed)
        if not self._overlaps:
            again = [place for place, wanted in enumerate(used) if any(wanted)]
        for place in again:
            self._send(place, zeros=self._joined)
        self._take_in_all()
        self._share_among_owners()
        if self._failure is not None:
            raise self._failure
        if not self._joined:
            self._settle(used)
            self._learn()

    def _compare_layouts(self, error: BaseException | None) -> None:
        try:
            self.replicas.check_alike(self._layout)
        except ReplicasDiffer:
            if error is None:
                raise
        if error is not None:
            raise error

    def _check_dtypes(self) -> None:
        """Before the others count on this replica's gradients."""
        try:
            for member, bucket in self._buckets:
                for parameter in bucket.parameters():
                    self._check_dtype(member, bucket, parameter)
        except TypeError as error:
            self._failure = self._failure or error

    def _rejoin(self) -> None:
        """Backward is over: a gradient without an addition is ``.grad`` again."""
        for parameter, gradient in list(self._apart.items()):
            if parameter.grad is None:
                parameter.grad = gradient
                del self._apart[parameter]

    def _send_rest(self, error: BaseException | None) -> None:
        """Send the remaining buckets; complete gradients stay so from now on."""
        for place, (_, bucket) in enumerate(self._buckets):
            if bucket.is_launched:
                continue
            try:
                failed = error is not None or self._failure is not None
                self._send(place, zeros=self._joined or failed)
            except Exception as raised:  # noqa: BLE001 - a hook of the user's
                self._failure = self._failure or raised

    def _exchange_report(
        self, error: BaseException | None
    ) -> tuple[list[int], list[list[bool]], list[int]]:
        """The failures, by dp_rank; the used parameters, by bucket; buckets to send again."""
        size, nbuckets = self.replicas.size, len(self._buckets)
        everything = [p for _, bucket in self._buckets for p in bucket.parameters()]
        mine = torch.zeros(size + nbuckets + len(everything), dtype=torch.int32, device="cpu")
        # A failure of the rank's own counts 1; that of a peer 2.
        mine[self.replicas.rank] = (error is not None) + isinstance(error, PeerFailed)
        for place in self._late:
            mine[size + place] = 1
        if not self._joined:
            unused_collectives.drop_zeros()
            flags = [p.grad is not None or p in self._given_away for p in everything]
            mine[size + nbuckets :] = torch.tensor(flags, dtype=torch.int32, device="cpu")
        shared = mine.to(self.replicas.control_device)
        self.replicas.sum(shared).wait()
        numbers: list[int] = shared.tolist()
        again = [place for place in range(nbuckets) if numbers[size + place]]
        used, at = [], size + nbuckets
        for _, bucket in self._buckets:
            count = len(bucket.parameters())
            used.append([n > 0 for n in numbers[at : at + count]])
            at += count
        return numbers[:size], used, again

    def _take_in_all(self) -> None:
        while self._under_way:
            self._take_in()

    def _take_in(self) -> None:
        """Wait for the first bucket on its way; it becomes the gradients.

        Does not raise: an error is the step's.
        """
        place, work = self._under_way.popleft()
        member, bucket = self._buckets[place]
        take = self._add if place in self._taken_in else self._replace
        self._taken_in.add(place)
        try:
            result = work.wait()
            with torch.no_grad():
                if place in self._own_sums:
                    sums = self._own_sums.pop(place).div_(self._divisor(member, bucket))
                    self._add_averages(bucket, sums)
                    bucket.empty(self._memory)
                    return
                if member.hook is not None:
                    tensor = result[0] if isinstance(result, list | tuple) else result
                    bucket.set_buffer(tensor)
                else:
                    bucket.buffer().div_(self._divisor(member, bucket))
                if not self._joined and self._keeps(bucket):
                    for parameter, view in zip(
                        bucket.parameters(), bucket.gradients(), strict=True
                    ):
                        take(parameter, view, member.gradient_as_bucket_view)
        except Exception as error:  # noqa: BLE001 - a hook of the user's, or a connection
            self._failure = self._failure or error
        bucket.empty(self._memory)

    def _add_averages(self, bucket: Bucket, averages: Tensor) -> None:
        """Keep them, in memory of their own; a second sending brings additions."""
        (parameter,) = bucket.parameters()
        if parameter in self._averages:
            self._averages[parameter] += averages
        else:
            own_memory = averages.untyped_storage().nbytes() == averages.nbytes
            self._averages[parameter] = averages if own_memory else averages.clone()

    def _keeps(self, bucket: Bucket) -> bool:
        """Whether the averages are for this rank; clears elements of other owners."""
        if bucket.parts is None:
            return True
        part = part_here(bucket.parts)
        if part is not None and len(bucket.parts) > 1:
            bucket.buffer()[: part.start].zero_()
            bucket.buffer()[part.end :].zero_()
        return part is not None

    @torch.no_grad()
    def _share_among_owners(self) -> None:
        """The owner's tp_rank 0 gives its TP_GROUP the sums of parameters whole on all."""
        group, first = ranks.get_tp_process_group(), ranks.get_tp_group()[0]
        for member, bucket in self._buckets:
            part = None if bucket.parts is None else part_here(bucket.parts)
            is_whole = bucket.sparse or member.hook is not None  # summed on all ranks
            if part is None or is_whole or self._joined or not bucket.holders.owners_share:
                continue
            bucket.fill([self._result(p) for p in bucket.parameters()], self._memory)
            dist.broadcast(bucket.buffer()[part.start : part.end], first, group=group)
            for parameter, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self._replace(parameter, view, member.gradient_as_bucket_view)
            bucket.empty(self._memory)

    def _result(self, parameter: Tensor) -> Tensor | None:
        for place in (self._apart, self._results):
            if parameter in place:
                return place[parameter]
        return parameter.grad

    def _replace(self, parameter: Tensor, result: Tensor, as_view: bool) -> None:
        """The replicas' gradient takes the place of this one's."""
        held = None
        if parameter not in self._without:
            held = self._apart.get(parameter, parameter.grad)
        if not as_view and not result.is_sparse:  # its memory is the next bucket's, too
            if held is None or held.is_sparse:
                result = torch.empty_like(parameter, dtype=result.dtype).copy_(result)
            elif self._had[parameter]:
                held.copy_(result)
                return
            else:
                result = torch.empty_like(held).copy_(result)
        if held is None:
            self._results[parameter] = result
        elif parameter in self._apart:
            self._apart[parameter] = result
        else:
            parameter.grad = result

    def _add(self, parameter: Tensor, result: Tensor, as_view: bool) -> None:
        """Add gradients from after the sending, here or on another replica."""
        for place in (self._apart, self._results):
            if parameter in place:
                place[parameter] = place[parameter] + result
                return
        if parameter.grad is not None:
            parameter.grad = parameter.grad + result

    def _settle(self, used: list[list[bool]]) -> None:
        """``.grad`` is the result, with its owner; None where no replica has a gradient."""
        for (member, bucket), wanted in zip(self._buckets, used, strict=True):
            member.has_averages = True
            is_here = bucket.parts is None or part_here(bucket.parts) is not None
            for parameter, is_used in zip(bucket.parameters(), wanted, strict=True):
                if not is_used or not is_here:
                    parameter.grad = None
                    continue
                if parameter in self._averages:
                    keep_averages(parameter, self._averages[parameter])
                    continue
                result = self._result(parameter)
                if result is None:  # dropped, as it was zeros on all replicas
                    result = torch.zeros_like(parameter, dtype=bucket.dtype)
                parameter.grad = result

    def _learn(self) -> None:
        """Note the additions of a backward to each parameter."""
        for member, bucket in self._buckets:
            for parameter in bucket.parameters():
                key = id(parameter)
                if (count := self._additions[key]) > member.additions.get(key, 0):
                    member.additions[key] = count

    def _divisor(self, member: Member, bucket: Bucket) -> int:
        """The number of ranks' gradients in the sum: a TP_GROUP's slices are one gradient."""
        in_a_sum = self.replicas.size // len(bucket.holders.ranks)
        return member.divisor(len(self.active())) // in_a_sum

    # ------------------------------------------------------------------------- failures

    def _put_back(self) -> None:
        """Gradients are None again if they were before."""
        for parameter, had in self._had.items():
            if not had:
                parameter.grad = None
            elif parameter in self._apart:
                parameter.grad = self._apart[parameter]

    def _raise(
        self, error: BaseException | None, description: tuple | None, failed: list[int]
    ) -> None:
        mine = b""
        if error is not None:
            mine = _core.pack(description or failures.describe(error, None, 0, 0, "pp_rank 0"))
        descriptions = self.replicas.gather_bytes(mine)
        if error is not None and not (isinstance(error, PeerFailed) and 1 in failed):
            raise error
        first = failed.index(1 if 1 in failed else 2)
        raised = failures.rebuild(_core.unpack(descriptions[first]), None)
        failures.add_note(
            raised,
            f"this is dp_rank {self.replicas.rank}; the step failed on dp_rank {first} "
            f"(rank {self.replicas.global_ranks[first]}) and counts on no replica: gradients "
            "that were None are None again, the others hold a part of the step until "
            "zero_grad()",
        )
        raise raised


def _check_hooks_group(bucket: Bucket) -> None:
    """A hook over all replicas would add up different slices.

    Raises:
        RuntimeError: the hook has not asked the bucket for its group.
    """
    if not bucket.named_its_group:
        raise RuntimeError(
            f"smp: the communication hook did not ask bucket {bucket.index()} for its "
            "process_group(): parameters that are split over the TP_GROUP are averaged over "
            "the RDP_GROUP alone, so a hook uses the group of the bucket that it gets, and "
            "divides by its size"
        )


def _is_over(work: Any) -> bool:
    """Whether a collective's work, or a hook's future, is done."""
    return work.is_completed() if hasattr(work, "is_completed") else work.done()


class _Nothing:
    """The exchange of a bucket held by one rank alone."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True
