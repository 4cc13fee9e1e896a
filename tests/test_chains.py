"""Spec: schedules.md, section 2: calls that feed each other go in one request, verified.

Each case runs some steps, so that links are learned, used and perhaps missed; the bits are
those of the cut loop in every step.
"""

import copy
import os
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import smp
from smp import _core
from smp.modules import placeholders
from tests.models.modules import in_backward
from tests.models.partition import distributed
from tests.models.steps import model_outputs
from tests.ranks import on_ranks
from tests.reference.compare import assert_same_bits
from tests.test_remote_calls import WIDTH, Run, rows, train

STEPS = 4


def on_others(net: nn.Module, owners: Sequence[int]) -> smp.DistributedModel:
    """The model of ``net`` on pp_rank 0, whose blocks have these owners."""
    return distributed(net, {"": 0} | {f"blocks.{i}": owner for i, owner in enumerate(owners)})


def raises(gradient):
    raise ValueError("of a block")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.drop, self.kind = nn.Dropout(0.2), ""
        self.count = 0

    def forward(self, x, mask=None, scale=1.0, **options):
        if self.kind == "changes":
            x.mul_(2.0)
        if self.kind == "raises":
            raise ValueError("of a block")
        if self.kind == "raises in its backward":
            x = in_backward(x, raises)
        if self.kind == "sets":
            self.scale = float(x.detach().sum())
        if self.kind == "counts":
            self.count = self.count + 1
        if "cache" in options:
            options["cache"].append(torch.tanh(x))
            mask = options["cache"][0] + mask
        y = torch.tanh(self.linear(self.norm(x))) * scale
        y = self.drop(y if mask is None else y * mask) + x
        return (y, mask) if options.get("pairs") else y


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Blocks(nn.Module):
    """Calls its blocks, all of another rank, one after another, in one of several ways."""

    def __init__(self, way: str, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.way, self.number = way, 0
        self.is_odd = True  # the way is taken
        self.memory = torch.zeros(8, WIDTH)

    def forward(self, x):
        mask = (x.detach() > 0).to(x.dtype)
        kept, cache, masks = [], [], [mask, mask * 0.5]
        dropped = int(1000 * abs(x.detach().sum())) % 4  # another one in each microbatch
        for i, block in enumerate(self.blocks):
            late = self.is_odd and self.number >= 2 and i == 2  # links are known by then
            if self.way == "pairs":
                x, mask = block(x, mask, pairs=True)
            elif late if self.way == "drops" else self.way == "drops others" and dropped == i:
                continue
            elif self.way == "another argument" and late:
                x = block(x, mask + 1)
            elif self.way == "another value" and late:
                x = block(x, mask, scale=0.5)
            elif self.way == "in place" and late:
                x = block(x.mul_(2.0), mask)
            elif self.way == "mask in place" and late:
                x = block(x, mask.add_(1.0))
            elif self.way == "draws" and late:
                x = block(x, mask * torch.rand(()))
            elif self.way == "hooked" and late:
                x.register_hook(lambda gradient: gradient * 2)
                x = block(x, mask)
            elif self.way == "hooked too late" and late:
                before, x = x, block(x, mask)
                before.retain_grad() if self.number % 2 else before.register_hook(print)
            elif self.way == "catches":
                try:
                    x = block(x, mask)
                except ValueError:
                    x = x * 2
            elif self.way == "no grad" and late:
                with torch.no_grad():
                    x = x + block(x, mask)
            elif self.way == "keeps":
                x = block(x, mask)
                kept.append(x)
            elif self.way == "keywords":
                x = block(mask=mask, x=x, scale=0.5)
            elif self.way in ("shares", "uses what it shares"):
                wide = mask if i else self.wide(mask)
                mask = wide
                x = block(x, wide)
                if self.way == "uses what it shares" and late:
                    x = x + wide
            elif self.way == "touches" and late:
                touched = x * 2
                x = block(x, mask) + touched
            elif self.way == "touches later":
                kept.append(x)
                x = block(x, mask)
                if late:
                    x = x + kept[1] + kept[2]
            elif self.way == "cache":
                x = block(x, mask, cache=cache)
            elif self.way.startswith("aliases"):
                given = x[:, 0:]
                if late and self.way.endswith("own function"):
                    given = Reversed.apply(x)
                elif late and self.way.endswith("no grad"):
                    with torch.no_grad():
                        given = x[:, 0:]
                elif late and self.way.endswith("hook"):
                    given.register_hook(lambda gradient: gradient * 2)
                elif late and self.way.endswith("in place"):
                    given.mul_(2.0)
                elif late and self.way.endswith("part"):
                    given = given[:, :1].expand(given.shape)
                before, x = x, block(given.view(-1, WIDTH), mask)
                if late and self.way.endswith("used"):
                    x = x + given * 2
                elif late and self.way.endswith("too late"):
                    before.retain_grad() if self.number % 2 else given.retain_grad()
            elif self.way == "detaches" and late:
                x.detach_()
                x = block(x, mask)
            elif self.way == "requires grad" and late:
                x = block(x, mask.requires_grad_())
            elif self.way == "the same memory again" and i == 0:
                x = block(self.memory[: len(x)].copy_(x.detach()), mask)
            elif self.way == "itself for a mask":
                x = block(x, x)
            elif self.way.startswith("two masks"):
                mine = masks[i % 2]
                if late and self.way.endswith("in place"):
                    mine.add_(1.0)
                elif late and self.way.endswith("another one"):
                    mine = mine * 2.0
                elif late and self.way.endswith("with grad"):
                    mine = masks[i % 2] = self.wide(mine)
                x = block(x, mine)
            else:
                x = block(x, mask)
        if self.way == "cache":
            return x + sum(cache)
        return sum(kept) if self.way == "keeps" else x


WAYS = (
    "plain", "pairs", "keywords", "drops", "drops others", "another argument", "another value",
    "in place", "mask in place", "draws", "hooked", "no grad", "keeps", "changes", "raises",
    "catches",
    "shares", "uses what it shares", "touches", "touches later", "cache", "sets",
    "itself for a mask",
    "two masks", "two masks, in place", "two masks, another one", "two masks, with grad",
    "detaches", "requires grad",
    "hooked too late",
    "aliases", "aliases, own function", "aliases, no grad", "aliases, hook",
    "aliases, in place", "aliases, part", "aliases, used", "aliases, hooked too late",
)  # fmt: skip


def set_on_all(run: Run, name: str, value: object, block: int | None = None) -> None:
    for net in (run.model.module, run.cut, run.plain):
        target = net.far if block is None else net.far.blocks[block]
        setattr(target, name, value)


def check_way(way: str, owners: tuple[int, ...], **config) -> None:
    """Some steps with blocks on these pp_ranks."""
    net = Blocks(way, len(owners))
    run = Run(net, {f"far.blocks.{i}": at for i, at in enumerate(owners)}, **config)
    for number in range(STEPS):
        set_on_all(run, "number", number)
        if way in ("changes", "raises", "catches", "sets") and number >= 2:
            set_on_all(run, "kind", "raises" if way == "catches" else way, block=2)
        if way.endswith(("raises", "too late")) and number >= 2:
            late = RuntimeError, "module 'far.blocks.2' has got"
            error, text = (ValueError, "of a block") if way == "raises" else late
            with pytest.raises(error, match=text):
                smp.step(train)(run.model, rows(6, number))
        else:
            run.check(train, rows(6, number), plain=False)


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_chain_has_the_bits_of_single_calls(way):
    check_way(way, (1, 1, 1, 1))


@on_ranks(3)
@pytest.mark.sample(14)
@pytest.mark.parametrize("owners", [(1, 1, 2, 2), (1, 2, 1, 2)], ids=["two", "in turn"])
@pytest.mark.parametrize("way", WAYS)
def test_so_has_one_that_is_passed_from_owner_to_owner(way, owners):
    check_way(way, owners)


@on_ranks(2)
@pytest.mark.stress
def test_so_have_more_calls_in_a_row_than_one_chain_takes():
    check_way("plain", (1,) * 70)


@on_ranks(3)
@pytest.mark.parametrize("owners", [(1, 1, 1, 2), (1, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["raises", "raises in its backward"])
def test_an_exception_in_a_chain_names_its_module(kind, owners):
    run = Run(Blocks("plain"), {f"far.blocks.{i}": at for i, at in enumerate(owners)})
    for number in range(2):
        run.check(train, rows(6, number), plain=False)
    for block in range(4):
        set_on_all(run, "kind", kind, block)
        with pytest.raises(ValueError, match="of a block") as caught:
            smp.step(train)(run.model, rows(6, 2))
        if smp.pp_rank() != owners[block]:
            assert f"module 'far.blocks.{block}'" in caught.value.__notes__[0]
        set_on_all(run, "kind", "", block)
        for net in (run.model, run.cut):  # which may hold a part of the failed step's
            net.zero_grad()
        run.check(train, rows(6, 3 + block), plain=False)


# Ways that one tp_rank may take alone: the calls with collectives stay the same.
ALONE = (
    "plain", "another argument", "another value", "in place", "mask in place", "draws",
    "hooked", "keeps", "changes", "uses what it shares", "touches", "touches later", "cache",
    "sets", "two masks, in place", "two masks, another one", "the same memory again",
)  # fmt: skip


def bits_of_blocks(
    way: str, odd: tuple[int, ...], at: int = 2, split: int = 2, **config: Any
) -> tuple[list[torch.Tensor], int]:
    """Losses and gradients of some steps, in which these tp_ranks or replicas go that way.

    Args:
        at: the block that changes its argument, sets an attribute, or raises.
        split: into so many; 1: whole blocks, with replicas of the model.

    Returns:
        them, and the number of the last step's messages.
    """
    smp.reset()
    smp.init({"tensor_parallel_degree": split, "microbatches": 3, "ddp": True, **config})
    torch.manual_seed(0)
    with smp.tensor_parallelism(enabled=split > 1):
        net = Blocks(way)
    count = len(net.blocks)
    model = on_others(net, [1 + i * (smp.pp_size() - 1) // count for i in range(count)])
    block = model.module.blocks[at]
    mine = smp.dp_rank()
    model.module.is_odd = mine in odd

    step = smp.step(model_outputs)
    found = []
    for number in range(STEPS):
        model.module.number = number
        if way in ("changes", "sets", "raises") and number >= 2 and mine in odd:
            block.kind = way
        torch.manual_seed(100 * number + mine)
        before = _core.counters()["messages"]
        found += [out.clone() for out in step(model, torch.randn(3 + mine, WIDTH))]
        found += [p.grad.clone() for p in model.local_parameters() if p.grad is not None]
    return found, _core.counters()["messages"] - before


def check_blocks(way: str, odd: tuple[int, ...], **config: Any) -> None:
    chained, few = bits_of_blocks(way, odd, **config)
    single, many = bits_of_blocks(way, odd, **config, fast_mode=False)
    for one, other in zip(chained, single, strict=True):
        assert torch.equal(one, other)
    if way == "plain" and smp.rank() == 0:
        assert few < many


@on_ranks(4)
@pytest.mark.sample(12)
@pytest.mark.parametrize("way", ALONE)
def test_split_blocks_are_chains_on_all_tp_ranks_or_on_none(way):
    check_blocks(way, (1,), pipeline_parallel_degree=2)


@on_ranks(4)
@pytest.mark.parametrize("way", ["plain", "changes"])
def test_split_blocks_whose_tp_ranks_go_the_same_way(way):
    check_blocks(way, (0, 1), pipeline_parallel_degree=2)


@on_ranks(4)
@pytest.mark.parametrize("way", ["plain", "drops others", "touches", "changes"])
def test_a_replicas_chains_are_its_own(way):
    check_blocks(way, (1,), split=1, pipeline_parallel_degree=2)


@on_ranks(4)
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_of_a_split_block_on_one_tp_rank_is_raised_on_all(at):
    with pytest.raises(ValueError, match="of a block"):
        bits_of_blocks("raises", (1,), at, pipeline_parallel_degree=2)


@on_ranks(4)
def test_a_split_block_left_out_by_one_tp_rank_fails_the_step_as_without_chains():
    with pytest.raises(RuntimeError, match="do not make the same calls.*module 'blocks.[23]"):
        bits_of_blocks("drops", (1,), pipeline_parallel_degree=2)


@on_ranks(6)
@pytest.mark.stress  # six ranks are long in starting
@pytest.mark.parametrize("way", ["plain", "touches later", "changes"])
def test_so_are_those_of_several_owners(way):
    check_blocks(way, (1,), pipeline_parallel_degree=3)


@on_ranks(2)
@pytest.mark.parametrize("block", [0, 2])
def test_a_call_that_counts_for_the_first_time_counts_once(block):
    run = Run(Blocks("plain"), tuple(f"far.blocks.{i}" for i in range(4)), microbatches=1)
    for number in range(STEPS):
        if number == 2:
            set_on_all(run, "kind", "counts", block=block)
        run.check(train, rows(6, number), plain=False)
    if smp.pp_rank() == 1:
        assert run.model.module.far.blocks[block].count == run.cut.far.blocks[block].count == 2


@on_ranks(2)
def test_calls_of_a_chain_may_be_checkpointed_by_their_owner():
    run = Run(Blocks("plain"), tuple(f"far.blocks.{i}" for i in range(4)))
    for block in run.model.module.far.blocks:
        smp.set_activation_checkpointing(block)
    for number in range(STEPS):
        run.check(train, rows(6, number), plain=False)


@on_ranks(2)
def test_a_chain_is_one_request():
    sent, forwards = {}, {}
    for fast in (False, True):
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "fast_mode": fast})
        torch.manual_seed(0)
        net = Blocks("plain")
        model = on_others(net, [1] * len(net.blocks))

        @smp.step
        def step(model, x):
            model.backward(model(x).square().mean())

        for _ in range(3):
            before = _core.counters()
            step(model, torch.randn(8, WIDTH, requires_grad=True))
            after = _core.counters()
        sent[fast] = {name: after[name] - before[name] for name in ("messages", "bytes")}
        begun = [event for event in _core.timeline() if event[2:4] == (0, 0)]
        forwards[fast] = sorted((at, entry) for *_, at, entry, _ in begun)
        rank = smp.pp_rank()
        smp.shutdown()
    if rank == 1:  # all calls of a chain are in the timeline
        assert forwards[True] == forwards[False]
    if rank == 0:
        assert sent[True]["messages"] < 0.55 * sent[False]["messages"]
        assert sent[True]["bytes"] < 0.55 * sent[False]["bytes"]


class Labelled(nn.Module):
    """Blocks of another rank, and a head there, which gets the root's own argument."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head, self.nested = Block(), nested

    def forward(self, x, labels):
        mask = torch.ones_like(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x, labels["of"][1] if self.nested else labels)


@on_ranks(2, 3)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_an_argument_of_the_root_goes_ahead_to_the_last_call_of_a_chain(nested, changes):
    bits, messages = {}, {}
    for fast in (False, True):
        smp.init({"pipeline_parallel_degree": -1, "microbatches": 2, "fast_mode": fast})
        torch.manual_seed(0)
        net = Labelled(nested)
        last = smp.pp_size() - 1
        owners = {"blocks.0": 1, "blocks.1": 1, "blocks.2": last, "head": last}
        model = distributed(net, {"": 0, **owners})

        @smp.step
        def step(model, x, labels, number):
            if changes and number == 2:
                labels = labels * 2
                with torch.no_grad():
                    x.mul_(2)
            if changes and number == 4:
                labels = nn.Parameter(labels, requires_grad=False)
            given = {"of": [x, labels]} if nested else labels
            loss = model(x, given).square().mean()
            model.backward(loss)
            return loss

        for number in range(5):
            x, labels = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
            before = _core.counters()["messages"]
            losses = step(model, x, labels, number)
            if number < 4:
                messages[fast] = _core.counters()["messages"] - before
        grads = [p.grad for p in model.local_parameters()]
        bits[fast] = [t.clone() for t in (losses.stack(), *grads) if t is not None]
        rank, size = smp.pp_rank(), smp.pp_size()
        smp.shutdown()
    for one, other in zip(bits[True], bits[False], strict=True):
        assert torch.equal(one, other)
    if rank == 0 and size == 2:  # one request of each microbatch; two would be 14
        assert messages[True] <= 10 < messages[False]


def compiled_sum(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know")
        return torch.compile(lambda one: (one * 2).sum(), backend="eager")(x)


LOOKS = {
    "repr": (lambda x: repr(x)[:40], True),
    "item": (lambda x: x.sum().item(), True),
    "tolist": (lambda x: x.tolist(), True),
    "numpy": (lambda x: x.numpy(force=True).sum(), True),
    "asarray": (lambda x: np.asarray(x.detach()).sum(), True),
    "deepcopy": (lambda x: copy.deepcopy(x.detach()).sum().item(), True),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)).sum().item(), True),
    "compiled code": (lambda x: compiled_sum(x).item(), True),
    "data": (lambda x: x.data.sum().item(), True),
    "bool": (lambda x: bool((x > 0).any()), True),
    "iteration": (lambda x: sum(row.sum().item() for row in x), True),
    "stack": (lambda x: torch.stack([x, x]).sum().item(), True),
    "dtype": (lambda x: x.to(torch.float32).sum().item(), True),
    "data_ptr": (lambda x: x.data_ptr() != 0, True),
    "known here": (
        lambda x: (x.shape, x.dtype, x.device, len(x), x.size(), x.stride(), x.requires_grad),
        False,
    ),
    "class": (lambda x: isinstance(x, torch.Tensor) and torch.is_tensor(x), False),
}


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.look, self.seen = None, []

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1 and self.look is not None:
                self.seen.append(self.look(x))
        return x


@on_ranks(2)
@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_a_placeholder_fetches_its_values_if_it_needs_them(name, monkeypatch):
    fetched = []
    fetch = placeholders.Placeholder.fetched
    monkeypatch.setattr(
        placeholders.Placeholder, "fetched", lambda self: fetched.append(self) or fetch(self)
    )
    look, needs_values = LOOKS[name]
    run = Run(Looks(), tuple(f"far.blocks.{i}" for i in range(3)), fast_mode=True)
    for number in range(3):
        if number == 2:
            set_on_all(run, "look", look)
        run.check(train, rows(6, number))
    seen, want = run.model.module.far.seen, run.cut.far.seen
    if smp.pp_rank() == 0:
        assert bool(fetched) == needs_values
        assert sorted(map(str, seen)) == sorted(map(str, want)) and len(seen) == 3


class Keeps(nn.Module):
    """Returns each block's output, too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return x, kept


def started(owners: tuple[int, ...], fast: bool) -> smp.DistributedModel:
    """A model with its blocks on these pp_ranks."""
    smp.reset()
    ranks = 1 + max(owners)
    smp.init({"pipeline_parallel_degree": ranks, "microbatches": 3, "fast_mode": fast})
    torch.manual_seed(0)
    return on_others(Keeps(), owners)


@on_ranks(3)
@pytest.mark.parametrize("use", ["none", "after the backward", "after the step"])
def test_kept_outputs_stay_on_their_owners_until_a_use(use, monkeypatch):
    fetch, fetched = _core.fetch_outputs, []
    monkeypatch.setattr(
        _core, "fetch_outputs", lambda call, at: fetched.append(len(at)) or fetch(call, at)
    )

    @smp.step
    def step(model, x):
        out, kept = model(x)
        model.backward(out.square().mean() + out.sum())
        if use == "after the step":
            return kept
        return [one.detach() * 2 for one in kept if use == "after the backward"]

    found = []
    for fast in (False, True):
        model = started((1, 1, 1, 2, 2, 2), fast)
        for _ in range(3):
            kept = step(model, rows(8, 0).float())
        values = {str(i): one.concat() for i, one in enumerate(kept)}
        gradients = {n: p.grad.clone() for n, p in model.local_named_parameters()}
        found.append(values | gradients)
    assert_same_bits(*found)
    if smp.pp_rank() == 0:
        assert bool(fetched) == (use != "none")


@on_ranks(2)
@pytest.mark.parametrize("other", ["autocast", "evaluation", "a hook"])
def test_a_step_in_other_modes_has_chains_or_not_and_the_next_ones_have_them(other):
    @smp.step
    def step(model, x, autocast):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(x)[0]
        if model.training:
            model.backward(out.float().square().mean())
        return out

    found = []
    for fast in (False, True):
        model = started((1,) * 6, fast)
        values, counts = {}, []
        for number in range(10):
            late = number in (3, 4, 5)
            model.train(not late or other != "evaluation")
            if other == "a hook" and late:
                hook = model.module.blocks[2].register_forward_hook(lambda *_: None)
            before = _core.counters()["messages"]
            out = step(model, rows(6, number).float(), late and other == "autocast")
            values[f"out {number}"] = out.concat()
            counts.append(_core.counters()["messages"] - before)
            if other == "a hook" and late:
                hook.remove()
        found.append(values | {n: p.grad for n, p in model.local_named_parameters()})
    assert_same_bits(found[1], found[0])
    if smp.pp_rank() == 0:
        assert counts[-1] == counts[2], counts


HOOKS = {
    "looks at shapes": lambda block, seen: block.register_forward_hook(
        lambda module, args, out: seen.append((args[0].shape, out.shape))
    ),
    "looks at values": lambda block, seen: block.register_forward_hook(
        lambda module, args, out: seen.append((args[0].sum().item(), out.sum().item()))
    ),
    "takes keywords": lambda block, seen: block.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(len(kwargs)), with_kwargs=True
    ),
    "replaces the output": lambda block, seen: block.register_forward_hook(
        lambda module, args, out: out * 2
    ),
    "changes the output": lambda block, seen: block.register_forward_hook(
        lambda module, args, out: out.mul_(2)
    ),
    "replaces the argument": lambda block, seen: (
        block.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
        block.register_forward_hook(
            lambda module, args, out: seen.append(args[0].sum().item())
        ),
    ),
    "replaces the argument on its owner": lambda block, seen: (
        smp.pp_rank() and block.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
        block.register_forward_hook(
            lambda module, args, out: seen.append(args[0].sum().item())
        ),
    ),
    "in the backward": lambda block, seen: block.register_full_backward_hook(
        lambda module, inward, outward: (inward[0] * 2,)
    ),
}
WITHOUT_VALUES = "looks at shapes", "takes keywords"


@on_ranks(2, 3)
@pytest.mark.parametrize("name", HOOKS)
def test_a_block_with_hooks_is_in_a_chain_with_the_bits_of_single_calls(name):
    @smp.step
    def step(model, x):
        out = model(x)[0]
        model.backward(out.square().mean())
        return out

    found = []
    for hook, fast in ((None, True), (HOOKS[name], True), (HOOKS[name], False)):
        ranks = int(os.environ["OMPI_COMM_WORLD_SIZE"])
        model = started((1, 1, 1, ranks - 1, ranks - 1, ranks - 1), fast)
        values, seen = {}, []
        if hook is not None:
            hook(model.module.blocks[2], seen)
        for number in range(4):
            before = _core.counters()["messages"]
            torch.manual_seed(number)
            values[str(number)] = step(model, rows(6, number).float()).concat()
            messages = _core.counters()["messages"] - before
        values |= {n: p.grad for n, p in model.local_named_parameters()}
        found.append((values, sorted(map(str, seen)), messages))
    (_, _, fewest), (got, seen, few), (want, seen_singly, many) = found
    assert_same_bits(got, want)
    assert seen == seen_singly
    if smp.pp_rank() == 0:
        assert fewest <= few < many and (few == fewest or name not in WITHOUT_VALUES)


@on_ranks(3)
def test_kept_outputs_leave_their_owners_when_their_microbatch_is_done():
    smp.init({"pipeline_parallel_degree": 3, "microbatches": 4, "active_microbatches": 1})
    net = Keeps()
    model = on_others(net, [1 + i // 3 for i in range(len(net.blocks))])
    alive: list[int] = []
    for block in (net.blocks[0], net.blocks[3]):  # pre-hooks run on the owner
        block.register_forward_pre_hook(
            lambda *_: alive.append(sum(map(len, _core.kept_outputs()))) and None
        )

    @smp.step
    def step(model, x):
        out, kept = model(x)
        model.backward(out.square().mean())
        alive.append(sum(map(len, _core.kept_outputs())))
        return kept[0].shape

    for _ in range(3):
        alive.clear()
        step(model, rows(8, 0).float())
    assert alive == [0] * 4


OF_TRANSFORMERS = {
    "gpt2": (
        lambda cache: GPT2LMHeadModel(
            GPT2Config(
                n_layer=12, n_embd=16, n_head=2, vocab_size=99, use_cache=cache,
                bos_token_id=0, eos_token_id=0,
            )
        ),
        lambda net: net.transformer.h[6:],
    ),
    "llama": (
        lambda cache: LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=6, hidden_size=16, intermediate_size=32, vocab_size=99,
                num_attention_heads=2, use_cache=cache,
            )
        ),
        lambda net: [*net.model.layers[3:], net.model.norm, net.lm_head],
    ),
    "gemma2": (
        lambda cache: Gemma2ForCausalLM(
            Gemma2Config(
                num_hidden_layers=6, hidden_size=16, intermediate_size=32, vocab_size=99,
                num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=4,
                use_cache=cache,
            )
        ),
        lambda net: net.model.layers[2:],
    ),
    "t5": (
        lambda cache: T5ForConditionalGeneration(
            T5Config(
                num_layers=4, d_model=16, d_ff=32, d_kv=8, num_heads=2, vocab_size=99,
                decoder_start_token_id=0, use_cache=cache,
            )
        ),
        lambda net: [*net.encoder.block[1:], *net.decoder.block[1:]],
    ),
}  # fmt: skip


@on_ranks(2)
@pytest.mark.sample(4)
@pytest.mark.parametrize("cache", [False, True], ids=["", "with a cache"])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_blocks_of_transformers_are_chains_with_the_same_bits(name, cache):
    make, there = OF_TRANSFORMERS[name]
    found = []
    for fast in (False, True):
        smp.reset()
        # Later microbatches begin while the first one still learns.
        smp.init({"pipeline_parallel_degree": 2, "microbatches": 8, "fast_mode": fast})
        torch.manual_seed(0)
        net = make(cache)
        smp.set_partition(net, 0)
        for block in there(net):
            smp.set_partition(block, 1)
        model = smp.DistributedModel(net)

        @smp.step
        def step(model, ids):
            out = model(input_ids=ids, labels=ids)
            model.backward(out["loss"])
            return out["loss"]

        sent = []
        for _ in range(4):
            before = _core.counters()
            step(model, torch.arange(48).view(8, 6))
            after = _core.counters()
            sent.append([after[name] - before[name] for name in ("messages", "bytes")])
        found.append((sent, {n: p.grad.clone() for n, p in model.local_named_parameters()}))
    (relayed, want), (chained, got) = found
    assert_same_bits(got, want)
    if smp.pp_rank() == 0:
        least = [
            [min(counts) for counts in zip(*sent, strict=True)] for sent in (chained, relayed)
        ]
        assert all(a < 0.75 * b for a, b in zip(*least, strict=True)), (chained, relayed)
