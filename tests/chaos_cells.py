# SPDX-License-Identifier: Apache-2.0
"""Code for the cells of tests/chaos.py. Each rank keeps a tally of its lines beside the daemon.

The tally of a cell on a rank is a file: `start PID`, then for each line `b WAY` before it is
written and `a WAY` after that. So a line with both was handed over, and one with `b` alone perhaps.
Lines are `TOKEN RANK WAY NUMBER PAD|`, numbered from 0 for each way of writing.
"""

FRAME = """
import os, sys, time, ctypes, signal, subprocess
import torch, torch.distributed as dist
_tally = os.open(f"{tally}/{token}.{{rank}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
os.write(_tally, b"start %d\\n" % os.getpid())
_libc, _count = ctypes.CDLL(None), dict.fromkeys(("py", "fd", "c", "err", "ch"), 0)
def say(way, many=1):
    first, _count[way] = _count[way], _count[way] + many
    line = "".join(f"{token} {{rank}} {{way}} {{first + i}} {pad}|\\n" for i in range(many))
    os.write(_tally, f"b {{way}}\\n".encode() * many)
    if way == "py":
        sys.stdout.write(line)
    elif way == "err":
        sys.stderr.write(line)
    elif way == "fd":
        os.write(1, line.encode())
    elif way == "c":
        _libc.printf(b"%s", line.encode())
        _libc.fflush(None)
    else:
        subprocess.run(["cat"], input=line.encode(), check=True)
    os.write(_tally, f"a {{way}}\\n".encode() * many)
try:
{body}
finally:
    os.close(_tally)
rank * 1000
"""

CHAT = """
for i in range({lines}):
    say(("py", "fd", "c", "err")[i % 4])
    time.sleep({pause})
"""
FLOOD = """
for i in range({lines}):
    say("{way}")
"""
CHILD = """
for i in range(3):
    say("py")
    say("ch", 5)
subprocess.Popen(["sleep", "300"], start_new_session=True)
"""
REDUCE = """
for i in range({lines}):
    x = torch.ones({size})
    dist.all_reduce(x)
    assert int(x[0]) == dist.get_world_size(), x
    say("py")
"""
RAISE = """
say("py")
if rank == {rank} % world_size:
    time.sleep({pause})
    raise ValueError("on purpose")
say("fd")
dist.all_reduce(torch.ones(4)) if {even} else dist.barrier()
say("py")
"""
DIE = """
say("fd")
say("py")
if rank == {rank} % world_size:
    os.kill(os.getpid(), {signal})
dist.all_reduce(torch.ones(4))
say("py")
"""
SLEEP = """
say("py")
time.sleep({seconds})
say("py")
"""
SPIN = """
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    say("py")
    sum(range(20000))
"""
GIL = """
say("py")
ctypes.PyDLL(None).usleep(int({seconds} * 300000))
say("c")
"""
LOADER = """
from torch.utils.data import DataLoader
for batch in DataLoader(torch.arange(24.0), batch_size=4, num_workers=2):
    say("py")
    dist.all_reduce(batch)
"""
# name: how often, code
KINDS = {
    "chat": (8, CHAT),
    "flood": (4, FLOOD),
    "child": (2, CHILD),
    "reduce": (6, REDUCE),
    "raise": (4, RAISE),
    "die": (1, DIE),
    "sleep": (2, SLEEP),
    "spin": (2, SPIN),
    "gil": (2, GIL),
    "loader": (1, LOADER),
}


def make(dice, token, tally):
    """(kind, code) of a cell; what it does follows from the dice alone."""
    kind = dice.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    body = KINDS[kind][1].format(
        lines=dice.randint(1500, 4000) if kind == "flood" else dice.randint(5, 60),
        pause=round(dice.random() * 0.02, 4),
        way=dice.choice(["py", "fd", "err"]),
        size=dice.choice([4, 4_000_000]) if kind == "reduce" else 0,
        rank=dice.randint(0, 5),
        even=dice.random() < 0.5,
        signal=dice.choice(["signal.SIGKILL", "signal.SIGSEGV"]),
        seconds=round(0.2 + dice.random() * 1.5, 2),
    )
    body = "".join(f"    {line}\n" for line in body.strip().splitlines())
    pad = "=" * (90 if kind == "flood" else 3)
    return kind, FRAME.format(tally=tally, token=token, pad=pad, body=body)
