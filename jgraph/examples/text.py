"""Text as word numbers, and how well word frequencies alone predict it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from jgraph.errors import DataError
from jgraph.runtime.data.batches import Array

UNKNOWN = "<unk>"
_WORD = re.compile(r"[a-z']+|\d+|\n|[^\sa-z\d']")
_TEST_PART = 0.1


@final
@dataclass(frozen=True, slots=True)
class Corpus:
    """A text cut into training data and test data.

    Attributes:
      words: the vocabulary, most frequent first; the number of a word is its place.
      train: int32[n], words of the first nine tenths.
      test: int32[m], words of the rest.
    """

    words: tuple[str, ...]
    train: Array
    test: Array

    def unigram_perplexity(self, targets: Array) -> float:
        """Returns the perplexity of targets int32[…], from frequencies alone.

        Frequencies are those of the training data, with one added to each count.
        """
        counts = np.bincount(self.train, minlength=len(self.words)) + 1.0
        log_p = np.log(counts / counts.sum())
        return float(np.exp(-log_p[targets].mean()))


def split_words(text: str) -> list[str]:
    """Returns the words, in lower case; punctuation and ends of lines are words too.

    Example:
      >>> split_words("Speak, speak.")
      ['speak', ',', 'speak', '.']
    """
    return _WORD.findall(text.lower())


def read_corpus(path: Path, vocabulary: int) -> Corpus:
    """Reads a text file.

    Args:
      path: of the file, UTF-8.
      vocabulary: how many words are known; others, and those that the training data
        has once, are one unknown word.

    Raises:
      DataError: no such file, or one without words.
    """
    try:
        found = split_words(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        raise DataError(
            f"{path} is not there; give --data the directory with {path.name}; a text "
            "is in data/tinyshakespeare of https://github.com/karpathy/char-rnn"
        ) from None
    cut = int(len(found) * (1 - _TEST_PART))
    if not cut:
        raise DataError(f"{path} has no words")
    counts = Counter(found[:cut]).most_common(vocabulary - 1)
    words = (UNKNOWN, *(word for word, count in counts if count > 1))
    numbers = {word: number for number, word in enumerate(words)}
    every = np.array([numbers.get(word, 0) for word in found], np.int32)
    return Corpus(words, every[:cut], every[cut:])


def sequences(words: Array, length: int, stride: int | None = None) -> dict[str, Array]:
    """Cuts a text into sequences; a rest that is too short is left out.

    Args:
      words: int32[n].
      length: words of a sequence.
      stride: from the beginning of one to that of the next; the length if unset.

    Returns:
      ``words`` int32[k, length], and ``next``: the word that follows each.

    Raises:
      DataError: there are not enough words for one sequence.

    Example:
      >>> cut = sequences(np.arange(8), 3)
      >>> cut["words"].tolist(), cut["next"].tolist()
      ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    starts = range(0, len(words) - length, stride or length)
    if not starts:
        raise DataError(
            f"the text has {len(words)} words for a part of the data; a sequence of "
            f"{length} needs one more than its length"
        )
    return {
        "words": _stack(words, starts, length),
        "next": _stack(words[1:], starts, length),
    }


def _stack(words: Array, starts: Sequence[int], length: int) -> Array:
    return np.stack([words[start : start + length] for start in starts])
