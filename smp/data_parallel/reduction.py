"""One exchange of gradients among the replicas, from the begin of a step to its end.

What is sent, in this order on every replica:

1. the header: each replica's layout of gradients, and whether it takes part;
2. buffers of modules, from the first replica that takes part;
3. the buckets, each as soon as backward has completed its gradients and those of the
   buckets before it;
4. the report: whose step failed, which parameters have a gradient, which buckets got a
   gradient after they were sent and are sent again.

Nothing is written to ``.grad`` before the report says that every replica's step
succeeded.  A replica that failed sends zeros for what is left, so that nobody waits.
Gradients are summed, then divided once.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp import _core
from smp.data_parallel.buckets import Bucket
from smp.data_parallel.group import Layout, ReplicasDiffer
from smp.execution import failures
from smp.tensor_parallel import chain
from smp.tensor_parallel.step_end import PeerFailed

if TYPE_CHECKING:
    from smp.data_parallel.data_parallel import DataParallel


class Reduction:
    """An exchange under way.

    Args:
        members: the models that take part, in order of creation.
        joined: this replica has no inputs left and only keeps the others company.
    """

    def __init__(self, members: Sequence["DataParallel"], joined: bool = False):
        self.members = members
        self.replicas = members[0].replicas
        # Backward reaches the last model first.
        self._buckets = [(m, b) for m in reversed(members) for b in m.buckets()]
        self._place = {
            id(p): i for i, (_, b) in enumerate(self._buckets) for p in b.parameters()
        }
        self._missing = [{id(p) for p in b.parameters()} for _, b in self._buckets]
        self._had = {p: p.grad is not None for _, b in self._buckets for p in b.parameters()}
        self._overlaps = all(m.overlaps for m in members)
        self._joined = joined
        chain.begin_step()
        self.finishes_with_backward = False  # backward has been told to call finish
        self._sent = 0
        self._late: set[int] = set()
        self._under_way: list[tuple[int, Any]] = []  # place, work or future
        self._failure: Exception | None = None
        self._active: list[int] | None = None  # dp_ranks that take part, once known
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
        self._header = self.replicas.numbers(self.replicas.size, 2)
        self._header[self.replicas.rank, 0] = self._layout.signature()
        self._header[self.replicas.rank, 1] = not self._joined
        self._header_work = self.replicas.sum(self._header)

    def active(self) -> list[int]:
        """The dp_ranks that take part; waits for the header."""
        if self._active is None:
            self._header_work.wait()
            rows = self._header.tolist()
            self._active = [rank for rank, row in enumerate(rows) if row[1]]
            self._alike = len({row[0] for row in rows}) == 1
        return self._active

    def exchange_buffers(self) -> None:
        """Give all replicas the buffers of the first one that takes part."""
        tensors = [b for m in self.members if m.broadcasts_buffers for b in m.buffers()]
        if tensors and self.active() and self._alike:
            self.replicas.broadcast(tensors, self.active()[0])

    # ------------------------------------------------------------------- during backward

    def complete(self, parameter: Tensor) -> None:
        """The gradient of a parameter is what it will be; sends what can be sent.

        Does not raise: an error is the step's, and comes out of :meth:`finish`.
        """
        place = self._place.get(id(parameter))
        if place is None:
            return
        self._missing[place].discard(id(parameter))
        if self._buckets[place][1].is_launched:
            self._late.add(place)
            return
        try:
            while self._overlaps and self._may_send():
                self._send(self._sent, zeros=False)
                self._sent += 1
        except Exception as error:  # noqa: BLE001 - a hook of the user's, or a connection
            self._failure = error

    def is_launched(self, parameter: Tensor) -> bool:
        """Whether the parameter's bucket is on its way."""
        place = self._place.get(id(parameter))
        return place is not None and self._buckets[place][1].is_launched

    def _may_send(self) -> bool:
        if self._failure is not None or self._sent == len(self._buckets):
            return False
        if self._missing[self._sent]:
            return False
        self.active()
        return self._alike

    def _send(self, place: int, zeros: bool) -> None:
        member, bucket = self._buckets[place]
        with torch.no_grad():
            bucket.fill(zeros)
            bucket.is_launched = True
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
                bucket.fill(zeros=True)
                self._sum(bucket).wait()
                raise

    def _sum(self, bucket: Bucket) -> Any:
        if len(bucket.holders.ranks) == 1:
            return _Nothing()
        work = dist.all_reduce(bucket.buffer(), group=bucket.process_group(), async_op=True)
        assert work is not None
        return work

    # -------------------------------------------------------------------- after backward

    def finish(
        self, error: BaseException | None = None, description: tuple | None = None
    ) -> None:
        """Complete the exchange.

        Args:
            error: what this replica's step raised.
            description: of the error, as :func:`smp.execution.failures.describe` makes it.

        Raises:
            BaseException: ``error``; or what another replica's step raised; or
                ReplicasDiffer, where the parameters are not the same.
        """
        self.active()
        if not self._alike:
            self._put_back()
            self._compare_layouts(error or self._failure)
        if self._overlaps:
            self._send_rest(error)
        error = error or self._failure
        failed, used, again = self._exchange_report(error)
        if any(failed):
            self._wait()
            self._put_back()
            self._raise(error, description, failed)
        if self._overlaps:
            self._wait()
        else:
            again = [place for place, wanted in enumerate(used) if any(wanted)]
        for place in again:
            self._send(place, zeros=self._joined)
        self._wait()
        if not self._joined:
            self._write_back(used)

    def _compare_layouts(self, error: BaseException | None) -> None:
        try:
            self.replicas.check_alike(self._layout)
        except ReplicasDiffer:
            if error is None:
                raise
        if error is not None:
            raise error

    def _send_rest(self, error: BaseException | None) -> None:
        """Send the buckets that are left; what is complete now stays so."""
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
        """Whose step failed, by dp_rank; what is used, by bucket; buckets to send again."""
        size, nbuckets = self.replicas.size, len(self._buckets)
        everything = [p for _, bucket in self._buckets for p in bucket.parameters()]
        mine = torch.zeros(size + nbuckets + len(everything), dtype=torch.int32, device="cpu")
        # A rank that failed by itself counts 1; one that met such a rank 2.
        mine[self.replicas.rank] = (error is not None) + isinstance(error, PeerFailed)
        for place in self._late:
            mine[size + place] = 1
        if not self._joined:
            chain.drop_zeros()
            flags = [p.grad is not None for p in everything]
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

    def _wait(self) -> None:
        """Wait for what is under way; a hook's result goes into its bucket."""
        under_way, self._under_way = self._under_way, []
        for place, work in under_way:
            member, bucket = self._buckets[place]
            result = work.wait()
            if member.hook is not None:
                tensor = result[0] if isinstance(result, list | tuple) else result
                with torch.no_grad():
                    bucket.set_buffer(tensor)

    def _write_back(self, used: list[list[bool]]) -> None:
        with torch.no_grad():
            for (member, bucket), wanted in zip(self._buckets, used, strict=True):
                for parameter, is_used in zip(bucket.parameters(), wanted, strict=True):
                    if not is_used:
                        parameter.grad = None
                if not any(wanted):
                    continue
                if member.hook is None:
                    bucket.buffer().div_(self._divisor(member, bucket))
                bucket.write_back(wanted, member.gradient_as_bucket_view)

    def _divisor(self, member: "DataParallel", bucket: Bucket) -> int:
        """How many ranks' gradients the sum has: a TP_GROUP's slices are one gradient."""
        in_a_sum = self.replicas.size // len(bucket.holders.ranks)
        return member.divisor(len(self.active())) // in_a_sum

    # ------------------------------------------------------------------------- failures

    def _put_back(self) -> None:
        """Gradients that were None are None again."""
        for parameter, had in self._had.items():
            if not had:
                parameter.grad = None

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


class _Nothing:
    """The exchange of a bucket that one rank alone holds."""

    def wait(self) -> None:
        pass
