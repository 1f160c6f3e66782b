# SPDX-License-Identifier: Apache-2.0
"""%autodip's hook: an entry of input_transformers_cleanup, which sees each cell before it runs.

It puts `%%dip ...` in front of a cell while autodip is on. At all times it turns a cell that starts
with `%%dip local` into a plain one, which then runs exactly as if ddip were away.
"""


class Autodip:
    """prefix: "%%dip FLAGS" while on, else None. is_local: says of %%dip flags where they run."""

    def __init__(self, shell, is_local):
        self.prefix = None
        self._shell, self._is_local = shell, is_local
        self._running = True  # the cell that loads us; else the ExecutionInfo of the running one

    def __str__(self):
        return f"on, cells run as `{self.prefix}`" if self.prefix else "off"

    def install(self):
        self._shell.input_transformers_cleanup.append(self.transform)
        self._shell.events.register("pre_run_cell", self._begins)
        self._shell.events.register("post_run_cell", self._ended)
        prompts = getattr(self._shell, "prompts", None)  # a terminal's
        if prompts is not None:
            plain = prompts.in_prompt_tokens
            prompts.in_prompt_tokens = lambda: self._mark(plain())

    def remove(self):
        self._shell.input_transformers_cleanup.remove(self.transform)
        self._shell.events.unregister("pre_run_cell", self._begins)
        self._shell.events.unregister("post_run_cell", self._ended)
        prompts = getattr(self._shell, "prompts", None)
        if prompts is not None:
            vars(prompts).pop("in_prompt_tokens", None)

    def _mark(self, tokens):
        """The prompt of a terminal, which shows that autodip is on."""
        return [(tokens[-1][0], "(dip) "), *tokens] if self.prefix else tokens

    def remote(self, code):
        """(flags of %%dip, where the ranks' code starts) of a cell, None if all of it runs here."""
        lines = code.splitlines(keepends=True)
        at = next((i for i, line in enumerate(lines) if line.strip()), None)
        magic, *flags = lines[at].split(None, 1) if at is not None else [""]
        if magic == "%%dip":
            flags = "".join(flags)
            return None if self._is_local(flags) else (flags, len("".join(lines[: at + 1])))
        if self.prefix and not magic.startswith("%"):
            return self.prefix.removeprefix("%%dip"), 0
        return None

    def transform(self, lines):
        """The lines of a cell -> the lines to run; line numbers of a local cell stay."""
        at = next((i for i, line in enumerate(lines) if line.strip()), None)
        if at is None:
            return lines
        magic, *flags = lines[at].split(None, 1)
        if magic == "%%dip" and self._is_local("".join(flags)):
            return ["\n", *lines[at + 1 :]]
        if self.prefix and not magic.startswith("%") and not self._running and self._asked():
            return [f"{self.prefix}\n", *lines]
        return lines

    def _asked(self):
        """False for code that a front end runs on its own, such as a variable viewer."""
        request = getattr(self._shell, "get_parent", dict)() or {}
        content = request.get("content", {})
        return not content.get("silent") and content.get("store_history") is not False

    # IPython also transforms code inside a running cell (%%time's body, a %time line): not a cell.
    def _begins(self, info):
        self._running = self._running or info

    def _ended(self, result):
        if self._running is True or result is None or result.info is self._running:
            self._running = None
