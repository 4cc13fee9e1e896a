"""Spec: csrc/python/values/wire.h: a value arrives as it was sent; hostile bytes only raise."""

import collections
import dataclasses
import importlib
import math
import random
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp._core import pack, unpack
from tests import heap
from tests.codec_values import Boxed, Cache, Counts, Frozen, Output, Pair, Stack, sample

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


def trip(value):
    return unpack(pack(value))


def bits(tensor: torch.Tensor) -> list[int]:
    """Every element's bytes, so that NaNs and signed zeros count."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        assert bits(a) == bits(b)
    elif isinstance(a, float):
        assert a == b or (math.isnan(a) and math.isnan(b))
        assert math.copysign(1, a) == math.copysign(1, b)
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True):
            assert_same(ka, kb)
            assert_same(va, vb)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, slice):
        assert_same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    elif hasattr(a, "__dict__") and not isinstance(a, type):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


# ----------------------------------------------------------------------- values

texts = st.text(st.characters(categories=None), max_size=8)  # surrogates too
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**200), max_value=2**200),
    st.floats(allow_nan=False),
    texts,
    st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda:1")]),
)
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).to(dtype).reshape(shape),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
)
leaves = st.one_of(
    hashable,
    tensors,
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.just(...),
    st.builds(slice, st.integers(), st.none(), st.integers()),
    st.sets(hashable, max_size=3),
    st.frozensets(hashable, max_size=3),
    st.builds(torch.Size, st.lists(st.integers(0, 2**40), max_size=4)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=4).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Frozen, inner, inner),
        st.builds(Cache, inner),
        st.builds(Boxed, inner),
        st.builds(Output, inner, inner),
        st.lists(inner, max_size=3).map(Stack),
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(values)
def test_a_value_arrives_as_it_was_sent(value):
    assert_same(trip(value), value)


@pytest.mark.parametrize("size", [63, 64, 100, 15_000, 100_000])
def test_integers_of_any_size_travel(size):
    """Decimal text has a limit of 4300 digits in Python; the wire has none."""
    for number in (2**size, -(2**size), 2**size - 1, -(2**size) - 1):
        assert trip(number) == number


def test_classes_and_struct_sequences_travel():
    when = time.gmtime(0)
    top = torch.max(torch.tensor([[1.0, 3.0]]), dim=1)

    assert trip(Cache) is Cache
    assert trip(when) == when and type(trip(when)) is time.struct_time
    assert_same(tuple(trip(top)), tuple(top))
    assert type(trip(top)) is type(top)


def test_an_ordered_dict_keeps_its_own_order():
    """move_to_end changes the order that only the OrderedDict knows."""
    ordered = collections.OrderedDict(a=1, b=2, c=3)
    ordered.move_to_end("a")

    assert list(trip(ordered)) == ["b", "c", "a"]


def test_a_defaultdict_and_its_subclass_keep_the_factory():
    for made in (collections.defaultdict(list, a=[1]), Counts(int, a=1)):
        arrived = trip(made)
        assert type(arrived) is type(made) and arrived == made
        assert arrived.default_factory is made.default_factory


# ---------------------------------------------------------------------- identity


def test_one_object_arrives_as_one():
    for shared in (
        [1],
        {"k": 1},
        {1},
        Cache(2),
        Boxed(2),
        torch.ones(2),
        Output(1, 2),
        Stack([1]),
    ):
        first, second, (third,) = trip((shared, shared, [shared]))
        assert first is second is third


def test_a_view_stays_a_tensor_of_its_own():
    base = torch.ones(4)

    a, b = trip((base, base[:2]))

    a.zero_()
    assert b.tolist() == [1, 1]


def test_values_that_hold_themselves_travel():
    loop: list = []
    loop.append(loop)
    table: dict = {}
    table["me"] = (table,)
    cache = Cache(None)
    cache.layers = [cache]

    arrived = trip(loop)
    assert arrived[0] is arrived and len(arrived) == 1
    arrived = trip(table)
    assert arrived["me"][0] is arrived
    arrived = trip(cache)
    assert arrived.layers[0] is arrived


class Meddling(type):
    """A class that calls a function when it is asked for its name."""

    meddle = None

    def __getattribute__(cls, name):
        if name == "__qualname__" and Meddling.meddle is not None:
            Meddling.meddle()
        return super().__getattribute__(name)


class Meddler(metaclass=Meddling):
    pass


@pytest.mark.parametrize("shared", [dict, collections.OrderedDict])
@pytest.mark.parametrize("change", ["shrinks", "grows", "replaces"])
def test_a_dict_that_changes_while_it_is_packed_is_an_error(shared, change, monkeypatch):
    """Its items stay alive meanwhile; one of the same size has the values it had."""
    key = Meddler()
    table = shared({key: list("a value that only the table holds"), "last": 1})

    def meddle():
        if change == "shrinks":
            table.pop("last", None)
        elif change == "grows":
            table["more"] = 1
        else:
            table[key] = None

    monkeypatch.setattr(Meddling, "meddle", meddle)
    if change != "replaces":
        with pytest.raises(RuntimeError, match="changed its size|mutated"):
            pack(table)
        return
    packed = pack(table)
    monkeypatch.setattr(Meddling, "meddle", None)
    assert list(unpack(packed).values()) == [list("a value that only the table holds"), 1]


@pytest.mark.parametrize("shared", [list, set])
@pytest.mark.parametrize("change", ["shrinks", "grows"])
def test_a_list_or_set_that_changes_while_it_is_packed_is_an_error(shared, change, monkeypatch):
    things = shared([Meddler(), Meddler()])
    take, add = (things.pop, things.append) if shared is list else (things.pop, things.add)

    def meddle():
        if change == "grows":
            add(len(things))
        elif len(things) > 1:
            take()

    monkeypatch.setattr(Meddling, "meddle", meddle)
    with pytest.raises(RuntimeError, match="changed (its )?size"):
        pack(things)


# ----------------------------------------------------------------------- tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_keeps_bits_and_strides(dtype):
    raw = torch.randint(0, 2, (4, 6, dtype.itemsize), dtype=torch.uint8)
    whole = raw.reshape(4, 6 * dtype.itemsize).view(dtype)
    layouts = [
        whole,
        whole.t(),
        whole[:, ::2],
        whole[1:, 2:],
        whole[0, 0],
        whole[:1].expand(5, 6),
        whole[:, :0],
        whole.reshape(2, 2, 6).permute(2, 0, 1),
        whole.reshape(1, 4, 2, 3).contiguous(memory_format=torch.channels_last),
    ]

    for sent in layouts:
        arrived = trip(sent)
        assert_same(arrived, sent)
        assert arrived.stride() == sent.stride()


def test_expanded_bytes_travel_once():
    assert len(pack(torch.ones(1).expand(1_000_000))) < 200


def test_a_column_of_a_large_matrix_travels():
    column = torch.arange(400.0).reshape(20, 20)[:, 3]
    wide = torch.zeros(1000, 1000)[:, 0]

    assert_same(trip(column), column)
    assert_same(trip(wide), wide)


def test_conjugate_and_negative_views_are_resolved():
    numbers = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, -4.0]))

    for view in (numbers.conj(), numbers.conj().imag, numbers.conj().t()):
        assert_same(trip(view), view.resolve_conj().resolve_neg())


def test_a_tensor_without_data_is_refused_by_name():
    with pytest.raises((RuntimeError, ValueError, BufferError), match=r"meta|without data"):
        pack(torch.empty(2, device="meta"))


def test_who_has_not_imported_the_module_of_a_class_does(tmp_path, monkeypatch):
    (tmp_path / "known_elsewhere.py").write_text("class Kept:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    value = importlib.import_module("known_elsewhere").Kept()
    value.number = 3
    sent = pack(value)
    del value, sys.modules["known_elsewhere"]

    made = unpack(sent)
    assert type(made) is sys.modules.pop("known_elsewhere").Kept and made.number == 3


def test_unknown_types_are_refused_by_name_before_init():
    """Strings and floats with a life of their own are for pickle alone."""

    class Text(str):
        pass

    class Number(float):
        pass

    class Slotted:
        __slots__ = ("__dict__", "kept")

    class Within(Slotted):
        """A slot of its base's is no item of its __dict__."""

    class Reduced:
        def __reduce__(self):
            return Reduced, ()

    class ReducedOtherwise:
        def __reduce_ex__(self, protocol):
            return ReducedOtherwise, ()

    made = [Slotted(), Within(), Reduced(), ReducedOtherwise()]
    for value in (Text("a"), Number(1.0), bytearray(b"a"), range(3), *made):
        with pytest.raises(TypeError, match=f"cannot send a .*{type(value).__name__}"):
            pack(value)


# ----------------------------------------------------------------------- hostile


def hostile(rng: random.Random, message: bytes) -> bytes:
    """The message with one to eight bytes, numbers or pieces changed."""
    out = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(7)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            out[at : at + 1] = bytes([rng.randrange(32)])  # most tags
        elif kind == 2:
            out[at : at + 4] = rng.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
        elif kind == 3:
            number = rng.choice((0, 1, 2**31, 2**40, 2**62, 2**63, 2**64 - 1))
            out[at : at + 8] = number.to_bytes(8, "little")
        elif kind == 4:
            del out[at:]
        elif kind == 5:
            out += rng.randbytes(rng.randrange(1, 9))
        else:
            other = rng.randrange(len(out) + 1)
            out[at : at + 4] = out[other : other + 4]
    return bytes(out)


def survives(message: bytes) -> bool:
    """Whether it was read.  Any exception of Python is an answer."""
    try:
        value = unpack(message)
    except Exception as error:
        assert not isinstance(error, SystemError), message
        return False
    repr(type(value))
    return True


def test_every_truncation_and_extension_raises():
    message = pack(sample())

    for size in range(len(message)):
        with pytest.raises(ValueError):
            unpack(message[:size])
    for tail in (b"\0", b"\1", bytes(8), message):
        with pytest.raises(ValueError, match="malformed message"):
            unpack(message + tail)


@pytest.mark.parametrize("seed", range(4))
def test_changed_messages_raise_or_arrive(seed):
    rng = random.Random(seed)
    parts = [pack(part) for part in sample()]
    modules = set(sys.modules)

    read = sum(survives(hostile(rng, rng.choice(parts))) for _ in range(5000))

    assert 0 < read < 5000
    assert set(sys.modules) == modules


def test_random_bytes_raise():
    rng = random.Random(5)

    for _ in range(2000):
        assert not survives(rng.randbytes(rng.randrange(200)))


def sized(values: bytes, meta: bytes = b"", tensors: int = 0, data: bytes = b"") -> bytes:
    """A message with right sizes around hostile parts."""
    numbers = (tensors, len(meta), len(values), 0)
    head = b"".join(n.to_bytes(4, "little") for n in numbers)
    return head + len(data).to_bytes(8, "little") + meta + values + data


def test_random_values_behind_right_sizes_raise_or_arrive():
    rng = random.Random(6)
    tags = list(range(1, 31))

    for _ in range(20_000):
        body = bytes(
            rng.choice(tags) if rng.random() < 0.6 else rng.choice((0, 0, 0, 1, 2, 255))
            for _ in range(rng.randrange(40))
        )
        survives(sized(body))


TAG_STR, TAG_NAMED, TAG_PICKLE, TAG_DICT, TAG_MAPPED, TAG_LISTED, TAG_OBJECT, TAG_DEFAULTED = (
    8, 15, 22, 24, 26, 27, 28, 29,
)  # fmt: skip
EMPTY_DICT = bytes([TAG_DICT, 0, 0, 0, 0])


def text(value: str) -> bytes:
    raw = value.encode()
    return bytes([TAG_STR]) + len(raw).to_bytes(4, "little") + raw


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("types", "FrameType"),
        ("types", "CoroutineType"),
        ("types", "ModuleType"),
        ("fractions", "Fraction"),
        ("builtins", "type"),
        ("builtins", "int"),
        ("torch", "Tensor"),
        ("threading", "local"),
        ("weakref", "ref"),
    ],
)
def test_only_plain_classes_are_made_from_a_dict(module, name):
    """Others would be half made: some crash when they go."""
    cls = text(module) + text(name)

    for tag, contents in (
        (TAG_OBJECT, EMPTY_DICT),
        (TAG_MAPPED, bytes(4) + EMPTY_DICT),
        (TAG_LISTED, bytes(4) + EMPTY_DICT),
        (TAG_DEFAULTED, b"\1" + bytes(4) + EMPTY_DICT),
        (TAG_NAMED, bytes(4)),
    ):
        with pytest.raises(ValueError, match="a class of another kind|of a class that is none"):
            unpack(sized(bytes([tag]) + cls + contents))


def test_a_pickle_is_not_opened_before_init():
    bomb = b"cbuiltins\nexit\n(tR."
    with pytest.raises(ValueError, match="a pickle where none is expected"):
        unpack(sized(bytes([TAG_PICKLE]) + len(bomb).to_bytes(4, "little") + bomb + bytes(4)))


def test_a_tensor_with_uncountable_elements_is_refused():
    """Strides of zero make any shape fit into four bytes."""
    message = bytearray(pack(torch.zeros(1).expand(3, 3)))
    shape = b"".join(n.to_bytes(8, "little") for n in (3, 3, 0, 0))
    at = message.index(shape)
    message[at : at + 16] = (2**40).to_bytes(8, "little") * 2

    with pytest.raises(ValueError, match="more elements than can be counted"):
        unpack(bytes(message))


def test_packing_gives_its_memory_back():
    def pack_one():
        numbers = torch.complex(torch.ones(1000), torch.ones(1000))
        pack([torch.ones(1000), "word" * 1000, numbers.conj(), numbers.conj().imag])

    pack_one()
    before = heap.bytes_in_use()
    for _ in range(100):
        pack_one()
    assert heap.bytes_in_use() - before < 20_000


def test_memory_is_given_back():
    """What a refused message had made is freed: the count of live objects stays."""
    message = pack([Cache([1, {2}]), torch.ones(3), dataclasses.asdict(Frozen(1, (2,)))])
    before = None

    for _ in range(3):
        for size in range(0, len(message), 3):
            survives(message[:size])
            survives(bytes([*message[:size], 255, *message[size + 1 :]]))
        alive = sys.getallocatedblocks()
        if before is not None:
            assert alive - before < 50
        before = alive
