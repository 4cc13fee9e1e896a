"""Spec: streams.py; design.md, section 3, "Random numbers"."""

import pytest
import torch

from tests.reference.streams import Streams, UserGenerator, draw, mix


@pytest.mark.parametrize(
    "a, b, want",
    [
        (0, 0, 0x6220A8397B1DCDAF),
        (0, 1, 0x6E789E6AA1B965F4),
        (1, 0, 0x110A2DEC89025CC1),
        (1, 1, 0x3EEB8DA1658EEC67),
        (2**63 - 1, 0, 0x2A67D7552E039EA7),
        (2**63 - 1, 2**31, 0x264F72C04EED05C1),
    ],
)
def test_mix_is_splitmix64(a, b, want):
    """The output of splitmix64 from state a, b + 1 steps on, without its top bit."""
    assert mix(a, b) == want


def test_a_draw_is_what_random_gives():
    torch.manual_seed(3)
    want = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)

    assert draw() == want >= 0


def test_after_a_step_the_users_generator_goes_on_after_one_draw():
    torch.manual_seed(5)
    with Streams().step():
        torch.rand(7)
    got = torch.rand(3)

    torch.manual_seed(5)
    draw()
    assert torch.equal(got, torch.rand(3))


def test_a_step_that_fails_leaves_the_users_generator_as_it_was():
    torch.manual_seed(5)
    with pytest.raises(KeyError), Streams().step():
        raise KeyError
    got = torch.rand(3)

    torch.manual_seed(5)
    assert torch.equal(got, torch.rand(3))


def test_a_microbatch_draws_from_a_stream_of_its_own():
    torch.manual_seed(5)
    step_seed = draw()
    torch.manual_seed(5)
    streams = Streams()
    with streams.step():
        drawn = {}
        for index in (1, 0):
            with streams.microbatch(index):
                drawn[index] = torch.rand(2)

    for index in (0, 1):
        torch.manual_seed(mix(step_seed, index))
        assert torch.equal(drawn[index], torch.rand(2))


def test_a_caller_goes_on_right_after_the_draw_of_its_call():
    streams = Streams()
    torch.manual_seed(5)
    r = streams.call()
    with streams.forward(r):
        forward = torch.rand(9)
    with streams.backward(r):
        backward = torch.rand(9)
    after = torch.rand(3)

    torch.manual_seed(5)
    assert draw() == r
    assert torch.equal(after, torch.rand(3))
    for seed, got in ((mix(r, 1), forward), (mix(r, 2), backward)):
        torch.manual_seed(seed)
        assert torch.equal(got, torch.rand(9))


def test_with_one_rank_every_draw_is_from_the_users_generator():
    torch.manual_seed(5)
    streams = UserGenerator()
    with streams.step(), streams.microbatch(1), streams.forward(streams.call()):
        got = torch.rand(3)

    torch.manual_seed(5)
    assert torch.equal(got, torch.rand(3))
