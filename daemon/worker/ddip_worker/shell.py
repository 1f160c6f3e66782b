# SPDX-License-Identifier: Apache-2.0
"""An IPython shell whose output is events: ipykernel's part, without its sockets and loop.

Content follows Jupyter's messaging specification, so that a front end can show it as it is.
"""

import builtins
import contextlib
import os
import re
import sys
import traceback
import types

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

_CELL = re.compile(r"<ipython-input-(\d+)-")


class _DisplayHook(DisplayHook):
    """`execute_result` events."""

    def start_displayhook(self):
        self._content = {"data": {}, "metadata": {}, "execution_count": self.prompt_count}

    def write_output_prompt(self):
        pass

    def write_format_data(self, format_dict, md_dict=None):
        self._content["data"] = format_dict
        self._content["metadata"] = md_dict or {}

    def finish_displayhook(self):
        if self._content["data"]:
            self.shell.emit("execute_result", self._content)


class _DisplayPublisher(DisplayPublisher):
    """`display_data`, `update_display_data` and `clear_output` events."""

    def publish(self, data, metadata=None, source=None, *, transient=None, update=False, **kwargs):
        self.shell.emit(
            "update_display_data" if update else "display_data",
            {"data": data, "metadata": metadata or {}, "transient": transient or {}},
        )

    def clear_output(self, wait=False):
        self.shell.emit("clear_output", {"wait": bool(wait)})


class _Compiler(CachingCompiler):
    """Names of code that also say which of the daemon's cells it is: who reads a stack from outside
    can then find the line's text."""

    _cell = (0, None)

    def set_cell(self, number, code):
        self._cell = number, code

    def get_code_name(self, raw_code, transformed_code, number):
        name = super().get_code_name(raw_code, transformed_code, number)
        cell, code = self._cell
        start = f"<ipython-input-{number}-"
        if raw_code != code or not name.startswith(start):  # code that a cell makes and runs
            return name
        return f"{start}{cell}-{name.removeprefix(start)}"


class Shell(InteractiveShell):
    """One per rank. Before the first cell these must be set: `emit(type, content)`;
    `raising(lost_peers)`, called when an exception has left the user's code and is going to be
    formatted, which returns true if the rank was being stopped; and `entering()`, called when
    user code is going to run.

    released: the last exception only says that the rank waited for others that will not come.
    """

    compiler_class = Type(_Compiler)
    displayhook_class = Type(_DisplayHook)
    display_pub_class = Type(_DisplayPublisher)
    emit = None
    raising = None
    entering = None
    released = False
    _shown = False

    def init_display_formatter(self):
        super().init_display_formatter()
        # the base shell is a terminal's: it would reduce a DataFrame to text
        self.display_formatter.active_types = self.display_formatter.format_types

    @contextlib.contextmanager
    def _tee(self, channel):
        """IPython 9 would keep all that a cell prints, for a history that is not kept."""
        yield

    async def run_code(self, *args, **kwargs):
        self.entering()
        return await super().run_code(*args, **kwargs)

    def enable_gui(self, gui=None):
        """Event loops of windows have no place in a rank; `%matplotlib inline` asks for none."""

    def ask_exit(self):
        print(
            "exit and quit do nothing in a rank; delete or restart the group instead",
            file=sys.stderr,
        )

    def showtraceback(self, exc_tuple=None, *args, **kwargs):
        # formatting reads sources and values: it can take seconds, or wait for a GPU
        exc = (exc_tuple or sys.exc_info())[1]
        lost_peers = _lost_its_peers(exc)
        self.released = self.raising(lost_peers) or lost_peers
        self._shown = False
        if not self.released and not isinstance(exc, KeyboardInterrupt):
            super().showtraceback(exc_tuple, *args, **kwargs)
        if exc and not self._shown:  # not to be formatted, or interrupted while that was done
            self._show_error(type(exc).__name__, _text_of(exc), _brief(exc))

    def show_usage_error(self, exc):
        self._show_error("UsageError", str(exc), [f"UsageError: {exc}"])

    def _format_exception_for_storage(self, exception, *args, **kwargs):
        # IPython would format it all again for a history that is not kept
        return {"ename": type(exception).__name__, "evalue": _text_of(exception), "traceback": []}

    def _showtraceback(self, etype, evalue, stb):
        lines = [stb] if isinstance(stb, str) else list(stb)
        self._show_error(etype.__name__, _text_of(evalue), lines)

    def _show_error(self, ename, evalue, traceback):
        self._shown = True
        content = {"ename": ename, "evalue": evalue, "traceback": traceback}
        self.emit("error", {**content, "released": True} if self.released else content)


def make(emit, raising, entering, namespace):
    """The shell, with a fresh `__main__` as its module, holding `namespace` besides."""
    module = types.ModuleType("__main__", "The namespace of this rank.")
    module.__dict__.update(namespace)
    config = Config()
    config.HistoryManager.enabled = False  # ranks must not share the user's history file
    config.InteractiveShell.colors = "neutral"
    sys.modules["__main__"] = module
    shell = Shell.instance(config=config, user_module=module)
    shell.emit = emit
    shell.raising = raising
    shell.entering = entering
    builtins.input = _no_input
    return shell


def _text_of(exc):
    try:
        return str(exc)
    except Exception as e:
        return f"<str() of the exception raised {type(e).__name__}>"


def _lost_its_peers(exc):
    """gloo's and the store's words for a connection that ended at its other side."""
    text = _text_of(exc) if isinstance(exc, RuntimeError) else ""
    ends = ("closed by peer", "reset by peer", "Connection was likely closed")
    return ("gloo" in text or "c10d" in text) and any(end in text for end in ends)


def _brief(exc):
    """Where a rank was when it was stopped: its frames in plain text, quickly made."""
    frames = traceback.extract_tb(exc.__traceback__)
    first = next((i for i, f in enumerate(frames) if _CELL.match(f.filename)), 0)
    lines = ["Traceback (most recent call last):"]
    for frame in frames[first:]:
        if os.path.dirname(frame.filename) == os.path.dirname(__file__):
            continue
        cell = _CELL.match(frame.filename)
        where = f"Cell In[{cell[1]}]" if cell else f'File "{frame.filename}"'
        lines.append(f"{where}, line {frame.lineno}, in {frame.name}\n    {frame.line}")
    text = _text_of(exc).partition("\n")[0]
    lines.append(f"{type(exc).__name__}: {text}" if text else type(exc).__name__)
    return lines


def _no_input(prompt=""):
    __tracebackhide__ = True
    raise RuntimeError("a rank has no keyboard: input() works in the notebook itself only")
