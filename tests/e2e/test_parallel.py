# SPDX-License-Identifier: Apache-2.0
"""`ddp` of the app torch: loops that were written for one process, on two ranks."""

import json
import secrets

import pytest

SETUP = """
import json, torch
from torch.utils.data import DataLoader, TensorDataset

def make(n=96, bs=16, **options):
    "n numbers to learn the square of; each loader counts what it gives."
    global data, train_dl, model, opt, seen
    torch.manual_seed(5)
    x = torch.linspace(-1, 1, n)[:, None]
    data = TensorDataset(torch.arange(n), x, x**2)
    train_dl = DataLoader(data, batch_size=bs, shuffle=True, **options)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

def train(epochs):
    "The numbers of the items of each batch."
    steps = []
    for _ in range(epochs):
        for number, x, y in train_dl:
            loss = (model(x) - y).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            steps.append(number.tolist())
    return steps

def weights():
    return [p.tolist() for p in model.parameters()]

def show(*values):
    print(json.dumps(values))
"""


@pytest.fixture(scope="module")
def run(daemon):
    """run(code, command=None, ranks=None): what each rank printed last, decoded; or its error."""
    name = f"p{secrets.token_hex(4)}"
    daemon.create(2, name=name, grace_s=1)

    def run(code, command=None, ranks=(0, 1)):
        body = {"code": code, "ranks": list(ranks), "timeout_s": 60}
        if command:
            body["app_command"] = command
        events = daemon.request("POST", f"/v1/groups/{name}/cells", body, timeout=80).events
        errors = [e["evalue"] for e in events if e["type"] == "error"]
        if errors:
            return errors
        text = {rank: "" for rank in ranks}
        for event in events:
            if event["type"] == "stream":
                text[event["rank"]] += event["text"]
        return [json.loads(each.splitlines()[-1]) for each in text.values() if each]

    assert run(SETUP) == []
    yield run
    daemon.delete(name)


def numbers(steps):
    return [number for step in steps for number in step]


def close(ours, others):
    flat = [[v for row in p for v in (row if isinstance(row, list) else [row])] for p in ours]
    want = [[v for row in p for v in (row if isinstance(row, list) else [row])] for p in others]
    return all(a == pytest.approx(b, abs=1e-5) for a, b in zip(flat, want, strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_split_batches_are_the_steps_of_one_process(run, workers):
    """Each rank takes its half of the very batches that one process takes: the same weights."""
    make = f"make(n=88, num_workers={workers})"  # 5 batches of 16, one of 8
    [[plain, learnt]] = run(f"{make}; show(train(3), weights())", ranks=[0])
    run(make)
    first, second = run("show(train(3), weights())", "ddp model train_dl split_batches=True")
    assert first[1] == second[1] and close(first[1], learnt)
    assert [a + b for a, b in zip(first[0], second[0], strict=True)] == plain
    assert {len(step) for step in first[0]} == {8, 4}


def test_shares_of_an_epoch(run):
    """Without it: batches of the size that was given, half as many; each item read by one rank."""
    run("make()")
    first, second = run(
        "show(train(1), len(train_dl), weights())", "ddp model train_dl split_batches=False"
    )
    assert [len(step) for step in first[0]] == [16, 16, 16] and first[1:] == second[1:]
    assert sorted(numbers(first[0]) + numbers(second[0])) == list(range(96))
    again, _ = run("show(train(1))")
    assert numbers(again[0]) != numbers(first[0])  # another order
    # 49 a rank of 97 items: the first in order is read twice; of 33 no batch is left over
    for options, sizes in (("", [16, 16, 16, 1]), (", drop_last=True", [16, 16, 16])):
        run(f"make(n=97{options})")
        first, second = run("show(train(1), len(train_dl))", "ddp model train_dl")
        assert [len(step) for step in first[0]] == sizes and first[1] == len(sizes)
        read = numbers(first[0]) + numbers(second[0])
        assert len(read) - len(set(read)) <= 1


def test_what_cannot_be_wrapped_changes_nothing(run):
    run("make(bs=9); other = 3")
    for command, wrong in {
        "ddp model other": "other is int: neither a torch.nn.Module nor a DataLoader",
        "ddp model missing": "there is no variable 'missing'",
        "ddp train_dl model split_batches=True": "batches of 9 cannot be split in 2 equal parts",
    }.items():
        found = run("", command)
        assert len(found) == 2 and all(wrong in each for each in found), found
        names = "show(type(model).__name__, type(train_dl).__name__)"
        assert run(names) == [["Sequential", "DataLoader"]] * 2


def test_ranks_train_on_after_a_failure(run):
    """The wrapped model belongs to the process group that was; the command wraps it again."""
    command = "ddp model train_dl split_batches=True"
    run("make()", None)
    run("train(1)", command)
    failed = run(
        "for number, x, y in train_dl:\n    model(x).sum().backward()\n    1 // (1 - rank)"
    )
    assert "integer division or modulo by zero" in failed
    assert len(run("train(1)")) == 2  # errors, at once
    first, second = run("show(train(1), weights(), type(model.module).__name__)", command)
    assert first[1:] == second[1:] and first[2] == "Sequential"
    assert sorted(numbers(first[0]) + numbers(second[0])) == list(range(96))
