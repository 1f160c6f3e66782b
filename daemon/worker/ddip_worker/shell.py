# SPDX-License-Identifier: Apache-2.0
"""An IPython shell whose output is events: ipykernel's part, without its sockets and loop.

Content follows Jupyter's messaging specification, so that a front end can show it as it is.
"""

import builtins
import sys
import types

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config


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


class Shell(InteractiveShell):
    """One per rank. `emit(type, content)` must be set before the first cell."""

    displayhook_class = Type(_DisplayHook)
    display_pub_class = Type(_DisplayPublisher)
    emit = None

    def init_display_formatter(self):
        super().init_display_formatter()
        # the base shell is a terminal's: it would reduce a DataFrame to text
        self.display_formatter.active_types = self.display_formatter.format_types

    def enable_gui(self, gui=None):
        """Event loops of windows have no place in a rank; `%matplotlib inline` asks for none."""

    def ask_exit(self):
        print(
            "exit and quit do nothing in a rank; delete or restart the group instead",
            file=sys.stderr,
        )

    def show_usage_error(self, exc):
        self._show_error("UsageError", str(exc), [f"UsageError: {exc}"])

    def _showtraceback(self, etype, evalue, stb):
        try:
            text = str(evalue)
        except Exception as e:
            text = f"<str() of the exception raised {type(e).__name__}>"
        self._show_error(etype.__name__, text, [stb] if isinstance(stb, str) else list(stb))

    def _show_error(self, ename, evalue, traceback):
        self.emit("error", {"ename": ename, "evalue": evalue, "traceback": traceback})


def make(emit, namespace):
    """The shell, with a fresh `__main__` as its module, holding `namespace` besides."""
    module = types.ModuleType("__main__", "The namespace of this rank.")
    module.__dict__.update(namespace)
    config = Config()
    config.HistoryManager.enabled = False  # ranks must not share the user's history file
    config.InteractiveShell.colors = "neutral"
    sys.modules["__main__"] = module
    shell = Shell.instance(config=config, user_module=module)
    shell.emit = emit
    builtins.input = _no_input
    return shell


def _no_input(prompt=""):
    __tracebackhide__ = True
    raise RuntimeError("a rank has no keyboard: input() works in the notebook itself only")
