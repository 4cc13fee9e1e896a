"""The kernels for GPUs, launched on the pretended accelerator through the driver's stand-in.

What each computes is in ``tests/core/tp_gpu_test.c``.  Spec: csrc/tp_kernels/gpu.h.
"""

import ctypes
import os
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from smp import _core
from smp.tensor_parallel.rows import gpu_kernels, kernels
from tests import accelerator
from tests.ranks import on_ranks

DROP = kernels.Dropout(0.3, 12345, first=5)
TOO_MANY_RESOURCES = 701

alone = on_ranks(1)
on_pretended = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            accelerator.NAME,
            marks=pytest.mark.skipif(accelerator.compiler() is None, reason="no C++ compiler"),
        )
    ],
)


def begin() -> torch.device:
    """A device whose kernels nobody has tried."""
    accelerator.use_driver()
    gpu_kernels._known.clear()
    return accelerator.load()


@contextmanager
def fails(name: bytes, nth: int):
    """The driver's function fails, the nth time from now."""
    library = ctypes.CDLL(os.environ[accelerator.DRIVER])
    address = (ctypes.c_void_p * 1).in_dll(library, "stand_in")[0]
    fail = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int, ctypes.c_int)(address)
    kept = ctypes.create_string_buffer(name)  # the stand-in borrows it
    fail(ctypes.cast(kept, ctypes.c_char_p), nth, TOO_MANY_RESOURCES)
    try:
        yield
    finally:
        fail(None, 0, 0)


def calls(on: torch.device) -> list[torch.Tensor]:
    """Outputs and gradients of one call of each kernel, there."""
    source = torch.Generator().manual_seed(0)

    def leaf(*shape):
        return torch.randn(shape, generator=source).to(on).requires_grad_()

    x, bias, residual, weight, shift = leaf(9, 70), *(leaf(n, 70) for n in (1, 9, 1, 1))
    bias, weight, shift = (t.detach()[0].requires_grad_() for t in (bias, weight, shift))
    targets = torch.randint(0, 70, (9,), generator=source).to(on)
    scores = leaf(2, 3, 5, 33)
    out = [
        kernels.bias_dropout_residual(x, bias, residual, DROP),
        kernels.bias_dropout_residual_layer_norm(x, bias, residual, weight, shift, 1e-5, DROP)[
            0
        ],
        kernels.masked_softmax_dropout(scores, scale=0.5, causal=True, drop=DROP),
        kernels.split_cross_entropy(x, targets, 0, 70, lambda own: own),
        kernels.split_embedding(x, targets, 3),
    ]
    torch.autograd.backward(out, [torch.ones_like(t) * 0.5 + t.detach() for t in out])
    leaves = [x, bias, residual, weight, shift, scores]
    return [t.detach().cpu() for t in out] + [t.grad.cpu() for t in leaves]


@alone
@on_pretended
def test_they_give_what_the_hosts_kernels_give(device, monkeypatch):
    on = begin()
    want = calls(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = calls(on)
    assert gpu_kernels._known == {(on, torch.float32): True}
    for slower in ("tp_norm", "tp_norm_backward"):  # outside of a trial
        monkeypatch.delattr(_core, slower)
    for one, again, other in zip(got, calls(on), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one, again, rtol=0, atol=0)


@alone
@on_pretended
def test_a_driver_that_refuses_leaves_them_to_torch(device):
    on = begin()
    want = calls(torch.device("cpu"))
    with fails(b"cuLaunchKernel", 3), pytest.warns(UserWarning, match="torch's operators do"):
        got = calls(on)
    assert gpu_kernels._known == {(on, torch.float32): False}
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@alone
@on_pretended
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_tried_at_their_first_use(device, dtype, monkeypatch):
    on = begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (torch.float32, dtype):
            assert gpu_kernels.usable(on, one, kernels._trials)
    gpu_kernels._known.clear()
    real = _core.tp_norm

    def wrong(*args):
        real(*args)
        if args[3].dtype == dtype:  # of this one alone, x
            args[10].mul_(1.1)

    with monkeypatch.context() as patch:
        patch.setattr(_core, "tp_norm", wrong)
        with pytest.warns(
            UserWarning, match=f"do not serve {dtype} .*: layer norm of 130 columns differs"
        ):
            assert not gpu_kernels.usable(on, dtype, kernels._trials)
        assert gpu_kernels.usable(on, torch.float32, kernels._trials)


@alone
@on_pretended
@pytest.mark.parametrize("name", ["tp_residual", "tp_residual_backward", "tp_softmax_backward"])
@pytest.mark.parametrize("dtype", gpu_kernels._TOLERANCES, ids=str)
def test_one_that_computes_something_else_is_not_trusted(device, name, dtype, monkeypatch):
    on = begin()
    real = getattr(_core, name)

    def wrong(*args):
        real(*args)
        last = [a for a in args if isinstance(a, torch.Tensor)][-1]
        last.view(-1)[-1:] += 0.01 if dtype == torch.float32 else 0.5

    with monkeypatch.context() as patch:
        patch.setattr(_core, name, wrong)
        with pytest.warns(UserWarning, match=r"differs by 0\.\d"):
            assert not gpu_kernels.usable(on, dtype, kernels._trials)


def no_hooks() -> saved_tensors_hooks:
    def refuse(tensor):
        raise AssertionError("the trial's tensors are not the caller's")

    return saved_tensors_hooks(refuse, refuse)


@alone
@on_pretended
@pytest.mark.parametrize("where", [torch.inference_mode, no_hooks])
def test_the_first_use_may_be_anywhere(device, where, monkeypatch):
    on = begin()
    with where():
        assert gpu_kernels.usable(on, torch.float32, kernels._trials)
        monkeypatch.setenv(gpu_kernels.SWITCH, "0")
        assert not gpu_kernels.usable(on, torch.float32, kernels._trials)


@alone
@on_pretended
@pytest.mark.parametrize("columns", [136, 2048, 2050, 8200])
def test_rows_of_each_form_are_tried(device, columns, monkeypatch):
    """One is wrong for rows of one length and alignment alone."""
    on = begin()
    real = _core.tp_residual

    def wrong(*args):
        real(*args)
        if args[1] == columns:
            args[-1].view(-1)[-1:] += 0.5

    monkeypatch.setattr(_core, "tp_residual", wrong)
    with pytest.warns(UserWarning, match=f"bias, dropout and residual of {columns} columns"):
        assert not gpu_kernels.usable(on, torch.float32, kernels._trials)


@alone
@on_pretended
def test_a_device_whose_tensors_cannot_be_borrowed_is_torchs(device, monkeypatch):
    on = begin()

    def refuse(tensor):
        raise BufferError("no DLPack")

    with monkeypatch.context() as patch:
        patch.setattr(_core, "tp_gpu_open", refuse)
        x = torch.ones(3, 4, device=on)
        dropped = kernels.dropout(x, DROP)
    torch.testing.assert_close(dropped.cpu(), kernels.dropout(x.cpu(), DROP))
    assert gpu_kernels._known == {(on, torch.float32): False}


@alone
@on_pretended
def test_a_launch_that_fails_later_says_what_the_driver_says(device):
    on = begin()
    assert gpu_kernels.usable(on, torch.float32, kernels._trials)
    x = torch.ones(3, 4, device=on)
    with fails(b"cuLaunchKernel", 1), pytest.raises(RuntimeError, match="cuLaunchKernel: "):
        kernels.dropout(x, DROP)
    torch.testing.assert_close(kernels.dropout(x, DROP).cpu(), kernels.dropout(x.cpu(), DROP))


@alone
@on_pretended
def test_tensors_of_two_devices_are_refused(device):
    on = begin()
    x = torch.ones(3, 4, device=on)
    with pytest.raises(ValueError, match="out: on another device than the other tensors"):
        _core.tp_residual(3, 4, DROP.placed(4), x, None, None, torch.ones(3, 4))
    ids = torch.arange(3, device=on)
    for call in (
        lambda: _core.tp_gather(3, 3, 4, 0, x, ids, x),
        lambda: _core.tp_scatter(3, 3, 4, 0, -1, ids, x, x),
    ):
        with pytest.raises(BufferError, match="tensors in host memory only"):
            call()
