# SPDX-License-Identifier: Apache-2.0
"""Tab and Shift-Tab in cells that run on the ranks: what only the ranks have, beside what is here.

Two hooks: a matcher of IPython's completer, which merges it with all others; and the shell's
`object_inspect_mime`, which gets a name alone, so the cell is taken from the front end's request.
A question takes ANSWER_S at most, whatever the daemon or the network is at: a thread asks it.
"""

import re
import threading
from urllib.parse import quote, urlencode

from IPython.core.completer import SimpleCompletion, context_matcher

from .errors import DdipError
from .transport import request

ANSWER_S = 0.5  # the daemon gives up after 0.4 s
_LINE = re.compile(r"\s*%%?(\w+)\s(?:.*\s)?(\S*)$")  # of a magic, up to the cursor
_NAME, _RANK = re.compile(r"--name[=\s]\s*(\S+)\s"), re.compile(r"\s(?:-r|--rank)[=\s]?\s*(\d+)\s")


class RemoteNames:
    """place(code): (group, rank, where the ranks' code starts) of a cell, None if it runs here.
    magic(name): our magic of that name, or None."""

    def __init__(self, shell, client, place, magic):
        self._shell, self._client, self._place, self._magic = shell, client, place, magic
        self._plain, self._asking = None, None

    def install(self):
        self._shell.Completer.custom_matchers.append(self.match)
        self._plain = self._shell.object_inspect_mime
        self._shell.object_inspect_mime = self.inspect

    def remove(self):
        self._shell.Completer.custom_matchers.remove(self.match)
        del self._shell.object_inspect_mime

    @context_matcher(identifier="ddip")
    def match(self, context):
        """A matcher as IPython wants it."""
        before, code = context.text_until_cursor, context.full_text
        line = _LINE.match(before)
        if line and (parser := getattr(self._magic(line[1]), "parser", None)):
            found = _words(parser, line[2])
            if line[1] == "dipull" and not line[2].startswith("-"):
                found = self._to_pull(before, line[2])
            return _result(found, line[2], suppress=True)
        start = sum(len(each) + 1 for each in code.split("\n")[: context.cursor_line])
        return self._remote(code, start + len(before))

    def _remote(self, code, cursor):
        reply = self._ask("complete", code, cursor)
        if not reply:
            return _result([], "")
        kinds = reply["metadata"].get("_jupyter_types_experimental", ())
        kinds = {each["text"]: each["type"] for each in kinds}
        found = [SimpleCompletion(text, type=kinds.get(text)) for text in reply["matches"]]
        length = reply["cursor_end"] - reply["cursor_start"]
        return _result(found, code[cursor - length : cursor])

    def _to_pull(self, line, word):
        """Variables of the rank that a line of %dipull names."""
        group, rank, _ = self._place("%%dip\n")
        named, asked = _NAME.search(line), _RANK.search(line)
        group, rank = named[1] if named else group, int(asked[1]) if asked else rank
        query = {"rank": rank, "wait": "false"}
        reply = self._in_time("GET", f"{_path(group, 'namespace')}?{urlencode(query)}")
        names = [row["name"] for row in reply["variables"]] if reply else []
        return [SimpleCompletion(n, type="variable") for n in names if n.startswith(word)]

    def inspect(self, name, detail_level=0, omit_sections=()):
        """InteractiveShell.object_inspect_mime: of the rank's object, else of ours."""
        message = getattr(self._shell, "get_parent", dict)() or {}
        if message.get("header", {}).get("msg_type") == "inspect_request":
            content = message["content"]
            cursor, more = content["cursor_pos"], {"detail_level": detail_level}
            reply = self._ask("inspect", content["code"], cursor, **more)
            if reply and reply["found"]:
                return reply["data"]
        return self._plain(name, detail_level=detail_level, omit_sections=omit_sections)

    def _ask(self, what, code, cursor, **more):
        """The rank's reply; None for what is not the ranks', or if there is none in time."""
        place = self._place(code)
        if place is None or cursor < place[2]:
            return None
        group, rank, start = place
        body = {"code": code[start:], "cursor_pos": cursor - start, "rank": rank, **more}
        return self._in_time("POST", _path(group, what), body)

    def _in_time(self, method, path, body=None):
        """The daemon's answer, or None; at once while one is still waited for."""
        if self._asking and self._asking.is_alive():
            return None
        replies = []

        def ask():
            try:
                endpoint = self._client().endpoint
                replies.append(request(endpoint, method, path, body, timeout=ANSWER_S))
            except (DdipError, OSError, ValueError):
                pass  # no daemon, no group, no answer: no matches

        self._asking = threading.Thread(target=ask, name="ddip asks a rank", daemon=True)
        self._asking.start()
        self._asking.join(ANSWER_S)
        return replies[0] if replies else None


def _path(group, what):
    return f"/v1/groups/{quote(group, safe='')}/{what}"


def _words(parser, word):
    """Options and choices of a magic that start with word."""
    options = [option for action in parser._actions for option in action.option_strings]
    places = [action for action in parser._actions if not action.option_strings]
    choices = [choice for action in places for choice in action.choices or ()]
    found = options if word.startswith("-") else choices
    return [SimpleCompletion(each, type="param") for each in found if each.startswith(word)]


def _result(completions, fragment, suppress=False):
    return {
        "completions": completions,
        "matched_fragment": fragment,
        "suppress": suppress and bool(completions),
    }
