"""Families under transformers before 4.27: replaced by default, or split where they stand.

    mpirun -np 2 python forms.py

On each rank and for each family: the losses of three steps equal the plain model's over all
ranks' samples, and so does what is saved, by the plain model's names.
"""

import copy
import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import smp

WORDS, LENGTH, CLASSES = 37, 6, 5
DISTRIBUTED = (smp.nn.DistributedTransformerLMHead, smp.nn.DistributedTransformer)


def small(name: str, model: str, **options: Any) -> nn.Module:
    """A model whose sizes do not divide by 2."""
    kind = getattr(transformers, f"{name}Config")
    common = {"vocab_size": WORDS, "max_position_embeddings": 16, "intermediate_size": 20}
    config = kind(
        num_hidden_layers=3, num_attention_heads=3, hidden_size=12, num_labels=CLASSES,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, **{**common, **options},
    )  # fmt: skip
    return getattr(transformers, model)(config)


NO_DROPS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt2": functools.partial(small, "GPT2", "GPT2LMHeadModel", **NO_DROPS),
    "gptj": functools.partial(small, "GPTJ", "GPTJForCausalLM", rotary_dim=2, **NO_DROPS),
    "gptneo": functools.partial(
        small, "GPTNeo", "GPTNeoForCausalLM", num_layers=3, window_size=3, resid_dropout=0.0,
        embed_dropout=0.0, attention_dropout=0.0,
        attention_types=[[["global", "local", "local"], 1]],
    ),
    "gptneox": functools.partial(small, "GPTNeoX", "GPTNeoXForCausalLM", rotary_pct=0.5),
    "bert": functools.partial(small, "Bert", "BertForMaskedLM", **NO_DROPOUT),
    "roberta": functools.partial(small, "Roberta", "RobertaForMaskedLM", **NO_DROPOUT),
    "vit": functools.partial(
        small, "ViT", "ViTForImageClassification", image_size=8, patch_size=4,
        **NO_DROPOUT,
    ),
}  # fmt: skip

IN_PLACE: dict[str, Callable[[], nn.Module]] = {
    "t5": functools.partial(
        small, "T5", "T5ForConditionalGeneration", d_model=12, num_heads=3, num_layers=2,
        d_kv=4, d_ff=20, dropout_rate=0.0, decoder_start_token_id=0,
    ),
    "gpt2 without a head": functools.partial(
        small, "GPT2", "GPT2ForSequenceClassification", **NO_DROPS
    ),
}  # fmt: skip


def batch_of(family: str, rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    if family == "vit":
        pixels = torch.randn(2 + rank, 3, 8, 8, generator=generator)
        labels = torch.randint(0, CLASSES, (2 + rank,), generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(0, WORDS, (2, LENGTH + rank), generator=generator)
    seen = torch.ones_like(ids)
    seen[0, LENGTH - 1 :] = 0
    labels = ids.masked_fill(seen == 0, -100)
    if family == "t5":
        return {"input_ids": ids, "attention_mask": seen, "decoder_input_ids": ids,
                "labels": labels}  # fmt: skip
    if family == "gpt2 without a head":
        return {"input_ids": ids, "labels": ids[:, 0] % CLASSES}
    return {"input_ids": ids, "attention_mask": seen, "labels": labels}


def loss_of(model: nn.Module, labels: Tensor, **batch: Tensor) -> Tensor:
    logits = model(**batch).logits
    if logits.dim() == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels)


def trained(
    family: str, make: Callable[[], nn.Module], **marks: bool
) -> tuple[smp.DistributedModel, nn.Module]:
    """A split model and the plain one after steps in which their losses were equal.

    Args:
        marks: what the model is marked with.
    """
    torch.manual_seed(1)
    smp.state.module_manager.translate_functions.clear()
    with smp.model_creation(tensor_parallelism=True, **marks):
        net = make()
    plain = copy.deepcopy(net)
    model = smp.DistributedModel(net)
    causal = isinstance(model.get_module(), smp.nn.DistributedTransformerLMHead)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    @smp.step
    def train(model, batch):
        loss = model(**batch)["loss"] if causal else loss_of(model, **batch)
        model.backward(loss)
        return loss

    for step in range(3):
        model.zero_grad()
        plain_optimizer.zero_grad()
        batches = [batch_of(family, rank, step) for rank in range(smp.dp_size())]
        loss = train(model, batches[smp.dp_rank()]).reduce_mean()
        every = [loss_of(plain, **batch) for batch in batches]
        (sum(every) / len(every)).backward()
        torch.testing.assert_close(loss, every[smp.dp_rank()], rtol=1e-4, atol=1e-5)
        optimizer.step()
        plain_optimizer.step()
    return model, plain


def check_in_place(family: str, make: Callable[[], nn.Module], **marks: bool) -> None:
    model, plain = trained(family, make, **marks)
    assert not any(isinstance(m, DISTRIBUTED) for m in model.get_module().modules()), family
    assert any(not one.reason for one in model._smp_split), family
    assert not smp.state.module_manager.translate_functions
    plain_state = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain_state[name], rtol=1e-3, atol=1e-5)


def check(family: str) -> None:
    model, plain = trained(family, FAMILIES[family])
    assert any(isinstance(m, DISTRIBUTED) for m in model.get_module().modules()), family
    ours, wanted = model.state_dict(), plain.state_dict()
    ((to_hf, to_ours),) = smp.state.module_manager.translate_functions
    for translated in (to_hf(ours), by_name(family)(ours)):
        for name, value in translated.items():
            torch.testing.assert_close(
                value, wanted[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )
        missing = set(wanted) - set(translated)
        assert all(name.endswith(("bias", "inv_freq")) for name in missing), missing
    plain.load_state_dict(to_hf(ours))  # with the buffers of its layers
    there = to_ours(to_hf(ours))
    assert set(there) == set(ours)
    assert all(torch.equal(there[name], value) for name, value in ours.items())


def by_name(family: str) -> Callable[[Any], dict[str, Any]]:
    """The family's function, which scripts call."""
    names = importlib.import_module(
        f"smdistributed.modelparallel.torch.nn.huggingface.{family}"
    )
    return getattr(names, f"translate_state_dict_to_hf_{family}")


def main() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    for family in FAMILIES:
        check(family)
    for family in IN_PLACE:
        check_in_place(family, IN_PLACE[family])
    for family in ("gpt2", "gptj", "gptneo"):  # which have a form, and were tried without it
        check_in_place(family, FAMILIES[family], replace=False)


if __name__ == "__main__":
    main()
