# SPDX-License-Identifier: Apache-2.0
"""Progress bars of several ranks side by side: a lane for each, in the order of the ranks.

A notebook gets one display that is updated in place. A terminal cannot change what it has shown but
for its last line, so there the lanes share that one.
"""

import shutil
import sys
import uuid

from IPython import get_ipython
from IPython.display import publish_display_data


class LastLine:
    """That of a terminal, which all lanes of a cell share."""

    def __init__(self):
        self._drawn = False  # the cursor stands behind it

    def draw(self, rows):
        width = shutil.get_terminal_size().columns - 1
        sys.stdout.write("\r" + "  ".join(rows)[:width].ljust(width))
        sys.stdout.flush()
        self._drawn = True

    def leave(self):
        if self._drawn:
            sys.stdout.write("\n")
            self._drawn = False


class Lanes:
    def __init__(self, last_line):
        self._rows = {}  # (rank, stream) -> text
        self._left = set()  # ranks that have shown something below
        self._display = uuid.uuid4().hex
        self._last_line = last_line

    def has_room(self, rank, stream):
        """False if a new bar of that rank belongs further down."""
        return (rank, stream) not in self._rows and rank not in self._left

    def show(self, rank, stream, text):
        known = bool(self._rows)
        self._rows[rank, stream] = f"[{rank}] {text}"
        rows = [self._rows[key] for key in sorted(self._rows)]
        if _in_terminal():
            self._last_line.draw(rows)
        else:
            data = {"text/plain": "\n".join(rows)}
            publish_display_data(data, transient={"display_id": self._display}, update=known)

    def passed(self, rank):
        """That rank shows something else now; None: nobody's, or everybody's."""
        self._left.add(rank)
        self._last_line.leave()


def _in_terminal():
    shell = get_ipython()
    return shell is not None and not hasattr(shell, "kernel")
