# SPDX-License-Identifier: Apache-2.0
"""The checks of tests/chaos.py find what they are there for."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos_record import Tally, Window, check_seen  # noqa: E402

LINES = 6


def record():
    """Two lines by Python, two by the pipe, in turns, from each of two ranks."""
    events = [{"type": "execute_input", "rank": None, "code": "x/K1.{rank}", "ranks": [0, 1]}]
    for rank in (0, 1):
        for i in range(LINES):
            way, number = ("py", "fd")[i % 2], i // 2
            text = f"K1 {rank} {way} {number} ===|\n"
            events.append({"type": "stream", "rank": rank, "name": "stdout", "text": text})
        events.append({"type": "rank_done", "rank": rank})
    events.append({"type": "done", "rank": None, "status": "ok"})
    return [{"seq": 4 + i, "group": "g", "cell": 1, **event} for i, event in enumerate(events)]


@pytest.fixture
def findings(tmp_path):
    """findings(events, living, alone): what the checks say; each rank has written all its lines."""
    for rank in (0, 1):
        words = "".join(f"b {way}\na {way}\n" for way in ("py", "fd") * (LINES // 2))
        (tmp_path / f"K1.{rank}").write_text(f"start {100 + rank}\n{words}")

    def check(events, living=(0, 1), alone=True):
        lines = [json.dumps(event).encode() + b"\n" for event in events]
        pids = {rank: 100 + rank for rank in living}
        window = Window("g", 3, lines, pids, alone)
        return list(window.check([Tally(path) for path in tmp_path.iterdir()]))

    return check


def numbered(events):
    return [{**event, "seq": 4 + i} for i, event in enumerate(events)]


def test_a_whole_record_is_good(findings):
    assert findings(record()) == []


@pytest.mark.parametrize("at", range(1, 1 + LINES))
def test_a_missing_or_double_line_is_found(findings, at):
    events = record()
    assert findings(numbered(events[:at] + events[at + 1 :]))
    assert findings(numbered(events[: at + 1] + events[at:]))


def test_a_swap_of_lines_is_found(findings):
    events = record()
    events[1]["text"], events[3]["text"] = events[3]["text"], events[1]["text"]
    assert findings(events)


def test_a_torn_line_is_found(findings):
    events = record()
    events[2]["text"] = events[2]["text"].rstrip("\n")
    assert findings(events)
    events = record()
    events[1]["text"] = "K1 0 p"
    assert findings(events, living=[1])


def test_of_a_dead_rank_the_last_lines_may_be_missing_but_not_others(findings):
    events = record()
    last_py = numbered(events[: LINES - 1] + events[LINES:])
    assert findings(last_py) and not findings(last_py, living=[1])
    first_py = numbered(events[:1] + events[2:])
    assert findings(first_py, living=[1])
    last_fd = numbered(events[:LINES] + events[LINES + 1 :])
    assert findings(last_fd, living=[1]) and not findings(last_fd, living=[1], alone=False)


def test_numbers_and_ends_are_looked_at(findings):
    events = record()
    assert findings(events[:3] + events[4:])
    assert findings(numbered(events[:-1]))
    assert findings(numbered([*events, events[-1]]))
    assert findings([event for event in numbered(events) if event["type"] != "rank_done"])


def test_a_cell_that_ran_twice_is_found(findings, tmp_path):
    with open(tmp_path / "K1.0", "a") as tally:
        tally.write("start 555\n")
    assert findings(record())


class Seen:
    name = "http"

    def __init__(self, *lines):
        self._lines = list(lines)

    def lines(self):
        return list(self._lines)


def test_what_a_client_saw_is_the_start_of_the_record():
    lines = [b'{"seq":1}\n', b'{"seq":2}\n', b'{"seq":3}\n']
    for good in ((), lines, lines[:2], [*lines[:2], b'{"se'], [b'{"seq":1}\n', b'{"seq']):
        assert not list(check_seen(Seen(*good), lines))
    for bad in (lines[1:], [*lines, lines[2]], [lines[0], lines[2]], [b'{"seq": 1}\n'], [b"{1"]):
        assert list(check_seen(Seen(*bad), lines))
