"""docs/limits.md: its numbers are the source's, and what goes beyond is told with them."""

import re
from pathlib import Path

import pytest
import torch

from smp import _core
from smp._core import pack, unpack

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs/limits.md").read_text()
ROWS = re.findall(r"^\| .* \| ([\d,]+) \| .* \| `(\w+)`, `(csrc/[\w/.]+)` \|$", TABLE, re.M)


def of_source(name: str, path: str) -> int:
    text = (ROOT / path).read_text()
    [value] = re.findall(rf"^#define {name} +(.*?)(?: /\*.*)?$", text, re.M)
    return eval(value.replace("u", ""), {}, {"size_t": int})


def test_the_table_has_rows():
    assert len(ROWS) == sum(line.endswith("` |") for line in TABLE.splitlines()) > 8


@pytest.mark.parametrize("number, name, path", ROWS)
def test_a_number_of_the_table_is_the_source_s(number, name, path):
    assert int(number.replace(",", "")) == of_source(name, path)


def test_a_tensor_with_too_many_dimensions_is_told_how_many_it_may_have():
    pack(torch.zeros([1] * 64))
    with pytest.raises(ValueError, match="with 65 dimensions .* 64 are the most"):
        pack(torch.zeros([1] * 65))


def test_a_value_nested_too_deeply_is_told_how_deep_it_may_be():
    deep: list = []
    for _ in range(199):
        deep = [deep]
    assert str(unpack(pack(deep))) == str(deep)
    with pytest.raises(RecursionError, match="deeper than 200"):
        pack([deep])


def test_a_group_with_too_many_ranks_is_told_how_many_it_may_have():
    comm = _core.Comm(0, [0], 0, "shm", None, "secret of one")
    try:
        with pytest.raises(ValueError, match="'wide' has 1025 ranks; 1024 are the most"):
            _core.Group(comm, list(range(1025)), 7, "wide", 1.0)
    finally:
        comm.close()
