"""Spec: design.md, sections 3 and 4: real models under the pipeline equal the cut loop.

Models are those of ``tests/models/real.py``: configurations of transformers, and models
of PyTorch's own parts.  The partition is the automatic one, from a traced step.
"""

import copy
import dataclasses
import enum
import functools
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, ReformerConfig, ReformerModelWithLMHead
from transformers.modeling_outputs import BaseModelOutput

import smp
from tests.models.partition import distributed
from tests.models.real import REAL, Real
from tests.ranks import on_ranks
from tests.reference.compare import (
    assert_close,
    assert_same_bits,
    assert_same_outputs,
    gradients,
)
from tests.reference.cut_loop import cut_loop, without_state

MICROBATCHES = 2


def start(microbatches: int = MICROBATCHES, **more) -> None:
    ranks = int(smp.job.bootstrap.mpi_size())
    smp.init({"pipeline_parallel_degree": ranks, "microbatches": microbatches, **more})


def by_microbatch(output, index: int):
    """What one microbatch returned, of what a step function with ``smp.step`` returned."""
    if isinstance(output, smp.StepOutput | list):
        return output[index]
    if isinstance(output, tuple):
        return tuple(by_microbatch(item, index) for item in output)
    return {key: by_microbatch(item, index) for key, item in output.items()}


class Pair:
    """A model under the pipeline, and its twin for the cut loop, in one process."""

    def __init__(self, real: Real, step=None, microbatches: int = MICROBATCHES):
        self.reference = copy.deepcopy(real.model)
        self.model = smp.DistributedModel(real.model)
        self.function = step or real.step
        self.step = smp.step(self.function)
        self.microbatches = microbatches
        self.steps = 0

    def run(self, batch: tuple):
        """One step of each; outputs, gradients and buffers must have the same bits.

        Returns:
            what the step with ``smp.step`` returned.
        """
        self.steps += 1
        torch.manual_seed(self.steps)
        got = self.step(self.model, *batch)
        torch.manual_seed(self.steps)
        want = cut_loop(
            self.function,
            self.reference,
            batch,
            rank_of=self.model.partition_report().partition.rank_of,
            ranks=smp.pp_size(),
            microbatches=self.microbatches,
            anywhere=without_state(self.reference),
        )
        assert {request.rank for request in want.requests} == set(range(smp.pp_size()))
        outputs = [by_microbatch(got, i) for i in range(self.microbatches)]
        assert_same_outputs(outputs, want.outputs)
        assert_same_bits(gradients(self.model), gradients(self.reference))
        buffers = dict(self.reference.named_buffers())
        assert_same_bits(dict(self.model.local_named_buffers()), buffers)
        return got


@on_ranks(2, timeout_s=120)
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_equals_the_cut_loop(name):
    """Outputs, gradients and buffers, with dropout, over steps of different sizes."""
    start()
    real = REAL[name]()
    pair = Pair(real)
    generator = torch.Generator().manual_seed(1)
    for rows in (4, 5):
        pair.run(real.make_batch(rows, generator))


@pytest.mark.sample(3)
@on_ranks(3, 4, timeout_s=200)
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "mixture_of_experts", "unet"])
def test_a_real_model_equals_the_cut_loop_on_more_ranks(name):
    """The same with more ranks, so that modules of one call those of another."""
    start(3)
    real = REAL[name]()
    pair = Pair(real, microbatches=3)
    pair.run(real.make_batch(6, torch.Generator().manual_seed(1)))


@on_ranks(2, timeout_s=120)
@pytest.mark.parametrize("there", [None, "encoder", "encoder.layers.1.attention"])
def test_a_reversible_model_equals_the_plain_one(there):
    """Reformer's own autograd function runs its layers again in the backward.

    Without dropout, whose masks it takes from the machine's entropy.
    """
    start()
    torch.manual_seed(0)
    net = ReformerModelWithLMHead(
        ReformerConfig(
            attention_head_size=8,
            num_attention_heads=2,
            hidden_size=16,
            feed_forward_size=32,
            attn_layers=["local", "lsh", "local"],
            axial_pos_embds=False,
            max_position_embeddings=64,
            vocab_size=50,
            is_decoder=True,
            hash_seed=0,
            num_buckets=2,
            local_attn_chunk_length=8,
            lsh_attn_chunk_length=8,
            hidden_dropout_prob=0.0,
            local_attention_probs_dropout_prob=0.0,
            lsh_attention_probs_dropout_prob=0.0,
        )
    ).double()
    plain = copy.deepcopy(net)
    model = distributed(net, {} if there is None else {"": 0, f"reformer.{there}": 1})

    @smp.step
    def step(model, ids):
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    ids = torch.randint(0, 50, (2 * MICROBATCHES, 32))
    got = step(model, ids).reduce_mean()
    losses = [plain(input_ids=part, labels=part).loss for part in ids.chunk(MICROBATCHES)]
    want = sum(losses) / MICROBATCHES
    want.backward()
    torch.testing.assert_close(got, want.detach())
    assert_close(gradients(model), gradients(plain), relative=1e-10)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
}


@pytest.mark.sample(2)
@on_ranks(2, timeout_s=200)
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("gpt2", "adamw"), ("t5", "adamw"), ("t5", "sgd"), ("mixture_of_experts", "sgd")],
)
def test_parameters_after_twenty_steps_equal_those_of_the_cut_loop(name, optimizer):
    start()
    real = REAL[name]()
    pair = Pair(real)
    make = OPTIMIZERS[optimizer]
    mine = smp.DistributedOptimizer(make(pair.model.parameters()))
    theirs = make(pair.reference.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        mine.zero_grad()
        theirs.zero_grad()
        pair.run(real.make_batch(4, generator))
        mine.step()
        theirs.step()

    parameters = dict(pair.reference.named_parameters())
    assert_same_bits(dict(pair.model.local_named_parameters()), parameters)
    started = dict(REAL[name]().model.named_parameters())
    assert not all(torch.equal(parameters[n], started[n]) for n in parameters)


# What transformers can be asked for.


def language_step(**options):
    """A step that asks for more outputs, and trains on all of them."""

    def step(model, tokens):
        out = model(input_ids=tokens, labels=tokens, use_cache=False, **options)
        loss, *rest = out if isinstance(out, tuple) else out.values()
        collected = [t for more in rest if isinstance(more, tuple) for t in more]
        for number, state in enumerate(collected):
            loss = loss + 0.01 * (number + 1) * state.square().mean()
        loss /= 2
        model.backward(loss)
        return loss, tuple(collected), rest[0]

    return step


@pytest.mark.sample(3)
@on_ranks(2, timeout_s=120)
@pytest.mark.parametrize("return_dict", [True, False], ids=["dict", "tuple"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_all_states_and_attentions_are_collected(name, return_dict):
    """transformers collects by hooks and context variables, here on two ranks at once."""
    start()
    real = REAL[name]()
    pair = Pair(
        real,
        language_step(
            output_hidden_states=True, output_attentions=True, return_dict=return_dict
        ),
    )
    for rows in (4, 5):
        batch = real.make_batch(rows, torch.Generator().manual_seed(1))
        _, collected, _ = pair.run(batch[:1])
    layers = pair.reference.config.num_hidden_layers
    assert len(collected) == (layers + 1) + layers


@pytest.mark.sample(4)
@on_ranks(2, 3, timeout_s=120)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_gradient_checkpointing_equals_the_cut_loop(name, reentrant):
    """What a checkpoint computes again draws the same numbers, on whatever rank."""
    start()
    real = REAL[name]()
    real.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    step = real.step if name == "t5" else language_step()
    pair = Pair(real, step)
    for rows in (4, 3):
        pair.run(real.make_batch(rows, torch.Generator().manual_seed(1)))


@on_ranks(2, timeout_s=120)
def test_every_step_may_have_another_shape():
    start()
    real = REAL["gpt2"]()
    pair = Pair(real)
    for rows, length in ((2, 10), (5, 3), (3, 7), (4, 1 + 1)):
        pair.run((torch.randint(3, 40, (rows, length)),))


@pytest.mark.sample(3)
@on_ranks(2, 3, timeout_s=120)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_generate_gives_the_tokens_of_the_plain_model(name):
    """With a cache, which every layer of every rank extends; greedy."""
    start()
    model = REAL[name]().model.eval()
    plain = copy.deepcopy(model)
    distributed = smp.DistributedModel(model)

    def generate(model, tokens):
        with torch.no_grad():
            return model.generate(
                tokens, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0
            )

    tokens = torch.randint(3, 40, (4, 6), generator=torch.Generator().manual_seed(1))
    got = smp.step(generate)(distributed, tokens).concat()
    want = torch.cat([generate(plain, part) for part in tokens.chunk(MICROBATCHES)])
    assert torch.equal(got, want)


@on_ranks(2, timeout_s=120)
def test_a_compiled_submodule_equals_the_cut_loop():
    start()
    real = REAL["gpt2"]()
    pair = Pair(real)
    for layer in pair.model.module.transformer.h:
        layer.mlp.compile(backend="eager")
    for rows in (4, 5):
        pair.run(real.make_batch(rows, torch.Generator().manual_seed(1)))


@on_ranks(2, timeout_s=120)
def test_two_distributed_models_in_one_step_equal_the_cut_loop():
    """One gives what the other is given; each has a partition of its own."""
    start()

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.first = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.second = torch.nn.TransformerEncoder(layer, 3)

    def step(model, x):
        loss = model.second(model.first(x)).square().mean()
        model.backward(loss)
        return loss

    class Two:
        def __init__(self, both):
            self.first = smp.DistributedModel(both.first)
            self.second = smp.DistributedModel(both.second)
            self.backward = self.second.backward

    both = Both()
    reference = copy.deepcopy(both)
    two = Two(both)
    for number in range(3):
        x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(number))
        torch.manual_seed(number)
        got = smp.step(step)(two, x)
        rank_of = {"": 0}
        for name in ("first", "second"):
            own = getattr(two, name).partition_report().partition.rank_of
            rank_of |= {f"{name}.{path}".rstrip("."): rank for path, rank in own.items()}
        torch.manual_seed(number)
        want = cut_loop(
            step, reference, (x,), rank_of=rank_of, ranks=2, microbatches=MICROBATCHES
        )
        assert {request.rank for request in want.requests} == {0, 1}
        assert_same_outputs(list(got.outputs), want.outputs)
        for name in ("first", "second"):
            mine = getattr(two, name).local_named_parameters()
            theirs = gradients(getattr(reference, name))
            assert_same_bits({n: p.grad for n, p in mine}, theirs)


# What else real models are called with.


class Mode(enum.Enum):
    ADD = "add"
    MULTIPLY = "multiply"


@dataclasses.dataclass
class Options:
    mode: Mode
    function: Callable
    scales: dict[str, torch.Tensor]
    seen: list = dataclasses.field(default_factory=list)


def twice(x, factor=2.0):
    return x * factor


def logged(forward):
    @functools.wraps(forward)
    def run(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, *args, **kwargs)

    return run


class Flexible(torch.nn.Module):
    """Takes and gives whatever Python has."""

    def __init__(self, activation):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.activation = activation  # one without parameters, which all layers share

    @logged
    def forward(self, x, *, options: Options, bag: defaultdict, window: slice, **rest):
        y = self.activation(options.function(self.linear(x)))
        other = options.scales["other"]
        y = y + other if options.mode is Mode.ADD else y * other
        options.seen.append(y[:, window])
        bag["norms"].append(y.square().mean())
        rest["cache"].update(y.unsqueeze(1).unsqueeze(1), y.unsqueeze(1).unsqueeze(1), 0)
        return BaseModelOutput(last_hidden_state=y, hidden_states=(x, None))


class FlexibleModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        activation = torch.nn.Dropout(0.2)
        self.layers = torch.nn.ModuleList(Flexible(activation) for _ in range(4))
        self.scale = torch.nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        options = Options(Mode.ADD, functools.partial(twice, factor=0.7), {"other": self.scale})
        bag, cache = defaultdict(list), DynamicCache()
        for layer in self.layers:
            out = layer(x, options=options, bag=bag, window=slice(2, None, 2), cache=cache)
            assert isinstance(out, BaseModelOutput) and list(out.keys()) == [
                "last_hidden_state",
                "hidden_states",
            ]
            x, options.mode, options.function = out.last_hidden_state, Mode.MULTIPLY, twice
        keys = cache.layers[0].keys
        losses = [t.square().mean() for t in options.seen] + bag["norms"] + [keys.sum()]
        return sum(losses), len(options.seen), len(bag["norms"]), cache.get_seq_length()


@on_ranks(2, 3, timeout_s=120)
def test_arguments_of_many_kinds_arrive_and_come_back():
    """Enumerations, partials, dataclasses, defaultdicts, caches and model outputs."""
    start()

    def step(model, x):
        loss, *counts = model(x)
        model.backward(loss)
        return loss, *counts

    torch.manual_seed(7)
    pair = Pair(Real(FlexibleModel(), None, step, ()))
    for rows in (4, 2):
        _, *counts = pair.run((torch.randn(rows, 8),))
        assert counts == [[4, 4], [4, 4], [4, 4]]
