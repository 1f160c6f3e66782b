# SPDX-License-Identifier: Apache-2.0
"""Answers what is asked beside the cell that runs: completion, inspection, the list of variables.

A thread of its own does it: the daemon waits for 0.4 s only, and a cell may run for hours. It runs
no property and no repr of the rank's objects (lookup.py); IPython asks for `__dir__`, `__len__`.
"""

import _thread
import contextlib
import copy
import itertools
import re
import signal
import warnings

from IPython.core.completer import (
    IPCompleter,
    ProvisionalCompleterWarning,
    rectify_completions,
)
from IPython.core.oinspect import OInfo
from IPython.utils.tokenutil import token_at_cursor

from ddip_worker import lib, lookup, namespace, streams

MATCHES_MAX = 500
TEXT_MAX = 256 * 1024  # characters of a docstring, of a source
# Characters before the cursor that are looked at: to complete, to inspect, of a line, of an
# expression that does not parse. Whoever parses holds the GIL.
CODE_MAX, CALL_MAX, LINE_MAX, TRIM_MAX = 8 * 1024, 1024, 200, 200
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")


class _Completer(IPCompleter):
    """IPython's, for what a rank alone knows: names, attributes, keys, arguments."""

    @property
    def matchers(self):
        wanted = ("python_", "dict_key_")
        return [each for each in super().matchers if each.__name__.startswith(wanted)]

    def _evaluate_expr(self, expr):
        expr = expr.strip()
        if _DOTTED.match(expr):
            with contextlib.suppress(AttributeError, NameError):
                return lookup.resolve(self.namespace, expr)[1]
        return super()._evaluate_expr(expr)

    def _extract_code(self, line):
        return super()._extract_code(line) if line.strip() else line  # IPython's fails

    def _trim_expr(self, code):
        """IPython's parses once per character, whole cells if they do not parse."""
        return super()._trim_expr(code) if len(code) <= TRIM_MAX else ""

    def python_func_kw_matches(self, text):
        """Arguments by name of the call the cursor is in; IPython's own runs properties for it."""
        call = _open_call(self.text_until_cursor)
        if "." in text or not _DOTTED.match(call):
            return []
        try:
            names = self._default_arguments(lookup.resolve(self.namespace, call)[1])
        except (AttributeError, NameError, TypeError):
            return []
        return sorted(f"{name}=" for name in names if name.startswith(text))


def _open_call(line):
    """What stands before the innermost parenthesis that is open at the line's end, or ""."""
    depth = 0
    for at in reversed(range(len(line))):
        if line[at] in ")]}":
            depth += 1
        elif line[at] in "([{":
            if not depth:
                return re.search(r"[\w.]*$", line[:at])[0] if line[at] == "(" else ""
            depth -= 1
    return ""


def _form(obj):
    form = lookup.form(obj)
    if form["shape"] is None:
        return None
    parts = [f"shape {form['shape']}", form["dtype"], form["device"]]
    return ", ".join(part for part in parts if part)


class Questions:
    """shell: the rank's; hidden: names that are not listed."""

    def __init__(self, library, shell, hidden):
        self._library, self._names, self._hidden = library, shell.user_ns, hidden
        # no Jedi: it imports the world on first use, for seconds, and runs properties
        self._completer = _Completer(
            shell=shell, namespace=self._names, global_namespace={}, use_jedi=False, parent=shell
        )
        self._inspector = copy.copy(shell.inspector)
        self._inspector.str_detail_level = 9  # never: str() is code of the object's own
        self._inspector.info = self._info
        # for good: provisionalcompleter() puts the filters of the whole process back later
        warnings.filterwarnings("ignore", category=ProvisionalCompleterWarning)

    def start(self):
        """No threading.Thread: it is none of the cells', and not in the lists of theirs."""
        _thread.start_new_thread(self._serve, ())

    def _serve(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        streams.mute_this_thread()
        while True:
            message = self._library.wait_question()
            try:
                content = getattr(self, "_op_" + message.payload["op"])(message.payload)
            except BaseException as e:
                why = {"ename": type(e).__name__, "evalue": str(e), "traceback": []}
                content = {"error": {"code": "raised", **why}}
            with contextlib.suppress(OSError):  # longer than a frame: no answer
                self._library.post(lib.REPLY, content, arg=message.arg)

    def _op_list(self, request):
        return namespace.listing(self._names, self._hidden)

    def _op_complete(self, request):
        cursor = _cursor(request)
        skipped, code = _before(request["code"], cursor, CODE_MAX)
        found = () if code is None else self._completer.completions(code, len(code))
        found = rectify_completions(code, found)
        matches = list(itertools.islice(found, MATCHES_MAX))
        start = skipped + matches[0].start if matches else cursor
        here = {"start": start, "end": cursor}
        types = [{**here, "text": m.text, "type": m.type or ""} for m in matches]
        return {
            "status": "ok",
            "matches": [m.text for m in matches],
            "cursor_start": start,
            "cursor_end": cursor,
            "metadata": {"_jupyter_types_experimental": types},
        }

    def _op_inspect(self, request):
        cursor = _cursor(request)
        code = _before(request["code"], cursor, CALL_MAX)[1]
        rest = request["code"][cursor : cursor + LINE_MAX].partition("\n")[0]
        name = "" if code is None else token_at_cursor(code + rest, len(code))
        reply = {"status": "ok", "found": False, "data": {}, "metadata": {}}
        if not _DOTTED.match(name):
            return reply
        try:
            parent, obj = lookup.resolve(self._names, name)
        except (AttributeError, NameError):
            return reply
        info = OInfo(False, False, True, None, parent, obj)
        detail = request["detail_level"]
        data = self._inspector._get_info(obj, name, info=info, detail_level=detail)
        return {**reply, "found": True, "data": data}

    def _info(self, obj, oname="", info=None, detail_level=0):
        """Inspector.info within bounds."""
        found = type(self._inspector).info(self._inspector, obj, oname, info, detail_level)
        found["string_form"] = _form(obj) or lookup.brief(obj)
        for key in ("docstring", "source", "init_docstring", "class_docstring"):
            text = found.get(key)
            if text and len(text) > TEXT_MAX:
                found[key] = text[:TEXT_MAX] + "\n..."
        return found


def _cursor(request):
    return min(request.get("cursor_pos", len(request["code"])), len(request["code"]))


def _before(code, cursor, most):
    """(how much is left out, the code up to the cursor that is looked at or None)

    IPython's expressions take time that grows with the cube of a line's length, and it fails where
    all lines before are blank.
    """
    start = max(0, cursor - most)
    if start:
        start = code.find("\n", start, cursor) + 1 or start
    line = code.rfind("\n", start, cursor) + 1 or start
    if cursor - line > LINE_MAX:
        start = cursor - LINE_MAX
        break_at = re.search(r"[^\w.]", code[start:cursor])
        if not break_at:  # no name is so long
            return cursor, None
        start += break_at.end()
    text = code[start:cursor]
    blank = len(text) - len(text.lstrip())
    blank = text.rfind("\n", 0, blank) + 1
    return start + blank, text[blank:]
