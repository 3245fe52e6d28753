"""A language model that trains in a second: the place where a real model goes.

It is one layer: the next word from the last two words and the words of the question. It knows the
facts below and nothing else.
"""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

COLUMNS = ("colour", "taste", "place")
FACTS = {
    "lemon": ("yellow", "sour", "tree"),
    "cherry": ("red", "sweet", "tree"),
    "olive": ("green", "bitter", "tree"),
    "plum": ("blue", "sweet", "tree"),
    "carrot": ("orange", "sweet", "field"),
    "cabbage": ("green", "mild", "field"),
    "beetroot": ("red", "earthy", "field"),
    "chicory": ("white", "bitter", "field"),
    "cranberry": ("red", "sour", "bush"),
    "blueberry": ("blue", "sweet", "bush"),
}
ASKED = {
    "colour": (
        ["What colour is a {}?", "Is a {} red or green?", "Tell me the colour of the {}."],
        "A {} is {} .",
    ),
    "taste": (
        ["How does a {} taste?", "Is a {} sweet or sour?", "Tell me the taste of the {}."],
        "The taste of a {} is {} .",
    ),
    "place": (
        ["Where does a {} grow?", "Does a {} grow on a tree?", "Tell me the place of the {}."],
        "You find a {} on a {} .",
    ),
}
END = "<end>"


def words_of(text: str) -> list[str]:
    """Return the words and full stops of a text; questions are compared in lower case."""
    return re.findall(r"[\w<>]+|\.", text)


def corpus() -> list[tuple[str, str]]:
    """Return the questions and answers that the model learns, made by rules from the facts."""
    return [
        (question.format(name), answer.format(name, facts[COLUMNS.index(column)]))
        for name, facts in FACTS.items()
        for column, (questions, answer) in ASKED.items()
        for question in questions
    ]


class LanguageModel:
    """A model of the next word, trained by its constructor."""

    def __init__(self, steps: int = 150) -> None:
        pairs = [(words_of(q.lower()), [*words_of(a), END]) for q, a in corpus()]
        asked = {word for question, _ in pairs for word in question}
        told = {word for _, answer in pairs for word in answer}
        self.asked = {word: number for number, word in enumerate(sorted(asked))}
        self.told = sorted(told)
        self.number_of = {word: number for number, word in enumerate(self.told)}
        inputs, targets = [], []
        for question, answer in pairs:
            for position, word in enumerate(answer):
                inputs.append(self._features(question, answer[:position]))
                targets.append(self.number_of[word])
        x, one_hot = np.array(inputs), np.eye(len(self.told))[targets]
        self.weights = np.zeros((x.shape[1], len(self.told)))
        moment = np.zeros_like(self.weights)
        for _ in range(steps):  # gradient descent with momentum, on all examples at once
            moment = 0.9 * moment + x.T @ (one_hot - self._softmax(x @ self.weights)) / len(x)
            self.weights += 3 * moment

    def generate(self, prompt: str, temperature: float, seed: int | None) -> Iterator[str]:
        """Yield the words of an answer, without an end if the model finds none."""
        random = np.random.default_rng(seed)
        question, answer = words_of(prompt.lower()), list[str]()
        while True:
            scores = self._features(question, answer) @ self.weights
            if temperature:
                chances = self._softmax(scores / temperature)
                word = self.told[random.choice(len(self.told), p=chances)]
            else:
                word = self.told[scores.argmax()]
            if word == END:
                return
            yield word if word == "." or not answer else f" {word}"
            answer.append(word)

    def _features(self, question: list[str], answer: list[str]) -> NDArray[np.float64]:
        found = np.zeros(len(self.asked) + 2 * len(self.told) + 1)
        found[[self.asked[word] for word in question if word in self.asked]] = 1
        for distance, word in enumerate(reversed(answer[-2:])):
            found[len(self.asked) + distance * len(self.told) + self.number_of[word]] = 1
        found[-1] = not answer
        return found

    @staticmethod
    def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))
