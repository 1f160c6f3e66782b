# SPDX-License-Identifier: Apache-2.0
"""What must hold of a group's events: the checks of tests/chaos.py.

A window is what a group has told between two moments in which it was idle. Findings are sentences.
"""

import json
import re
from collections import Counter, defaultdict

LINE = re.compile(r"(K\d+) (\d+) (py|fd|c|err|ch) (\d+) =+\|")
PIECE = re.compile(r"^K\d+( \d|$)|=\|$")
PIPES = ("fd", "c", "ch")


class Tally:
    """What one rank says of the lines it wrote in one cell."""

    def __init__(self, path):
        self.token, self.rank = path.stem, int(path.suffix[1:])
        words = [line.split() for line in path.read_text().splitlines()]
        self.pids = [int(word[1]) for word in words if word[0] == "start"]
        self.begun = Counter(word[1] for word in words if word[0] == "b")
        self.ended = Counter(word[1] for word in words if word[0] == "a")


class Window:
    """Events of one group, as raw lines, with what is known from elsewhere."""

    def __init__(self, group, last_seq, lines, living, alone):
        """living: {rank: pid} of those that live; alone: the daemon was not disturbed meanwhile."""
        self.group, self.lines, self.living, self.alone = group, lines, living, alone
        self.events = [json.loads(line) for line in lines]
        self.last_seq = last_seq
        self.told = 0  # lines of tallies
        self.cells = defaultdict(list)
        for event, line in zip(self.events, lines, strict=True):
            if event["cell"] is not None:
                self.cells[event["cell"]].append((event, line))

    def cell_lines(self, cell):
        """The raw lines of a cell as its readers get them: up to `done`."""
        lines = []
        for event, line in self.cells[cell]:
            lines.append(line)
            if event["type"] == "done":
                break
        return lines

    def cell_of(self, token):
        """Numbers of the cells whose code has the token."""
        return [
            event["cell"]
            for event in self.events
            if event["type"] == "execute_input" and f"/{token}." in event["code"]
        ]

    def check(self, tallies):
        yield from self.check_numbers()
        for cell in self.cells:
            yield from self.check_cell(cell)
        yield from self.check_output(tallies)

    def check_numbers(self):
        numbers = [event["seq"] for event in self.events]
        wanted = list(range(self.last_seq + 1, self.last_seq + 1 + len(numbers)))
        if numbers != wanted:
            at = next(
                i for i, pair in enumerate(zip(numbers, wanted, strict=True)) if pair[0] != pair[1]
            )
            yield f"after event {wanted[at] - 1} comes {self.lines[at][:300]!r}"

    def check_cell(self, cell):
        events = [event for event, _ in self.cells[cell]]
        types = [event["type"] for event in events]
        if types[0] != "execute_input" or types.count("execute_input") != 1:
            told = [t for t in types if t != "stream"]
            yield f"cell {cell} does not begin with one execute_input: {told}"
            return
        if types.count("done") != 1:
            yield f"cell {cell} has {types.count('done')} events `done`: {types[-5:]}"
            return
        done = types.index("done")
        ended = [event["rank"] for event in events[:done] if event["type"] == "rank_done"]
        ranks = events[0]["ranks"]
        if sorted(ended) != sorted(ranks) or types.count("rank_done") != len(ended):
            yield f"cell {cell} of ranks {ranks} has rank_done of {ended} before `done`"

    # --- lines of text ---

    def texts(self):
        """(rank, name): text in order, cut where a new process began."""
        texts = defaultdict(lambda: [""])
        for event in self.events:
            if event["type"] == "stream":
                texts[event["rank"], event["name"]][-1] += event["text"]
            elif event["type"] == "status" and event["rank"] is not None:
                for name in ("stdout", "stderr"):
                    texts[event["rank"], name].append("")
        return texts

    def check_output(self, tallies):
        found = defaultdict(list)
        for (rank, name), pieces in self.texts().items():
            for number, text in enumerate(pieces):
                *lines, rest = text.split("\n")
                last = number == len(pieces) - 1
                if rest and last and name == "stdout" and rank in self.living:
                    yield f"rank {rank} lives, and its {name} ends with a torn line: {rest!r}"
                for line in lines:
                    match = LINE.fullmatch(line)
                    if match and int(match[2]) == rank:
                        found[match[1], rank, match[3]].append(int(match[4]))
                    elif PIECE.search(line):  # IPython, too, writes a line now and then
                        yield f"rank {rank}, {name}: a line that nobody wrote: {line[:300]!r}"
        self.told = sum(map(len, found.values()))
        yield from self.check_tallies(tallies, found)

    def gaps(self):
        """Ranks whose present process has lost text."""
        found = set()
        for event in self.events:
            if event["type"] == "gap":
                found.add(event["rank"])
            elif event["type"] == "status" and event["rank"] is not None:
                found.discard(event["rank"])
        return found

    def check_tallies(self, tallies, found):
        gaps = self.gaps()
        known = {(tally.token, tally.rank): tally for tally in tallies}
        for token, rank, _way in found:
            if (token, rank) not in known:
                yield f"rank {rank} told lines of {token}, which it never ran"
        for tally in tallies:
            who = f"{tally.token} on rank {tally.rank}"
            if len(tally.pids) != 1:
                yield f"{who} ran in {len(tally.pids)} processes: {tally.pids}"
                continue
            lives = tally.pids[0] == self.living.get(tally.rank)
            if lives and tally.rank in gaps:
                yield f"rank {tally.rank} lives, and has a gap"
            for way in tally.begun:
                numbers = found.get((tally.token, tally.rank, way), [])
                sure = lives or (self.alone and way in PIPES)
                least = tally.ended[way] if sure else 0
                if numbers != list(range(len(numbers))) or not (
                    least <= len(numbers) <= tally.begun[way]
                ):
                    state = "lives" if lives else "is dead"
                    yield (
                        f"{who} ({state}) wrote {tally.ended[way]} to {tally.begun[way]} lines by "
                        f"{way}; told are {spans(numbers)}"
                    )


def spans(numbers):
    """[0, 1, 2, 5, 5] -> '0-2, 5, 5'."""
    parts = []
    for number in numbers:
        if parts and parts[-1][1] + 1 == number:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    text = ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in parts[:20])
    return text or "none"


def check_seen(client, lines):
    """What a client saw is how the record begins: raw lines, or events from the Python API."""
    seen, python, who = client.lines(), client.name == "python", client.name
    if seen and not seen[-1].endswith(b"\n"):
        torn = seen.pop()
        theirs = lines[len(seen)] if len(seen) < len(lines) else b""
        if python or not theirs.startswith(torn):
            yield f"{who} saw a torn line {torn[:300]!r}, the record has {theirs[:300]!r}"
    if len(seen) > len(lines):
        yield f"{who} saw {len(seen)} events, the record has {len(lines)}: {seen[-1][:300]!r}"
    for mine, theirs in zip(seen, lines, strict=False):
        if json.loads(mine) != json.loads(theirs) if python else mine != theirs:
            yield f"{who} saw {mine[:300]!r}, the record has {theirs[:300]!r}"
            return
