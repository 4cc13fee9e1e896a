"""Spec: the backend smddp serves what torch builds on process groups (api section 9)."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from smp.collectives.process_group import ProcessGroup
from tests.ranks import on_ranks
from tests.reference.collectives import tree
from tests.test_collectives import job, same

ON = (2, 4)
STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.Linear(40, 3))


class Branches(nn.Module):
    """Uses one of two layers, by rank; and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x):
        return self.layers[dist.get_rank() % 2](x)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None):
    """Its parameters after some steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def trained_by_hand(size: int) -> list[torch.Tensor]:
    """What averaging the gradients of all ranks gives."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        by_rank = []
        for rank in range(size):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            by_rank.append([p.grad.clone() for p in model.parameters()])
        for parameter, grads in zip(
            model.parameters(), zip(*by_rank, strict=True), strict=True
        ):
            parameter.grad = tree(torch.add, [grad / size for grad in grads])
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def on_smddp_and_gloo(folder, train) -> list[list[torch.Tensor]]:
    """What ``train(group, rank, size)`` gives on a group of each.

    The groups outlive what it makes.  Whoever drops a group of gloo's last waits for its
    threads, and they may wait for the GIL, to drop what a work holds of Python: DDP's
    reducer would keep it (pytorch issue 56297), a group's own object gives it away.
    """
    with job(folder) as (rank, size):
        groups = [dist.new_group(backend=backend) for backend in ("smddp", "gloo")]
        return [train(group, rank, size) for group in groups]


def all_close(got, want) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, want, strict=True)
    )


# --------------------------------------------------------------------------------- DDP


@on_ranks(*ON)
def test_ddp_trains_as_if_gradients_were_averaged_by_hand(tmp_path):
    """... with the same bits: DDP divides before it adds."""
    with job(tmp_path) as (rank, size):
        got = trained(DistributedDataParallel(make_model(), bucket_cap_mb=0.001), rank)

        assert all(map(same, got, trained_by_hand(size)))


def half_precision(ddp):
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def power_sgd(ddp):
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def all_reduce_hook(ddp):
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


@on_ranks(*ON)
@pytest.mark.parametrize("hook", [half_precision, power_sgd, all_reduce_hook])
def test_ddp_with_a_hook_is_what_it_is_on_gloo(hook, tmp_path):
    def train(group, rank, size):
        ddp = DistributedDataParallel(make_model(), process_group=group)
        hook(ddp)
        torch.manual_seed(2)
        return trained(ddp, rank)

    assert all_close(*on_smddp_and_gloo(tmp_path, train))


@on_ranks(*ON)
def test_ddp_finds_unused_parameters(tmp_path):
    def train(group, rank, size):
        ddp = DistributedDataParallel(
            Branches(), process_group=group, find_unused_parameters=True
        )
        return trained(ddp, rank)

    assert all_close(*on_smddp_and_gloo(tmp_path, train))


@on_ranks(*ON)
def test_ddp_joins_ranks_with_fewer_batches(tmp_path):
    """... and trains them as on gloo: who is done stands in for its part."""

    def train(group, rank, size):
        ddp = DistributedDataParallel(make_model(), process_group=group)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with Join([ddp]):
            for step in range(1 + rank):
                optimizer.zero_grad()
                ddp(batch(rank, step)).square().mean().backward()
                optimizer.step()
        parameters = [p.detach().clone() for p in ddp.parameters()]
        for parameter in parameters:  # Join gives all what the last one has
            first = parameter.clone()
            dist.broadcast(first, size - 1)
            assert same(first, parameter)
        return parameters

    results = on_smddp_and_gloo(tmp_path, train)
    assert not same(results[0][0], next(make_model().parameters()))
    assert all_close(*results)


@on_ranks(2)
def test_ddp_joins_where_c_plus_plus_waits_for_what_python_has_dropped(tmp_path):
    """It divides by the ranks that are left, whose number a work in C++ brings."""
    with job(tmp_path) as (rank, size):
        ddp = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(1 + 2 * rank):
                optimizer.zero_grad()
                ddp(batch(rank, step)).square().mean().backward()
                optimizer.step()

        for parameter in ddp.parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, size - 1)
            assert same(first, parameter)


@on_ranks(2)
def test_compiled_ddp(tmp_path):
    with job(tmp_path) as (rank, size):
        ddp = torch.compile(DistributedDataParallel(make_model()), backend="aot_eager")

        assert all_close(trained(ddp, rank), trained_by_hand(size))


@on_ranks(*ON)
def test_ddp_gathers_without_synchronising_and_sums_sparse_gradients(tmp_path):
    with job(tmp_path) as (rank, size):
        torch.manual_seed(1)
        embedding = nn.Embedding(20, 4, sparse=True)
        ddp = DistributedDataParallel(copy.deepcopy(embedding))
        with ddp.no_sync():
            ddp(torch.tensor([rank, 7])).sum().backward()
        ddp(torch.tensor([rank, 3])).sum().backward()

        dense = ddp.module.weight.grad.to_dense()
        assert dense[7, 0].item() == pytest.approx(1)
        assert dense[3, 0].item() == pytest.approx(1 + (2 / size if size > 3 else 0))


@on_ranks(*ON)
def test_zero_redundancy_optimizer(tmp_path):
    with job(tmp_path) as (rank, size):
        ddp = DistributedDataParallel(make_model())
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.1
        )

        assert all(map(same, trained(ddp, rank, optimizer), trained_by_hand(size)))


# -------------------------------------------------------------------- FSDP and DTensor


@on_ranks(*ON)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_first_fsdp_trains_as_if_gradients_were_averaged_by_hand(strategy, tmp_path):
    with job(tmp_path) as (rank, size):
        model = FullyShardedDataParallel(
            make_model(),
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        trained(model, rank)

        with FullyShardedDataParallel.summon_full_params(model):
            got = [parameter.detach().clone() for parameter in model.parameters()]
        assert all_close(got, trained_by_hand(size))


@on_ranks(*ON)
@pytest.mark.parametrize("from_pool", [False, True])
def test_fully_shard_trains_as_if_gradients_were_averaged_by_hand(
    from_pool, tmp_path, monkeypatch
):
    given = []  # what FSDP2 asked the group for
    allocate = ProcessGroup.allocate_tensor

    def counted(*args, **kwargs):
        given.append(allocate(*args, **kwargs))
        return given[-1]

    with pytest.MonkeyPatch.context() as patch, job(tmp_path) as (rank, size):
        patch.setattr(ProcessGroup, "allocate_tensor", counted)
        model = make_model()
        mesh = init_device_mesh("cpu", (size,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if from_pool:
            for module in (*model, model):
                if isinstance(module, FSDPModule):
                    module.set_allocate_memory_from_process_group_for_comm(True)
        shards = trained(model, rank)

        assert all(isinstance(shard, DTensor) for shard in shards)
        assert (len(given) >= STEPS) == from_pool
        given.clear()
        assert all_close([shard.full_tensor() for shard in shards], trained_by_hand(size))


@on_ranks(2)
def test_memory_of_the_group_is_used_again(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        places = set()
        for _ in range(50):
            out = group.allocate_tensor(size * 100_000, dtype=torch.float32)
            dist.all_gather_into_tensor(out, torch.full((100_000,), float(rank)))
            assert out.view(size, -1)[:, -1].tolist() == [0.0, 1.0]
            places.add(out.data_ptr())
            del out
        assert len(places) < 5
        assert group.allocate_tensor(0, dtype=torch.int8).numel() == 0
        last = group.allocate_tensor(1000, dtype=torch.int64).fill_(3)
    assert last.sum().item() == 3000  # also when the group is gone


@on_ranks(4)
def test_hybrid_sharding_over_two_axes(tmp_path):
    with job(tmp_path) as (rank, size):
        model = make_model()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        shards = trained(model, rank)

        assert all_close([shard.full_tensor() for shard in shards], trained_by_hand(size))


@on_ranks(*ON)
def test_tensor_parallelism(tmp_path):
    with job(tmp_path) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        model = make_model()
        want = model(x := batch(0, 0))
        parallel = parallelize_module(
            copy.deepcopy(model), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        got = parallel(x)
        got.square().sum().backward()
        want.square().sum().backward()

        assert torch.allclose(got, want, atol=1e-5)
        assert torch.allclose(
            parallel[0].weight.grad.full_tensor(), model[0].weight.grad, atol=1e-4
        )


@on_ranks(*ON)
def test_dtensors_change_their_placement(tmp_path):
    with job(tmp_path) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(float(8 * 12)).view(8, 12)
        rows = distribute_tensor(whole, mesh, [Shard(0)])

        assert same(rows.to_local(), whole.chunk(size)[rank])
        columns = rows.redistribute(mesh, [Shard(1)])
        assert same(columns.to_local().contiguous(), whole.chunk(size, 1)[rank].contiguous())
        assert same(columns.redistribute(mesh, [Replicate()]).to_local(), whole)
        assert rows.sum().full_tensor().item() == whole.sum().item()


@on_ranks(*ON)
def test_functional_collectives(tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD
        x = torch.full((size, 2), float(rank + 1))
        total = size * (size + 1) / 2

        assert functional.all_reduce(x, "sum", group).eq(total).all()
        assert functional.all_gather_tensor(x, 0, group)[::size, 0].tolist() == [
            float(r + 1) for r in range(size)
        ]
        assert functional.reduce_scatter_tensor(x, "sum", 0, group).eq(total).all()
        assert functional.broadcast(x, 1, group).eq(2).all()
        assert functional.all_to_all_single(x, None, None, group)[:, 0].tolist() == [
            float(r + 1) for r in range(size)
        ]
        many = functional.all_reduce_coalesced([x, x[0].clone()], "avg", group)
        assert all(tensor.eq(total / size).all() for tensor in many)


@on_ranks(*ON)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functional_collectives_are_compiled(backend, tmp_path):
    with job(tmp_path) as (rank, size):
        group = dist.group.WORLD

        @torch.compile(backend=backend, fullgraph=True)
        def step(x):
            total = functional.all_reduce(x * 2, "sum", group)
            return functional.all_gather_tensor(total + x, 0, group)

        for shift in (0, 5):
            x = torch.full((3,), float(rank + shift))
            total = sum(2.0 * (r + shift) for r in range(size))
            want = torch.cat([torch.full((3,), total + r + shift) for r in range(size)])
            assert same(step(x), want)


# ------------------------------------------------------------- objects and checkpoints


@on_ranks(2)
def test_operations_are_called_by_compiled_code(tmp_path):
    @torch.compile(backend="aot_eager")
    def exchange(x, rank):
        x = x * 2
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.broadcast(x, 1)
        dist.barrier()
        if rank == 0:
            dist.send(x + 1, 1)
        else:
            dist.recv(x, 0)
        return x + 1

    with job(tmp_path) as (rank, _):
        assert exchange(torch.ones(3), rank).tolist() == [5.0 + rank] * 3


@on_ranks(2)
def test_tensors_that_wait_when_they_are_used_are_used(tmp_path):
    with job(tmp_path) as (rank, size):
        later = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, later)
        assert torch.stack(parts).eq(2).all()

        x = torch.ones(2)
        with functional.allow_inflight_collective_as_graph_input_ctx():
            dist.all_reduce(x, async_op=True)
        assert torch.ops._c10d_functional.wait_tensor(x).tolist() == [2, 2]


@on_ranks(2)
def test_tensors_without_memory_are_refused_or_only_pretended_with(tmp_path):
    with job(tmp_path) as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        spread = DTensor.from_local(torch.ones(2), mesh, [Replicate()])
        with pytest.raises(BufferError, match="DTensor has no memory of its own"):
            dist.all_reduce(spread)

        with FakeTensorMode():
            fake = torch.ones(2)
            dist.all_reduce(fake)
            dist.send(fake, 1 - rank)
        dist.all_reduce(torch.ones(2, device="meta"))
        dist.barrier()


@on_ranks(*ON)
def test_objects(tmp_path):
    with job(tmp_path) as (rank, size):
        mine = {"rank": rank, "payload": "x" * (1000 * rank)}
        everyone = [{"rank": r, "payload": "x" * (1000 * r)} for r in range(size)]

        got = [None] * size
        dist.all_gather_object(got, mine)
        assert got == everyone

        gathered = [None] * size if rank == 1 else None
        dist.gather_object(mine, gathered, 1)
        assert gathered in (None, everyone)

        shared = everyone[:2] if rank == 0 else [None, None]
        dist.broadcast_object_list(shared, 0)
        assert shared == everyone[:2]

        one = [None]
        dist.scatter_object_list(one, everyone if rank == 0 else None, 0)
        assert one == [mine]

        if rank == 0:
            dist.send_object_list([mine, 3], 1)
        if rank == 1:
            received = [None, None]
            dist.recv_object_list(received, 0)
            assert received == [everyone[0], 3]


@on_ranks(*ON)
def test_a_checkpoint_is_saved_beside_training(tmp_path):
    with job(tmp_path) as (rank, size):
        model = make_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        group = dist.new_group()
        before = [p.full_tensor().detach().clone() for p in model.parameters()]
        saving = checkpoint.async_save(
            {"model": model.state_dict()},
            checkpoint_id=tmp_path / "saved",
            process_group=group,
        )
        trained(model, rank)
        saving.result()

        state = {"model": model.state_dict()}
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        model.load_state_dict(state["model"])

        assert all(map(same, [p.full_tensor() for p in model.parameters()], before))
