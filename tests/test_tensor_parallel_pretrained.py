"""Models of transformers that are split in place: what they generate, and their folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models import families
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, split_over_all_ranks

transformers = pytest.importorskip("transformers")

# ------------------------------------------------------------------------------ generation

DECODERS = ["gpt2", "gptj", "gptneo", "gptneox", "bert", "roberta"]


def prompts(rank: int) -> dict[str, Tensor]:
    """Other numbers of samples on each rank, of one length; those of rank 0 begin later."""
    _, ids = families.tokens(rank, 3)
    mask = torch.ones_like(ids)
    mask[:, : 2 * (rank == 0)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generates_the_same(got: nn.Module, want: nn.Module, **given: Any) -> None:
    """Sequences, and the logits of each step, with a cache."""
    options = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "use_cache": True,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    lengths: list[int] = []
    decoder = getattr(got.get_module(), "decoder", got)
    decoder.get_input_embeddings().register_forward_pre_hook(
        lambda _, ids: lengths.append(ids[0].size(1))
    )
    found, wanted = (model.generate(**given, **options) for model in (got, want))
    assert torch.equal(found.sequences, wanted.sequences)
    assert len(lengths) == 5 and lengths[1:] == [1] * 4  # the others are in the cache
    for a, b in zip(found.logits, wanted.logits, strict=True):
        assert_near(a, b, "logits")


def for_generation(name: str) -> nn.Module:
    """A family's model, marked; its largest logit is no accident."""
    alone = name in ("bert", "roberta")
    net = families.decoder(name, crosses=False) if alone else families.made(name)
    with torch.no_grad():
        for parameter in net.parameters() if name in DECODERS else ():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return net.eval()


@pytest.mark.parametrize(
    ("name", "same"),
    [*((n, False) for n in [*DECODERS, "llama", "llama, 1 head of keys", "t5", "mixtral"])]
    + [*((n, True) for n in ("gpt2", "bert", "llama", "t5"))],
)
@on_ranks(2, timeout_s=120)
def test_a_family_generates_what_the_plain_model_does(name, same, monkeypatch):
    """Each rank from prompts of its own, or all from the same ones."""
    families.compute_in_float64(monkeypatch, name)
    split_over_all_ranks(prescaled_batch=same)
    plain = for_generation(name)
    model = smp.DistributedModel(for_generation(name)).eval()
    generates_the_same(model, plain, **prompts(0 if same else smp.rank()))


# --------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("name", [n for n in families.FAMILIES if "," not in n])
@pytest.mark.sample(5)
@on_ranks(2, timeout_s=120)
def test_from_a_folder_and_back_to_one(name, monkeypatch, tmp_path):
    """Read while split, trained for a step, and written for the plain class to read."""
    families.compute_in_float64(monkeypatch, name)
    split_over_all_ranks()
    cls = getattr(transformers, families.FAMILIES[name].model)
    if smp.rank() == 0:
        families.made(name).save_pretrained(tmp_path / "plain")
    smp.barrier()
    options = {"attn_implementation": "eager"}
    if name == "mixtral":
        options["experts_implementation"] = "eager"
    plain = cls.from_pretrained(tmp_path / "plain", **options)
    with smp.tensor_parallelism():
        net = cls.from_pretrained(tmp_path / "plain", **options)
    model = smp.DistributedModel(net)
    assert any(not one.reason for one in model._smp_split)
    batch, _ = families.batch_of(name, smp.rank(), 1)
    with torch.no_grad():
        assert_near(model(**batch).logits, plain(**batch).logits, "logits")

    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.train()
    model(**batch).logits.square().mean().backward()
    optimizer.step()
    check_folder(model, cls, tmp_path / "trained", plain)


def check_folder(
    model: smp.DistributedModel, cls: type, folder: Path, before: nn.Module
) -> None:
    """What is saved there has the model's values, which are others than before."""
    whole = model.state_dict()
    if smp.rank() == 0:
        model.save_pretrained(folder, state_dict=dict(whole))  # which it changes
    smp.barrier()
    read = cls.from_pretrained(folder).state_dict()
    assert read.keys() == before.state_dict().keys()
    for key, value in read.items():
        assert value.dtype == whole[key].dtype and torch.equal(value, whole[key]), key
    changed = [key for key, value in before.named_parameters() if not read[key].equal(value)]
    assert len(changed) > 0.5 * len(list(before.parameters()))
