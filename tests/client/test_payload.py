# SPDX-License-Identifier: Apache-2.0
"""The container: its bytes, what travels out-of-band, what is shared, what is refused."""

import io
import mmap
import pickle
import pickletools
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from ddip import payload


def joined(value):
    parts, size = payload.dump(value)
    data = bytearray().join(parts)
    assert len(data) == size
    return data


def trip(value):
    return payload.load(joined(value))


def fields(data):
    magic, count, reserved, length = struct.unpack_from("<8sIIQ", data)
    return magic, reserved, length, struct.unpack_from(f"<{count}Q", data, 24)


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def test_layout():
    array = np.arange(10_001, dtype=np.uint8)
    data = joined({"a": array, "b": array.astype(np.float32), "small": array[:5].copy()})
    magic, reserved, length, buffers = fields(data)
    assert (magic, reserved, buffers) == (b"DDIPPKL1", 0, (10_001, 40_004))
    at = 64  # 24 + 2 * 8 bytes of header, rounded up
    assert not any(data[40:64])
    assert data[at] == pickle.PROTO[0] and data[at + length - 1] == pickle.STOP[0]
    for size in buffers:
        at, end = -(-(at + length) // 64) * 64, at + length
        assert not any(data[end:at])
        length = size
    assert data[at:] == array.astype(np.float32).tobytes()


def test_layout_without_buffers():
    data = joined({"a": 1})
    magic, _, length, buffers = fields(data)
    assert (magic, buffers, len(data)) == (b"DDIPPKL1", (), 64 + length)


def test_plain_pickle_is_accepted():
    assert payload.load(pickle.dumps({"a": [1]})) == {"a": [1]}
    assert payload.load(memoryview(pickle.dumps(7, protocol=2))) == 7


@pytest.mark.parametrize("size", [3, 2_000_000])
def test_arrays_are_writable_views(size):
    data = joined({"x": np.ones(size), "t": torch.ones(size)})
    for buffer in (data, bytes(data)):
        got = payload.load(buffer)
        got["x"][:] = 5
        got["t"][:] = 5
        assert got["x"].sum() == got["t"].sum() == 5 * size
    if size > 1000:
        got = payload.load(data)
        assert np.shares_memory(got["x"], np.frombuffer(data, np.uint8))
        assert np.shares_memory(got["t"].numpy(), np.frombuffer(data, np.uint8))


def test_dump_copies_nothing_big():
    array = np.zeros(1 << 20)
    parts, _ = payload.dump([array, torch.from_numpy(array)])
    big = [np.frombuffer(part, np.uint8) for part in parts if len(part) > 1 << 20]
    assert len(big) == 2 and all(np.shares_memory(part, array) for part in big)


def test_parts_keep_their_tensor_alive():
    parts, _ = payload.dump(torch.full((100_000,), 3.0))
    [torch.zeros(100_000) for _ in range(20)]
    assert payload.load(bytearray().join(parts)).sum() == 300_000


def test_views_keep_sharing():
    base = torch.arange(10_000.0)
    got = trip({"base": base, "row": base[10:20].view(2, 5), "again": [base.view(100, 100).t()]})
    assert storage_of(got["row"]) == storage_of(got["base"]) == storage_of(got["again"][0])
    got["base"][10] = -1
    assert got["row"][0, 0] == -1 and got["again"][0][10, 0] == -1
    assert len(fields(joined({"base": base, "row": base[10:20]}))[3]) == 1


def test_parameters_and_modules():
    layer = torch.nn.Linear(100, 100)
    tied = trip(torch.nn.Sequential(layer, layer))
    assert tied[0] is tied[1] and isinstance(tied[0].weight, torch.nn.Parameter)
    assert tied[0].weight.requires_grad and torch.equal(tied[0].weight, layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    both = trip({"layer": layer, "optimizer": optimizer})
    assert both["optimizer"].param_groups[0]["params"][0] is both["layer"].weight


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0),
        torch.tensor(3),
        torch.randn(40, 40).bfloat16(),
        torch.randn(40, 40).t()[::2],
        torch.randn(3, 2000)[1],
        torch.zeros(3000, dtype=torch.complex64).conj(),
        torch.zeros(5000, dtype=torch.uint16),
        torch.zeros(5000, dtype=torch.float8_e4m3fn),
        torch.randn(60, 60).to_sparse(),
        torch.randn(60, 60).to_sparse_csr(),
        torch.randn(5000, requires_grad=True),
        torch.randn(5000).as_subclass(Tagged),
        torch.zeros(7).share_memory_(),
    ],
    ids=lambda t: f"{t.dtype}-{t.layout}-{tuple(t.shape)}",
)
def test_tensors_of_all_kinds(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Sparse")
        got = trip(tensor)
    assert type(got) is type(tensor) and got.dtype == tensor.dtype and got.shape == tensor.shape
    assert got.requires_grad == tensor.requires_grad and got.is_conj() == tensor.is_conj()
    if tensor.dtype == torch.float8_e4m3fn:
        got, tensor = got.view(torch.uint8), tensor.view(torch.uint8)
    elif tensor.layout != torch.strided:
        got, tensor = got.to_dense(), tensor.to_dense()
    else:
        assert got.stride() == tensor.stride()
    assert torch.equal(got, tensor)


def test_meta_tensor_carries_no_data():
    data = joined(torch.zeros(1_000_000, device="meta"))
    assert len(data) < 2000 and payload.load(data).shape == (1_000_000,)


def test_stream_names_nothing_of_this_package():
    """The ranks' environment has no `ddip`."""
    data = joined({"t": torch.randn(3000), "n": torch.nn.Linear(2, 2)})
    stream = io.BytesIO(data[64 : 64 + fields(data)[2]])
    names = [arg for op, arg, _ in pickletools.genops(stream) if isinstance(arg, str)]
    assert not [name for name in names if "ddip" in name]
    code = "import sys\ndata = bytearray(sys.stdin.buffer.read())\n"
    code += "sys.modules['ddip'] = None\nfrom payload import load\nprint(load(data)['t'].shape)\n"
    where = payload.__file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code], input=data, cwd=where, capture_output=True)
    assert done.stdout == b"torch.Size([3000])\n", done.stderr.decode()


def test_functions_and_classes_of_main_travel_by_value():
    code = (
        "import sys\nfrom ddip import payload\nk = 3\ndef f(x): return g(x) + k\n"
        "g = lambda x: 2 * x\nclass Point:\n    def __init__(self, x): self.x = x\n"
        "    def twice(self): return Point(2 * self.x)\n"
        "sys.stdout.buffer.write(b''.join(payload.dump({'f': f, 'p': Point(4)})[0]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    got = payload.load(done.stdout)
    assert got["f"](10) == 23 and got["p"].twice().x == 8


def test_ddp_wrapper_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with pytest.raises(pickle.PicklingError, match=r"send its `\.module`"):
            payload.dump({"learn": {"model": model}})
        assert trip(model.module).weight.shape == (2, 2)
    finally:
        torch.distributed.destroy_process_group()


def test_damaged_containers():
    data = joined(np.arange(5000))
    for cut in (9, 25, 70, len(data) - 1):
        with pytest.raises(ValueError, match="damaged payload"):
            payload.load(data[:cut])
    with pytest.raises(ValueError, match="damaged payload"):
        payload.load(b"DDIPPKL1" + struct.pack("<IIQ", 2**32 - 1, 0, 5))


def test_many_small_arrays_stay_in_band():
    values = [np.full(4, i) for i in range(1000)]
    assert len(payload.dump(values)[0]) == 3
    assert all((a == b).all() for a, b in zip(trip(values), values, strict=True))


def test_allocate():
    for size in (0, 10, 5 << 20):
        buffer = payload.allocate(size)
        view = memoryview(buffer)
        assert len(view) == size and not view.readonly
    assert isinstance(buffer, mmap.mmap)
