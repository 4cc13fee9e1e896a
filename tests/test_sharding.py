"""Optimizer state shared out among the replicas (``shard_optimizer_state``), and parameters and
gradients with it (``sharded_data_parallel_degree``).
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.sharding import owners
from tests.models.trained import assert_same, snapshot
from tests.ranks import on_ranks

STEPS = 10
JOBS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp": (2, {}),
    "dp 4": (4, {}),
    "pp dp": (4, {"pipeline_parallel_degree": 2}),
    "tp dp": (4, {"tensor_parallel_degree": 2}),
    "pp tp": (4, {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}),
}
DEGREE = "sharded_data_parallel_degree"
ALL = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 0}
# The table alone has 4,816 elements of the net's 6,900.
SHARDS: dict[str, dict[str, Any]] = {
    "optimizer": {"shard_optimizer_state": True},
    "parameters": {DEGREE: 2, **ALL},
    "large ones": {
        DEGREE: 2,
        **ALL,
        "sdp_param_persistence_threshold": 400,
    },
    "on demand": {DEGREE: 2, **ALL, "sdp_max_live_parameters": 600},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "lamb": lambda p: smp.optimizers.FusedLAMB(p, lr=0.01, max_grad_norm=0.1),
}


class Net(nn.Module):
    """A large table, layers for two ranks, one never used, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(301, 16)
        self.first = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.second = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.Tanh())
        self.output = nn.Linear(24, 8)
        self.unused = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.second(self.drop(self.first(self.table(tokens)))))


def job(kind: str, **options: Any) -> None:
    smp.init({**JOBS[kind][1], "microbatches": 2, **options})


def wrapped(make: Callable, late: bool = True, checkpoints: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(3)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        module = Net()
    if smp.pp_size() > 1:
        for path, one in module.named_modules():
            smp.set_partition(one, int(path.startswith(("second", "output"))))
    if checkpoints:  # of modules of both stages, and one in another
        smp.set_activation_checkpointing(module)
        smp.set_activation_checkpointing(module.second)
    early = None if late else make(module.parameters())
    model = smp.DistributedModel(module, bucket_cap_mb=0.01)
    return model, smp.DistributedOptimizer(early or make(model.parameters()))


@smp.step
def train_step(model: Any, tokens: Tensor) -> Tensor:
    loss = F.cross_entropy(model(tokens), tokens % 8)
    model.backward(loss)
    return loss


def train(model: Any, optimizer: Any, first: int, end: int, clip: float = 0.0) -> list[Tensor]:
    seen = []
    for step in range(first, end):
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(100 * step + smp.dp_rank())
        torch.manual_seed(step + 1000 * smp.dp_rank())
        loss = train_step(model, torch.randint(301, (8,), generator=source))
        seen.append(loss.reduce_mean().detach().clone())
        if clip:
            seen.append(optimizer.clip_master_grads(clip).float())
        optimizer.step()
    return seen


def everything(model: Any, optimizer: Any) -> list[Any]:
    states = snapshot(optimizer.state_dict())
    states["state"] = dict(sorted(states["state"].items()))
    return [snapshot(model.state_dict()), states]


def held_of(optimizer: Any) -> int:
    """Elements of this rank's optimizer state."""
    states = optimizer.orig_state_dict()["state"].values()
    tensors = [s for one in states for s in one.values() if isinstance(s, Tensor)]
    return sum(s.numel() for s in tensors if s.dim())


def is_here(parameter: Any) -> bool:
    parts = owners.parts_of(parameter)
    return parts is not None and owners.part_here(parts) is not None


def run_both(kind: str, name: str, half: dict[str, Any], shards: str = "optimizer") -> None:
    results, held = [], []
    chosen = dict(SHARDS[shards])
    if kind == "dp 4" and DEGREE in chosen:
        chosen[DEGREE] = 4
    for given in ({}, chosen):
        smp.reset()
        job(kind, **given, **half)
        model, optimizer = wrapped(OPTIMIZERS[name])
        seen = train(model, optimizer, 0, STEPS)
        results.append([torch.stack(seen), *everything(model, optimizer)])
        held.append(held_of(optimizer))
    assert_same(results[1], results[0])
    shares = smp.allgather(held[1], smp.RDP_GROUP)
    assert sum(shares) == held[0]  # each element is on one rank
    if name in ("sgd", "adamw", "adagrad"):
        assert max(shares) <= 1.1 * sum(shares) / len(shares)


@on_ranks(2)
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shards", SHARDS)
def test_replicas_with_shards_train_with_the_bits_of_plain_ones(shards, name, half):
    run_both("dp", name, half, shards)


@on_ranks(4)
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb"])
@pytest.mark.parametrize("kind", ["dp 4", "pp dp", "tp dp"])
@pytest.mark.parametrize("shards", ["optimizer", "parameters"])
@pytest.mark.sample(10)
def test_every_kind_of_parallelism_has_the_bits_of_the_job_without_shards(
    shards, kind, name, half
):
    if kind == "tp dp" and name == "adafactor":
        name = "adagrad"  # norms of slices are refused
    run_both(kind, name, half, shards)


@on_ranks(4)
@pytest.mark.parametrize(("kind", "pipeline"), [("pp dp", "interleaved"), ("pp tp", "simple")])
def test_checkpoints_and_offloading_beside_shards_change_no_bit(kind, pipeline, monkeypatch):
    monkeypatch.setenv("SMP_JITTER", str(41 + int(os.environ["OMPI_COMM_WORLD_RANK"])))
    results = []
    for on in (False, True):
        smp.reset()
        options = {"offload_activations": on, "shard_optimizer_state": on and kind == "pp dp"}
        job(kind, pipeline=pipeline, **options)
        model, optimizer = wrapped(OPTIMIZERS["adamw"], checkpoints=on)
        seen = train(model, optimizer, 0, 3)
        results.append([torch.stack(seen), *everything(model, optimizer)])
    assert_same(results[1], results[0])


@on_ranks(4)
@pytest.mark.parametrize("kind", ["dp 4", "tp dp"])
def test_a_step_sends_as_many_bytes_as_plain_data_parallelism(kind, monkeypatch):
    sent, counted = 0.0, []

    def counting(name: str, factor: int) -> None:
        plain = getattr(torch.distributed, name)

        def count(tensor: Tensor, *args: Any, **options: Any) -> Any:
            nonlocal sent
            if tensor.is_floating_point():
                size = torch.distributed.get_world_size(options["group"])
                sent += tensor.nbytes * factor * (size - 1) / size
            return plain(tensor, *args, **options)

        monkeypatch.setattr(torch.distributed, name, count)

    for name, factor in (("all_reduce", 2), ("reduce", 1), ("broadcast", 1)):
        counting(name, factor)  # times size - 1, shared out among the ranks
    for sharded in (False, True):
        smp.reset()
        smp.init({**JOBS[kind][1], "shard_optimizer_state": sharded})
        model, optimizer = wrapped(OPTIMIZERS["adamw"])
        train(model, optimizer, 0, 2)
        for trains in (True, False):
            model.table.requires_grad_(trains)
            sent = 0
            train(model, optimizer, 2, 3)
            counted.append(sum(smp.allgather(sent, smp.WORLD)))
    plain, without_table, shards, shards_without_table = counted
    assert 0 < shards <= plain
    assert 0 < shards_without_table <= without_table < plain / 2


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_shares_of_a_small_gpt_are_even(replicas):
    """Whole parameters alone are up to 2.5 times the mean."""
    block = [768, 768, 768 * 2304, 2304, 768 * 768, 768] + [768, 768, 768 * 3072, 3072] * 2
    sizes = [50257 * 768, 1024 * 768, *block * 12]
    loads = [0] * replicas
    shares = owners.share_out(sizes, [True] * len(sizes), loads)
    assert max(loads) <= 1.1 * sum(loads) / replicas
    assert sum(len(parts) > 1 for parts in shares) <= replicas
    for size, parts in zip(sizes, shares, strict=True):
        assert [parts[0].start, parts[-1].end] == [0, size]
        assert all(a.end == b.start for a, b in zip(parts, parts[1:], strict=False))
        assert len({part.owner for part in parts}) == len(parts)


# ------------------------------------------------------------------------ parameters


@on_ranks(2)
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_slices_follow_what_others_do_to_the_model(half):
    results = []
    for sharded in (False, True):
        smp.reset()
        job("dp", shard_optimizer_state=sharded, **half)
        model, optimizer = wrapped(OPTIMIZERS["sgd"])
        train(model, optimizer, 0, 2)
        model.load_state_dict({n: v / 2 for n, v in model.state_dict().items()})
        train(model, optimizer, 2, 3)
        with torch.no_grad():
            for parameter in model.parameters():  # new storage
                parameter.data = parameter.data.clone()
        train(model, optimizer, 3, 5)
        results.append(everything(model, optimizer))
    assert_same(results[1], results[0])
    assert optimizer.redefined_params
    virtual = dict(model.virtual_named_parameters())
    assert virtual["table.weight"].numel() < model.table.weight.numel()


# ------------------------------------------------------------------------ gradients


@on_ranks(4)
@pytest.mark.parametrize("kind", ["dp 4", "pp dp", "tp dp"])
def test_norms_and_overflows_count_each_element_once(kind):
    norms = []
    for sharded in (False, True):
        smp.reset()
        job(kind, shard_optimizer_state=sharded)
        model, optimizer = wrapped(OPTIMIZERS["adamw"])
        train(model, optimizer, 0, 1)
        if sharded:
            assert all(is_here(p) for p in model.local_parameters() if p.grad is not None)
        norms.append(optimizer.clip_master_grads(0.5).float())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).float())
        norms.append(model.clip_grad_norm_(0.01).float())
        seen = train(model, optimizer, 1, 3, clip=0.1)
        norms.extend(seen)
        if not sharded:
            continue
        scaler = smp.amp.GradScaler("cpu")
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        train_step(model, torch.arange(8))
        first = next((p for p in model.local_parameters() if p.grad is not None), None)
        if smp.rank() == 3 and first is not None:
            first.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() < 2.0**16
    torch.testing.assert_close(torch.stack(norms[:7]), torch.stack(norms[7:]))


@on_ranks(4)
@pytest.mark.parametrize("kind", ["dp 4", "pp dp"])
def test_gradients_add_up_over_exchanges_and_steps_without_one(kind):
    results = []
    for sharded in (False, True):
        smp.reset()
        job(kind, shard_optimizer_state=sharded)
        model, optimizer = wrapped(OPTIMIZERS["sgd"])
        for step in range(3):
            tokens = torch.arange(8) + step + smp.dp_rank()
            train_step(model, tokens)
            with model.no_sync():
                train_step(model, 2 * tokens)
            train_step(model, 3 * tokens)
            model.eval()
            smp.step(lambda model, x: model(x))(model, tokens)  # no backward
            model.train()
            optimizer.step()
            if step == 1:
                optimizer.zero_grad(set_to_none=False)
        results.append(snapshot(model.state_dict()))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_parameters_frozen_thawed_added_and_removed_between_steps_train():
    results = []
    for sharded in (False, True):
        smp.reset()
        job("dp", shard_optimizer_state=sharded)
        model, optimizer = wrapped(
            lambda p: OPTIMIZERS["adamw"](list(p)[:-4])  # without output, unused
        )
        model.table.requires_grad_(False)
        for step in range(6):
            if step == 1:
                model.table.requires_grad_(True)
            if step == 2:
                optimizer.add_param_group({"params": list(model.output.parameters())})
            if step == 3:
                model.second.requires_grad_(False)
            if step == 4:
                removed = optimizer.param_groups.pop()
            if step == 5:
                optimizer.add_param_group(removed)
            train(model, optimizer, step, step + 1)
        results.append(everything(model, optimizer))
    assert_same(results[1], results[0])


@on_ranks(2)
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_groups_filled_anew_with_the_models_parameters_keep_masters_and_state(half):
    results = []
    for sharded, anew in ((False, False), (False, True), (True, True)):
        smp.reset()
        job("dp", shard_optimizer_state=sharded, **half)
        model, optimizer = wrapped(OPTIMIZERS["sgd"])
        train(model, optimizer, 0, 2)
        if anew:
            optimizer.param_groups[0]["params"] = list(model.parameters())
        train(model, optimizer, 2, 4)
        results.append(everything(model, optimizer))
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# ------------------------------------------------------------------------ saving


@on_ranks(4)
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("way", ["partial", "full", "gathered", "shard"])
@pytest.mark.parametrize("kind", ["dp 4", "pp dp", "tp dp"])
@pytest.mark.parametrize("then", [True, False], ids=["sharded", "unsharded"])
@pytest.mark.sample(8)
def test_a_run_resumes_with_the_bits_of_an_uninterrupted_one(kind, way, half, then, tmp_path):
    job(kind, shard_optimizer_state=True, **half)
    model, optimizer = wrapped(OPTIMIZERS["adamw"])
    train(model, optimizer, 0, 3)
    if way in ("partial", "full"):
        smp.save_checkpoint(tmp_path, "three", way == "partial", model, optimizer)
    else:
        states = optimizer.local_state_dict(gather_if_shard=way == "gathered")
        smp.save(states, tmp_path / "optimizer.pt", partial=True, v3=way == "shard")
        smp.save(model.local_state_dict(), tmp_path / "model.pt", partial=True)
    saved = everything(model, optimizer)
    train(model, optimizer, 3, 5)
    want = everything(model, optimizer)

    smp.reset()
    job(kind, shard_optimizer_state=then, **half)
    resumed, again = wrapped(OPTIMIZERS["adamw"])
    if way in ("partial", "full"):
        smp.resume_from_checkpoint(tmp_path, partial=way == "partial")
    else:
        resumed.load_state_dict(smp.load(tmp_path / "model.pt"))
        again.load_state_dict(smp.load(tmp_path / "optimizer.pt"))
    assert_same(everything(resumed, again), saved)  # without a step
    again.load_state_dict(snapshot(again.local_state_dict(gather_if_shard=False)))
    train(resumed, again, 3, 5)
    assert_same(everything(resumed, again), want)


@on_ranks(2)
def test_a_partial_checkpoint_of_shards_loads_under_other_degrees(tmp_path):
    job("dp", shard_optimizer_state=True)
    model, optimizer = wrapped(OPTIMIZERS["adamw"])
    train(model, optimizer, 0, 3)
    smp.save_checkpoint(tmp_path, "three", True, model, optimizer)
    shard, want = optimizer.local_state_dict(False), everything(model, optimizer)

    smp.reset()
    smp.init({"pipeline_parallel_degree": 2})
    with pytest.warns(UserWarning, match="rdp_size is 1"):
        smp.reset()
        smp.init({"pipeline_parallel_degree": 2, "shard_optimizer_state": True})
        resumed, again = wrapped(OPTIMIZERS["adamw"])
    smp.resume_from_checkpoint(tmp_path)
    resumed.eval()
    with torch.no_grad():
        smp.step(lambda model, x: model(x))(resumed, torch.arange(8))
    assert_same(everything(resumed, again), want)
    with pytest.raises(ValueError, match="a shard of 2, and rdp_size is 1"):
        again.load_state_dict(shard)


@on_ranks(2)
@pytest.mark.parametrize("half", [{}, {"bf16": True}], ids=["", "bf16"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", ""])
def test_a_parameter_frozen_at_a_resume_has_its_state_once_thawed(sharded, half, tmp_path):
    def begun(is_frozen: bool) -> tuple[Any, Any]:
        smp.reset()
        job("dp", shard_optimizer_state=sharded, **half)
        model, optimizer = wrapped(OPTIMIZERS["adamw"])
        model.module.first.requires_grad_(not is_frozen)
        return model, optimizer

    model, optimizer = begun(is_frozen=False)
    train(model, optimizer, 0, 2)
    model.module.first.requires_grad_(False)
    smp.save_checkpoint(tmp_path, "t", True, model, optimizer)
    model.module.first.requires_grad_(True)
    train(model, optimizer, 2, 4)
    want = everything(model, optimizer)

    model, optimizer = begun(is_frozen=True)
    smp.resume_from_checkpoint(tmp_path, "t")
    model.module.first.requires_grad_(True)
    train(model, optimizer, 2, 4)
    assert_same(everything(model, optimizer), want)


# ------------------------------------------------------------------------ errors


class Coupled(torch.optim.SGD):
    """Steps with a number from all parameters."""

    def step(self, closure: Any = None) -> None:
        members = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        norm = sum(p.grad.norm() for p in members)
        with torch.no_grad():
            for p in members:
                p -= p.grad / norm


@on_ranks(2)
def test_optimizers_and_calls_without_a_rule_are_refused_by_name():
    job("dp", shard_optimizer_state=True)
    for make, text in [
        (torch.optim.LBFGS, "LBFGS looks at all parameters at once"),
        (
            lambda p: Coupled(p, lr=0.1),
            "Coupled has updated a small parameter otherwise beside",
        ),
    ]:
        with pytest.raises(NotImplementedError, match=text):
            wrapped(make)
    model, optimizer = wrapped(OPTIMIZERS["sgd"])
    with pytest.raises(NotImplementedError, match="call backward before step"):
        optimizer.step(lambda: None)
    with pytest.raises(NotImplementedError, match="give each replica as many batches"):
        model.join().__enter__()


@on_ranks(2)
def test_another_group_on_one_replica_is_named():
    job("dp", shard_optimizer_state=True)
    model, _ = wrapped(lambda p: OPTIMIZERS["sgd"](list(p)[smp.rank() :]))
    with pytest.raises(smp.ReplicasDiffer, match="'table.weight' .* float32 of rdp_rank"):
        train_step(model, torch.arange(8))


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "share": lambda optimizer: (optimizer.sharded, "take_share"),
    "masters": lambda optimizer: (optimizer.masters, "make"),
    "changes": lambda optimizer: (optimizer.masters, "follow"),
    "step": lambda optimizer: (optimizer.optimizer, "step"),
    "values": lambda optimizer: (optimizer.masters, "give"),
    "moments": lambda optimizer: (optimizer.optimizer, "_moments"),  # between its all-reduces
}


def check_failing_place(kind: str, name: str, place: str, told: list[int], **half: Any) -> None:
    """An exception on rank 1 ends the step on the ranks told of it; the next step is right."""
    job(kind, shard_optimizer_state=True, **half)
    model, optimizer = wrapped(OPTIMIZERS[name])
    train(model, optimizer, 0, 1)

    def fails(*args: Any) -> None:
        raise ValueError("of one share")

    where, method = PLACES[place](optimizer)
    before = getattr(where, method)
    if smp.rank() == 1:
        setattr(where, method, fails)
        with pytest.raises(ValueError, match="of one share"):
            train(model, optimizer, 1, 2)
        setattr(where, method, before)
    elif smp.rank() in told:
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) failed on rank \d"):
            train(model, optimizer, 1, 2)
    else:
        train(model, optimizer, 1, 2)
    train(model, optimizer, 2, 3)
    first, *others = smp.allgather(snapshot(model.state_dict()), smp.RDP_GROUP)
    for other in others:
        assert_same(other, first)


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "half"),
    [("adamw", {}), ("adafactor", {"bf16": True}), ("sgd", {"fp16": True}), ("lamb", {})],
)
@pytest.mark.parametrize("place", PLACES)
def test_an_exception_in_one_share_is_raised_by_all_replicas_which_stay_alike(
    name, half, place
):
    if place != "moments" or name == "lamb":
        check_failing_place("dp", name, place, [0], **half)


@on_ranks(4)
@pytest.mark.parametrize(
    ("kind", "name", "place", "told"),
    [
        ("dp 4", "adamw", "step", [0, 2, 3]),
        ("pp dp", "adamw", "step", [3]),  # the same stage of the other replica
        ("pp dp", "lamb", "step", [0, 2, 3]),
        ("tp dp", "lamb", "share", [0, 2, 3]),
        ("tp dp", "lamb", "moments", [0, 2, 3]),
    ],
)
def test_ranks_that_wait_for_the_one_with_the_exception_hear_of_it(kind, name, place, told):
    check_failing_place(kind, name, place, told)
