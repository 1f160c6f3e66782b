# SPDX-License-Identifier: Apache-2.0
"""Events to display, and errors to one exception. No daemon, no kernel."""

import pytest
from ddip import render
from ddip.errors import DdipCellError, DdipInterrupted


@pytest.fixture
def shown(monkeypatch):
    """Everything published besides the streams, in order."""
    published = []

    def publish(data, metadata=None, *, transient=None, update=False):
        published.append((data, transient or {}, update))

    monkeypatch.setattr(render, "publish_display_data", publish)
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
    events = [stream(f"\r{i}0%", rank, "stderr") for i in range(3) for rank in (0, 1)]
    events += [stream("\r100%\nend\n", rank, "stderr") for rank in (0, 1)]
    run(*events, done(), see=None)
    texts = [data["text/plain"] for data, _, _ in shown]
    assert texts[:2] == ["[0] 00%", "[1] 00%"] and texts[-2:] == ["[0] 100%", "[1] 100%"]
    assert [update for _, _, update in shown] == [False, False] + [True] * 6
    assert len({transient["display_id"] for _, transient, _ in shown}) == 2
    assert capsys.readouterr().err == "[0] end\n[1] end\n"


def test_line_without_end_is_bounded(capsys):
    run(*[stream("x" * 10_000)] * 20, done(), see=None)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and sum(len(line) - 4 for line in lines) == 200_000


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
    run({"type": "gap", "rank": None}, {"type": "rank_done", "rank": 0}, done()).check()
    assert capsys.readouterr().out == ""


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
