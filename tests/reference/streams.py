"""The rule for random numbers, as a small object that a loop can be given.

Every stream is the default generator in a state of its own; nothing else draws.  Where
there is an accelerator, its generator goes with the default one: seeded alike, put aside
together; all draws of our own are from the default one.

* At the begin of a step, one int64 ``s`` is drawn from the user's generator.  After
  the step the user's generator goes on from right after that draw; after a step that
  failed, from before it.
* The code of microbatch ``i`` (the step function and all that it calls on rank 0)
  draws from a stream seeded with ``mix(s, i)``.
* A remote call draws one int64 ``r`` from its caller's stream.  The callee's forward
  draws from a stream seeded with ``mix(r, 1)``, its backward (which draws only where a
  checkpoint does not restore the state, or a custom function draws in its backward)
  from one seeded with ``mix(r, 2)``.  The caller's stream goes on from right after
  the draw of ``r``.

"Seeded" is ``generator.manual_seed``, "drawn" is ``draw``.  With one rank there are no
streams: the user's generator is used as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

_BITS_64 = (1 << 64) - 1
_BITS_63 = (1 << 63) - 1


def mix(a: int, b: int) -> int:
    """A 63-bit hash of two non-negative integers below 2**63.

    The output function of splitmix64 (Steele, Lea, Flood: "Fast splittable
    pseudorandom number generators", OOPSLA 2014) at state ``a``, ``b + 1`` steps on.
    """
    h = (a + 0x9E3779B97F4A7C15 * (b + 1)) & _BITS_64
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & _BITS_64
    return (h ^ (h >> 31)) & _BITS_63


def draw() -> int:
    """One int64 in [0, 2**63) from the default generator."""
    return int(torch.empty((), dtype=torch.int64).random_())


@contextmanager
def _stream(seed: int) -> Iterator[None]:
    outer = _states()
    for device in [torch.default_generator, *_accelerators()]:
        device.manual_seed(seed)
    try:
        yield
    finally:
        _put_back(outer)


def _accelerators() -> list[ModuleType]:
    """``torch.cuda`` or its like, where there is one: a build for GPUs alone is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return [] if device is None else [torch.get_device_module(device)]


def _states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(device.get_rng_state() for device in _accelerators())]


def _put_back(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(_accelerators(), states[1:], strict=True):
        device.set_rng_state(state)


class Streams:
    """The rule above.  One object serves one step at a time."""

    @contextmanager
    def step(self) -> Iterator[None]:
        before = _states()
        self._step_seed = draw()
        after = _states()
        try:
            yield
        except BaseException:
            _put_back(before)
            raise
        _put_back(after)

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        with _stream(mix(self._step_seed, index)):
            yield

    def call(self) -> int:
        """A remote call begins: ``r``, for ``forward`` and ``backward``."""
        return draw()

    @contextmanager
    def forward(self, r: int) -> Iterator[None]:
        with _stream(mix(r, 1)):
            yield

    @contextmanager
    def backward(self, r: int) -> Iterator[None]:
        with _stream(mix(r, 2)):
            yield


class UserGenerator(Streams):
    """One rank: no draws of our own, every draw is from the user's generator."""

    @contextmanager
    def step(self) -> Iterator[None]:
        yield

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        yield

    def call(self) -> int:
        return 0

    @contextmanager
    def forward(self, r: int) -> Iterator[None]:
        yield

    @contextmanager
    def backward(self, r: int) -> Iterator[None]:
        yield
