# SPDX-License-Identifier: Apache-2.0
"""Completion and inspection of remote names in an IPython shell, against a scripted daemon: which
cells are asked about, where, how long at most. The real ones are in tests/e2e/test_feel.py."""

import json
import threading
import time

import pytest
from ddip import complete, magics
from ddip.errors import NotRunning
from IPython.core.completer import provisionalcompleter, rectify_completions
from test_magics_scripted import Script, script, shell  # noqa: F401

ROUTE = "POST /v1/groups/default/complete"
NOT_THERE = (404, {"title": "Not Found", "detail": "no such group"})


def reply(code, *matches, start=0):
    types = [{"start": start, "end": len(code), "text": m, "type": "function"} for m in matches]
    return {
        "status": "ok",
        "matches": list(matches),
        "cursor_start": start,
        "cursor_end": len(code),
        "metadata": {"_jupyter_types_experimental": types},
    }


def tab(shell, code):  # noqa: F811
    """{text: type} of the completions at the end of code, as a front end gets them."""
    shell.Completer.use_jedi = False  # it takes its time
    with provisionalcompleter():
        found = list(rectify_completions(code, shell.Completer.completions(code, len(code))))
    return {each.text: each.type for each in found}


def asked(script):  # noqa: F811
    return [body for path, body in script.bodies if path.endswith(("complete", "inspect"))]


def test_remote_matches_join_local_ones(shell, script):  # noqa: F811
    shell.user_ns["learn_here"] = 1
    script.answers[ROUTE] = (200, reply("learn_", "learn_there", "learn_here"))
    found = tab(shell, "%%dip\nlearn_")
    assert {"learn_there", "learn_here"} <= set(found) and found["learn_there"] == "function"
    assert asked(script) == [{"code": "learn_", "cursor_pos": 6, "rank": 0}]


def test_attributes_start_where_the_rank_says(shell, script):  # noqa: F811
    script.answers[ROUTE] = (200, reply("x\nlearn.fi", ".fit_one_cycle", start=7))
    assert list(tab(shell, "%%dip\nx\nlearn.fi")) == [".fit_one_cycle"]


@pytest.mark.parametrize(
    ("before", "cell", "where"),
    [
        ("", "%%dip\n", ("default", 0)),
        ("", "\n\n%%dip --see all\n", ("default", 0)),
        ("", "%%dip everywhere\n", ("default", 0)),
        ("", "%%dip --ranks 2,1 --name other\n", ("other", 2)),
        ("", "%%dip --nonsense 'open\n", ("default", 0)),
        ("%autodip on", "", ("default", 0)),
        ("%autodip on", "x = 1\n", ("default", 0)),
        ("%autodip -a '--name other --ranks 1' on", "y\n", ("other", 1)),
    ],
)
def test_cells_that_run_there(shell, script, before, cell, where):  # noqa: F811
    shell.run_cell(before)
    group, rank = where
    script.answers[f"POST /v1/groups/{group}/complete"] = (200, reply("far", "far_away"))
    assert "far_away" in tab(shell, cell + "far")
    assert [body["rank"] for body in asked(script)] == [rank]


@pytest.mark.parametrize(
    ("before", "cell"),
    [
        ("", ""),
        ("", "x = 1\n"),
        ("", "%%dip local\n"),
        ("", "%%time\n"),
        ("%autodip on", "%time 1\n"),
        ("%autodip on", "%%capture out\n"),
        ("%autodip on", "%%dip local\n"),
        ("%autodip off", "x = 1\n"),
    ],
)
def test_cells_that_run_here_are_asked_about_here(shell, script, before, cell):  # noqa: F811
    shell.run_cell(before)
    script.answers[ROUTE] = (200, reply("far", "far_away"))
    shell.user_ns["farther"] = 1
    found = tab(shell, cell + "far")
    assert "far_away" not in found and "farther" in found and not asked(script)


@pytest.mark.parametrize(
    ("line", "some", "none"),
    [
        ("%makedip -", {"-g", "--gpus", "-n", "-k", "--timeout"}, {"--see"}),
        ("%makedip -n 2 --n", {"--name"}, {"-n", "--gpus"}),
        ("%%dip --s", {"--see"}, {"-S", "--ranks"}),
        ("%%dip ", {"local", "everywhere", "remote"}, {"--see"}),
        ("%%dip --see all ever", {"everywhere"}, {"local"}),
        ("%autodip o", {"on", "off"}, set()),
        ("%dipstack -", {"--full", "-f"}, set()),
    ],
)
def test_flags_of_the_magics(shell, script, line, some, none):  # noqa: F811
    found = set(tab(shell, line))
    assert some <= found and not none & found and not asked(script)


def test_other_magics_are_left_alone(shell, script):  # noqa: F811
    shell.run_cell("%autodip on")
    assert "%dipinfo" in tab(shell, "%dipin") and "%%timeit" in tab(shell, "%%timei")
    tab(shell, "%dipper ")
    tab(shell, "%time x")
    assert not asked(script)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("%dipull lo", "default/namespace?rank=0"),
        ("%dipull epochs -r 1 lo", "default/namespace?rank=1"),
        ("%dipull --name other --rank=2 lo", "other/namespace?rank=2"),
    ],
)
def test_what_there_is_to_pull(shell, script, line, where):  # noqa: F811
    rows = {"variables": [{"name": "losses"}, {"name": "lr"}], "omitted": 0}
    script.answers[f"GET /v1/groups/{where}&wait=false"] = (200, rows)
    assert list(tab(shell, line)) == ["losses"]
    assert "--rank" in tab(shell, "%dipull --r")


def hang(script):  # noqa: F811
    """The daemon takes what it is asked, and never answers."""
    held, real = threading.Event(), script.route

    def route(method, path, headers, reader):
        if path.endswith(("complete", "inspect")):
            held.wait(20)
        return real(method, path, headers, reader)

    script.route = route
    return held


def test_no_answer_is_no_wait(shell, script):  # noqa: F811
    shell.user_ns["farther"] = 1
    tab(shell, "%%dip\nfar")  # what is imported at first
    held = hang(script)
    script.answers[ROUTE] = (200, reply("far", "far_away"))
    started = time.monotonic()
    found = tab(shell, "%%dip\nfar")
    took = time.monotonic() - started
    assert "farther" in found and "far_away" not in found
    assert complete.ANSWER_S * 0.5 < took < complete.ANSWER_S + 2
    held.set()
    deadline = time.monotonic() + 10
    while "far_away" not in tab(shell, "%%dip\nfar"):
        assert time.monotonic() < deadline


def test_a_lost_daemon_holds_up_nobody(shell, script, monkeypatch):  # noqa: F811
    """Finding a daemon may take seconds: the first question waits its time, the next do not."""
    tab(shell, "%%dip\nfar")
    slow = threading.Event()

    def connect():
        slow.wait(20)
        raise NotRunning("none")

    monkeypatch.setattr(magics, "connect", connect)
    shell._ddip._client = None
    started = time.monotonic()
    for _ in range(20):
        tab(shell, "%%dip\nfar")
    slow.set()
    assert time.monotonic() - started < 20 * complete.ANSWER_S / 2


@pytest.mark.parametrize("answer", [NOT_THERE, (504, {"title": "t", "detail": "d"}), (500, None)])
def test_refusals_are_silent(shell, script, answer, capfd):  # noqa: F811
    shell.user_ns["farther"] = 1
    script.answers[ROUTE] = answer
    assert "farther" in tab(shell, "%%dip\nfar")
    assert capfd.readouterr() == ("", "")


def request_of(shell, code, cursor=None):  # noqa: F811
    content = {"code": code, "cursor_pos": len(code) if cursor is None else cursor}
    message = {"header": {"msg_type": "inspect_request"}, "content": content}
    shell.get_parent = lambda: message


def test_inspection_of_the_rank_then_of_here(shell, script):  # noqa: F811
    route = "POST /v1/groups/default/inspect"
    far = {"status": "ok", "found": True, "data": {"text/plain": "of the rank"}, "metadata": {}}
    script.answers[route] = (200, far)
    shell.user_ns["near"] = "text here"
    request_of(shell, "%%dip --ranks 1\nnear.upper(1)", cursor=26)
    assert shell.object_inspect_mime("near.upper") == {"text/plain": "of the rank"}
    sent = {"code": "near.upper(1)", "cursor_pos": 10, "rank": 1, "detail_level": 0}
    assert asked(script) == [sent]
    script.answers[route] = (200, {**far, "found": False, "data": {}})
    assert "uppercase" in shell.object_inspect_mime("near.upper", detail_level=1)["text/plain"]
    with pytest.raises(KeyError):
        shell.object_inspect_mime("nowhere")
    count = len(asked(script))
    request_of(shell, "near.upper")  # a cell that runs here
    assert "uppercase" in shell.object_inspect_mime("near.upper")["text/plain"]
    request_of(shell, "%%dip --ranks 1\nx", cursor=3)  # in the line of %%dip itself
    shell.object_inspect_mime("near.upper")
    assert len(asked(script)) == count


def test_unloading_takes_the_hooks_away(shell, script):  # noqa: F811
    script.answers[ROUTE] = (200, reply("far", "far_away"))
    magics.unload(shell)
    assert not tab(shell, "%%dip\nfar_") and not asked(script)
    assert "object_inspect_mime" not in vars(shell)
    shell.run_cell("%load_ext ddip")
    assert "far_away" in tab(shell, "%%dip\nfar")


def test_the_body_that_is_sent_is_json(shell, script):  # noqa: F811
    script.answers[ROUTE] = (200, reply("größe", "größe2"))
    assert "größe2" in tab(shell, "%%dip\ngröße")
    assert json.loads(json.dumps(asked(script)[0]))["cursor_pos"] == 5
