# SPDX-License-Identifier: Apache-2.0
"""%dipinfo's table: one line where ranks agree, what differs where they do not, bounded."""

from ddip import variables


def row(name, type="int", **more):
    empty = dict.fromkeys(("shape", "dtype", "device", "size_bytes", "repr"))
    return {"name": name, "type": type, **empty, **more}


def tensor(name, shape, device="cpu"):
    array = {"shape": shape, "dtype": "torch.float32", "device": device, "size_bytes": 48}
    return row(name, "Tensor", **array)


def table(*ranks, patterns=()):
    tables = {i: {each["name"]: each for each in rows} for i, rows in enumerate(ranks)}
    return list(variables.lines(tables, patterns))


def test_equal_on_all_ranks():
    shown = table(
        [tensor("w", [3, 4]), row("b", repr="2")], [tensor("w", [3, 4]), row("b", repr="2")]
    )
    assert [line.split() for line in shown] == [
        ["b", "int", "2"],
        ["w", "Tensor", "[3,", "4]", "torch.float32", "cpu", "48", "B"],
    ]


def test_values_by_rank():
    (shown,) = table(*[[row("rank", repr=str(i))] for i in range(3)])
    assert shown.endswith("int  0 | 1 | 2") and "differs" not in shown
    (shown,) = table(*[[row("rank", repr=str(i))] for i in range(9)])
    assert shown.endswith("0 | 1 | 2 | 3 | ...")


def test_kinds_that_differ():
    shown = table([tensor("w", [3, 4])], [tensor("w", [3, 4])], [tensor("w", [2, 4])])
    assert shown[0].split() == ["w", "<-", "differs"] and len(shown) == 3
    assert shown[1].strip().startswith("0, 1: Tensor  [3, 4]") and "2: Tensor  [2, 4]" in shown[2]
    shown = table([row("x", "int", repr="1")], [row("x", "str", repr="'1'")])
    assert "0: int  1" in shown[1] and "1: str  '1'" in shown[2]


def test_each_rank_has_its_own_gpu():
    (shown,) = table([tensor("w", [3], "cuda:0")], [tensor("w", [3], "cuda:1")])
    assert "cuda  48 B" in shown
    assert "differs" in table([tensor("w", [3], "cuda:0")], [tensor("w", [3], "cpu")])[0]


def test_not_there():
    shown = table([row("only", repr="1")], [])
    assert "differs" in shown[0] and "0: int  1" in shown[1] and "1: (not there)" in shown[2]
    assert table([], []) == ["  (nothing)"]


def test_bounds():
    many = [row(f"v{i:04}", repr="x" * 200) for i in range(900)]
    shown = table(many, many)
    assert len(shown) == variables.ROWS_MAX + 1 and "and 700 more" in shown[-1]
    assert max(map(len, shown)) < 120


def test_patterns():
    rows = [row("lr"), row("lr_max"), row("model")]
    assert [line.split()[0] for line in table(rows, patterns=["lr*"])] == ["lr", "lr_max"]
    assert [line.split()[0] for line in table(rows, patterns=["model", "lr"])] == ["lr", "model"]
    assert table(rows, patterns=["none"]) == ["  (nothing)"]
