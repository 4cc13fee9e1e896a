"""Modules whose class stands in for the user's are his own to every protocol of Python.

Spec: design.md, section 3: ``forward`` signature, ``isinstance``, pickling and
``state_dict`` keep working.
"""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import smp
from tests.models.modules import module_of
from tests.ranks import on_ranks

KINDS = ["remote", "a run", "gated", "checkpointed", "gated and checkpointed"]


class Plain(nn.Sequential):
    """Describes itself by its dict.  ``told`` lists which of its methods were called."""

    heard: list[type] = []

    def __init_subclass__(cls) -> None:
        cls.heard.append(cls)

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.note = "mine"
        self.told: list[str] = []


class Stateful(Plain):
    """Says what a pickle has of it."""

    def __getstate__(self):
        state = dict(self.__dict__)
        state["note"] = f"{state['note']}, saved"
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        self.told = ["__setstate__"]


class Reduced(Plain):
    """Says how it is made again."""

    def __reduce_ex__(self, protocol):
        return remake, (type(self), list(self), self.note)


class Copied(Plain):
    """Makes its copies itself."""

    def __copy__(self):
        return remake(type(self), list(self), self.note)

    def __deepcopy__(self, memo):
        return remake(type(self), copy.deepcopy(list(self), memo), self.note)


class Closing(Plain):
    """Ends something when it goes."""

    closed: list[str] = []

    def __del__(self):
        self.closed.append(self.note)


class Argued(Plain):
    """Is made by a ``__new__`` that wants arguments."""

    def __new__(cls, *modules: nn.Module, made_by: str = "a call"):
        made = super().__new__(cls)
        object.__setattr__(made, "made_by", made_by)
        return made

    def __getnewargs_ex__(self):
        return tuple(self), {"made_by": "a pickle"}


class Slotted(Plain):
    __slots__ = ("place",)

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.place = 7


def remake(cls: type, modules: list[nn.Module], note: str) -> nn.Module:
    made = cls(*modules)
    made.note, made.told = f"{note}, remade", ["remake"]
    return made


CLASSES = [Plain, Stateful, Reduced, Copied, Closing, Argued, Slotted]


@module_of(lambda inner: {"inner": inner, "first": nn.Linear(2, 2)})
def Root(self, x: torch.Tensor) -> torch.Tensor:
    return self.inner(self.first(x))


def partitioned(kind: str, cls: type) -> nn.Module:
    """An instance of the class that something stands in for on pp_rank 0."""
    smp.init({"pipeline_parallel_degree": 2})
    inner = cls(nn.BatchNorm1d(2, affine=False), nn.Tanh(), nn.Tanh())
    if kind.startswith("gated"):
        inner.register_buffer("calls", torch.zeros(()))
        inner.register_forward_pre_hook(count)
    if "checkpointed" in kind:
        smp.set_activation_checkpointing(inner, preserve_rng_state=False, strategy="group_2")
    root = Root(inner)
    smp.set_partition(root, 0)
    for module in inner.modules():
        smp.set_partition(module, int(kind == "remote"))
    if kind == "a run":
        smp.set_partition(inner[1], 1)
        smp.set_partition(inner[2], 1)
    model = smp.DistributedModel(root)

    @smp.step
    def step(model, x):
        if kind.startswith("gated"):  # it notes that a step switches it
            model.module.inner.eval()
            model.module.inner.train()
        loss = model(x).sum()
        model.backward(loss)
        return loss

    step(model, torch.arange(8.0).reshape(4, 2))
    return inner


def count(module: nn.Module, args: tuple) -> None:
    module.calls += 1


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", CLASSES)
def test_a_module_with_a_class_of_ours_is_one_of_the_users(kind, cls):
    inner = partitioned(kind, cls)
    plain = cls(nn.BatchNorm1d(2, affine=False), nn.Tanh(), nn.Tanh())
    if kind.startswith("gated"):
        plain.register_buffer("calls", inner.calls.clone())
        plain.register_forward_pre_hook(count)
    for module in plain.modules():
        smp.set_partition(module, 0)
    if smp.pp_rank() != 0:
        return
    assert type(inner) is not cls, "nothing stands in for it"
    assert isinstance(inner, cls) and type(inner).__bases__[0].__name__ == cls.__name__
    assert Plain.heard == [*CLASSES[1:], Cyclic], "the user's class was told of a subclass"
    assert type(inner).__name__ == cls.__name__
    assert type(inner).__qualname__ == cls.__qualname__
    assert type(inner).__module__ == cls.__module__ and type(inner).__doc__ == cls.__doc__
    assert inspect.signature(inner.forward) == inspect.signature(plain.forward)
    assert list(inner.state_dict()) == list(plain.state_dict())
    for name, buffer in plain.named_buffers():
        buffer.copy_(inner.get_buffer(name))
    Closing.closed.clear()

    for take in (
        copy.copy,
        copy.deepcopy,
        *(lambda m, p=p: pickle.loads(pickle.dumps(m, p)) for p in (2, 4)),
    ):
        got, want = take(inner), take(plain)

        copies = take in (copy.copy, copy.deepcopy)
        if "checkpointed" in kind and copies:
            assert type(got)._smp_checkpointed is cls
            assert got.__dict__.pop("_smp_checkpointing") == (False, False, "group_2")
        else:
            assert type(got) is cls
        assert list(got.__dict__) == list(want.__dict__)
        assert (got.note, got.told) == (want.note, want.told)
        assert getattr(got, "made_by", None) == getattr(want, "made_by", None)
        assert getattr(got, "place", None) == getattr(want, "place", None)
        assert repr(got) == repr(want)
        for (name, buffer), (other, its) in zip(
            got.named_buffers(), want.named_buffers(), strict=True
        ):
            assert name == other and torch.equal(buffer, its)
        del got, want
    assert len(Closing.closed) == (8 if cls is Closing else 0)  # as many as were made


class Cyclic(Plain):
    """Copies itself in the usual way, and is part of a cycle."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.box = [self]

    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        assert id(self) in memo and memo.get(id(self)) is memo[id(self)] is made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_of_a_cycle_leads_back_to_the_copy(kind):
    inner = partitioned(kind, Cyclic)
    memo: dict = {}
    copied, again = copy.deepcopy([inner, inner], memo)

    assert copied is again and copied is not inner
    assert copied.box[0] is copied and memo[id(inner)] is copied
