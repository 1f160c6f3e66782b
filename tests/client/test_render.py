# SPDX-License-Identifier: Apache-2.0
"""Events to display, and errors to one exception. No daemon, no kernel."""

import pytest
from ddip import lanes, render
from ddip.errors import DdipCellError, DdipInterrupted


@pytest.fixture
def shown(monkeypatch):
    """Everything published besides the streams, in order."""
    published = []

    def publish(data, metadata=None, *, transient=None, update=False):
        published.append((data, transient or {}, update))

    for module in (render, lanes):
        monkeypatch.setattr(module, "publish_display_data", publish)
    monkeypatch.setattr(render, "clear_output", lambda wait: published.append(("clear", wait)))
    return published


def stream(text, rank=0, name="stdout"):
    return {"type": "stream", "rank": rank, "name": name, "text": text}


def display(rank=0, kind="display_data", **fields):
    return {"type": kind, "rank": rank, "metadata": {}, **fields}


def error(rank=0, ename="ValueError", evalue="boom", traceback=("a", "b")):
    fields = {"ename": ename, "evalue": evalue, "traceback": list(traceback)}
    return {"type": "error", "rank": rank, **fields}


def done(status="ok", **ranks):
    return {"type": "done", "status": status, "ranks": {k[1:]: v for k, v in ranks.items()}}


def run(*events, **options):
    renderer = render.Renderer(**options)
    for event in events:
        renderer.handle(event)
    renderer.close()
    return renderer


def failure(*events, **options):
    with pytest.raises(DdipCellError) as caught:
        run(*events, **options).check()
    return caught.value, "\n".join(caught.value._render_traceback_())


def test_one_rank_is_shown_as_it_is(capsys):
    renderer = run(
        stream("a"), stream("no", 1), stream("b\n"), stream("e\n", name="stderr"), done()
    )
    assert tuple(capsys.readouterr()) == ("ab\n", "e\n")
    assert renderer.hidden == {1: 2}
    renderer.check()


def test_output_is_written_before_the_next_event(capsys):
    renderer = render.Renderer()
    renderer.handle(stream("first\n"))
    renderer.flush()
    assert capsys.readouterr().out == "first\n"


def test_lines_of_several_ranks_stay_whole(capsys):
    run(stream("0 "), stream("0 ", 1), stream("1\n2"), stream("1\n", 1), done(), see=None)
    assert capsys.readouterr().out == "[0] 0 1\n[1] 0 1\n[0] 2\n"


def test_only_the_ranks_asked_for(capsys):
    renderer = run(*[stream(f"{r}\n", r) for r in range(4)], done(), see=[3, 1])
    assert capsys.readouterr().out == "[1] 1\n[3] 3\n"
    assert set(renderer.hidden) == {0, 2}


def test_output_of_the_daemon_itself_is_always_shown(capsys):
    run(stream("note\n", None), done(), see=[1])
    assert capsys.readouterr().out == "note\n"


def test_bars_of_several_ranks_are_updated_in_place(capsys, shown):
    """In one display, in the order of the ranks, whoever begins."""
    events = [stream(f"\r{i}0%", rank, "stderr") for i in range(3) for rank in (1, 0)]
    events += [stream("\r100%\nend\n", rank, "stderr") for rank in (1, 0)]
    run(*events, done(), see=None)
    run(stream("\r1%\r2%\nline\r\n"), done(), see=None)  # a bar that comes at once, and none
    *shown, (whole, _, update) = shown
    assert whole["text/plain"] == "[0] 2%" and not update
    texts = [data["text/plain"] for data, _, _ in shown]
    assert texts[:3] == ["[1] 00%", "[0] 00%\n[1] 00%", "[0] 00%\n[1] 10%"]
    assert texts[-1] == "[0] 100%\n[1] 100%"
    assert [update for _, _, update in shown] == [False] + [True] * 7
    assert len({transient["display_id"] for _, transient, _ in shown}) == 1
    assert tuple(capsys.readouterr()) == ("[0] line\n", "[1] end\n[0] end\n")


def test_next_bar_of_a_rank_stands_below(capsys, shown):
    """Also when another rank is still at its first one, and after a line of its own."""
    events = [stream("\ra"), stream("\n"), stream("\rb"), stream("\rc", 1), stream("\n", 1)]
    events += [stream("line\n", 1), stream("\re", 1), stream("\rB")]
    run(*events, done(), see=None)
    ids = [transient["display_id"] for _, transient, _ in shown]
    texts = {i: data["text/plain"] for i, (data, _, _) in zip(ids, shown, strict=True)}
    assert list(texts.values()) == ["[0] a", "[0] B\n[1] c", "[1] e"]


def test_bars_in_a_terminal_share_its_last_line(capsys, monkeypatch):
    monkeypatch.setattr(lanes, "_in_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "24")
    events = [stream("\r10%", 1), stream("\r20%"), stream("\r90%\n", 1), stream("\r95%\nend\n")]
    run(*events, done(), see=None)
    *drawn, last = capsys.readouterr().out.split("\r")
    assert [each.rstrip() for each in drawn] == [
        "",
        "[1] 10%",
        "[0] 20%  [1] 10%",
        "[0] 20%  [1] 90%",
    ]
    assert last.split("\n") == ["[0] 95%  [1] 90%".ljust(23), "[0] end", ""]


def test_text_never_follows_a_bar_on_the_line_of_a_terminal(capsys, monkeypatch):
    """Also when the bar that was drawn last belongs to an older block of lanes."""
    monkeypatch.setattr(lanes, "_in_terminal", lambda: True)
    events = [stream("\ra", 1), stream("\rb\n"), stream("\rc"), stream("one\n", 2)]
    run(*events, stream("\rA", 1), stream("two\n", 2), done(), see=None)
    lines = [line.rpartition("\r")[2].rstrip() for line in capsys.readouterr().out.split("\n")]
    assert lines == ["[0] b  [1] a", "[0] c", "[2] one", "[0] b  [1] A", "[2] two", ""]


def test_line_without_end_is_bounded(capsys):
    run(*[stream("x" * 10_000)] * 20, done(), see=None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and sum(len(line) - 4 for line in lines) == 200_000


def test_long_output_is_bounded_and_its_end_shown(capsys, monkeypatch):
    monkeypatch.setenv("DDIP_OUTPUT_LIMIT", "1000")
    lines = [f"line {i:04}\n" for i in range(1000)]  # of 10 characters
    run(*map(stream, lines), done(), way="%dipattach 7 --full")
    out, err = capsys.readouterr()
    assert out == "".join(lines[:100] + lines[800:])
    assert err.splitlines() == [
        "ddip: more than 1000 characters; the end will be shown, `%dipattach 7 --full` shows all",
        "ddip: 7000 characters left out here; `%dipattach 7 --full` shows all",
    ]
    run(*map(stream, lines), done(), full=True)
    assert tuple(capsys.readouterr()) == ("".join(lines), "")
    monkeypatch.setenv("DDIP_OUTPUT_LIMIT", "0")
    run(*map(stream, lines), done(), see=None)
    assert capsys.readouterr().out.count("[0] line") == 1000


def test_little_beyond_the_limit_is_shown_whole(capsys, monkeypatch):
    monkeypatch.setenv("DDIP_OUTPUT_LIMIT", "1000")
    run(stream("x" * 1000 + "\n"), stream("y\n"), done())
    out, err = capsys.readouterr()
    assert out == "x" * 1000 + "\ny\n" and "left out" not in err


def test_bar_is_as_long_as_what_is_seen_of_it(capsys, monkeypatch):
    monkeypatch.setenv("DDIP_OUTPUT_LIMIT", "1000")
    bars = [stream(f"\r{i:05}%{'#' * 50}") for i in range(500)]
    run(*bars, stream("\nend\n"), done())
    out, err = capsys.readouterr()
    assert out.count("%") == 500 and out.endswith("\nend\n") and not err


def test_rich_output(shown):
    data, transient = {"text/plain": "t", "text/html": "<b>"}, {"display_id": "d"}
    run(
        display(data=data, transient=transient),
        display(kind="update_display_data", data=data, transient=transient),
        display(kind="execute_result", data={"text/plain": "1"}, execution_count=3),
        display(1, data=data),
        {"type": "clear_output", "rank": 0, "wait": True},
        done(),
    )
    assert shown == [
        (data, transient, False),
        (data, transient, True),
        ({"text/plain": "1"}, {}, False),
        ("clear", True),
    ]


def test_rich_output_of_several_ranks(shown, capsys):
    run(
        display(1, data={"text/plain": "1"}, kind="execute_result"),
        display(0, data={"text/html": "<b>"}),
        {"type": "clear_output", "rank": 0, "wait": False},
        done(),
        see=None,
    )
    assert [data for data, *_ in shown] == [{"text/plain": "[1] 1"}, {"text/html": "<b>"}]
    assert capsys.readouterr().out == "[0]\n"


def test_quiet_waits_for_the_end(capsys, shown):
    renderer = render.Renderer(quiet=True)
    for event in (stream("lost\n"), {"type": "clear_output", "rank": 0}, stream("kept\n")):
        renderer.handle(event)
    renderer.flush()
    assert capsys.readouterr().out == ""
    renderer.handle(done())
    renderer.close()
    assert capsys.readouterr().out == "kept\n" and not shown


def test_waiting_is_never_silent(capsys):
    state = {"type": "status", "execution_state": "queued", "position": 2, "rank": None}
    run(state, done(), quiet=True)
    assert "2 before it" in capsys.readouterr().err


def test_unknown_events_are_ignored(capsys):
    run({"type": "novelty", "rank": None}, {"type": "rank_done", "rank": 0}, done()).check()
    assert capsys.readouterr().out == ""


def test_what_is_missing_is_told(capsys):
    gap = {"type": "gap", "rank": None, "dropped_events": 7, "reason": "the journal's limit"}
    run(gap, {"type": "gap", "rank": 0, "dropped_events": 0, "dropped_bytes": 5}, done()).check()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "ddip: 7 events are missing here: the journal's limit",
        "ddip: rank 0: 0 events, 5 bytes are missing here",
    ]


def test_error_of_an_unseen_rank_is_shown():
    raised, text = failure(error(1), done("error", r0="ok", r1="error"))
    assert str(raised) == "rank 1: ValueError: boom"
    assert text == "\x1b[1;31m--- rank 1 ---\x1b[0m\na\nb"


def test_equal_errors_are_shown_once():
    traces = ["\x1b[31mat 0x7f01\x1b[0m", "at 0x9abc"]
    raised, text = failure(
        *[error(1 - i, traceback=[trace]) for i, trace in enumerate(traces)],
        error(2, evalue="other"),
        done("error", r0="error", r1="error", r2="error"),
    )
    assert [e["ranks"] for e in raised.errors] == [[1, 0], [2]]
    assert text.count("--- ranks 0, 1 ---") == 1 and "0x9abc" not in text


def test_first_cause_comes_first_and_released_ranks_are_named():
    raised, text = failure(
        error(1),
        error(0, "RuntimeError", "Connection closed by peer"),
        done("error", r0="error", r1="error", r2="interrupted", r3="interrupted"),
    )
    assert [e["ename"] for e in raised.errors] == ["ValueError", "RuntimeError"]
    assert text.endswith("\nranks 2, 3: interrupted")


def test_dead_rank():
    _, text = failure(done("lost", r0="interrupted", r1="lost"))
    assert "rank 0: interrupted\nrank 1: lost\n" in text and "%makedip -r" in text


def test_end_without_reason_is_not_silent():
    raised, text = failure(done("interrupted"))
    assert text == str(raised) == "the cell ended as 'interrupted'"


def test_interrupt_is_a_keyboard_interrupt():
    renderer = run(error(0, "KeyboardInterrupt", ""), done("interrupted", r0="interrupted"))
    raised = renderer.error(DdipInterrupted, "KeyboardInterrupt")
    assert isinstance(raised, KeyboardInterrupt)
    assert raised._render_traceback_()[-1] == "KeyboardInterrupt"


def place(where, source, *ranks):
    user = {"cell": 7, "execution_count": 3, "line": 7, "function": "f", "source": source}
    return {"where": where, "user": user if source else None, "ranks": list(ranks)}


def stopping(before, *places):
    stacks = {"before": before, "stacks": list(places), "differ": []}
    return {"type": "status", "rank": None, "execution_state": "stopping", **stacks}


def test_where_stopped_ranks_were(capsys):
    _, text = failure(
        error(1),
        stopping(
            "interrupt",
            place("Cell In[3], line 7", "dist.all_reduce(x)", 0, 2),
            place("Cell In[3], line 9", "time.sleep(9)", 3),
        ),
        stopping("abort", place("Cell In[3], line 8", "dist.barrier()", 2)),
        stopping("kill", place("no answer within 2 s: the process is stopped (state T)", None, 4)),
        done("error", _0="interrupted", _1="error", _2="interrupted", _3="interrupted", _4="lost"),
    )
    assert "--- rank 1 ---" in text and capsys.readouterr().err == ""
    assert text.splitlines()[-4:] == [
        "rank 0 was at Cell In[3], line 7: dist.all_reduce(x)",
        "rank 2 was at Cell In[3], line 8: dist.barrier()",  # the latest word
        "rank 3 was at Cell In[3], line 9: time.sleep(9)",
        "rank 4: no answer within 2 s: the process is stopped (state T)",
    ]


def test_ranks_at_one_place_share_a_line():
    at = place("Cell In[3], line 7", "dist.all_reduce(x)", 0, 2)
    renderer = render.Renderer()
    for event in (error(1), stopping("interrupt", at), done("error", _1="error")):
        renderer.handle(event)
    told = renderer.error(DdipInterrupted, "KeyboardInterrupt: it ended").note
    assert told == (
        "KeyboardInterrupt: it ended\nranks 0, 2 were at Cell In[3], line 7: dist.all_reduce(x)"
    )
