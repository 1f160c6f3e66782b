# SPDX-License-Identifier: Apache-2.0
"""Requests about a rank's variables: values in and out, listing.

Values travel in memory files: what comes in is mapped copy-on-write, so arrays are writable and
nothing is copied until it is written to; what goes out is written to a fresh one.
"""

import io
import json
import mmap
import os

from ddip_worker import lookup, payload

JSON, TEXT, NPY, PICKLE = (
    "application/json",
    "text/plain",
    "application/x-npy",
    "application/x-pickle",
)
ROWS_MAX = 1000


class Refused(Exception):
    """The request cannot be served: code is "not_found" or "invalid"; nothing has changed."""

    def __init__(self, code, detail, hint=None):
        super().__init__(detail)
        self.content = {"code": code, "detail": detail, "hint": hint}


class Namespace:
    def __init__(self, names, hidden):
        """names: the rank's variables; hidden: those that IPython put there itself."""
        self._vars, self._hidden = names, hidden

    def serve(self, request, fd):
        """(content, payload fd or -1). Raises Refused, or whatever the user's objects raise."""
        return getattr(self, "_op_" + request["op"])(request, fd)

    def _op_put(self, request, fd):
        self._vars[request["name"]] = _decode(_map(fd), request["content_type"])
        return {}, -1

    def _op_put_many(self, request, fd):
        values = _decode(_map(fd), PICKLE)
        if not isinstance(values, dict) or not all(
            isinstance(name, str) and name.isidentifier() for name in values
        ):
            raise Refused("invalid", "the payload must be a pickled dict of {identifier: object}")
        self._vars.update(values)
        return {"names": sorted(values)}, -1

    def _op_get(self, request, fd):
        value = self._lookup([request["name"]])[request["name"]]
        content_type, parts = _encode(value, request.get("content_type"))
        return {"content_type": content_type}, _memory_file(parts)

    def _op_get_many(self, request, fd):
        parts, _ = payload.dump(self._lookup(request["names"]))
        return {"content_type": PICKLE}, _memory_file(parts)

    def _op_delete(self, request, fd):
        self._lookup([request["name"]])
        del self._vars[request["name"]]
        return {}, -1

    def _op_list(self, request, fd):
        return listing(self._vars, self._hidden), -1

    def _lookup(self, names):
        missing = [name for name in names if name not in self._vars]
        if missing:
            raise Refused(
                "not_found",
                f"there is no variable {', '.join(missing)} on this rank",
                "GET the namespace to list what is there",
            )
        return {name: self._vars[name] for name in names}


def listing(names, hidden):
    """The variables by name, ROWS_MAX of them; quick, and without running code of their own."""
    found = sorted(n for n in list(names) if not n.startswith("_") and n not in hidden)
    rows = []
    for name in found[:ROWS_MAX]:
        value = names.get(name)
        array = lookup.form(value)
        text = lookup.brief(value) if array["shape"] is None else None
        rows.append({"name": name, "type": type(value).__name__, **array, "repr": text})
    return {"variables": rows, "omitted": len(found) - len(rows)}


def _map(fd):
    size = os.fstat(fd).st_size
    if size == 0:
        return memoryview(b"")
    return memoryview(
        mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    )


def _memory_file(parts):
    """A sealed memfd with the parts one after another. Raises OSError when memory is out."""
    import fcntl

    fd = os.memfd_create("ddip-pull", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            while view:
                view = view[os.write(fd, view) :]
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _decode(data, content_type):
    if content_type == JSON:
        try:
            return json.loads(bytes(data))
        except ValueError as e:
            raise Refused("invalid", f"the body is not JSON: {e}") from None
    if content_type == TEXT:
        try:
            return bytes(data).decode()
        except UnicodeDecodeError as e:
            raise Refused("invalid", f"the body is not UTF-8: {e}") from None
    if content_type == NPY:
        import numpy

        try:
            return numpy.load(io.BytesIO(data), allow_pickle=False)
        except ValueError as e:
            raise Refused("invalid", f"the body is not an .npy array: {e}") from None
    return payload.load(data)


def _encode(value, content_type):
    """(content type, parts). No type asked for: JSON where JSON can say it, else repr text."""
    if content_type in (JSON, None):
        try:
            return JSON, [json.dumps(value, allow_nan=False).encode()]
        except (TypeError, ValueError) as e:
            if content_type:
                raise Refused(
                    "invalid",
                    f"a {type(value).__name__} cannot be said in JSON: {e}",
                    f"ask for {TEXT}, {NPY} or {PICKLE}",
                ) from None
    if content_type == NPY:
        return NPY, [_npy(value)]
    if content_type == PICKLE:
        return PICKLE, payload.dump(value)[0]
    text = value if isinstance(value, str) else repr(value)
    return TEXT, [text.encode(errors="backslashreplace")]


def _npy(value):
    import numpy

    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    out = io.BytesIO()
    try:
        numpy.save(out, numpy.asarray(value), allow_pickle=False)
    except ValueError as e:
        raise Refused(
            "invalid", f"a {type(value).__name__} is no plain array: {e}", f"ask for {PICKLE}"
        ) from None
    return out.getbuffer()
