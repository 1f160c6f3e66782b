# SPDX-License-Identifier: Apache-2.0
"""Events of a cell -> the notebook's display.

One rank seen: its text is written as it comes. Several: whole lines, each with its rank in front;
what a rank draws with carriage returns (a progress bar) gets a display of its own that is updated
in place. Errors are kept to the end and shown whichever ranks are seen.
"""

import re
import sys
import uuid

from IPython.display import clear_output, publish_display_data

from .errors import DdipCellError

# What makes equal errors of two ranks look different: colours, addresses, numbers of cells.
_NOISE = re.compile(r"\x1b\[[0-9;]*m|0x[0-9a-fA-F]+|In\s?\[\d+\]")
_LINE_MAX = 65536  # characters; an unfinished line is shown from there on


class Renderer:
    """Shows one cell. see: the ranks to show, None for all; quiet: nothing before the end.

    hidden: {rank: characters not shown}. done: the `done` event, None before it came.
    """

    def __init__(self, see=(0,), quiet=False):
        self.see = None if see is None else frozenset(see)
        self.several = see is None or len(self.see) > 1
        self.hidden, self.errors, self.done = {}, [], None
        self._held = [] if quiet else None
        self._lines = {}  # (rank, stream) -> the text of its unfinished line
        self._bars = {}  # (rank, stream) -> display id of the bar on that line
        self._dirty = False

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
        return kind(done["status"], done["ranks"], list(merged.values()), note)

    def _status(self, event):
        state = event.get("execution_state")
        if state == "queued":
            self._write("stderr", f"ddip: waiting; {event.get('position', 0)} before it\n")
        elif state == "stopping" and event["rung"] != "interrupt":
            ranks = ", ".join(map(str, event["ranks"]))
            what = {"abort": "releasing", "kill": "killing"}[event["rung"]]
            self._write("stderr", f"ddip: {what} ranks {ranks}: {event['reason']}\n")

    def _write(self, name, text):
        (sys.stderr if name == "stderr" else sys.stdout).write(text)
        self._dirty = True

    def _stream(self, event):
        rank, name, text = event.get("rank"), event["name"], event["text"]
        if not self.several or rank is None:
            return self._write(name, text)
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
        line = _overwritten(line).rstrip("\r")
        if (rank, name) in self._bars:
            self._bar(rank, name, line)
            del self._bars[rank, name]
        else:
            self._write(name, f"[{rank}] {line}\n")

    def _bar(self, rank, name, text):
        known = (rank, name) in self._bars
        shown = self._bars.setdefault((rank, name), uuid.uuid4().hex)
        data = {"text/plain": f"[{rank}] {text.rstrip(chr(13))}"}
        publish_display_data(data, transient={"display_id": shown}, update=known)

    def _display(self, event):
        data, rank = dict(event["data"]), event.get("rank")
        if self.several and rank is not None:
            if set(data) <= {"text/plain"}:
                data["text/plain"] = f"[{rank}] {data.get('text/plain', '')}"
            else:
                self._write("stdout", f"[{rank}]\n")
        self.flush()
        publish_display_data(
            data,
            event.get("metadata") or {},
            transient=event.get("transient") or {},
            update=event["type"] == "update_display_data",
        )

    def _clear(self, event):
        if not self.several:  # one rank of several must not wipe the others' lines
            self.flush()
            clear_output(wait=bool(event.get("wait")))


_SHOWN = {
    "stream": Renderer._stream,
    "display_data": Renderer._display,
    "update_display_data": Renderer._display,
    "execute_result": Renderer._display,
    "clear_output": Renderer._clear,
}


def _overwritten(line):
    """What a terminal shows of a line with carriage returns. One at the end is kept: whatever is
    written next starts from the left again."""
    end = "\r" if line.endswith("\r") else ""
    return line.rstrip("\r").rpartition("\r")[2] + end
