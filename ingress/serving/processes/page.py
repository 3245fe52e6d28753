"""A page of memory that a child shares with its parent: numbers that outlive the child.

A child that is killed in user code takes the frames that it has not written with it. The number of
the last call that it began is in this page before the first line of that call runs, and that of a
call whose arguments it reads, which may run code of the user too. A child whose user loop stalls
sends no frame: the page has the time at which that loop last turned, and how often it has. The
parent writes one byte: it tells the child to begin no more calls.

Memory that two processes share is sealed. If one could shorten the file, the next access of the
other would end that process with SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from struct import Struct

try:
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl

    _SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
except ImportError:  # on macOS, whose files have no seals
    _SEALS = 0

_SIZE = mmap.PAGESIZE
_BEGUN = Struct("<Q")
_TURNED = Struct("<d")
_ENDS_AT = mmap.PAGESIZE - 1
_READ = Struct("<Q")
_READ_AT = _BEGUN.size + _TURNED.size
_BEATS = Struct("<Q")
_BEATS_AT = _READ_AT + _READ.size


class SharedPage:
    """The page of one child. The child writes it, its parent reads it, but for `end_begins`.

    Made by the parent without a descriptor, in the child with the one that it inherits. The parent
    closes its descriptor once the child has its own.
    """

    __slots__ = ("_memory", "descriptor")

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = new_file(_SIZE)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory stays."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def begin(self, call: int) -> bool:
        """Note that a call begins. Returns false if the parent lets no more calls begin.

        Calls begin in the order of their numbers.
        """
        # Race with the parent, which calls `end_begins` and then reads `last_begun`: this writes
        # and then reads. So one of the two sees the other, and a refusal is never too late.
        if self._memory[_ENDS_AT]:
            return False
        _BEGUN.pack_into(self._memory, 0, call)
        return not self._memory[_ENDS_AT]

    def end_begins(self) -> None:
        """Let no more calls begin. `last_begun` is final once both processors have seen this."""
        self._memory[_ENDS_AT] = 1

    @property
    def last_begun(self) -> int:
        """The number of the last call that has begun; 0 for none."""
        begun: int = _BEGUN.unpack_from(self._memory, 0)[0]
        return begun

    def read(self, call: int) -> None:
        """Note that the arguments of a call are being read; 0 for none."""
        _READ.pack_into(self._memory, _READ_AT, call)

    @property
    def being_read(self) -> int:
        """The number of the call whose arguments are being read; 0 for none."""
        number: int = _READ.unpack_from(self._memory, _READ_AT)[0]
        return number

    def turn(self, now: float) -> None:
        """Note that the user loop turns, in seconds of `monotonic`, the same in all processes."""
        _TURNED.pack_into(self._memory, _BEGUN.size, now)

    @property
    def turned_at(self) -> float:
        """The time at which the user loop last turned; 0 before it serves."""
        turned_at: float = _TURNED.unpack_from(self._memory, _BEGUN.size)[0]
        return turned_at

    def beat(self, now: float) -> None:
        """Note that the user loop turns: this is called on it, a `turn` in any thread."""
        self.turn(now)
        self.begin_loop()

    def begin_loop(self) -> None:
        """Note that the user loop turns, which may stand for any time: the constructor follows."""
        _BEATS.pack_into(self._memory, _BEATS_AT, self.beats + 1)

    @property
    def beats(self) -> int:
        """The number of times that the user loop was seen to turn."""
        beats: int = _BEATS.unpack_from(self._memory, _BEATS_AT)[0]
        return beats

    def close(self) -> None:
        self.close_descriptor()
        # Race with another thread that reads a number just now, without the GIL: the memory is in
        # use, and goes with the last reference.
        with suppress(BufferError):
            self._memory.close()


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
