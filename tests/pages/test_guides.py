"""Every block of the guides is executed: files written, commands run, output compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents import ROOT, Reader, blocks, links

GUIDES = [ROOT / "docs" / name for name in ("migrating.md", "testing.md")]


@pytest.mark.thorough
@pytest.mark.timeout(180)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_a_guide_does_what_it_shows(
    guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    reader = Reader(tmp_path)

    for language, text in blocks(guide):
        {"python": reader.write, "console": reader.run}[language](text)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(guide: Path) -> None:
    found = links(guide)

    assert found
    assert [link for link in found if not (guide.parent / link).exists()] == []
