"""Outputs of a chain of remote calls without a use by their caller so far.

``csrc/python/modules/chain.h`` has the rules of chains.

A placeholder is a tensor with its values on the owner's rank.  Shape, dtype and device are
known here; any operator, and anything else that reads values, fetches them once.  The gradient
of an untouched placeholder stays on the owner.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from smp import _core
from smp.pytorch import accelerator


class Placeholder(Tensor):
    """A tensor of another rank; plain in all but its class, once its values are here."""

    _smp_origin: tuple[Any, tuple[int, int], int]  # its call, its place there, and the link
    _smp_values: Tensor | None

    @staticmethod
    def __new__(
        cls, like: Tensor, on_device: bool, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> "Placeholder":
        self = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            shape,
            strides=strides,
            dtype=like.dtype,
            device=accelerator.in_use() if on_device else like.device,
        )
        self._smp_values = None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        values: dict[int, Placeholder] = {}

        def fetched(tensor: Placeholder) -> Tensor:
            here = tensor.fetched()
            values[id(here)] = tensor
            return here

        args, kwargs = tree_map_only(Placeholder, fetched, (args, kwargs or {}))
        # An operator in place gives back its argument.
        return tree_map_only(
            Tensor, lambda out: values.get(id(out), out), func(*args, **kwargs)
        )

    def fetched(self) -> Tensor:
        """The values, without a gradient, for a use by the caller."""
        call, place, link = self._smp_origin
        _core.touch_output(self, call, link)
        if self._smp_values is None:
            [self._smp_values] = _core.fetch_outputs(call, [place])
        return self._smp_values

    @staticmethod
    def fetch_all(placeholders: list["Placeholder"]) -> None:
        """Fetch the values before their owner forgets them, of each call in one request."""
        missing: dict[int, list[Placeholder]] = {}
        for one in placeholders:
            if one._smp_values is None:
                missing.setdefault(id(one._smp_origin[0]), []).append(one)
        for ones in missing.values():
            call = ones[0]._smp_origin[0]
            values = _core.fetch_outputs(call, [one._smp_origin[1] for one in ones])
            for one, its in zip(ones, values, strict=True):
                one._smp_values = its

    def _plain(self) -> Tensor:
        """A tensor of torch's class, in the same graph."""
        return self.view_as(self) if self.requires_grad else self.fetched()

    def __repr__(self, *how: Any, **named: Any) -> str:  # type: ignore[override]
        return self._plain().__repr__(*how, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __dlpack__(self, **how: Any) -> Any:
        return self._plain().__dlpack__(**how)

    def __array__(self, *how: Any) -> Any:
        return self._plain().__array__(*how)

    def numpy(self, **how: Any) -> Any:
        return self._plain().numpy(**how)

    def tolist(self) -> Any:
        return self.fetched().tolist()

    def data_ptr(self) -> int:
        return self.fetched().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.fetched().untyped_storage()

    def storage(self) -> Any:
        return self.fetched().storage()
