# SPDX-License-Identifier: Apache-2.0
"""The notebook's magics. Names and flags are Ddip's; each help text says what is new."""

import contextlib
import os
import re
import sys
import time

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from . import daemon
from .api import Client, connect
from .autodip import Autodip
from .errors import DdipCellError, DdipError, DdipInterrupted, NotRunning, RankError
from .render import Renderer

GRACE_S = 5.0  # the daemon's default; a group may say another
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

    @property
    def client(self):
        if self._client is None:
            self._client = connect()
        return self._client

    def _name(self, name):
        return name or ("default" if "default" in self.made or not self.made else self.made[-1])

    @magic_arguments()
    @argument("-g", "--gpus", nargs="+", help="GPUs in rank order: 0,2,1 or UUIDs, or `all`")
    @argument("-n", "--ranks", type=int, help="the number of CPU ranks, instead of GPUs (new)")
    @argument("-a", "--app", help="library to prepare the ranks for: fastai_v1, fastai_v2, torch")
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
                again = self.client.restart(name, _ranks(args.restart), args.timeout)
                self._say(again, "restarted")
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
            return self.client
        except NotRunning:
            if os.environ.get("DDIP_URL"):
                raise
        endpoint = daemon.start()
        print(f"ddip: no ddipd was running; started a private one at {endpoint}")
        self._client = Client(endpoint)
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
        if not same or (args.app or app) != app or group["state"] in ("failed", "stopping"):
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
    @cell_magic
    def dip(self, line, cell):
        """Runs the cell on the group's ranks, here, or everywhere.

        `everywhere` is Ddip's order: first here, then on the ranks. So a mistake is found before
        it reaches them, and a download is finished when they look for it. If the cell fails here,
        the ranks do not run it. An exception on any rank fails the cell, whichever ranks are seen.
        """
        args = self._dip_args(line)
        if args.where != "remote":
            self._run_here(cell, args.where)
        if args.where != "local" and cell.strip():
            with _told_plainly():
                self._run_there(cell, args)

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
        if args.detach:
            cell = self.client.submit(code, name, ranks, args.timeout)["cell"]
            print(f"ddip: cell {cell} of group {name!r} started; `{_way(name, cell)}` shows it")
            return
        if self.verbose:
            print(f"ddip: running on {'all ranks' if ranks is None else ranks} of {name!r}")
        if args.appcmd:
            print("ddip: apps have no commands yet; --appcmd is ignored", file=sys.stderr)
        count = self.shell.execution_count
        cell = self.client.execute(code, name, ranks, args.timeout, execution_count=count)
        see = _ranks(args.see) if args.see else [min(ranks or [0])]
        self._follow(cell, Renderer(see, args.quiet))

    def _follow(self, cell, renderer):
        """Shows a cell to its end. An interrupt of this kernel stops the cell on the ranks."""
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
        try:
            grace = self.client.group(cell.group).get("grace_s") or GRACE_S
            cell.deadline = time.monotonic() + grace + 2
            if self.client.cell(cell.cell, cell.group)["state"] == "queued":
                raise DdipError("it waits in the queue; an interrupt would stop the cell before it")
            self.client.interrupt(cell.group, cell.cell)
            renderer.follow(cell)
            how = f"KeyboardInterrupt: the cell ended as {renderer.done['status']!r}"
            return None if renderer.errors else how
        except (KeyboardInterrupt, TimeoutError, DdipError) as error:
            cell.close()
            why = f" ({error})" if isinstance(error, DdipError) else ""
            way = _way(cell.group, cell.cell)
            return f"KeyboardInterrupt: cell {cell.cell} is still going on{why}; `{way}` shows it"

    @magic_arguments()
    @argument("cell", nargs="?", type=int, help="the cell's number (default: the newest)")
    @argument("-S", "--see", nargs="+", help=SEE)
    @argument("--name", help=NAME)
    @line_magic
    def dipattach(self, line=""):
        """Shows a cell from its beginning and follows it to its end, as the %%dip that ran it."""
        args = parse_argstring(self.dipattach, line)
        name = self._name(args.name)
        with _told_plainly():
            cells = [self.client.cell(args.cell, name)] if args.cell else self.client.cells(name)
            if not cells:
                raise DdipError(f"group {name!r} has run no cell")
            see = _ranks(args.see) if args.see else [min(map(int, cells[-1]["ranks"]))]
            self._follow(self.client.events(name, cells[-1]["cell"]), Renderer(see))

    @magic_arguments()
    @argument("-a", "--args", default="", help='flags for %%%%dip in quotes: -a "--see all"')
    @argument("state", metavar="on|off", choices=["on", "off"], nargs="?", help="default: show it")
    @line_magic
    def autodip(self, line=""):
        """Runs each later cell as if it started with %%dip, unless its first line starts with %."""
        args = parse_argstring(self.autodip, line)
        flags = args.args.strip("\"' ")
        self._dip_args(flags)  # a mistake shows now, not in the next cell
        if args.state:
            self.auto.prefix = f"%%dip {flags}".rstrip() if args.state == "on" else None
        print(f"autodip: {self.auto}")

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
    @argument("--ranks", help="of these ranks only: 0,1")
    @argument("--name", help=NAME)
    @line_magic
    def dipinfo(self, line=""):
        """Lists each rank's variables: type, shape, device, size. Equal lists are shown once."""
        args = parse_argstring(self.dipinfo, line)
        name, tables = self._name(args.name), {}
        with _told_plainly():
            for rank in _ranks(args.ranks) or range(self.client.group(name)["world_size"]):
                rows = "\n".join(map(_variable, self.client.variables(name, rank)))
                tables.setdefault(rows, []).append(str(rank))
        for rows, ranks in tables.items():
            print(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}:\n{rows or '  (nothing)'}")


# The daemon's hints speak HTTP; here the same is said in magics.
_HINTS = [
    ("there is no group", "%makedip -n 2 makes one of two CPU ranks, -g all one of all GPUs"),
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


def _variable(row):
    parts = [row.get(key) for key in ("type", "shape", "dtype", "device")]
    size = row.get("size_bytes")
    parts.append(None if size is None else f"{size} B")
    return f"  {row['name']:20} " + "  ".join(str(part) for part in parts if part is not None)


def load(shell):
    """Registers the magics and autodip's hook; does nothing when they are there already."""
    if getattr(shell, "_ddip", None) is None:
        shell._ddip = DdipMagics(shell)
        shell.register_magics(shell._ddip)
        shell._ddip.auto.install()


def unload(shell):
    """Takes them away again; groups live on."""
    magics, shell._ddip = getattr(shell, "_ddip", None), None
    if magics is not None:
        magics.auto.remove()
        for kind, names in magics.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop("DdipMagics", None)
