"""Outputs of a chain of remote calls without a use by their caller so far.

``csrc/python/modules/chain.h`` has the rules of chains.

A placeholder is a tensor with its values on the owner's rank.  Shape, dtype and device are
known here; any operator, and anything else that reads values, fetches them once.  The gradient
of an untouched placeholder stays on the owner.  An alias, as of ``x[:, 0:]``, is a placeholder,
too: models of transformers call their heads with ``hidden[:, slice(0, None), :]``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from smp import _core
from smp.pytorch import accelerator
from smp.pytorch.compiled_code import not_traced

_ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.view.default)


class Placeholder(Tensor):
    """A tensor of another rank; plain in all but its class, once its values are here."""

    _smp_origin: tuple[Any, tuple[int, int], int]  # its call, its place there, and the link
    _smp_values: Tensor | None
    _smp_of: "Placeholder | None"  # the one that this is an alias of
    _smp_given_to: str | None = None  # the next module of the chain, once called

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
        self._smp_of = None
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _ALIASES and (one := args[0]._as_alias(*args[1:])) is not None:
            return one
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
        return self._fetched(used=True)

    def packed(self) -> Tensor:
        """The values, for a call of a module of another rank: perhaps soon one of the chain."""
        return self._fetched(used=False)

    @not_traced("values of another rank")
    def _fetched(self, used: bool) -> Tensor:
        if self._smp_of is not None:
            return self._smp_of._fetched(used)
        call, place, link = self._smp_origin
        _core.touch_output(self, call, link, used)
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

    def _as_alias(self, shape: Sequence[int] | None = None) -> "Placeholder | None":
        """A placeholder for the same values; None: they are here, or of another shape."""
        if self._whole()._smp_values is not None:
            return None
        if shape is not None and (
            len(shape) != self.dim()
            or [*shape].count(-1) > (self.numel() > 0)
            or any(n not in (-1, own) for n, own in zip(shape, self.shape, strict=True))
        ):
            return None
        one = Placeholder(self, False, tuple(self.shape), self.stride())
        one._smp_of = self
        return one

    def _whole(self) -> "Placeholder":
        return self if self._smp_of is None else self._smp_of._whole()

    @staticmethod
    def aliased(tensor: Tensor) -> Tensor | None:
        """The tensor that this one is an alias of; None: it is no alias of a whole tensor."""
        if type(tensor) is Placeholder:
            base: Tensor = tensor._whole()
            one = tensor
            while one._smp_of is not None:
                if one._backward_hooks is not None or one.retains_grad:
                    return None
                one = one._smp_of
        elif type(tensor) is Tensor and type(tensor._base) is Tensor:
            base = tensor._base
            if (
                tensor.dtype != base.dtype
                or tensor.is_complex()
                or tensor.is_neg()
                or not tensor.is_set_to(base)
            ):
                return None
        else:
            return None
        if base is tensor or tensor.requires_grad != base.requires_grad:
            return None
        # A function of the script's own may give its argument back, with another gradient.
        node = tensor.grad_fn
        while node is not None and node is not base.grad_fn:
            if node.name() not in ("AliasBackward0", "ViewBackward0"):
                return None
            node = node.next_functions[0][0]
        return base if node is base.grad_fn else None  # a view under no_grad ends without

    def register_hook(self, hook: Any) -> Any:
        self._refuse_after_its_call("register_hook")
        return super().register_hook(hook)

    def retain_grad(self) -> None:
        self._refuse_after_its_call("retain_grad")
        super().retain_grad()

    def _refuse_after_its_call(self, name: str) -> None:
        if self._smp_given_to is not None:
            raise RuntimeError(
                f"smp: {name}() of a tensor that module '{self._smp_given_to}' has got: its "
                f"gradient stays on that module's rank.  Call {name}() before the module, or "
                f"set 'fast_mode': False"
            )

    def _plain(self) -> Tensor:
        """A tensor of torch's class, in the same graph."""
        here = self.fetched()
        return self.view_as(self) if self.requires_grad else here

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
