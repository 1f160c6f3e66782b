# SPDX-License-Identifier: Apache-2.0
"""Events of a cell -> the notebook's display.

One rank seen: its text is written as it comes. Several: whole lines, each with its rank in front;
what ranks draw with carriage returns (progress bars) stands in lanes that are updated in place.
Errors are kept to the end and shown whichever ranks are seen.

A browser does not bear all that ranks can print: what exceeds the limit stays in the record, and
the last of it is shown at the end.
"""

import os
import re
import sys

from IPython.display import clear_output, publish_display_data

from . import lanes
from .errors import DdipCellError

# What makes equal errors of two ranks look different: colours, addresses, numbers of cells.
_NOISE = re.compile(r"\x1b\[[0-9;]*m|0x[0-9a-fA-F]+|In\s?\[\d+\]")
_LINE_MAX = 65536  # characters; an unfinished line is shown from there on
LIMIT = 1_000_000  # characters of a cell's text that are shown; $DDIP_OUTPUT_LIMIT says another
_TAIL = 2000  # characters of the end that are shown of what exceeds it


class Renderer:
    """Shows one cell. see: the ranks to show, None for all; quiet: nothing before the end; full:
    no limit; way: the magic that shows all of the cell.

    hidden: {rank: characters not shown}. done: the `done` event, None before it came. places: where
    the ranks were that had to be stopped, {rank: place}.
    """

    def __init__(self, see=(0,), quiet=False, full=False, way="%dipattach --full"):
        self.see = None if see is None else frozenset(see)
        self.several = see is None or len(self.see) > 1
        self.hidden, self.errors, self.done, self.places = {}, [], None, {}
        self._held = [] if quiet else None
        self._lines = {}  # (rank, stream) -> the text of its unfinished line
        self._bars = {}  # (rank, stream) -> the Lanes that the bar on that line stands in
        self._last_line = lanes.LastLine()
        self._lanes = lanes.Lanes(self._last_line)  # the newest
        self._dirty = False
        self.way, self._limit = way, None if full else _limit()
        self._shown = _Extent()
        self._cut, self._tail = 0, ""  # characters beyond the limit, and the last of them

    def follow(self, cell):
        """Shows a Cell's events as they come, up to its end."""
        for event in cell:
            self.handle(event)
            if not cell.buffered:
                self.flush()

    def handle(self, event):
        """Shows an event, or keeps it. Call `flush` when no further one is waiting."""
        kind, rank = event["type"], event.get("rank")
        if kind == "error":
            self.errors.append(event)
        elif kind == "done":
            self.done = event
        elif kind == "status":
            self._status(event)
        elif kind not in _SHOWN:
            return
        elif not (rank is None or self.see is None or rank in self.see):
            self.hidden[rank] = self.hidden.get(rank, 0) + len(event.get("text", ""))
        elif self._held is None:
            _SHOWN[kind](self, event)
        elif kind == "clear_output" and not self.several:
            self._held.clear()
        else:
            self._held.append(event)

    def flush(self):
        """Makes everything written visible now."""
        if self._dirty:
            sys.stdout.flush()
            sys.stderr.flush()
            self._dirty = False

    def close(self):
        """Shows what was kept back. Call it once, after the last event."""
        held, self._held = self._held, None
        for event in held or ():
            _SHOWN[event["type"]](self, event)
        for (rank, name), rest in self._lines.items():
            if rest and (rank, name) not in self._bars:
                self._line(rank, name, rest)
        self._lines.clear()
        self._lanes.passed(None)
        self._end_of_cut()
        self.flush()

    def check(self):
        """Raises DdipCellError unless the cell ended well on every rank."""
        if self.errors or not self.done or self.done["status"] != "ok":
            raise self.error()

    def error(self, kind=DdipCellError, note=None):
        """An exception telling how the cell ended, with equal errors of several ranks merged."""
        # a rank that was stopped while it waited for others says nothing of the cause
        stopped = "KeyboardInterrupt"
        causes = [e for e in self.errors if not e.get("released") and e["ename"] != stopped]
        merged = {}
        for event in causes or self.errors:
            trace = event.get("traceback") or []
            key = _NOISE.sub("", "\n".join([event["ename"], event["evalue"], *trace]))
            fields = {"ename": event["ename"], "evalue": event["evalue"], "traceback": trace}
            ranks = merged.setdefault(key, {**fields, "ranks": []})["ranks"]
            if event.get("rank") is not None:
                ranks.append(event["rank"])
        done = self.done or {"status": "unfinished", "ranks": {}}
        notes = [note] if note else []
        notes += _stopped_at(self.places)
        return kind(done["status"], done["ranks"], list(merged.values()), "\n".join(notes) or None)

    def _status(self, event):
        state = event.get("execution_state")
        if state == "queued":
            ahead = event.get("position")
            why = f"{ahead} before it" if ahead else "the group is starting"
            self._write("stderr", f"ddip: waiting; {why}\n")
        elif state == "stopping" and "before" in event:
            for place in event["stacks"]:
                self.places.update(dict.fromkeys(place["ranks"], place))
        elif state == "stopping" and event["rung"] != "interrupt":
            ranks = ", ".join(map(str, event["ranks"]))
            what = {"abort": "releasing", "kill": "killing"}[event["rung"]]
            self._write("stderr", f"ddip: {what} ranks {ranks}: {event['reason']}\n")

    def _write(self, name, text, rank=None):
        self._lanes.passed(rank)
        (sys.stderr if name == "stderr" else sys.stdout).write(text)
        self._dirty = True

    def _text(self, name, text, rank=None):
        """Writes what ranks have printed, up to the limit."""
        if self._cut or self._shown.exceeds(self._limit, text):
            if not self._cut:
                told = f"ddip: more than {self._limit} characters; the end will be shown, "
                self._write("stderr", f"{told}`{self.way}` shows all\n")
            self._cut += len(text)
            self._tail = (self._tail + text)[-_TAIL:]
        else:
            self._write(name, text, rank)

    def _end_of_cut(self):
        if self._cut:
            left = self._cut - len(self._tail)
            if left:
                told = f"ddip: {left} characters left out here; `{self.way}` shows all"
                self._write("stderr", f"{told}\n")
            self._write("stdout", self._tail)

    def _stream(self, event):
        rank, name, text = event.get("rank"), event["name"], event["text"]
        if not self.several or rank is None:
            return self._text(name, text)
        *lines, rest = (self._lines.get((rank, name), "") + text).split("\n")
        for line in lines:
            self._line(rank, name, line)
        if "\r" in rest:
            rest = _overwritten(rest)
            self._bar(rank, name, rest)
        elif len(rest) > _LINE_MAX:
            self._line(rank, name, rest)
            rest = ""
        self._lines[rank, name] = rest

    def _line(self, rank, name, line):
        drawn = "\r" in line.rstrip("\r")  # a bar, and it may have come all at once
        line = _overwritten(line).rstrip("\r")
        if drawn or (rank, name) in self._bars:
            self._bar(rank, name, line)
            del self._bars[rank, name]
        else:
            self._text(name, f"[{rank}] {line}\n", rank)

    def _bar(self, rank, name, text):
        if (rank, name) not in self._bars:
            if not self._lanes.has_room(rank, name):
                self._lanes.passed(None)
                self._lanes = lanes.Lanes(self._last_line)
            self._bars[rank, name] = self._lanes
        self._bars[rank, name].show(rank, name, text.rstrip("\r"))

    def _display(self, event):
        data, rank = dict(event["data"]), event.get("rank")
        if self.several and rank is not None:
            if set(data) <= {"text/plain"}:
                data["text/plain"] = f"[{rank}] {data.get('text/plain', '')}"
            else:
                self._write("stdout", f"[{rank}]\n", rank)
        self._lanes.passed(rank)
        self.flush()
        publish_display_data(
            data,
            event.get("metadata") or {},
            transient=event.get("transient") or {},
            update=event["type"] == "update_display_data",
        )

    def _gap(self, event):
        who = "" if event.get("rank") is None else f"rank {event['rank']}: "
        size = f", {event['dropped_bytes']} bytes" if "dropped_bytes" in event else ""
        why = f": {event['reason']}" if event.get("reason") else ""
        text = f"ddip: {who}{event['dropped_events']} events{size} are missing here{why}"
        self._write("stderr", text + "\n")

    def _clear(self, event):
        if not self.several:  # one rank of several must not wipe the others' lines
            self.flush()
            clear_output(wait=bool(event.get("wait")))


class _Extent:
    """How many characters are to be seen: what a carriage return overwrites counts no more."""

    def __init__(self):
        self._lines = self._line = 0  # of the lines that have ended, of the last one

    def exceeds(self, limit, text):
        """Adds text, and says whether that is more than the limit (None: there is none)."""
        *ended, last = text.split("\n")
        for line in ended:
            self._add(line)
            self._lines, self._line = self._lines + self._line + 1, 0
        self._add(last)
        return limit is not None and self._lines + self._line > limit

    def _add(self, piece):
        _, overwrites, rest = piece.rstrip("\r").rpartition("\r")
        self._line = len(rest) if overwrites else self._line + len(rest)


def _limit():
    """Of the environment; 0 means none."""
    text = os.environ.get("DDIP_OUTPUT_LIMIT", "")
    return (int(text) or None) if text.isdecimal() else LIMIT


_SHOWN = {
    "stream": Renderer._stream,
    "display_data": Renderer._display,
    "update_display_data": Renderer._display,
    "execute_result": Renderer._display,
    "clear_output": Renderer._clear,
    "gap": Renderer._gap,
}


def place_text(place):
    """One line for where ranks are: `Cell In[3], line 7: dist.all_reduce(x)`."""
    source = (place["user"] or {}).get("source")
    return place["where"] + (f": {source}" if source else "")


def rank_list(ranks):
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _stopped_at(places):
    """What to say of ranks that had to be stopped; those at one place share a line."""
    ranks = {}
    for rank in sorted(places):
        ranks.setdefault((place_text(places[rank]), bool(places[rank]["user"])), []).append(rank)
    for (text, is_line), those in ranks.items():
        verb = " were at" if len(those) > 1 else " was at"
        yield f"{rank_list(those)}{verb if is_line else ':'} {text}"


def _overwritten(line):
    """What a terminal shows of a line with carriage returns. One at the end is kept: whatever is
    written next starts from the left again."""
    end = "\r" if line.endswith("\r") else ""
    return line.rstrip("\r").rpartition("\r")[2] + end
