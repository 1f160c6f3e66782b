# SPDX-License-Identifier: Apache-2.0
"""The notebook's magics. Names and flags are Ddip's; each help text says what is new."""

import contextlib
import functools
import os
import re
import sys
import time

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from . import daemon, variables
from .api import Client, connect
from .autodip import Autodip
from .complete import RemoteNames
from .errors import DdipCellError, DdipError, DdipInterrupted, NotRunning, RankError
from .render import Renderer, place_text, rank_list

GRACE_S = 5.0  # the daemon's default; a group may say another
RESTART_S = 0.3  # from the interrupt to the shutdown when a kernel is restarted
ALIASES = {"fastai": "fastai_v2"}  # names of the same app
PLACES = ("remote", "local", "everywhere")
SEE = "ranks whose output to show: 0,1 or `all` (default: 0)"
NAME = "the group (default: the one %%makedip made here, else `default`) (new)"


@magics_class
class DdipMagics(Magics):
    """State: the client, the names of the groups made here, autodip, verbosity."""

    def __init__(self, shell):
        super().__init__(shell=shell)
        self.made, self.verbose, self._client = [], False, None
        self.auto = Autodip(shell, self._is_local)
        self.names = RemoteNames(shell, lambda: self.client, self._place, self._own_magic)

    @property
    def client(self):
        if self._client is None:
            self._client = connect()
            self._client.notice = _notice
        return self._client

    def _name(self, name):
        return name or ("default" if "default" in self.made or not self.made else self.made[-1])

    @magic_arguments()
    @argument("-g", "--gpus", nargs="+", help="GPUs in rank order: 0,2,1 or UUIDs, or `all`")
    @argument("-n", "--ranks", type=int, help="the number of CPU ranks, instead of GPUs (new)")
    @argument("-a", "--app", help="what prepares the ranks: torch, fastai_v2, or a module")
    @argument(
        "-r", "--restart", nargs="?", const="all", help="start all ranks again, or these: 1,2"
    )
    @argument("-k", "--kill", action="store_true", help="end the group and its processes")
    @argument("-i", "--info", action="store_true", help="show the group")
    @argument("-v", "--verbose", nargs="?", const="on", help="on or off: say more")
    @argument("-t", "--timeout", type=float, help="seconds to wait for the ranks")
    @argument("--name", help=NAME)
    @line_magic
    def makedip(self, line=""):
        """Makes, restarts, ends or shows a group of ranks. Without flags it shows the group.

        Attaches to a live group of the same shape; -r with -g or -n replaces a group. Starts a
        private ddipd when none is running.
        """
        args = parse_argstring(self.makedip, line)
        name = self._name(args.name)
        if args.gpus and args.ranks:
            raise UsageError("give either -g (GPUs) or -n (CPU ranks)")
        if args.verbose:
            self.verbose = _switch(args.verbose)
        with _told_plainly():
            if args.kill:
                self._kill(name)
            elif args.gpus or args.ranks:
                self._make(name, args)
            elif args.restart:
                with _starting(name):
                    again = self.client.restart(name, _ranks(args.restart), args.timeout)
                self._say(again, "restarted")
            if args.verbose:
                self._tell_app(name)
            if args.info or not line.strip():
                self._info(name)

    def _group(self, name):
        """The group, or None when there is none of that name."""
        try:
            return self.client.group(name)
        except DdipError as error:
            if error.status != 404:
                raise
            return None

    def _tell_app(self, name):
        """The app's set_verbose, if there is a group that can hear it."""
        with contextlib.suppress(NotRunning):
            group = self._group(name)
            if group and group["state"] == "ready" and group.get("app") not in (None, "torch"):
                command = f"set_verbose {self.verbose}"
                cell = self.client.execute("", name, app_command=command, silent=True)
                Renderer([0], False).follow(cell)

    def _kill(self, name):
        with contextlib.suppress(NotRunning):
            if self._group(name):
                self.client.delete_group(name)
                print(f"ddip: ended group {name!r} and its processes")
                return
        print(f"ddip: there is no group {name!r}")

    def _make(self, name, args):
        client = self._start()
        gpus = _gpus(args.gpus)
        group = self._group(name)
        if group and not args.restart:
            return self._attach(group, gpus, args)
        if group:
            client.delete_group(name)
        started = time.monotonic()
        try:
            with _starting(name):
                group = client.create_group(
                    args.ranks, gpus=gpus, name=name, app=args.app, timeout=args.timeout
                )
        except DdipError as error:
            if gpus and error.status and not client.info()["cuda"]["available"]:
                error.hint = "without GPUs, make CPU ranks: %makedip -n 2"
            raise
        self._say(group, f"started in {time.monotonic() - started:.1f} s")

    def _start(self):
        """The client; of a private daemon if there is none and the environment names none."""
        try:
            self.client.info()
            return self.client
        except NotRunning:
            if os.environ.get("DDIP_URL"):
                raise
        endpoint = daemon.start()
        print(f"ddip: no ddipd was running; started a private one at {endpoint}")
        again = functools.partial(daemon.start_again, endpoint)
        self._client = Client(endpoint, _notice, again)
        return self._client

    def _attach(self, group, gpus, args):
        if gpus == "all":
            gpus = [gpu["index"] for gpu in self.client.gpus()] or ["all"]
        have = [rank["gpu"] for rank in group["ranks"]]
        if gpus:
            same = len(gpus) == len(have) and all(map(_is_gpu, have, gpus))
        else:
            same = args.ranks == len(have) and not any(have)
        app = group.get("app") or "torch"
        other = ALIASES.get(args.app, args.app or app) != ALIASES.get(app, app)
        if not same or other or group["state"] in ("failed", "stopping"):
            raise DdipError(
                f"group {group['name']!r} is there already: {_shape(group)}",
                hint="add -r to replace it, end it with -k, or give another --name",
            )
        self._say(group, "was there already, attached")

    def _say(self, group, what):
        name = group["name"]
        self.made = [other for other in self.made if other != name] + [name]
        print(f"ddip: group {name!r} {what}: {_shape(group)}")
        if group.get("running"):
            print(f"ddip: cell {group['running']} is running; %dipattach shows it")

    def _info(self, name):
        info, group = self.client.info(), self._group(name)
        print(f"ddipd {info['version']} at {self.client.endpoint}, pid {info['pid']}")
        print(f"group {name!r}: {_shape(group) if group else 'there is none'}")
        for rank in group["ranks"] if group else ():
            gpu = rank["gpu"]
            where = f"GPU {gpu['index']} ({gpu['name']})" if gpu else "CPU"
            print(f"  rank {rank['rank']}: {where}, pid {rank['pid']}, {rank['state']}")
        print(f"autodip: {self.auto}")

    @magic_arguments()
    @argument("-q", "--quiet", action="store_true", help="show output when the cell has ended")
    @argument("-S", "--see", nargs="+", help=SEE)
    @argument("-a", "--appcmd", help="a command for the app, run before the cell")
    @argument("--ranks", help="run on these ranks only: 0,1 (new)")
    @argument("--name", help=NAME)
    @argument("--detach", action="store_true", help="start the cell and return at once (new)")
    @argument("--timeout", type=float, help="interrupt the cell after so many seconds (new)")
    @argument("where", nargs="?", choices=PLACES, default="remote", help="default: remote")
    @line_cell_magic
    def dip(self, line, cell=None):
        """Runs the cell on the group's ranks, here, or everywhere. %dip -a gives the app a command.

        `everywhere` is Ddip's order: first here, then on the ranks. So a mistake is found before
        it reaches them, and a download is finished when they look for it. If the cell fails here,
        the ranks do not run it. An exception on any rank fails the cell, whichever ranks are seen.
        """
        args = self._dip_args(line)
        if cell is None and (not args.appcmd or args.where != "remote"):
            raise UsageError("%dip runs no code: -a and a command of the app, or %%dip and a cell")
        if args.where != "remote":
            self._run_here(cell, args.where)
        if args.where != "local" and (args.appcmd or cell.strip()):
            with _told_plainly():
                self._run_there(cell or "", args)

    def _dip_args(self, line):
        """Parses %%dip's line; a place named after `--see 0 1` is taken out of the ranks."""
        args = parse_argstring(self.dip, line)
        for word in [word for word in args.see or () if word in PLACES]:
            args.see.remove(word)
            args.where = word
        return args

    def _is_local(self, flags):
        try:
            return "local" in flags and self._dip_args(flags).where == "local"
        except UsageError:
            return False  # the magic itself will say what is wrong

    def _place(self, code):
        """(group, first rank, where the ranks' code starts) of a cell, None if it runs here."""
        part = self.auto.remote(code)
        if part is None:
            return None
        flags, start = part
        try:
            args = self._dip_args(flags)
            return self._name(args.name), (_ranks(args.ranks) or [0])[0], start
        except (UsageError, ValueError):  # flags that are being written
            return self._name(None), 0, start

    def _own_magic(self, name):
        kinds = self.magics.values()
        return getattr(self, name) if any(name in names for names in kinds) else None

    def _run_here(self, cell, where):
        """Runs a cell inside this one; its exception becomes this cell's, shown once."""
        shown = []
        self.shell._showtraceback = lambda kind, error, lines: shown.extend(lines)
        try:
            result = self.shell.run_cell(cell)
        finally:
            del self.shell._showtraceback
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            failed = dict(ename=type(error).__name__, evalue=str(error), traceback=shown)
            kind = DdipInterrupted if isinstance(error, KeyboardInterrupt) else DdipCellError
            note = "it failed here, so the ranks did not run it" if where == "everywhere" else None
            raise kind("error", errors=[{**failed, "ranks": ["here"]}], note=note)

    def _run_there(self, code, args):
        name, ranks = self._name(args.name), _ranks(args.ranks)
        app_command = _unquoted(args.appcmd)
        if args.detach:
            more = {"app_command": app_command}
            cell = self.client.submit(code, name, ranks, args.timeout, **more)["cell"]
            print(f"ddip: cell {cell} of group {name!r} started; `{_way(name, cell)}` shows it")
            return
        if self.verbose:
            print(f"ddip: running on {'all ranks' if ranks is None else ranks} of {name!r}")
        more = {"execution_count": self.shell.execution_count, "app_command": app_command}
        try:
            cell = self.client.execute(code, name, ranks, args.timeout, **more)
        except KeyboardInterrupt:
            note = "KeyboardInterrupt: whether the cell was started is not known; "
            note += "`%dipattach` shows the newest"
            raise DdipInterrupted("interrupted", note=note) from None
        see = _ranks(args.see) if args.see else [min(ranks or [0])]
        self._follow(cell, Renderer(see, args.quiet))

    def _follow(self, cell, renderer):
        """Shows a cell to its end. An interrupt of this kernel stops the cell on the ranks."""
        see = "all" if renderer.see is None else ",".join(map(str, sorted(renderer.see)))
        renderer.way = f"{_way(cell.group, cell.cell)} --see {see} --full"
        try:
            renderer.follow(cell)
        except KeyboardInterrupt:
            note = self._stop(cell, renderer)
            renderer.close()
            raise renderer.error(DdipInterrupted, note) from None
        renderer.close()
        if self.verbose and renderer.hidden:
            print(f"ddip: output of ranks {sorted(renderer.hidden)} not shown (--see all)")
        renderer.check()

    def _stop(self, cell, renderer):
        """Interrupts a cell and shows its end; a second interrupt, or a stuck rank, leaves it."""
        way = _way(cell.group, cell.cell)
        try:
            if self._kernel_ends():
                cell.close()
                return f"the kernel is shut down; cell {cell.cell} goes on: `{way}` shows it"
            grace = self.client.group(cell.group).get("grace_s") or GRACE_S
            cell.deadline = time.monotonic() + grace + 2
            self.client.interrupt(cell.group, cell.cell)
            renderer.follow(cell)
            how = f"KeyboardInterrupt: the cell ended as {renderer.done['status']!r}"
            return None if renderer.errors else how
        except (KeyboardInterrupt, TimeoutError, DdipError) as error:
            cell.close()
            why = f" ({error})" if isinstance(error, DdipError) else ""
            return f"KeyboardInterrupt: cell {cell.cell} is still going on{why}; `{way}` shows it"

    def _kernel_ends(self):
        """Front ends interrupt a kernel before they restart it: the ranks are to go on then."""
        kernel = getattr(self.shell, "kernel", None)
        until = time.monotonic() + RESTART_S
        while kernel is not None and time.monotonic() < until:
            if getattr(kernel, "_shutdown_message", None) is not None:
                return True
            time.sleep(0.02)
        return False

    @magic_arguments()
    @argument("cell", nargs="?", type=int, help="the cell's number (default: the newest)")
    @argument("-S", "--see", nargs="+", help=SEE)
    @argument("--full", action="store_true", help="all of its text, however long")
    @argument("--name", help=NAME)
    @line_magic
    def dipattach(self, line=""):
        """Shows a cell from its beginning and follows it to its end, as the %%dip that ran it."""
        args = parse_argstring(self.dipattach, line)
        name = self._name(args.name)
        with _told_plainly():
            if args.cell is None:
                cells = self.client.cells(name)
            else:
                cells = [self.client.cell(args.cell, name)]
            if not cells:
                raise DdipError(f"group {name!r} has run no cell", hint="%%dip runs one")
            see = _ranks(args.see) if args.see else [min(map(int, cells[-1]["ranks"]))]
            cell = self.client.events(name, cells[-1]["cell"])
            self._follow(cell, Renderer(see, full=args.full))

    @magic_arguments()
    @argument("-a", "--args", default="", help='flags for %%%%dip in quotes: -a "--see all"')
    @argument("state", metavar="on|off", choices=["on", "off"], nargs="?", help="default: show it")
    @line_magic
    def autodip(self, line=""):
        """Runs each later cell as if it started with %%dip, unless its first line starts with %."""
        args = parse_argstring(self.autodip, line)
        flags = _unquoted(args.args).strip()
        self._dip_args(flags)  # a mistake shows now, not in the next cell
        if args.state:
            self.auto.prefix = f"%%dip {flags}".rstrip() if args.state == "on" else None
        here = "; those whose first line starts with % run here" if args.state == "on" else ""
        print(f"autodip: {self.auto}{here}")

    @magic_arguments()
    @argument("names", nargs="+", help="variables of the notebook")
    @argument("--ranks", help="to these ranks only: 0,1 (new)")
    @argument("--name", help=NAME)
    @line_magic
    def dipush(self, line=""):
        """Copies variables of the notebook to the ranks, under the same names."""
        args = parse_argstring(self.dipush, line)
        names = _words(args.names)
        with _told_plainly():
            if missing := [name for name in names if name not in self.shell.user_ns]:
                raise DdipError(f"not defined in the notebook: {', '.join(missing)}")
            values = {name: self.shell.user_ns[name] for name in names}
            done = self.client.push(values, self._name(args.name), _ranks(args.ranks))
        if self.verbose:
            print(f"ddip: pushed {', '.join(names)}, {done['bytes']} bytes")

    @magic_arguments()
    @argument("names", nargs="+", help="variables of the rank")
    @argument("-r", "--rank", default="0", help="the rank (default: 0), or `all`: lists (new)")
    @argument("--name", help=NAME)
    @line_magic
    def dipull(self, line=""):
        """Copies variables of a rank into the notebook; of all ranks: as a list, by rank."""
        args = parse_argstring(self.dipull, line)
        names, rank = _words(args.names), _ranks(args.rank)
        rank = "all" if rank is None else rank[0]
        with _told_plainly():
            got = self.client.pull(names, self._name(args.name), rank)
        if rank == "all":
            got = {name: [values[name] for values in got] for name in names}
        self.shell.push(got)
        if self.verbose:
            print(f"ddip: pulled {', '.join(names)} from rank {rank}")

    @line_magic
    def dipper(self, line=""):
        """%dipper NAME stores the Python API's client as NAME, for what the magics do not do."""
        if not line.split():
            raise UsageError("say under which name: %dipper NAME")
        with _told_plainly():
            self.shell.push({line.split()[0]: self.client})

    @magic_arguments()
    @argument("-f", "--full", action="store_true", help="every rank's stack, all its threads")
    @argument("--ranks", help="of these ranks only: 0,1")
    @argument("--name", help=NAME)
    @line_magic
    def dipstack(self, line=""):
        """Shows where each rank is, and which differ; also while a cell runs, waits or is stuck.

        The notebook itself is busy while %%dip waits: use `%%dip --detach`, or another notebook.
        """
        args = parse_argstring(self.dipstack, line)
        ranks = _ranks(args.ranks) if args.ranks else None
        with _told_plainly():
            stacks = self.client.stacks(self._name(args.name), ranks)
        print(*_stacks(stacks, args.full), sep="\n")

    @magic_arguments()
    @argument("names", nargs="*", help="of these names only; patterns like lr* will do")
    @argument("--ranks", help="of these ranks only: 0,1")
    @argument("--name", help=NAME)
    @line_magic
    def dipinfo(self, line=""):
        """Lists the ranks' variables, and where ranks differ: type, shape, device, short values.

        While a cell runs they are listed as they are at that moment.
        """
        args = parse_argstring(self.dipinfo, line)
        name = self._name(args.name)
        with _told_plainly():
            group = self.client.group(name)
            ranks = _ranks(args.ranks) or range(group["world_size"])
            tables, missing = variables.gather(self.client, name, ranks)
            if not tables:
                raise DdipError("; ".join(dict.fromkeys(missing.values())))
        running = f"; cell {group['running']} is running" if group.get("running") else ""
        print(f"group {name!r}: {_shape(group)}{running}")
        print(f"{rank_list(list(tables))}:", *variables.lines(tables, args.names), sep="\n")
        for why in missing.values():
            print(why)
        print(f"autodip: {self.auto}")


def _stacks(stacks, full):
    """Lines: the places and who is there, then the stack of one rank at each place, or of all."""
    differ = stacks["differ"]
    for place in stacks["summary"]:
        mark = "   <- differs" if differ and set(place["ranks"]) <= set(differ) else ""
        yield f"{rank_list(place['ranks'])}: {place_text(place)}{mark}"
    firsts = [place["ranks"][0] for place in stacks["summary"]]
    for rank in stacks["ranks"]:
        if full:
            yield f"\n{rank['text'].rstrip()}"
        elif rank["rank"] in firsts and rank["user"]:
            yield f"\nrank {rank['rank']}, innermost first:"
            frames = rank["threads"][0]["frames"]
            last = max(i for i, frame in enumerate(frames) if frame["file"].startswith("Cell In["))
            for frame in frames[: last + 1]:
                yield f"  {frame['file']}, line {frame['line']}, in {frame['function']}"


# The daemon's hints speak HTTP; here the same is said in magics.
_HINTS = [
    (
        "there is no group",
        "--name chooses another; %makedip -n 2 makes one of two CPU ranks, -g all one of all GPUs",
    ),
    ("has no cell", "%dipattach without a number shows the newest"),
    ("is no cell number", "%dipattach without a number shows the newest"),
    ("is no longer kept", "%dipattach without a number shows the newest"),
    ("there is no variable", "%dipinfo lists what the ranks have"),
    ("is degraded", "%makedip -r RANK starts a dead rank again, the others keep their variables"),
    ("is failed", "%makedip -k ends it"),
]


@contextlib.contextmanager
def _told_plainly():
    """Shows the daemon's refusals and a rank's exception without this module's own frames."""
    try:
        yield
    except DdipError as error:
        for said, hint in _HINTS:
            if said in error.detail:
                error.hint = hint
        lines = [f"\x1b[1;31m{type(error).__name__}\x1b[0m: {error}"]
        if isinstance(error, RankError) and error.traceback:
            lines = [f"\x1b[1;31m--- rank {error.rank} ---\x1b[0m", *error.traceback]
        error._render_traceback_ = lambda: lines
        raise


@contextlib.contextmanager
def _starting(name):
    """An interrupt of this kernel gives the prompt back; what was asked for goes on."""
    try:
        yield
    except KeyboardInterrupt:
        more = "" if name == "default" else f" --name {name}"
        note = f"KeyboardInterrupt: group {name!r} goes on starting: `%makedip{more}` shows it, the"
        note += f" same %makedip again attaches to it, `%makedip -k{more}` ends it"
        raise DdipInterrupted("interrupted", note=note) from None


def _notice(text):
    """Quietly: on stderr, a line per absence of the daemon."""
    sys.stderr.write(text)
    sys.stderr.flush()


def _switch(text):
    if text.lower() not in ("on", "true", "off", "false"):
        raise UsageError(f"say on or off, not {text!r}")
    return text.lower() in ("on", "true")


def _words(words):
    """The items of ["0,1", "2"], separated by commas or blanks."""
    return [word for word in re.split(r"[,\s]+", " ".join(words)) if word]


def _ranks(text):
    """None for "all" and None, else a list of ranks. Raises UsageError."""
    words = _words([text] if isinstance(text, str) else text or ["all"])
    if "all" in words:
        return None
    if not words or not all(word.isdecimal() for word in words):
        raise UsageError(f"ranks are numbers like 0,1 or `all`, not {' '.join(words)!r}")
    return [int(word) for word in words]


def _unquoted(text):
    """One pair of quotes around an argument taken off: IPython leaves them on."""
    quoted = text and len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if quoted else text


def _gpus(words):
    """None, "all", or the indices (int) and UUIDs (str) in the order given, each once."""
    words = list(dict.fromkeys(_words(words or ())))
    return "all" if "all" in words else [int(w) if w.isdecimal() else w for w in words] or None


def _is_gpu(gpu, wanted):
    return bool(gpu) and wanted in (gpu["index"], gpu["uuid"])


def _shape(group):
    gpus = [rank["gpu"]["index"] for rank in group["ranks"] if rank["gpu"]]
    what = f"GPUs {', '.join(map(str, gpus))}" if gpus else f"{group['world_size']} CPU ranks"
    reason = f" ({group['reason']})" if group.get("reason") else ""
    app = "" if group.get("app") in (None, "torch") else f", {group['app']}"
    return f"{what}, {group['backend']}{app}, {group['state']}{reason}"


def _way(name, cell):
    return f"%dipattach {cell}" + ("" if name == "default" else f" --name {name}")


def load(shell):
    """Registers the magics and autodip's hook; does nothing when they are there already."""
    if getattr(shell, "_ddip", None) is None:
        shell._ddip = DdipMagics(shell)
        shell.register_magics(shell._ddip)
        shell._ddip.auto.install()
        shell._ddip.names.install()


def unload(shell):
    """Takes them away again; groups live on."""
    magics, shell._ddip = getattr(shell, "_ddip", None), None
    if magics is not None:
        magics.auto.remove()
        magics.names.remove()
        for kind, names in magics.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop("DdipMagics", None)
