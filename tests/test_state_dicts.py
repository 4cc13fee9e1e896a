"""State dicts of models and optimizers whose parts live on several ranks."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

import smp
from smp.ranks import CommGroup
from smp.saving import optimizer_state, state_dicts
from smp.saving.replica import Replica
from tests.models.partition import distributed
from tests.models.trained import (
    OPTIMIZERS,
    PlainRun,
    Run,
    assert_same,
    batch_of,
    init,
    make_model,
    rank_of,
    snapshot,
    train_step,
    trained,
)
from tests.ranks import on_ranks

EVERY_OPTIMIZER = pytest.mark.parametrize("name", OPTIMIZERS)


@on_ranks(2, 3)
def test_a_full_dict_is_that_of_the_plain_model():
    """Names and order as of the wrapped module, values of the trained parts, any owner."""
    init(smp.job.bootstrap.mpi_size())
    run, plain = Run("sgd"), PlainRun("sgd")
    assert_same(run.model.state_dict(), plain.model.state_dict())

    run.train(0, 3)
    plain.train(0, 3)
    full = run.model.state_dict()

    assert_same(full, plain.model.state_dict())
    assert not any(tensor.requires_grad for tensor in full.values())
    assert full["output.weight"] is full["embedding.weight"], "tied entries came apart"
    assert full._metadata == plain.model.state_dict()._metadata
    fresh = make_model(seed=5, pin=False)
    assert str(fresh.load_state_dict(full)) == "<All keys matched successfully>"


class TwoNames(nn.Module):
    """A module that is there under two paths, on rank 1."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.again = self.norm

    def forward(self, x):
        return self.again(self.norm(self.first(x))).square().mean()


@on_ranks(2)
def test_a_module_with_two_names_has_one_state():
    smp.init({"pipeline_parallel_degree": 2})
    net = TwoNames()
    names = list(net.norm.state_dict())
    model = distributed(net, {"": 0, "norm": 1})

    @smp.step
    def step(model, x):
        model.backward(model(x))

    step(model, torch.randn(4, 3))
    full = model.state_dict()

    assert full["norm.running_mean"].abs().sum() > 0
    for name in names:
        assert torch.equal(full[f"again.{name}"], full[f"norm.{name}"]), name


@on_ranks(2)
def test_only_rank_0_gets_a_full_dict_that_is_gathered_to_it():
    init(2)
    run, plain = Run("sgd"), PlainRun("sgd")
    run.train(0, 1)
    plain.train(0, 1)

    full = run.model.state_dict(gather_to_rank0=True)

    assert_same(full, plain.model.state_dict() if smp.mp_rank() == 0 else OrderedDict())


@on_ranks(2)
def test_a_partial_dict_holds_what_the_rank_owns():
    init(2)
    run = Run("sgd")
    run.evaluate()

    partial = run.model.local_state_dict()

    assert partial.pop("_smp_is_partial") is True
    assert not any(tensor.requires_grad for tensor in partial.values())
    parameters = dict(run.model.local_named_parameters())
    assert all(partial[n].data_ptr() == p.data_ptr() for n, p in parameters.items()), "copied"
    owned = [
        name
        for name in make_model(pin=False).state_dict()
        if rank_of(2)[name.rpartition(".")[0]] == smp.pp_rank()
    ]
    assert list(partial) == owned


@on_ranks(2, 3)
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@EVERY_OPTIMIZER
@pytest.mark.sample(10)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(name, partial, when):
    """Model, optimizer and scheduler state loaded before or after the partition."""
    init(smp.job.bootstrap.mpi_size())
    whole = Run(name)
    whole.train(0, 3)
    if partial:
        model, optimizer = whole.model.local_state_dict(), whole.optimizer.local_state_dict()
    else:
        model, optimizer = whole.model.state_dict(), whole.optimizer.state_dict()
    model, optimizer = snapshot(model), snapshot(optimizer)
    scheduler = snapshot(whole.scheduler.state_dict())
    whole.train(3, 6)

    resumed = Run(name, seed=9, before_wrapping=True)
    if when == "after":
        resumed.evaluate()
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    resumed.scheduler.load_state_dict(scheduler)
    resumed.train(3, 6)

    assert_same(resumed.model.state_dict(), whole.model.state_dict())
    assert_same(resumed.optimizer.state_dict(), whole.optimizer.state_dict())
    assert_same(resumed.scheduler.state_dict(), whole.scheduler.state_dict())


@on_ranks(2)
def test_a_state_from_before_the_wrapping_is_each_owners_alone():
    """What a rank still has of parameters that went to another one is not the state's."""
    init(2)
    plain = PlainRun("adamw")
    plain.train(0, 2)
    run = Run("adamw", before_wrapping=True, state=snapshot(plain.optimizer.state_dict()))
    run.model.load_state_dict(plain.model.state_dict())
    run.scheduler.load_state_dict(plain.scheduler.state_dict())
    run.train(2, 4)
    plain.train(2, 4)

    assert_same(run.optimizer.state_dict(), plain.optimizer.state_dict())


@on_ranks(2)
def test_a_state_that_waited_for_the_partition_is_loaded_once():
    """Before hooks hear of the partition; not again in that of a later model."""
    init(2)
    plain = PlainRun("adamw")
    plain.train(0, 2)
    run, heard = Run("adamw", seed=9), []
    run.model.load_state_dict(plain.model.state_dict())
    run.optimizer.load_state_dict(snapshot(plain.optimizer.state_dict()))
    run.model.register_post_partition_hook(
        lambda *given: heard.append(snapshot([each.state_dict() for each in given]))
    )
    run.train(2, 3)
    assert_same(heard, [[plain.model.state_dict(), plain.optimizer.state_dict()]])
    run.optimizer.load_state_dict(snapshot(run.optimizer.state_dict()))
    run.train(3, 4)

    before = snapshot(run.optimizer.state_dict())
    later = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    smp.step(lambda model, x: model(x))(later, torch.ones(2, 2))
    assert later.partitioned
    assert_same(run.optimizer.state_dict(), before)


@on_ranks(2)
def test_optimizer_state_is_kept_for_the_parameters_of_this_rank_alone():
    run = trained("adamw")
    local = {id(p) for p in run.model.local_parameters()}
    numbered = [p for group in run.optimizer.param_groups for p in group["params"]]
    mine = [number for number, p in enumerate(numbered) if id(p) in local]

    partial = run.optimizer.local_state_dict()

    assert partial["_smp_is_partial"] is True
    assert sorted(partial["state"]) == mine
    assert sorted(run.optimizer.orig_state_dict()["state"]) == mine
    assert len(partial["param_groups"]) == 2


@on_ranks(2)
def test_the_older_names_of_an_optimizers_state_do_the_same():
    run = trained("adamw")
    older = run.optimizer.save_optimizer_backcompat(gather_if_shard=False)
    assert_same(older, run.optimizer.local_state_dict())

    continued = Run("adamw")
    continued.train(0, 1)
    continued.train(1, 2)
    continued.optimizer.load_optimizer_backcompat(older)
    assert_same(continued.optimizer.local_state_dict(), older)


@on_ranks(2)
def test_a_partial_dict_of_another_partition_goes_to_the_owners():
    """Entries travel to the rank that owns them now; with same_partition_load they do not."""
    init(2)
    want = make_model(seed=3, pin=False).state_dict()
    run = Run("sgd")
    run.evaluate()
    swapped = {n: t for n, t in want.items() if ("second" in n) == (smp.pp_rank() == 0)}
    swapped["_smp_is_partial"] = True

    with torch.device("meta"):  # a default device, which is the script's own
        assert str(run.model.load_state_dict(swapped)) == "<All keys matched successfully>"
        full = run.model.state_dict()

    assert_same(full, want)
    with pytest.raises(RuntimeError, match="Missing key"):
        run.model.load_state_dict(swapped, same_partition_load=True)


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
def test_wrong_entries_are_named_on_every_rank(when):
    """As torch does: keys that are missing or too many, and both shapes."""
    init(2)
    run = Run("sgd")
    if when == "after":
        run.evaluate()
    full = make_model(pin=False).state_dict()
    bias = full.pop("second.0.bias")
    full["third.bias"] = bias

    keys = run.model.load_state_dict(full, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["second.0.bias"], ["third.bias"])
    with pytest.raises(RuntimeError, match=r"Missing key.*second\.0\.bias"):
        run.model.load_state_dict(full)
    full["second.0.bias"] = torch.zeros(7)
    with pytest.raises(
        RuntimeError, match=r"second\.0\.bias: .*torch\.Size\(\[7\]\).*torch\.Size\(\[6\]\)"
    ):
        run.model.load_state_dict(full, strict=False)


@on_ranks(2)
@pytest.mark.parametrize("same", [False, True])
def test_an_entry_too_many_of_a_partial_dict_is_named(same):
    init(2)
    run = Run("sgd")
    run.evaluate()
    partial = run.model.local_state_dict()
    partial["third.bias"] = torch.zeros(6)

    keys = run.model.load_state_dict(partial, strict=False, same_partition_load=same)
    assert (keys.missing_keys, keys.unexpected_keys) == ([], ["third.bias"])
    with pytest.raises(RuntimeError, match=r"Unexpected key.*third\.bias"):
        run.model.load_state_dict(partial, same_partition_load=same)


@on_ranks(2)
def test_a_full_dict_may_say_that_it_is_not_partial():
    """``_smp_is_partial`` False, as Hugging Face's Trainer adds it, and names to translate."""
    init(2)
    run = Run("sgd")
    run.evaluate()
    want = make_model(seed=3, pin=False).state_dict()
    renamed = {f"old.{name}": value for name, value in want.items()}
    renamed["_smp_is_partial"] = False

    run.model.load_state_dict(
        renamed,
        translate_function=lambda sd: {n.removeprefix("old."): t for n, t in sd.items()},
    )

    assert_same(run.model.state_dict(), want)
    assert "_smp_is_partial" in renamed, "the user's dict was changed"


def of_rank(rank: int) -> dict:
    """Some of what only one rank holds."""
    one = torch.tensor([1 + 1j * rank, 2 - 3j])
    return {
        "views": [one.conj(), one[1:].conj().imag, one.expand(2, 2), one[:0], one.real[1:]],
        rank: (torch.tensor(rank), "text", [None, 1.5]),
        "ordered": OrderedDict(b=one, a=one),
    }


@on_ranks(3)
def test_values_come_from_their_own_rank_and_else_from_the_first_that_holds_them():
    init(3)
    rank = smp.pp_rank()
    held = {"all": torch.tensor(rank), f"of {rank}": of_rank(rank)}
    if rank > 0:
        held["some"] = torch.tensor(rank)
    wanted = ["all", "some", "nobody's", *(f"of {other}" for other in range(3))]
    found = Replica("test", CommGroup.PP_GROUP).route(held, wanted)

    assert found.keys() == set(wanted) - {"nobody's"}
    assert (int(found["all"]), int(found["some"])) == (rank, max(rank, 1))
    for other in range(3):
        got, want = found[f"of {other}"], of_rank(other)
        assert_same(got, want)
        assert [type(one) for one in got.values()] == [list, tuple, OrderedDict]
        assert got["ordered"]["a"] is got["ordered"]["b"]


@on_ranks(3)
@pytest.mark.parametrize("only_to", [None, 0, 2])
def test_what_is_gathered_is_by_rank_and_only_where_it_is_wanted(only_to):
    init(3)
    got = Replica("test").gather(of_rank(smp.mp_rank()), only_to)
    if only_to in (None, smp.mp_rank()):
        assert_same(got, [of_rank(rank) for rank in range(3)])
    else:
        assert got is None


@on_ranks(4)
def test_one_replica_gathers_alone():
    """state_dict() needs only the ranks of its own MP_GROUP."""
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    run = Run("sgd")
    run.evaluate()

    if smp.rdp_rank() == 0:
        assert_same(run.model.state_dict(), make_model(pin=False).state_dict())


class Sparse(torch.nn.Module):
    """Buffers of each sparse layout, one of them twice."""

    def __init__(self):
        super().__init__()
        eye = torch.eye(4) * 3
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("coo", eye.to_sparse())
        self.register_buffer("again", self.coo)
        twice = torch.tensor([[1, 1], [2, 2]])
        self.register_buffer("raw", torch.sparse_coo_tensor(twice, torch.ones(2), (4, 4)))
        self.register_buffer("empty", torch.zeros(4, 4).to_sparse())
        self.register_buffer("csr", eye.to_sparse_csr())
        self.register_buffer("csc", eye.to_sparse_csc())
        self.register_buffer("bsr", eye.to_sparse_bsr((2, 2)))

    def forward(self, x):
        return self.linear(x) @ self.coo


@on_ranks(2)
def test_a_full_dict_has_another_ranks_sparse_buffers():
    init(2)
    net, plain = torch.nn.Sequential(torch.nn.Linear(4, 4), Sparse()), Sparse()
    model = distributed(net, {"1": 1})
    smp.step(lambda model, x: model(x))(model, torch.ones(4, 4))

    full = model.state_dict()

    assert full["1.again"] is full["1.coo"]
    for name, want in plain.named_buffers(remove_duplicate=False):
        got = full[f"1.{name}"]
        assert got.layout is want.layout and got.shape == want.shape
        assert got.layout is not torch.sparse_coo or got.is_coalesced() == want.is_coalesced()
        assert torch.equal(got.to_dense(), want.to_dense())
    loaded = torch.nn.Sequential(torch.nn.Linear(4, 4), Sparse())
    assert str(loaded.load_state_dict(full)) == "<All keys matched successfully>"
    model.load_state_dict(full)
    net[1].coo.values().zero_()
    model.load_state_dict(full)
    assert smp.pp_rank() == 0 or torch.equal(net[1].coo.to_dense(), plain.coo.to_dense())


# ------------------------------------------------------- what modules add, and how they load


class Versioned(nn.Module):
    """Counts its calls in extra state, adds an entry, and loads by its version."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.loaded = nn.Linear(4, 4), 0, []
        self._register_state_dict_hook(self._add)

    def forward(self, x):
        self.calls += 1
        return self.linear(x)

    @staticmethod
    def _add(module, state_dict, prefix, local_metadata):
        if module.calls:
            state_dict[f"{prefix}linear.note"] = torch.tensor(module.calls)
            state_dict[f"{prefix}of.no.module"] = (module.calls, [torch.tensor([module.calls])])

    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.loaded.append(local_metadata.get("version"))
        state_dict.pop(f"{prefix}linear.note", None)
        state_dict.pop(f"{prefix}of.no.module", None)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def versioned():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 4), Versioned())
    return net, distributed(net, {"": 0, "1": 1})


@smp.step
def call(model, x):
    return model(x)


def run_once(model):
    with torch.no_grad():
        call(model, torch.ones(2, 4))


@on_ranks(2)
def test_extra_state_and_entries_of_hooks_are_those_of_the_modules_own_rank():
    init(2)
    net, model = versioned()
    before = model.state_dict()
    assert before["1._extra_state"] == {"calls": 0} and "1.linear.note" not in before
    run_once(model)
    run_once(model)

    full, partial = model.state_dict(), model.local_state_dict()
    assert full["1._extra_state"] == {"calls": 4} and full["1.linear.note"] == 4
    assert full["1.of.no.module"] == (4, [torch.tensor([4])])
    of_1 = [name for name in partial if name in ("1.linear.note", "1.of.no.module")]
    assert len(of_1) == (2 if "1._extra_state" in partial else 0) == 2 * smp.pp_rank()
    assert ("0.weight" in partial) == (smp.pp_rank() == 0)


@on_ranks(2)
@pytest.mark.parametrize("kind", ["full", "partial", "translated"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_load_with_the_version_that_they_were_saved_with(kind, when):
    init(2)
    _, saved = versioned()
    run_once(saved)
    state = saved.local_state_dict() if kind == "partial" else saved.state_dict()
    state._metadata["1"] = {"version": 2}
    if kind == "partial" and smp.rank() == 0:
        del state._metadata  # as of a rank for which no part was saved
    net, model = versioned()
    if when == "after":
        run_once(model)
    translate = {"translate_function": dict} if kind == "translated" else {}
    model.load_state_dict(state, **translate)
    if when == "before":
        run_once(model)
    assert set(net[1].loaded) == {2}
    if smp.pp_rank() == 1:
        assert net[1].calls == 2 + (2 if when == "before" else 0)


@on_ranks(2)
@pytest.mark.parametrize("same", [False, True])
def test_before_the_partition_a_partial_dict_loads_at_once_on_every_rank(same):
    """Every rank has everything then; other keys are told."""
    init(2)
    want = make_model(seed=3, pin=False).state_dict()
    mine = {n: t for n, t in want.items() if ("second" in n) == (smp.rank() == 0)}
    mine |= {"third.bias": torch.zeros(6), "_smp_is_partial": True}
    missed = mine.pop("first.0.bias", None)
    run = Run("sgd")
    own = make_model(pin=False).state_dict()

    keys = run.model.load_state_dict(mine, strict=False, same_partition_load=same)

    assert (keys.missing_keys, keys.unexpected_keys) == (["first.0.bias"], ["third.bias"])
    assert_same(run.model.state_dict(), {**want, "first.0.bias": own["first.0.bias"]})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*first\.0.*Unexpected key.*third"):
        run.model.load_state_dict(mine, same_partition_load=same)
    if missed is not None:
        mine["first.0.bias"] = missed
    del mine["third.bias"]
    run.model.load_state_dict(mine, same_partition_load=same)
    local = run.model.local_state_dict()
    assert local.pop("_smp_is_partial")
    assert_same(local, want)
    run.evaluate()
    assert_same(run.model.state_dict(), want)


@on_ranks(2)
def test_before_the_partition_every_rank_has_all_and_asks_nobody(monkeypatch):
    init(2)
    run, plain = Run("adamw", before_wrapping=True), PlainRun("adamw")

    def ask(*_):
        raise AssertionError("other ranks were asked")

    for module in (state_dicts, optimizer_state):
        monkeypatch.setattr(module, "Replica", ask)
    assert_same(run.model.state_dict(), plain.model.state_dict())
    assert_same(run.optimizer.state_dict(), plain.optimizer.state_dict())
    run.model.load_state_dict(plain.model.state_dict())
    local = run.model.local_state_dict()
    assert local.pop("_smp_is_partial") and list(local) == list(plain.model.state_dict())


# ------------------------------------------------------------- optimizers of other forms


@on_ranks(2)
@pytest.mark.parametrize("partial", [False, True])
def test_state_of_a_parameter_of_no_model_and_of_none_is_on_every_rank(partial):
    init(2)

    def made():
        model = smp.DistributedModel(make_model())
        extra = nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([extra, *model.parameters()], lr=0.1, momentum=0.9)
        return model, extra, smp.DistributedOptimizer(sgd)

    def step(model, extra, optimizer):
        smp.step(train_step)(model, batch_of(0))
        extra.grad = torch.full((2,), 3.0)
        optimizer.step()

    first = made()
    step(*first)
    first[2].optimizer.state["calls"] = {"number": 3}
    state = first[2].local_state_dict() if partial else first[2].state_dict()
    assert state["state"][0]["momentum_buffer"].tolist() == [3, 3]
    assert state["state"]["calls"] == {"number": 3}

    _, extra, optimizer = second = made()
    step(*second)
    optimizer.load_state_dict(snapshot(state))
    assert optimizer.optimizer.state[extra]["momentum_buffer"].tolist() == [3, 3]
    assert optimizer.optimizer.state["calls"] == {"number": 3}
    again = optimizer.local_state_dict() if partial else optimizer.state_dict()
    assert_same(again, state)


class Counter(torch.optim.SGD):
    """Its state dict has a form of its own."""

    def state_dict(self):
        return {"steps": 5}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


@on_ranks(2)
def test_a_state_of_an_optimizers_own_form_is_left_as_it_is():
    init(2)
    run = Run("sgd")
    run.evaluate()
    optimizer = smp.DistributedOptimizer(Counter(run.model.parameters(), lr=0.1))
    assert optimizer.state_dict() == {"steps": 5}
    partial = optimizer.local_state_dict()
    assert partial == {"steps": 5, "_smp_is_partial": True}
    for given in ({"steps": 7}, partial):
        optimizer.load_state_dict(given)
        assert optimizer.optimizer.loaded == {"steps": given["steps"]}
