"""Replicas of a model have the average of their gradients after each step.

The reference is the cut loop of each replica, by itself, in this process; the replicas'
gradients are summed in rank order and divided once.
"""

import copy
import gc
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import smp
from smp.data_parallel.group import ReplicasDiffer
from tests.devices import DEVICES, use
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.models.random_tree import describe, make_tree, random_partition
from tests.models.steps import mean_square, train_mean_square
from tests.ranks import on_ranks
from tests.reference.compare import assert_close, assert_same_bits, gradients
from tests.reference.cut_loop import cut_loop
from tests.test_equality import features_for

WIDTH = 6
BACKENDS = ["gloo", "smddp"]  # what carries the gradients


@module_of(
    lambda: {
        "stem": nn.Linear(WIDTH, WIDTH),
        "branches": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
    }
)
def Branches(self, x: Tensor, branch: int) -> Tensor:
    """Replicas may take different branches; nobody takes the last."""
    return self.branches[branch](torch.tanh(self.stem(x)))


def plain_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
    )


def batch_of(rank: int, step: int = 0, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, WIDTH, generator=generator)


def averaged(replicas: list[nn.Module]) -> dict[str, Tensor | None]:
    """The gradients' sum in rank order, divided once; None where no replica has one."""
    out: dict[str, Tensor | None] = {}
    for name, parameter in replicas[0].named_parameters():
        total = None
        for replica in replicas:
            gradient = replica.get_parameter(name).grad
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            total = gradient if total is None else total + gradient
        used = any(replica.get_parameter(name).grad is not None for replica in replicas)
        out[name] = total / len(replicas) if used else None
    return out


def mean_of_squares(y: Tensor) -> Tensor:
    return y.square().mean()


def of_replicas(
    make: Callable[[], nn.Module],
    step: int = 0,
    rows: int = 4,
    loss: Callable = mean_of_squares,
) -> dict[str, Tensor | None]:
    """What two replicas have after a backward of that step, by themselves."""
    replicas = [make(), make()]
    for rank, replica in enumerate(replicas):
        loss(replica(batch_of(rank, step, rows))).backward()
    return averaged(replicas)


# ------------------------------------------------------------------ equal to the reference


def check_tree(
    seed: int, microbatches: int, options: dict, device: torch.device | str = "cpu"
) -> None:
    """Two steps of a random tree, added up: the same bits as the replicas' cut loops."""
    tree = make_tree(seed, features_for(seed, smp.state.cfg.pipeline))
    tree.model.to(device)
    rank_of = random_partition(tree.model, smp.pp_size(), seed)
    references = [copy.deepcopy(tree.model) for _ in range(smp.dp_size())]
    model = distributed(tree.model, rank_of, **options)
    step = smp.step(tree.step)
    for number in range(2):
        for replica in references[1:]:
            for mine, first in zip(replica.buffers(), references[0].buffers(), strict=True):
                mine.copy_(first)
        for dp_rank, reference in enumerate(references):
            generator = torch.Generator().manual_seed(seed + 10 * dp_rank + number)
            # In the second step the last replica has fewer samples than microbatches.
            last = number == 1 and dp_rank == smp.dp_size() - 1 and seed % 2
            batch = tree.make_batch(1 if last else 2 * microbatches, generator)
            batch = tuple(tensor.to(device) for tensor in batch)
            if dp_rank == smp.dp_rank():
                torch.manual_seed(seed + dp_rank)
                step(model, *batch)
            torch.manual_seed(seed + dp_rank)
            cut_loop(
                tree.step,
                reference,
                batch,
                rank_of=rank_of,
                ranks=smp.pp_size(),
                microbatches=microbatches,
            )
        want = averaged(references)
        try:
            assert_same_bits(gradients(model), want)
            buffers = dict(references[smp.dp_rank()].named_buffers())
            assert_same_bits(dict(model.local_named_buffers()), buffers)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, step {number}: {error}\n{describe(references[0], rank_of)}"
            ) from None
        for reference in references:
            for name, parameter in reference.named_parameters():
                parameter.grad = None if want[name] is None else want[name].clone()


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-4}, {"overlapping_allreduce": False}]
    + [{"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}],
    ids=["one bucket", "small buckets", "after backward", "views"],
)
@on_ranks(2, timeout_s=120)
def test_random_trees_on_two_replicas_equal_the_average_of_the_cut_loops(options, backend):
    """Gradients, buckets of any size: the sum of the replicas' gradients, divided once."""
    smp.init({"microbatches": 2, "ddp": True, "ddp_dist_backend": backend})
    first = random.Random(str(options)).randrange(10**6)
    for seed in range(first, first + 4):
        check_tree(seed, 2, options)


@pytest.mark.parametrize("device", DEVICES[1:])
@on_ranks(2, 4, timeout_s=150)
def test_random_trees_on_an_accelerator_equal_the_average_of_the_cut_loops(device):
    """Two replicas, of one rank or of two; where these share it, through host memory."""
    degree = int(os.environ["OMPI_COMM_WORLD_SIZE"]) // 2
    smp.init({"pipeline_parallel_degree": degree, "microbatches": 2, "ddp": True})
    on = use(device)
    for seed in range(3):
        check_tree(seed, 2, {"bucket_cap_mb": 1e-4} if seed % 2 else {}, on)


@pytest.mark.sample(2)
@pytest.mark.parametrize("placement", ["cluster", "spread"])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@on_ranks(4, timeout_s=150)
def test_random_trees_on_two_pipelines_equal_the_average_of_the_cut_loops(placement, pipeline):
    """The same with two pipeline ranks for each replica, in both placements."""
    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 3,
            "ddp": True,
            "pipeline": pipeline,
            "placement_strategy": placement,
        }
    )
    first = random.Random(placement + pipeline).randrange(10**6)
    options = [{}, {"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True}]
    for seed in range(first, first + 3):
        check_tree(seed, 3, options[seed % 3])


@on_ranks(2)
def test_training_equals_ddp():
    """Losses and parameters are those of DistributedDataParallel."""
    smp.init({"microbatches": 2, "ddp": True})
    reference = DistributedDataParallel(plain_model(), process_group=smp.get_dp_process_group())
    model = smp.DistributedModel(plain_model())
    ours = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    step = smp.step(mean_square)
    for number in range(4):
        x = batch_of(smp.dp_rank(), number)
        ours.zero_grad()
        theirs.zero_grad()
        loss = step(model, x).reduce_mean()
        want = reference(x).square().mean()
        want.backward()
        torch.testing.assert_close(loss, want.detach())
        ours.step()
        theirs.step()
    assert_close(
        dict(model.named_parameters()), dict(reference.module.named_parameters()), 1e-6
    )


@module_of(
    lambda value, fails=False: {
        "linear": nn.Linear(WIDTH, WIDTH),
        "expanded": nn.Buffer(torch.full((WIDTH,), value).expand(2, WIDTH)),
        "windows": nn.Buffer(torch.full((6,), value).unfold(0, 4, 2)),
        "apart": nn.Buffer(torch.full((4, 6), value).t()[::2]),
        "count": nn.Buffer(torch.zeros(())),
        "frozen": nn.Parameter(torch.full((1,), value).expand(WIDTH), requires_grad=False),
        "fails": fails,
    }
)
def SharesMemory(self, x: Tensor) -> Tensor:
    """Tensors whose elements share memory, or lie apart."""
    self.count += 1
    out = self.linear(x) * self.frozen + self.expanded[0] + self.windows.sum()
    if self.fails:
        raise ArithmeticError("here")
    return out


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(2)
def test_tensors_whose_elements_share_memory_are_the_first_replica_s(backend):
    smp.init({"ddp": True, "ddp_dist_backend": backend})
    net = SharesMemory(3.0 - smp.dp_rank())
    model = smp.DistributedModel(net)
    smp.step(mean_square)(model, batch_of(smp.dp_rank()))
    for name in ("expanded", "windows", "apart", "frozen"):
        assert getattr(net, name).unique().tolist() == [3.0], name


@on_ranks(2)
def test_buffers_whose_elements_share_memory_are_put_back_after_a_step_that_failed():
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), SharesMemory(3.0))
    model, step = distributed(net, {"": 0, "1": 1}), smp.step(mean_square)
    step(model, batch_of(0))
    net[1].fails = True
    with pytest.raises(ArithmeticError):
        step(model, batch_of(0))
    if smp.pp_rank() == 1:
        assert net[1].count == 2 and net[1].windows.unique().tolist() == [3.0]


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(3)
def test_three_replicas_have_the_same_bits(backend):
    """More replicas: within rounding of the reference, and alike on all of them."""
    smp.init({"ddp": True, "ddp_dist_backend": backend})
    model = smp.DistributedModel(plain_model())

    smp.step(mean_square)(model, batch_of(smp.dp_rank()))

    replicas = [plain_model() for _ in range(3)]
    for rank, replica in enumerate(replicas):
        replica(batch_of(rank)).square().mean().backward()
    assert_close(gradients(model), averaged(replicas), 1e-6)
    everyones = smp.allgather(list(gradients(model).values()), smp.DP_GROUP)
    for others in everyones:
        for mine, theirs in zip(everyones[0], others, strict=True):
            assert torch.equal(mine, theirs)


# ------------------------------------------------------------------------ outside a step


@on_ranks(2)
def test_a_backward_that_raised_outside_a_step_fails_on_all_replicas_and_the_next_one_works():
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-4)

    def raise_it(gradient):
        raise ValueError("mine")

    if smp.dp_rank() == 0:
        first = next(iter(model.parameters()))
        handle = first.register_hook(raise_it)
        with pytest.raises(ValueError, match="mine"):
            model(batch_of(0)).square().mean().backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="the backward before this forward raised"):
            model(batch_of(0))
    else:
        with pytest.raises(RuntimeError, match="the backward before this forward raised"):
            model(batch_of(1)).square().mean().backward()
    model.zero_grad()
    model(batch_of(smp.dp_rank())).square().mean().backward()

    want = of_replicas(plain_model)
    assert_same_bits(gradients(model), want)


@on_ranks(2)
def test_a_model_that_was_let_go_counts_on_no_rank():
    """It is in a cycle, and one rank collects its garbage before the other."""
    smp.init({"ddp": True})
    gc.disable()
    try:
        for _ in range(2):
            model = smp.DistributedModel(plain_model())
            model.__dict__["cycle"] = [model]
            if smp.dp_rank() == 1:
                gc.collect()
            smp.step(mean_square)(model, batch_of(smp.dp_rank()))
    finally:
        gc.enable()


# --------------------------------------------------------------------- unused, accumulated


@on_ranks(2, 4)
@pytest.mark.parametrize("overlap", [True, False])
def test_parameters_that_not_all_replicas_use(overlap):
    """Used by some: the others add zeros.  Used by none: the gradient stays None.  Replicas
    are of one rank, or of two, of which the second has the branches."""
    degree = smp.job.bootstrap.mpi_size() // 2
    smp.init({"pipeline_parallel_degree": degree, "ddp": True, "microbatches": 2})
    torch.manual_seed(3)
    module = Branches()
    replicas = [copy.deepcopy(module) for _ in range(2)]
    options = {"overlapping_allreduce": overlap, "bucket_cap_mb": 1e-5}
    model = distributed(module, {f"branches.{i}": degree - 1 for i in range(3)}, **options)

    @smp.step
    def step(model: nn.Module, x: Tensor) -> None:
        model.backward(model(x, smp.dp_rank()).sum())

    step(model, batch_of(smp.dp_rank()))

    for rank, replica in enumerate(replicas):
        for x in batch_of(rank).split(2):
            (replica(x, rank).sum() / 2).backward()
    want = averaged(replicas)
    assert_same_bits(gradients(model), want)
    assert want["branches.2.weight"] is None and want["branches.0.weight"].abs().sum() > 0


@on_ranks(2, 4)
def test_without_sync_gradients_add_up_until_the_next_step():
    """Steps under no_sync() exchange nothing; the next one averages the sums."""
    smp.init({"pipeline_parallel_degree": smp.job.bootstrap.mpi_size() // 2, "ddp": True})
    model = smp.DistributedModel(plain_model())
    step = smp.step(mean_square)
    replicas = [plain_model(), plain_model()]

    with model.no_sync():
        step(model, batch_of(smp.dp_rank(), 0))
    for rank, replica in enumerate(replicas):
        replica(batch_of(rank, 0)).square().mean().backward()
    assert_same_bits(gradients(model), gradients(replicas[smp.dp_rank()]))

    held = gradients(model)
    step(model, batch_of(smp.dp_rank(), 1))
    for rank, replica in enumerate(replicas):
        replica(batch_of(rank, 1)).square().mean().backward()
    assert_same_bits(gradients(model), averaged(replicas))
    assert all(gradient is held[name] for name, gradient in gradients(model).items())


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@on_ranks(2)
def test_a_block_without_sync_ends_with_the_outermost(passes, in_step):
    """... and each last of so many passes exchanges.  Steps in a block are not counted as
    passes, and neither is an error that leaves one."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model(), backward_passes_per_step=passes)
    replicas = [plain_model(), plain_model()]
    numbers = iter(range(100))

    def step() -> None:
        number = next(numbers)
        x = batch_of(smp.dp_rank(), number)
        train_mean_square(model, x, in_step)
        for rank, replica in enumerate(replicas):
            replica(batch_of(rank, number)).square().mean().backward()

    def without_exchange() -> None:
        step()
        assert_same_bits(gradients(model), gradients(replicas[smp.dp_rank()]))

    with model.no_sync():
        without_exchange()
        with model.no_sync():
            without_exchange()
        without_exchange()
        with pytest.raises(LookupError), model.no_sync():
            raise LookupError
        without_exchange()
    for _ in range(2):
        for _ in range(passes - 1):
            without_exchange()
            with model.no_sync():
                without_exchange()
        step()
        want = averaged(replicas)
        assert_same_bits(gradients(model), want)
        for replica in replicas:
            for name, parameter in replica.named_parameters():
                parameter.grad = want[name].clone()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_gradients_without_sync_are_averaged_when_their_parameters_are_frozen(in_step, sharded):
    """Frozen before the next step, and others thawed: all replicas make the same update."""
    smp.init({"ddp": True, "shard_optimizer_state": sharded})
    model = smp.DistributedModel(plain_model())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = plain_model()
    plains = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(6):
        for net in (model.module, plain):
            for place, layer in enumerate((net[0], net[2], net[3])):
                layer.requires_grad_((place + number) % 3 != 0)
        with nullcontext() if number % 2 else model.no_sync():
            train_mean_square(model, batch_of(smp.dp_rank(), number), in_step)
        for rank in range(2):
            (plain(batch_of(rank, number)).square().mean() / 2).backward()
        if number % 2:
            for one in (optimizer, plains):
                one.step()
                one.zero_grad()
    assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), 1e-5)


@on_ranks(2)
def test_a_penalty_on_gradients_does_not_end_the_exchange():
    """The backward of ``torch.autograd.grad`` is not the awaited one, outside of a step."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    replicas = [plain_model(), plain_model()]

    def penalised(net: nn.Module, x: Tensor) -> Tensor:
        x.requires_grad_()
        output = net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + slope.square().sum()

    penalised(model, batch_of(smp.rank())).backward()
    for rank, replica in enumerate(replicas):
        penalised(replica, batch_of(rank)).backward()
    assert_close(gradients(model), averaged(replicas), 1e-5)


@on_ranks(2)
def test_parameters_thawed_after_a_forward_without_a_backward_are_averaged():
    """That forward, outside of a step, began an exchange of nothing."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    model.requires_grad_(False)
    model(batch_of(0))
    model.requires_grad_(True)
    model(batch_of(smp.rank())).square().mean().backward()
    assert_close(gradients(model), of_replicas(plain_model), 1e-5)


def frozen_for_the_second(net: nn.Module, layer: nn.Module, rank: int) -> Tensor:
    first = net(batch_of(rank))
    layer.requires_grad_(False)
    second = net(batch_of(rank, 1))
    layer.requires_grad_(True)
    return (first - second).square().mean()


def against_a_teacher(net: nn.Module, layer: nn.Module, rank: int) -> Tensor:
    scaled = {name: p.detach() * 0.9 for name, p in net.named_parameters()}
    student = net(batch_of(rank))
    return (
        (student - torch.func.functional_call(net, scaled, batch_of(rank, 1))).square().mean()
    )


@pytest.mark.parametrize("loss", [frozen_for_the_second, against_a_teacher])
@on_ranks(2)
def test_a_second_forward_with_fewer_parameters_to_train_takes_none_from_the_exchange(loss):
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    replicas = [plain_model(), plain_model()]
    loss(model, model.module[0], smp.rank()).backward()
    for rank, replica in enumerate(replicas):
        loss(replica, replica[0], rank).backward()
    assert_close(gradients(model), averaged(replicas), 1e-5)


@on_ranks(2)
def test_a_replica_alone_may_look_at_its_gradients_without_sync():
    """By a forward whose backward adds to no parameter: the others owe nothing for it."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    if smp.rank() == 1:
        with model.no_sync():
            x = batch_of(0).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
    model.module[0].requires_grad_(False)
    plain = plain_model()
    plain[0].requires_grad_(False)
    model(batch_of(smp.rank())).square().mean().backward()
    for rank in range(2):
        (plain(batch_of(rank)).square().mean() / 2).backward()
    assert_close(gradients(model), gradients(plain), 1e-5)


@on_ranks(2)
def test_a_call_with_computed_tensors_for_parameters_is_refused_outside_of_a_step():
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    halves = {name: p / 2 for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="'0.weight' is a computed tensor.*@smp.step"):
        torch.func.functional_call(model, halves, (batch_of(0),))


# ------------------------------------------------------------- parameters and buffers alike


@on_ranks(2, 4)
def test_replicas_begin_with_the_parameters_and_buffers_of_the_first():
    """Each step begins with its buffers, too."""
    smp.init({"pipeline_parallel_degree": smp.job.bootstrap.mpi_size() // 2, "ddp": True})
    torch.manual_seed(smp.rank())
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
    step = smp.step(mean_square)
    model.module[1].running_mean.fill_(smp.dp_rank())
    for number in range(2):
        step(model, batch_of(smp.dp_rank(), number))

    first = nn.BatchNorm1d(4)
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, 4)
    for number in range(2):
        expected_before = first.running_mean.clone()
        first(linear(batch_of(0, number)))
    if smp.dp_rank() == 0:
        got = dict(model.local_named_buffers()).get("1.running_mean")
        assert got is None or torch.equal(got, first.running_mean)
    else:
        other = nn.BatchNorm1d(4)
        other.running_mean.copy_(expected_before)
        other(linear(batch_of(1, 1)))
        got = dict(model.local_named_buffers()).get("1.running_mean")
        assert got is None or torch.equal(got, other.running_mean)
    for name, parameter in model.local_named_parameters():
        everyones = smp.allgather(parameter.detach(), smp.DP_GROUP)
        assert torch.equal(everyones[0], everyones[1]), name


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("in_step", [False, True])
@on_ranks(2)
def test_buffers_may_stay_a_replicas_own(broadcasts, in_step):
    """broadcast_buffers=False: alike at the start, then each has its own statistics."""
    smp.init({"ddp": True})
    module = nn.BatchNorm1d(WIDTH)
    module.running_mean.fill_(smp.dp_rank() + 5)
    model = smp.DistributedModel(module, broadcast_buffers=broadcasts)
    reference = nn.BatchNorm1d(WIDTH)
    reference.running_mean.fill_(5)

    for number in range(2):
        x = batch_of(smp.dp_rank(), number)
        train_mean_square(model, x, in_step)
        if not broadcasts:
            reference(x)
        elif number == 0:  # the second step begins with the first replica's
            reference(batch_of(0, 0))
        else:
            reference(x)
    assert_same_bits(dict(module.named_buffers()), dict(reference.named_buffers()))


@module_of(lambda: {"layer": nn.Linear(WIDTH, 2), "place": nn.Buffer(torch.zeros(()))})
def WithBuffer(self, x: Tensor) -> Tensor:
    """One that the forward leaves as it is."""
    return self.layer(x)


@on_ranks(2)
def test_outside_a_step_buffers_are_exchanged_by_forwards_that_train_and_synchronise():
    """Each of several before one backward; not in evaluation mode, nor under no_sync()."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(WithBuffer())
    mine = 5.0 + smp.rank()

    def after_forward() -> tuple[Tensor, float]:
        model.place.fill_(mine)
        output = model(batch_of(smp.rank()))
        return output.square().sum(), model.place.item()

    first, place = after_forward()
    assert place == 5
    second, place = after_forward()
    assert place == 5
    with model.no_sync():
        third, place = after_forward()
        assert place == mine
    model.eval()
    fourth, place = after_forward()
    assert place == mine
    model.train()
    with torch.no_grad():
        assert after_forward()[1] == mine
    (first + second + third + fourth).backward()
    model.eval()
    loss, place = after_forward()
    assert place == mine
    loss.backward()
    assert after_forward()[1] == mine


@on_ranks(2)
def test_a_gradient_that_the_script_keeps_is_not_written_again():
    """Of an earlier step; a parameter that is thawed in between takes part from then on."""
    smp.init({"ddp": True})
    torch.manual_seed(3)
    module = Branches()
    replicas = [copy.deepcopy(module) for _ in range(2)]
    model = smp.DistributedModel(module)
    for net in (module, *replicas):
        net.stem.requires_grad_(False)

    @smp.step
    def step(model: nn.Module, x: Tensor) -> None:
        model.backward(model(x, smp.dp_rank()).sum())

    kept = []
    for number in range(3):
        step(model, batch_of(smp.dp_rank(), number))
        for rank, replica in enumerate(replicas):
            replica(batch_of(rank, number), rank).sum().backward()
        kept.append((gradients(model), averaged(replicas)))
        for net in (module, *replicas):
            net.zero_grad()
            net.stem.requires_grad_(True)
    for got, want in kept:
        assert_same_bits(got, want)


@on_ranks(2)
def test_replicas_that_freeze_different_parameters_are_refused():
    """Noticed in the step, before any gradient is sent; the next step works."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(plain_model())
    step = smp.step(mean_square)
    model.module[2].bias.requires_grad_(smp.rank() == 0)
    with pytest.raises(ReplicasDiffer, match="dp_rank 1 .*'3.weight' .* not '2.bias'"):
        step(model, batch_of(smp.dp_rank()))
    assert all(p.grad is None for p in model.parameters())

    @smp.step
    def failing(model: nn.Module, x: Tensor) -> None:
        mean_square(model, x)
        if smp.rank() == 1:
            raise LookupError("mine")

    # Who failed hears of its own error.
    with pytest.raises(*((LookupError,) if smp.rank() == 1 else (ReplicasDiffer,))):
        failing(model, batch_of(smp.dp_rank()))
    assert all(p.grad is None for p in model.parameters())
    model.module[2].bias.requires_grad_(True)
    step(model, batch_of(smp.dp_rank()))
    assert model.module[2].bias.grad is not None


@on_ranks(2, 4)
def test_one_replica_evaluates_alone():
    """Nothing is exchanged under no_grad, nor in evaluation mode without a backward."""
    smp.init({"pipeline_parallel_degree": smp.job.bootstrap.mpi_size() // 2, "ddp": True})
    model = smp.DistributedModel(plain_model())
    step = smp.step(mean_square)
    evaluate = smp.step(lambda model, x: model(x).square().mean())
    step(model, batch_of(smp.dp_rank()))
    if smp.dp_rank() == 0:
        with torch.no_grad():
            evaluate(model, batch_of(0))
        model.eval()
        evaluate(model, batch_of(0))
    model.eval()
    model.zero_grad()

    step(model, batch_of(smp.dp_rank(), 1))

    want = of_replicas(plain_model, 1)
    assert_same_bits(gradients(model), want)


@on_ranks(2)
def test_a_backward_in_evaluation_mode_averages_gradients_and_leaves_buffers():
    """... also in the first step; training begins with the buffers of the first replica."""
    smp.init({"ddp": True})
    module = nn.Sequential(plain_model(), nn.BatchNorm1d(3))
    replicas = [copy.deepcopy(module) for _ in range(2)]
    model = smp.DistributedModel(module)
    step = smp.step(mean_square)
    for number, trains in enumerate((False, True, False)):
        for net in (model, *replicas):
            net.train(trains)
            net.zero_grad()
        step(model, batch_of(smp.dp_rank(), number))
        for rank, replica in enumerate(replicas):
            replica(batch_of(rank, number)).square().mean().backward()
        assert_same_bits(gradients(model), averaged(replicas))
        mine = replicas[smp.dp_rank()]
        assert_same_bits(dict(module.named_buffers()), dict(mine.named_buffers()))


# ------------------------------------------------------------------------------ comm hooks


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
@on_ranks(4)
def test_hooks_made_for_ddp_exchange_the_gradients_of_a_pipeline(name):
    smp.init({"pipeline_parallel_degree": 2, "ddp": True})
    model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-4)
    model.register_comm_hook(smp.get_dp_process_group(), getattr(default_hooks, name))

    smp.step(mean_square)(model, batch_of(smp.dp_rank()))

    replicas = [plain_model(), plain_model()]
    for rank, replica in enumerate(replicas):
        replica(batch_of(rank)).square().mean().backward()
    within = 1e-6 if name == "allreduce_hook" else 2e-3
    assert_close(gradients(model), averaged(replicas), within)


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(2)
def test_a_hook_sees_every_bucket_in_order(backend):
    """Buckets go in reverse order of definition; gradients() are parts of buffer()."""
    smp.init({"ddp": True, "ddp_dist_backend": backend})
    model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-5)
    seen = []

    def hook(state, bucket):
        assert state == "state"
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        seen.append((bucket.index(), bucket.is_last(), bucket.parameters()))
        future = torch.futures.Future()
        future.set_result(torch.full_like(bucket.buffer(), 2.0))
        return future

    model.register_comm_hook("state", hook)
    smp.step(mean_square)(model, batch_of(smp.dp_rank()))

    assert [index for index, _, _ in seen] == list(range(6))
    assert [last for _, last, _ in seen] == [False] * 5 + [True]
    order = [p for _, _, parameters in seen for p in parameters]
    assert [id(p) for p in order] == [id(p) for p in reversed(list(model.parameters()))]
    assert all((p.grad == 2).all() for p in model.parameters())


# -------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", ["forward", "backward", "split"])
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2, 4)
def test_a_failed_step_of_one_replica_fails_on_all(phase, failing, backend):
    """The original exception, on every rank; the next step equals one without failure."""
    pp = smp.job.bootstrap.mpi_size() // 2
    smp.init(
        {
            "pipeline_parallel_degree": pp,
            "ddp": True,
            "ddp_dist_backend": backend,
            "microbatches": 2,
        }
    )
    model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-4)
    fails = [False]

    def raise_error(gradient: Tensor) -> None:
        raise LookupError("no such row")

    @smp.step
    def step(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        if fails[0] and phase == "forward":
            raise_error(out)
        if fails[0] and phase == "backward":
            out.register_hook(raise_error)
        loss = out.square().mean()
        model.backward(loss)
        return loss

    step(model, batch_of(smp.dp_rank()))
    model.zero_grad()
    fails[0] = smp.dp_rank() == failing
    rows = 0 if fails[0] and phase == "split" else 4
    kind, text = (ValueError, "0 samples") if phase == "split" else (LookupError, "no such row")
    with pytest.raises(kind, match=text) as caught:
        step(model, batch_of(smp.dp_rank(), 0, rows))
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    if smp.dp_rank() != failing:
        rank = smp.get_dp_group()[failing]
        assert f"this is dp_rank {1 - failing}; " in notes and "there:" in notes
        assert f"the step failed on dp_rank {failing} (rank {rank}) and counts on no" in notes
    assert all(p.grad is None for p in model.local_parameters())

    fails[0] = False
    step(model, batch_of(smp.dp_rank(), 1))
    replicas = [plain_model(), plain_model()]
    for rank, replica in enumerate(replicas):
        for x in batch_of(rank, 1).split(2):
            (replica(x).square().mean() / 2).backward()
    assert_same_bits(gradients(model), averaged(replicas))

    fails[0] = smp.dp_rank() == failing  # gradients of before are there, changed or not
    with pytest.raises(kind, match=text):
        step(model, batch_of(smp.dp_rank(), 0, rows))
    assert all(p.grad is not None for p in model.local_parameters())


@on_ranks(2)
def test_the_other_replicas_hear_in_which_module_microbatch_and_phase_one_failed():
    """... of this step, whatever the one before failed with."""
    smp.init({"ddp": True, "microbatches": 3})
    model = smp.DistributedModel(plain_model())
    fails: list = []

    def raise_error(*given: Any) -> None:
        raise LookupError("no such row")

    @smp.step
    def step(model: nn.Module, x: Tensor, numbers: Tensor) -> None:
        if fails == [int(numbers[0]), "forward"]:
            model.module[2].register_forward_pre_hook(raise_error)
        out = model(x)
        if fails == [int(numbers[0]), "backward"]:
            out.register_hook(raise_error)
        model.backward(out.square().mean())

    for number, phase, where in (
        (1, "forward", "module '2'"),
        (2, "backward", "the step function"),
        (0, "forward", "module '2'"),
    ):
        fails = [number, phase] if smp.dp_rank() == 1 else []
        with pytest.raises(LookupError) as caught:
            step(model, batch_of(0, rows=6), torch.arange(3).repeat_interleave(2))
        model.module[2]._forward_pre_hooks.clear()
        told = f"raised on rank 1 (pp_rank 0) in {where}, microbatch {number}, {phase}"
        notes = "\n".join(caught.value.__notes__) if smp.dp_rank() == 0 else told
        assert told in notes, notes


@on_ranks(2, 4)
def test_a_failed_comm_hook_fails_the_step_on_all():
    """In a pipeline, too, whose steps that fail leave the script's buffers and numbers."""
    pp = smp.job.bootstrap.mpi_size() // 2
    smp.init({"pipeline_parallel_degree": pp, "ddp": True})
    module = nn.Sequential(*plain_model(), nn.BatchNorm1d(3))
    model = smp.DistributedModel(module, bucket_cap_mb=1e-4)
    group = smp.get_dp_process_group()
    step = smp.step(mean_square)
    step(model, batch_of(smp.dp_rank()))
    model.zero_grad()

    def hook(state, bucket):
        if smp.dp_rank() == 1 and bucket.index() == 1 and not state:
            state.append(1)
            raise LookupError("lost")
        return default_hooks.allreduce_hook(group, bucket)

    model.register_comm_hook([], hook)
    before = copy.deepcopy([dict(model.local_named_buffers()), torch.random.get_rng_state()])
    with pytest.raises(LookupError, match="lost"):
        step(model, batch_of(smp.dp_rank()))
    assert all(p.grad is None for p in model.parameters())
    if pp > 1:
        buffers = smp.allgather(before[0], smp.DP_GROUP)[0]  # with which the step began
        assert_same_bits(dict(model.local_named_buffers()), buffers)
        assert torch.equal(torch.random.get_rng_state(), before[1])
    step(model, batch_of(smp.dp_rank()))
    assert all(p.grad is not None for p in model.local_parameters())


# ----------------------------------------------------------------------------------- join


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by_all", [True, False])
@on_ranks(2, 4)
def test_replicas_with_fewer_batches_join_the_others(by_all, backend):
    """Averages are over all replicas, or those that are left; all end alike."""
    smp.init(
        {
            "pipeline_parallel_degree": smp.job.bootstrap.mpi_size() // 2,
            "ddp": True,
            "ddp_dist_backend": backend,
        }
    )
    model = smp.DistributedModel(plain_model(), bucket_cap_mb=1e-4)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = smp.step(mean_square)
    batches = [2, 4]
    with model.join(divide_by_initial_world_size=by_all):
        for number in range(batches[smp.dp_rank()]):
            optimizer.zero_grad()
            step(model, batch_of(smp.dp_rank(), number))
            optimizer.step()

    reference = plain_model()
    sgd = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(4):
        left = [rank for rank in (0, 1) if number < batches[rank]]
        sgd.zero_grad()
        for rank in left:
            reference(batch_of(rank, number)).square().mean().backward()
        for parameter in reference.parameters():
            parameter.grad /= 2 if by_all else len(left)
        sgd.step()
    assert_close(dict(model.local_named_parameters()), dict(reference.named_parameters()), 1e-6)


@on_ranks(2)
def test_join_with_several_models_is_refused():
    smp.init({"ddp": True})
    models = [smp.DistributedModel(plain_model()) for _ in range(2)]
    with (
        pytest.raises(NotImplementedError, match="several DistributedModels"),
        models[0].join(),
    ):
        pass


@on_ranks(2)
def test_backwards_through_two_models_outside_of_steps():
    """An adversarial pair: buckets of both would go when there is room, in any order."""
    smp.init({"ddp": True})
    makers = [lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))] * 2
    maker, critic = (smp.DistributedModel(m(), bucket_cap_mb=1e-5) for m in makers)
    for turn in range(20):
        maker.zero_grad()
        critic.zero_grad()
        made = maker(torch.randn(3, 4, generator=torch.Generator().manual_seed(smp.dp_rank())))
        critic(made.detach()).square().mean().backward()
        (-critic(made).square().mean()).backward()
        for model in (maker, critic):
            everyone = smp.allgather(gradients(model), smp.DP_GROUP)
            assert_same_bits(everyone[0], everyone[1])
        assert all(g is not None for g in gradients(maker)), turn


@on_ranks(2, 4)
def test_two_models_in_one_script():
    """A step that uses one of them leaves the other without gradients."""
    smp.init({"pipeline_parallel_degree": smp.job.bootstrap.mpi_size() // 2, "ddp": True})
    first, second = (smp.DistributedModel(plain_model()) for _ in range(2))

    @smp.step
    def step(model: nn.Module, x: Tensor, twice: bool) -> None:
        out = first(x)
        if twice:
            second.backward(F.pad(out, (0, 3)).sum() + second(x).sum())
        else:
            first.backward(out.sum())

    step(first, batch_of(smp.dp_rank()), True)
    first.zero_grad()
    second.zero_grad()
    step(first, batch_of(smp.dp_rank()), False)

    want = of_replicas(plain_model, loss=torch.sum)
    assert_same_bits(gradients(first), want)
    assert all(p.grad is None for p in second.local_parameters())
