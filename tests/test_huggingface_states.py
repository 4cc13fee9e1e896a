"""States of optimizers of models with distributed modules in the place of Hugging Face's.

They are those of the plain model's optimizer, there and back.  The reference is the plain model
in one process, in float64.
"""

import copy
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.nn.huggingface.gpt2 import get_hf_gpt2_transformer_layer_hooks
from smp.tensor_parallel.splits import replacement
from tests.ranks import on_ranks
from tests.reference.whole_job import assert_near, split_over_all_ranks
from tests.test_huggingface_forms import Pair, gpt2, loss_of, texts

transformers = pytest.importorskip("transformers")

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A key's bias has no gradient but rounding, of which Adam makes a step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def without_decay_of_vectors(model: nn.Module) -> torch.optim.Optimizer:
    """As the Trainer groups parameters; embeddings are not trained."""
    every = dict(model.named_parameters())
    trained = {n: p for n, p in every.items() if not re.search(r"embed|\.w[tp]e\.", n)}
    groups: Iterable[dict[str, Any]] = (
        {"params": [(n, p) for n, p in trained.items() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in trained.items() if p.dim() < 2], "weight_decay": 0.0},
    )
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def assert_same_state(got: Any, want: Any) -> None:
    """Equal but for rounding; with the same numbers, groups, shapes and dtypes."""
    assert got["param_groups"] == want["param_groups"]
    assert list(got["state"]) == sorted(want["state"])
    for number, one in want["state"].items():
        assert set(got["state"][number]) == set(one)
        for key, value in one.items():
            mine = got["state"][number][key]
            assert (mine.shape, mine.dtype) == (value.shape, value.dtype), (number, key)
            assert_near(mine, value, f"{key} of {number}")


def check_there_and_back(kind: str, make: Make, folder: str) -> None:
    """The state goes to the plain optimizer and comes from it; a checkpoint has it."""
    pair = Pair(kind, make)
    for step in range(2):
        pair.step(step)
    saved = copy.deepcopy(pair.optimizer.state_dict())
    assert_same_state(saved, pair.plain_optimizer.state_dict())
    pair.plain_optimizer = make(pair.plain)
    pair.plain_optimizer.load_state_dict(saved)
    pair.step(2)
    pair.check()
    wanted = copy.deepcopy(pair.plain_optimizer.state_dict())
    smp.save_checkpoint(
        folder, "full", partial=False, model=pair.model, optimizer=pair.optimizer
    )
    assert_same_state(torch.load(os.path.join(folder, "optimizer_full")), wanted)
    for from_file in (False, True):
        again = Pair(kind, make)
        again.plain.load_state_dict(pair.plain.state_dict())
        again.plain_optimizer.load_state_dict(copy.deepcopy(wanted))
        if from_file:
            smp.resume_from_checkpoint(folder, "full", partial=False)
        else:
            again.model.load_state_dict(
                pair.plain.state_dict(), translate_function=pair.to_ours
            )
            again.optimizer.load_state_dict(copy.deepcopy(wanted))
        for step in (3, 4):
            again.step(step)
        again.check()
        assert_same_state(again.optimizer.state_dict(), again.plain_optimizer.state_dict())


@pytest.mark.parametrize("make", [adamw, without_decay_of_vectors])
@pytest.mark.parametrize("kind", ["gpt2", "gptneox", "bert"])
@on_ranks(2)
@pytest.mark.sample(3)
def test_the_state_is_that_of_the_plain_models_optimizer(kind, make, tmp_path):
    split_over_all_ranks()
    check_there_and_back(kind, make, str(tmp_path))


@on_ranks(4)
def test_the_state_of_a_replaced_model_in_a_pipeline(tmp_path):
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2})
    check_there_and_back("gpt2", adamw, str(tmp_path))


@on_ranks(2)
def test_states_that_no_plain_optimizer_has_are_refused():
    split_over_all_ranks()
    with smp.tensor_parallelism(replace=True):
        model = smp.DistributedModel(gpt2())
    named = dict(model.named_parameters())
    query = named.pop("transformer.seq_layers.1.attention.query.bias")
    names = (
        r"'transformer.h.1.attn.c_attn.bias' .*'transformer.seq_layers.1.attention.query.bias'"
    )
    groups: list[Any] = [list(named.values()), [query]]
    for parameters in (groups[0], [{"params": group} for group in groups]):
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(parameters, 0.1))
        with pytest.raises(
            NotImplementedError, match=f"{names}.* not all in one of its groups"
        ):
            optimizer.state_dict()
        assert len(optimizer.local_state_dict()["param_groups"]) == len(optimizer.param_groups)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW([*named.values(), query]))
    query.grad = torch.ones_like(query)
    optimizer.step()
    with pytest.raises(ValueError, match="'step' of '[^']*query.bias'.*c_attn.bias'"):
        optimizer.state_dict()
    wrong = optimizer.orig_state_dict()
    with pytest.raises(
        ValueError, match=r"groups of \[52\] parameters; the plain .* has \[40\]"
    ):
        optimizer.load_state_dict(wrong)
    wrong = {"state": {}, "param_groups": [{"params": [0]}, {"params": list(range(1, 40))}]}
    with pytest.raises(ValueError, match=r"groups of \[1, 39\] parameters; .* has \[40\]"):
        optimizer.load_state_dict(wrong)


@on_ranks(2)
def test_the_state_of_blocks_that_the_script_registers(monkeypatch):
    """What lies beside the blocks is numbered as in the plain model, too."""
    monkeypatch.setattr(replacement, "_registered", {})
    split_over_all_ranks()
    torch.set_default_dtype(torch.float64)
    net = gpt2()
    plain = copy.deepcopy(net)
    smp.set_tensor_parallelism(net.transformer.h[1:], True)
    block = type(net.transformer.h[0])
    hooks = get_hf_gpt2_transformer_layer_hooks()
    smp.tp_register_with_module(block, smp.nn.DistributedTransformerLayer, *hooks)
    model = smp.DistributedModel(net)
    extra = nn.Parameter(torch.zeros(3))
    optimizers = [
        torch.optim.AdamW([{"params": [extra]}, {"params": one.parameters()}], eps=1e-4)
        for one in (model, plain)
    ]
    optimizer = smp.DistributedOptimizer(optimizers[0])
    for step in range(2):
        model.backward(loss_of(model, **texts(smp.dp_rank(), step), use_cache=False))
        every = [loss_of(plain, **texts(rank, step)) for rank in range(smp.dp_size())]
        (sum(every) / len(every)).backward()
        extra.grad = torch.ones(3)
        optimizer.step()
        optimizers[1].step()
        optimizer.zero_grad()
        optimizers[1].zero_grad()
    assert_same_state(optimizer.state_dict(), optimizers[1].state_dict())
    wanted = copy.deepcopy(optimizers[1].state_dict())
    wanted["state"]["calls"] = {"number": 3}
    optimizer.load_state_dict(wanted)
    state = optimizer.state_dict()
    assert state["state"].pop("calls") == wanted["state"].pop("calls") == {"number": 3}
    assert_same_state(state, wanted)
