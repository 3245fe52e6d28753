"""Every command of the tutorial prints what its page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import blocks, is_shown
from tests.tutorial import LEARN, PAGES, Tutorial, commands

pytestmark = pytest.mark.timeout(120)


# All of them take a minute; these three are of each kind: a server, its limits, pytest.
OFTEN = "04", "06", "09"
STEPS = [
    pytest.param(
        page,
        id=page.stem,
        marks=[] if page.stem.startswith(OFTEN) else pytest.mark.thorough,
    )
    for page in PAGES
]


@pytest.mark.parametrize("page", STEPS)
def test_a_step_does_what_its_page_shows(page: Path, tmp_path: Path) -> None:
    tutorial = Tutorial(tmp_path)
    for before in PAGES[: PAGES.index(page)]:
        tutorial.prepare(before)

    printed = tutorial.follow(page)

    consoles = [text for language, text in blocks(page) if language == "console"]
    shown = [each for text in consoles for each in commands(text)]
    assert [command for command, _ in printed] == [command for command, _ in shown]
    for (command, output), (_, expected) in zip(printed, shown, strict=True):
        assert is_shown(output, expected), f"$ {command}\n{output}"


def test_each_step_is_in_the_index_and_has_its_picture() -> None:
    index = (LEARN / "index.md").read_text()
    assert len(PAGES) == 11
    for page in PAGES:
        text = page.read_text()
        assert f"({page.name})" in index
        # Step 9 tests what step 6 serves; step 10 shows the page of its server, the last one none.
        number = page.stem[:2]
        if number == "11":
            continue
        picture = {"09": "06.svg", "10": "../observing/page-light.png"}.get(number, f"{number}.svg")
        assert f"]({picture})" in text
        assert (LEARN / picture).exists()
