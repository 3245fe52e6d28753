"""Frames over a socket pair between two processes of ingress, in both directions.

    length    4 bytes   of the content in the stream, without this head
    call      8 bytes   the number of the call that the frame belongs to; 0 for none
    kind      1 byte    `messages.Kind`
    form      1 byte    of the content: `_PLAIN`, or one of those below it
    content

Frames that are posted in one turn of the loop are written together, because a system call costs
more than a frame: four at a time, so that the other process begins while this one goes on. If all
were written at the end of the turn, two processes with 32 calls would work by turns. A frame that
no other is likely to follow, of a lone call, is written at once. A content of
64 KiB or more crosses in `shared_memory`. The write side never blocks: what the socket
does not take waits here, and the windows and slots of calls bound it. Nothing listens, and the
sockets have no name: only the child inherits its end. So its frames may be unpickled, and `loads`
is for nothing else.

User code in the child can find the socket, and write to it. What is no frame ends the connection,
with a `FrameError` for its owner: also a frame that is longer than any, or of which only a part
comes, although the other process's loop turns.
"""

from __future__ import annotations

import asyncio
import errno
import io
import mmap
import os
import pickle
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import cache
from importlib import import_module
from struct import Struct
from typing import Any, TypeAlias

from starlette.datastructures import Headers, UploadFile

from ingress.exceptions import UserCodeExit
from ingress.serving.processes.shared_memory import IDLE_S, Received, Segments, unreceived

PICKLE = 5  # the protocol
LARGE = 1 << 16  # bytes of a content from which on it crosses in shared memory
HEAD = Struct("<IQBB")
BATCH = 8  # pieces, two for a frame: so many are written before the turn ends
_PLAIN = 0
_PARTS = 1  # the number of parts and their lengths, 8 bytes each; the parts
_SHARED = 2  # the place in a segment; that content is as of `_PARTS`
_NEW = 3  # the same; the first byte of the frame brings the segment's descriptor
# Kinds of the frames' own.
_DROP = 255  # numbers of segments that their sender uses no more
_LOST = 254  # the place of a content whose segment the receiver could not map
_READ = 1 << 17  # room for one frame at least
_ANCILLARY = 64  # room for a descriptor
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_LATER_S = 0.01
_REST_S = 0.3  # until the rest of a frame is looked for
_BEATS = 2  # of the other loop: at the second it has written all that the socket took
_ALIGNMENT = 64  # of the parts: NumPy is faster then

Content: TypeAlias = "bytes | list[bytes | memoryview]"
"""The content of a frame: the bytes of a pickle, and the buffers that it refers to, if any."""
Buffers: TypeAlias = Sequence[memoryview]

OnFrame = Callable[[int, int, memoryview, Buffers], None]
OnLost = Callable[[], None]


class FrameError(Exception):
    """Bytes that are no frame of the protocol."""


_pickle: Any = pickle


def pickle_by_value() -> None:
    """From now on, pickle by value the classes that no other process can import.

    Those of a notebook, and those made in functions. It needs cloudpickle, which is slower.
    """
    global _pickle
    _pickle = import_module("cloudpickle")


def dumps(value: object, number_of: Callable[[object], int | None] | None = None) -> bytes:
    """Return the pickle of a value, for the content of a frame.

    Of an object for which `number_of` returns a number, the pickle has this number only.
    """
    return _written(value, number_of)


def encode(value: object) -> Content:
    """Return a value as a content. The arrays in it are copied once, into the frame."""
    buffers: list[pickle.PickleBuffer] = []
    content = _written(value, buffers=buffers)
    return [content, *(each.raw() for each in buffers)] if buffers else content


def loads(
    content: bytes | memoryview,
    buffers: Buffers = (),
    find: Callable[[int], object] | None = None,
) -> Any:
    """Return the value of a content, whose code may raise anything: also here, it ends no loop.

    The arrays in it are read-only, and are not copied. `find` returns the object of a number.
    """
    try:
        if find is not None:
            unpickler = _Unpickler(io.BytesIO(content))
            unpickler.find = find
            return unpickler.load()
        return pickle.loads(content, buffers=buffers)
    except Exception:
        raise
    except BaseException as error:
        raise UserCodeExit(error, "a value that arrived") from error


class _Unpickler(pickle.Unpickler):
    find: Callable[[int], object]

    def persistent_load(self, number: int) -> object:
        return self.find(number)


@cache
def _pickler_over(base: Any) -> type[Any]:
    class Pickler(base):  # type: ignore[misc]
        """A pickler that asks for each object, which is slow: for errors, and for uploads."""

        number_of: Callable[[object], int | None] | None

        def persistent_id(self, obj: object) -> int | None:
            return None if self.number_of is None else self.number_of(obj)

        def reducer_override(self, obj: object) -> Any:
            if self.number_of is None and isinstance(obj, UploadFile):
                return _reduced(obj)
            override = getattr(super(), "reducer_override", None)  # cloudpickle's
            return NotImplemented if override is None else override(obj)

    return Pickler


def _written(
    value: object,
    number_of: Callable[[object], int | None] | None = None,
    buffers: list[pickle.PickleBuffer] | None = None,
) -> bytes:
    """Return the pickle of a value, whose code may raise anything: also here, it ends no loop."""
    callback = None if buffers is None else buffers.append
    try:
        if number_of is None:
            try:
                pickled: bytes = _pickle.dumps(value, PICKLE, buffer_callback=callback)
                return pickled
            except TypeError:  # of a large upload, maybe; any other is raised below, again
                if buffers:
                    buffers.clear()
        with io.BytesIO() as file:
            pickler = _pickler_over(_pickle.Pickler)(file, PICKLE, buffer_callback=callback)
            pickler.number_of = number_of
            pickler.dump(value)
            return file.getvalue()
    except Exception:
        raise
    except BaseException as error:
        raise UserCodeExit(error, "a value that was to be sent") from error


def _reduced(upload: UploadFile) -> tuple[Callable[..., UploadFile], tuple[object, ...]]:
    """Return an uploaded file as it crosses, on disk if it is large.

    It is mapped, not read: its content goes from there into the shared memory of the frame.
    """
    file = upload.file
    position = file.tell()
    content: bytes | mmap.mmap
    try:
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, AttributeError):  # it has no descriptor, or is empty
        file.seek(0)
        content = file.read()
        file.seek(position)
    values = pickle.PickleBuffer(content), position, upload.size, upload.filename
    return _uploaded, (type(upload), *values, upload.headers.raw)


def _uploaded(
    kind: type[UploadFile],
    content: bytes | memoryview,
    position: int,
    size: int | None,
    filename: str | None,
    headers: list[tuple[bytes, bytes]],
) -> UploadFile:
    # In memory: the disk would block the loop.
    file = io.BytesIO(content)
    file.seek(position)
    return kind(file, size=size, filename=filename, headers=Headers(raw=headers))


def outside(body: bytes) -> bytes | pickle.PickleBuffer:
    """Return a body for `encode`: a large one stays out of the pickle. It arrives as a view."""
    return pickle.PickleBuffer(body) if len(body) >= LARGE else body


def size_of_content(content: Content) -> int:
    """Return the bytes of a content, which it counts in its window."""
    return len(content) if isinstance(content, bytes) else sum(map(len, content))


class Frames:
    """One end of a socket pair. Owned by the running loop that it is made on.

    `on_frame(kind, call, content, buffers)` gets each frame that arrives; `content` is valid during
    the call, `buffers` for as long as they are referred to. `on_lost()` is called once, when the
    other end or this one is closed. If something that arrived has closed it, `fault` is the error:
    a `FrameError`, or one that `on_frame` has raised. `beats()` is the number of times that the
    other process's loop was seen to turn; without it, the rest of a frame may take any time.

    A content in shared memory that this process cannot map, because it may open no more files or
    has no more memory, arrives as one that raises this when it is read, as any pickle may.
    """

    __slots__ = (
        "_beats", "_chunks", "_context", "_descriptors", "_end", "_have", "_is_due",
        "_is_waiting", "_loop", "_on_frame", "_on_lost", "_out", "_received", "_rest", "_segments",
        "_trimming", "_view", "fault", "is_open",
    )  # fmt: skip

    def __init__(
        self,
        end: socket.socket,
        on_frame: OnFrame,
        on_lost: OnLost,
        beats: Callable[[], int] | None = None,
    ) -> None:
        end.setblocking(False)
        self.is_open = True
        self.fault: Exception | None = None
        self._end = end
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._beats = beats
        self._loop = asyncio.get_running_loop()
        # Not the context of the call that posts: a timer would hold that call's value.
        self._context = Context()
        self._out: list[bytes] = []  # posted in this turn of the loop
        self._chunks: deque[tuple[bytes | memoryview, int]] = deque()  # to write, with descriptors
        self._is_due = self._is_waiting = False
        self._view = memoryview(bytearray(_READ))
        self._have = 0
        self._descriptors: deque[int] = deque()
        self._segments = Segments()
        self._received = Received()
        self._trimming: asyncio.TimerHandle | None = None
        self._rest: asyncio.TimerHandle | None = None  # of a frame that has begun to arrive
        self._loop.add_reader(end, self._read)

    # Sending.

    def post(self, kind: int, call: int, content: Content = b"", *, at_once: bool = False) -> None:
        """Send a frame, by the end of the loop's turn. Without effect once the end is closed.

        `at_once` sends it now, with those before it.
        """
        if type(content) is bytes and len(content) < LARGE:
            self._out.append(HEAD.pack(len(content), call, kind, _PLAIN))
            self._out.append(content)
        else:
            self._post_parts(kind, call, [content] if isinstance(content, bytes) else content)
        if at_once or len(self._out) >= BATCH:
            self._flush()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._flush, context=self._context)

    def post_inline(self, kind: int, content: bytes) -> None:
        """Send the first frame, of any size, for `receive_blocking`."""
        self._out.append(HEAD.pack(len(content), 0, kind, _PLAIN) + content)
        self._flush()

    def _post_parts(self, kind: int, call: int, parts: list[bytes | memoryview]) -> None:
        pieces = _pieces(parts)
        length = sum(map(len, pieces))
        if length < LARGE:
            # Copied now: user code may change an array before the turn of the loop ends.
            self._out.append(b"".join((HEAD.pack(length, call, kind, _PARTS), *pieces)))
            return
        if not self.is_open:
            return
        place, descriptor = self._segments.put(pieces)
        if self._trimming is None:
            self._trimming = self._loop.call_later(IDLE_S, self._trim, context=self._context)
        if descriptor < 0:
            self._out.append(HEAD.pack(len(place), call, kind, _SHARED) + place)
        else:
            self._cut()
            self._chunks.append((HEAD.pack(len(place), call, kind, _NEW) + place, descriptor))

    def _cut(self) -> None:
        """Make what was posted so far a chunk of its own."""
        if self._out:
            self._chunks.append((b"".join(self._out), -1))
            self._out.clear()

    def _trim(self) -> None:
        self._trimming = None
        if numbers := self._segments.drop_idle():
            self.post(_DROP, 0, _packed(numbers))
        if self._segments.has_any:
            self._trimming = self._loop.call_later(IDLE_S, self._trim, context=self._context)

    def _flush(self) -> None:
        self._is_due = False
        self._cut()
        if not self._is_waiting:
            self._write()

    def _write(self) -> None:
        """Write what the socket takes, and have the loop write the rest once it takes more."""
        chunks = self._chunks
        while chunks and self.is_open:
            data, descriptor = chunks[0]
            try:
                if descriptor < 0:
                    sent = self._end.send(data)
                else:
                    sent = self._end.sendmsg((data,), _rights(descriptor))
            except (BlockingIOError, InterruptedError):
                self._is_waiting = True
                self._loop.add_writer(self._end, self._write)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:  # descriptors that are on their way
                    self._loop.remove_writer(self._end)
                    self._is_waiting = True
                    self._loop.call_later(_LATER_S, self._write, context=self._context)
                    return
                self._drop_output()  # the reader will find the end of the connection
                break
            if descriptor >= 0:
                os.close(descriptor)
            if sent == len(data):
                chunks.popleft()
            else:
                chunks[0] = memoryview(data)[sent:], -1
        if self._is_waiting:
            self._is_waiting = False
            if self.is_open:
                self._loop.remove_writer(self._end)

    def _drop_output(self) -> None:
        for _, descriptor in self._chunks:
            if descriptor >= 0:
                os.close(descriptor)
        self._chunks.clear()
        self._out.clear()

    # Receiving.

    def _read(self) -> None:
        try:
            # A frame that brings a descriptor ends what is received at once, so one is room enough.
            size, ancillary, flags, _ = self._end.recvmsg_into(
                (self._view[self._have :],), _ANCILLARY, _CLOSE_ON_EXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size, ancillary, flags = 0, [], 0
        for _, _, descriptors in ancillary:
            self._descriptors.extend(array("i", descriptors))
        if not size:
            self.close()
            return
        if flags & socket.MSG_CTRUNC:
            self._descriptors.append(-1)  # this process may open no more: it was dropped
        self._have += size
        try:
            self._parse()
            if self._descriptors:
                self._check_descriptors()
        except Exception as fault:  # its owner tells of it
            self.close(fault)
        except BaseException:
            self.close()
            raise

    def _parse(self) -> None:
        view, have, offset = self._view, self._have, 0
        while have - offset >= HEAD.size:
            length, call, kind, form = HEAD.unpack_from(view, offset)
            start = offset + HEAD.size
            if length > LARGE:
                raise FrameError(f"a frame of {length} bytes")
            if have - start < length:
                break
            offset = start + length
            content = view[start:offset]
            if form == _PLAIN and kind < _LOST:
                self._on_frame(kind, call, content, ())
            else:
                self._take(kind, call, form, content)
            if not self.is_open:
                return
        self._have = have - offset
        if self._have:
            view[: self._have] = view[offset:have]
        if self._rest is not None and offset:
            self._rest.cancel()
            self._rest = None
        if self._have and self._rest is None:
            self._expect_rest()

    def _expect_rest(self) -> None:
        """See to it that the rest of a frame arrives, if this process can see the other's loop."""
        if self._beats is not None:
            self._rest = self._loop.call_later(
                _REST_S, self._look_for_rest, self._beats() + _BEATS, context=self._context
            )

    def _look_for_rest(self, due: int) -> None:
        # First what has arrived while this loop stood: it completes the frame, or ends the timer.
        timer = self._rest
        self._read()
        if not self.is_open or self._rest is not timer or self._beats is None:
            return
        # A loop that stands has a reason, and its frame may be completed later.
        if self._beats() >= due:
            self.close(FrameError("a part of a frame, and not the rest"))
        else:
            self._rest = self._loop.call_later(
                _REST_S, self._look_for_rest, due, context=self._context
            )

    def _check_descriptors(self) -> None:
        """Raise `FrameError` for descriptors that belong to no frame: they would stay open."""
        # A frame brings one at most, and the one of which only a part is here may have brought it.
        if len(self._descriptors) > (self._have > 0):
            raise FrameError("a descriptor without a frame for it")

    def _take(self, kind: int, call: int, form: int, content: memoryview) -> None:
        """Take a frame whose content has a form of its own."""
        try:
            if kind == _DROP:
                self._received.drop(_unpacked(content))
                return
            if kind == _LOST:
                self._segments.lose(content)
                return
            parts = self._parts(form, content)
        except OSError as error:  # there is no descriptor or memory left
            self.post(_LOST, 0, bytes(content))
            parts = [memoryview(unreceived(error))]
        except Exception as problem:
            raise FrameError(f"a frame whose content is not as it says: {problem!r}") from problem
        self._on_frame(kind, call, parts[0], parts[1:])

    def _parts(self, form: int, content: memoryview) -> list[memoryview]:
        """Return the parts of a content, of one at least. Raises `OSError` as `_map`."""
        if form == _PARTS:
            return _split(memoryview(bytes(content)))  # the buffers outlive this frame
        if form not in (_SHARED, _NEW):
            raise ValueError(f"its form is {form}")
        if form == _NEW:
            self._map(content)
        return _split(self._received.take(content))

    def _map(self, place: memoryview) -> None:
        """Map a segment, with the descriptor that came with the frame. Raises `OSError`."""
        descriptor = self._descriptors.popleft()
        if descriptor < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        try:
            self._received.add(place, descriptor)
        finally:
            os.close(descriptor)

    # The end.

    def close(self, fault: Exception | None = None) -> None:
        """Close this end at once; what was posted and not written is dropped."""
        if not self.is_open:
            return
        self.is_open = False
        self.fault = fault
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        self._drop_output()
        for descriptor in self._descriptors:
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptors.clear()
        self._segments.close()
        self._received.close()
        if self._trimming is not None:
            self._trimming.cancel()
        if self._rest is not None:
            self._rest.cancel()
        self._loop.call_soon(self._on_lost)


def _rights(descriptor: int) -> list[tuple[int, int, array[int]]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", (descriptor,)))]


def _pieces(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the pieces of a content of several parts, each of which begins at a multiple of 64."""
    pieces: list[bytes | memoryview] = []
    for part in (_packed([len(parts), *map(len, parts)]), *parts):
        pieces += (part, bytes(-len(part) % _ALIGNMENT))
    return pieces


def _split(content: memoryview) -> list[memoryview]:
    """Return the parts of a content. Raises `ValueError` if it ends before them."""
    count = _unpacked(content[:8])[0]
    offset = 8 * (count + 1)
    parts = []
    for length in _unpacked(content[8:offset]):
        offset += -offset % _ALIGNMENT
        parts.append(content[offset : offset + length])
        offset += length
    if not 0 < count == len(parts) or offset > len(content):
        raise ValueError(f"{count} parts in {len(content)} bytes")
    return parts


def _packed(numbers: Sequence[int]) -> bytes:
    return array("Q", numbers).tobytes()


def _unpacked(content: memoryview) -> list[int]:
    return content.cast("Q").tolist()


def send_blocking(end: socket.socket, kind: int, content: bytes) -> None:
    """Send one frame before the loop owns the socket. `Frames` takes contents of `LARGE` bytes."""
    end.sendall(HEAD.pack(len(content), 0, kind, _PLAIN) + content)


def receive_blocking(end: socket.socket) -> tuple[int, bytes]:
    """Receive one frame before the loop owns the socket: its kind and content.

    Raises `EOFError` if the other end is closed first.
    """
    length, _, kind, _ = HEAD.unpack(_exactly(end, HEAD.size))
    return kind, _exactly(end, length)


def _exactly(end: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = end.recv(min(size, 1 << 20))
        if not part:
            raise EOFError("the other process closed its end")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
