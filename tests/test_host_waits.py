"""Split models have the host wait for no device within a step, or as gradients are clipped.

``torch.cuda.set_sync_debug_mode`` tells of waits for a GPU, and has not been run here.  The
pretended accelerator tells of the same waits, and of those for events and devices.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import smp
from smp.collectives import dense
from tests import accelerator
from tests.devices import DEVICES, use
from tests.models.modules import module_of
from tests.ranks import on_ranks

WORDS = 61
STEADY = 2  # steps before it: the trace, the partition, sizes of gradients, comparisons
SMALL: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}


def gpt2() -> nn.Module:
    """With its dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **SMALL))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24}
    return LlamaForCausalLM(LlamaConfig(pad_token_id=0, **sizes, **HEADS, **SMALL))


def head(**options: Any) -> nn.Module:
    """With its dropout, drawn from seeds, and a split loss."""
    return smp.nn.DistributedTransformerLMHead(
        num_layers=2,
        num_attention_heads=3,
        attention_head_size=8,
        hidden_size=17,
        intermediate_size=32,
        vocab_size=WORDS,
        num_positions=32,
        causal_mask_size=32,
        **options,
    )


@module_of(
    lambda: {
        "table": nn.Embedding(WORDS, 16),
        "linear": nn.Linear(16, 16),
        "outputs": smp.nn.DistributedLinear(16, 17, by_outputs=True),
        "head": nn.Linear(17, WORDS),
    }
)
def Classifier(self, ids):
    """Linears cut by inputs and by outputs, and a split loss."""
    hidden = self.outputs(self.linear(self.table(ids)))
    return smp.nn.vocabulary_parallel_cross_entropy(self.head, hidden, ids)


def classifier() -> nn.Module:
    net = Classifier()
    smp.set_tensor_parallelism(net.head, by_outputs=True)
    return net


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1))


def loss_of_head(model: Any, ids: Tensor) -> Tensor:
    return model((ids, None, None, None, ids))


# By name: what makes the model, its loss, and the configuration.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, Any]]] = {
    "gpt2": (gpt2, next_token_loss, {}),
    "gpt2, same samples": (gpt2, next_token_loss, {"prescaled_batch": True}),
    "llama": (llama, next_token_loss, {}),
    "head": (head, loss_of_head, {"optimize": "memory"}),
    "head with ALiBi": (lambda: head(use_alibi=True), loss_of_head, {}),
    "head by channels": (head, loss_of_head, {"optimize": "channels"}),
    "linears": (classifier, lambda model, ids: model(ids), {}),
}

_mode = threading.RLock()  # of the process, for one thread at a time


def untold(function: Callable) -> Callable:
    """The function, and a function returned by it, with waits told to nobody."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        with _mode:
            before = module.get_sync_debug_mode()
            module.set_sync_debug_mode("default")
            try:
                result = function(*args, **kwargs)
            finally:
                module.set_sync_debug_mode(before)
        return untold(result) if callable(result) else result

    return call


def leave_out_waits_of_others(monkeypatch) -> None:
    """These stay: waits of collectives in the place of NCCL's, and of transformers.

    NCCL serves neither the pretended accelerator nor ranks with one GPU.  Operations other than
    all-gathers go through copies in host memory there.  transformers looks for packed sequences
    in a call without a mask.
    """
    from transformers import masking_utils

    for owner, name in (
        (dense, "in_host_memory"),
        (dense, "copied_back"),
        (masking_utils, "find_packed_sequence_indices"),
    ):
        monkeypatch.setattr(owner, name, untold(getattr(owner, name)))


def check_steps(make: Callable, loss_of: Callable, on: torch.device, is_same: bool) -> None:
    """Train for some steps, the last one without a wait; lengths differ in each."""

    @smp.step
    def step(model: Any, ids: Tensor) -> Tensor:
        loss = loss_of(model, ids)
        model.backward(loss)
        return loss.detach()

    with smp.tensor_parallelism() if make in (gpt2, llama, classifier) else nullcontext(), on:
        net = make()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    module = torch.get_device_module(on)
    feed = smp.rdp_rank() if is_same else smp.dp_rank()
    for number in range(STEADY + 1):
        drawn = torch.Generator().manual_seed(10 * number + feed)
        ids = torch.randint(1, WORDS, (4, 6 + 2 * feed + number), generator=drawn).to(on)
        optimizer.zero_grad()
        try:
            module.set_sync_debug_mode("error" if number == STEADY else "default")
            losses = step(model, ids)
            norm = model.clip_grad_norm_(0.5)
        finally:
            module.set_sync_debug_mode("default")
        optimizer.step()
    assert losses.reduce_mean().isfinite() and norm.isfinite()


def begin(device: str, **config: Any) -> torch.device:
    if device == accelerator.NAME:
        accelerator.use_driver()
    smp.init({"tensor_parallel_degree": 2, "microbatches": 2, **config})
    return use(device)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_no_wait_in_a_step(name, device, monkeypatch):
    make, loss_of, config = MODELS[name]
    on = begin(device, **config)
    leave_out_waits_of_others(monkeypatch)

    check_steps(make, loss_of, on, "prescaled_batch" in config)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@on_ranks(4, timeout_s=120)
def test_no_wait_in_a_step_of_a_pipeline(name, device, monkeypatch):
    """Messages go from device to device."""
    make, loss_of, config = MODELS[name]
    on = begin(device, pipeline_parallel_degree=2, **config)
    leave_out_waits_of_others(monkeypatch)

    check_steps(make, loss_of, on, is_same=False)
