"""Spec: streams.py; design.md, section 3, "Random numbers"."""

import pytest

from tests.reference.streams import mix


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
