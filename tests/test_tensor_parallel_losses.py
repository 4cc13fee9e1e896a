"""Losses of heads whose classes are split equal those of the plain head.

The reference is ``tests/reference/whole_job.py``, in float64.
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import smp
from smp.nn import vocabulary_parallel_cross_entropy
from smp.slicing.slices import slices_of
from tests.models.modules import module_of
from tests.ranks import on_ranks
from tests.reference.whole_job import WholeJob, assert_near, split_over_all_ranks

CLASSES = 11


class Classifier(nn.Module):
    """Few channels, many classes; the loss is the model's."""

    def __init__(self, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 4)
        self.head = nn.Linear(4, CLASSES, bias=bias)
        self.loss = smp.nn.DistributedCrossEntropyLoss(self.head, **options)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.trunk(x)), labels)


class Tied(nn.Module):
    """A language model in small: the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.head = nn.Linear(4, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = torch.tanh(self.embedding(ids))
        return vocabulary_parallel_cross_entropy(self.head, hidden, labels)


@module_of(lambda: {"head": nn.Linear(5, CLASSES)})
def Alone(self, x: Tensor, labels: Tensor) -> Tensor:
    return vocabulary_parallel_cross_entropy(
        self.head, x, labels, ignore_index=3, label_smoothing=0.2
    )


def made(make: Any, dtype: torch.dtype = torch.float64, **marks: Any) -> Any:
    torch.set_default_dtype(dtype)
    torch.manual_seed(1)
    with smp.tensor_parallelism(**marks):
        return make()


def labelled(rank: int, step: int, samples: int | None = None) -> tuple[Tensor, Tensor]:
    """Other numbers of samples on each rank; one label in four does not count."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    shape = (samples or 2 + 2 * rank, 3)
    labels = torch.randint(0, CLASSES, shape, generator=generator)
    labels[:, 1] = -100
    return torch.randn(*shape, 5, generator=generator, dtype=torch.float64), labels


def own_loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    losses = model(x, labels)
    return losses if losses.dim() == 0 else losses.square().mean()  # by position: "none"


@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["sharp", "smoothed"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@on_ranks(2, 3)
def test_a_classifier_equals_the_plain_one(reduction, smoothing):
    split_over_all_ranks()
    net = made(
        lambda: Classifier(
            bias=reduction != "sum", reduction=reduction, label_smoothing=smoothing
        )
    )
    job = WholeJob(net, own_loss, labelled)
    assert slices_of(job.net.head.weight).axis == 0
    assert slices_of(job.net.trunk.weight).axis == 1
    job.run(3, max_norm=0.05)


def class_weights() -> Tensor:
    weights = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3)).double()
    weights[4] = 0
    return weights


class OwnClasses(nn.Module):
    """Each rank has the weights of its own classes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES)
        self.options = options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights, slices = class_weights(), slices_of(self.head.weight)
        if slices is not None:
            weights = slices.take(weights, smp.tp_rank())
        return vocabulary_parallel_cross_entropy(
            self.head, x, labels, weight=weights, **self.options
        )


@pytest.mark.parametrize("same", [False, True], ids=["own samples", "same samples"])
@pytest.mark.sample(2)
@on_ranks(2, 3)
def test_class_weights(same):
    """Of all classes, or of a rank's own; the mean is over the weights of what counts."""
    split_over_all_ranks(prescaled_batch=same)

    def batch(rank: int, step: int) -> tuple:
        x, labels = labelled(1 if same else rank, step)
        return x, labels.where(labels >= 0, 3)

    for reduction, smoothing, own in [
        *[("mean", 0.1, False), ("sum", 0.0, False), ("none", 0.1, False)],
        *[("mean", 0.0, True), ("sum", 0.1, True), ("none", 0.0, True)],
    ]:
        options = {"ignore_index": 3, "reduction": reduction, "label_smoothing": smoothing}
        of_all = functools.partial(Classifier, weight=class_weights(), **options)
        of_own = functools.partial(OwnClasses, **options)
        net = made(of_own, by_outputs=True) if own else made(of_all)
        job = WholeJob(net, own_loss, batch).run(2)
        assert slices_of(job.net.head.weight).axis == 0


@on_ranks(2)
def test_class_weights_in_other_dtypes():
    split_over_all_ranks()
    x, labels = labelled(smp.rank(), 0)
    for dtype in (torch.float32, torch.bfloat16):
        weights = class_weights().to(dtype)
        options = {"weight": weights, "label_smoothing": 0.1}
        plain = made(lambda: Classifier(**options), dtype)  # noqa: B023 - called at once
        model = smp.DistributedModel(made(lambda: Classifier(**options), dtype))  # noqa: B023
        assert model.state_dict().keys() == plain.state_dict().keys() > {"loss.weight"}
        got, want = model(x.to(dtype), labels), plain(x.to(dtype), labels)
        assert got.dtype == want.dtype
        rounding = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(got, want, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("tied", [False, True], ids=["by a mark", "tied"])
@on_ranks(2, 3)
def test_heads_that_are_split_otherwise(tied):
    split_over_all_ranks()

    def batch(rank: int, step: int) -> tuple:
        x, labels = labelled(rank, step)
        return (labels.abs() % CLASSES, labels) if tied else (x, labels.where(labels >= 0, 3))

    net = made(Tied) if tied else made(Alone, by_outputs=True)
    WholeJob(net, own_loss, batch).run(2, max_norm=0.05)


@on_ranks(2, 3)
def test_ranks_that_are_fed_the_same_batch():
    split_over_all_ranks(prescaled_batch=True)
    net = made(lambda: Classifier(label_smoothing=0.1))
    WholeJob(net, own_loss, lambda rank, step: labelled(1, step)).run(3, max_norm=0.05)


@pytest.mark.parametrize("owner", [0, 1])
@on_ranks(4, timeout_s=120)
def test_a_head_in_a_pipeline(owner):
    """The loss and the head it uses may be on different ranks."""
    smp.init({"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "microbatches": 3})
    net = made(Classifier)
    smp.set_partition(net.head, owner)
    smp.set_partition(net.loss, 0)
    job = WholeJob(net, own_loss, lambda rank, step: labelled(rank, step, 6)).run(
        2, max_norm=0.05
    )
    assert job.model.get_module_partition("head") == owner


class WithHidden(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        hidden = self.trunk(x)
        return [hidden, self.loss(hidden, labels)]


@on_ranks(2, 3)
def test_a_rank_may_leave_the_loss_out():
    split_over_all_ranks()

    def used(model: nn.Module, x: Tensor, labels: Tensor, uses: bool) -> Tensor:
        hidden, loss = model(x, labels)
        return loss if uses else hidden.square().mean()

    WholeJob(
        made(WithHidden), used, lambda rank, step: (*labelled(rank, step), rank != step)
    ).run(3)


@on_ranks(2, 3)
def test_a_checkpointed_loss():
    split_over_all_ranks()

    class Checkpointed(Classifier):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return checkpoint(self.loss, self.trunk(x), labels, use_reentrant=False)

    WholeJob(made(Checkpointed), own_loss, labelled).run(2)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_other_dtypes_give_what_the_plain_head_gives(dtype, autocast):
    split_over_all_ranks()
    x, labels = labelled(smp.rank(), 0)
    x = x.to(dtype)
    plain = made(Classifier, dtype)
    model = smp.DistributedModel(made(Classifier, dtype))
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            one.last = one(x, labels)
    assert model.last.dtype == plain.last.dtype
    rounding = 1e-5 if dtype == torch.float32 and not autocast else 0.02
    torch.testing.assert_close(model.last, plain.last, rtol=rounding, atol=rounding)


class Lengths(TorchDispatchMode):
    """The lengths of all axes of tensors that operators made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {
            size for t in tree_leaves(out) if isinstance(t, Tensor) for size in t.shape
        }
        return out


@on_ranks(2, 3)
def test_logits_of_all_classes_are_nowhere():
    """Neither in forward nor in backward has a tensor an axis of all classes."""
    split_over_all_ranks()
    net = made(Classifier)
    model = smp.DistributedModel(net)
    with Lengths() as lengths:
        model(*labelled(smp.rank(), 0)).backward()
    assert net.head.weight.size(0) in lengths.seen
    assert CLASSES not in lengths.seen


@on_ranks(2)
def test_a_label_that_is_no_class_is_an_error_on_all_ranks():
    split_over_all_ranks()
    model = smp.DistributedModel(made(Classifier))
    x, labels = labelled(smp.rank(), 0)
    if smp.rank() == 1:
        labels[1, 2] = CLASSES
    with pytest.raises(IndexError, match=r"label 5 of tp_rank 1 is 11; it must be in \[0, 11"):
        model(x, labels)


@on_ranks(2)
def test_heads_and_labels_that_do_not_fit_are_refused():
    split_over_all_ranks()
    net = made(lambda: nn.Sequential(nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)))
    smp.set_tensor_parallelism(net[1], by_outputs=True)
    smp.DistributedModel(net)
    x, labels = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"'0' is cut by its inputs; .* by_outputs=True"):
        vocabulary_parallel_cross_entropy(net[0], x, labels)
    with pytest.raises(ValueError, match="'the head' is cut by its inputs"):
        vocabulary_parallel_cross_entropy(smp.nn.DistributedLinear(4, CLASSES), x, labels)
    with pytest.raises(ValueError, match=r"labels have shape \[1, 2\]; of hidden \[2, 4\] it"):
        vocabulary_parallel_cross_entropy(net[0], x, labels[None])
    with pytest.raises(TypeError, match="class numbers, not torch.float64"):
        vocabulary_parallel_cross_entropy(net[0], x, labels.double())
    for shape in ((CLASSES + 1,), (CLASSES, 1)):
        with pytest.raises(ValueError, match=r"weight has shape .* it is \[11\], or \[[56]\]"):
            vocabulary_parallel_cross_entropy(net[1], x, labels, weight=torch.ones(shape))
    with pytest.raises(ValueError, match="reduction is one of"):
        smp.nn.DistributedCrossEntropyLoss(nn.Linear(2, 2), reduction="max")
    with pytest.raises(TypeError, match="head is a torch.nn.Linear, not a Embedding"):
        smp.nn.DistributedCrossEntropyLoss(nn.Embedding(2, 2))


def test_a_head_that_is_whole_gives_torchs_loss():
    """Without smp.init."""
    head, x = nn.Linear(4, CLASSES), torch.randn(2, 3, 4)
    labels = torch.tensor([[1, -100, 3], [0, 10, 2]])
    for reduction in ("none", "mean", "sum"):
        for weight in (None, torch.rand(CLASSES)):
            options: dict[str, Any] = {"reduction": reduction, "weight": weight}
            want = F.cross_entropy(head(x).movedim(-1, 1), labels, **options)
            got = vocabulary_parallel_cross_entropy(head, x, labels, **options)
            assert_near(got, want, reduction, 1e4)
            assert got.shape == want.shape
