"""Spec: the backend smddp (api section 9): every operation of torch.distributed."""

import ctypes
import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import smp
from smp import torch_versions
from smp.collectives import launch, monitored_barrier
from smp.collectives.backend import called
from smp.collectives.process_group import BARRIER
from smp.collectives.ranks import Ranks, with_settings
from smp.collectives.work import AllOf, Work
from tests.ranks import on_ranks
from tests.reference.collectives import drawn, reduced

ON = (2, 4)
NUMBERS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NUMBERS += [torch.uint8, torch.int8, torch.int32, torch.int64]
EIGHTHS = [torch.float8_e4m3fn, torch.float8_e5m2]
COPIED = [torch.int16, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fnuz]
SHAPES = [(), (0, 3), (5, 4), (70_001,)]


@contextmanager
def job(folder, backend="smddp"):
    """The default group of the ranks that run the test; their number, and this rank's."""
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    try:
        yield rank, size
    finally:
        dist.destroy_process_group()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in a row; one NaN for all."""
    if tensor.dtype in NUMBERS[:4]:
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    return tensor.reshape(-1).view(torch.uint8)


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    alike = got.dtype == want.dtype and got.shape == want.shape
    return alike and torch.equal(bits(got), bits(want))


def refused(call) -> str:
    with pytest.raises(RuntimeError) as raised:
        call()
    return str(raised.value)


# -------------------------------------------------------------------------- reductions


def reductions_of(dtype: torch.dtype) -> list[str]:
    names = ["SUM", "AVG"]
    if dtype is torch.bool:
        names.remove("AVG")
    if not dtype.is_complex:
        names += ["PRODUCT", "MIN", "MAX"]
        names += [] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
    return names


@on_ranks(*ON)
@pytest.mark.parametrize("dtype", NUMBERS + EIGHTHS + COPIED[1:4], ids=str)
def test_all_reduce_is_the_tree_of_all_ranks(dtype, tmp_path):
    with job(tmp_path) as (rank, size):
        for name in reductions_of(dtype):
            for shape in SHAPES:
                terms = [drawn(r, shape, dtype) for r in range(size)]
                tensor = terms[rank].clone()

                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))

                assert same(tensor, reduced(name, terms)), (name, shape)


@on_ranks(*ON)
def test_nan_of_one_rank_reaches_all(tmp_path):
    with job(tmp_path) as (rank, size):
        for name in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
            for dtype in NUMBERS[:4]:
                tensor = torch.ones(100, dtype=dtype)
                if rank == size - 1:
                    tensor[13] = torch.nan

                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))

                assert tensor.isnan().nonzero().tolist() == [[13]]


@on_ranks(*ON)
@pytest.mark.parametrize("dtype", NUMBERS[:4] + EIGHTHS, ids=str)
def test_a_premultiplied_sum_takes_each_rank_s_factor(dtype, tmp_path):
    """Half types are multiplied and summed in float32, and rounded once."""
    with job(tmp_path) as (rank, size):
        factors = [0.5 + r / 4 for r in range(size)]
        terms = [drawn(r, (33,), dtype) for r in range(size)]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        products = [f * term.to(wide) for f, term in zip(factors, terms, strict=True)]
        for factor in (factors[rank], torch.tensor([factors[rank]])):
            tensor = terms[rank].clone()

            dist.all_reduce(tensor, dist._make_nccl_premul_sum(factor))

            assert same(tensor, reduced("SUM", products).to(dtype))


@on_ranks(*ON)
@pytest.mark.parametrize("name", ["SUM", "MAX", "AVG", "PREMUL_SUM"])
def test_a_reduction_is_followed_in_all_forms(name, tmp_path):
    """All-reduces and reduce-scatters, of one tensor, of lists and coalesced; and reduces,
    which leave all but the root."""
    with job(tmp_path) as (rank, size):
        terms = [drawn(r, (size * 6, 5), torch.float32) for r in range(size)]
        op = getattr(dist.ReduceOp, name)
        whole = reduced(name, terms) if name != "PREMUL_SUM" else None
        if whole is None:
            op = dist._make_nccl_premul_sum(0.5 + rank)
            whole = reduced("SUM", [(0.5 + r) * term for r, term in enumerate(terms)])
        want = whole[rank * 6 : (rank + 1) * 6]

        one = torch.empty(6, 5)
        dist.reduce_scatter_tensor(one, terms[rank].clone(), op)
        assert same(one, want)

        from_list = torch.empty(6, 5)
        dist.reduce_scatter(from_list, list(terms[rank].clone().chunk(size)), op)
        assert same(from_list, want)

        many = [torch.empty(6, 5), torch.empty(6, 5)]
        with dist._coalescing_manager():
            for out in many:
                dist.reduce_scatter_tensor(out, terms[rank].clone(), op)
        assert same(many[0], want)
        assert same(many[1], want)

        many = [terms[rank].clone(), terms[rank].clone()]
        with dist._coalescing_manager():
            for tensor in many:
                dist.all_reduce(tensor, op)
        assert same(many[0], whole)
        assert same(many[1], whole)

        for root in range(size):
            at_root = terms[rank].clone()
            dist.reduce(at_root, root, op)
            assert same(at_root, whole if rank == root else terms[rank])


@on_ranks(*ON)
def test_reduce_scatter_of_unequal_parts(tmp_path):
    with job(tmp_path) as (rank, size):
        lengths = [3 * r + 1 for r in range(size)]
        terms = [drawn(r, (sum(lengths),), torch.float32) for r in range(size)]
        mine = torch.empty(lengths[rank])

        dist.reduce_scatter(mine, list(terms[rank].split(lengths)))

        assert same(mine, reduced("SUM", terms).split(lengths)[rank])


@on_ranks(*ON)
def test_many_tensors_are_reduced_as_one(tmp_path):
    with job(tmp_path) as (rank, size):
        tensors = [drawn(rank, (n,), torch.float32, n) for n in (1, 50, 3000)]

        with dist._coalescing_manager(async_ops=True) as coalesced:
            for tensor in tensors:
                dist.all_reduce(tensor)
        coalesced.wait()

        for tensor in tensors:
            n = len(tensor)
            assert same(
                tensor, reduced("SUM", [drawn(r, (n,), torch.float32, n) for r in range(size)])
            )


@on_ranks(2, 3, 4)
def test_sparse_tensors_are_summed(tmp_path):
    with job(tmp_path) as (rank, size):
        terms = []
        for r in range(size):
            dense = drawn(r, (20, 3), torch.float32)
            dense[torch.arange(20) % (r + 2) != 0] = 0
            terms.append(dense)
        sparse = terms[rank].to_sparse(1)

        dist.all_reduce(sparse)

        assert sparse.is_sparse
        assert same(sparse.to_dense(), reduced("SUM", terms))


@on_ranks(2)
def test_sparse_tensors_that_differ_raise_on_both_sides_and_name_both(tmp_path):
    with job(tmp_path) as (rank, size):

        def said(*tensors):
            return refused(lambda: dist.all_reduce(tensors[rank].to_sparse(1)))

        shapes = said(torch.ones(4), torch.ones(6))
        assert "rank 0 calls sparse all-reduce 1 of a float32 of shape (4,)" in shapes
        assert "rank 1 calls sparse all-reduce 1 of a float32 of shape (6,)" in shapes
        dtypes = said(torch.ones(4), torch.ones(4, dtype=torch.float64))
        assert "2 of a float32 of" in dtypes and "2 of a float64 of" in dtypes
        dims = refused(lambda: dist.all_reduce(torch.ones(4, 2).to_sparse(1 + rank)))
        assert "1 of its dimensions sparse" in dims and "2 of its dimensions" in dims
        rows = said(torch.ones(4, 2), torch.ones(4, 3))
        assert "4 of a float32 of shape (4, 2)" in rows and "of shape (4, 3)" in rows
        with pytest.raises(ValueError, match="sparse tensors is defined for SUM alone"):
            dist.all_reduce(torch.ones(4).to_sparse(1), dist.ReduceOp.AVG)

        same_shape = torch.ones(4).to_sparse(1)  # and the group goes on
        work = dist.all_reduce(same_shape, async_op=True)
        assert work.wait() and work.result()[0] is same_shape
        assert same_shape.to_dense().tolist() == [2.0] * 4


# ----------------------------------------------------------------------------- copies


@on_ranks(*ON)
@pytest.mark.parametrize("dtype", NUMBERS + COPIED, ids=str)
def test_broadcast_and_all_gather_of_every_dtype(dtype, tmp_path):
    source = torch.float32 if dtype == torch.float8_e4m3fnuz else dtype
    with job(tmp_path) as (rank, size):
        for shape in SHAPES:
            terms = [drawn(r, shape, source).to(dtype) for r in range(size)]
            for root in (0, size - 1):
                tensor = terms[rank].clone()
                dist.broadcast(tensor, root)
                assert same(tensor, terms[root])

            listed = [torch.empty_like(term) for term in terms]
            dist.all_gather(listed, terms[rank])
            assert all(map(same, listed, terms))

            if shape:
                whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
                dist.all_gather_into_tensor(whole, terms[rank])
                assert all(map(same, whole.chunk(size) if whole.numel() else [], terms))


@on_ranks(*ON)
def test_all_gather_of_unequal_tensors(tmp_path):
    with job(tmp_path) as (rank, size):
        terms = [drawn(r, (r, 2), torch.float64) for r in range(size)]
        got = [torch.empty_like(term) for term in terms]

        dist.all_gather(got, terms[rank])

        assert all(map(same, got, terms))


@on_ranks(*ON)
@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced")
def test_many_tensors_are_gathered_as_one(tmp_path):
    with job(tmp_path) as (rank, size):

        def terms(r):
            return [drawn(r, (n, 3), torch.float32, n) for n in (1, 4)]

        got = [[torch.empty_like(t) for t in terms(r)] for r in range(size)]
        dist.all_gather_coalesced(got, terms(rank))
        assert all(all(map(same, got[r], terms(r))) for r in range(size))

        whole = [torch.empty(size * n, 3) for n in (1, 4)]
        with dist._coalescing_manager():
            for out, own in zip(whole, terms(rank), strict=True):
                dist.all_gather_into_tensor(out, own)
        for i, out in enumerate(whole):
            assert same(out, torch.cat([terms(r)[i] for r in range(size)]))


@on_ranks(2)
def test_methods_of_a_group_take_torch_s_names(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        own, total = torch.full((3,), float(rank)), torch.full((3,), float(rank))
        both = torch.tensor([0.0] * 3 + [1.0] * 3)

        group.allreduce(tensors=[total]).wait()
        assert total.tolist() == [1.0] * 3
        group.allreduce([total], op=dist.ReduceOp.MAX).wait()
        group.allreduce(tensor=total, op=dist.ReduceOp.SUM).wait()
        assert total.tolist() == [2.0] * 3

        out = torch.empty(6)
        group._allgather_base(output=out, input=own).wait()
        assert torch.equal(out, both)
        listed = [torch.empty(3), torch.empty(3)]
        group.allgather(output_tensors=[listed], input_tensors=[own]).wait()
        assert torch.equal(torch.cat(listed), both)

        part = torch.empty(3)
        group._reduce_scatter_base(outputTensor=part, inputTensor=both).wait()
        assert part.tolist() == [2.0 * rank] * 3
        group.all_to_all_single(
            output=out, input=both, output_split_sizes=[], input_split_sizes=[]
        ).wait()
        assert torch.equal(out, torch.full((6,), float(rank)))

        if rank == 0:
            group.send(tensors=[own], dstRank=1, tag=3)
        else:
            group.recv(tensors=[own], srcRank=0, tag=3).wait()
            assert own.tolist() == [0.0] * 3
        with pytest.raises(TypeError, match="no_such"):
            group.allreduce(tensors=[total], no_such=1)


@on_ranks(2)
def test_methods_of_a_group_take_several_tensors(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD

        def two() -> list[torch.Tensor]:
            return [torch.full((3,), 1.0 + rank), torch.full((2,), 10.0 + rank)]

        both = [[1.0, 10.0], [2.0, 11.0]]  # by rank
        options = dist.BroadcastOptions()
        options.rootRank = 1
        group.broadcast(tensors := two(), options).wait()
        assert [t[-1].item() for t in tensors] == both[1]
        options = dist.ReduceOptions()
        options.rootRank = 1
        group.reduce(tensors := two(), options).wait()
        assert [t[-1].item() for t in tensors] == ([3.0, 21.0] if rank == 1 else both[0])

        group.send(two(), 1 - rank, 0)
        group.recv(tensors := two(), 1 - rank, 0).wait()
        assert [t[-1].item() for t in tensors] == both[1 - rank]

        listed = [[torch.empty_like(t) for _ in range(size)] for t in two()]
        group.allgather(listed, two()).wait()
        assert [[t[-1].item() for t in one] for one in listed] == [[1, 2], [10, 11]]
        outputs = [torch.empty(1), torch.empty(2)]
        inputs = [[torch.tensor([5.0 + r]) for r in range(size)], [*torch.eye(2)]]
        group.reduce_scatter(outputs, inputs).wait()
        assert [t.tolist() for t in outputs] == [
            [10.0 + 2 * rank],
            [2.0 * (rank == i) for i in range(2)],
        ]


@on_ranks(*ON)
def test_results_go_into_tensors_with_gaps(tmp_path):
    """... and leave what lies between their elements."""

    def gaps(*shape):
        whole = torch.full((*shape[:-1], 2 * shape[-1]), -1.0)
        return whole, whole[..., ::2]

    with job(tmp_path) as (rank, size):
        terms = [drawn(r, (2 * size, 3), torch.float32) for r in range(size)]
        given = terms[rank].t().contiguous().t()
        for asynchronous in (False, True):
            whole, out = gaps(2 * size * size, 3)
            work = dist.all_gather_into_tensor(out, given, async_op=asynchronous)
            assert not asynchronous or work.wait()
            assert same(out, torch.cat(terms)) and whole[..., 1::2].eq(-1).all()

            whole, out = gaps(2, 3)
            work = dist.reduce_scatter_tensor(out, given, async_op=asynchronous)
            assert not asynchronous or work.wait()
            assert same(out, reduced("SUM", terms).chunk(size)[rank])
            assert whole[..., 1::2].eq(-1).all()

            whole, out = gaps(2 * size, 3)
            work = dist.all_to_all_single(out, given, async_op=asynchronous)
            assert not asynchronous or work.wait()
            assert same(out, torch.cat([term.chunk(size)[rank] for term in terms]))
            assert whole[..., 1::2].eq(-1).all()

            for root in (0, size - 1):
                whole, out = gaps(2 * size, 3)
                out.copy_(terms[rank])
                work = dist.reduce(out, root, async_op=asynchronous)
                assert not asynchronous or work.wait()
                assert same(out, reduced("SUM", terms) if rank == root else terms[rank])
                assert whole[..., 1::2].eq(-1).all()

                parts = [gaps(2 * size, 3) for _ in terms]
                got = [out for _, out in parts] if rank == root else None
                work = dist.gather(given, got, root, async_op=asynchronous)
                assert not asynchronous or work.wait()
                assert got is None or all(map(same, got, terms))
                assert all(whole[..., 1::2].eq(-1).all() for whole, _ in parts)

                whole, out = gaps(2, 3)
                cut = list(given.chunk(size)) if rank == root else None
                work = dist.scatter(out, cut, root, async_op=asynchronous)
                assert not asynchronous or work.wait()
                assert same(out, terms[root].chunk(size)[rank])
                assert whole[..., 1::2].eq(-1).all()


@on_ranks(*ON)
def test_gather_and_scatter(tmp_path):
    with job(tmp_path) as (rank, size):
        terms = [drawn(r, (3, 4), torch.int64) for r in range(size)]
        for root in (0, size - 1):
            got = [torch.empty_like(terms[0]) for _ in terms] if rank == root else None
            dist.gather(terms[rank], got, root)
            assert got is None or all(map(same, got, terms))

            mine = torch.empty_like(terms[0])
            dist.scatter(mine, terms if rank == root else None, root)
            assert same(mine, terms[rank])


@on_ranks(*ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_all_to_all_in_all_its_forms(dtype, tmp_path):
    with job(tmp_path) as (rank, size):

        def sent(r, to):
            return drawn(r * size + to, (r + to, 2), dtype)

        want = [sent(r, rank) for r in range(size)]

        got = [torch.empty_like(t) for t in want]
        dist.all_to_all(got, [sent(rank, to) for to in range(size)])
        assert all(map(same, got, want))

        out = torch.empty_like(torch.cat(want))
        dist.all_to_all_single(
            out,
            torch.cat([sent(rank, to) for to in range(size)]),
            [len(t) for t in want],
            [rank + to for to in range(size)],
        )
        assert same(out, torch.cat(want))

        # torch's own functions make pairs of reals of complex numbers.
        group, own = dist.group.WORLD, [sent(rank, to) for to in range(size)]
        got = [torch.empty_like(t) for t in want]
        group.alltoall(got, own).wait()
        assert all(map(same, got, want))
        splits = [len(t) for t in want], [rank + to for to in range(size)]
        group.all_to_all_single(out.zero_(), torch.cat(own), *splits).wait()
        assert same(out, torch.cat(want))

        # Rank r gets r + 1 of each: what it gets is even, what it gives is not; then back.
        splits, own = [r + 1 for r in range(size)], torch.full((rank + 1,), float(rank))
        gotten = torch.empty(size * (rank + 1))
        given = torch.cat([torch.full((n,), float(rank)) for n in splits])
        dist.all_to_all_single(gotten, given, input_split_sizes=splits)
        assert same(gotten, torch.arange(float(size)).repeat_interleave(rank + 1))
        back = torch.empty(sum(splits))
        dist.all_to_all_single(back, own.repeat(size), output_split_sizes=splits)
        assert same(back, torch.cat([torch.full((n,), n - 1.0) for n in splits]))

        even = torch.empty(size * 3, dtype=dtype)
        dist.all_to_all_single(even, drawn(rank, (size * 3,), dtype))
        parts = [drawn(r, (size * 3,), dtype).chunk(size)[rank] for r in range(size)]
        assert same(even, torch.cat(parts))


@on_ranks(*ON)
def test_split_sizes_on_one_rank_alone_are_an_error_that_names_both(tmp_path):
    with job(tmp_path) as (rank, size):
        own, out = torch.ones(size * 3), torch.empty(size * 3)
        splits = [3] * size if rank == size - 1 else None

        if size > 1:
            with pytest.raises(dist.DistBackendError) as raised:
                dist.all_to_all_single(out, own, splits, splits)
            assert "rank 0 calls all-to-all 1 of 3 float32, " in str(raised.value)
            assert f"rank {size - 1} calls all-to-all 1 of float32 with split sizes" in str(
                raised.value
            )
        dist.all_to_all_single(out, own)  # the group goes on
        assert same(out, own)


@on_ranks(1, 2)
def test_the_report_says_what_was_done_in_each_group(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.new_group()
        for _ in range(3):
            dist.all_reduce(torch.ones(1 << 18), group=group)
        dist.barrier(group)

        report = smp.comm_report()

        (of_world, of_group) = sorted(report.groups, key=lambda use: use.operations)
        assert of_world.ranks == of_group.ranks == tuple(range(size))
        assert of_group.operations == of_world.operations + 4
        assert of_group.bytes == of_world.bytes + 3 * (1 << 20)
        assert of_group.to_hosts == () and of_group.messages == of_group.sent == 0
        assert f"rank {rank} has done in groups of smddp:" in str(report)
        way = of_group.on_host or "none"
        assert way in ("process_vm_readv", "shared memory") if size > 1 else way == "none"
        want = ["3.0", *way.split()]
        lines = [line.split() for line in str(report).split("\n")]
        assert any(line[3 : 3 + len(want)] == want for line in lines)


@on_ranks(2)
def test_the_report_counts_the_bytes_that_this_rank_gives_or_gets(tmp_path):
    with job(tmp_path) as (rank, size):

        def moved() -> int:
            (group,) = smp.comm_report().groups
            return group.bytes

        x, wide = torch.zeros(100), torch.zeros(size * 100)
        parts = list(wide.chunk(size))
        root = rank == 1
        for call, elements in (
            (lambda: dist.broadcast(x, 1), 100),
            (lambda: dist.reduce(x, 1), 100),
            (lambda: dist.all_gather_into_tensor(wide, x), 100),
            (lambda: dist.gather(x, parts if root else None, 1), 100),
            (lambda: dist.scatter(x, parts if root else None, 1), 100 * size if root else 100),
            (lambda: dist.reduce_scatter_tensor(x, wide), 100 * size),
            (lambda: dist.all_to_all_single(wide, wide.clone()), 100 * size),
            (lambda: dist.barrier(), 0),
        ):
            before = moved()
            call()
            assert moved() - before == 4 * elements


@on_ranks(2)
def test_the_report_says_what_went_to_other_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_COMM_TRANSPORTS", "tcp")
    with job(tmp_path) as (rank, _):

        def use():
            (group,) = smp.comm_report().groups
            return group

        before = use()
        assert (before.on_host, before.to_hosts) == ("", ("tcp",))
        dist.all_reduce(torch.ones(1 << 15))
        after = use()
        assert after.messages > before.messages and after.operations == before.operations + 1
        assert after.sent - before.sent >= 1 << 16  # half of the sum, at least
        dist.barrier()  # which has no elements, but words
        assert use().sent > after.sent and use().bytes == after.bytes
        dist.barrier()


@on_ranks(2)
def test_in_a_profile_an_operation_lasts_until_all_have_come(tmp_path):
    with job(tmp_path) as (rank, _), torch.profiler.profile() as profile:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            work = dist.all_reduce(torch.ones(2), async_op=True)
            with torch.profiler.record_function("meanwhile"):
                store.set("come", "now")
            work.wait()
        else:
            store.wait(["come"])
            dist.all_reduce(torch.ones(2))
    times = {e.name: e.time_range for e in profile.events()}
    if rank == 0:  # before PyTorch 2.12 the call is shown
        is_shown = torch_versions.EVENTS_CROSS_THREADS
        assert (times["smddp:all_reduce"].end >= times["meanwhile"].end) == is_shown


@on_ranks(2)
def test_the_report_says_what_was_sent_and_what_the_pool_had(tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_COMM_POOL_BYTES", str(4 << 20))
    with job(tmp_path) as (rank, _):
        before = smp.comm_report()
        if rank == 0:
            for _ in range(3):
                dist.send(torch.ones(1 << 16), 1)
        else:
            for _ in range(3):
                dist.recv(torch.empty(1 << 16), 0)
        fits = dist.group.WORLD.allocate_tensor(1 << 19, dtype=torch.float32)
        too_large = dist.group.WORLD.allocate_tensor(1 << 22, dtype=torch.float32)
        report = smp.comm_report()
        dist.barrier()  # who is left alone allocates nothing

        ((was,), (peer,)) = before.group_peers, report.group_peers
        assert (peer.rank, peer.transport) == (1 - rank, "shm")
        assert peer.messages - was.messages == (3 if rank == 0 else 0)
        assert peer.bytes - was.bytes >= (3 << 18 if rank == 0 else 0)
        (pool,) = report.group_pools
        assert fits.nbytes <= pool.high <= pool.bytes <= 5 << 20 < too_large.nbytes
        assert pool.fallbacks == before.group_pools[0].fallbacks + 1
        assert "1 did not fit" in str(report) and " shm " in str(report)


class OnCuda(torch.Tensor):
    """A tensor that says so."""

    is_cuda = True
    is_cpu = False


class Recorder:
    """In place of a NCCL group: what it is asked to do."""

    def __init__(self):
        self.asked = []  # by the names of PyTorch 2.13

    @classmethod
    def of(cls, group):
        """The group's, as if no two of its ranks shared a GPU."""
        group._nccl = cls()
        group._through_host[None] = False
        return group._nccl

    def __getattr__(self, name):
        if not hasattr(dist.ProcessGroup, name):
            raise AttributeError(name)

        def method(*args):
            older = torch_versions.NAMES_BEFORE_2_13
            self.asked.append(next((new for new in older if older[new] == name), name))
            done = torch.futures.Future()
            done.set_result(None)
            return torch._C._distributed_c10d._create_work_from_future(done)

        return method


@on_ranks(1)
def test_operations_of_cuda_tensors_are_coalesced_by_nccl(tmp_path):
    with job(tmp_path):
        group = dist.group.WORLD
        nccl = Recorder.of(group)
        tensors = [torch.ones(3).as_subclass(OnCuda), torch.ones(4).as_subclass(OnCuda)]

        with dist._coalescing_manager(device=torch.device("cuda")):
            for tensor in tensors:
                dist.all_reduce(tensor)
        with dist._coalescing_manager(device=torch.device("cuda")):
            dist.reduce(tensors[0], 0)

        assert nccl.asked == [
            *("_start_coalescing", "allreduce_coalesced", "_end_coalescing"),
            *("_start_coalescing", "reduce", "_end_coalescing"),
        ]
        group._nccl = None


@on_ranks(2)
def test_other_operations_of_cuda_tensors_are_nccl_s(tmp_path):
    """Also where this rank gives or gets nothing, and of a barrier; its end is NCCL's, too."""
    with job(tmp_path) as (rank, size):
        gpu = torch.ones(3).as_subclass(OnCuda)
        for end in ("shutdown", "abort"):
            group = dist.new_group()
            nccl = Recorder.of(group)
            device = torch.device("cuda", 0)
            group.gather([] if rank else [[gpu] * size], [gpu])
            group.scatter([gpu], [] if rank else [[gpu] * size])
            options = dist.BarrierOptions()
            options.device = device
            group.barrier(options)
            assert nccl.asked == ["gather", "scatter", "barrier"]
            nccl.asked.clear()
            with pytest.raises(ArithmeticError), dist._coalescing_manager(group, device):
                group.reduce([gpu])
                raise ArithmeticError
            with dist._coalescing_manager(group, device):
                group.reduce([gpu])
            assert nccl.asked == ["_start_coalescing", "reduce", "_end_coalescing"] * 2
            assert group._get_backend(device) is not group
            getattr(group, end)()
            assert nccl.asked[-1] == end and group._group.sequence() == 0
            assert "was destroyed" in refused(lambda: group.barrier())  # noqa: B023


class Nccl:
    """In place of NCCL's backend."""

    class Options:
        _timeout = None

    def __init__(self, *given):
        self.given = given


class GroupOfNccl:
    """In place of torch's group around it."""

    BackendType = dist.ProcessGroup.BackendType

    def __init__(self, *given):
        self.given, self.set = given, {}

    def __getattr__(self, name):
        return lambda *given: self.set.update({name: given})


@on_ranks(2)
@pytest.mark.parametrize("has_options", [False, True])
def test_the_group_of_nccl_has_the_group_s_ranks_name_and_time(
    has_options, tmp_path, monkeypatch
):
    with job(tmp_path) as (rank, size):
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
        options = Nccl.Options() if has_options else None
        group = dist.new_group(timeout=timedelta(seconds=41), pg_options=options)
        monkeypatch.setattr(dist, "ProcessGroup", GroupOfNccl)
        nccl = group.nccl()
        device, kind, backend = nccl.set["_register_backend"]
        store, *place, given = backend.given
        assert group.nccl() is nccl and nccl.given == (store, rank, size)
        assert place == [rank, size] and isinstance(given, Nccl.Options)
        assert given is options or (not has_options and given._timeout.total_seconds() == 41)
        assert device.type == "cuda" and nccl.set["_set_default_backend"] == (kind,)
        assert kind == GroupOfNccl.BackendType.NCCL
        assert nccl.set["_set_group_name"] == (group.group_name,)
        store.set(f"key {rank}", "")
        assert group.get_group_store().check([f"nccl/key {rank}"])
        group._nccl = None
        for has_gpu, names in ((False, ["cpu"]), (True, ["cpu", "cuda"])):
            monkeypatch.setattr(torch.cuda, "is_available", lambda has=has_gpu: has)
            assert [device.type for device in group._device_types] == names


@on_ranks(*ON)
def test_tensors_with_gaps_are_filled_where_they_are(tmp_path):
    with job(tmp_path) as (rank, size):

        def strided(r):
            return drawn(r, (8, 6), torch.float32).t()[::2]

        terms = [strided(r) for r in range(size)]
        total = reduced("SUM", [term.contiguous() for term in terms])

        tensor = terms[rank]
        dist.all_reduce(tensor)
        assert same(tensor, total)
        assert not tensor.is_contiguous()

        work = dist.all_reduce(later := strided(rank), async_op=True)
        work.wait()
        assert same(later, total)

        got = [torch.zeros(6, 8).t()[:, ::2] for _ in terms]
        dist.all_gather(got, drawn(rank, (8, 3), torch.float32))
        for r in range(size):
            assert same(got[r], drawn(r, (8, 3), torch.float32))

        negative = torch.full((3,), complex(0, rank)).conj().imag
        assert negative.is_neg()
        dist.broadcast(negative, 1)
        assert negative.tolist() == [-1.0] * 3


@on_ranks(*ON)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_that_require_grad_are_filled_outside_autograd(tmp_path, asynchronous):
    """Leaves, with gaps too, and what has a graph: the values change, and nothing else."""

    def gaps(r):
        return drawn(r, (8, 6), torch.float32).t()[::2]

    def dense(r):
        return gaps(r).contiguous()

    with job(tmp_path) as (rank, size):
        for term in (gaps, dense):
            terms = [term(r) for r in range(size)]
            leaf = term(rank).requires_grad_()
            parameter = torch.nn.Parameter(term(rank))
            inner = leaf.mul(1)
            for tensor in (parameter, inner, leaf):
                work = dist.broadcast(tensor, size - 1, async_op=asynchronous)
                assert not asynchronous or work.wait()
                assert same(tensor.detach(), terms[-1])
            assert leaf.is_leaf and parameter.is_leaf and leaf.requires_grad
            assert inner.grad_fn is not None and inner.requires_grad
            (leaf.square().sum() + parameter.sum()).backward()
            assert torch.equal(leaf.grad, 2 * terms[-1])
            assert parameter.grad.eq(1).all()

            listed = [torch.zeros(t.shape).requires_grad_() for t in terms]
            own = term(rank).requires_grad_()
            work = dist.all_gather(listed, own, async_op=asynchronous)
            assert not asynchronous or work.wait()
            assert all(map(same, [t.detach() for t in listed], terms))
            assert all(t.is_leaf and t.requires_grad for t in listed)


# ------------------------------------------------------------------- from rank to rank


@on_ranks(*ON)
@pytest.mark.parametrize("dtype", NUMBERS + COPIED, ids=str)
def test_a_ring_of_sends(dtype, tmp_path):
    source = torch.float32 if dtype == torch.float8_e4m3fnuz else dtype
    with job(tmp_path) as (rank, size):
        for shape in SHAPES:
            tensor = torch.empty(shape, dtype=dtype)
            dist.send(drawn(rank, shape, source).to(dtype), (rank + 1) % size)
            dist.recv(tensor, (rank - 1) % size)
            assert same(tensor, drawn((rank - 1) % size, shape, source).to(dtype))


@on_ranks(*ON)
def test_tags_and_sources_tell_messages_apart(tmp_path):
    with job(tmp_path) as (rank, size):
        if rank == 0:
            for tag in (7, 0, 3):
                dist.send(torch.full((2,), float(tag)), 1, tag=tag)
        if rank == 1:
            for tag in (3, 7, 0):
                tensor = torch.empty(2)
                dist.recv(tensor, 0, tag=tag)
                assert tensor[0].item() == tag
        if rank == 0:
            heard = set()
            for _ in range(1, size):
                tensor = torch.empty(3)
                source = dist.recv(tensor)
                assert tensor.tolist() == [source] * 3
                heard.add(source)
            assert heard == set(range(1, size))
        else:
            dist.send(torch.full((3,), float(rank)), 0)
        other = size - 2  # with 2 ranks rank 0 itself
        if rank == size - 1:
            of_first, of_other = torch.empty(1), torch.empty(1)
            from_first = dist.irecv(of_first, 0, tag=1)
        if rank == other:
            dist.send(torch.tensor([9.0]), size - 1, tag=0 if other == 0 else 1)
        dist.barrier()
        if rank == size - 1:
            assert not from_first.is_completed()  # what has come is another's
        dist.barrier()
        if rank == 0:
            dist.send(torch.tensor([8.0]), size - 1, tag=1)
        if rank == size - 1:
            dist.recv(of_other, other, tag=0 if other == 0 else 1)
            assert from_first.wait() and (of_first.item(), of_other.item()) == (8, 9)


@on_ranks(4)
def test_the_source_of_a_message_in_a_part_of_the_ranks(tmp_path):
    """torch's call says its global rank; the work, its rank in the group."""
    members = [3, 0, 2]  # whose order is the group's own
    with job(tmp_path) as (rank, _):
        group = dist.new_group(members)
        for other in set(members) - {rank}:
            if rank in members:
                for _ in range(2):
                    dist.send(torch.tensor([float(rank)]), other, group=group)
        heard = []
        for i in range(4 if rank in members else 0):
            x = torch.empty(1)
            if i % 2:
                source = dist.recv(x, group=group)
            else:
                work = dist.irecv(x, group=group)
                work.wait()
                source = dist.get_global_rank(group, work.source_rank())
            assert source == x.item()
            heard.append(source)
        others = [member for member in members for _ in range(2) if rank in members]
        assert sorted(heard) == sorted(other for other in others if other != rank)
        dist.barrier()


@on_ranks(*ON)
def test_receives_that_were_begun_before_the_sends(tmp_path):
    with job(tmp_path) as (rank, size):
        got = [torch.empty(4, 3).t() for _ in range(size)]
        operations = [dist.P2POp(dist.irecv, got[r], r) for r in range(size) if r != rank]
        operations += [
            dist.P2POp(dist.isend, torch.full((3, 4), float(rank)), r)
            for r in range(size)
            if r != rank
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert all(got[r].eq(r).all() for r in range(size) if r != rank)

        later = torch.empty(1)
        future = dist.irecv(later, rank).get_future()  # from itself
        dist.isend(torch.ones(1), rank)
        assert future.wait()[0].item() == 1


def end_of(future) -> str:
    """What went wrong; waits for it."""
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    assert over.wait(60)
    return refused(future.value)


@on_ranks(2)
def test_the_future_of_a_receive_ends_with_a_time_out(tmp_path):
    """... or when the ranks are left."""
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        left = dist.irecv(torch.empty(1), rank).get_future()  # from itself
        group.set_timeout(timedelta(seconds=0.1))
        work = dist.irecv(torch.empty(1), 1 - rank)
        assert "timed out after 0.1 s" in end_of(work.get_future())
        assert work.is_completed() and not work.is_success()
        assert "timed out after 0.1 s" in refused(work.wait)
        group.set_timeout(timedelta(seconds=30))
        dist.barrier()  # nobody leaves while the other's time is not over
    assert "these ranks have been left" in end_of(left)


class Failing(Work):
    def complete(self) -> None:
        raise ArithmeticError


@on_ranks(2)
def test_a_work_that_fails_to_complete_is_the_only_one(tmp_path, monkeypatch):
    """... and is told as the error of a thread."""
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        told = []
        monkeypatch.setattr(threading, "excepthook", told.append)
        item = group._group.work_item(BARRIER, None, None, 0, 0, 1.0, None, None, 0.0)
        group._ranks.issue(item, Failing(item))
        over = threading.Event()
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        future.add_done_callback(lambda _: over.set())
        assert over.wait(60)
        assert [args.exc_type for args in told] == [ArithmeticError]


@on_ranks(4)
def test_a_monitored_barrier_names_who_is_missing(tmp_path):
    """... and the next one, with all present, is passed: also by who came too late."""
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        store = dist.distributed_c10d._get_default_store()
        group.monitored_barrier()
        short = timedelta(seconds=1)
        for time, missing in enumerate(("Ranks 2, 3", "Rank 2")):
            if rank == 0:
                call = partial(group.monitored_barrier, short, wait_all_ranks=time == 0)
                said = refused(call)
                assert missing in said
                assert "failed to pass monitoredBarrier in 1000 ms" in said
                store.set(f"failed {time}", "")
            if rank == 1:
                said = refused(lambda: group.monitored_barrier())
                assert "errors while waiting for send/recv from rank 0: it did not hear" in said
            if rank >= 2:  # they come when it has failed
                store.wait([f"failed {time}"])
            group.monitored_barrier()
        if rank == 3:  # nobody is in one, and the others do not fall behind
            assert "from rank 0" in refused(lambda: group.monitored_barrier(short))
            store.set("alone", "")
        store.wait(["alone"])
        group.monitored_barrier()


class WordsOfRank0:
    """A line to rank 0, which has said already all that it will say."""

    def __init__(self, *words: tuple[int, int]):
        self.words = list(words)
        self.told: list[tuple[int, ...]] = []

    def tell(self, rank, word):
        self.told.append((rank, *word.tolist()))

    def listen(self, rank, word):
        return SimpleNamespace(wait=lambda timeout: self.next(word))

    def next(self, word):
        if not self.words:
            raise dist.DistBackendError("silence")
        word.copy_(torch.tensor(self.words.pop(0)))


@pytest.mark.parametrize("late", ["_ANSWERED", "_PASSED", "_FAILED", "_MISSED"])
def test_how_an_older_monitored_barrier_ended_is_nothing_to_a_newer_one(late):
    """Rank 0's word on the older one comes when this rank has given that up."""
    asked, answered, passed = (
        getattr(monitored_barrier, name) for name in ("_ASKED", "_ANSWERED", "_PASSED")
    )
    older = (getattr(monitored_barrier, late), 1)
    limits = timedelta(seconds=60), False
    for words in ([older, (asked, 2)], [(asked, 2), older]):
        monitor = monitored_barrier.Monitor("g", 1, [0, 1])
        line = WordsOfRank0((asked, 1))
        barrier = partial(monitor.barrier, line, *limits)
        assert "silence" in refused(barrier)
        line.words = [*words]
        assert "monitored barrier 2: " in refused(barrier)
        line.words = [older, (asked, 3), older, (passed, 2), (passed, 3)]
        barrier()
        assert line.told == [(0, answered, number) for number in (1, 2, 3)]


@on_ranks(2)
def test_works_that_are_one_fail_as_one(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        for good in (True, False):
            group._start_coalescing(torch.device("cpu"))
            tensors = [torch.ones(2), torch.ones(3 if good else 3 + rank)]
            for tensor in tensors:
                dist.all_reduce(tensor, async_op=True)
            work = group._end_coalescing(torch.device("cpu"))
            if good:
                assert work.wait() and work.is_completed() and work.is_success()
                assert work.exception() is None
                assert all(map(torch.equal, work.result(), tensors))
            else:
                assert "(sum) of 3 float32, rank 1" in refused(work.wait)
                assert work.is_completed() and not work.is_success()
                assert "(sum) of 3 float32, rank 1" in str(work.exception())


@on_ranks(2)
def test_works_that_are_one_have_one_time_out(tmp_path):
    """Not each of them the whole of it."""
    clock = [0.0]

    class Late(Work):
        def __init__(self, takes_s):
            dist.Work.__init__(self)
            self.takes_s = takes_s

        def wait(self, timeout=None):
            clock[0] += min(self.takes_s, timeout.total_seconds())
            if timeout.total_seconds() < self.takes_s:
                raise dist.DistBackendError(f"late after {clock[0]:g} s")
            return True

    assert AllOf([Late(1), Late(1)]).wait(timedelta(seconds=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("smp.collectives.work.time", SimpleNamespace(monotonic=lambda: clock[0]))
        clock[0] = 0.0
        assert "late after 3 s" in refused(
            lambda: AllOf([Late(2), Late(2)]).wait(timedelta(seconds=3))
        )
        clock[0] = 0.0  # what is left for the last is next to nothing, and not no limit
        late = refused(lambda: AllOf([Late(3), Late(9)]).wait(timedelta(seconds=3)))
        assert "late after 3.001 s" in late


# ----------------------------------------------------------------- groups, order, works


@on_ranks(4)
def test_sub_groups_work_by_themselves(tmp_path):
    with job(tmp_path) as (rank, size):
        groups = [dist.new_group(members) for members in ([0, 2], [1, 3], [3, 0, 1])]
        for members, group in zip(([0, 2], [1, 3], [0, 1, 3]), groups, strict=True):
            if rank not in members:
                continue
            tensor = torch.tensor([float(2**rank)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(2**r for r in members)
        dist.destroy_process_group(groups[0]) if rank in (0, 2) else None
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size


@on_ranks(2)
def test_an_aborted_group_is_left(tmp_path):
    with job(tmp_path) as (rank, _):
        group = dist.new_group()
        dist.barrier(group)
        if rank == 0:
            group.abort()
        else:
            with pytest.raises(dist.DistBackendError, match="rank 0 has left"):
                dist.barrier(group)
        dist.barrier()  # rank 0 is still in this one


@on_ranks(2)
def test_a_group_beside_a_default_group_of_another_backend(tmp_path, monkeypatch):
    """... also where that has taken the place of one of ours.  The port is the default's."""
    left = []
    monkeypatch.setattr(launch, "take_next_port", lambda: left.append(1))
    (tmp_path / "before").mkdir(exist_ok=True)
    with job(tmp_path / "before"):
        dist.destroy_process_group(dist.new_group())
        dist.barrier()
        assert left == []
    assert left == [1]
    with job(tmp_path, "gloo") as (rank, size):
        group = dist.new_group(backend="smddp")
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [size] * 3
        assert dist.get_backend(group) == "smddp"
    assert left == [1]


@on_ranks(1)
@pytest.mark.parametrize("default", ["smddp", "gloo"])
def test_a_group_that_cannot_be_made_leaves_no_ranks(default, tmp_path, monkeypatch):
    def refuse(*_):
        raise LookupError("no group")

    before = len(Ranks.open)
    monkeypatch.setattr("smp.collectives.backend.ProcessGroup", refuse)
    with pytest.raises(LookupError, match="no group"), job(tmp_path, default):
        dist.new_group(backend="smddp")
    assert len(Ranks.open) == before
    if dist.is_initialized():
        dist.destroy_process_group()


@on_ranks(2)
def test_what_is_set_for_groups_ends_with_its_block(tmp_path, monkeypatch):
    """Of ranks, and what groups are called; also where an error ends it."""
    monkeypatch.setenv("SMP_COMM_POOL_BYTES", str(4 << 20))
    names = ["comm_pool_bytes", "comm_device_gather_bytes", "watchdog_report_s"]
    given = dict(zip(names, (16 << 20, 12345, 67.5), strict=True))
    for number in range(2):
        inside, after = (tmp_path / f"{number}{part}" for part in ("inside", "after"))
        inside.mkdir(exist_ok=True), after.mkdir(exist_ok=True)
        with pytest.raises(LookupError), with_settings(given), called("mine"):
            with job(inside):
                ((pool,), (use,)) = (lambda r: (r.group_pools, r.groups))(smp.comm_report())
                assert use.name == "mine" and pool.bytes >= 16 << 20
                ranks = dist.group.WORLD._ranks
                assert (ranks.gather_bytes, ranks.report_s) == (12345, 67.5)
            raise LookupError
        with job(after):
            ((pool,), (use,)) = (lambda r: (r.group_pools, r.groups))(smp.comm_report())
            assert use.name == "0" and pool.bytes <= 5 << 20
            ranks = dist.group.WORLD._ranks
            assert ranks.gather_bytes > 12345 and ranks.report_s != 67.5


@on_ranks(2)
def test_bytes_move_while_nobody_can_run_python(tmp_path):
    """A thread that keeps the GIL sees the result come."""
    pause = ctypes.PyDLL(None).sched_yield  # keeps the GIL
    with job(tmp_path) as (rank, size):
        for count in (100, 5_000_000):
            tensor = torch.ones(count)
            last = ctypes.c_float.from_address(tensor.data_ptr() + 4 * (count - 1))
            dist.barrier()
            before = sys.getswitchinterval()
            sys.setswitchinterval(1000)
            try:
                work = dist.all_reduce(tensor, async_op=True)
                deadline = time.monotonic() + 60
                while last.value != size and time.monotonic() < deadline:
                    pause()
                came = last.value
            finally:
                sys.setswitchinterval(before)
            assert came == size
            assert work.wait()


@on_ranks(*ON)
def test_asynchronous_calls_run_in_the_order_of_their_issue(tmp_path):
    """... with synchronous ones in between."""
    with job(tmp_path) as (rank, size):
        tensor = torch.ones(50_000)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
        dist.all_reduce(tensor)
        assert tensor[0].item() == size**6
        assert all(work.is_completed() for work in works)
        assert works[0].result()[0] is tensor


@on_ranks(*ON)
def test_a_future_completes_although_nobody_waits(tmp_path):
    with job(tmp_path) as (rank, size):
        tensor = torch.ones(10)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        doubled = future.then(lambda f: f.value()[0] * 2)

        assert torch.equal(doubled.wait(), torch.full((10,), 2.0 * size))


@on_ranks(*ON)
def test_what_follows_a_future_may_wait_for_another(tmp_path):
    """As in DDP's PowerSGD hook."""
    with job(tmp_path) as (rank, size):

        def then_reduce(future):
            tensor = future.value()[0]
            return dist.all_reduce(tensor, async_op=True).get_future().wait()

        first = dist.all_reduce(torch.ones(4), async_op=True).get_future()
        assert first.then(then_reduce).then(then_reduce).wait()[0].tolist() == [size**3] * 4


@on_ranks(*ON)
def test_a_result_that_nobody_keeps_is_still_delivered(tmp_path):
    with job(tmp_path) as (rank, size):
        tensors = [torch.ones(1000) for _ in range(50)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        dist.barrier()
        assert all(tensor[999].item() == size for tensor in tensors)


@on_ranks(2)
def test_a_group_answers_what_torch_asks(tmp_path):
    with job(tmp_path) as (rank, size):
        host, gpu = torch.device("cpu"), torch.device("cuda", 0)
        group = dist.new_group(group_desc="mine")
        assert (group.rank(), group.size(), group.name()) == (rank, size, "smddp")
        assert group.group_desc == "mine" and group.group_name == group.getGroupName() == "1"
        assert group.bound_device_id is None
        group.bound_device_id = gpu
        assert group.bound_device_id == gpu
        group.bound_device_id = None
        assert host in group._device_types and group._get_backend(host) is group
        assert group.supports_tensor_alloc(host) and not group.supports_tensor_alloc(gpu)
        with pytest.raises(ValueError, match="memory of the host, not of cuda:0"):
            group.allocate_tensor(4, dtype=torch.float32, device=gpu)
        assert dist.irecv(torch.empty(1), 1 - rank)._timeout_s == 30  # the job's
        before = group._get_sequence_number_for_group(), group.issued()
        dist.barrier(group)
        after = group._get_sequence_number_for_group(), group.issued()
        assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
        store = group.get_group_store()
        store.set(f"key {rank}", b"text")
        assert store.get(f"key {1 - rank}") == b"text"
        other = dist.new_group().get_group_store()
        assert not other.check([f"key {rank}"])
        alone = [dist.new_group([member]) for member in range(size)][rank]
        assert not alone.supports_tensor_alloc(host)
        dist.barrier()


# --------------------------------------------------------------------------- mismatches


def gathered_unevenly(rank, dtype):
    got = [torch.zeros(1, dtype=dtype), torch.zeros(2, dtype=dtype)]
    dist.all_gather(got, torch.ones(1 + rank, dtype=dtype))


@on_ranks(2)
def test_calls_that_differ_raise_on_both_sides_and_name_both(tmp_path):
    with job(tmp_path) as (rank, size):

        def differ(mine, theirs, *words):
            said = refused(mine if rank == 0 else theirs)
            assert all(word in said for word in ("group '0'", "rank 0", "rank 1", *words)), said

        def all_reduce(*args, op=dist.ReduceOp.SUM):
            return lambda: dist.all_reduce(torch.ones(*args), op)

        differ(all_reduce(4), all_reduce(5), "(sum) of 4", "(sum) of 5")
        differ(all_reduce(4), lambda: dist.barrier(), "all-reduce", "barrier")
        differ(
            all_reduce(4),
            lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32)),
            "float32",
            "int32",
        )
        differ(all_reduce(4), all_reduce(4, op=dist.ReduceOp.MAX), "(sum)", "(max)")
        differ(
            lambda: dist.broadcast(torch.ones(2), 0),
            lambda: dist.broadcast(torch.ones(2), 1),
            "root",
        )
        differ(
            lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [2, 2]),
            lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1, 3], [3, 1]),
        )

        def broadcast(n, dtype):
            return lambda: dist.broadcast(torch.ones(n).to(dtype), 0)

        for own, other in (
            ("4 int16", "8 uint8"),
            ("4 uint16", "4 int16"),
            ("3 float8_e4m3fn", "3 float8_e5m2"),
            ("3 float8_e4m3fnuz", "3 float8_e8m0fnu"),
            ("2 uint64", "2 int64"),
        ):
            calls = [(int(n), getattr(torch, name)) for n, name in map(str.split, (own, other))]
            differ(*(broadcast(*call) for call in calls), f"of {own}", f"of {other}")
        differ(  # dist.all_reduce() itself makes pairs of reals of complex numbers
            lambda: dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)]).wait(),
            all_reduce(4),
            "(sum) of 2 complex64",
            "(sum) of 4 float32",
        )
        differ(
            lambda: gathered_unevenly(rank, torch.int16),
            lambda: gathered_unevenly(rank, torch.uint16),
            "of int16 with split sizes",
            "of uint16 with split sizes",
        )
        work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
        assert "(sum) of 3 float32" in refused(work.wait)
        assert "(sum) of 4 float32" in str(work.exception())
        future = dist.all_reduce(torch.ones(3 + rank), async_op=True).get_future()
        refused(future.wait)

        tensor = torch.ones(2)  # and the group goes on
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2, 2]


@on_ranks(2)
def test_what_cannot_be_done_is_refused_before_anybody_waits(tmp_path):
    """Beside what the core refuses (tests/test_core_collectives.py)."""
    with job(tmp_path) as (rank, size):
        x = torch.ones(4)
        with pytest.raises(TypeError, match=r"all-reduce \(sum\) of torch.int16"):
            dist.all_reduce(x.to(torch.int16))
        for odd in (torch.ones(5), torch.ones(5, 2), torch.ones(5, dtype=torch.complex64)):
            with pytest.raises(ValueError, match="axis of 5 is not cut evenly among 2 ranks"):
                dist.all_to_all_single(odd.clone(), odd)
        with pytest.raises(ValueError, match="all-to-all: 3 sizes, one for each rank is"):
            dist.group.WORLD.all_to_all_single(x, x.clone(), [2, 2], [2, 1, 1])
        with pytest.raises(ValueError, match="all-reduce: an empty list"):
            dist.group.WORLD.allreduce_coalesced([])
        with pytest.raises(ValueError, match="an empty list, where a tensor for each rank"):
            dist.all_gather([], x)
        with pytest.raises(ValueError, match="the tag is -1, and must not be negative"):
            dist.send(x, 1 - rank, tag=-1)


@on_ranks(2)
def test_what_is_only_read_need_not_be_writable(tmp_path):
    with job(tmp_path) as (rank, _):
        wide = torch.tensor([5.0]).expand(4) if rank == 0 else torch.zeros(4)
        dist.broadcast(wide, 0)
        assert wide.eq(5).all()
        wide = torch.tensor([5.0]).expand(4) if rank == 1 else torch.ones(4)
        dist.reduce(wide, 0)
        assert wide.eq(5 if rank else 6).all()


@on_ranks(2)
def test_inference_tensors_are_filled_by_whoever_completes(tmp_path):
    with job(tmp_path) as (rank, size), torch.inference_mode():
        parts = [torch.empty(3) for _ in range(size)]
        work = dist.all_gather(parts, torch.full((3,), float(rank)), async_op=True)
        other = threading.Thread(target=work.wait)  # which is in no inference mode
        other.start()
        other.join()
        assert torch.stack(parts)[:, 0].tolist() == [0, 1]


@on_ranks(2)
def test_a_conjugate_or_negative_view_travels_by_its_values(tmp_path):
    """... and takes results as such."""
    with job(tmp_path) as (rank, _):
        group = dist.group.WORLD
        own = torch.complex(torch.ones(4), torch.full((4,), 1.0 + rank))
        views = [own.conj(), torch._neg_view(torch.full((4,), 1.0 + rank))]
        wants = [torch.complex(torch.tensor(2.0), torch.tensor(-3.0)), torch.tensor(-3.0)]
        for view, want in zip(views, wants, strict=True):
            assert view.is_conj() or view.is_neg()
            group.send([view], 1 - rank)
            got = torch.empty(4, dtype=view.dtype)
            group.recv([got], 1 - rank).wait()
            mine = view.clone()
            group.allreduce([view]).wait()
            assert view.eq(want).all() and (got + mine).eq(want).all()
        assert own.imag.eq(3).all()  # the view's own memory


@on_ranks(2)
def test_messages_are_coalesced(tmp_path):
    with job(tmp_path) as (rank, _):
        x = torch.zeros(2)
        with dist._coalescing_manager(device=torch.device("cpu")):
            dist.isend(torch.full((2,), float(rank)), 1 - rank)
            dist.irecv(x, 1 - rank)
        assert x.eq(1 - rank).all()
        # What comes after them is no part of them, which would keep it.
        large = torch.ones(10_000)
        memory = weakref.ref(large)
        dist.all_reduce(large)
        del large
        assert memory() is None


@on_ranks(2)
def test_a_default_device_is_the_script_s_own(tmp_path):
    with job(tmp_path), torch.device("meta"):
        dist.group.WORLD.monitored_barrier()
        sparse = torch.eye(2, device="cpu").to_sparse()
        dist.all_reduce(sparse)
        assert sparse.to_dense().trace() == 4


@on_ranks(2, timeout_s=60)
@pytest.mark.parametrize("whose", ["group", "call", "arguments"])
def test_a_time_out_names_the_group_the_call_and_who_is_missing(tmp_path, whose):
    """The group's limit, or one of the call alone, in options or as an argument."""
    short = timedelta(seconds=0.5)
    with job(tmp_path) as (rank, size):
        group, opts = dist.group.WORLD, dist.AllreduceOptions()
        group.set_timeout(short if whose == "group" else timedelta(hours=1))
        if whose == "call":
            opts.timeout = short
        how = (dist.ReduceOp.SUM, short) if whose == "arguments" else (opts,)
        if rank == 0:
            said = refused(lambda: group.allreduce([torch.ones(3)], *how).wait())
            assert "group '0': all-reduce 1 (sum) of 3 float32" in said
            assert "timed out after " in said
            assert "rank 1" in said
            assert "SMP_ERR_TIMED_OUT" in said
        dist.distributed_c10d._get_default_store().set(f"done{rank}", "")
        dist.distributed_c10d._get_default_store().wait(["done0"])
