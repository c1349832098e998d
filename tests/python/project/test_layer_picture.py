"""The picture of the layers and the walks in CONTRIBUTING.md are what the sources say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "scripts"))

import draw_layers  # noqa: E402

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEP = re.compile(r"`([\w:]+)\(\)`\s+\(`([\w./]+)`\)")


def walk(heading: str) -> list[tuple[str, str]]:
    """The functions of a walk, with the file of each."""
    section = TEXT.split(f"### {heading}\n")[1].split("\n#")[0]
    return STEP.findall(section)


def test_picture_is_what_the_sources_say() -> None:
    drawn = draw_layers.picture(draw_layers.includes(ROOT / "csrc"))
    assert draw_layers.PICTURE.read_text(encoding="utf-8") == drawn, "run scripts/draw_layers.py"
    assert "[...]" not in drawn, "a box is too small for what its layer is for"


def test_arrow_that_follows_from_two_others_is_left_out() -> None:
    graph = {layer: set[str]() for layer in draw_layers.LEVEL}
    graph |= {"comm": {"net", "base"}, "net": {"base"}}
    assert draw_layers.needed(graph) == [("net", "base"), ("comm", "net")]


def test_arrow_through_a_box_is_refused() -> None:
    with pytest.raises(SystemExit, match="python -> net would cross"):
        draw_layers.arrow("python", "net")


@pytest.mark.parametrize(
    "heading", ["An allreduce, down to the socket", "A death, up to the exception"]
)
def test_functions_on_a_walk_are_in_the_files_that_it_names(heading: str) -> None:
    steps = walk(heading)
    assert len(steps) > 5
    for function, name in steps:
        path = ROOT / name if name.startswith("torchft_ext") else ROOT / "csrc" / name
        *classes, last = function.split("::")
        text = path.read_text(encoding="utf-8")
        assert re.search(rf"\b{last}\(", text), f"{name} has no {last}()"
        assert all(each in text for each in classes), f"{name}: {function}"
