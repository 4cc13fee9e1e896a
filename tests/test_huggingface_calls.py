"""How replaced models of Hugging Face are called: arguments, results, what is refused.

What is called is written down here, so that one process will do.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.compat import forms
from smp.compat.forms import additive, hidden_positions, language_model
from smp.nn.huggingface import generation, gpt2, gptj, gptneo, gptneox
from smp.tensor_parallel import group

pytest.importorskip("transformers")

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
LABELS = IDS + 10
LOGITS = torch.arange(12.0).view(2, 3, 2)
FORMS = {
    **gpt2.FORMS, **gptj.FORMS, **gptneo.FORMS, **gptneox.FORMS,
}  # fmt: skip


class Head:
    """Notes what it is called with."""

    def __init__(self, training: bool = False, cross: bool = False, **options: Any) -> None:
        self.options = SimpleNamespace(add_cross_attention=cross, rotary_dim=0)
        self.options.__dict__.update(options)
        self.training, self.config = training, SimpleNamespace()
        self.seen: list[tuple] = []

    def loss_and_logits(self, inputs: tuple, logits: bool, reduction: str) -> tuple:
        self.seen.append((inputs, logits, reduction))
        loss = None if inputs[-1] is None else torch.tensor(6.0)
        return loss, LOGITS if logits or loss is None else None


def called(kind: str, head: Head, **arguments: Any) -> Any:
    def forward(*_: Any) -> None:
        raise AssertionError

    return FORMS[kind].call(head, forward, {"input_ids": IDS, **arguments})


@pytest.mark.parametrize("kind", FORMS)
def test_arguments_come_in_their_order(kind):
    head = Head()
    seen, places = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.arange(3)[None]
    called(kind, head, labels=LABELS, attention_mask=seen, position_ids=places)
    (inputs, logits, reduction), *more = head.seen
    ids, mask, types, at, labels = inputs
    assert ids is IDS and labels is LABELS and at is places and types is None and not more
    assert mask.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert logits and reduction == "mean"
    called(kind, head)
    assert head.seen[1][0] == (IDS, None, None, None, None)


def test_what_gpt2_crosses_with():
    states = torch.randn(2, 4, 6)
    head = Head(cross=True)
    called("GPT2LMHeadModel", head, encoder_hidden_states=states, labels=LABELS)
    assert head.seen[-1][0][4:] == (states, None, LABELS)
    seen = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    called("GPT2LMHeadModel", head, encoder_hidden_states=states, encoder_attention_mask=seen)
    mask = head.seen[-1][0][5]
    assert mask.shape == (2, 1, 1, 4) and mask.flatten().tolist() == [0, 0, 0, -1e4, *[0] * 4]
    called("GPT2LMHeadModel", head, encoder_hidden_states=None, encoder_attention_mask=seen)
    assert head.seen[-1][0][4:] == (None, None, None)
    with pytest.raises(ValueError, match="encoder_hidden_states are passed to a model without"):
        called("GPT2LMHeadModel", Head(), encoder_hidden_states=states)
    called("GPT2LMHeadModel", Head(), encoder_hidden_states=None)


@pytest.mark.parametrize("kind", FORMS)
def test_results_are_the_originals(kind):
    out = called(kind, Head(), labels=LABELS)
    wanted = "CausalLMOutputWith"
    wanted += "CrossAttentions" if kind == "GPT2LMHeadModel" else "Past"
    assert type(out).__name__ == wanted
    assert out.loss == 6 and out.logits is LOGITS
    out = called(kind, Head(training=True), labels=LABELS)
    assert out.loss == 6 and out.logits is None  # no rank has them whole
    assert called(kind, Head(training=True)).logits is LOGITS
    assert called(kind, Head()).loss is None


def test_results_in_a_tuple_where_that_is_wanted():
    head = Head()
    loss, logits = called("GPTJForCausalLM", head, labels=LABELS, return_dict=False)
    assert loss == 6 and logits is LOGITS
    (logits,) = called("GPTJForCausalLM", head, return_dict=False)
    assert logits is LOGITS
    head.config.return_dict = False
    assert isinstance(called("GPTJForCausalLM", head), tuple)
    assert not isinstance(called("GPTJForCausalLM", head, return_dict=True), tuple)
    head.config.return_dict = True
    assert not isinstance(called("GPTJForCausalLM", head, return_dict=None), tuple)


def test_the_loss_of_a_part_of_a_batch():
    head = Head(training=True)
    out = called("GPTNeoXForCausalLM", head, labels=LABELS, num_items_in_batch=4)
    assert out.loss == 1.5 and head.seen[0][2] == "sum"
    assert called("GPTNeoXForCausalLM", head, num_items_in_batch=4).loss is None


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [(None, [0, 1, 2]), (0, [0, 1, 2]), (1, [2]), (2, [1, 2]), (torch.tensor([0, 2]), [0, 2])],
)
def test_logits_that_are_kept(keep, wanted):
    out = called("GPTNeoForCausalLM", Head(), logits_to_keep=keep)
    assert torch.equal(out.logits, LOGITS[:, wanted])
    assert called("GPTNeoForCausalLM", Head(True), labels=IDS, logits_to_keep=1).logits is None


NOT_HAD = (
    "past_key_values", "layer_past", "cache", "inputs_embeds", "head_mask", "cache_position",
    "output_attentions", "output_hidden_states", "shift_labels",
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_HAD)
@pytest.mark.parametrize("kind", FORMS)
def test_arguments_that_are_not_had_are_named(kind, name):
    given = True if name.startswith("output") else IDS
    refused = f"smp: {name} of a model that distributed modules have replaced is not built"
    with pytest.raises(NotImplementedError, match=refused) as error:
        called(kind, Head(), **{name: given})
    is_cache = name in ("past_key_values", "layer_past", "cache")
    assert ("pass use_cache=False, or split it" in str(error.value)) == is_cache
    for absent in (None, False, [None, None]):
        called(kind, Head(), **{name: absent})


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "GPTJForCausalLM", "GPTNeoForCausalLM"])
def test_token_types_that_would_be_looked_up_elsewhere_are_refused(kind):
    with pytest.raises(NotImplementedError, match="smp: token_type_ids of a model"):
        called(kind, Head(), token_type_ids=IDS)


def test_positions_of_a_rotated_model_count_from_0():
    counted = torch.arange(3)[None]
    for places, fits in (
        (counted, True), (counted.expand(2, 3), True), (counted + 1, False),
        (torch.stack([counted[0], counted[0].flip(0)]), False),
    ):  # fmt: skip
        called("GPTJForCausalLM", Head(), position_ids=places)  # which are embedded
        if fits:
            called("GPTJForCausalLM", Head(rotary_dim=2), position_ids=places)
            continue
        with pytest.raises(NotImplementedError, match="smp: position_ids that do not count"):
            called("GPTJForCausalLM", Head(rotary_dim=2), position_ids=places)
    called("GPTJForCausalLM", Head(rotary_dim=2))


def test_masks_in_hugging_faces_form():
    assert hidden_positions(None) is None
    seen = torch.tensor([[True, False]])
    assert hidden_positions(seen).tolist() == [[0, 1]]
    for shape in ((2, 1, 3, 3), (3,)):
        with pytest.raises(
            NotImplementedError, match=r"attention_mask of shape \[.*3\]: .* tak"
        ):
            hidden_positions(torch.ones(shape))
    like = torch.zeros(1, dtype=torch.float16)

    def check(mask: Tensor, shape: tuple[int, ...]) -> None:
        got = additive(mask, like)
        assert got is not None and got.dtype == like.dtype and got.shape == shape
        assert got.flatten().tolist() == [0, -10000]

    assert additive(None, like) is None
    check(seen, (1, 1, 1, 2))
    check(seen.int(), (1, 1, 1, 2))
    check(seen.float(), (1, 1, 1, 2))
    check(seen.view(1, 1, 2, 1), (1, 1, 2, 1))
    added = torch.randn(1, 1, 2, 2)
    assert additive(added, like) is added


OF_AN_ENCODER = [
    "head_mask", "encoder_hidden_states", "encoder_attention_mask", "past_key_values",
    "use_cache", "output_attentions", "output_hidden_states",
]  # fmt: skip


def test_an_encoder_is_called_as_the_original():
    hidden = torch.randn(2, 3, 4)
    seen: list[Any] = []

    def forward(inputs: tuple) -> tuple:
        seen.append(inputs)
        return (inputs[0] + 1, inputs[1])

    def encoded(**arguments: Any) -> Any:
        given = {"hidden_states": hidden, **arguments}
        return forms.encoder(None, forward, given, "BaseModelOutput")

    out = encoded()
    assert type(out).__name__ == "BaseModelOutput"
    assert torch.equal(out.last_hidden_state, hidden + 1) and seen[0] == (hidden, None)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    (alone,) = encoded(attention_mask=mask, return_dict=False)
    assert torch.equal(alone, hidden + 1)
    assert seen[1][1].flatten().tolist() == [0, 0, -1e4, 0, 0, 0]
    for name in OF_AN_ENCODER:
        with pytest.raises(NotImplementedError, match=f"smp: {name} of a model") as error:
            encoded(**{name: True})
        assert ("pass use_cache=False" in str(error.value)) == (name in OF_AN_ENCODER[3:5])


def test_a_language_model_by_itself():
    out = language_model(Head(), {"input_ids": IDS, "token_type_ids": LABELS})
    assert out.logits is LOGITS
    head = Head()
    language_model(head, {"input_ids": IDS, "token_type_ids": LABELS})
    assert head.seen[0][0][2] is LABELS


# ------------------------------------------------------------------------------ generate

SEARCHES = {  # as versions of transformers name them
    "beam search": ("_beam_search", "beam_search", "beam_sample"),
    "beam search in groups": ("_group_beam_search", "group_beam_search"),
    "beam search with constraints": ("_constrained_beam_search", "constrained_beam_search"),
    "contrastive search": ("_contrastive_search", "contrastive_search"),
    "assisted decoding": ("_assisted_decoding", "assisted_decoding"),
}


class Generates(nn.Module):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def _sample(self) -> None: ...


for _name in (name for names in SEARCHES.values() for name in names):
    setattr(Generates, _name, lambda self, *args, **kwargs: (args, kwargs))


@pytest.mark.parametrize("search", SEARCHES)
def test_searches_that_rearrange_a_split_cache_are_refused(search, monkeypatch):
    members = generation._together(Generates)
    model = nn.Sequential(Generates())
    for splits in (True, False):
        monkeypatch.setattr(generation, "takes_cache", lambda m, s=splits: s and m is model[0])
        for name in SEARCHES[search]:
            assert members[name](model, 1, use_cache=False) == ((1,), {"use_cache": False})
            for given in ({}, {"use_cache": None}, {"use_cache": True}):
                if not splits:
                    assert members[name](model, 1, **given) == ((1,), given)
                    continue
                words = rf"generate\(\) of Sequential by {search} rearranges .* use_cache=False"
                with pytest.raises(NotImplementedError, match=words):
                    members[name](model, 1, **given)
    assert "_sample" not in members


def test_generate_goes_on_until_all_ranks_have_finished():
    generate = generation._together(Generates)["generate"]
    for given in ({}, {"synced_gpus": False}, {"synced_gpus": None}):
        args, kwargs = generate(Generates(), 1, top_k=2, **given)
        assert args == (1,) and kwargs == {"synced_gpus": True, "top_k": 2}


@pytest.mark.parametrize("others", [(True, True), (True, False), (False, False)])
def test_some_ranks_have_unfinished_sequences(others, monkeypatch):
    """The rank's own is asked for in the name of generate, whatever becomes of it."""
    unfinished = generation._together(Generates)["_has_unfinished_sequences"]
    before, asked = group.called_path(), []

    def gather(mine: list[int]) -> list[list[int]]:
        asked.append((mine, group.called_path()))
        if len(asked) > 1:
            raise RuntimeError
        return [mine, *([int(one)] for one in others)]

    monkeypatch.setattr(group, "gather_numbers", gather)
    assert unfinished(Generates(), True, True, torch.device("cpu")) == (not all(others))
    assert asked == [([True], "generate")] and group.called_path() == before
    with pytest.raises(RuntimeError):
        unfinished(Generates(), False, True, torch.device("cpu"))
    assert group.called_path() == before
