"""Delayed construction: the values of undelayed construction, each rank its own."""

import math

import pytest
import torch
from torch import nn

import smp
from smp.modules.delayed_init import is_delayed, materialize, value_of
from smp.tensor_parallel.splits import marking
from tests.models.partition import distributed
from tests.models.real import REAL
from tests.models.steps import mean_square
from tests.models.trained import assert_same, batch_of, init, make_model, rank_of, train_step
from tests.ranks import call_on_ranks, on_ranks


class Odd(nn.Module):
    """What constructors do besides plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.old = nn.Parameter(torch.Tensor(3, 4))
        nn.init.kaiming_uniform_(self.old, a=math.sqrt(5))
        self.scaled = nn.Parameter(torch.randn(4, 3) * 0.02 + torch.ones(3))
        self.view = nn.Parameter(torch.rand(2, 6).t()[1:3])
        self.orthogonal = nn.Parameter(torch.empty(5, 5))
        nn.init.orthogonal_(self.orthogonal)
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(9), std=0.02))
        with torch.no_grad():
            self.cut[2:4].fill_(7)
            self.cut.data.mul_(2)
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.drops = nn.ModuleList(nn.Dropout(rate) for rate in rates)
        self.scale = nn.Parameter(torch.full((2,), torch.rand(1).item()))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool())
        self.register_buffer("maybe", torch.bernoulli(torch.rand(6)))
        self.positions = torch.arange(5)
        self.half = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.LSTM(3, 2)
        self.embedding = nn.Embedding(6, 3, padding_idx=1)
        self.output = nn.Linear(3, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=4, n_head=2)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
        )
    )


MODELS = {
    "odd": Odd,
    "gpt2": gpt2,
    "bert": bert,
    "transformer": lambda: nn.Transformer(8, 2, 1, 1),
}


def made(make, seed: int, delayed: bool) -> tuple[nn.Module, torch.Tensor]:
    """The model, and what the generator gives next."""
    torch.manual_seed(seed)
    with smp.delay_param_initialization(enabled=delayed):
        model = make()
    return model, torch.rand(3)


@on_ranks(1)
@pytest.mark.parametrize("name", MODELS)
def test_delayed_values_are_those_of_plain_construction(name):
    """Bit for bit, and the generator is where it would have been."""
    smp.init({})
    want, want_next = made(MODELS[name], 3, delayed=False)
    model, got_next = made(MODELS[name], 3, delayed=True)
    assert all(p.is_meta for p in model.parameters()), "values were made at once"
    parameters = list(model.parameters())
    torch.manual_seed(77)

    smp.DistributedModel(model)

    assert torch.equal(got_next, want_next)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert_same(model.state_dict(), want.state_dict())
    for (path, buffer), (_, other) in zip(
        model.named_buffers(), want.named_buffers(), strict=True
    ):
        assert_same(buffer, other, path)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in want.parameters()
    ]
    if name == "odd":
        assert_same(model.positions, want.positions)
        assert model.output.weight is model.embedding.weight
        assert [d.p for d in model.drops] == [d.p for d in want.drops]


@on_ranks(1)
def test_values_have_the_default_dtype_of_their_construction():
    """It is another one when the values are made."""
    smp.init({})
    torch.set_default_dtype(torch.float64)
    want, _ = made(Odd, 3, delayed=False)
    model, _ = made(Odd, 3, delayed=True)
    torch.set_default_dtype(torch.float32)

    smp.DistributedModel(model)

    assert_same(model.state_dict(), want.state_dict())
    assert torch.get_default_dtype() == torch.float32


class Sharing(nn.Module):
    """Tensors that are no ties by name, but show the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3))
        self.tied = nn.Parameter(self.table.data)
        self.register_buffer("counts", torch.rand(4))
        self.register_buffer("first", self.counts[:2])
        self.rest = self.counts[2:]


@on_ranks(1)
@pytest.mark.parametrize("delayed", [False, True])
def test_what_shows_the_same_memory_still_does(delayed):
    smp.init({})
    model, _ = made(Sharing, 3, delayed)

    smp.DistributedModel(model)

    with torch.no_grad():
        model.table[1, 2] = 5
        model.counts.copy_(torch.arange(4.0))
    assert model.tied[1, 2] == 5
    assert (model.first.tolist(), model.rest.tolist()) == ([0, 1], [2, 3])


@on_ranks(2)
def test_each_rank_makes_its_own_parameters_alone():
    """After the partition: own values, no memory for others; training equals undelayed."""
    init(2)
    states = []
    for delayed in (False, True):
        torch.manual_seed(5)
        with smp.delay_param_initialization(enabled=delayed):
            module = type(make_model(pin=False))()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = distributed(module, rank_of(2))
        step = smp.step(train_step)
        for number in range(2):
            optimizer.zero_grad()
            step(model, batch_of(number))
            optimizer.step()
        local = {id(p) for p in model.local_parameters()}
        for parameter in module.parameters():
            with torch._C.DisableTorchFunctionSubclass():
                held = parameter.untyped_storage().nbytes()
            assert (held > 0) == (id(parameter) in local)
            assert parameter.device.type == "cpu"
        states.append(model.state_dict())
    assert_same(states[1], states[0])


@on_ranks(2)
@pytest.mark.filterwarnings("ignore:.*tracing on zeros")  # an expert asks for its tokens
@pytest.mark.parametrize("name", ["gpt2", "bert", "mixtral", "t5"])
def test_models_of_transformers_train_from_delayed_values(name):
    """transformers' own initialisation, tied weights, the automatic partition."""
    init(2)
    real = REAL[name](seed=0)
    losses = []
    for delayed in (False, True):
        torch.manual_seed(2)
        with smp.delay_param_initialization(enabled=delayed):
            module = type(real.model)(real.model.config)
        model = smp.DistributedModel(module)
        batch = real.make_batch(4, torch.Generator().manual_seed(1))
        torch.manual_seed(8)
        out = smp.step(real.step)(model, *batch)
        loss = out[0] if isinstance(out, tuple) else out
        losses.append(loss.reduce_mean())
    assert torch.equal(losses[0], losses[1])


@on_ranks(2)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_with_a_mask_trains_from_delayed_values(attention):
    """It looks at the values of the mask, on the device of its parameters."""
    init(2)
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        attn_implementation=attention,
    )

    @smp.step
    def step(model, tokens, mask, labels):
        loss = model(input_ids=tokens, attention_mask=mask, labels=labels).loss
        model.backward(loss)
        return loss

    tokens, labels = torch.arange(32).view(4, 8), torch.tensor([0, 1, 0, 1])
    mask = torch.ones_like(tokens)
    mask[2:, 5:] = 0
    losses = []
    for delayed in (False, True):
        torch.manual_seed(2)
        with smp.delay_param_initialization(enabled=delayed):
            module = BertForSequenceClassification(config)
        model = smp.DistributedModel(module)
        torch.manual_seed(8)
        losses.append(step(model, tokens, mask, labels).reduce_mean())
    assert torch.equal(losses[0], losses[1])


@on_ranks(2)
@pytest.mark.parametrize("partial", [False, True])
def test_a_checkpoint_loads_into_a_delayed_model(partial, tmp_path):
    """Before the partition: keys and shapes are checked at once, values come later."""
    init(2)
    model = smp.DistributedModel(make_model(seed=1))
    step = smp.step(train_step)
    step(model, batch_of(0))
    saved = model.local_state_dict() if partial else model.state_dict()

    with smp.delay_param_initialization():
        module = make_model(seed=2)
    other = smp.DistributedModel(module)
    other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"first"):
        given = saved.items()
        other.load_state_dict({n: value for n, value in given if not n.startswith("first")})
    with pytest.raises(RuntimeError, match="'embedding.weight' has no values yet"):
        smp.save_checkpoint(tmp_path, "early", partial, other)
    other.eval()
    with torch.no_grad():
        smp.step(lambda m, tokens: m(tokens))(other, batch_of(0))

    assert_same(other.state_dict(), model.state_dict())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 1.5))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


def test_a_tensor_made_alone_is_converted_in_a_later_module():
    with smp.delay_param_initialization():
        weight = nn.Parameter(torch.full((2,), 1.5))
    module = nn.Module()
    module.weight = weight
    module.half()
    assert is_delayed(module.weight)
    materialize(module, lambda name: True, lambda path: True)
    assert torch.equal(module.weight, torch.full((2,), 1.5, dtype=torch.float16))


@pytest.mark.parametrize("wrapped", [False, True], ids=["before it is wrapped", "after"])
@pytest.mark.parametrize(("ranks", "degree"), [(2, 1), (4, 2)])
def test_a_model_is_moved_and_converted_before_it_has_values(ranks, degree, wrapped):
    call_on_ranks(ranks, check_conversion, degree, wrapped)


def check_conversion(degree, wrapped):
    smp.init({"pipeline_parallel_degree": 2, "tensor_parallel_degree": degree})
    torch.manual_seed(1)
    plain = Scaled().half().double()
    torch.manual_seed(1)
    with smp.delay_param_initialization(), smp.tensor_parallelism():
        net = Scaled()
    model = smp.DistributedModel(net) if wrapped else net
    assert model.half().to("cpu").double() is model
    kinds = {tensor.dtype for tensor in (*model.parameters(), *model.buffers())}
    assert kinds == {torch.float64}
    model.last.bias.requires_grad_(False)
    model = model if wrapped else smp.DistributedModel(net)
    assert not net.last.bias.requires_grad

    train = smp.step(mean_square)

    x = torch.randn(4, 6, dtype=torch.float64)
    loss = train(model, x).reduce_mean()
    torch.testing.assert_close(loss, plain(x).square().mean().detach())
    kinds = {tensor.dtype for tensor in (*model.local_parameters(), *model.local_buffers())}
    assert kinds == {torch.float64}


@on_ranks(1)
def test_a_model_is_converted_behind_the_context():
    """Its buffers, too, each as it would have been; gradients are wanted of what they were."""
    smp.init({})

    def converted(delayed: bool) -> nn.Module:
        model, _ = made(Odd, 3, delayed=delayed)
        model.embedding.bfloat16()  # and so the tied output
        model.half().to(torch.float64).norm.requires_grad_(False)
        return model

    want, model = converted(False), converted(True)
    assert all(p.is_meta for p in model.parameters())
    smp.DistributedModel(model)
    assert_same(model.state_dict(), want.state_dict())
    assert model.output.weight is model.embedding.weight
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in want.parameters()
    ]


def test_what_cannot_be_recorded_is_named():
    """The operator and the module."""

    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))
            with torch.no_grad():
                torch.nonzero(self.weight, out=torch.empty(0, dtype=torch.int64))

    with (
        pytest.raises(
            RuntimeError, match=r"aten\.nonzero\.out in .*Strange cannot be recorded"
        ),
        smp.delay_param_initialization(),
    ):
        Strange()


def test_model_creation_sets_the_dtype_and_takes_what_it_does_not_know():
    with smp.model_creation(dtype=torch.bfloat16, zero_init=False, flash_attention=True):
        inside = nn.Linear(2, 2)

    assert inside.weight.dtype is torch.bfloat16
    assert nn.Linear(2, 2).weight.dtype is torch.float32
    with smp.tensor_parallelism(enabled=False, fused_softmax=True):
        smp.set_tensor_parallelism(inside, False)


@pytest.mark.parametrize("split", [False, True])
def test_model_creation_ends_with_its_block_also_after_an_error(split):
    smp.reset()
    with (
        pytest.raises(ArithmeticError),
        smp.model_creation(tensor_parallelism=split, dtype=torch.float64),
    ):
        inside = nn.Linear(2, 2)
        raise ArithmeticError
    outside = nn.Linear(2, 2)

    assert (inside.weight.dtype, outside.weight.dtype) == (torch.float64, torch.float32)
    marked = [marking.configuration(module) is not None for module in (inside, outside)]
    assert marked == [split, False]


def test_model_creation_marks_with_its_settings_what_is_to_be_split():
    smp.reset()
    marks = []
    for wanted in (True, False):
        with smp.model_creation(tensor_parallelism=wanted, fused_bias_gelu=True):
            marks.append(nn.Linear(2, 2))
        assert marks[-1].weight.dtype is torch.float32
    assert [marking.configuration(m) for m in marks] == [{"fused_bias_gelu": True}, None]


# --------------------------------------------------------- without ranks: what is recorded


def filled(model: nn.Module) -> nn.Module:
    """With all its values, as the only rank makes them."""
    materialize(model, lambda name: True, lambda path: True)
    return model


class OwnDtypes(nn.Module):
    """Draws of several dtypes, one after the other, from two generators."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 5)
        self.wide = nn.Linear(20, 5, dtype=torch.float64)
        self.normal = nn.Parameter(torch.empty(33, dtype=torch.float64).normal_())
        self.narrow = nn.Parameter(torch.empty(33, dtype=torch.float16).uniform_())
        self.own = nn.Parameter(nn.init.normal_(torch.empty(17), generator=generator))
        self.again = nn.Parameter(torch.rand(4, generator=generator, dtype=torch.float64))
        self.whole = nn.Parameter(torch.randint(9, (5,)), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(6), requires_grad=False)
        self.last = nn.Parameter(torch.randn(3))


def test_draws_are_of_a_parameters_own_dtype_and_generator():
    """Both generators are where they would have been, and making the values moves none."""
    models, following = [], []
    for delayed in (False, True):
        generator = torch.Generator().manual_seed(7)
        model, more = made(lambda g=generator: OwnDtypes(g), 3, delayed)
        assert all(p.is_meta == delayed for p in model.parameters())
        torch.manual_seed(77)
        own = generator.get_state()
        filled(model)
        assert torch.equal(generator.get_state(), own)
        following.append((more, torch.rand(3), torch.rand(3, generator=generator)))
        models.append(model)
    assert_same(following[1], following[0])
    assert_same(models[1].state_dict(), models[0].state_dict())


OUTSIDE = torch.arange(8.0)


class Deciding(nn.Module):
    """Asks for values while it is made, and uses a tensor that is not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        with torch.no_grad():
            self.weight.add_(OUTSIDE)
            self.weight[2:4] = OUTSIDE[:2]
        self.chosen = torch.nonzero(self.weight > 4.5).flatten().tolist()
        self.unique = nn.Parameter(torch.unique(self.weight))
        self.image = nn.Conv2d(3, 2, 4)


def test_what_needs_values_gets_those_so_far():
    torch.manual_seed(3)
    want = Deciding()
    model, _ = made(Deciding, 3, delayed=True)
    assert model.chosen == want.chosen
    assert is_delayed(model.weight)
    for _ in range(2):
        value = value_of(model.weight)
        assert torch.equal(value, want.weight) and not value.requires_grad
        value.zero_()  # its memory is its own
    given = value_of(want.weight)
    given.zero_()
    assert torch.equal(model.unique, want.unique) and want.weight.any()
    for module in (want, model):
        module.to(memory_format=torch.channels_last).double()
    filled(model)
    assert_same(model.state_dict(), want.state_dict())


class Noted(nn.Module):
    """Tensors with what scripts put on them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shown", torch.rand(3))
        self.shown.note = "mine"
        self.learned = torch.rand(2).requires_grad_()
        self.inner = nn.Module()
        self.inner.register_buffer("shown", self.shown)
        self.left = torch.empty(2, device="meta")
        self.frozen = nn.Parameter(torch.rand(3, 2).t(), requires_grad=False)


def test_what_a_script_put_on_its_tensors_stays():
    want = Noted()
    model, _ = made(Noted, 3, delayed=True)
    assert is_delayed(model.shown) and not is_delayed(model.left)
    filled(model)
    assert model.inner.shown is model.shown and model.shown.note == "mine"
    assert model.learned.requires_grad and not model.shown.requires_grad
    assert model.learned.device.type == "cpu" and model.left.is_meta
    assert not model.frozen.requires_grad and model.frozen.stride() == want.frozen.stride()


def test_what_another_rank_owns_has_its_form_and_no_memory():
    want = Noted()
    model, _ = made(Noted, 3, delayed=True)
    materialize(model, lambda name: name != "frozen", lambda path: path != "inner")
    assert model.frozen.untyped_storage().nbytes() == 0
    assert (model.frozen.shape, model.frozen.stride()) == ((2, 3), want.frozen.stride())
    assert model.frozen.device.type == "cpu" and not model.frozen.requires_grad
    assert is_delayed(model.inner.shown) and not is_delayed(model.shown)


def test_contexts_within_one_another_end_with_the_outermost():
    with pytest.raises(KeyError), smp.delay_param_initialization():
        with smp.delay_param_initialization():
            first = nn.Linear(2, 2)
        with smp.delay_param_initialization(enabled=False):
            second = nn.Linear(2, 2)
        third = nn.Linear(2, 2)
        raise KeyError
    after = nn.Linear(2, 2)
    delayed = [is_delayed(layer.weight) for layer in (first, second, third, after)]
    assert delayed == [True, True, True, False]
