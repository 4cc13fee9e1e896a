"""What malloc has given out: to the byte, where resident memory is counted in pages."""

import ctypes
import gc


class _Mallinfo2(ctypes.Structure):
    """Of glibc since 2.33: mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _info() -> _Mallinfo2:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    return mallinfo2()


def bytes_of_system() -> int:
    """What the system has given for blocks that have no pages of their own."""
    return _info().arena


def bytes_in_use() -> int:
    """Of all threads, without Python's small objects, which have arenas of their own.

    What a thread has freed and keeps for its next allocations counts, some KB.
    """
    gc.collect()
    info = _info()
    return info.uordblks + info.hblkhd
