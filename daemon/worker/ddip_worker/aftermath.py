# SPDX-License-Identifier: Apache-2.0
"""What a cell that failed would leave behind: the variables of its frames.

A traceback keeps those of every frame it went through: batches on a GPU, iterators whose worker
processes then stay. It is shown by now, and a rank has no debugger to look into it.
"""

import traceback


def forget_frames(exc):
    """Lets go of the variables in the tracebacks of an exception and of those it came from."""
    seen = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        traceback.clear_frames(exc.__traceback__)
        for frame, _ in traceback.walk_tb(exc.__traceback__):
            frame.f_locals  # noqa: B018  a copy that was made to show it; looked at, it is emptied, too
        exc = exc.__cause__ or exc.__context__
