# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, as exceptions: DdipError for a request, DdipCellError for a notebook cell."""


class DdipError(Exception):
    """The daemon refused or failed a request.

    status: HTTP status, or None when no answer came; title, detail, hint: the daemon's words, or
    None; rank: the rank it concerns, or None.
    """

    def __init__(self, detail=None, status=None, title=None, hint=None, rank=None):
        super().__init__(detail or title or f"HTTP status {status}")
        self.status, self.title, self.detail = status, title, detail
        self.hint, self.rank = hint, rank

    def __str__(self):
        return self.args[0] + (f"\nhint: {self.hint}" if self.hint else "")


class NotRunning(DdipError, ConnectionError):
    """No daemon answers, or it stopped answering. sent: it may have got what was asked."""

    sent = False

    @classmethod
    def after_sending(cls, *args, **fields):
        error = cls(*args, **fields)
        error.sent = True
        return error


class RankError(DdipError):
    """A rank raised. ename, evalue: the exception's name and text; traceback: its lines (ANSI)."""

    def __init__(self, error, **fields):
        self.ename, self.evalue = error.get("ename", "Error"), error.get("evalue", "")
        self.traceback = error.get("traceback") or []
        super().__init__(**fields)
        self.args = (f"{_ranks([self.rank])}: {self.ename}: {self.evalue}",)


def from_problem(status, body):
    """The exception for an error answer; body: its problem object, or text of any kind."""
    if not isinstance(body, dict):
        return DdipError(str(body or "") or None, status)
    fields = {key: body.get(key) for key in ("title", "detail", "hint", "rank")}
    if isinstance(body.get("error"), dict):
        return RankError(body["error"], status=status, **fields)
    return DdipError(status=status, **fields)


class DdipCellError(Exception):
    """A notebook cell did not end well; IPython shows the ranks' own tracebacks for it.

    status: "error", "interrupted", "lost" or "unfinished"; ranks: {"0": status, ...}; errors:
    [{"ename", "evalue", "traceback", "ranks"}], the first cause first; note: a line to add.
    """

    def __init__(self, status, ranks=None, errors=(), note=None):
        self.status, self.ranks, self.errors, self.note = status, ranks or {}, errors, note
        heads = [f"{_ranks(e['ranks'])}: {e['ename']}: {e['evalue']}" for e in errors]
        super().__init__("; ".join(heads) or note or f"the cell ended as {status!r}")

    def _render_traceback_(self):
        lines = []
        for error in self.errors:
            lines.append(f"\x1b[1;31m--- {_ranks(error['ranks'])} ---\x1b[0m")
            lines += error["traceback"] or [f"{error['ename']}: {error['evalue']}"]
        told = {str(rank) for error in self.errors for rank in error["ranks"]}
        for status in dict.fromkeys(self.ranks.values()):
            alike = [r for r in self.ranks if self.ranks[r] == status and r not in told]
            if status != "ok" and alike:
                lines.append(f"{_ranks(alike)}: {status}")
        lost = ",".join(r for r in self.ranks if self.ranks[r] == "lost")
        if lost:
            lines.append(
                f"`%makedip -r {lost}` starts what was lost again; `%makedip` shows the group"
            )
        return lines + self.note.splitlines() if self.note else lines or [str(self)]


class DdipInterrupted(DdipCellError, KeyboardInterrupt):
    """The user stopped the cell from this notebook."""


def _ranks(ranks):
    if not ranks or ranks[0] is None:
        return "ddipd"
    if ranks == ["here"]:
        return "the notebook"
    ranks = sorted(map(int, ranks))
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
