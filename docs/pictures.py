"""Draw the pictures of the pages, each for the light and the dark theme.

    python docs/pictures.py            # writes docs/images/*-light.svg and *-dark.svg

A page shows the picture of the current theme:
`![text](images/ring-light.svg#only-light)![text](images/ring-dark.svg#only-dark)`. The bar charts show the values in
the tables of the benchmark pages.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
THEMES = {
    "light": {"ink": "#1c1e26", "faint": "#8a8fa3", "a": "#c5cae9", "b": "#ffe0b2", "c": "#c8e6c9", "d": "#f8bbd0",
              "pad": "#eceff1", "line": "#3f51b5"},
    "dark": {"ink": "#e8eaf0", "faint": "#8e94a8", "a": "#3949ab", "b": "#a8661b", "c": "#2e7d4f", "d": "#a8436b",
             "pad": "#343844", "line": "#8c9eff"},
}  # fmt: skip
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
_ROW = re.compile(r"^\| `([\w.+]+)` \| ([\d.,]+) \|[^|]*\| ([a-z0-9 ]+?) ([\d.,]+) \|", re.MULTILINE)


class Picture:
    """Shapes of one picture in the colours of a theme.

    Parameters
    ----------
    width, height
        Size in pixels.
    theme
        Colours by name: `ink` and `faint` of texts and lines, `a` to `d` and `pad` of areas.
    """

    def __init__(self, width: int, height: int, theme: dict[str, str]) -> None:
        self.width, self.height, self._theme = width, height, theme
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, *, size: int = 14, anchor: str = "middle", ink: str = "ink") -> None:
        """Write words on one line."""
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{self._theme[ink]}">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, words: str = "", *, fill: str = "a") -> None:
        """Draw a rectangle with centred text."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{self._theme[fill]}"/>'
        )
        lines = words.split("\n") if words else []
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + height / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line)

    def cells(self, x: float, y: float, size: float, values: Sequence[str], fills: Sequence[str]) -> None:
        """Draw a row of squares with one value each."""
        for number, (value, fill) in enumerate(zip(values, fills, strict=True)):
            self.box(x + number * (size + 3), y, size, size, value, fill=fill)

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points, with an arrowhead at the last point."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{self._theme["line"]}" stroke-width="2" '
            'marker-end="url(#head)"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], ink: str, *, width: float = 2.0, dash: str = "") -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{self._theme[ink]}" stroke-width="{width:g}" '
            f'stroke-dasharray="{dash}"/>'
        )

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{self._theme["line"]}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'font-family="Helvetica, Arial, sans-serif">\n{head}\n' + "\n".join(self._shapes) + "\n</svg>\n"
        )


Theme = dict[str, str]


def columns(theme: Theme) -> Picture:
    """Memory of one column, and the libraries that read it."""
    picture = Picture(760, 250, theme)
    for number, words in enumerate(
        ('NumPy array\nbatch["obs"]', "torch tensor\nbatch.to_torch()", "Arrow array\npa.table(batch)")
    ):
        x = 60 + number * 225
        picture.box(x, 15, 190, 55, words, fill="c")
        picture.arrow((x + 95, 72), (x + 95, 118))
    picture.cells(60, 122, 61, [f"row {row}" for row in range(10)], ["a", *["b"] * 3, *["a"] * 6])
    picture.text(430, 205, "one Arrow buffer per column, 64-byte aligned, in private or shared memory", ink="faint")
    picture.arrow((155, 240), (155, 187))
    picture.text(165, 237, 'batch[1:4]["obs"] is a view of these rows', anchor="start")
    return picture


def sequences(theme: Theme) -> Picture:
    """Rows of three sequences, with and without padding."""
    picture = Picture(760, 230, theme)
    picture.text(20, 45, "rows", anchor="start")
    picture.cells(130, 20, 40, list("123456"), ["a", "a", "b", "b", "b", "c"])
    picture.text(420, 45, "seq_lens = [2, 3, 1]", anchor="start")
    picture.text(20, 105, "state_in_0", anchor="start")
    picture.cells(130, 80, 40, ["s", "s", "s"], ["a", "b", "c"])
    picture.text(420, 105, "one row per sequence", anchor="start", ink="faint")
    picture.arrow((280, 130), (280, 158))
    picture.text(295, 150, "right_zero_pad(max_seq_len=3)", anchor="start")
    picture.text(20, 190, "padded", anchor="start")
    picture.cells(130, 165, 40, list("120345600"), ["a", "a", "pad", "b", "b", "b", "c", "pad", "pad"])
    picture.text(540, 190, "shape (9,), or (3, 3)", anchor="start", ink="faint")
    return picture


def ring(theme: Theme) -> Picture:
    """A full ring buffer with its cursor, ends of episodes and a truncation."""
    picture = Picture(760, 240, theme)
    names = ["e3", "e3", "e0", "e1", "e1", "e1", "e2", "e2", "e2", "e3"]
    fills = {"e0": "d", "e1": "a", "e2": "b", "e3": "c"}
    picture.cells(40, 80, 65, names, [fills[name] for name in names])
    for number in range(10):
        picture.text(72 + number * 68, 165, f"slot {number}", size=12, ink="faint")
    picture.text(208, 60, "terminated", size=13)
    picture.text(412, 60, "terminated", size=13)
    picture.text(616, 60, "truncated", size=13)
    picture.arrow((208, 190), (208, 172))
    picture.text(208, 208, "cursor: the next step overwrites the oldest, slot 2", anchor="start")
    picture.arrow((616, 45), (616, 22), (700, 22))
    picture.text(606, 27, "final observation, stored apart", anchor="end", ink="faint")
    picture.text(40, 232, "episode 3 continues from slot 9 to slot 0", anchor="start", ink="faint")
    return picture


def n_step(theme: Theme) -> Picture:
    """A 3-step return within an episode, at a termination and at a truncation."""
    picture = Picture(760, 270, theme)
    cases = (
        (
            "within an episode",
            ["r0", "r1", "r2", "V(s3)"],
            ["a", "a", "a", "c"],
            f"r0 + {GAMMA} r1 + {GAMMA}² r2 + {GAMMA}³ V(s3)",
        ),
        ("terminated after r1", ["r0", "r1", "end"], ["a", "a", "d"], f"r0 + {GAMMA} r1"),
        (
            "truncated after r1",
            ["r0", "r1", "V(s2)"],
            ["a", "a", "c"],
            f"r0 + {GAMMA} r1 + {GAMMA}² V(s2), s2 the final observation",
        ),
    )
    for number, (words, values, fills, formula) in enumerate(cases):
        y = 20 + number * 85
        picture.text(20, y + 34, words, anchor="start")
        picture.cells(180, y, 55, values, fills)
        picture.text(425, y + 34, formula, anchor="start")
    return picture


def fragments(theme: Theme) -> Picture:
    """Path of a worker's fragment to a train batch."""
    picture = Picture(760, 230, theme)
    for number in range(2):
        y = 25 + number * 110
        picture.box(15, y, 130, 60, f"worker {number}\nenvironments", fill="c")
        picture.arrow((147, y + 30), (203, y + 30))
        picture.box(208, y, 140, 60, "fragment in\nshared memory")
        picture.arrow((350, y + 30), (408, 105 + number * 20))
        picture.text(388, y + (72 if number else -2), "64 bytes", size=12, ink="faint")
    picture.text(175, 105, "steps written once", size=12, ink="faint")
    picture.box(412, 80, 130, 70, "Aggregator\nin the learner", fill="b")
    picture.arrow((544, 115), (600, 115))
    picture.text(571, 100, "one copy", size=12, ink="faint")
    picture.box(604, 75, 140, 80, "train batch\n4,000 rows")
    return picture


def channel(theme: Theme) -> Picture:
    """Two processes, an arena of blocks and a lease."""
    picture = Picture(760, 270, theme)
    picture.box(15, 30, 150, 70, "producer\nsend(batch)", fill="c")
    picture.box(595, 30, 150, 70, "consumer\nrecv()", fill="c")
    picture.arrow((167, 55), (591, 55))
    picture.text(380, 45, "descriptor, 64 bytes: which block, which columns", size=13)
    picture.arrow((591, 82), (169, 82))
    picture.text(380, 102, "lease returned when the last array is gone", size=13)
    picture.text(20, 160, "arena of shared memory", anchor="start", ink="faint")
    widths = [
        ("block 0: free", "pad", 170),
        ("block 1: leased", "b", 210),
        ("block 2: written", "a", 170),
        ("free", "pad", 160),
    ]
    x = 15.0
    for words, fill, width in widths:
        picture.box(x, 175, width, 60, words, fill=fill)
        x += width + 5
    picture.arrow((90, 102), (90, 140), (470, 140), (470, 172))
    picture.arrow((670, 102), (670, 150), (290, 150), (290, 172))
    picture.text(720, 262, "the kernel frees the arena with the last process", anchor="end", ink="faint")
    return picture


def service(theme: Theme) -> Picture:
    """Writers, tables with limits, learners and a checkpoint."""
    picture = Picture(760, 260, theme)
    for number in range(3):
        y = 20 + number * 75
        picture.box(15, y, 140, 50, f"writer {number}", fill="c")
        picture.arrow((157, y + 25), (228, 105 + number * 10))
    picture.box(232, 30, 270, 150, "", fill="a")
    picture.text(367, 55, "ReplayServer")
    picture.box(250, 70, 235, 42, "table: prioritized, 1e6 steps", fill="pad")
    picture.box(250, 122, 235, 42, "limiter: samples per insert", fill="b")
    for number in range(2):
        y = 45 + number * 85
        picture.arrow((504, 95 + number * 20), (591, y + 25))
        picture.box(595, y, 150, 50, f"learner {number}\nsample, update", fill="c")
    picture.arrow((367, 182), (367, 210))
    picture.box(262, 213, 210, 40, "checkpoint on disk", fill="d")
    picture.text(193, 20, "Arrow Flight", size=12, ink="faint")
    picture.text(548, 20, "Arrow Flight, shared memory", size=12, ink="faint")
    return picture


def packing(theme: Theme) -> Picture:
    """Token rows padded, packed and balanced."""
    lengths = [9, 3, 5, 2, 6, 1]
    fills = ["a", "b", "c", "d", "a", "c"]
    picture = Picture(760, 300, theme)
    unit = 20
    picture.text(20, 20, "padded: 54 places for 26 tokens", anchor="start")
    for row, (length, fill) in enumerate(zip(lengths, fills, strict=True)):
        y = 30 + row * 24
        picture.box(20, y, unit * 9, 20, fill="pad")
        picture.box(20, y, unit * length, 20, str(length), fill=fill)
    picture.text(270, 20, "pack(max_tokens=9): 27 places", anchor="start")
    for number, rows in enumerate([[0], [4, 1], [2, 3, 5]]):
        y = 30 + number * 34
        picture.box(270, y, unit * 9, 26, fill="pad")
        for row, start in zip(rows, accumulate((lengths[row] for row in rows), initial=0), strict=False):
            picture.box(270 + unit * start, y, unit * lengths[row] - 2, 26, str(lengths[row]), fill=fills[row])
    picture.text(520, 20, "balance(2): 13 tokens per rank", anchor="start")
    for rank, rows in enumerate([[0, 1, 5], [4, 2, 3]]):
        y = 30 + rank * 62
        start = 0
        for row in rows:
            width = lengths[row] * 16
            picture.box(520 + start, y, width - 2, 30, str(lengths[row]), fill=fills[row])
            start += width
        picture.text(520, y + 46, f"rank {rank}", anchor="start", size=12, ink="faint")
    picture.text(20, 210, "in memory: the tokens of all rows, and offsets", anchor="start")
    start = 0
    for length, fill in zip(lengths, fills, strict=True):
        picture.box(20 + start * 27, 222, length * 27 - 2, 30, str(length), fill=fill)
        start += length
    for offset in accumulate(lengths, initial=0):
        picture.text(20 + offset * 27, 275, str(offset), size=12, ink="faint")
    return picture


def figures() -> dict[str, tuple[float, str, float]]:
    """Return our time, the fastest peer and its time by row of the benchmark pages."""
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("benchmark*.md")))
    number = lambda word: float(word.replace(",", ""))  # noqa: E731
    return {name: (number(ours), peer, number(time)) for name, ours, peer, time in _ROW.findall(text)}


CHARTS = {
    "batches": {
        "sb.timeslices20.4000": "cut 4,000 steps into 20s", "sb.split_by_episode.eps_id": "split by episode",
        "sb.slice": "slice", "sb.concat.64x200": "concat 64 batches", "sb.shuffle.20k": "shuffle 20,000 rows",
        "batch.stack.64": "stack 64 nested batches",
    },
    "buffers": {
        "buffer.add1+construct": "add a step", "buffer.sample256.1e6": "sample 256 of 1e6",
        "buffer.vec16.sample256": "sample 256, 16 environments", "prio.sample256.1e6": "sample by priority",
        "returns.nstep5.256of1e6": "5-step returns", "returns.gae.1e5": "GAE of 100,000 steps",
    },
    "processes": {
        "transport.handover.1MB": "hand over 1 MB", "transport.handover.256MB": "hand over 256 MB",
        "transport.send.16MB": "copy and send 16 MB", "transport.stream.1MB": "stream of 1 MB batches",
        "collect.cartpole16.buffer": "collect from 16 CartPoles",
        "collect.multi.spread1.policy": "collect from 3 agents",
    },
}  # fmt: skip
"""The rows of each bar chart, and how they are called there."""


def chart(rows: dict[str, str]) -> Callable[[Theme], Picture]:
    """Return a bar chart of the fastest peer's time divided by samplebatch's time."""

    def draw(theme: Theme) -> Picture:
        times = figures()
        # Narrow, with the words above the bars, so that a telephone shows them at a readable size.
        picture = Picture(520, 36 + 52 * len(rows), theme)
        picture.text(10, 18, "time of the fastest peer divided by the time of samplebatch", anchor="start", ink="faint")
        for number, (name, words) in enumerate(rows.items()):
            ours, peer, theirs = times[name]
            ratio, y = theirs / ours, 32 + 52 * number
            picture.text(10, y + 14, words, anchor="start")
            picture.box(10, y + 20, 360 * min(ratio, 20) / 20, 22, fill="a" if ratio >= 1 else "d")
            more = "→ " if ratio > 20 else ""
            picture.text(18 + 360 * min(ratio, 20) / 20, y + 36, f"{more}{ratio:.1f} ({peer})", anchor="start")
        return picture

    return draw


_QUARTERS = re.compile(
    r"^\| ([^|,]+), (CartPole|Pendulum), ([\d,]+) steps \| ([\w-]+) \| (-?\d+) \| (-?\d+) \| (-?\d+) \| (-?\d+) \|",
    re.MULTILINE,
)
PANELS = ("discrete SAC", "C51", "Rainbow", "DDPG")
LINES = {"ours": ("line", 3.0, ""), "Tianshou": ("faint", 2.0, "7 4"), "Stable-Baselines3": ("faint", 2.0, "2 3")}


def learning_curves(theme: Theme) -> Picture:
    """Returns after each quarter of the budget, from the table of the page of algorithms."""
    curves: dict[str, dict[str, list[float]]] = {}
    titles = {}
    for task, env, steps, who, *quarters in _QUARTERS.findall((DOCS / "algorithms.md").read_text()):
        curves.setdefault(task, {})[who] = [float(value) for value in quarters]
        titles[task] = f"{task}, {env}, {steps} steps"
    picture = Picture(760, 480, theme)
    for number, task in enumerate(PANELS):
        left, top = 60 + 375 * (number % 2), 50 + 215 * (number // 2)
        low, high = (-1500.0, 0.0) if min(curves[task]["ours"]) < 0 else (0.0, 500.0)
        picture.text(left, top - 14, titles[task], anchor="start")
        for value in (low, (low + high) / 2, high):
            y = top + 140 * (high - value) / (high - low)
            picture.line([(left, y), (left + 300, y)], "pad", width=1)
            picture.text(left - 6, y + 5, f"{value:g}", size=12, anchor="end", ink="faint")
        for quarter in range(4):
            picture.text(left + 100 * quarter, top + 158, f"{25 * (quarter + 1)} %", size=12, ink="faint")
        for who, values in curves[task].items():
            ink, width, dash = LINES[who]
            points = [(left + 100 * at, top + 140 * (high - value) / (high - low)) for at, value in enumerate(values)]
            picture.line(points, ink, width=width, dash=dash)
    for number, (who, (ink, width, dash)) in enumerate(LINES.items()):
        x = 60 + 190 * number
        picture.line([(x, 460), (x + 34, 460)], ink, width=width, dash=dash)
        picture.text(x + 42, 465, "samplebatch" if who == "ours" else who, anchor="start")
    return picture


PICTURES: dict[str, Callable[[Theme], Picture]] = {
    "columns": columns,
    "sequences": sequences,
    "ring": ring,
    "n-step": n_step,
    "fragments": fragments,
    "channel": channel,
    "service": service,
    "packing": packing,
    "learning-curves": learning_curves,
    **{f"benchmarks-{name}": chart(rows) for name, rows in CHARTS.items()},
}


def draw_all() -> dict[str, str]:
    """Return the text of every file by name."""
    return {
        f"{name}-{word}.svg": draw(theme).svg() for name, draw in PICTURES.items() for word, theme in THEMES.items()
    }


CARD_SIZE = (1200, 630)


def draw_card(path: Path) -> None:
    """Write the preview image that other sites show for a link to a page."""
    from PIL import Image, ImageDraw, ImageFont

    theme = THEMES["dark"]
    card = Image.new("RGB", CARD_SIZE, "#1a1d2b")
    draw = ImageDraw.Draw(card)

    def write(x: int, y: int, words: str, size: int, ink: str) -> None:
        draw.text((x, y), words, font=ImageFont.load_default(size), fill=ink)

    write(80, 70, "samplebatch", 92, theme["ink"])
    write(84, 190, "Reinforcement-learning experience", 44, theme["faint"])
    write(84, 248, "as columns in Arrow memory", 44, theme["faint"])
    rows = (("obs", "a"), ("actions", "b"), ("rewards", "c"), ("terminateds", "d"))
    for number, (name, fill) in enumerate(rows):
        y = 350 + 58 * number
        write(84, y + 6, name, 32, theme["ink"])
        for row in range(12):
            left = 300 + 68 * row
            draw.rounded_rectangle((left, y, left + 60, y + 46), radius=8, fill=theme[fill])
    card.save(path, optimize=True)


def main() -> int:
    """Write the files."""
    IMAGES.mkdir(exist_ok=True)
    draw_card(IMAGES / "social-card.png")
    for name, text in draw_all().items():
        (IMAGES / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
