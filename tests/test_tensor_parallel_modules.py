"""Primitives, linears and embeddings by themselves, and users' own distributed modules."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.nn import utils as blocks
from smp.tensor_parallel import assumed, group, primitives
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks

# --------------------------------------------------------------------------- primitives


def rows_of(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def check_adjoint(operation, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """The operation gives this rank's of the outputs, and its backward is the transpose.

    Args:
        inputs, outputs: by rank; ``outputs`` is a function of ``inputs``, with grad.
    """
    rank = group.rank()
    mine = inputs[rank].detach().clone().requires_grad_(True)
    got = operation(mine)
    assert torch.equal(got, outputs[rank])
    seeds = [rows_of(100 + r, *out.shape) for r, out in enumerate(outputs)]
    want = torch.autograd.grad(outputs, inputs, seeds)[rank]
    got.backward(seeds[rank])
    assert_near(mine.grad, want, "gradient")


@pytest.mark.parametrize("axis", [0, 1, -1])
@on_ranks(2, 3)
def test_all_gather_and_its_adjoint(axis):
    split_over_all_ranks()
    size = group.size()

    def shape(rank: int) -> list[int]:
        out = [2, 3, 4]
        out[axis] = rank + 1
        return out

    inputs = [rows_of(r, *shape(r)).requires_grad_(True) for r in range(size)]
    whole = torch.cat(inputs, axis)
    check_adjoint(lambda x: blocks.fused_allgather_for_tp(x, axis), inputs, [whole] * size)


@pytest.mark.parametrize("axis", [0, 1, -1])
@on_ranks(2, 3)
def test_reduce_scatter_and_its_adjoint(axis):
    split_over_all_ranks()
    size = group.size()
    inputs = [rows_of(r, 5, 5, 5).requires_grad_(True) for r in range(size)]
    outputs = list(torch.stack(inputs).sum(0).tensor_split(size, axis))
    check_adjoint(lambda x: blocks.reduce_scatter_for_tp(x, axis), inputs, outputs)


@pytest.mark.parametrize(("split", "merge"), [(0, 1), (1, 0), (-1, 0), (0, 2)])
@on_ranks(2, 3)
def test_scatter_and_merge_and_its_adjoint(split, merge):
    split_over_all_ranks()
    size = group.size()

    def shape(rank: int) -> list[int]:
        out = [5, 5, 5]
        out[merge] = 2 + rank
        return out

    inputs = [rows_of(r, *shape(r)).requires_grad_(True) for r in range(size)]
    outputs = [
        torch.cat([x.tensor_split(size, split)[r] for x in inputs], merge) for r in range(size)
    ]
    check_adjoint(lambda x: blocks.scatter_and_merge_for_tp(x, split, merge), inputs, outputs)


@on_ranks(2, 3)
def test_all_reduces_are_a_pair():
    split_over_all_ranks()
    x = rows_of(7, 3, 3).requires_grad_(True)
    y = blocks.fwd_allreduce_for_tp(blocks.bwd_allreduce_for_tp(x) * (group.rank() + 1))
    factor = sum(range(1, group.size() + 1))
    assert_near(y, x * factor, "sum")
    y.sum().backward()
    assert_near(x.grad, torch.full_like(x, factor), "gradient")


@on_ranks(2)
def test_integers_are_gathered_and_have_no_gradient():
    split_over_all_ranks()
    got = blocks.fused_allgather_for_tp(torch.arange(group.rank() + 1), 0)
    assert got.tolist() == [0, 0, 1] and not got.requires_grad
    with pytest.raises(ValueError, match="the same axis"):
        blocks.scatter_and_merge_for_tp(torch.zeros(2, 2), 1, -1)
    assert [blocks.get_local_channels(5), blocks.get_start_pos_for_slicing(5)] == (
        [3, 0] if group.rank() == 0 else [2, 3]
    )


# ----------------------------------------------------------------- linears and embeddings


class Recommender(nn.Module):
    """Tables that are looked up, and a small MLP; another order of axes on the way."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.users = nn.Embedding(11, 5, sparse=sparse)
        self.items = nn.Embedding(7, 5, padding_idx=2, sparse=sparse)
        self.hidden = nn.Linear(10, 7)
        self.out = nn.Linear(7, 3, bias=False)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        both = torch.cat([self.users(user), self.items(item)], -1)
        return self.out(torch.tanh(self.hidden(both)))


def picks(rank: int, step: int) -> tuple:
    generator = torch.Generator().manual_seed(10 * step + rank)
    shape = (2 + rank, 3 + rank)
    return (
        torch.randint(0, 11, shape, generator=generator),
        torch.randint(0, 7, shape, generator=generator),
    )


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).square().mean()


def marked(make) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    with smp.tensor_parallelism():
        return make()


@on_ranks(2, 3)
def test_linears_and_embeddings_by_themselves():
    split_over_all_ranks()
    job = WholeJob(marked(Recommender), squares, picks)
    net = job.net
    assert isinstance(net.users, smp.nn.DistributedEmbedding)
    assert isinstance(net.hidden, smp.nn.DistributedLinear)
    assert isinstance(net.hidden, smp.nn.DistributedModule) and isinstance(
        net.hidden, nn.Linear
    )
    assert net.hidden.weight.size(1) == blocks.get_local_channels(10)
    for step in range(3):
        job.step(step, max_norm=0.01)
    job.check_parameters()
    whole = job.model.state_dict()
    for name, value in job.plain.state_dict().items():
        assert_near(whole[name], value, name)


@pytest.mark.parametrize("tied", [False, True], ids=["by themselves", "tied"])
@on_ranks(2, 3)
def test_ranks_that_are_fed_the_same_batch(tied):
    split_over_all_ranks(prescaled_batch=True)

    def loss(model: nn.Module, user: Tensor, item: Tensor) -> Tensor:
        return squares(model, user % 7, item)

    job = WholeJob(
        marked(Tied if tied else Recommender), loss, lambda rank, step: picks(1, step)
    )
    for step in range(3):
        job.step(step, max_norm=0.01)
    job.check_parameters()


@on_ranks(2, 4)
def test_sparse_tables():
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(
        marked(lambda: Recommender(sparse=True)),
        squares,
        picks,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    for step in range(2):
        job.optimizer.zero_grad()
        job.plain_optimizer.zero_grad()
        job.train(step)
        assert job.net.users.weight.grad.is_sparse
        for parameter in (*job.net.parameters(), *job.plain.parameters()):
            parameter.grad = parameter.grad.to_dense()
        job.check_gradients()
        job.optimizer.step()
        job.plain_optimizer.step()
    job.check_parameters()


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=5)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, _: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(ids))))


@on_ranks(2, 3)
def test_a_tied_vocabulary_is_cut_by_rows():
    split_over_all_ranks()

    def loss(model: nn.Module, _: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids, ids).flatten(0, -2), ids.flatten())

    job = WholeJob(marked(Tied), loss, picks)
    assert job.net.head.weight is job.net.embedding.weight
    assert job.net.head.weight.size(0) == blocks.get_local_channels(7)
    for step in range(3):
        job.step(step)
    job.check_parameters()
    assert job.model.state_dict()["head.weight"].shape == (7, 4)


@on_ranks(2)
def test_modules_made_distributed_by_hand():
    """Without a context: the user's own code names the distributed classes."""
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = smp.nn.DistributedEmbedding(9, 6, vocab_parallel=True)
            self.hidden = smp.nn.DistributedLinear(6, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.hidden(self.table(ids))

    model = smp.DistributedModel(Net())
    whole = model.state_dict()
    plain = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5))
    plain.load_state_dict(dict(zip(plain.state_dict(), whole.values(), strict=True)))
    ids = torch.arange(3) + 2 * smp.rank()
    assert_near(model(ids), plain(ids), "output")


@on_ranks(2)
def test_what_would_look_at_the_weights_itself_stays_whole():
    split_over_all_ranks()
    net = marked(lambda: nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True))
    model = smp.DistributedModel(nn.Sequential(net))
    reasons = {one.path: one.reason for one in model._smp_split}
    assert reasons["0.linear1"] == (
        "TransformerEncoderLayer uses its weight without calling it"
    )
    assert not list(model.distributed_modules())


@on_ranks(2)
def test_what_cannot_be_split_by_itself_stays_whole():
    split_over_all_ranks()

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Linear(1, 4)
            self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
            self.clipped = nn.Embedding(5, 4, max_norm=1.0)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.normed(self.narrow(x)) + self.clipped(ids)

    model = smp.DistributedModel(marked(Odd))
    reasons = {one.path: one.reason for one in model._smp_split}
    assert reasons["narrow"] == "it is too small for tensor_parallel_degree=2"
    assert reasons["clipped"] == "max_norm and scale_grad_by_freq are not built"
    model(torch.ones(2, 1), torch.tensor([1, 4])).sum().backward()


@on_ranks(2)
def test_an_index_out_of_range_is_an_error():
    split_over_all_ranks()
    table = smp.nn.DistributedEmbedding(5, 4, vocab_parallel=True)
    with pytest.raises(IndexError, match="an index is 99, of 5 embeddings"):
        table(torch.tensor([1, 99]))


@on_ranks(2)
def test_autocast_gives_its_dtype():
    split_over_all_ranks()
    linear = smp.nn.DistributedLinear(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.ones(2, 6)).dtype is torch.bfloat16


# --------------------------------------------------------------------- registered modules


class Gate(nn.Module):
    """The user's class; its distributed form has another interface."""

    def __init__(self, width: int, times: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(width, times * width)
        self.second = nn.Linear(times * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"y": self.second(torch.relu(self.first(x)) * scale)}


class SplitGate(smp.nn.DistributedModule):
    """The worked example of docs/tensor_parallelism.md: a module from the primitives."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        local = blocks.get_local_channels(inner)
        with (
            blocks.parameter_creation_scope(self, scaled_batch=True),
            blocks.initialize_with_output_partition(self),
        ):
            self.first = nn.Linear(width, local)
        with (
            blocks.parameter_creation_scope(self, scaled_batch=True),
            blocks.initialize_with_input_partition(self),
        ):
            self.second = nn.Linear(local, width, bias=False)
        self.second.bias = nn.Parameter(torch.zeros(width))  # sees this rank's samples

    def forward(self, x: Tensor, scale: float) -> Tensor:
        everyones = blocks.fused_allgather_for_tp(x, 0)
        part = F.linear(torch.relu(self.first(everyones)) * scale, self.second.weight)
        return blocks.reduce_scatter_for_tp(part, 0) + self.second.bias


def arguments(width: int, times: int = 2) -> tuple:
    return (width, times * width), {}


def inputs(x: Tensor, scale: float = 1.0) -> tuple:
    return (x, scale), {}


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([Gate(5), Gate(5, times=3)])

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = gate(x, scale=0.5)["y"]
        return x


@on_ranks(2, 3)
def test_a_registered_class_is_replaced_and_keeps_its_weights():
    split_over_all_ranks()
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})

    def batch(rank: int, step: int) -> tuple:
        return (rows_of(10 * step + rank, 4, 5),)

    job = WholeJob(marked(Gates), squares, batch)
    assert all(isinstance(gate, SplitGate) for gate in job.net.gates)
    for step in range(3):
        job.step(step, max_norm=0.01)
    job.check_parameters()


@on_ranks(4)
def test_a_registered_class_in_a_pipeline():
    """Its primitives are the collectives of its own path."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 3})
    smp.tp_register_with_module(Gate, SplitGate, arguments, inputs, lambda y: {"y": y})

    class Mixed(Gates):
        def __init__(self) -> None:
            super().__init__()
            self.between = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.between(super().forward(x)))

    job = WholeJob(
        marked(Mixed), squares, lambda rank, step: (rows_of(10 * step + rank, 6, 5),)
    )
    for step in range(3):
        job.step(step)
    job.check_parameters()


@on_ranks(2)
def test_hooks_that_do_not_fit_are_refused():
    split_over_all_ranks()
    with pytest.raises(TypeError, match=r"init_hook of Gate takes \(width, times=3\)"):
        smp.tp_register_with_module(Gate, SplitGate, lambda width, times=3: ((), {}))
    with pytest.raises(TypeError, match=r"must take the same: \(x, scale=1.0\)"):
        smp.tp_register(SplitGate, forward_hook=lambda x: ((x,), {}))(Gate)

    @smp.tp_register(SplitGate, init_hook=lambda width, times=2: width)
    class Other(Gate):
        pass

    net = marked(lambda: nn.Sequential(Other(3)))
    with pytest.raises(TypeError, match=r"init_hook of Other returns \(args, kwargs\)"):
        smp.DistributedModel(net)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 3)
        self.third = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        y = self.first(x)
        return [y, self.second(y), self.third(x)]


@on_ranks(2, 3)
def test_a_rank_may_leave_out_of_its_loss_what_others_use():
    """Backward comes to every collective on every rank, in the same order."""
    split_over_all_ranks()

    def loss(model: nn.Module, x: Tensor, uses: list[int]) -> Tensor:
        outputs = model(x)
        return sum(outputs[i].square().mean() for i in uses)

    def batch(rank: int, step: int) -> tuple:
        return rows_of(rank, 2, 4), [[0, 1, 2], [2], [0, 2]][(rank + step) % 3]

    job = WholeJob(marked(Branches), loss, batch)
    for step in range(3):
        job.step(step)
    job.check_parameters()


# ------------------------------------------------------------------------------ any model


def random_net(seed: int) -> nn.Module:
    """Linears of odd sizes, some marked; residual paths, norms, one linear used twice."""
    draw = random.Random(seed)

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            inner = draw.randrange(3, 9)
            self.norm = nn.LayerNorm(width)
            self.first = nn.Linear(width, inner, bias=draw.random() < 0.5)
            self.second = nn.Linear(inner, width)
            self.times = draw.randrange(1, 3)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x + self.second(torch.tanh(self.first(self.norm(x))))
            return x

    width = draw.randrange(3, 7)
    net = nn.Sequential(
        nn.Embedding(11, width), *(Block(width) for _ in range(draw.randrange(1, 4)))
    )
    for module in net.modules():
        if draw.random() < 0.6:
            smp.set_tensor_parallelism(module)
        elif draw.random() < 0.3:
            smp.set_tensor_parallelism(module, False)
    return net


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sample(3)
@on_ranks(2, 3)
def test_random_models_equal_the_plain_one(seed):
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    job = WholeJob(random_net(seed), lambda m, ids, _: squares(m, ids), picks)
    for step in range(2):
        job.step(step, max_norm=0.05)
    job.check_parameters()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sample(2)
@on_ranks(4, timeout_s=120)
def test_random_models_in_a_pipeline_equal_the_plain_one(seed):
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 2})
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)

    def batch(rank: int, step: int) -> tuple:
        return (picks(rank, step)[0].repeat(2, 1),)

    job = WholeJob(random_net(seed), squares, batch)
    for step in range(2):
        job.step(step, max_norm=0.05)
    job.check_parameters()


def test_lengths_without_a_group():
    x = torch.zeros(3, 2)
    assert primitives.lengths_of(x, 0) == [3]
    assert blocks.fused_allgather_for_tp(x, 0) is x


# ---------------------------------------------------------------------- lengths assumed


@on_ranks(2, 3)
def test_lengths_are_exchanged_only_when_they_are_not_what_they_were(monkeypatch):
    """What the ranks had is taken to be what they have; a wrong guess is an exchange more."""
    split_over_all_ranks()
    rank = group.rank()
    exchanges = []
    exchange = group.gather_numbers
    monkeypatch.setattr(
        group, "gather_numbers", lambda *args: exchanges.append(args) or exchange(*args)
    )

    def gathered(length: int) -> int:
        """All ranks' lengths, from their rows; gives how many exchanges there were."""
        before = len(exchanges)
        own = torch.full((2, length), rank)
        got = blocks.fused_allgather_for_tp(own, 1)[0].tolist()
        assert got.count(rank) == length and got == sorted(got)
        return len(exchanges) - before

    assumed._seen.clear()
    assert gathered(3) == 0  # alike on all
    assert gathered(5 + rank) == 1
    assert gathered(5 + rank) == 0
    assert gathered(6 if rank == 0 else 5) == 1  # some lengths of then, on other ranks
    assert gathered(5 + rank) == 0
    assert gathered(5) == 1  # not what they were when rank 0 had this
    assert gathered(5) == 0
    assert gathered(0) == 0
    assert gathered(2 if rank == 1 else 0) == 1  # rank 0 took all to have nothing
    assert gathered(3) == 0


@on_ranks(2, 3)
def test_a_wrong_guess_of_a_regions_sizes_changes_nothing():
    """Samples, lengths and who gives a mask differ from call to call, and may come again."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    config = GPT2Config(n_embd=12, n_head=3, resid_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"  # causal where there is no mask
    block = GPT2Block(config)
    plain = copy.deepcopy(block)
    smp.set_tensor_parallelism(block)
    model = smp.DistributedModel(block)
    rank = group.rank()
    assumed._seen.clear()
    draw = random.Random(5)
    for call in range(9):
        shapes = [(draw.choice([1, 2]), draw.choice([3, 4])) for _ in range(group.size())]
        x = rows_of(10 * call + rank, *shapes[rank], 12)
        seen = torch.zeros(shapes[rank][0], 1, *[shapes[rank][1]] * 2)
        seen = seen.masked_fill(torch.ones_like(seen).triu(1).bool(), -torch.inf)
        mask = seen if draw.random() < 0.3 else None
        assert_near(model(x, attention_mask=mask), plain(x), f"call {call}, {shapes}")
