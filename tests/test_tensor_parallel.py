"""A model split over the TP_GROUP equals the plain one over all ranks' samples.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import contextlib
import copy
import io
import itertools
import os
import pickle
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.utils import clip_grad_norm_ as imported_early
from torch.utils._pytree import tree_flatten

import smp
from smp import torch_versions
from smp.optimizers import FusedLAMB
from smp.slicing.slices import Slices, slices_of
from smp.tensor_parallel import group
from smp.tensor_parallel.backward import step_end
from smp.tensor_parallel.rows import regions, same_samples
from tests.devices import DEVICES, use
from tests.models.modules import module_of
from tests.models.partition import distributed
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, in_float64, split_over_all_ranks
from tests.test_optimizers import Lamb

VOCABULARY = 61


def small_gpt2(heads: int = 3, marks: dict | None = None, **options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    in_float64(3)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=8 * heads,
        n_layer=2,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        **options,
    )
    with smp.tensor_parallelism(**(marks or {})):
        return GPT2LMHeadModel(config)


def tokens(rank: int, step: int, uneven: bool = True, masked: bool = True) -> tuple:
    """Ids and mask; other numbers of samples, lengths and padding on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples, length = (2 + rank, 6 + 2 * rank) if uneven else (2, 6)
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    if masked and rank % 2:
        mask[:, -2:] = 0
    return ids, mask


def next_token_loss(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


# ----------------------------------------------------------------------------- equality


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("config", [{}, {"pipeline_parallel_degree": 2}, {"ddp": True}])
@on_ranks(4, timeout_s=120)
def test_on_an_accelerator(config, device, monkeypatch):
    """Where ranks share one, in a pipeline and beside replicas, too."""
    degree = 2 if config else 4
    os.environ.pop("SMP_DEVICE", None)  # ranks of tests stay on the CPU where there is a GPU
    smp.init({"tensor_parallel_degree": degree, "microbatches": len(config) + 1, **config})
    on = use(device)
    job = WholeJob(
        small_gpt2(heads=5),
        next_token_loss,
        lambda rank, step: tokens(rank, step, uneven=not config),
    ).run(2, max_norm=0.3)
    assert {p.device.type for p in job.model.local_parameters()} == {on.type}
    places = []
    gather = torch_versions.all_gather_single
    monkeypatch.setattr(
        torch_versions,
        "all_gather_single",
        lambda out, own, *rest, **how: (
            places.append(own.device.type) or gather(out, own, *rest, **how)
        ),
    )
    assert group.gather_numbers([smp.tp_rank()]) == [[rank] for rank in range(smp.tp_size())]
    assert places == ["cpu"]  # no rank waits for its GPU


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@on_ranks(2, timeout_s=120)
def test_gpt2_over_gloo(uneven):
    split_over_all_ranks(ddp_dist_backend="gloo")
    job = WholeJob(small_gpt2(), next_token_loss, lambda *of: tokens(*of, uneven=uneven))
    for step in range(2):
        job.step(step, max_norm=0.5)


@pytest.mark.parametrize("placement", ["cluster", "spread"])
@on_ranks(4, timeout_s=120)
def test_replicas_of_a_split_model_equal_the_plain_one(placement):
    """T 2, R 2; microbatches, and gradients that add up over steps and without exchange."""
    smp.init({"tensor_parallel_degree": 2, "microbatches": 2, "placement_strategy": placement})
    job = WholeJob(
        small_gpt2(),
        next_token_loss,
        lambda rank, step: tokens(rank, step, uneven=False),
    )
    with job.model.no_sync():
        job.train(0)
    job.train(1)
    job.check_gradients()
    job.train(2)
    job.check_gradients()


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@on_ranks(4, timeout_s=120)
def test_gpt2_in_a_pipeline_equals_the_plain_model(pipeline):
    """T 2, two stages: the servers of the tp_ranks run requests in orders of their own."""
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "microbatches": 3,
            "pipeline": pipeline,
        }
    )

    def batch(rank: int, step: int) -> tuple:
        ids, mask = tokens(rank, step, masked=False)
        return ids.repeat(3, 1), mask.repeat(3, 1)

    job = WholeJob(small_gpt2(), next_token_loss, batch).run(3, max_norm=0.3)
    owners = {job.model.get_module_partition(f"transformer.h.{i}.mlp") for i in (0, 1)}
    assert owners == {0, 1}
    for i in (0, 1):
        mlp = job.model.get_module_partition(f"transformer.h.{i}.mlp")
        assert job.model.get_module_partition(f"transformer.h.{i}.mlp.c_proj") == mlp
    state = job.optimizer.state_dict()["state"]
    job.check_state()
    for number, moments in job.plain_optimizer.state_dict()["state"].items():
        assert_near(state[number]["exp_avg"], moments["exp_avg"], f"moment of {number}")


@on_ranks(2, 3, timeout_s=120)
def test_embeddings_are_split_where_the_user_says_so():
    split_over_all_ranks()
    job = WholeJob(small_gpt2(marks={"distribute_embedding": True}), next_token_loss, tokens)
    net = job.net
    assert net.lm_head.weight is net.transformer.wte.weight
    assert slices_of(net.lm_head.weight).axis == 0  # rows: 61 of them
    assert slices_of(net.transformer.wpe.weight).axis == 1
    job.run(3, max_norm=0.3)


@on_ranks(2, timeout_s=120)
def test_autocast_gives_its_dtype():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2().float()
    smp.DistributedModel(net)
    with torch.autocast("cpu", torch.bfloat16):
        out = net.transformer.h[0].mlp(torch.ones(2, 3, 24, dtype=torch.float32))
    assert out.dtype is torch.bfloat16


@on_ranks(2)
def test_a_loss_that_is_changed_in_place():
    """As Hugging Face's Trainer divides what the model returns."""
    split_over_all_ranks()
    model = smp.DistributedModel(small_gpt2())
    ids, _ = tokens(smp.tp_rank(), 0)

    @smp.step
    def train(model, scale):
        loss = model(input_ids=ids, labels=ids).loss
        loss /= scale
        model.backward(loss)
        return loss

    gradients = []
    for scale in (1, 4):
        model.zero_grad()
        train(model, scale)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for whole, quarter in zip(*gradients, strict=True):
        assert_near(quarter, whole / 4, "gradient")


@on_ranks(2, timeout_s=120)
def test_frozen_parameters_stay_and_train_later():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2()
    net.transformer.h[0].requires_grad_(False)
    job = WholeJob(net, next_token_loss, tokens)
    job.step(0)
    for model in (job.net, job.plain):
        model.requires_grad_(True)
    job.step(1)
    job.check_parameters()


@on_ranks(2, timeout_s=120)
def test_torchs_clipping_is_by_the_models_norm():
    """What the Trainer calls: on every rank the same norm, so whole parameters stay alike."""
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(small_gpt2(), next_token_loss, tokens)
    job.train(0)
    want = imported_early(job.plain.parameters(), 0.3)
    assert_near(imported_early(job.model.parameters(), 0.3), want, "norm")
    job.check_gradients()
    job.train(1)
    for norm_type in (float("inf"), 1.0):
        want = nn.utils.clip_grad_norm_(job.plain.parameters(), 0.01, norm_type)
        got = nn.utils.clip_grad_norm_(job.model.parameters(), 0.01, norm_type)
        assert_near(got, want, "norm")
        job.check_gradients()
        gradients = [p.grad for p in job.model.parameters()]
        got = nn.utils.get_total_norm(gradients, norm_type)
        want = nn.utils.get_total_norm([p.grad for p in job.plain.parameters()], norm_type)
        assert_near(got, want, "norm of gradients")
    if smp.rank() == 1:
        job.net.transformer.h[0].mlp.c_fc.weight.grad[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.3, error_if_nonfinite=True)
    smp.shutdown()
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.full((2,), 3.0)
    assert_near(imported_early([weight], 1.0), torch.tensor(3 * 2**0.5), "norm")


@module_of(lambda: {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
def TwoHalves(self, x: Tensor) -> Tensor:
    """Only one of them is split; each on another pp_rank."""
    return self.second(torch.tanh(self.first(x)))


@on_ranks(4, timeout_s=120)
def test_a_stage_without_slices_clips_with_the_others():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    in_float64(3)
    net = TwoHalves()
    smp.set_tensor_parallelism(net.second)
    smp.set_partition(net.first, 0)
    smp.set_partition(net.second, 1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    job = WholeJob(net, loss, lambda rank, step: (torch.ones(2, 4) * (rank + 1),))
    job.train(0)
    want = nn.utils.clip_grad_norm_(job.plain.parameters(), 0.01)
    got = nn.utils.clip_grad_norm_(job.model.local_parameters(), 0.01)
    assert_near(got, want, "norm")
    job.check_gradients()


@on_ranks(2, timeout_s=120)
def test_other_batches_than_prescaled_batch_says_are_refused():
    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": True})
    job = WholeJob(small_gpt2(), next_token_loss, lambda r, s: tokens(r, s, uneven=False))
    with pytest.raises(ValueError, match="got other samples on tp_rank 1 .* prescaled_batch"):
        job.train(0)


@pytest.mark.parametrize("what", ["values", "sizes", "numbers of tensors"])
@on_ranks(4, timeout_s=120)
def test_other_inputs_of_a_step_are_refused_in_a_pipeline(what):
    """On all ranks, in the first steps, and the job goes on."""
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "prescaled_batch": True,
            "microbatches": 2,
        }
    )
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    smp.set_tensor_parallelism(net)
    model = distributed(net, {"1": 1})

    @smp.step
    def train(model, x, *more):
        model.backward(model(x).square().mean())

    x = torch.arange(24.0).view(4, 6)
    other: tuple = (x.flip(0),)
    if what != "values":
        other = (x.repeat(2, 1),) if what == "sizes" else (x, x)
    refused = "step .*train.* got other samples on tp_rank 1 than on tp_rank 0"
    with pytest.raises(ValueError, match=refused):
        train(model, *((x,) if smp.tp_rank() == 0 else other))
    train(model, x)
    assert model.get_module_partition(net[1]) == 1


@pytest.mark.parametrize("kind", ["linear", "rows", "embedding", "transformer", "positions"])
@on_ranks(2)
def test_other_samples_are_refused_by_every_distributed_module(kind):
    split_over_all_ranks(
        prescaled_batch=True, optimize="memory" if kind == "positions" else "speed"
    )
    given: Any = F.layer_norm(torch.randn(2000, 64), [64])  # of which sizes are all alike
    if kind == "embedding":
        net: nn.Module = smp.nn.DistributedEmbedding(1000, 4)
        given = torch.arange(1000)
    elif kind in ("linear", "rows"):
        net = smp.nn.DistributedLinear(64, 6, by_outputs=kind == "rows")
    else:
        net = smp.nn.DistributedTransformer(
            num_layers=1, num_attention_heads=2, attention_head_size=8, hidden_size=64,
            intermediate_size=8,
        )  # fmt: skip
        given = (given.view(20, 100, 64), None)
    model = smp.DistributedModel(nn.Sequential(net))
    model(given)
    samples = given if isinstance(given, Tensor) else given[0]
    others = samples.roll(smp.tp_rank(), 0)
    with pytest.raises(
        ValueError, match="'0.*' got other samples on tp_rank 1 .* must be seeded so"
    ):
        model(others if isinstance(given, Tensor) else (others, None))


def test_samples_differ_by_more_than_rounding():
    """One of 64 of them does; how large they are, and numbers that are none, hide nothing."""

    def other(*tensors: Tensor) -> int | None:
        return same_samples._other_rank([same_samples._numbers_of(t) for t in tensors])

    torch.manual_seed(1)
    x = torch.randn(64, 10)
    one = x.clone()
    one[5] = torch.randn(10)
    holes = torch.rand(64, 10) < 0.1
    for scale in (1, 1e4, 1e-4):
        assert other(scale * x, scale * x, (scale * x).bfloat16(), 1.001 * scale * x) is None
        assert other(scale * x, scale * x, scale * one) == 2
        assert other(scale * one, scale * x, scale * x) == 1
        for hole in (torch.nan, torch.inf):
            given, others = (scale * t.masked_fill(holes, hole) for t in (x, one))
            assert other(given, given) is None
            assert hole == torch.inf or other(given, given, others) == 2
    assert other(x, x[:-1]) == other(x, torch.cat([x, x[:1] * 0])) == 1
    assert other(torch.arange(9), torch.arange(9)) is None
    assert other(torch.arange(9), torch.arange(9).roll(1)) == 1


@on_ranks(2)
def test_inputs_that_one_rank_refuses_are_not_compared():
    """The step fails in any case, by that rank's error."""
    split_over_all_ranks(prescaled_batch=True)
    second, x = smp.tp_rank() == 1, torch.ones(3)
    before = group.called_path()
    assert same_samples.inputs_differ("f", [x]) is None
    assert same_samples.inputs_differ("f", None if second else [x]) is None
    for others in ([2 * x], [x, x], [x[1:]]):
        error = same_samples.inputs_differ("f", others if second else [x])
        assert str(error).startswith("smp: the step f got other samples on tp_rank 1 than on")
    assert group.called_path() == before


# ------------------------------------------------------------------------ what a user asks


@on_ranks(2, timeout_s=120)
def test_which_parameters_are_split():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2()
    total = sum(p.numel() for p in net.parameters())
    model = smp.DistributedModel(net)
    mlp = net.transformer.h[0].mlp
    assert model.is_distributed_parameter(mlp.c_fc.weight)
    assert model.is_scaled_batch_parameter(mlp.c_fc.bias)
    assert not model.is_distributed_parameter(mlp.c_proj.bias)
    assert not model.is_scaled_batch_parameter(mlp.c_proj.bias)
    assert mlp.c_fc in list(model.distributed_modules())
    names = {n for n, _ in model.scaled_batch_reducer_named_parameters()}
    assert "transformer.h.0.attn.c_attn.weight" in names
    assert names | {n for n, _ in model.default_reducer_named_parameters()} == {
        n for n, _ in net.named_parameters()
    }
    assert model.num_parameters() == total
    assert smp.utils.get_distribution_axis(mlp.c_fc.weight) == 1
    assert smp.utils.get_distribution_axis(mlp.c_proj.bias) is None
    assert (mlp.c_fc.nx, mlp.c_fc.nf) == tuple(mlp.c_fc.weight.shape) == (24, 48)
    assert (mlp.c_proj.nx, mlp.c_proj.nf) == tuple(mlp.c_proj.weight.shape) == (48, 24)
    names = [name for name, _ in net.named_parameters()]
    assert list(smp.state.param_name_to_index_tp_group[1]) == names
    assert smp.state.param_index_to_name_tp_group[0][2] == names[2]
    assert type(mlp).__name__ == "GPT2MLP" and isinstance(mlp.c_fc, nn.Module)


@on_ranks(2, timeout_s=120)
def test_a_region_whose_input_requires_grad_on_one_rank():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2().requires_grad_(False)
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    generator = torch.Generator().manual_seed(smp.rank())
    x = torch.randn(1 + smp.rank(), 5, 24, generator=generator).requires_grad_(smp.rank() == 1)
    model(inputs_embeds=x).logits.square().sum().backward()
    if smp.rank() == 1:
        (want,) = torch.autograd.grad(plain(inputs_embeds=x).logits.square().sum(), x)
        assert_near(x.grad, want, "gradient")


@on_ranks(2, timeout_s=120)
def test_every_rank_has_the_weights_of_tp_rank_0():
    """Scripts seed by rank; the model that is split is tp_rank 0's."""
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2()
    first = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += smp.tp_rank()
    whole = smp.DistributedModel(net).state_dict()
    for name, value in first.items():
        assert torch.equal(whole[name], value), name


@on_ranks(2, timeout_s=120)
def test_a_module_that_is_not_marked_stays_whole():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2()
    smp.set_tensor_parallelism(net, False)
    smp.set_tensor_parallelism(net.transformer.h[1].mlp)
    job = WholeJob(net, next_token_loss, tokens)
    assert [one.path for one in job.model._smp_split] == ["transformer.h.1.mlp"]
    job.step(0)


@on_ranks(2, timeout_s=120)
def test_a_shared_parameter_leaves_the_module_whole():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2()
    net.transformer.extra = nn.Linear(1, 1)
    net.transformer.extra.weight = net.transformer.h[0].mlp.c_fc.weight
    model = smp.DistributedModel(net)
    reasons = {one.path: one.reason for one in model._smp_split}
    assert "'c_fc.weight' is shared" in reasons["transformer.h.0.mlp"]
    report = str(model.partition_report())
    assert "Split over the TP_GROUP: 2 x GPT2Attention, 1 x GPT2MLP\n" in report
    assert "left whole: transformer.h.0.mlp (GPT2MLP): its parameter 'c_fc.weight' is" in report
    assert reasons["transformer.h.1.mlp"] == ""


@on_ranks(4, timeout_s=120)
def test_a_plan_counts_what_a_rank_will_have():
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    net = small_gpt2(marks={"distribute_embedding": True})
    ids, mask = tokens(0, 0)
    degrees = {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}
    plan = smp.plan(net, input_ids=ids, attention_mask=mask, **degrees)
    assert not any(slices_of(p) for p in net.parameters())
    assert net.transformer.h[0].attn.num_heads == 3
    job = WholeJob(net, next_token_loss, lambda rank, step: tokens(rank, step, masked=False))
    job.train(0)
    made = job.model.partition_report()
    assert list(plan.partition.parameters) == list(made.partition.parameters)
    assert sum(plan.partition.parameters) < sum(p.numel() for p in job.plain.parameters())
    for report in (plan, made):
        assert "2 x Embedding, 2 x GPT2Attention, 2 x GPT2MLP, 1 x Linear" in str(report)
        assert "parameters and costs are tp_rank 0's" in str(report)


def test_a_plan_without_a_job_splits_a_copy():
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    smp.set_tensor_parallelism(net)
    plan = smp.plan(net, torch.ones(2, 6), pipeline_parallel_degree=1, tensor_parallel_degree=3)
    assert list(plan.partition.parameters) == [0, 5 * 2 + 5, 2 + 1]
    assert net[0].weight.shape == (5, 6)
    with pytest.raises(ValueError, match="tensor_parallel_degree must be at least 1, got 0"):
        smp.plan(net, pipeline_parallel_degree=1, tensor_parallel_degree=0)


@on_ranks(4, timeout_s=120)
def test_a_communication_hook_uses_the_group_of_its_bucket():
    """Averaged over all replicas, other slices would be added to this rank's."""
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(small_gpt2(), next_token_loss, tokens)

    def over_the_buckets_group(_: Any, bucket: Any) -> torch.futures.Future:
        group = bucket.process_group()
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        size = dist.get_world_size(group)
        return work.get_future().then(lambda done: done.value()[0] / size)

    job.model.register_comm_hook(None, over_the_buckets_group)
    job.step(0)

    other = smp.DistributedModel(small_gpt2(heads=2))  # where slices are of one size
    other.register_comm_hook(smp.get_dp_process_group(), default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match=r"did not ask bucket \d+ for its process_group"):
        job._train(other, *tokens(smp.dp_rank(), 0))


@on_ranks(2, timeout_s=120)
def test_ranks_of_a_tp_group_that_end_apart_are_named():
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(small_gpt2(), next_token_loss, tokens)
    named = pytest.raises(RuntimeError, match=r"dp_rank 1 ran out of inputs .* \[0, 1\]")
    with named, job.model.join():
        for step in range(2 - smp.rank()):
            job._train(job.model, *tokens(smp.rank(), step))


@on_ranks(2, timeout_s=120)
def test_optimizers_that_take_norms_of_parameters_are_refused():
    smp.init({"tensor_parallel_degree": 2})
    model = smp.DistributedModel(small_gpt2())
    cut = model.get_parameter("transformer.h.0.mlp.c_fc.weight")
    whole = model.get_parameter("transformer.h.0.ln_1.weight"), nn.Parameter(torch.ones(4, 4))
    # As other packages call them, and a script's own that is one of them.
    named = [
        type(name, (torch.optim.SGD,), {})
        for name in (
            "Lamb", "LARS", "LARC", "SOAP", "Shampoo", "NovoGrad", "NvNovoGrad", "CPULAMB",
            "OnebitLamb",
        )
    ]  # fmt: skip
    named.append(type("Mine", (named[0],), {}))
    named.append(type("MyLamb", (FusedLAMB,), {}))
    refused = (
        r"scales each .* a slice of 'transformer.h.0.mlp.c_fc.weight', \[.*torch.optim.AdamW"
    )
    for kind in (
        smp.optimizers.FusedNovoGrad, torch.optim.Adafactor, torch.optim.Muon, *named,
    ):  # fmt: skip
        some = whole[1:] if kind is torch.optim.Muon else whole  # it takes matrices alone
        optimizer = smp.DistributedOptimizer(kind(some, lr=0.1))
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} {refused}"):
            optimizer.add_param_group({"params": [cut]})
        assert len(optimizer.param_groups) == 1
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} {refused}"):
            smp.DistributedOptimizer(kind([some[-1], cut], lr=0.1))
    smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize(
    "config", [{}, {"pipeline_parallel_degree": 2}, {"shard_optimizer_state": True}]
)
@on_ranks(4, timeout_s=120)
def test_lamb_has_the_norms_of_whole_parameters_and_of_the_whole_model(config):
    smp.init({"tensor_parallel_degree": 2, **config})
    job = WholeJob(
        small_gpt2(),
        next_token_loss,
        lambda rank, step: tokens(rank, step, uneven=False),
        lambda params: FusedLAMB(params, lr=0.02, weight_decay=0.1, max_grad_norm=0.3),
    )
    settings = {"betas": (0.9, 0.999), "eps": 1e-6, "correct": True, "always": False}
    job.plain_optimizer = Lamb(
        job.plain.parameters(), lr=0.02, decay=0.1, max_norm=0.3, **settings
    )
    for step in range(3):
        job.optimizer.zero_grad()
        job.plain_optimizer.zero_grad()
        job.train(step)
        assert nn.utils.get_total_norm([p.grad for p in job.plain.parameters()]) > 0.3
        job.optimizer.step()
        job.plain_optimizer.step()
    job.check_parameters()


# ------------------------------------------------------------------------------- state


@on_ranks(2, 3, timeout_s=120)
def test_the_state_is_the_plain_models():
    """Full dicts of model and optimizer load into the plain ones, and back."""
    split_over_all_ranks()
    job = WholeJob(small_gpt2(), next_token_loss, tokens)
    job.step(0)
    job.step(1)
    whole = job.model.state_dict()
    plain = job.plain.state_dict()
    assert list(whole) == list(plain)
    for name, value in plain.items():
        assert_near(whole[name], value, name)
    state = job.optimizer.state_dict()
    wanted = job.plain_optimizer.state_dict()
    for number, moments in wanted["state"].items():
        for key, value in moments.items():
            assert_near(state["state"][number][key], value, f"{key} of {number}")
    other = small_gpt2()
    other.load_state_dict(whole)
    torch.optim.AdamW(other.parameters()).load_state_dict(state)

    again = WholeJob(small_gpt2(), next_token_loss, tokens)
    again.model.load_state_dict(plain)
    again.plain.load_state_dict(plain)
    again.optimizer.load_state_dict(copy.deepcopy(wanted))
    again.plain_optimizer.load_state_dict(copy.deepcopy(wanted))
    again.step(2)
    again.check_parameters()
    partial, moments = again.model.local_state_dict(), again.optimizer.local_state_dict()
    once_more = WholeJob(small_gpt2(), next_token_loss, tokens)
    once_more.model.load_state_dict(partial)
    once_more.optimizer.load_state_dict(copy.deepcopy(moments))
    once_more.plain.load_state_dict(again.plain.state_dict())
    once_more.plain_optimizer.load_state_dict(copy.deepcopy(again.plain_optimizer.state_dict()))
    once_more.step(3)
    once_more.check_parameters()


class Scaling(torch.optim.SGD):
    """Keeps a tensor of as many axes as the parameter, and of another shape."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["scale"] = torch.full([1] * p.dim(), 3.0)


@on_ranks(2, timeout_s=120)
def test_state_of_another_shape_than_the_parameters_stays_as_it_is():
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(
        small_gpt2(), next_token_loss, tokens, lambda p: Scaling(p, lr=0.1, momentum=0.9)
    )
    job.step(0)
    state = job.optimizer.state_dict()["state"]
    for number, wanted in job.plain_optimizer.state_dict()["state"].items():
        assert torch.equal(state[number]["scale"], wanted["scale"])
        assert_near(state[number]["momentum_buffer"], wanted["momentum_buffer"], "momentum")
    job.optimizer.load_state_dict(copy.deepcopy(job.plain_optimizer.state_dict()))
    job.step(1)
    job.check_parameters()


@on_ranks(2, timeout_s=120)
def test_a_partial_state_of_another_degree_is_refused():
    smp.init({"tensor_parallel_degree": 2})
    job = WholeJob(
        small_gpt2(), next_token_loss, tokens, lambda p: Scaling(p, lr=0.1, momentum=0.9)
    )
    job.step(0)
    partial = copy.deepcopy(job.optimizer.local_state_dict())
    job.optimizer.load_state_dict(copy.deepcopy(partial))
    names = [name for name, _ in job.model.named_parameters()]
    number = names.index("transformer.h.0.mlp.c_fc.weight")
    state = partial["state"][number]
    state["momentum_buffer"] = torch.cat([state["momentum_buffer"]] * 2, 1)
    with pytest.raises(
        ValueError, match=rf"'momentum_buffer' of parameter {number} has shape .*"
    ):
        job.optimizer.load_state_dict(partial)


@on_ranks(2, timeout_s=120)
def test_another_shape_is_refused_by_name():
    smp.init({"tensor_parallel_degree": 2})
    model = smp.DistributedModel(small_gpt2())
    state = model.state_dict()
    name = "transformer.h.0.mlp.c_fc.weight"
    state[name] = state[name][:, 1:]
    with pytest.raises(
        RuntimeError, match=rf"{name}: \[24, 95\], where the model has \[24, 96\]"
    ):
        model.load_state_dict(state)


# ------------------------------------------------------------------------ when it goes wrong


@on_ranks(2, timeout_s=120)
def test_batches_that_cannot_be_joined_are_named_on_both_ranks():
    smp.init({"tensor_parallel_degree": 2})
    model = smp.DistributedModel(small_gpt2())
    width = 24 if smp.rank() == 0 else 12
    mlp = model.get_module().transformer.h[0].mlp
    with pytest.raises(ValueError, match=r"'transformer.h.0.mlp' got hidden_states of shape"):
        mlp(torch.zeros(2, 3, width))
    dtype = torch.float32 if smp.rank() == 0 else torch.float64
    with pytest.raises(
        ValueError, match=r"\[2, 3, 24\] float32 on tp_rank 0 and .* float64 on"
    ):
        mlp(torch.zeros(2, 3, 24, dtype=dtype))


@pytest.mark.parametrize("where", ["before", "after", "backward", "evaluation"])
@on_ranks(3, timeout_s=120)
def test_what_one_rank_raises_ends_the_step_on_all(where):
    """The others wait in collectives of modules, or have made their last."""
    split_over_all_ranks()
    job = WholeJob(small_gpt2(), next_token_loss, tokens)
    culprit = 1

    def refuse(*_: Any) -> None:
        raise ValueError("no good")

    @smp.step
    def failing(model: smp.DistributedModel, *batch: Tensor) -> Tensor:
        mine = smp.rank() == culprit
        if mine and where == "before":
            refuse()
        loss = next_token_loss(model, *batch)
        if mine and where == "backward":
            loss.register_hook(refuse)
        if where != "evaluation":
            model.backward(loss)
        if mine:
            refuse()
        return loss

    batch = job.batch(smp.dp_rank(), 0)
    for culprit in (1, 0, 1):
        if where == "evaluation":
            with torch.no_grad(), pytest.raises((ValueError, step_end.PeerFailed)):
                failing(job.model.eval(), *batch)
            job.model.train()
        else:
            with pytest.raises(ValueError, match="no good") as caught:
                failing(job.model, *batch)
            notes = " ".join(getattr(caught.value, "__notes__", []))
            assert smp.rank() == culprit or f"failed on dp_rank {culprit}" in notes
    job.optimizer.zero_grad()
    job.step(0)
    job.check_parameters()


@on_ranks(2, timeout_s=120)
def test_ranks_that_run_other_modules_hear_of_it():
    smp.init({"tensor_parallel_degree": 2})
    model = smp.DistributedModel(small_gpt2())
    layers = model.get_module().transformer.h

    @smp.step
    def step(model: smp.DistributedModel, x: Tensor) -> Tensor:
        layer = layers[smp.rank()]
        return layer.mlp(x) if smp.rank() == 0 else x

    with pytest.raises(step_end.PeerFailed, match="ran other modules"):
        step(model, torch.zeros(2, 3, 24))


WAYS_TO_COPY = (copy.deepcopy, copy.copy, pickle.dumps, lambda m: torch.save(m, io.BytesIO()))


@on_ranks(2, timeout_s=120)
def test_a_split_model_is_not_copied():
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2(marks={"distribute_embedding": True})
    alone = nn.Linear(4, 4)
    smp.set_tensor_parallelism(alone)
    both = nn.ModuleList([net, alone])
    smp.DistributedModel(both)
    block = net.transformer.h[0]
    split = [block.attn, block.mlp, block.mlp.c_fc, block.mlp.c_proj]
    split += [net.transformer.wte, net.lm_head, alone]
    for checkpointed in (False, True):
        if checkpointed:
            for module in split:
                smp.set_activation_checkpointing(module)
        refused = r"is split .* cannot be copied .* model.state_dict\(\)"
        for module, copied in itertools.product(split, WAYS_TO_COPY):
            with pytest.raises(TypeError, match=refused):
                copied(module)
        with pytest.raises(TypeError, match=r"'0.transformer.\S+' is split over the TP_GROUP"):
            copy.deepcopy(both)
    assert copy.deepcopy(block.ln_1).weight.equal(block.ln_1.weight)


@on_ranks(2, timeout_s=120)
def test_slices_are_not_saved_for_the_whole(tmp_path):
    """Hugging Face's save_pretrained asks the wrapped module for its state."""
    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2(marks={"distribute_embedding": True})
    want = {name: value.shape for name, value in net.state_dict().items()}
    model = smp.DistributedModel(net)
    refused = (
        r"state_dict\(\) would have this rank's slices of 'transformer\.\S+' and \d+ other"
    )
    for save in (model.module.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(RuntimeError, match=refused):
            save()
    block = model.get_module().transformer.h[0]
    with pytest.raises(RuntimeError, match=r"^smp: Conv1D.* slices of 'weight' and 1 other"):
        block.attn.c_attn.state_dict()
    for inside in (net.transformer, block, block.attn, net.lm_head):
        with pytest.raises(RuntimeError, match=r"state_dict\(\) would have this rank's slices"):
            inside.state_dict()
    assert list(block.ln_1.state_dict()) == ["weight", "bias"]  # whole
    assert {name: value.shape for name, value in model.state_dict().items()} == want
    assert model.local_state_dict()
    model.load_state_dict(model.state_dict())


@on_ranks(1)
def test_distributed_modules_of_one_rank_are_copied():
    smp.init()
    linear = smp.nn.DistributedLinear(3, 2)
    for copied in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert torch.equal(copied(torch.ones(1, 3)), linear(torch.ones(1, 3)))


@on_ranks(2, timeout_s=120)
def test_fewer_heads_than_ranks_are_refused():
    smp.init({"tensor_parallel_degree": 2})
    with pytest.raises(ValueError, match="too short to be split over tensor_parallel_degree=2"):
        smp.DistributedModel(small_gpt2(heads=1))


@on_ranks(2, timeout_s=120)
def test_prompts_of_different_lengths_with_a_cache_of_a_fixed_length():
    """Its mask is longer than the longest prompt."""
    from transformers import StaticCache

    smp.init({"tensor_parallel_degree": 2})
    net = small_gpt2().eval()
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    ids, mask = tokens(smp.rank(), 0)

    def logits(of: nn.Module) -> Tensor:
        cache = StaticCache(config=plain.config, max_cache_len=13)
        return of(input_ids=ids, attention_mask=mask, past_key_values=cache).logits

    with torch.no_grad():
        assert_near(logits(model), logits(plain), "logits")


def test_rows_are_led_out_by_linears_of_the_module_that_gathered_them():
    """... in its very call, not where it is computed again."""
    rows = regions.Rows(None, None).of_call("layer.1")
    assert rows.lead_out("layer.1.out")
    assert not rows.lead_out("layer.10.out") and not rows.lead_out("layer.1")
    assert regions.Rows(None, None).of_call("").lead_out("out")
    seen = []
    x = torch.ones(2, requires_grad=True)
    (2 * x).sum().backward(inputs=[x])
    y = 2 * x
    y.register_hook(lambda _: seen.append(rows.lead_out("layer.1.out")))
    y.register_hook(lambda _: seen.append(rows.of_call("layer.1").lead_out("layer.1.out")))
    y.sum().backward()
    assert seen == [False, True]


class Stream:
    """In the place of the ranks' common stream of random numbers."""

    restored = 0

    def restore(self) -> None:
        self.restored += 1


def test_what_a_call_gathers_is_forgotten_behind_it():
    """Unless the module around it leads it out; and it is found again in a backward."""
    now, path = regions._gathered, group.called_path()
    outer, inner = regions.Rows([1], None), regions.Rows([2], 3)
    streams = [Stream(), Stream()]
    try:
        now.rows, now.common = outer, streams[0]
        for later, error in ((False, False), (True, True), (False, True)):
            with contextlib.suppress(ValueError), regions._Opened(led_out_later=later):
                assert now.rows is outer and now.common is None
                now.rows, now.common = inner, streams[1]
                group.call_of("inner")
                if error:
                    raise ValueError
            assert (now.rows, now.common, group.called_path()) == (outer, streams[0], path)
        assert (streams[0].restored, streams[1].restored) == (0, 3)
        with regions._Opened(led_out_later=True):
            now.rows = inner
            group.call_of("inner")
        assert (now.rows, group.called_path()) == (inner, "inner")
        now.common = streams[1]
        with group.planned(2):
            again = regions.found_again(lambda: (now.rows, now.common, group.called_path()))
        found = again()
        now.rows, now.common = outer, streams[0]
        group.call_of("another")
        assert again() == found == (inner, streams[1], "inner")
        assert (now.rows, now.common, group.called_path()) == (outer, streams[0], "another")
    finally:
        now.rows = now.common = None
        group.call_of(path)


def test_which_rows_of_a_mask_stand_for_a_rank_that_has_none(monkeypatch):
    """This is tp_rank 0 of 2, and what it would give to the gather is looked at."""
    monkeypatch.setattr(regions.primitives, "gather", lambda x, *_: x)

    def argument(name: str, mine: Tensor | None, *shapes: list[int] | None) -> Any:
        dtypes = [None if shape is None else torch.float32 for shape in shapes]
        return regions._Argument("h", name, mine, list(shapes), dtypes)

    def gathered(mask: Any, queries: Any, keys: Any, causal: bool) -> Tensor | None:
        with group.planned(2):
            return regions._gather_mask(mask, queries, keys, causal, queries.mine, [2, 1])

    hidden = argument("hidden", torch.ones(2, 3, 4), [2, 3, 4], [1, 3, 4])
    others = argument("mask", None, None, [1, 5, 3, 3])
    got = gathered(others, hidden, hidden, causal=True)
    assert got.shape == (2, 5, 3, 3)
    assert torch.equal(got == 0, torch.ones(3, 3).tril().bool().expand(2, 5, 3, 3))
    got = gathered(others, hidden, hidden, causal=False)
    assert got.shape == (2, 5, 3, 3) and not got.any()
    assert gathered(argument("mask", None, None, None), hidden, hidden, False) is None
    # Where the other rank has more positions, nobody sees what is behind this one's.
    uneven = argument("hidden", torch.ones(2, 3, 4), [2, 3, 4], [1, 5, 4])
    got = gathered(argument("mask", None, None, None), uneven, uneven, causal=False)
    assert got.shape == (2, 1, 1, 5)
    assert torch.equal(got[0, 0, 0], torch.tensor([0, 0, 0, -torch.inf, -torch.inf]))
    assert gathered(argument("mask", None, None, None), uneven, uneven, causal=True) is None
    got = gathered(argument("mask", None, None, [1, 1, 5, 5]), uneven, uneven, causal=True)
    assert got.shape == (2, 1, 5, 5) and got[..., 3:].eq(-torch.inf).all()
    assert torch.equal(got[0, 0, :, :3] == 0, torch.ones(5, 3).tril().bool())
    mask = torch.arange(18.0).view(2, 1, 3, 3)
    own = argument("mask", mask, [2, 1, 3, 3], [1, 1, 5, 5])
    got = gathered(own, uneven, uneven, causal=True)
    assert torch.equal(got[..., :3, :3], mask) and got[..., 3:].eq(-torch.inf).all()
    assert torch.equal(got[:, :, 3:, :3], mask[:, :, -1:].expand(-1, -1, 2, -1))
    # The other's mask has a row for each of its positions, which are fewer.
    longer = argument("hidden", torch.ones(2, 5, 4), [2, 5, 4], [1, 3, 4])
    got = gathered(argument("mask", None, None, [1, 1, 3, 3]), longer, longer, causal=False)
    assert got.shape == (2, 1, 5, 5) and not got.any()


def test_without_a_mask_causal_are_the_regions_own_positions(monkeypatch):
    """Not those of another argument; and what is assumed the first gather alone says."""
    causal, signatures = [], []
    monkeypatch.setattr(regions, "_gather_mask", lambda *args: causal.append(args[3]))
    monkeypatch.setattr(
        regions.primitives, "gather", lambda x, axis, counts, sig: signatures.append(sig)
    )
    region = regions.Region(
        ("hidden", "states"), (("mask", "hidden"), ("cross", "states")), causal=True
    )
    x = torch.ones(2, 3, 4)
    given = {"hidden": x, "states": x, "mask": None, "cross": None}
    tensors = {name: [value] for name, value in given.items()}
    with group.planned(2):
        mine = tuple(w for (t,) in tensors.values() for w in regions._in_words(t, "h"))
        arguments = regions._arguments("h", tensors, (mine, mine))
        flat = {name: tree_flatten(value) for name, value in given.items()}
        _, rows = regions._gather_all(region, given, flat, arguments, 7)
        assert rows == regions.Rows([2, 2], None)
        regions._gather_all(region._replace(causal=False), given, flat, arguments, 0)
    assert causal == [True, False, False, False]
    assert signatures == [7, 0, 0, 0]


def test_attentions_are_recorded_if_an_argument_or_a_hook_of_transformers_says_so(monkeypatch):
    assert regions._records_attentions({"output_attentions": True})
    assert not regions._records_attentions({"output_attentions": None})
    collecting: dict[str, Any] = {}
    capturing = types.SimpleNamespace(
        _active_collector=types.SimpleNamespace(get=lambda: collecting)
    )
    monkeypatch.setitem(sys.modules, "transformers.utils.output_capturing", capturing)
    assert not regions._records_attentions({})
    collecting["hidden_states"] = []
    assert not regions._records_attentions({})
    collecting["cross_attentions"] = []
    assert regions._records_attentions({})


def test_in_place_of_no_mask_the_last_positions_see_all_before_them():
    """With a cache there are more keys than queries."""
    seen = regions._nothing_masked(4, torch.bool, 2, 5, True, torch.zeros(1))
    assert seen[0, 0].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


# ------------------------------------------------------------------------------- slices


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
@pytest.mark.parametrize(("unit", "blocks"), [(1, 1), (3, 1), (2, 3)])
def test_slices_join_to_the_whole(parts, unit, blocks):
    size = unit * blocks * 5
    for axis in (0, 1):
        whole = torch.randn((size, 4) if axis == 0 else (4, size))
        slices = Slices.even(axis, size, parts, unit, blocks)
        local = [slices.take(whole, part) for part in range(parts)]
        assert torch.equal(slices.join(local), whole)
        assert [t.size(axis) for t in local] == [slices.local_size(p) for p in range(parts)]
        # A rank that keeps its slice does not keep the whole.
        assert all(t.is_contiguous() for t in local)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in local)
        assert all(t.size(axis) % (unit * blocks) == 0 for t in local)
        assert slices_of(whole) is None


# --------------------------------------------------------------------- delayed construction


@pytest.mark.parametrize("pipeline", [1, 2])
@on_ranks(4, timeout_s=120)
def test_a_model_whose_values_are_delayed(pipeline):
    """Slices are of tp_rank 0's values."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": pipeline})
    made_from = small_gpt2()
    torch.manual_seed(3)
    plain = type(made_from)(made_from.config)
    torch.manual_seed(3 + smp.tp_rank())  # as scripts seed
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        net = type(made_from)(made_from.config)
    assert all(p.is_meta for p in net.parameters())

    def loss(model: nn.Module, ids: Tensor, _: Tensor) -> Tensor:
        return model(input_ids=ids).logits.log_softmax(-1)[..., 0].square().mean()

    job = WholeJob(net, loss, tokens)
    job.plain = plain
    job.plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    job.run(2, max_norm=0.3)
    weight = net.transformer.h[0].attn.c_attn.weight
    assert slices_of(weight) is not None and not weight.is_meta


@on_ranks(4, timeout_s=120)
def test_a_whole_state_is_loaded_before_delayed_values_are_made():
    """Before the partition a rank has slices without values; shapes are checked at once."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    plain = small_gpt2()
    torch.manual_seed(4)
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        net = type(plain)(plain.config)
    job = WholeJob(net, next_token_loss, lambda rank, step: tokens(rank, step, masked=False))
    job.plain = plain
    job.plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    given = plain.state_dict()
    name = "transformer.h.0.attn.c_attn.weight"
    with pytest.raises(RuntimeError, match=rf"other shapes: {name}: \[24, 36\], where .* 72"):
        job.model.load_state_dict({**given, name: given[name][:, :36]})
    rest = {other: value for other, value in given.items() if other != name}
    assert job.model.load_state_dict(rest, strict=False).missing_keys == [name]
    assert not any(job.model.load_state_dict(given))
    job.run(2)


def test_gloo_is_refused_where_a_pipeline_on_gpus_would_wait_for_ever(monkeypatch):
    backend = types.SimpleNamespace(name=lambda: "gloo")
    tp_group = types.SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(group.ranks, "get_tp_process_group", lambda: tp_group)
    group.refuse_gloo_on_gpus(torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="'ddp_dist_backend' to 'smddp' or 'nccl'"):
        group.refuse_gloo_on_gpus(torch.device("cuda", 0))
