"""State dicts of Hugging Face's models and of the distributed modules in their place.

A family gives the names of linears and norms on the other side, and the layout of packed ones.
Other modules have the same name on both sides.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

StateDict = dict[str, Any]
QKV = ("query", "key", "value")


class Part(NamedTuple):
    """A module of a layer with weight and bias.

    Attributes:
        ours: its name in a ``DistributedTransformerLayer``; of a packed linear, several.
        transposed: whether Hugging Face has the weight as ``[in, out]``.
        by_heads: of a packed linear, whether the parts alternate head by head; else they lie
            one behind the other.
    """

    ours: tuple[str, ...]
    transposed: bool = False
    by_heads: bool = False


def part(*ours: str, transposed: bool = False, by_heads: bool = False) -> Part:
    """A `Part`, written shortly."""
    return Part(ours, transposed, by_heads)


class Translation(NamedTuple):
    """How a family's names correspond.

    Attributes:
        layers: Hugging Face's name of the list of layers.
        parts: of a layer, by Hugging Face's name.
        others: outside of the layers, from Hugging Face's to ours: modules, by whole name.
        dropped: matches Hugging Face's buffers in a layer that follow from the configuration.
        ours: our name of the row of layers.
    """

    layers: str
    parts: Mapping[str, Part]
    others: Mapping[str, str] = {}
    dropped: str = r"$^"
    ours: str = "seq_layers"

    def to_ours(self, given: Mapping[str, Any], heads: int | None = None) -> StateDict:
        """From Hugging Face's names; a dict with our names already is returned as it is.

        Args:
            given: Hugging Face's state dict.
            heads: number of attention heads, for families with parts packed by heads.
        """
        layer = _in_a_row(self.layers)
        out: StateDict = {}
        for name, value in given.items():
            found = layer.fullmatch(name)
            if found is None:
                out[_renamed(name, self.others)] = value
                continue
            before, index, rest = found.groups()
            for ours, tensor in self.layer_to_ours({rest: value}, heads).items():
                out[f"{before}{self.ours}.{index}.{ours}"] = tensor
        return out

    def to_hugging_face(
        self,
        given: Mapping[str, Any],
        heads: int | None = None,
        buffers: Callable[[StateDict], StateDict] | None = None,
    ) -> StateDict:
        """To Hugging Face's names; a dict with these already is returned as it is.

        Args:
            given: a state dict with our names.
            heads: number of attention heads, for families with parts packed by heads.
            buffers: from a layer's entries, by Hugging Face's names, to its buffers that follow
                from the configuration.
        """
        layer = _in_a_row(self.ours)
        back = {ours: theirs for theirs, ours in self.others.items()}
        out: StateDict = {}
        layers: dict[str, StateDict] = {}
        for name, value in given.items():
            found = layer.fullmatch(name)
            if found is None:
                out[_renamed(name, back)] = value
            else:
                before, index, rest = found.groups()
                layers.setdefault(f"{before}{self.layers}.{index}.", {})[rest] = value
        for path, inside in layers.items():
            translated = self.layer_to_hugging_face(inside, heads)
            if buffers is not None:
                translated.update(buffers(translated))
            out.update((path + name, value) for name, value in translated.items())
        return out

    def layer_to_ours(self, given: Mapping[str, Any], heads: int | None = None) -> StateDict:
        """The same for one layer."""
        out: StateDict = {}
        for name, value in given.items():
            theirs, _, kind = name.rpartition(".")
            known = self.parts.get(theirs)
            if re.fullmatch(self.dropped, name):
                continue
            if known is None:
                out[name] = value
                continue
            whole = value.t() if known.transposed and value.dim() == 2 else value
            pieces = _unpacked(whole, len(known.ours), known.by_heads, heads)
            for ours, piece in zip(known.ours, pieces, strict=True):
                out[f"{ours}.{kind}"] = piece.contiguous()
        return out

    def layer_to_hugging_face(
        self, given: Mapping[str, Any], heads: int | None = None
    ) -> StateDict:
        """The same for one layer."""
        out: StateDict = {}
        left = dict(given)
        for theirs, known in self.parts.items():
            for kind in ("weight", "bias"):
                names = [f"{ours}.{kind}" for ours in known.ours]
                if names[0] not in left:
                    continue
                whole = _packed([left.pop(n) for n in names], known.by_heads, heads)
                transposed = known.transposed and whole.dim() == 2
                out[f"{theirs}.{kind}"] = whole.t().contiguous() if transposed else whole
        return {**out, **left}


def functions_of(
    names: Translation, family: str, original: str
) -> tuple[Callable[..., StateDict], Callable[..., StateDict]]:
    """A family's ``translate_hf_state_dict_to_smdistributed_...``, and ``..._to_hf_...``.

    Args:
        family: a file in ``smp.nn.huggingface``.
        original: the class replaced by the distributed module.
    """

    def to_ours(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> StateDict:
        return names.to_ours(state_dict)

    def to_hugging_face(
        state_dict: Mapping[str, Any], max_seq_len: int | None = None
    ) -> StateDict:
        return names.to_hugging_face(state_dict)

    to_ours.__doc__ = f"""From the state dict of ``{original}`` to that of what is in its place.

    Either may be in a model, with its name before the others.

    Args:
        state_dict: of the plain model; other dicts are returned as they are.
        max_seq_len: taken for scripts that give it.
    """
    to_hugging_face.__doc__ = f"""From the distributed module's state dict to ``{original}``'s.

    Args:
        state_dict: the whole one; that of a model which is split in place, or plain, is
            returned as it is.
        max_seq_len: taken for scripts that give it: buffers that transformers before 4.27
            saves beside the parameters follow from the configuration.
    """
    to_ours.__name__ = f"translate_hf_state_dict_to_smdistributed_{family}"
    to_hugging_face.__name__ = f"translate_state_dict_to_hf_{family}"
    for function in (to_ours, to_hugging_face):
        function.__qualname__ = function.__name__
        function.__module__ = f"smp.nn.huggingface.{family}"
    return to_ours, to_hugging_face


def as_it_is(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> StateDict:
    """The state dict itself, of a family with models split in place.

    Args:
        state_dict: of the plain model or of the split one, under the same names.
        max_seq_len: accepted for scripts with it.
    """
    return dict(state_dict)


def _in_a_row(layers: str) -> re.Pattern[str]:
    """Matches a name in one of the layers: the part before, the number, the part inside."""
    return re.compile(rf"((?:.*\.)?){re.escape(layers)}\.(\d+)\.(.+)")


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    path, dot, kind = name.rpartition(".")
    return f"{modules[path]}{dot}{kind}" if path in modules else name


def _unpacked(whole: Tensor, parts: int, by_heads: bool, heads: int | None) -> list[Tensor]:
    if parts == 1:
        return [whole]
    if not by_heads:
        return list(whole.chunk(parts))
    alternating = whole.unflatten(0, (_known(heads), parts, -1))
    return [alternating[:, i].flatten(0, 1) for i in range(parts)]


def _packed(pieces: list[Tensor], by_heads: bool, heads: int | None) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    if not by_heads:
        return torch.cat(pieces)
    by_head = [piece.unflatten(0, (_known(heads), -1)) for piece in pieces]
    return torch.stack(by_head, 1).flatten(0, 2)


def _known(heads: int | None) -> int:
    if heads is None:
        raise ValueError(
            "smp.nn.huggingface: this family packs query, key and value head by head: give "
            "num_attention_heads"
        )
    return heads
