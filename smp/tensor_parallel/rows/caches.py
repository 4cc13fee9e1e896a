"""Caches of keys and values, as a split attention fills them.

Such a cache has the samples of the whole TP_GROUP and this tp_rank's heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from smp.marks import FILLED_BY, HAS_PADDING

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")  # as versions name them

_STATES_OF_OTHERS = ("encoder_hidden_states", "key_value_states")  # of a cross attention


def refuse_padding(arguments: dict[str, Any], path: str, uneven: bool) -> None:
    """Refuse padding in a cache: it stays behind a shorter sequence, before new keys.

    Args:
        arguments: of the attention's call.
        path: of the attention.
        uneven: its sequences have other lengths on other tp_ranks.

    Raises:
        NotImplementedError: the sequences in a reused cache were of different lengths on the
            tp_ranks.
    """
    cache = _cache_among(arguments)
    if cache is None or not hasattr(cache, "__dict__"):
        return
    if uneven:
        cache.__dict__[HAS_PADDING] = True
    elif cache.__dict__.get(HAS_PADDING, False):
        raise NotImplementedError(
            f"smp: '{path}' got sequences of different lengths on the ranks of a TP_GROUP, "
            "together with a cache: pad the prompts, on their left, to one length on all of "
            "them, or generate with use_cache=False"
        )


def refuse_others(
    arguments: dict[str, Any], module: nn.Module, path: str, samples: int
) -> None:
    """A script or peft's prefix tuning fills caches with own samples and all heads.

    Args:
        arguments: of the attention's call.
        module: the attention.
        path: of it.
        samples: those of the call, on all tp_ranks.

    Raises:
        NotImplementedError: a cache has another number of samples.
    """
    keys = _keys(arguments, module)
    if keys is not None and keys.size(0) != samples:
        raise _others(path, keys, f"the {samples} samples of all ranks")


def refuse_gradients_of_others(arguments: dict[str, Any], module: nn.Module, path: str) -> None:
    """The ranks have the same samples, and each would give the cache its own heads' gradient.

    Args:
        arguments: of the attention's call.
        module: the attention.
        path: of it.

    Raises:
        NotImplementedError: autograd leads from the attention to another module's cache.
    """
    cache = _cache_among(arguments)
    if cache is None or not hasattr(cache, "__dict__"):
        return
    keys = _keys(arguments, module)
    filled = cache.__dict__.setdefault(FILLED_BY, set())
    if keys is None or not keys.numel():
        filled.add(path)
    elif keys.requires_grad and torch.is_grad_enabled() and path not in filled:
        raise _others(path, keys, "this rank's heads")


def refuse_after(
    error: RuntimeError, arguments: dict[str, Any], module: nn.Module, path: str
) -> None:
    """The ranks have the same samples: a cache of all heads shows itself when it grows.

    Args:
        error: of the attention's call.
        arguments: of the call.
        module: the attention.
        path: of it.

    Raises:
        NotImplementedError: the attention could not append to its cache.
    """
    keys = _keys(arguments, module)
    if keys is not None and "Sizes of tensors must match" in str(error):
        raise _others(path, keys, "this rank's heads") from error


def _others(path: str, keys: Tensor, wanted: str) -> NotImplementedError:
    return NotImplementedError(
        f"smp: '{path}' is split over the TP_GROUP and got a cache that it has not filled: its "
        f"keys have shape {list(keys.shape)} instead of {wanted}.  peft's prefix tuning, and a "
        "script that fills a cache, need this attention and its like whole: "
        f"smp.set_tensor_parallelism('{path}', False) before smp.DistributedModel"
    )


def _cache_among(arguments: dict[str, Any]) -> Any:
    caches = (arguments.get(name) for name in CACHES)
    return next((cache for cache in caches if cache is not None), None)


def _keys(arguments: dict[str, Any], module: nn.Module) -> Tensor | None:
    """The cache's keys for the attention before its call; None: none."""
    cache = _cache_among(arguments)
    if hasattr(cache, "cross_attention_cache"):
        is_cross = any(arguments.get(name) is not None for name in _STATES_OF_OTHERS)
        cache = cache.cross_attention_cache if is_cross else cache.self_attention_cache
    if isinstance(cache, tuple | list):  # of transformers before 4.36: this layer's
        return cache[0] if cache and isinstance(cache[0], Tensor) else None
    layers: Any = getattr(cache, "layers", getattr(cache, "key_cache", ()))  # before 4.56
    number = getattr(module, "layer_idx", None)
    if number is None or not 0 <= number < len(layers):
        return None
    keys = getattr(layers[number], "keys", layers[number])
    return keys if isinstance(keys, Tensor) and keys.dim() == 4 else None
