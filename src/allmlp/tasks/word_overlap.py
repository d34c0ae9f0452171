"""Question answering by word overlap: a baseline without training.

1. Find the sentence of the context that has the most words of the question, ignoring function words.
2. Find the runs of words in it that are not in the question. Prefer those with a digit if the question asks for a
   number or a date, with capital letters if it asks for a person, place or name; among these, the nearest to a word of
   the question, then the longest.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the of in on at to for from by with and or as is was were are be been did do does that which what who "
        "whom whose when where why how many much it its this these those had has have not his her their than into",
    )
)
WORD = re.compile(r"\w[\w.,'\u2019-]*\w|\w")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"\u201c])")
ASKS_FOR_NUMBER = re.compile(
    r"\b(when|year|date|century|decade|percent\w*|how (many|much|long|old|far|large|big|tall))\b", re.IGNORECASE
)
ASKS_FOR_NAME = re.compile(r"\b(who|whom|whose|where|which|country|city|name)\b", re.IGNORECASE)


def best_sentence(question: str, context: str) -> str:
    keywords = words(question) - FUNCTION_WORDS
    return max(SENTENCE_END.split(context), key=lambda sentence: len(keywords & words(sentence)))


def best_answer(question: str, context: str) -> str:
    sentence, asked = best_sentence(question, context), words(question)
    matches = list(WORD.finditer(sentence))
    lowered = [match.group().lower() for match in matches]
    anchors = [place for place, word in enumerate(lowered) if word in asked - FUNCTION_WORDS]

    def text(run: range) -> str:
        return sentence[matches[run.start].start() : matches[run.stop - 1].end()]

    def rank(run: range) -> tuple[bool, int, int]:
        number = any(letter.isdigit() for letter in text(run))
        names = 2 * sum(matches[place].group()[0].isupper() for place in run) >= len(run) and not number
        fits = number if ASKS_FOR_NUMBER.search(question) else names or not ASKS_FOR_NAME.search(question)
        distance = min((min(abs(run.start - place), abs(run.stop - 1 - place)) for place in anchors), default=0)
        return fits, -distance, len(run)

    starts = [
        place
        for place in range(len(matches) + 1)
        if place in (0, len(matches))
        or lowered[place - 1] in asked | FUNCTION_WORDS
        or lowered[place] in asked | FUNCTION_WORDS
        or sentence[matches[place - 1].end() : matches[place].start()].strip()
    ]
    runs = [range(a, b) for a, b in pairwise(starts) if lowered[a] not in asked | FUNCTION_WORDS]
    return text(max(runs, key=rank)) if runs else sentence


@lru_cache(10_000)
def words(text: str) -> frozenset[str]:
    return frozenset(match.group().lower() for match in WORD.finditer(text))
