"""Spec: smp/tensor_parallel/rows/regions.py: what a region has gathered is known in its call
alone, and where a part of that is computed again; masks of any form on each rank."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import smp
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, in_float64, split_over_all_ranks
from tests.test_collective_keys import WIDTH, TwoAlike, check_next_step, job_of, refuse


def input_of(rank: int, width: int = WIDTH) -> Tensor:
    torch.manual_seed(rank)
    return torch.randn(2 + rank, 3, width)


@on_ranks(2)
def test_what_leads_out_is_called_within_its_own_region(monkeypatch):
    job = job_of("region")
    net, x = job.net, input_of(smp.rank())
    inner = torch.zeros(5, 3, net.one.c_proj.nx)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"'one.c_proj' holds .* called outside of the m"
        ):
            net.one.c_proj(inner)
        net.one(x)
    # Within another region's call.
    act = type(net.other.act)
    monkeypatch.setattr(act, "forward", lambda self, y: net.one.c_proj(y))
    with pytest.raises(RuntimeError, match=r"'one.c_proj' holds .* called outside of the m"):
        net.other(x)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="'other.c_proj' holds"):
        net.other.c_proj(inner)  # behind a call that raised
    check_next_step(job)


@on_ranks(2)
def test_what_leads_out_behind_its_region():
    """BERT's attention gathers in one module, and leads out in the next of its holder."""
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    split_over_all_ranks()
    in_float64(5)
    config = BertConfig(hidden_size=WIDTH, num_attention_heads=2, intermediate_size=2 * WIDTH)
    config._attn_implementation = "eager"
    with smp.tensor_parallelism():
        layer = BertLayer(config)
    smp.DistributedModel(nn.ModuleList([layer]))
    inner = torch.zeros(5, 3, layer.attention.output.dense.in_features)
    x = input_of(smp.rank())
    for checkpointed in (False, True):
        layer.gradient_checkpointing = checkpointed
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer(x).sum().backward()
        for path in ("attention.output", "output"):
            dense = layer.get_submodule(f"{path}.dense")
            with pytest.raises(RuntimeError, match=f"'0.{path}.dense' holds"):
                dense(inner)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("alike", [False, True])
@on_ranks(2)
def test_a_part_of_a_region_is_computed_again(alike, rate):
    """Each call with the rows that it had in the forward."""
    split_over_all_ranks(prescaled_batch=alike)
    in_float64(5)
    net = TwoAlike("region")
    model = smp.DistributedModel(net)
    xs = [input_of(0 if alike else smp.rank() + 2 * i) for i in range(2)]
    net.one.dropout.p = net.other.dropout.p = rate

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(9)
        sum(model(x).square().sum() for x in xs).backward()
        return [p.grad.clone() for p in net.parameters()]

    want = gradients()
    for mlp in (net.one, net.other):
        smp.set_activation_checkpointing(mlp.c_proj)
    for got, wanted in zip(gradients(), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_torchs_own_checkpoint_of_a_part_is_refused(monkeypatch):
    job = job_of("region")
    mlp = job.net.one
    leads_out, x = mlp.c_proj.forward, input_of(smp.rank()).requires_grad_()
    checkpointed = partial(checkpoint, leads_out, use_reentrant=False)
    monkeypatch.setattr(type(mlp.c_proj), "forward", lambda self, y: checkpointed(y))
    y = mlp(x)
    with pytest.raises(RuntimeError, match="in a backward: .* smp.set_activation_checkpoint"):
        y.sum().backward()
    monkeypatch.undo()
    check_next_step(job)


@on_ranks(2)
def test_random_numbers_are_alike_again_behind_a_region_that_raised(monkeypatch):
    split_over_all_ranks(prescaled_batch=True)
    net = TwoAlike("region")
    smp.DistributedModel(net)
    torch.manual_seed(1)
    monkeypatch.setattr(type(net.one.act), "forward", lambda self, y: refuse(y))
    with pytest.raises(ValueError, match="no tensor"):
        net.one(input_of(0))
    drawn = torch.rand(4)
    others = drawn.clone()
    dist.all_reduce(others, group=smp.get_tp_process_group())
    torch.testing.assert_close(others, 2 * drawn)


MASKS = {  # samples and rows of a mask; 0: as many as there are
    "none": None,
    "one row for all samples": (1, 1),
    "a row for each sample": (0, 1),
    "one for all samples": (1, 0),
    "one for each sample": (0, 0),
}


def mask_of(kind: str, samples: int, positions: int, dtype: torch.dtype) -> Tensor | None:
    """Any, in which all see the first position."""
    form = MASKS[kind]
    if form is None:
        return None
    seen = torch.rand(form[0] or samples, 1, form[1] or positions, positions) < 0.5
    seen[..., 0] = True
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64], ids=["bool", "added"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.sample(2)
@on_ranks(2)
def test_masks_of_other_forms_on_each_rank(causal, dtype):
    """And of other lengths; a rank that gives none sees what it would see by itself."""
    from transformers import BertConfig, GPT2Config
    from transformers.models.bert.modeling_bert import BertAttention
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    split_over_all_ranks()
    in_float64(5)
    if causal:
        config = GPT2Config(n_embd=WIDTH, n_head=2, n_layer=1)
        plain = GPT2Attention(config, layer_idx=0)
    else:
        config = BertConfig(
            hidden_size=WIDTH, num_attention_heads=2, intermediate_size=2 * WIDTH
        )
        plain = BertAttention(config)
    config._attn_implementation = "sdpa"
    plain.eval()
    net = copy.deepcopy(plain)
    smp.set_tensor_parallelism(net)
    smp.DistributedModel(net)
    at = smp.rank()
    for kinds in itertools.product(MASKS, MASKS):
        for lengths in ((4, 4), (3, 5), (5, 1)):
            torch.manual_seed(at)
            x = torch.randn(2 + at, lengths[at], WIDTH, requires_grad=True)
            mask = mask_of(kinds[at], len(x), lengths[at], dtype)
            outs = [one(x, attention_mask=mask)[0] for one in (net, plain)]
            grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
            what = f"{kinds}, {lengths} positions"
            assert_near(outs[0], outs[1], what)
            assert_near(grads[0], grads[1], f"gradient of {what}")
