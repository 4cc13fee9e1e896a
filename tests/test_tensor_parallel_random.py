"""Dropout on ranks that are fed the same batch: alike outside of regions, and not inside."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from tests.ranks import on_ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 37, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_positions=16, n_embd=12, n_layer=2, n_head=3, attn_implementation="eager",
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, **SIZES,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=16, attn_implementation="eager",
        hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, **SIZES,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


class Dropped:
    """What dropout drops on this rank: of the first sample's first head, and of all else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_heads: list[bytes] = []
        self.of_others: list[bytes] = []
        drop = F.dropout

        def dropout(x: Tensor, *args: Any, **options: Any) -> Tensor:
            out = drop(x, *args, **options)
            gone = (out == 0) & (x != 0)
            if gone.dim() == 4:  # ranks have other numbers of heads
                self.of_heads.append(gone[0, 0].numpy().tobytes())
            else:
                self.of_others.append(gone.numpy().tobytes())
            return out

        monkeypatch.setattr(F, "dropout", dropout)

    def check(self, heads: int, others: int) -> None:
        """As many calls, each with other numbers; ranks have those of others alike."""
        everyones = smp.allgather((self.of_heads, self.of_others), smp.TP_GROUP)
        assert len(set(self.of_others)) == len(self.of_others) == others
        for _, of_others in everyones:
            assert sorted(of_others) == sorted(self.of_others)
        masks = [mask for of_heads, _ in everyones for mask in of_heads]
        assert len(set(masks)) == len(masks) == heads * len(everyones)


def train(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> Dropped:
    """Two steps, the first one not looked at; and calls outside of one, if there can be.

    The ranks' generators differ.
    """
    torch.manual_seed(1)
    net = make()
    smp.set_tensor_parallelism(net, replace=False)
    model = smp.DistributedModel(net).train()
    torch.manual_seed(smp.rank())
    ids = torch.arange(28).view(4, 7)

    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss = model(ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    step(model, ids)
    dropped = Dropped(monkeypatch)
    step(model, ids)
    if smp.pp_size() == 1:
        torch.rand(smp.rank())  # by now each is elsewhere
        model(ids, labels=ids)["loss"].backward()
    return dropped


@pytest.mark.parametrize("make", [gpt2, bert])
@on_ranks(2)
def test_dropout_of_ranks_that_are_fed_the_same_batch(make, monkeypatch):
    smp.init({"tensor_parallel_degree": 2, "prescaled_batch": True})
    train(make, monkeypatch).check(heads=2 * 2, others=2 * 5)


@on_ranks(4)
def test_dropout_of_such_ranks_in_a_pipeline(monkeypatch):
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "prescaled_batch": True,
        }
    )
    dropped = train(gpt2, monkeypatch)
    layers = dropped.of_heads
    dropped.check(heads=len(layers), others=len(dropped.of_others))
    assert len(sum(smp.allgather(layers, smp.PP_GROUP), [])) == 2 * 2
