#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Clients, ranks and the daemon are killed, stopped and starved at random while cells run.

Every few steps the storm pauses: all cells must end, and what was told is checked against what
clients saw and what ranks say they wrote (chaos_record.py). What is done follows from the seed,
when it takes effect does not. The state folder is a small disk, in a mount namespace of our own.
"""

import argparse
import contextlib
import heapq
import json
import os
import random
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/e2e"))

import chaos_cells  # noqa: E402
import chaos_clients as clients  # noqa: E402
from chaos_record import Tally, Window, check_seen  # noqa: E402
from conftest import Daemon  # noqa: E402

SLOTS = {"a": 2, "b": 3, "c": 2}  # groups at a time, their ranks
PAUSE_STEPS = 30  # from one check to the next
ANSWER_S = 3  # the slowest answer allowed
IDLE_S = 60  # all cells have ended by then
FDS = 160
DISK = "40M"
JOURNAL = "8M"  # per group; more than is told between two checks
# answers that a call may get because of what else is going on
TEMPLATE_GONE = "ended without a word"  # 422, when a template was killed
REFUSALS = {404, 409, 410, 500, 503, 504}


class Broken(Exception):
    """An invariant does not hold."""


# --- the sandbox ----------------------------------------------------------------------------------


def enter_namespace():
    """Starts this program again in a mount namespace, if there may be one; else says no."""
    if os.environ.pop("DDIP_CHAOS_INSIDE", None):
        return True
    for options in (["--mount"], ["--mount", "--user", "--map-root-user"]):
        command = ["unshare", *options, "mount", "-t", "tmpfs", "none", "/mnt"]
        with contextlib.suppress(FileNotFoundError):
            if subprocess.run(command, capture_output=True).returncode == 0:
                os.environ["DDIP_CHAOS_INSIDE"] = "1"
                os.execvp("unshare", ["unshare", *options, sys.executable, *sys.argv])
    return False


class SmallDisk:
    """A tmpfs as the state folder, and another as /dev/shm; both end with the namespace."""

    name = "tmpfs"

    def __init__(self, daemon):
        self.folder = daemon.state_dir
        self.folder.mkdir(mode=0o700)
        for size, where in ((DISK, self.folder), ("256M", "/dev/shm")):
            options = f"size={size},mode={'700' if where == self.folder else '1777'}"
            command = ["mount", "-t", "tmpfs", "-o", options, "none", str(where)]
            subprocess.run(command, check=True)

    def fill(self):
        with open(self.folder / "filler", "ab", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(size))

    def free(self):
        (self.folder / "filler").unlink(missing_ok=True)

    def leftovers(self):
        return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")]

    def close(self):
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class NoWrites:
    """Without a namespace: the daemon may write no file (RLIMIT_FSIZE)."""

    name = "RLIMIT_FSIZE"

    def __init__(self, daemon):
        self.daemon = daemon

    def _limit(self, pid, size):
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def fill(self):
        self._limit(self.daemon.pid, 1)

    def free(self):
        self._limit(self.daemon.pid, resource.RLIM_INFINITY)
        for process in self.daemon.processes():  # those that were started meanwhile
            self._limit(process.pid, resource.RLIM_INFINITY)

    def leftovers(self):
        return []

    def close(self):
        pass


# --- the world ------------------------------------------------------------------------------------


class Group:
    def __init__(self, name, ranks):
        self.name, self.ranks = name, ranks
        self.last_seq = 0
        self.marks = {}  # rank: (pid, what its variable `mark` holds)
        self.disturbed = None  # of the daemon, when the window began
        self.snapshot = None  # its events, of a group that is being deleted


class World:
    def __init__(self, build, seed, rss_limit_mb):
        self.seed, self.rss_limit_mb = seed, rss_limit_mb
        self.folder = Path(tempfile.mkdtemp(prefix="ddip-"))
        for name in ("clients", "tally"):
            (self.folder / name).mkdir()
        self.mark = secrets.token_hex(8)
        options = ["--journal-limit", JOURNAL, "--orphan-timeout-s", "60"]
        self.daemon = Daemon(build, self.folder, *options, env={"DDIP_CHAOS_MARK": self.mark})
        self.disk = (SmallDisk if enter_namespace.inside else NoWrites)(self.daemon)
        self.shared = clients.Shared()
        self.disturbed = 0
        self.up = False
        self.full = False
        self.groups, self.deleted, self.clients = {}, [], []
        self.due, self.due_count = [], 0
        self.counts, self.statuses = Counter(), Counter()
        self.findings = []
        self.rss_mb = self.fds = 0
        self.watched = {"asked": 0, "slowest_s": 0}

    def tell(self, up):
        """To be called before the daemon is disturbed, and once it is well."""
        self.disturbed += not up
        self.up = up
        self.shared.tell(up, self.disturbed)

    def ask(self, method, path, body=None, timeout=clients.PATIENCE_S, **headers):
        return self.daemon.request(method, path, body, headers, timeout)

    def later(self, seconds, action):
        self.due_count += 1
        heapq.heappush(self.due, (time.monotonic() + seconds, self.due_count, action))

    def run_due(self, everything=False):
        while self.due and (everything or self.due[0][0] <= time.monotonic()):
            when, _, action = heapq.heappop(self.due)
            time.sleep(max(0, when - time.monotonic()))
            action()

    def client(self, step, name, work, **about):
        self.clients.append(clients.Client(self, step, name, work, **about))

    def pid_of(self, group, rank):
        """The process of a rank, from disk: the daemon need not be there. None: not known."""
        for path in self.daemon.state_dir.glob(f"groups/{group.name}.*/group.json"):
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                pid = json.loads(path.read_text())["ranks"][rank]["pid"]
                return pid if self.is_ours(pid) else None
        return None

    def is_ours(self, pid):
        try:
            return self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def leftovers(self):
        """Every process but our clients."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [pid for pid in pids if self.is_ours(pid)]

    # --- what a step may do; each says whether it did it ---

    def cell(self, step, group, dice):
        token = f"K{step}"
        kind, code = chaos_cells.make(dice, token, self.folder / "tally")
        body = {"code": code, "timeout_s": round(4 + 8 * dice.random(), 1)}
        if dice.random() < 0.1:
            body["ranks"] = [dice.randrange(group.ranks)]
        name = dice.choices(["http", "detached", "python"], [4, 3, 3])[0]
        work = {
            "http": lambda: clients.http_cell(group.name, body),
            "detached": lambda: clients.detached_cell(group.name, body, dice.random() * 2),
            "python": lambda: clients.python_cell(group.name, body),
        }[name]()
        self.client(step, name, work, group=group, token=token, kind=kind)
        return True

    def values(self, step, group, dice):
        self.client(step, "values", clients.python_values(group.name, f"{step}_"), group=group)
        return True

    def read_group(self, step, group, dice):
        after = dice.choice([0, group.last_seq])
        work = clients.group_reader(group.name, after)
        self.client(step, "reader", work, group=group, after=after)
        return True

    def call(self, step, name, group, *request):
        self.client(step, name, clients.call(*request), group=group)
        return True

    def interrupt(self, step, group, dice):
        return self.call(step, "interrupt", group, "POST", f"/v1/groups/{group.name}/interrupt")

    def restart(self, step, group, dice):
        ranks = dice.choice(["", f"?ranks={dice.randrange(group.ranks)}"])
        return self.call(step, "restart", group, "POST", f"/v1/groups/{group.name}/restart{ranks}")

    def stacks(self, step, group, dice):
        return self.call(step, "stacks", group, "GET", f"/v1/groups/{group.name}/stacks")

    def any_client(self, dice):
        some = [client for client in self.clients if client.alive()]
        return dice.choice(some) if some else None

    def kill_client(self, step, group, dice):
        victim = self.any_client(dice)
        return victim is not None and victim.signal(signal.SIGKILL)

    def stop_client(self, step, group, dice):
        victim = self.any_client(dice)
        if victim is None or not victim.signal(signal.SIGSTOP):
            return False
        self.later(dice.random() * 2, lambda: victim.signal(signal.SIGCONT))
        return True

    def signal_rank(self, group, rank, number):
        pid = self.pid_of(group, rank)
        if pid is not None:
            os.kill(pid, number)
        return pid

    def kill_rank(self, step, group, dice):
        return self.signal_rank(group, dice.randrange(group.ranks), signal.SIGKILL) is not None

    def kill_any(self, step, group, dice):
        """A store, a template, a child of a rank, or a rank of any group."""
        pids = sorted(set(self.leftovers()) - {self.daemon.pid})
        if pids:
            os.kill(dice.choice(pids), signal.SIGKILL)
        return bool(pids)

    def stop_rank(self, step, group, dice):
        pid = self.signal_rank(group, dice.randrange(group.ranks), signal.SIGSTOP)
        if pid is None:
            return False
        self.later(dice.random(), lambda: self.is_ours(pid) and os.kill(pid, signal.SIGCONT))
        return True

    def start_daemon(self):
        self.daemon.start()
        if self.full:
            self.disk.fill()
        self.tell(True)

    def end_daemon(self, dice, number):
        if not self.up:
            return False
        self.tell(False)
        self.daemon.process.send_signal(number)
        code = self.daemon.process.wait(10)
        if code != (0 if number == signal.SIGTERM else -number):
            self.findings.append(f"the daemon ended with {code} after signal {number}")
        self.later(dice.random() * 0.8, self.start_daemon)
        return True

    def kill_daemon(self, step, group, dice):
        return self.end_daemon(dice, signal.SIGKILL)

    def term_daemon(self, step, group, dice):
        return self.end_daemon(dice, signal.SIGTERM)

    def stop_daemon(self, step, group, dice):
        if not self.up:
            return False
        self.tell(False)
        self.daemon.process.send_signal(signal.SIGSTOP)

        def go_on():
            self.daemon.process.send_signal(signal.SIGCONT)
            self.tell(True)

        self.later(dice.random(), go_on)
        return True

    def fill_disk(self, step, group, dice):
        if self.full or not self.up:
            return False
        self.full = True
        self.disk.fill()
        self.later(0.2 + dice.random() * 1.5, self.free_disk)
        return True

    def free_disk(self):
        self.full = False
        self.disk.free()

    def make_group(self, step, slot):
        name = f"{slot}{step}"
        body = {"name": name, "ranks": SLOTS[slot], "wait": False, "grace_s": 1}
        try:
            reply = self.ask("POST", "/v1/groups", body, timeout=10)
        except clients.BROKEN as error:
            if self.up:
                self.findings.append(f"POST /v1/groups: {error!r}")
            return False
        self.statuses["make", reply.status] += 1
        if reply.status != 202:
            if not self.full and reply.status != 503:
                self.findings.append(f"no group {name}: {reply.status} {reply.text}")
            return False
        self.groups[slot] = Group(name, SLOTS[slot])
        self.groups[slot].disturbed = self.disturbed
        return True

    def delete_group(self, step, group, dice):
        if not self.up:
            return False
        slot = next(slot for slot, each in self.groups.items() if each is group)
        group.snapshot = self.fetch(group)
        self.deleted.append(self.groups.pop(slot))
        return self.call(step, "delete", group, "DELETE", f"/v1/groups/{group.name}")

    ACTIONS = {
        cell: 55,
        values: 3,
        read_group: 3,
        interrupt: 6,
        restart: 4,
        stacks: 3,
        kill_client: 4,
        stop_client: 4,
        kill_rank: 6,
        kill_any: 2,
        stop_rank: 4,
        kill_daemon: 3,
        term_daemon: 2,
        stop_daemon: 2,
        fill_disk: 2,
        delete_group: 1.5,
    }

    def step(self, number):
        dice = random.Random(f"{self.seed}/{number}")
        self.run_due()
        action = dice.choices(list(self.ACTIONS), list(self.ACTIONS.values()))[0]
        slot, pause = dice.choice(list(SLOTS)), dice.random() * 0.2
        if slot in self.groups:
            if action(self, number, self.groups[slot], dice):
                self.counts[action.__name__] += 1
        elif self.up and self.make_group(number, slot):
            self.counts["make_group"] += 1
        self.measure()
        time.sleep(pause)

    def measure(self):
        with contextlib.suppress(psutil.Error):
            daemon = psutil.Process(self.daemon.pid)
            self.rss_mb = max(self.rss_mb, daemon.memory_info().rss / 1e6)
            self.fds = max(self.fds, daemon.num_fds())
        if self.rss_mb > self.rss_limit_mb:
            self.findings.append(f"the daemon has {self.rss_mb:.0f} MB of memory")

    # --- the pause: everything must end, and be as it was told ---

    def fetch(self, group, after=None):
        after = group.last_seq if after is None else after
        path = f"/v1/groups/{group.name}/events?after={after}&follow=false"
        reply = self.ask("GET", path)
        if reply.status != 200:
            raise Broken(f"GET {path}: {reply.status} {reply.text}")
        return reply.body.splitlines(keepends=True)

    def state(self, group):
        reply = self.ask("GET", f"/v1/groups/{group.name}", timeout=ANSWER_S)
        if reply.status != 200:
            raise Broken(f"group {group.name} is lost: {reply.status} {reply.text}")
        return reply.json

    def wait_idle(self, group, deadline):
        while True:
            state = self.state(group)
            resting = all(rank["state"] in ("idle", "present", "dead") for rank in state["ranks"])
            if state["state"] in ("ready", "degraded") and state["queue"] == 0 and resting:
                return state
            if state["state"] == "failed":
                return state
            if time.monotonic() > deadline:
                stacks = self.ask("GET", f"/v1/groups/{group.name}/stacks", Accept="text/plain")
                raise Broken(f"{group.name} is not idle after {IDLE_S} s: {state}\n{stacks.text}")
            time.sleep(0.05)

    def pause(self):
        self.run_due(everything=True)
        deadline = time.monotonic() + IDLE_S
        self.end_clients(deadline)  # first: one that is slow to start has not sent its cell yet
        states = {slot: self.wait_idle(group, deadline) for slot, group in self.groups.items()}
        tallies = [Tally(path) for path in (self.folder / "tally").iterdir()]
        for slot, state in states.items():
            self.check_group(self.groups[slot], state, tallies)
        for group in self.deleted:
            self.check_deleted(group)
        self.check_answers()
        self.clear()
        if self.findings:
            raise Broken("\n".join(dict.fromkeys(self.findings)))
        for slot, state in states.items():
            self.mend(slot, state)

    def end_clients(self, deadline):
        """All have ended but those that would never."""
        for client in self.clients:
            while client.alive() and client.name != "reader" and time.monotonic() < deadline:
                time.sleep(0.02)
            if client.alive() and client.name != "reader":
                about = {key: value for key, value in client.about.items() if key != "group"}
                self.findings.append(f"{client.name} of step {client.step} waits for ever: {about}")
            while client.alive():
                client.signal(signal.SIGKILL)
                time.sleep(0.01)

    def check_group(self, group, state, tallies):
        lines = self.fetch(group)
        living = {r["rank"]: r["pid"] for r in state["ranks"] if self.is_ours(r["pid"] or 0)}
        window = Window(group, group.last_seq, lines, living, group.disturbed == self.disturbed)
        ours = [client for client in self.clients if client.about.get("group") is group]
        tokens = {client.about.get("token"): client for client in ours}
        wrong = list(window.check([tally for tally in tallies if tally.token in tokens]))
        for client in ours:
            if "token" in client.about:
                wrong += self.check_cell_client(client, window)
            elif client.name == "reader" and client.about["after"] == group.last_seq:
                wrong += check_seen(client, lines)
        wrong += self.check_records(group, window)
        if lines and lines[len(lines) // 2 :] != self.fetch(
            group, group.last_seq + len(lines) // 2
        ):
            wrong.append("the second half, read again, is not the same")
        self.findings += [f"group {group.name}: {what}" for what in wrong]
        self.counts["events"] += len(lines)
        self.counts["lines"] += window.told
        for event in window.events:
            if event["type"] == "done":
                self.counts["ended"] += 1
                self.counts["well"] += event["status"] == "ok"
        group.last_seq += len(lines)
        group.disturbed = self.disturbed

    def check_cell_client(self, client, window):
        token, how = client.about["token"], client.how()
        numbers = window.cell_of(token)
        accepted = bool(client.lines()) or how.get("status") in (200, 202)
        refused = how.get("status", 0) >= 400
        if len(numbers) > 1 or accepted > len(numbers) or (refused and numbers):
            yield f"{client.name} {how}, its {token} is in the record as cells {numbers}"
            return
        lines = window.cell_lines(numbers[0]) if numbers else []
        for what in check_seen(client, lines):
            yield f"{token}: {what}"
        if client.killed or refused or not accepted:
            return
        if not how.get("done") and (client.name != "http" or how["undisturbed"]):
            yield f"{client.name} of {token} was not killed and has not seen the end: {how}"
        elif how.get("done") and len(client.lines()) != len(lines):
            yield f"{client.name} saw {len(client.lines())} of {len(lines)} events of {token}"

    def check_records(self, group, window):
        done = {e["cell"]: e["status"] for e in window.events if e["type"] == "done"}
        records = self.ask("GET", f"/v1/groups/{group.name}/cells").json["cells"]
        told = {r["cell"]: r["status"] for r in records if r["cell"] in done}
        if told != done:
            yield f"records {told} are not what `done` said: {done}"
        open_ = [r["cell"] for r in records if r["state"] != "done"]
        if open_:
            yield f"cells {open_} have not ended"

    def check_deleted(self, group):
        """Its events are gone: what was seen is compared with those fetched just before."""
        name = group.name
        if self.ask("GET", f"/v1/groups/{name}").status != 404:  # the call was lost: again
            reply = self.ask("DELETE", f"/v1/groups/{name}")
            if reply.status != 200:
                self.findings.append(f"group {name} stays: {reply.status} {reply.text}")
        window = Window(group, group.last_seq, group.snapshot, {}, False)
        self.findings += [f"group {name}: {what}" for what in window.check_numbers()]
        self.counts["events"] += len(group.snapshot)
        for client in self.clients:
            how = client.how()
            if client.about.get("group") is not group or client.name != "http" or client.killed:
                continue
            if how.get("status") == 200 and how["undisturbed"] and not how["done"]:
                token = client.about["token"]
                self.findings.append(f"group {name}, deleted: http has not seen {token}'s end")

    def check_answers(self):
        for client in self.clients:
            how = client.how()
            who = f"{client.name} of step {client.step}"
            self.statuses[client.name, how.get("status", "lost" if how else "killed")] += 1
            if "broken" in how:
                self.findings.append(f"{who}: {how['broken']}")
            elif how.get("status", 200) >= 400:
                problem = json.loads(how["problem"])
                refused = how["status"] in REFUSALS or TEMPLATE_GONE in problem["detail"]
                if not refused or not problem.get("detail"):
                    self.findings.append(f"{who}: {how['status']} {problem}")
            elif "lost" in how and how["undisturbed"]:
                self.findings.append(f"{who} got no answer: {how['lost']}")
            elif how.get("values") is False:
                self.findings.append(f"{who} pulled other values than it had pushed")
        if not self.watcher.alive():
            self.findings.append(f"the watcher has ended: {self.watcher.how()}")
        for line in self.watcher.lines():
            self.watched = json.loads(line)
            if "wrong" in self.watched:
                self.findings.append(self.watched["wrong"])
        os.truncate(self.watcher.seen, 0)
        self.measure()
        if self.fds > FDS:
            self.findings.append(f"the daemon has {self.fds} descriptors")

    def clear(self):
        if self.findings:
            return
        for path in [*(self.folder / "clients").iterdir(), *(self.folder / "tally").iterdir()]:
            if path != self.watcher.seen:
                path.unlink()
        self.clients, self.deleted = [], []

    def mend(self, slot, state):
        """Makes a group whole, and has it prove that it is."""
        group = self.groups[slot]
        path = f"/v1/groups/{group.name}"
        if state["state"] == "failed":
            if "restarted" not in state["reason"] and "full" not in state["reason"]:
                print(f"chaos: group {group.name} failed: {state['reason']}", flush=True)
            self.counts["failed"] += 1
            reply = self.ask("DELETE", path)
            del self.groups[slot]
        elif state["state"] == "degraded":
            reply = self.ask("POST", f"{path}/restart")
        else:
            reply = None
        if reply is not None and reply.status != 200:
            raise Broken(f"{group.name} cannot be mended: {reply.status} {reply.text}")
        if slot in self.groups:
            self.prove(group)

    def prove(self, group):
        """All ranks meet in a collective; who is the same process has kept its variables."""
        mark = secrets.token_hex(4)
        code = (
            "import torch, os, torch.distributed as dist\nx = torch.ones(1); dist.all_reduce(x)\n"
            f"old, mark = globals().get('mark'), '{mark}'\n(os.getpid(), int(x), old)"
        )
        body = {"code": code, "timeout_s": 20}
        reply = self.ask("POST", f"/v1/groups/{group.name}/cells", body)
        results = {e["rank"]: e for e in reply.events if e["type"] == "execute_result"}
        if reply.status != 200 or sorted(results) != list(range(group.ranks)):
            raise Broken(f"{group.name} is ready, but a cell gave {reply.text}")
        for rank, event in results.items():
            pid, total, old = eval(event["data"]["text/plain"], {}, {})
            if total != group.ranks:
                raise Broken(f"{group.name}: all_reduce gave {total} on rank {rank}")
            if rank in group.marks and group.marks[rank][0] == pid and old != group.marks[rank][1]:
                raise Broken(f"{group.name}: rank {rank} has forgotten its variables: {old}")
            group.marks[rank] = pid, mark

    # --- start and end ---

    def begin(self):
        self.daemon.start()
        self.tell(True)
        for slot in SLOTS:
            self.make_group(0, slot)
        for slot, group in self.groups.items():
            self.mend(slot, self.wait_idle(group, time.monotonic() + IDLE_S))
        self.watcher = clients.Client(self, 0, "watcher", clients.watch(ANSWER_S))

    def end(self):
        self.watcher.signal(signal.SIGKILL)
        self.tell(False)
        self.daemon.process.send_signal(signal.SIGINT)
        code = self.daemon.process.wait(30)
        wrong = [f"the daemon ended with {code}"] if code else []
        wrong += [f"process {pid} is left: {cmdline(pid)}" for pid in self.leftovers()]
        for folder in (self.daemon.runtime_dir, self.daemon.state_dir / "groups"):
            wrong += [f"{path} is left" for path in folder.glob("*") if path.name != "ddipd.pid"]
        wrong += [f"{name} is left" for name in self.disk.leftovers()]
        if wrong:
            raise Broken("\n".join(wrong))

    def sweep(self):
        """Whatever happened, nothing stays."""
        for client in [*self.clients, *([self.watcher] if hasattr(self, "watcher") else [])]:
            client.signal(signal.SIGCONT)
            client.signal(signal.SIGKILL)
        if self.daemon.process and self.daemon.process.poll() is None:
            self.daemon.process.kill()
            self.daemon.process.wait()
        while pids := self.leftovers():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def keep(self, where):
        shutil.rmtree(where, ignore_errors=True)
        ignore = shutil.ignore_patterns("*.sock", "filler")
        shutil.copytree(self.folder, where, ignore=ignore)

    def summary(self, steps, seconds):
        n = self.counts
        return (
            f"chaos: seed {self.seed}, {steps} steps, disk: {self.disk.name}; killed: "
            f"{n['kill_client']} clients, {n['kill_rank']} ranks, {n['kill_daemon']} daemons, "
            f"{n['kill_any']} others; "
            f"stopped: {n['stop_client']} clients, {n['stop_rank']} ranks, {n['stop_daemon']} "
            f"daemons; {n['term_daemon']} SIGTERM, {n['fill_disk']} full disks, "
            f"{n['interrupt']} interrupts, {n['restart']} restarts, "
            f"{n['delete_group']} groups deleted, {n['make_group']} made; "
            f"{n['ended']} cells ended of {n['cell']} sent, {n['well']} of them well; "
            f"{n['events']} events and {n['lines']} lines checked; "
            f"{self.watched['asked']} answers, the slowest {self.watched['slowest_s']} s; "
            f"daemon at most {self.rss_mb:.0f} MB, {self.fds} descriptors; {seconds:.0f} s"
        )


def cmdline(pid):
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())


def run(world, steps, verbose):
    """Returns the step that broke, and what."""
    step = 0
    try:
        world.begin()
        for step in range(1, steps + 1):
            world.step(step)
            if step % PAUSE_STEPS == 0 or step == steps:
                world.pause()
                if verbose:
                    print(f"chaos: step {step}: {dict(world.counts)}", flush=True)
        world.end()
        return None
    except Broken as what:
        return step, str(what)
    except (AssertionError, *clients.BROKEN, subprocess.TimeoutExpired) as error:
        import traceback

        return step, f"{error!r}\n{traceback.format_exc()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where ddipd is")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rss-mb", type=int, default=64, help="memory the daemon may take")
    parser.add_argument("--verbose", action="store_true", help="counts at each pause")
    parser.add_argument("--no-namespace", action="store_true", help="no disk of its own")
    options = parser.parse_args()
    enter_namespace.inside = not options.no_namespace and enter_namespace()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    world = World(options.build.resolve(), options.seed, options.rss_mb)
    try:
        broken = run(world, options.steps, options.verbose)
        if broken:
            kept = options.build.resolve() / f"chaos/seed-{options.seed}"
            world.keep(kept)
    finally:
        world.sweep()
        world.disk.close()
        log = world.daemon.log.read_text()
        shutil.rmtree(world.folder, ignore_errors=True)
    print(world.summary(broken[0] if broken else options.steps, time.monotonic() - started))
    if options.verbose:
        print(dict(sorted(world.statuses.items(), key=str)))
    if not broken:
        return 0
    print("\n".join(f"  {line}" for line in log.splitlines()[-40:]))
    print(f"chaos: FAILED by step {broken[0]} with seed {options.seed}: {broken[1]}")
    print(f"chaos: what there was is in {kept}")
    print(f"chaos: to repeat: make chaos STEPS={options.steps} SEED={options.seed}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
