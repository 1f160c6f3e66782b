# SPDX-License-Identifier: Apache-2.0
"""Waiting for a daemon that has gone. Groups and their cells live on without it, and the next one
adopts them: so what was under way can go on as if nothing had happened."""

import random
import time

RETRY_S = 60.0  # what was under way waits this long for the daemon to come back,
KNOCK_S = 5.0  # something new this long
NOTICE_S = 2.0  # absences this long are told
PAUSE_S = 0.05, 2.0  # between attempts: at first, at most


class Absence:
    """The attempts of one call to reach its daemon, as a context.

    It does nothing until `wait` is called, and at its end tells what came of it, if it took long.
    """

    def __init__(self, client, deadline=None):
        self._client, self._deadline = client, deadline
        self._pause, self._limit = PAUSE_S[0], None
        self._told = self._started = False

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._told:
            self._say(" not yet\n" if kind else f" back after {self._seconds():.0f} s\n")

    def wait(self, error):
        """Sleeps until the next attempt is due. Raises `error` when it is not worth another one,
        TimeoutError at the deadline."""
        if self._limit is None:
            self._limit = RETRY_S if getattr(error, "sent", True) else KNOCK_S
            self._since = time.monotonic()
        if self._start_again(error):
            return
        left = self._limit - self._seconds()
        if left <= 0:
            raise error
        if self._deadline is not None:
            left = min(left, self._deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError("ddipd did not come back before the deadline") from error
        if not self._told:
            left = min(left, self._notice())
        time.sleep(min(left, self._pause * random.uniform(0.5, 1.5)))
        self._pause = min(2 * self._pause, PAUSE_S[1])

    def _notice(self):
        """Tells of the absence once it is long enough; returns the seconds until then."""
        left = NOTICE_S - self._seconds()
        if left > 0:
            return left
        self._told = True
        where = self._client.endpoint
        self._say(f"ddip: no ddipd at {where}, waiting up to {self._limit:.0f} s for it ...")
        return self._limit

    def _seconds(self):
        return time.monotonic() - self._since

    def _say(self, text):
        if self._client.notice:
            self._client.notice(text)

    def _start_again(self, error):
        """Nobody but us starts a private daemon. Connecting must have failed: then it is dead."""
        if self._started or not self._client.start or getattr(error, "sent", True):
            return False
        self._started = self._client.start()
        if self._started:
            self._say("ddip: the private ddipd had died; started it again, the ranks went on\n")
        return self._started
