# SPDX-License-Identifier: Apache-2.0
"""Python objects as one payload: a pickle stream plus its big buffers, uncopied.

Layout (integers little endian)::

    0   8  magic b"DDIPPKL1"
    8   4  n, the number of buffers          12  4  reserved, 0
    16  8  length of the pickle stream       24  8n lengths of the buffers
    then the pickle stream, then each buffer; every section starts at a multiple of 64 bytes from
    the start of the payload, with zero bytes between.

The same file runs in the notebook and in the ranks. A payload must therefore name nothing of this
module: the reductions below rebuild tensors from torch's and the standard library's own callables.
"""

import ctypes
import functools
import io
import mmap
import operator
import pickle
import struct
import sys

import cloudpickle

MAGIC = b"DDIPPKL1"
_HEAD = struct.Struct("<8sIIQ")
_ALIGN = 64
_IN_BAND = 4096  # bytes; a smaller buffer costs more as a section of its own
_MMAP = 1 << 20  # bytes; from here on fresh pages beat a zero-filled bytearray


def dump(obj):
    """Returns (parts, size): bytes-like parts to send one after another, and their length in bytes.

    Arrays, DataFrames and tensors are referred to, not copied: send before changing them. What
    `__main__` defines travels by value. A tensor carries its whole storage, as in torch.save, so
    views that share one still share it on arrival; one on a GPU arrives on the CPU.
    Raises pickle.PicklingError, TypeError or what an object's own reduction raises.
    """
    buffers = []

    def keep(buffer):
        raw = buffer.raw()
        if raw.nbytes < _IN_BAND:
            return True
        buffers.append(raw)
        return False

    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=keep).dump(obj)
    sections = [memoryview(stream.getvalue()), *buffers]
    lengths = [section.nbytes for section in sections]
    parts = [_HEAD.pack(MAGIC, len(buffers), 0, lengths[0])]
    parts[0] += struct.pack(f"<{len(buffers)}Q", *lengths[1:])
    size = len(parts[0])
    for section in sections:
        parts += [bytes(-size % _ALIGN), section]
        size += len(parts[-2]) + section.nbytes
    return [part for part in parts if len(part)], size


def load(buffer):
    """The object of a payload, or of a plain pickle stream.

    Arrays and tensors are writable views of `buffer` and keep it alive; a read-only buffer is
    copied first. Raises ValueError for a damaged container, else what unpickling raises.
    """
    view = memoryview(buffer).cast("B")
    if view[:8] != MAGIC:
        return pickle.loads(view)
    if view.readonly:
        view = memoryview(bytearray(view))
    stream, *buffers = _sections(view)
    return pickle.loads(stream, buffers=buffers)


def allocate(size):
    """A writable, zeroed buffer of `size` bytes to receive a payload into."""
    return mmap.mmap(-1, size) if size >= _MMAP else bytearray(size)


def _sections(view):
    if view.nbytes < _HEAD.size:
        raise ValueError("damaged payload: it ends inside its header")
    _, count, _, stream_len = _HEAD.unpack_from(view)
    end = _HEAD.size + 8 * count
    if view.nbytes < end:
        raise ValueError("damaged payload: it ends inside its header")
    sections = []
    for length in (stream_len, *struct.unpack_from(f"<{count}Q", view, _HEAD.size)):
        start = end + -end % _ALIGN
        end = start + length
        sections.append(view[start:end])
    if view.nbytes < end:
        raise ValueError(f"damaged payload: {view.nbytes} bytes of {end}")
    return sections


class _Call:
    """Pickles as the call func(*args); the same instance is rebuilt once and shared."""

    def __init__(self, func, *args):
        self.reduction = func, args

    def __reduce__(self):
        return self.reduction


class _Pickler(cloudpickle.Pickler):
    """Adds to cloudpickle: torch storages out-of-band, and a refusal of DDP wrappers.

    torch reduces every tensor, Parameter, subclass and sparse tensor to its storages and their
    geometry, so storages are the one thing to take over (torch would write each one in-band, once
    per view). Storages have no stable identity in Python: `_storages` finds them by address.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._storages = {}
        self._torch = sys.modules.get("torch")
        parallel = sys.modules.get("torch.nn.parallel.distributed")
        self._ddp = getattr(parallel, "DistributedDataParallel", ())

    def reducer_override(self, obj):
        if isinstance(obj, self._ddp):
            raise pickle.PicklingError(
                "a model wrapped in DistributedDataParallel belongs to its process group; "
                "send its `.module` instead"
            )
        torch = self._torch
        if torch and isinstance(obj, torch.storage.TypedStorage):
            return self._typed(obj._untyped_storage, obj.dtype)
        if torch and isinstance(obj, torch.UntypedStorage):  # of uint16, float8 and the like
            return self._typed(obj, torch.uint8)
        return super().reducer_override(obj)

    def _typed(self, storage, dtype):
        key = storage._cdata
        if key not in self._storages:  # the entry keeps the storage alive, so its address is unique
            self._storages[key] = storage, self._reduce_storage(storage)
        typed, call = self._torch.storage.TypedStorage, self._storages[key][1]
        return functools.partial(typed, wrap_storage=call, dtype=dtype, _internal=True), ()

    def _reduce_storage(self, storage):
        torch, size = self._torch, storage.nbytes()
        if storage.device.type == "meta":
            return _Call(functools.partial(torch.UntypedStorage, size, device="meta"))
        if not size:
            return _Call(torch.UntypedStorage, 0)
        data = pickle.PickleBuffer(
            _memory(storage if storage.device.type == "cpu" else storage.cpu())
        )
        flat = _Call(functools.partial(torch.frombuffer, dtype=torch.uint8), data)
        return _Call(operator.methodcaller("untyped_storage"), flat)


def _memory(storage):
    """The bytes of a CPU storage as a ctypes array that keeps the storage alive."""
    array = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    array.owner = storage
    return array
