"""Memory that a child shares with its parent: segments for large contents, and a few numbers.

    sender                                            receiver
    copies the content into a segment that is free    maps a segment when it first comes
    sends its number, the first time its descriptor   makes views of it, which user code gets
    finds the segment free again                  <-  marks it free when the last view is gone

A segment has no name: it goes with the last process that has mapped it, also if that is killed. It
is used again, because the system takes longer to hand out a page of memory than to copy one. The
sender drops a segment that has been free for a while.

    byte 0      1 while the receiver has views of the segment
    byte 64     the content

The numbers outlive a child that is killed in user code, and that takes the frames that it has not
written with it: that of the last call that it began, before the first line of that call runs, and
that of a call whose arguments it reads, which may run code of the user too. A child whose user loop
stalls sends no frame: two numbers are the time at which that loop last turned, and how often it
has. The parent writes one byte: it tells the child to begin no more calls.

Memory that two processes share is sealed. If one could shorten the file, the next access of the
other would end that process with SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct

from ingress.exceptions import RayServeException

try:
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl

    _SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
except ImportError:  # on macOS, whose files have no seals
    _SEALS = 0

IDLE_S = 0.5  # until a segment that is free may be dropped
_START = 64
_COPIED = 1 << 20  # bytes at a time: other threads may take the GIL between two copies
_PLACE = Struct("<IQQ")
_FREE, _USED = 0, 1


@dataclass(eq=False, slots=True)
class _Segment:
    """One segment, as its sender has it. `is_fresh` until it has been idle for a while."""

    number: int
    size: int
    memory: mmap.mmap
    is_fresh: bool = True


@dataclass(eq=False, slots=True)
class Segments:
    """The segments of a sender. Owned by the loop of its frames."""

    _last: int = 0
    _segments: list[_Segment] = field(default_factory=list)

    def put(self, pieces: Sequence[bytes | memoryview]) -> tuple[bytes, int]:
        """Copy a content, which is in pieces, into a segment.

        Returns the name of the place, for `Received.take`, and the descriptor of the segment, or -1
        if the receiver has the segment. The caller closes the descriptor. Raises `OSError` if there
        is no memory or no descriptor left.
        """
        length = sum(map(len, pieces))
        segment, descriptor = self._with_room(length + _START)
        offset = _START
        with memoryview(segment.memory) as memory:
            for piece in pieces:
                view = memoryview(piece)
                for start in range(0, len(piece), _COPIED):
                    copied = view[start : start + _COPIED]
                    memory[offset : offset + len(copied)] = copied
                    offset += len(copied)
        segment.memory[0] = _USED
        segment.is_fresh = True
        return _PLACE.pack(segment.number, segment.size, length), descriptor

    def _with_room(self, size: int) -> tuple[_Segment, int]:
        """Return a free segment of at least this size, and its descriptor if it is new, else -1."""
        fitting = [each for each in self._segments if each.size >= size and each.memory[0] == _FREE]
        if fitting:
            return min(fitting, key=lambda each: each.size), -1
        size = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())  # pages that are unused take none
        descriptor = new_file(size)
        self._last += 1
        segment = _Segment(self._last, size, mmap.mmap(descriptor, size))
        self._segments.append(segment)
        return segment, descriptor

    def drop_idle(self) -> list[int]:
        """Drop the segments that have been free since the last look; return their numbers."""
        idle = [each for each in self._segments if each.memory[0] == _FREE and not each.is_fresh]
        self._segments = [each for each in self._segments if each not in idle]
        for each in self._segments:
            each.is_fresh = False
        return [each.number for each in idle]

    def lose(self, place: memoryview) -> None:
        """Drop the segment of a place: its receiver could not map it, and never marks it free."""
        lost, _, _ = _PLACE.unpack(place)
        self._segments = [each for each in self._segments if each.number != lost]

    @property
    def has_any(self) -> bool:
        return bool(self._segments)

    def close(self) -> None:
        """Drop all segments: the connection is closed."""
        self._segments.clear()


@dataclass(eq=False, slots=True)
class Received:
    """The segments that a receiver has mapped. Owned by the loop of its frames.

    Views of them may be dropped in any thread.
    """

    _segments: dict[int, mmap.mmap] = field(default_factory=dict)
    _views: dict[int, weakref.ref[object]] = field(default_factory=dict)

    def add(self, place: memoryview, descriptor: int) -> None:
        """Map a segment that comes for the first time. The caller closes the descriptor.

        Raises `OSError` if this process may have no more memory, or no more descriptors, and
        `ValueError` if the segment is not as its place says.
        """
        number, size, _ = _PLACE.unpack(place)
        if number in self._segments or size <= _START or not has_final_size(descriptor):
            raise ValueError(f"segment {number} is no new one of {size} bytes")
        self._segments[number] = mmap.mmap(descriptor, size)

    def take(self, place: memoryview) -> memoryview:
        """Return a read-only view of a content. Raises `LookupError` if there is no such place.

        The segment is free again once the view, and all that was made of it, is gone.
        """
        number, _, length = _PLACE.unpack(place)
        memory = self._segments[number]
        room = len(memory) - _START
        if length > room:
            raise IndexError(f"{length} bytes in a segment of {room}")
        # All of it, whatever is used: ctypes makes a type for each size.
        whole = (ctypes.c_char * room).from_buffer(memory, _START)

        def free(_: object) -> None:
            # Any thread runs this, the garbage collector's too: one store, and no lock.
            memory[0] = _FREE

        self._views[number] = weakref.ref(whole, free)
        return memoryview(whole).toreadonly().cast("B")[:length]

    def drop(self, numbers: Sequence[int]) -> None:
        """Unmap segments that their sender uses no more."""
        for number in numbers:
            del self._segments[number], self._views[number]

    def close(self) -> None:
        """Unmap all segments that have no views: the connection is closed."""
        self._segments.clear()
        self._views.clear()


class _Unreceived:
    """The value of a content that did not arrive: reading its pickle raises an error."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _raise_unreceived, (self._reason,)


def unreceived(error: OSError) -> bytes:
    """Return a content for the place of one whose segment this process could not map."""
    reason = f"{os.strerror(error.errno or 0)} in process {os.getpid()}"
    if error.errno == errno.EMFILE:
        reason += "; have its code close what it opens, or raise the limit (`ulimit -n`)"
    return pickle.dumps(_Unreceived(reason))


def _raise_unreceived(reason: str) -> None:
    raise RayServeException(f"shared memory for a large content could not be opened: {reason}")


class Numbers(ctypes.Structure):
    """The numbers of one child. The child writes them, its parent reads them, but for `is_ending`.

    last_begun   the number of the last call that has begun; 0 for none
    being_read   the number of the call whose arguments are being read; 0 for none
    turned_at    the time at which the user loop last turned, in seconds of `monotonic`, the same in
                 all processes; 0 before it serves. The child may write it in any thread
    beats        the number of times that the user loop was seen to turn
    is_ending    the parent lets no more calls begin: `last_begun` is final once both processors
                 have seen this
    """

    _fields_ = (
        ("last_begun", ctypes.c_uint64),
        ("being_read", ctypes.c_uint64),
        ("turned_at", ctypes.c_double),
        ("beats", ctypes.c_uint64),
        ("is_ending", ctypes.c_bool),
    )


class SharedNumbers:
    """The numbers of one child, in memory that it shares with its parent.

    Made by the parent without a descriptor, in the child with the one that it inherits. The parent
    closes its descriptor once the child has its own.
    """

    __slots__ = ("descriptor", "numbers")

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = new_file(mmap.PAGESIZE)
        self.descriptor = descriptor
        self.numbers = Numbers.from_buffer(mmap.mmap(descriptor, mmap.PAGESIZE))

    def close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def begin(self, call: int) -> bool:
        """Note that a call begins. Returns false if the parent lets no more calls begin.

        Calls begin in the order of their numbers.
        """
        # Race with the parent, which sets `is_ending` and then reads `last_begun`: this writes and
        # then reads. So one of the two sees the other, and a refusal is never too late.
        if self.numbers.is_ending:
            return False
        self.numbers.last_begun = call
        return not self.numbers.is_ending

    def close(self) -> None:
        """Unmap the memory. A thread that reads a number just now keeps it until it has."""
        self.close_descriptor()
        self.numbers = Numbers()


def new_file(size: int) -> int:
    """Return the descriptor of a file in memory, without a name. Raises `OSError`.

    Its size is final, where the system has seals.
    """
    if _SEALS:
        descriptor = os.memfd_create("ingress-replica", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile(prefix="ingress-replica") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    if _SEALS:
        fcntl(descriptor, F_ADD_SEALS, _SEALS)
    return descriptor


def has_final_size(descriptor: int) -> bool:
    """Return whether the other process cannot shorten a file, as far as the system can say."""
    try:
        return not _SEALS or fcntl(descriptor, F_GET_SEALS) & F_SEAL_SHRINK != 0
    except OSError:  # it is no file in memory
        return False
