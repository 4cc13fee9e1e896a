"""Dropout in models that are split over the TP_GROUP, whose ranks have samples of their own.

The same seeds give the same bits, whatever the schedule and the timing, with layers
checkpointed or not, and after a step that failed on one of the ranks, within a region.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import smp
from tests.models.steps import own_loss
from tests.ranks import call_on_ranks
from tests.reference.whole_job import in_float64

MICROBATCHES = 3
STEPS = 2
VOCABULARY = 23
DROPS = 0.3


class Gpt2(nn.Module):
    """Transformers' model, whose attentions and MLPs are regions."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=16, n_embd=12, n_layer=2, n_head=3,
            resid_pdrop=DROPS, embd_pdrop=DROPS, attn_pdrop=DROPS,
            bos_token_id=0, eos_token_id=0, attn_implementation="eager", use_cache=False,
        )  # fmt: skip
        with smp.tensor_parallelism():
            self.net = GPT2LMHeadModel(config)
        self.layers = self.net.transformer.h
        self.parts = {"attention": ("attn", "c_proj"), "output": ("mlp", "c_proj")}

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(input_ids=ids, labels=ids).loss


class Own(nn.Module):
    """Layers of ``smp.nn``."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 6)
        layer = functools.partial(
            smp.nn.DistributedTransformerLayer,
            num_attention_heads=3, attention_head_size=2, hidden_size=6, intermediate_size=7,
            attention_dropout_prob=DROPS, hidden_dropout_prob=DROPS, causal_mask_size=16,
        )  # fmt: skip
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.head = nn.Linear(6, 3)
        self.parts = {"attention": ("attention", "dense"), "output": ("output", "dense2")}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x, _ = layer((x, None))
        return self.head(x).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {"in place": Gpt2, "own": Own}


class Failure(NamedTuple):
    """Something that one tp_rank raises between a region's gather and its reduce."""

    part: str  # of the second layer
    phase: str
    tp_rank: int
    call: int = 0  # which one of the part's calls in the step


class Trouble(ValueError):
    """Raised by a model."""


class Raising:
    """A module's class of its own, whose forward raises once, in one call."""

    def __init__(self, module: nn.Module, phase: str, call: int) -> None:
        self.phase, self.calls_left = phase, call
        cls = type(module)

        def forward(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return cls.forward(this, *self._seen(args), **kwargs)

        module.__class__ = type(cls.__name__, (cls,), {"forward": forward})

    def _seen(self, args: tuple) -> tuple:
        if smp.is_tracing():
            return args
        self.calls_left -= 1
        if self.calls_left != -1:
            return args
        if self.phase == "forward":
            raise Trouble("no good")
        x = args[0].clone()
        x.register_hook(self._refuse)
        return (x, *args[1:])

    def _refuse(self, gradient: Tensor) -> None:
        raise Trouble("no good")


def ids_of(step: int) -> Tensor:
    """This dp_rank's tokens; other numbers of samples and lengths on each rank."""
    generator = torch.Generator().manual_seed(100 * step + smp.dp_rank())
    shape = ((1 + smp.dp_rank()) * MICROBATCHES, 5 + 2 * smp.dp_rank())
    return torch.randint(0, VOCABULARY, shape, generator=generator)


train = smp.step(own_loss)


def trained(
    kind: str,
    pp: int,
    pipeline: str = "interleaved",
    jitter: int | None = None,
    checkpointed: bool = False,
    failure: Failure | None = None,
    seed: int = 0,
) -> dict[str, str]:
    """Digests of what this rank has after each of some steps.

    Args:
        jitter: delays follow from it; None: there are none.
        failure: of a step between the first two, which does not count.
    """
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if jitter is not None:
        os.environ["SMP_JITTER"] = str(100 * jitter + rank)
    smp.init(
        {
            "tensor_parallel_degree": 2,
            "pipeline_parallel_degree": pp,
            "microbatches": MICROBATCHES,
            "pipeline": pipeline,
        }
    )
    in_float64(5)
    net = MODELS[kind]()
    model = smp.DistributedModel(net)
    if checkpointed:
        smp.set_activation_checkpointing(net.layers)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    out = {}
    for step in range(STEPS):
        if step == 1 and failure is not None:
            check_failure(model, net, failure)
        optimizer.zero_grad()
        torch.manual_seed(1000 * seed + 10 * step + rank)
        out[f"loss of step {step}"] = digest(train(model, ids_of(step)).concat())
        for name, parameter in model.local_named_parameters():
            out[f"gradient of {name} in step {step}"] = digest(parameter.grad)
        optimizer.step()
    parts = model.local_state_dict()
    return out | {name: digest(parts[name]) for name, _ in model.local_named_parameters()}


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def check_failure(model: smp.DistributedModel, net: nn.Module, failure: Failure) -> None:
    """A step fails on all ranks, with what one has raised."""
    name, inner = net.parts[failure.part]
    module = net.layers[1].get_submodule(name).get_submodule(inner)
    path = next(path for path, one in net.named_modules() if one is module)
    hook = None
    if smp.tp_rank() == failure.tp_rank:
        hook = Raising(module, failure.phase, failure.call)
    with pytest.raises(Trouble, match="no good") as caught:
        train(model, ids_of(1))
    raised_here = smp.pp_size() == 1 and hook is not None
    if not raised_here:
        check_note("\n".join(caught.value.__notes__), failure, path)


def check_note(said: str, failure: Failure, path: str) -> None:
    """What other ranks are told: the rank, the microbatch, the phase and the module."""
    where = rf"raised on rank \d \(tp_rank {failure.tp_rank}, pp_rank \d\) in (.*), "
    told = re.search(where + rf"microbatch \d, {failure.phase}\b", said)
    assert told, said
    if failure.phase == "forward":
        named = re.fullmatch(r"module '(.*)'", told[1])
        assert named and f"{path}.".startswith(f"{named[1]}."), said


@functools.cache
def as_it_should_be(kind: str, pp: int) -> list[dict[str, str]]:
    return call_on_ranks(2 * pp, trained, kind, pp)


def check_same(got: list[dict[str, str]], want: list[dict[str, str]]) -> None:
    for rank, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.keys() == other.keys()
        differ = [name for name in other if one[name] != other[name]]
        assert not differ, f"on rank {rank} other bits: {differ}"


EVERY_MODEL = (
    pytest.mark.parametrize("pp", [1, 2], ids=["alone", "2 stages"]),
    pytest.mark.parametrize("kind", MODELS),
)


def every_model(function: Callable) -> Callable:
    for mark in EVERY_MODEL:
        function = mark(function)
    return function


@every_model
def test_another_seed_drops_others(kind, pp):
    want = as_it_should_be(kind, pp)
    for rank, one in enumerate(call_on_ranks(2 * pp, trained, kind, pp, seed=1)):
        name = "loss of step 0"
        assert one[name] != want[rank][name]


@pytest.mark.sample(4)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("pipeline", ["simple", "interleaved"])
@pytest.mark.parametrize("jitter", [1, 2, 3])
@every_model
def test_the_bits_follow_from_the_seed(kind, pp, jitter, pipeline, checkpointed):
    got = call_on_ranks(2 * pp, trained, kind, pp, pipeline, jitter, checkpointed)
    check_same(got, as_it_should_be(kind, pp))


@pytest.mark.sample(8)
@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("call", [0, MICROBATCHES - 1])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("part", ["attention", "output"])
@every_model
def test_a_step_after_one_that_failed_in_a_region(kind, pp, part, phase, call, tp_rank):
    """All ranks hear of it, with the rank and the module; then nothing is left of it."""
    failure = Failure(part, phase, tp_rank, call)
    got = call_on_ranks(2 * pp, trained, kind, pp, jitter=4, failure=failure)
    check_same(got, as_it_should_be(kind, pp))
