"""Tables of ``nn.Embedding(sparse=True)`` on several replicas.

The reference is the same tables in this process; their gradients are summed in rank order.
"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import smp
from tests.ranks import on_ranks
from tests.test_data_parallel import BACKENDS

ROWS, WIDTH = 10, 3
TOKENS = [torch.tensor([1, 2, 2]), torch.tensor([2, 7, 9])]
OPTIONS = [{}, {"overlapping_allreduce": False}, {"gradient_as_bucket_view": True}]


class Tables(nn.Module):
    """A replica uses the tables that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH, sparse=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.double()  # not what new tensors are

    def forward(self, tokens: Tensor, used: list[int]) -> Tensor:
        return self.head(sum(self.tables[number](tokens) for number in used))


def two_replicas(backend: str) -> dict:
    pp = smp.job.bootstrap.mpi_size() // 2
    return {"pipeline_parallel_degree": pp, "ddp": True, "ddp_dist_backend": backend}


def loss_of(model: nn.Module, tokens: Tensor, used: list[int]) -> Tensor:
    return model(tokens, used).square().sum()


def average(replicas: list[nn.Module], divisor: int, name: str) -> Tensor | None:
    """The gradients' sum by the divisor, dense; None where no replica has one."""
    given = [replica.get_parameter(name).grad for replica in replicas]
    given = [g.to_dense() for g in given if g is not None]
    return sum(given[1:], given[0]) / divisor if given else None


def check(model: smp.DistributedModel, replicas: list[nn.Module], divisor: int) -> None:
    for name, parameter in model.local_named_parameters():
        want = average(replicas, divisor, name)
        if want is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad.is_sparse == name.startswith("tables"), name
        torch.testing.assert_close(parameter.grad.to_dense(), want)


@pytest.mark.sample(4)
@pytest.mark.parametrize("hook", [None, "allreduce_hook"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=["overlap", "after backward", "views"])
@on_ranks(2, 4)
def test_a_table_that_a_replica_does_not_use_gets_the_others_gradient(options, backend, hook):
    """One that nobody uses has none.  The second step uses other tables than the first."""
    smp.init(two_replicas(backend))
    model = smp.DistributedModel(Tables(), **options)
    if hook:
        model.register_comm_hook(smp.get_dp_process_group(), getattr(default_hooks, hook))

    @smp.step
    def step(model: nn.Module, tokens: Tensor, used: list[int]) -> None:
        model.backward(loss_of(model, tokens, used))

    for used in ([0], [0, 1]), ([1], [0]):
        replicas = [Tables() for _ in TOKENS]
        model.zero_grad()
        step(model, TOKENS[smp.dp_rank()], used[smp.dp_rank()])
        for replica, tokens, tables in zip(replicas, TOKENS, used, strict=True):
            loss_of(replica, tokens, tables).backward()
        check(model, replicas, 2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("when", ["before the model", "after it"])
@on_ranks(2, 4)
def test_a_step_that_fails_beside_a_sparse_table_fails_on_all_and_the_next_one_works(
    when, backend
):
    smp.init(two_replicas(backend))
    model = smp.DistributedModel(Tables())

    @smp.step
    def step(model: nn.Module, tokens: Tensor, fails: bool) -> None:
        if fails and when == "before the model":
            raise LookupError("no such row")
        loss = loss_of(model, tokens, [0, 1])
        if fails:
            raise LookupError("no such row")
        model.backward(loss)

    for _ in range(2):
        with pytest.raises(LookupError, match="no such row"):
            step(model, TOKENS[smp.dp_rank()], smp.dp_rank() == 1)
        assert all(p.grad is None for p in model.local_parameters())
    step(model, TOKENS[smp.dp_rank()], False)
    replicas = [Tables() for _ in TOKENS]
    for replica, tokens in zip(replicas, TOKENS, strict=True):
        loss_of(replica, tokens, [0, 1]).backward()
    check(model, replicas, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@on_ranks(2)
def test_a_replica_that_has_joined_gives_nothing_to_a_sparse_table(backend):
    smp.init({"ddp": True, "ddp_dist_backend": backend})
    model = smp.DistributedModel(Tables())
    reference = Tables()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    batches = [1, 3]
    with model.join():
        for _ in range(batches[smp.rank()]):
            ours.zero_grad()
            loss_of(model, TOKENS[smp.rank()], [0, 2]).backward()
            ours.step()

    for number in range(3):
        replicas = [copy.deepcopy(reference) for _ in range(2)]
        for replica, tokens, count in zip(replicas, TOKENS, batches, strict=True):
            if number < count:
                loss_of(replica, tokens, [0, 2]).backward()
        for name, parameter in reference.named_parameters():
            parameter.grad = average(replicas, 2, name)
        theirs.step()
    for (name, mine), want in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(mine, want, msg=name)


@on_ranks(2)
def test_the_gradient_of_a_sparse_bag_is_averaged_as_rows():
    smp.init({"ddp": True})

    def make() -> nn.Module:
        torch.manual_seed(5)
        return nn.EmbeddingBag(ROWS, WIDTH, sparse=True)

    model, replicas = smp.DistributedModel(make()), [make() for _ in TOKENS]
    model(TOKENS[smp.rank()].view(1, -1)).square().sum().backward()
    for replica, tokens in zip(replicas, TOKENS, strict=True):
        replica(tokens.view(1, -1)).square().sum().backward()
    got = model.get_parameter("weight").grad
    assert got.is_sparse
    torch.testing.assert_close(got.to_dense(), average(replicas, 2, "weight"))


class Tied(nn.Module):
    """What reads its rows writes them, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, ROWS)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens))


@on_ranks(2)
def test_a_tied_table_has_a_dense_gradient_as_in_one_process():
    """Which is what Adam takes."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(Tied())
    model(TOKENS[smp.rank()]).square().sum().backward()
    replicas = [Tied() for _ in TOKENS]
    for replica, tokens in zip(replicas, TOKENS, strict=True):
        replica(tokens).square().sum().backward()
    got = model.get_parameter("table.weight").grad
    assert not got.is_sparse
    torch.testing.assert_close(got, average(replicas, 2, "table.weight"))
