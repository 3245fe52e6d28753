"""Parts of the samples of typed deployments, and the comparison of a type checker with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Output = Mapping[str, Mapping[int, str]]
"""The messages of a type checker for each line of each file."""

LOGGED = """
P = ParamSpec("P")
T = TypeVar("T")


def logged(func: Callable[P, T]) -> Callable[P, T]:
    return func
"""

METHODS = """
    def __init__(self, mark: str = "!") -> None:
        self.mark = mark

    def shout(self, text: str) -> str:
        return text + self.mark

    async def whisper(self, text: str, times: int = 1) -> bytes:
        return text.encode() * times

    async def __call__(self, number: int) -> float:
        return number / 2

    def letters(self, text: str) -> Iterator[str]:
        yield from text

    async def codes(self, text: str) -> AsyncIterator[int]:
        for each in text:
            yield ord(each)

    @logged
    def checked(self, text: str, /, *more: int) -> bool:
        return bool(text)

    @staticmethod
    def version() -> str:
        return "1"
"""


def check(found: Mapping[int, str], source: str, is_meant: Callable[[str, str], bool]) -> None:
    """Compare messages with the comments of a sample: `is_meant(message, comment)`."""
    lines = enumerate(source.splitlines(), start=1)
    expected = {number: line.split("  # ", 1)[1] for number, line in lines if "  # " in line}
    shown = {
        number: expected[number] if is_meant(text, expected.get(number, "")) else text
        for number, text in found.items()
    }
    assert shown == expected
