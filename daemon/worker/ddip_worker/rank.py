# SPDX-License-Identifier: Apache-2.0
"""One rank: takes frames from the daemon, one at a time, on the main thread."""

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback

import torch

from ddip_worker import (
    aftermath,
    apps,
    gate,
    group,
    lib,
    loaders,
    namespace,
    participants,
    questions,
    shell,
    stacks,
    streams,
)
from ddip_worker.apps import first

CLEAN_UP_S = 1.0  # ddipd kills after 3 s
END_CHILDREN_MS = 1500


def run(config):
    """Connects, then serves until told to exit. Never returns."""
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    library = lib.Library(config["library"])
    stacks.watch(library)
    library.start(config["socket"], config["hello"], config["orphan_timeout_s"])
    stacks.tell_crashes()
    streams.install(library)
    Rank(config, library).serve()


class Rank:
    def __init__(self, config, library):
        self._library = library
        self._cell = 0
        self._gate = gate.Gate(library.interrupt_seen, library.interrupt_swallowed)
        self._participants = participants.Participants(config["world_size"])
        self._group = group.ProcessGroup(config, library, self._participants)
        self._group.set_environment()
        loaders.spare_workers()
        self._app = apps.App(config["app"])
        given = {"rank": config["rank"], "world_size": config["world_size"]}
        self._shell = shell.make(self._emit, self._raising, self._gate.open, given)
        hidden = frozenset(self._shell.user_ns) - set(given)
        self._namespace = namespace.Namespace(self._shell.user_ns, hidden)
        questions.Questions(library, self._shell, hidden).start()
        self._handlers = {
            lib.EXECUTE: self._execute,
            lib.REQUEST: self._request,
            lib.JOIN: self._join,
            lib.EXIT: self._exit,
        }

    def serve(self):
        while True:
            self._gate.arm()
            message = self._library.wait(self._gate.fd)
            if message:
                self._handlers[message.type](message)

    def _emit(self, type, content):
        try:
            self._library.post(lib.EVENT, {"type": type, **content}, self._cell)
        except OSError as e:
            # too large for one event, or a forked child: say so where it can be said
            print(f"[{type} not shown: {e.strerror}]")

    def _raising(self, lost_peers):
        content = {"state": "raising", "lost_peers": lost_peers}
        self._library.post(lib.STATE, content, self._cell)
        return self._library.aborted()

    def _execute(self, message):
        request = message.payload
        self._cell = message.cell
        started = time.monotonic()
        if self._library.begin(message.cell):
            self._emit("error", _error(KeyboardInterrupt("interrupted before it started"), []))
            status = "interrupted"
        else:
            status = self._run_with_app(request)
        self._library.end()
        content = {
            "status": status,
            "duration_s": round(time.monotonic() - started, 6),
            "memory": _memory(),
            "collectives": self._group.collectives(),
        }
        self._library.post(lib.DONE, content, message.cell)

    def _run_with_app(self, request):
        grad = torch.is_grad_enabled()
        ranks = self._participants.ranks = request["ranks"]
        first.turns.begin_cell(self._cell, ranks)
        status = self._run(request, ranks)
        if status != "ok":  # an exception may have hit no_grad's way out
            torch.set_grad_enabled(grad)
            loaders.end_workers()
        try:
            self._app.after_cell(ranks, status)
        except Exception as e:
            self._emit("error", _error(e, traceback.format_exception(e)))
            status = "error"
        return status

    def _run(self, request, ranks):
        """Runs the code; its result and its exceptions have become events when this returns."""
        silent = bool(request.get("silent", False))
        self._shell.released = False
        self._shell.compile.set_cell(self._cell, request["code"])
        if "execution_count" in request:  # tracebacks then name cells as the notebook does
            self._shell.execution_count = request["execution_count"]
        try:
            with self._gate.closed_after():
                self._gate.open()
                self._app.before_cell(ranks)
                if "app_command" in request:
                    self._app.command(request["app_command"])
            with self._gate.closed_after():  # the shell opens it
                result = self._shell.run_cell(
                    request["code"],
                    store_history=bool(request.get("store_history", not silent)),
                    silent=silent,
                )
        except KeyboardInterrupt as e:  # it came in IPython's own code, around the user's
            self._emit("error", _error(e, traceback.format_exception(e)))
            return "interrupted"
        except BaseException as e:
            self._raising(False)
            self._emit("error", _error(e, traceback.format_exception(e)))
            return "error"
        if result.success:
            return "ok"
        failure = result.error_before_exec or result.error_in_exec
        aftermath.forget_frames(failure)
        stopped = isinstance(failure, KeyboardInterrupt) or self._shell.released
        return "interrupted" if stopped else "error"

    def _request(self, message):
        fd = -1
        try:
            content, fd = self._namespace.serve(message.payload, message.fd)
        except namespace.Refused as e:
            content = {"error": e.content}
        except BaseException as e:
            content = {"error": {"code": "raised", **_error(e, traceback.format_exception(e))}}
        self._library.post(lib.REPLY, content, arg=message.arg, fd=fd)
        for used in (fd, message.fd):
            if used >= 0:
                os.close(used)

    def _join(self, message):
        request = message.payload
        generation = request["generation"]
        try:
            self._app.check()
            self._participants.ranks = self._participants.world
            where = (request[key] for key in ("nonce", "host", "port", "timeout_s"))
            self._group.join(generation, *where)
            self._app.joined(generation, self._shell.user_ns)
            content = {"state": "joined", "generation": generation}
        except BaseException as e:
            content = {
                "state": "failed",
                "generation": generation,
                **_error(e, traceback.format_exception(e)),
                **(e.content if isinstance(e, apps.Unusable) else {}),
            }
        self._library.post(lib.STATE, content)

    def _exit(self, message):
        """What atexit promises, within a bound; then nothing that was started here is left."""
        late = threading.Timer(CLEAN_UP_S, self._leave)
        late.daemon = True
        late.start()
        self._app.leave()
        atexit._run_exitfuncs()  # multiprocessing ends its children here
        self._leave()

    def _leave(self):
        _release_tracker()
        self._library.end_children(END_CHILDREN_MS)
        self._library.flush(2000)
        os._exit(0)


def _release_tracker():
    """Python's resource tracker unlinks shared memory and ends when nobody holds its pipe."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    fd = getattr(getattr(module, "_resource_tracker", None), "_fd", None)
    if fd is not None:
        with contextlib.suppress(OSError):
            os.close(fd)


def _error(e, lines):
    return {"ename": type(e).__name__, "evalue": str(e), "traceback": lines}


def _memory():
    """{"rss_bytes": resident memory of this process, and on a GPU: what torch holds there}."""
    with open("/proc/self/statm") as f:
        resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    memory = {"rss_bytes": resident}
    if torch.cuda.is_initialized():
        memory["cuda_allocated_bytes"] = torch.cuda.memory_allocated()
        memory["cuda_reserved_bytes"] = torch.cuda.memory_reserved()
    return memory
