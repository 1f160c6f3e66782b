# SPDX-License-Identifier: Apache-2.0
"""The units as systemd's own tools judge them, and ddipd's side of systemd's protocols.

No service manager runs where tests run, so each of its parts is played by a tool or by the test:
socket activation by systemd-socket-activate, sd_notify(3) by a datagram socket.
"""

import os
import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]
EXPOSURE = 45  # `systemd-analyze security`, times ten; 0 is best


@pytest.fixture
def installed(build, tmp_path):
    """`make install` below tmp_path, with units that name the installed binary."""
    root, where = tmp_path / "root", os.path.relpath(build, ROOT)
    make = ["make", "-s", "install", f"B={where}", f"DESTDIR={root}", "PREFIX=/usr/local"]
    subprocess.run(make, cwd=ROOT, check=True)
    for unit in root.glob("usr/local/lib/systemd/*/ddipd.service"):
        text = unit.read_text()
        assert "ExecStart=/usr/local/bin/ddipd " in text
        unit.write_text(text.replace("ExecStart=", f"ExecStart={root}"))
    return root / "usr/local/lib"


@pytest.mark.parametrize("manager", ["system", "user"])
def test_units_verify(installed, tmp_path, manager):
    verify = ["systemd-analyze", "verify", f"--{manager}", "--man=no", "--recursive-errors=no"]
    units = sorted(str(u) for u in (installed / "systemd" / manager).iterdir())
    env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    run = subprocess.run([*verify, *units], env=env, capture_output=True, text=True)
    assert [os.path.basename(u) for u in units] == ["ddipd.service", "ddipd.socket"]
    assert (run.returncode, run.stderr) == (0, "")


def test_system_unit_is_confined(installed):
    security = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}"]
    unit = installed / "systemd/system/ddipd.service"
    run = subprocess.run([*security, str(unit)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_socket_units_listen_where_the_daemon_would(build, installed):
    text = subprocess.run([build / "ddipd", "--help"], capture_output=True, text=True).stdout
    address = re.search(r"--listen .*\[(.*)\]", text)[1]
    for unit in installed.glob("systemd/*/ddipd.socket"):
        streams = re.findall(r"^ListenStream=(.*)", unit.read_text(), re.M)
        assert streams == ["%t/ddipd/ddipd.sock", address]


def test_user_and_folders_are_made(installed, tmp_path):
    if os.getuid() != 0:
        pytest.skip("needs root: files are given to another user")
    (tmp_path / "root/etc").mkdir()
    for tool, folder in (
        (["systemd-sysusers"], "sysusers.d"),
        (["systemd-tmpfiles", "--create"], "tmpfiles.d"),
    ):
        config = installed / folder / "ddipd.conf"
        subprocess.run([*tool, f"--root={tmp_path / 'root'}", str(config)], check=True)
    uid = int(re.search(r"^ddipd:x:(\d+):", (tmp_path / "root/etc/passwd").read_text())[1])
    for folder in ("run/ddipd", "var/lib/ddipd"):
        status = (tmp_path / "root" / folder).stat()
        assert (status.st_uid, status.st_mode & 0o777) == (uid, 0o700)


# --- the protocols --------------------------------------------------------------------------------


def arguments(build, tmp_path, *more):
    folders = ["--runtime-dir", tmp_path / "run", "--state-dir", tmp_path / "state"]
    return [str(word) for word in (build / "ddipd", *folders, *more)]


@contextmanager
def running(command, **env):
    """A process without what the service manager of this very test may have set."""
    passed = re.compile("NOTIFY_SOCKET|(LISTEN|WATCHDOG)_")
    base = {k: v for k, v in os.environ.items() if not passed.match(k)}
    process = subprocess.Popen(command, env=base | env, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def curl(url, *options):
    command = [
        "curl",
        "-sS",
        "--fail",
        "--retry",
        "3",
        "--retry-connrefused",
        "-m",
        "20",
        *options,
        url,
    ]
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("unix_first", [True, False], ids=["unix-tcp", "tcp-unix"])
def test_serves_passed_sockets(build, tmp_path, unix_first):
    (tmp_path / "run").mkdir(mode=0o700)
    port, path = free_port(), tmp_path / "run/ddipd.sock"
    listen = [f"--listen={path}", f"--listen=127.0.0.1:{port}"]
    sanitizers = [f"--setenv={k}={v}" for k, v in os.environ.items() if k.endswith("SAN_OPTIONS")]
    activate = ["systemd-socket-activate", *sanitizers, "--fdname=a:b"]
    activate += listen if unix_first else listen[::-1]
    with running(activate + arguments(build, tmp_path)) as process:
        wait_until(lambda: path.exists() and not refused(port))
        assert curl("http://localhost/healthz", "--unix-socket", path).strip() == "ok"
        assert curl(f"http://127.0.0.1:{port}/healthz").strip() == "ok"
        assert (tmp_path / "run/url").read_text().strip() == f"http://127.0.0.1:{port}"
        token = (tmp_path / "run/token").read_text().strip()
        info = curl(f"http://127.0.0.1:{port}/v1/info", "-H", f"Authorization: Bearer {token}")
        assert f'"pid":{process.pid}' in info.replace(" ", "")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert path.exists(), "the socket is the service manager's to remove"


def test_sockets_passed_to_another_process_are_not_taken(build, tmp_path):
    command = arguments(build, tmp_path, "--listen", "none")
    with running(command, LISTEN_PID="1", LISTEN_FDS="2"):
        wait_until((tmp_path / "run/ddipd.sock").exists)
        ours = ["--unix-socket", tmp_path / "run/ddipd.sock"]
        assert curl("http://localhost/healthz", *ours).strip() == "ok"


def refused(port):
    """Looks without connecting, which would already start the daemon."""
    listening = f"0100007F:{port:04X} 00000000:0000 0A"
    with open("/proc/net/tcp") as table:
        return listening not in table.read()


class Notifications:
    """The service manager's end of sd_notify: one dict per datagram."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1) if address[0] == "@" else address)
        self.env = {"NOTIFY_SOCKET": address}
        self.seen = []

    def read(self, seconds):
        self.socket.settimeout(max(seconds, 0.001))
        lines = self.socket.recv(65536).decode().splitlines()
        self.seen.append(dict(line.split("=", 1) for line in lines))
        return self.seen[-1]

    def until(self, name, seconds=20):
        """The next datagram that says name=1."""
        end = time.monotonic() + seconds
        while True:
            try:
                message = self.read(end - time.monotonic())
            except TimeoutError:
                pytest.fail(f"no {name}=1 in {seconds} s, only {self.seen}")
            if message.get(name) == "1":
                return message


@pytest.fixture
def notifications(tmp_path):
    notifications = Notifications(str(tmp_path / "notify"))
    yield notifications
    notifications.socket.close()


def test_ready_comes_when_requests_are_answered(build, tmp_path, notifications):
    with running(arguments(build, tmp_path, "--listen", "none"), **notifications.env):
        notifications.until("READY")
        ours = ["--unix-socket", tmp_path / "run/ddipd.sock"]
        assert curl("http://localhost/readyz", *ours)
        assert any(message.get("STATUS") for message in notifications.seen)


def test_notify_socket_may_be_abstract(build, tmp_path):
    notifications = Notifications(f"@ddipd-test-{os.getpid()}")
    with notifications.socket:
        with running(arguments(build, tmp_path, "--listen", "none"), **notifications.env):
            notifications.until("READY")


def test_watchdog_is_fed_in_time(build, tmp_path, notifications):
    own_pid = ["sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh"]
    command = own_pid + arguments(build, tmp_path, "--listen", "none")
    with running(command, WATCHDOG_USEC="2000000", **notifications.env):
        notifications.until("READY")
        for _ in range(3):
            notifications.until("WATCHDOG", seconds=2)


def test_watchdog_of_another_process_is_left_alone(build, tmp_path, notifications):
    command = arguments(build, tmp_path, "--listen", "none")
    with running(command, WATCHDOG_USEC="400000", WATCHDOG_PID="1", **notifications.env):
        notifications.until("READY")
        with pytest.raises(TimeoutError):
            while "WATCHDOG" not in notifications.read(1.5):
                pass


@pytest.mark.parametrize(
    "text", ["log_level = debug\n", "no such = setting\n"], ids=["good", "bad"]
)
def test_reload_is_announced_and_ends(build, tmp_path, notifications, text):
    config = tmp_path / "ddipd.conf"
    config.write_text("log_level = info\n")
    command = arguments(build, tmp_path, "--listen", "none", "--config", config)
    with running(command, **notifications.env) as process:
        notifications.until("READY")
        config.write_text(text)
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        process.send_signal(signal.SIGHUP)
        stamp = int(notifications.until("RELOADING")["MONOTONIC_USEC"])
        assert before <= stamp <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        notifications.until("READY")
        ours = ["--unix-socket", tmp_path / "run/ddipd.sock"]
        assert curl("http://localhost/healthz", *ours).strip() == "ok"


def test_stopping_is_announced(build, tmp_path, notifications):
    with running(arguments(build, tmp_path, "--listen", "none"), **notifications.env) as process:
        notifications.until("READY")
        process.send_signal(signal.SIGTERM)
        notifications.until("STOPPING")
        assert process.wait(20) == 0
