"""All-gathers of a GPU's tensors in the backend smddp: between the devices of one host.

Spec: ``csrc/comm/device/exchange.h``, ``csrc/comm/collective/intra_host/devices.h``; the way
that an all-gather of host memory goes has the same results.  Without a GPU the pretended
accelerator's driver is the stand-in of ``tests/core/stand_in.c``, whose copies are late;
with one the same tests run on ``"cuda"``.  The C core by itself is in
``tests/core/exchange_test.c``.
"""

import ctypes
import gc
import os
import signal
import warnings
import weakref
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
import smp
from smp import _core
from smp.collectives import gather_times
from smp.collectives.process_group import ALL_GATHER
from smp.collectives.work import Over
from tests import accelerator
from tests.devices import DEVICES
from tests.ranks import on_ranks
from tests.reference.collectives import drawn
from tests.test_collectives import COPIED, NUMBERS, Recorder, job, refused, same

ON = (2, 3)
GATHER_BYTES = "SMP_COMM_DEVICE_GATHER_BYTES"
TINY = "4096"  # two halves of 2 KiB: most tensors take several rounds

on_gpus = pytest.mark.parametrize("device", DEVICES[1:])
on_stand_in = pytest.mark.parametrize("device", DEVICES[1:2])


@contextmanager
def job_on(device: str, folder, memory: str = TINY, **rest):
    """A job whose ranks have a device; this rank's number, how many there are, the device."""
    if device == accelerator.NAME:
        accelerator.use_driver()
        on = accelerator.load()
    else:
        local = int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])
        on = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(on)
    os.environ[GATHER_BYTES] = memory
    # Tests count calls: on GPUs nothing is measured, on the stand-in without NCCL nothing is.
    shared = patch.object(gather_times, "measure", lambda *_: ())
    if device == accelerator.NAME:
        shared = accelerator.memory_of_driver()
    with job(folder, **rest) as (rank, size), shared:
        yield rank, size, on


def gathered() -> int:
    """How many all-gathers of the default group have been between devices."""
    return use_of_default().device_operations


def use_of_default():
    """Of this rank."""
    return next(use for use in smp.comm_report().groups if use.name == "0")


def table() -> ctypes.Array:
    """What stand_in.h declares."""
    library = ctypes.CDLL(os.environ[accelerator.DRIVER])
    return (ctypes.c_void_p * 6).in_dll(library, "stand_in")


@on_ranks(*ON)
@on_gpus
@pytest.mark.parametrize("dtype", NUMBERS + COPIED, ids=str)
def test_every_dtype_and_form(device, dtype, tmp_path):
    source = torch.float32 if dtype == torch.float8_e4m3fn else dtype
    with job_on(device, tmp_path) as (rank, size, on):
        for shape in [(), (0, 3), (5, 4), (7001,)]:
            terms = [drawn(r, shape, source).to(dtype) for r in range(size)]
            own = terms[rank].to(on)

            listed = [torch.empty_like(own) for _ in terms]
            dist.all_gather(listed, own)
            assert all(same(got.cpu(), want) for got, want in zip(listed, terms, strict=True))

            if shape:
                whole = torch.empty((size * shape[0], *shape[1:]), dtype=dtype, device=on)
                dist.all_gather_into_tensor(whole, own)
                parts = whole.cpu().chunk(size) if whole.numel() else []
                assert all(map(same, parts, terms))
        assert gathered() == 7


@on_ranks(*ON)
@on_gpus
def test_unequal_tensors(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        for step in (1, 300):
            terms = [drawn(r, (r * step, 2), torch.float64) for r in range(size)]
            got = [torch.empty_like(term, device=on) for term in terms]

            dist.all_gather(got, terms[rank].to(on))

            assert all(same(one.cpu(), want) for one, want in zip(got, terms, strict=True))
        assert gathered() == 2


@on_ranks(*ON)
@on_gpus
@pytest.mark.filterwarnings("ignore:.*all_gather_coalesced")
def test_many_tensors_as_one(device, tmp_path):
    """... of which NCCL hears nothing."""
    with job_on(device, tmp_path) as (rank, size, on):

        def terms(r):
            return [drawn(r, (n, 3), torch.float32, n) for n in (1, 400)]

        own = [term.to(on) for term in terms(rank)]
        got = [[torch.empty_like(t) for t in own] for r in range(size)]
        dist.all_gather_coalesced(got, own)
        for r in range(size):
            assert all(map(same, [one.cpu() for one in got[r]], terms(r)))

        whole = [torch.empty(size * n, 3, device=on) for n in (1, 400)]
        with dist._coalescing_manager(device=on):
            for out, one in zip(whole, own, strict=True):
                dist.all_gather_into_tensor(out, one)
        for i, out in enumerate(whole):
            assert same(out.cpu(), torch.cat([terms(r)[i] for r in range(size)]))
        assert gathered() == 4
        assert dist.group.WORLD._nccl is None


@on_ranks(*ON)
@on_gpus
def test_tensors_with_gaps_are_filled_where_they_are(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):

        def strided(r):
            return drawn(r, (8, 600), torch.float32).t()[::2]

        for asynchronous in (False, True):
            got = [torch.zeros(600, 8, device=on)[::2] for _ in range(size)]
            work = dist.all_gather(got, strided(rank).to(on), async_op=asynchronous)
            if work is not None:
                work.wait()
                work.synchronize()
                assert work.is_success() and work.exception() is None
                assert all(a is b for a, b in zip(work.result(), got, strict=True))
                assert work.get_future().wait()[0] is not None
            for r in range(size):
                assert torch.equal(got[r].cpu(), strided(r))
                assert not got[r].is_contiguous()
            assert work is None or work.is_completed()
        assert gathered() == 2


@on_ranks(*ON)
@on_gpus
def test_works_may_be_waited_for_in_any_order(device, tmp_path):
    """... with operations on the host in between, and inputs that are written again."""
    with job_on(device, tmp_path) as (rank, size, on):
        for round in range(4):
            works = []
            for i in range(5):
                own = torch.full((1000 + 100 * i,), float(10 * rank + i), device=on)
                out = torch.empty(size * own.numel(), device=on)
                works.append((dist.all_gather_into_tensor(out, own, async_op=True), out, own))
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total.item() == size
            for i in (3, 0, 4, 1, 2):
                work, out, own = works[i]
                work.wait()
                own.fill_(-1)
                got = out.cpu().view(size, -1)
                out.fill_(-2)
                assert work.exception() is None
                assert all(torch.all(got[r] == 10 * r + i) for r in range(size)), (round, i)
        assert gathered() == 20
        assert use_of_default().device_straight == 20  # longer than a half


@on_ranks(*ON)
@on_gpus
def test_what_the_stream_was_told_before_comes_before(device, tmp_path):
    """A copy from the host that has not happened yet, for example."""
    with job_on(device, tmp_path) as (rank, size, on):
        own = torch.zeros(5000, device=on)
        for i in range(1, 6):
            host = torch.full((5000,), float(10 * i + rank))  # kept until it is copied
            own.copy_(host, non_blocking=True)
            out = torch.empty(size * 5000, device=on)
            work = dist.all_gather_into_tensor(out, own, async_op=i % 2 == 0)
            if work is not None:
                work.wait()
            parts = out.cpu().view(size, -1)
            assert all(torch.all(parts[r] == 10 * i + r) for r in range(size))


@on_ranks(*ON)
@on_gpus
def test_a_future_has_the_result(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        out = torch.empty(size * 3000, device=on)
        own = torch.full((3000,), float(rank), device=on)
        future = dist.all_gather_into_tensor(out, own, async_op=True).get_future()
        doubled = future.then(lambda f: f.value()[0] * 2).wait()
        want = torch.arange(float(size)).repeat_interleave(3000)
        assert torch.equal(doubled.cpu(), 2 * want)


@on_ranks(2)
@on_stand_in
def test_tensors_that_nobody_keeps_live_until_the_copies_are_done(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        dist.all_gather_into_tensor(torch.empty(8, device=on), torch.zeros(4, device=on))
        hold = ctypes.CFUNCTYPE(None, ctypes.c_bool)(table()[2])
        own = torch.full((4000,), float(rank), device=on)
        out = torch.empty(size * 4000, device=on)
        alive = [weakref.ref(own), weakref.ref(out)]
        dist.barrier()
        hold(True)
        work = dist.all_gather_into_tensor(out, own, async_op=True)
        dist.barrier()  # the operation is over on the host
        seen = out.untyped_storage()
        assert not work.is_completed()
        del own, out, work
        gc.collect()
        assert all(ref() is not None for ref in alive)
        hold(False)
        dist.barrier()
        group = dist.group.WORLD
        group._group.close()  # waits for the copies, and lets go
        gc.collect()
        assert [ref() for ref in alive] == [None, None]
        got = torch.empty(0, device=on).set_(seen, 0, (8000,)).cpu()
        assert got.tolist() == [0.0] * 4000 + [1.0] * 4000


@on_ranks(2)
@on_gpus
def test_calls_that_differ_name_both(device, tmp_path):
    """... also where one rank's tensor is in host memory; and the group goes on."""
    with job_on(device, tmp_path) as (rank, size, on):

        def gather(n, where, asynchronous=False):
            out, own = torch.empty(size * n, device=where), torch.ones(n, device=where)
            work = dist.all_gather_into_tensor(out, own, async_op=asynchronous)
            if asynchronous:
                work.wait()
            return out.cpu()

        for _ in range(2):  # at the first call, and later
            said = refused(lambda: gather(4, on if rank == 0 else "cpu"))
            assert "rank 0 calls all-gather" in said
            assert "of 4 float32 on a device" in said and "rank 1 calls all-gather" in said
            assert torch.equal(gather(3000, on), torch.ones(6000))
        for asynchronous in (False, True):
            if rank == 0:
                dist.group.WORLD.key = 7
            said = refused(lambda: gather(2000, on, asynchronous))  # noqa: B023
            assert f"{_core.WITH_KEY}00000007" in said
        for asynchronous in (False, True):
            said = refused(lambda: gather(2000 + rank, on, asynchronous))  # noqa: B023
            assert "of 2000 float32 on a device" in said and "of 2001" in said
        assert torch.equal(gather(5, on), torch.ones(10))


class Interrupted(Exception):
    pass


@on_ranks(2)
@on_gpus
def test_who_was_interrupted_in_the_first_call_goes_on_with_it(device, tmp_path):
    """... and does not have the devices meet again, while the others gather."""

    def interrupt(*_):
        raise Interrupted

    with job_on(device, tmp_path) as (rank, size, on):
        out, own = torch.zeros(2 * 3000, device=on), torch.full((3000,), 1.0 + rank, device=on)
        store = dist.distributed_c10d._get_default_store()
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
                with pytest.raises(Interrupted):
                    dist.all_gather_into_tensor(out, own)
                store.set("interrupted", "")
            else:
                store.wait(["interrupted"])
        finally:
            signal.signal(signal.SIGALRM, before)
        for _ in range(3):
            out.zero_()
            dist.all_gather_into_tensor(out, own)
            assert out.cpu().view(2, -1).eq(torch.tensor([[1.0], [2.0]])).all()


@on_ranks(2)
@on_gpus
def test_what_cannot_be_done_is_refused_before_anybody_waits(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        for n in (5, 7):
            for dtype in (torch.float32, torch.complex64):
                out, own = (torch.empty(m, dtype=dtype, device=on) for m in (n, 3))
                with pytest.raises(ValueError, match=f"input of 3 and an output of {n}"):
                    dist.group.WORLD.all_gather_single_coalesced([out], [own])
        for n in (2, 4):
            own = torch.empty(3, device=on)
            with pytest.raises(ValueError, match=f"input of 3 and an output of {n}"):
                dist.all_gather([torch.empty(n, device=on) for _ in range(size)], own)
        for own, other in (("float32", "int32"), ("int16", "uint16")):
            made = [torch.empty(3, device=on, dtype=getattr(torch, d)) for d in (own, other)]
            with pytest.raises(TypeError, match="other dtypes"):
                dist.group.WORLD.allgather([[made[1]] * 2], [made[0]])
        with pytest.raises(BufferError):
            dist.group.WORLD.allgather([[torch.empty(3)] * 2], [torch.empty(3, device=on)])
        dist.barrier()


@on_ranks(2)
@on_gpus
def test_a_time_out_names_who_is_missing(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        own, out = torch.ones(3, device=on), torch.empty(6, device=on)
        dist.all_gather_into_tensor(out, own)
        dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            said = refused(lambda: dist.all_gather_into_tensor(out, own))
            assert "of 3 float32 on a device: timed out after " in said
            assert "rank 1" in said
            store.set("over", "")
        store.wait(["over"], timedelta(seconds=60))


@on_ranks(2)
@on_gpus
def test_one_rank_that_will_not_leaves_it_to_nccl_for_all(device, tmp_path):
    memory = TINY if os.environ["OMPI_COMM_WORLD_RANK"] == "0" else "0"
    with job_on(device, tmp_path, memory) as (rank, size, on):
        group = dist.group.WORLD
        nccl = Recorder.of(group)
        own, out = torch.ones(4, device=on), torch.empty(8, device=on)
        for _ in range(2):
            dist.all_gather_into_tensor(out, own)
        dist.all_gather(list(out.chunk(2)), own)
        with dist._coalescing_manager(device=on):
            dist.all_gather_into_tensor(out, own)
        assert nccl.asked[:3] == ["all_gather_single_coalesced"] * 2 + ["allgather"]
        assert nccl.asked[3] == "_start_coalescing" and nccl.asked[-1] == "_end_coalescing"
        report = str(smp.comm_report())
        why = "rank 1: comm_device_gather_bytes is 0"
        assert f"group 0: all-gathers of GPUs by NCCL ({why})" in report
        group._nccl = None


@on_ranks(2)
@on_gpus
def test_ranks_of_several_hosts_leave_it_to_nccl(device, tmp_path, monkeypatch):
    monkeypatch.setenv("SMP_COMM_TRANSPORTS", "tcp")
    with job_on(device, tmp_path) as (rank, size, on):
        group = dist.group.WORLD
        nccl = Recorder.of(group)
        for _ in range(2):
            dist.all_gather_into_tensor(torch.empty(8, device=on), torch.ones(4, device=on))
        assert nccl.asked == ["all_gather_single_coalesced"] * 2
        group._nccl = None


@on_ranks(*ON)
@on_stand_in
def test_copies_that_change_bytes_leave_it_to_nccl_for_all(device, tmp_path):
    """They are tried when the ranks meet; one rank warns, the report says why."""
    with job_on(device, tmp_path) as (rank, size, on):
        group = dist.group.WORLD
        nccl = Recorder.of(group)
        own, out = torch.ones(4, device=on), torch.empty(4 * size, device=on)

        with (
            accelerator.spoilt_copies(rank == 1),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            dist.all_gather_into_tensor(out, own)

        assert nccl.asked == ["all_gather_single_coalesced"]
        assert "arrived with other bytes" in str(smp.comm_report())
        warned = torch.tensor([sum("through NCCL" in str(w.message) for w in caught)])
        dist.all_reduce(warned)
        assert warned.item() == 1
        group._nccl = None


@on_ranks(2)
@on_gpus
def test_other_operations_are_nccl_s(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        group = dist.group.WORLD
        nccl = Recorder.of(group)
        own, out = torch.ones(4, device=on), torch.empty(8, device=on)
        with dist._coalescing_manager(device=on):
            dist.all_gather_into_tensor(out, own)
        assert nccl.asked == []
        dist.all_reduce(own)
        dist.broadcast(tensor=own, src=0)
        assert nccl.asked == ["allreduce", "broadcast"]
        assert torch.equal(out.cpu(), torch.ones(8))
        report = str(smp.comm_report())
        assert "group 0: 1 all-gathers of 0.0 MiB by the GPUs' own copies" in report
        group._nccl = None


class Gatherer(Recorder):
    """... and gathers, through host memory."""

    fails = False

    def all_gather_single_coalesced(self, outputs, inputs, opts):
        self.asked.append(len(inputs))
        if self.fails:
            raise dist.DistBackendError("no NCCL today")
        return dist.group.WORLD._call(ALL_GATHER, inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs, inputs, opts):
        self.asked.append("allgather")
        return dist.group.WORLD._fill_lists(ALL_GATHER, outputs[0], inputs[0], opts)


@on_ranks(2)
@on_stand_in
def test_a_group_keeps_the_faster_way_of_copies_and_nccl(device, tmp_path, monkeypatch):
    """... on its slowest rank, by the size of a call."""
    with job_on(device, tmp_path) as (rank, size, on):
        group = dist.group.WORLD
        nccl = Gatherer.of(group)

        def seconds(gather, out, own):
            gather(out, own)
            if gather.__name__ == "by_copies":
                return 5e-5
            return [4e-5 if own.numel() == gather_times.SIZES[0] else 4.9e-5, 3e-5][rank]

        monkeypatch.setattr(gather_times, "_seconds", seconds)

        def by_nccl(n, dtype=torch.float32, gap=1, listed=False, **rest):
            """What NCCL was asked for an all-gather of n elements of each rank."""
            terms = [drawn(r, (n * gap,), torch.float32).to(dtype) for r in range(size)]
            out = torch.zeros(size * n * gap, dtype=dtype, device=on)[::gap]
            own = terms[rank].to(on)[::gap]
            nccl.asked.clear()
            if listed:
                work = dist.all_gather(list(out.chunk(size)), own, **rest)
            else:
                work = dist.all_gather_into_tensor(out, own, **rest)
            if work is not None:
                work.wait()
            assert same(out.cpu(), torch.cat([term[::gap] for term in terms]))
            return nccl.asked

        assert by_nccl(4) == [1] * (1 + 3 * len(gather_times.SIZES) + 1)
        assert by_nccl(4) == by_nccl(1 << 16) == by_nccl(4, async_op=True) == [1]
        assert by_nccl(4, gap=2) == by_nccl(4, gap=2, async_op=True) == [1]
        assert by_nccl(4, listed=True) == by_nccl(4, gap=2, listed=True) == ["allgather"]
        assert by_nccl(4, torch.float8_e4m3fn) == by_nccl((1 << 16) + 1) == []
        nccl.asked.clear()
        with dist._coalescing_manager(device=on):
            dist.all_gather_into_tensor(torch.empty(8, device=on), torch.ones(4, device=on))
        assert nccl.asked == []
        said = "group 0: an all-gather of 64 KiB takes 50 us by copies, 40 by NCCL: NCCL"
        assert said in str(smp.comm_report())
        group._nccl = None


@on_ranks(2)
@on_stand_in
def test_a_rank_without_nccl_leaves_all_gathers_to_copies_for_all(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        group = dist.group.WORLD
        nccl = Gatherer.of(group)
        nccl.fails = rank == 1
        if rank == 0:  # it does not wait for the other, as NCCL does
            nccl.all_gather_single_coalesced = lambda *_: Over()
        for calls in (1, 2):
            out = torch.empty(8, device=on)
            dist.all_gather_into_tensor(out, torch.full((4,), float(rank), device=on))
            assert out.cpu().tolist() == [0.0] * 4 + [1.0] * 4
            assert gathered() == calls and nccl.asked == [1] * rank
        group._nccl = None


@on_ranks(2)
@on_stand_in
def test_a_failure_of_the_driver_is_raised_on_all_ranks(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        own, out = torch.ones(4000, device=on), torch.empty(8000, device=on)
        dist.all_gather_into_tensor(out, own)
        fail = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(table()[0])
        name = b"cuMemcpyDtoDAsync_v2"  # kept by the stand-in
        if rank == 1:
            fail(name, 2, 2)
        said = refused(lambda: dist.all_gather_into_tensor(out, own))
        assert "cuMemcpyDtoDAsync: CUDA_ERROR_OUT_OF_MEMORY" in said
        assert ("rank 1 gave up" in said) == (rank == 0)


@on_ranks(2)
@on_stand_in
def test_a_forked_child_leaves_the_device_alone(device, tmp_path):
    with job_on(device, tmp_path) as (rank, size, on):
        own, out = torch.ones(4000, device=on), torch.empty(8000, device=on)
        work = dist.all_gather_into_tensor(out, own, async_op=True)
        child = os.fork()
        if child == 0:
            ended = 1
            try:
                with pytest.raises(RuntimeError, match="SMP_ERR_CLOSED"):
                    dist.group.WORLD._group.run(0, None, None, 0, 0, 1.0, None, None, 0.0)
                del work
                dist.group.WORLD._group.close()
                ended = 0
            finally:
                os._exit(ended)
        assert os.waitpid(child, 0)[1] == 0
        work.wait()
        assert torch.equal(out.cpu(), torch.ones(8000))
        dist.all_gather_into_tensor(out, 2 * own)
        assert torch.equal(out.cpu(), torch.full((8000,), 2.0))


@on_ranks(2)
@on_stand_in
def test_nothing_is_left_on_the_device(device, tmp_path):
    alive = ctypes.CFUNCTYPE(ctypes.c_int)
    with job_on(device, tmp_path) as (rank, size, on):
        before = alive(table()[5])()
        groups = [dist.new_group() for _ in range(3)]
        for group in groups:
            for _ in range(3):
                dist.all_gather_into_tensor(
                    torch.empty(8000, device=on), torch.ones(4000, device=on), group=group
                )
        assert alive(table()[5])() > before
        for group in groups:
            dist.barrier(group)
            dist.destroy_process_group(group)
        dist.barrier()  # the other rank has closed what this one has made
        dist.all_gather_into_tensor(torch.empty(2, device=on), torch.ones(1, device=on))
        dist.barrier()
        after = alive(table()[5])()
    assert after - before < 30  # the default group's own
    assert alive(table()[5])() <= before + 15
