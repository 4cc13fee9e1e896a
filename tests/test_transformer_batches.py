"""Samples of several tp_ranks in one batch of attention: ``TokenStream.batches``."""

import os

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.ranks import on_ranks
from tests.reference import transformer as plain
from tests.reference.whole_job import WholeJob, in_float64, split_over_all_ranks
from tests.test_distributed_transformer import (
    DROPS,
    LAYERS,
    PRE,
    SIZES,
    Around,
    masked,
    squares,
)


def batch_of(masks: str):
    """Each rank's own number of samples, all of one length; masks for each sample or one."""

    def batch(rank: int, step: int) -> tuple:
        generator = torch.Generator().manual_seed(10 * step + rank)
        samples = 1 + rank
        mask = masked(samples, 5, generator)
        return (
            torch.randn(samples, 5, 10, generator=generator, dtype=torch.float64),
            {"each": mask, "one": mask[:1], "no": None}[masks],
            torch.randn(samples, 3, 10, generator=generator, dtype=torch.float64),
            masked(samples, 3, generator),
        )

    return batch


def calls_of_attention(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each call has."""
    from smp.nn.transformer.attention import DistributedAttentionLayer as Attention

    samples: list[int] = []
    attend = Attention._attend
    monkeypatch.setattr(
        Attention,
        "_attend",
        lambda self, of, *rest: samples.append(of.samples) or attend(self, of, *rest),
    )
    return samples


@pytest.mark.parametrize("masks", ["each", "one", "no"])
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.sample(16)
@on_ranks(2, 3)
def test_a_layer_equals_the_plain_one(kind, masks, monkeypatch):
    split_over_all_ranks()
    in_float64(3)
    options = {**SIZES, **LAYERS[kind]}
    cross = options.get("add_cross_attention", False)
    net = Around(smp.nn.DistributedTransformerLayer(**options), cross)
    reference = Around(plain.PlainLayer(**options), cross)
    samples = calls_of_attention(monkeypatch)
    WholeJob(net, squares, batch_of(masks), plain=reference).run(2, max_norm=0.1)

    # One mask for several samples is not each sample's: those stay by themselves.
    alone = list(range(1, smp.tp_size() + 1))
    together = [sum(alone)]
    of_self = alone if masks == "one" else together
    assert samples[: len(of_self)] == of_self


@pytest.mark.parametrize("optimize", ["speed", "channels"])
@on_ranks(2)
def test_what_is_attended_to_has_another_length_on_each_rank(optimize):
    """The samples themselves have one, and so may be taken together."""
    split_over_all_ranks()
    in_float64(3)
    options = {**SIZES, "add_cross_attention": True}
    net = Around(smp.nn.DistributedTransformerLayer(**options, optimize=optimize), True)

    def batch(rank: int, step: int) -> tuple:
        x, mask, *_ = batch_of("each")(rank, step)
        generator = torch.Generator().manual_seed(rank)
        states = torch.randn(len(x), 2 + rank, 10, generator=generator)
        return x, mask, states, masked(len(x), 2 + rank, generator) if step else None

    WholeJob(net, squares, batch, plain=Around(plain.PlainLayer(**options), True)).run(2)


@pytest.mark.parametrize("optimize", ["speed", "channels"])
@on_ranks(2)
def test_samples_of_one_length_drop_what_they_would_alone(optimize):
    """By the numbers of their own rank, whoever computes it."""
    torch.set_default_dtype(torch.float64)
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    x = batch_of("no")(rank, 0)[0]

    def dropped() -> Tensor:
        torch.manual_seed(5)
        layer = smp.nn.DistributedTransformerLayer(**DROPS, optimize=optimize)
        torch.manual_seed(100 + rank)
        return layer((x, None))[0]

    alone = dropped()  # before smp.init nothing is split
    split_over_all_ranks()
    torch.testing.assert_close(dropped(), alone, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("optimize", "states"), [("speed", 18), ("memory", 16), ("channels", 16)]
)
@on_ranks(2)
def test_what_a_layer_keeps_for_its_backward(optimize, states):
    """In hidden states of the rank's own samples, as ``docs/tensor_parallelism.md`` says."""
    smp.init({"tensor_parallel_degree": 2, "ddp": True, "optimize": optimize})
    options = {**SIZES, **PRE, "causal_mask_size": 64, "num_attention_heads": 4}
    sizes = {"hidden_size": 64, "attention_head_size": 16, "intermediate_size": 256}
    net = smp.nn.DistributedTransformerLayer(**{**options, **sizes})
    model = smp.DistributedModel(nn.Sequential(net))
    hidden = torch.randn(4, 64, 64, requires_grad=True)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model((hidden, None))[0]

    found = sum(storage.nbytes() for storage in kept.values()) / 4 / hidden.numel()
    assert states <= found < states + 0.2  # statistics of norms and of attention
    out.sum().backward()
