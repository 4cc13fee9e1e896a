"""Spec: real.py; design.md, section 3: real models are the plain loop, within rounding."""

import copy

import pytest
import torch

from tests.models.partition import partition_by_path, random_partition, weight_reads
from tests.models.real import REAL
from tests.reference.compare import assert_close, assert_same_outputs, gradients
from tests.reference.cut_loop import cut_loop, plain_loop


class _WithoutBackward:
    """A model for a step function that is only looked at."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, *args, **kwargs):
        return self.model(*args, **kwargs)

    def backward(self, *args) -> None:
        pass


def reads_of(real) -> list[tuple[str, str]]:
    model = copy.deepcopy(real.model)
    batch = real.make_batch(2, torch.Generator().manual_seed(1))
    return weight_reads(model, lambda: real.step(_WithoutBackward(model), *batch))


@pytest.mark.parametrize("partition", ["half", "random"])
@pytest.mark.parametrize("name", REAL)
def test_a_real_model_cut_is_the_plain_one(name, partition):
    """Outputs bit for bit, gradients within rounding, in float64; with dropout."""
    real = REAL[name](dtype=torch.float64)
    if partition == "half":
        rank_of = partition_by_path(real.model, dict.fromkeys(real.far, 1), reads_of(real))
    else:
        rank_of = random_partition(real.model, 3, 1, reads_of(real))
    batch = real.make_batch(5, torch.Generator().manual_seed(1))
    cut, plain = real.model, copy.deepcopy(real.model)

    torch.manual_seed(2)
    got = cut_loop(real.step, cut, batch, rank_of=rank_of, microbatches=2)
    torch.manual_seed(2)
    want = plain_loop(real.step, plain, batch, rank_of=rank_of, microbatches=2)

    assert len({request.rank for request in got.requests}) > 1
    assert_same_outputs(got.outputs, want.outputs)
    assert_same_outputs(list(cut.buffers()), list(plain.buffers()))
    assert_close(gradients(cut), gradients(plain), relative=1e-12)


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_follows_from_its_seed(name):
    first, again, other = (REAL[name](seed) for seed in (3, 3, 4))

    same = [torch.equal(a, b) for a, b in _parameters(first, again)]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in _parameters(first, other))
    batches = [real.make_batch(2, torch.Generator().manual_seed(1)) for real in (first, again)]
    assert_same_outputs(*batches)


def _parameters(a, b):
    return zip(a.model.parameters(), b.model.parameters(), strict=True)
