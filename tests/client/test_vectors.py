# SPDX-License-Identifier: Apache-2.0
"""The golden frames of proto/vectors, read by a decoder that shares nothing with the C one."""

import json
import struct
from pathlib import Path

import pytest

VECTORS = json.loads(
    (Path(__file__).parents[2] / "proto/vectors/frames.json").read_text(encoding="ascii")
)
HEADER = struct.Struct("<BBBBIQIIII")
FIELDS = ("version", "type", "flags", "nfds", "length", "number", "cell", "arg", "out", "err")
VERSION, MAX_FDS = 1, 3


class BadFrame(Exception):
    pass


def fault(data: bytes) -> str | None:
    """What is wrong with the start of a frame, as soon as its bytes are there."""
    rules = [
        (1, lambda: data[0] != VERSION, "unknown protocol version"),
        (2, lambda: data[1] == 0, "frame type 0"),
        (3, lambda: data[2] != 0, "unknown flag"),
        (4, lambda: data[3] > MAX_FDS, "too many file descriptors"),
        (
            8,
            lambda: int.from_bytes(data[4:8], "little") > VECTORS["max_payload"],
            "payload longer than the limit",
        ),
    ]
    return next((text for need, broken, text in rules if len(data) >= need and broken()), None)


def decode(data: bytes) -> tuple[dict, bytes, bytes] | None:
    """(header, payload, rest), or None while bytes are missing."""
    if trouble := fault(data):
        raise BadFrame(trouble)
    if len(data) < HEADER.size:
        return None
    header = dict(zip(FIELDS, HEADER.unpack_from(data), strict=True))
    end = HEADER.size + header["length"]
    return None if len(data) < end else (header, data[HEADER.size : end], data[end:])


def named(vectors):
    return pytest.mark.parametrize("vector", vectors, ids=lambda v: v["name"])


@named(VECTORS["good"])
def test_good(vector):
    want = dict(vector["frame"], version=VERSION, number=int(vector["frame"]["number"]))
    payload = bytes.fromhex(want.pop("payload_hex"))
    data = bytes.fromhex(vector["hex"])
    assert decode(data) == (want, payload, b"")
    assert decode(data + b"\xff") == (want, payload, b"\xff")
    assert HEADER.pack(*(want[name] for name in FIELDS)) + payload == data


@named(VECTORS["good"])
def test_good_cut(vector):
    data = bytes.fromhex(vector["hex"])
    assert all(decode(data[:n]) is None for n in range(len(data)))


@named(VECTORS["bad"])
def test_bad(vector):
    with pytest.raises(BadFrame) as caught:
        decode(bytes.fromhex(vector["hex"]))
    assert str(caught.value) == vector["error"]


def test_names_and_types():
    """Every vector can be told apart, and every type the two sides use today has one."""
    names = [v["name"] for v in VECTORS["good"] + VECTORS["bad"]]
    assert len(names) == len(set(names))
    assert {v["frame"]["type"] for v in VECTORS["good"]} >= {*range(1, 8), *range(16, 24)}
    assert HEADER.size == VECTORS["header_bytes"]
