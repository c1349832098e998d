#!/usr/bin/env python3
"""Draws the layers of csrc and what includes what, from the sources, into docs/images/layers.svg.

    python scripts/draw_layers.py            writes the picture
    python scripts/draw_layers.py --check    fails if the picture is not what the sources say

An arrow from one layer to another means that files of the first include files of the second; one
that follows from two others is left out. What a layer is for is the first sentence of its README.
"""

from __future__ import annotations

import sys
import textwrap
from html import escape
from pathlib import Path

from check_includes import INCLUDE, LEVEL, WITH_TORCH, layer_of

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "layers.svg"

# Where a layer stands from left to right; its row is its level. Arrows need a free way down.
SPANS = {
    "python": (20, 320),
    "libtorch": (340, 640),
    "c10d": (20, 640),
    "device_child": (680, 980),
    "engines": (220, 480),
    "child": (600, 780),
    "embed": (800, 980),
    "nccl": (220, 345),
    "staged": (355, 480),
    "host": (520, 800),
    "device": (220, 480),
    "elastic": (20, 200),
    "comm": (220, 700),
    "membership": (20, 700),
    "liveness": (740, 980),
    "net": (20, 980),
    "base": (20, 980),
}
WIDTH, TOP, HEIGHT, GAP = 1000, 20, 78, 30
LETTER = 6.1  # of the text in a box, in width
STYLE = """  <style>
    text { font-family: Helvetica, Arial, sans-serif; fill: #222222; }
    .name { font-size: 14px; font-weight: bold; }
    .use { font-size: 11px; fill: #555555; }
    rect { stroke: #555555; rx: 4; }
    .torch { fill: #fdebd8; }
    .plain { fill: #e3eef8; }
    line { stroke: #555555; stroke-width: 1.4; marker-end: url(#head); }
  </style>
  <defs>
    <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" orient="auto"
            markerWidth="7" markerHeight="7">
      <path d="M0,0 L8,4 L0,8 z" fill="#555555"/>
    </marker>
  </defs>
"""

Includes = dict[str, set[str]]


def includes(root: Path) -> Includes:
    """Which layers each layer includes files of."""
    found: Includes = {layer: set() for layer in LEVEL}
    for path in (each for each in root.rglob("*") if each.suffix in {".h", ".cpp"}):
        layer = layer_of(path.relative_to(root).as_posix())
        if layer not in LEVEL:
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            match = INCLUDE.match(line)
            target = layer_of(match[2]) if match and match[1] == '"' else None
            if target in LEVEL and target != layer:
                found[layer].add(target)
    return found


def needed(graph: Includes) -> list[tuple[str, str]]:
    """The includes that do not follow from others."""

    def reached(start: str) -> set[str]:
        below = set(graph[start])
        for layer in graph[start]:
            below |= reached(layer)
        return below

    return [
        (layer, target)
        for layer in LEVEL
        for target in sorted(graph[layer])
        if not any(target in reached(other) for other in graph[layer])
    ]


def top_of(layer: str) -> int:
    return TOP + (max(LEVEL.values()) - LEVEL[layer]) * (HEIGHT + GAP)


def ends(layer: str, target: str) -> tuple[int, int]:
    """Where an arrow leaves a layer, and where it arrives at the other one, from the left."""
    (left, right), (other_left, other_right) = SPANS[layer], SPANS[target]
    low, high = max(left, other_left), min(right, other_right)
    if low <= high:
        return (low + high) // 2, (low + high) // 2
    return (left + 10, other_right - 10) if left > other_right else (right - 10, other_left + 10)


def in_the_way(layer: str, target: str) -> str | None:
    """A layer that an arrow would cross."""
    start, end = ends(layer, target)
    for other, (left, right) in SPANS.items():
        between = LEVEL[target] < LEVEL[other] < LEVEL[layer]
        if between and left <= max(start, end) and min(start, end) <= right:
            return other
    return None


def purpose(layer: str) -> str:
    text = (ROOT / "csrc" / layer / "README.md").read_text(encoding="utf-8")
    paragraph = " ".join(text.split("\n\n")[1].splitlines())
    return paragraph.split(". ")[0].rstrip(".").replace("`", "")


def box(layer: str) -> str:
    left, right = SPANS[layer]
    top = top_of(layer)
    lines = textwrap.wrap(purpose(layer), int((right - left - 16) / LETTER), max_lines=4)
    kind = "torch" if layer in WITH_TORCH else "plain"
    parts = [
        f'  <rect class="{kind}" x="{left}" y="{top}" width="{right - left}" height="{HEIGHT}"/>',
        f'  <text class="name" x="{left + 8}" y="{top + 18}">{layer}</text>',
    ]
    for number, line in enumerate(lines):
        y = top + 32 + 13 * number
        parts.append(
            f'  <text class="use" x="{left + 8}" y="{y}">{escape(line, quote=False)}</text>'
        )
    return "\n".join(parts)


def arrow(layer: str, target: str) -> str:
    other = in_the_way(layer, target)
    if other is not None:
        raise SystemExit(f"draw_layers: {layer} -> {target} would cross {other}: move one (SPANS)")
    start, end = ends(layer, target)
    return (
        f'  <line x1="{start}" y1="{top_of(layer) + HEIGHT}" x2="{end}" y2="{top_of(target)}">'
        f"<title>{layer} includes {target}</title></line>"
    )


def picture(graph: Includes) -> str:
    below = top_of("base") + HEIGHT + 24
    label = "The layers of csrc: each includes files of those that its arrows lead to"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {below + 10}" '
            f'role="img" aria-label="{label}">',
            STYLE.rstrip(),
            *(box(layer) for layer in LEVEL),
            *(arrow(layer, target) for layer, target in needed(graph)),
            f'  <text class="use" x="20" y="{below}">An arrow: includes files of. '
            "Orange: uses torch's headers. Blue: compiles without torch.</text>",
            "</svg>\n",
        ]
    )


def main() -> int:
    drawn = picture(includes(ROOT / "csrc"))
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(drawn, encoding="utf-8")
    elif not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != drawn:
        print(f"{PICTURE}: run scripts/draw_layers.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
