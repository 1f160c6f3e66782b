# SPDX-License-Identifier: Apache-2.0
"""The ranks' variables as one table that shows where ranks differ."""

import fnmatch
from concurrent.futures import ThreadPoolExecutor

from .errors import DdipError

ASKED_AT_ONCE = 8  # ranks
ROWS_MAX, TEXT_MAX, VALUES_MAX = 200, 60, 4  # rows; characters of a value; values side by side


def gather(client, group, ranks):
    """({rank: {name: row}}, {rank: why it has not answered}), as they are now."""

    def ask(rank):
        try:
            return {row["name"]: row for row in client.variables(group, rank, wait=False)}
        except DdipError as error:
            return error.detail

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = dict(zip(ranks, pool.map(ask, ranks), strict=True))
    tables = {rank: rows for rank, rows in answers.items() if isinstance(rows, dict)}
    return tables, {rank: why for rank, why in answers.items() if rank not in tables}


def lines(tables, patterns=()):
    """The table of gather's tables: a line per variable, more where its kind differs by rank."""
    names = sorted({name for rows in tables.values() for name in rows})
    names = [n for n in names if not patterns or any(fnmatch.fnmatch(n, p) for p in patterns)]
    for name in names[:ROWS_MAX]:
        yield from _lines(name, {rank: rows.get(name) for rank, rows in tables.items()})
    if len(names) > ROWS_MAX:
        start = names[ROWS_MAX][:1]
        yield f"  ... and {len(names) - ROWS_MAX} more; `%dipinfo {start}*` shows some"
    if not names:
        yield "  (nothing)"


def _lines(name, rows):
    kinds = {}
    for rank, row in rows.items():
        kinds.setdefault(_kind(row), []).append(rank)
    if len(kinds) == 1:
        (kind,) = kinds
        yield f"  {name:20} {kind}{_values(rows)}"
        return
    yield f"  {name:20} <- differs"
    for kind, ranks in kinds.items():
        theirs = {rank: rows[rank] for rank in ranks}
        yield f"    {', '.join(map(str, ranks)):>6}: {kind}{_values(theirs)}"


def _kind(row):
    """What is to be the same on all ranks; a GPU's index is not."""
    if row is None:
        return "(not there)"
    device = (row.get("device") or "").partition(":")[0] or None
    parts = [row["type"], row.get("shape"), row.get("dtype"), device]
    if row.get("size_bytes") is not None:
        parts.append(f"{row['size_bytes']} B")
    return "  ".join(str(part) for part in parts if part is not None)


def _values(rows):
    """What the ranks have: once if it is equal, else by rank."""
    values = [_short(row.get("repr")) for row in rows.values() if row]
    if not any(values):
        return ""
    if len(set(values)) == 1:
        return f"  {values[0]}"
    more = " | ..." if len(values) > VALUES_MAX else ""
    return "  " + " | ".join(text or "?" for text in values[:VALUES_MAX]) + more


def _short(text):
    if text is None or len(text) <= TEXT_MAX:
        return text
    return text[: TEXT_MAX - 3] + "..."
