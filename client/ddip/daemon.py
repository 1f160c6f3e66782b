# SPDX-License-Identifier: Apache-2.0
"""Finding the daemon, and starting a private one."""

import os
import shutil
import subprocess
import time

from .errors import DdipError, NotRunning
from .transport import Endpoint, request

START_S = 15.0
OTHER = "another ddipd"  # what the second of two that are started at once says


def runtime_dirs():
    """Where a daemon's socket may lie, best first. DDIP_RUNTIME_DIR names the only one."""
    if only := os.environ.get("DDIP_RUNTIME_DIR"):
        return [only]
    dirs = [f"/tmp/ddipd-{os.getuid()}", "/run/ddipd"]
    if xdg := os.environ.get("XDG_RUNTIME_DIR"):
        dirs.insert(0, os.path.join(xdg, "ddipd"))
    return dirs


def find(where=None, token=None):
    """The Endpoint of a daemon that accepts connections. Raises NotRunning, ValueError.

    where: a URL, a socket's path or a runtime dir; else DDIP_URL; else the first of the runtime
    dirs where something answers, by socket or else by its `url` file. token: else DDIP_TOKEN, else
    the `token` file of a runtime dir.
    """
    where = str(where or os.environ.get("DDIP_URL") or "")
    token = (token or os.environ.get("DDIP_TOKEN") or "").strip() or None
    if where and os.path.isdir(where):
        return _first([where], token)
    if where:
        endpoint = Endpoint.parse(where, token or _token_for(where))
        endpoint.open().close()
        return endpoint
    return _first(runtime_dirs(), token)


def _first(dirs, token):
    tried = []
    for directory in filter(_trusted, dirs):
        for endpoint in _in_dir(directory, token):
            try:
                endpoint.open().close()
                return endpoint
            except NotRunning as error:
                tried.append(error.detail)
    raise NotRunning(
        "; ".join(tried) or f"no ddipd is running (looked in {', '.join(dirs)})",
        hint="start `ddipd`, or let %makedip start a private one",
    )


def _in_dir(directory, token):
    socket_path = os.path.join(directory, "ddipd.sock")
    if os.path.exists(socket_path):
        yield Endpoint(path=socket_path)
    if url := _read(directory, "url"):
        yield Endpoint.parse(url, token or _read(directory, "token"))


def _trusted(directory):
    """Anyone may make a name in /tmp; a stranger's daemon could send us pickles that run code."""
    try:
        return os.stat(directory).st_uid in (0, os.getuid()) or directory == "/run/ddipd"
    except OSError:
        return False


def _token_for(where):
    for directory in filter(_trusted, runtime_dirs()):
        if _read(directory, "url") == where.rstrip("/"):
            return _read(directory, "token")
    return None


def _read(directory, name):
    try:
        with open(os.path.join(directory, name)) as file:
            return file.read().strip().rstrip("/")
    except OSError:
        return None


def start_again(endpoint):
    """Starts the private daemon of that Endpoint again; False if it was ended on purpose.

    One that ends in order, and its groups with it, takes its token away.
    """
    directory = os.path.dirname(endpoint.path)
    if not os.path.exists(os.path.join(directory, "token")):
        return False
    start(directory)
    return True


def start(directory=None):
    """Starts a private daemon that outlives this process; returns its Endpoint when it is ready.

    The binary is $DDIPD, else `ddipd` on PATH; its log is ddipd.log (0600) in the runtime dir.
    Raises NotRunning with the end of the log when it does not come up in START_S seconds.
    """
    binary = os.environ.get("DDIPD") or shutil.which("ddipd")
    if not binary or not os.access(binary, os.X_OK):
        raise NotRunning(
            f"no ddipd is running, and none can be started: {binary or 'no `ddipd` on PATH'}",
            hint="install ddipd, or set DDIPD to the path of its binary",
        )
    directory = os.path.abspath(directory or runtime_dirs()[0])
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if not _trusted(directory):
        raise NotRunning(f"{directory} belongs to another user: not starting ddipd there")
    log = os.path.join(directory, "ddipd.log")
    command = [binary, "--runtime-dir", directory, "--listen", "127.0.0.1:0"]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd="/",
        )
    return _wait_ready(process, directory, log)


def _wait_ready(process, directory, log):
    """A second starter's daemon finds the first one's and exits: whichever answers is the one."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        exited = process.poll() is not None
        try:
            endpoint = _first([directory], None)
            request(endpoint, "GET", "/readyz", timeout=START_S)
            return endpoint
        except (DdipError, TimeoutError):
            if exited and OTHER not in _tail(log):
                break
        time.sleep(0.02)
    how = f"exited with status {process.returncode}" if exited else f"is not ready in {START_S:g} s"
    raise NotRunning(f"ddipd {how}; the end of {log}:\n{_tail(log)}")


def _tail(log, lines=8):
    with open(log, errors="replace") as file:
        return "".join(file.readlines()[-lines:]).rstrip()
