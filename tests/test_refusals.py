"""Spec: what a step, a model and its modules refuse, and with which words."""

import copy
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import smp
from smp.execution.steps import Step, most_in_flight, read_turns
from tests.models.partition import distributed
from tests.ranks import on_ranks

WIDTH = 4


def make(**config) -> smp.DistributedModel:
    """A layer on each of the ranks."""
    degree = smp.job.bootstrap.mpi_size()
    smp.init({"pipeline_parallel_degree": degree, **config})
    return wrap()


def wrap() -> smp.DistributedModel:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(smp.size())))
    return distributed(net, range(len(net)))


@smp.step
def train(model: smp.DistributedModel, x: Tensor) -> None:
    model.backward(model(x).sum())


@on_ranks(1, 2)
def test_a_backward_without_gradients_begins_with_scalars():
    model = make(microbatches=2)
    x = torch.randn(4, WIDTH)
    told = re.escape(f"got a tensor of shape (2, {WIDTH}); give a scalar loss, or grad_tensors")

    def step(how: str) -> None:
        @smp.step
        def one(model: smp.DistributedModel, x: Tensor) -> None:
            y = model(x)
            if how == "one element":
                model.backward(y.sum().view(1, 1))
            elif how == "one of two":
                model.backward((y.sum(), y), (None, torch.ones_like(y)))
            elif how == "the other":
                model.backward([y.sum(), y], [torch.ones(()), None])
            else:
                model.backward(y)

        one(model, x)

    for how in ("alone", "the other"):
        with pytest.raises(RuntimeError, match=told):
            step(how)
    mine = next(iter(model.local_parameters()))
    norms = []
    for how in ("one element", "one of two"):
        model.zero_grad()
        step(how)
        norms.append(mine.grad.clone())
    torch.testing.assert_close(norms[1], 2 * norms[0])


@on_ranks(2)
def test_a_model_in_a_pipeline_is_called_inside_of_steps_alone():
    model = make()
    x = torch.ones(2, WIDTH)
    told = (
        "called outside a step: with pipeline_parallel_degree 2 call it inside a function with"
    )
    for _ in range(2):  # before the partition, and after it
        with pytest.raises(RuntimeError, match=told):
            model(x)
        train(model, x)


@on_ranks(2)
def test_a_model_is_not_copied_after_its_partition():
    model = make()
    assert type(copy.deepcopy(model.module)) is nn.Sequential
    train(model, torch.ones(2, WIDTH))

    other = model.module[1 - smp.pp_rank()]
    with pytest.raises(RuntimeError, match="cannot be copied after its partition; copy the"):
        copy.deepcopy(other.weight)
    for whole in (model.module, model):
        with pytest.raises(RuntimeError, match="cannot be copied after its partition"):
            copy.deepcopy(whole)


@on_ranks(2)
def test_a_model_whose_parts_are_all_here_is_copied_as_the_plain_module():
    """As for a mean over steps; replicas' copies are alike."""
    smp.init({"ddp": True})
    model = smp.DistributedModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    mean = swa_utils.AveragedModel(model, use_buffers=True)
    first = copy.deepcopy(model)
    train(model, torch.ones(2, 2) * smp.rank())
    with torch.no_grad():
        model.module[0].bias += 2
    for _ in range(2):
        mean.update_parameters(model)
    assert type(first) is type(mean.module) is nn.Sequential
    assert torch.equal(mean.module[0].bias, first[0].bias + 2)
    assert not torch.equal(first[0].bias, model.module[0].bias)
    assert mean(torch.ones(2, 2)).shape == (2, 2)


@on_ranks(2)
def test_a_backward_hook_of_the_older_kind_is_refused_on_the_caller():
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.module[1].register_backward_hook(lambda *given: None)
    told = "register_backward_hook on a Linear of another rank; use register_full_backward_hook"
    with pytest.raises(NotImplementedError, match=told):
        train(model, torch.ones(2, WIDTH))


@on_ranks(2)
def test_ranks_with_models_in_different_modes_or_other_steps_say_in_which():
    model, other = make(), wrap()

    @smp.step
    def both(x: Tensor) -> None:
        model.backward((model(x) + other(x)).sum())

    both(torch.ones(2, WIDTH))
    other.train(smp.pp_rank() == 0)
    part = "a part of the models in training mode"
    told = rf"pp_rank 0 .*both .*, models in training mode.*pp_rank 1 .*, {part}"
    with pytest.raises(RuntimeError, match=told):
        both(torch.ones(2, WIDTH))
    model.eval()
    told = rf"pp_rank 0 .*, {part}.*pp_rank 1 .*, models in eval"
    with pytest.raises(RuntimeError, match=told):
        both(torch.ones(2, WIDTH))
    other.eval()
    told = r"pp_rank 0 runs .*both .*pp_rank 1 runs train"
    with pytest.raises(RuntimeError, match=told):
        both(torch.ones(2, WIDTH)) if smp.pp_rank() == 0 else train(model, torch.ones(2, WIDTH))
    both(torch.ones(2, WIDTH))


@on_ranks(2)
def test_ranks_that_train_other_parameters_say_how_many():
    """Of the whole model; also where they are as many, and others."""
    model = make()
    x = torch.ones(2, WIDTH)
    train(model, x)
    model.module[1].bias.requires_grad_(smp.pp_rank() == 1)
    told = r"pp_rank 0 .*, 3 of 4 parameters require grad .*pp_rank 1 .*, 4 of 4 parameters"
    with pytest.raises(RuntimeError, match=told):
        train(model, x)
    model.module[0].bias.requires_grad_(smp.pp_rank() == 0)
    told = r"pp_rank 0 .*, 3 of 4 parameters require grad .*pp_rank 1 .*, 3 of 4 parameters"
    with pytest.raises(RuntimeError, match=told):
        train(model, x)
    model.requires_grad_(True)
    train(model, x)


TURNS = [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")]


@pytest.mark.parametrize(
    "given",
    [
        TURNS,
        [[0, 0], (1, 0), ("1", 1), (0, "backward")],
        lambda count: TURNS[: 2 * count],
        lambda count: iter(TURNS),
        tuple(TURNS),
    ],
)
def test_a_schedule_is_read_however_it_is_written(given):
    assert read_turns(given, 2) == [(0, 0), (1, 0), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    "turn", [3, (0,), (0, 1, 2), (0, "sideways"), (0, 2), ("x", 0), (0, []), None]
)
def test_a_turn_that_is_none_is_shown(turn):
    with pytest.raises(ValueError) as caught:
        read_turns([(0, 0), turn], 1)
    assert str(caught.value) == (
        f"smp: the schedule holds {turn!r}; each entry is (microbatch, phase) with phase "
        "'forward' or 'backward'"
    )


@pytest.mark.parametrize(
    ("turns", "most"),
    [
        ("", 0),
        ("0f 0b", 1),
        ("0f 0b 1f 1b", 1),
        ("0f 1f 0b 1b", 2),
        ("0f 1f 2f 0b 1b 2b", 3),
        ("0f 1f 0b 2f 1b 2b", 2),
        ("0f 0b 0b 1f 1b", 1),
        ("0f 0b 1f 0b 1b", 2),
        ("0f 1f 2f", 1),
    ],
)
def test_microbatches_in_flight_are_those_between_their_first_and_last_turn(turns, most):
    named = [(int(turn[0]), "fb".index(turn[1])) for turn in turns.split()]
    assert most_in_flight(named) == most


@pytest.mark.parametrize(
    ("pipeline", "want"),
    [("simple", (0, [], 3)), ("interleaved", (1, [], 2)), (TURNS, (2, [(0, 0)], 3))],
)
def test_a_schedule_says_how_many_microbatches_may_be_in_flight(pipeline, want):
    """One that lists its turns, and the simple one, as many as it has; others serve."""
    cfg = SimpleNamespace(pipeline=pipeline[:1] if pipeline is TURNS else pipeline)
    for pp_rank in (0, 1):
        rt = SimpleNamespace(cfg=cfg, pp_rank=pp_rank, active_microbatches=2)
        got = Step._schedule(SimpleNamespace(rt=rt, count=3))
        assert got == (want if pp_rank == 0 else (-1, [], 2))
