"""The language model: words, sequences, and training with both kinds of output."""

import json
from pathlib import Path

import numpy as np
import pytest

from jgraph import cli
from jgraph.client.cluster import Cluster
from jgraph.errors import DataError
from jgraph.examples import lm
from jgraph.examples.options import Options
from jgraph.examples.text import UNKNOWN, read_corpus, sequences, split_words
from tests.support.example_data import real, write_text


def corpus_of(tmp_path: Path, text: str, vocabulary: int = 100) -> list[str]:
    (tmp_path / "input.txt").write_text(text)
    corpus = read_corpus(tmp_path / "input.txt", vocabulary)
    every = [*corpus.train.tolist(), *corpus.test.tolist()]
    return [corpus.words[number] for number in every]


def test_punctuation_and_line_ends_are_words() -> None:
    found = split_words("O, what's 12?\nAll:")
    assert found == ["o", ",", "what's", "12", "?", "\n", "all", ":"]


def test_what_the_training_data_has_once_is_unknown(tmp_path: Path) -> None:
    words = corpus_of(tmp_path, "a b a b a b c a b d")
    assert words == [*("a", "b") * 3, UNKNOWN, "a", "b", UNKNOWN]


def test_only_the_most_frequent_words_are_known(tmp_path: Path) -> None:
    words = corpus_of(tmp_path, "a a a b b a a a b a", vocabulary=2)
    assert set(words) == {"a", UNKNOWN}


def test_the_unigram_perplexity_of_equally_frequent_words_is_their_number(
    tmp_path: Path,
) -> None:
    (tmp_path / "input.txt").write_text("a b c d " * 1000)
    corpus = read_corpus(tmp_path / "input.txt", 100)
    assert corpus.unigram_perplexity(corpus.test) == pytest.approx(4, rel=2e-3)


def test_sequences_may_overlap_and_lose_only_a_rest() -> None:
    cut = sequences(np.arange(10), 4, 2)
    assert cut["words"][:, 0].tolist() == [0, 2, 4]
    assert np.array_equal(cut["next"], cut["words"] + 1)


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("to be or not")
    with pytest.raises(DataError, match="the text has 3 words for a part"):
        lm.run(tmp_path, None, Options(steps=1))
    (tmp_path / "input.txt").write_text("")
    with pytest.raises(DataError, match="has no words"):
        lm.run(tmp_path, None, Options(steps=1))


def test_a_directory_without_the_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"give --data the directory with input.txt"):
        lm.run(tmp_path, None, Options(steps=1))


@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns_which_word_follows_and_moves_only_rows(
    tmp_path: Path, cluster: Cluster
) -> None:
    said: list[str] = []
    options = Options(steps=80, say=said.append)
    figures = lm.run(write_text(tmp_path), cluster, options)
    assert figures["perplexity"] < 0.8 * figures["unigram_perplexity"]
    assert figures["unigram_perplexity"] == pytest.approx(600, rel=0.02)
    assert "params/embed/embedding travels by rows" in "\n".join(said)


@pytest.mark.slow
def test_a_tied_embedding_travels_whole_and_the_plan_says_why(
    tmp_path: Path, cluster: Cluster
) -> None:
    said: list[str] = []
    options = Options(steps=2, say=said.append)
    assert lm.run(write_text(tmp_path), cluster, options, tied=True)["tied"]
    reason = "params/embed/embedding travels whole: it is also used as a whole"
    assert reason in "\n".join(said)


@pytest.mark.nightly
@pytest.mark.slow
def test_shakespeare_is_told_better_than_by_word_frequencies() -> None:
    figures = lm.run(real("tinyshakespeare"), None, Options(steps=100))
    assert figures["perplexity"] < 0.95 * figures["unigram_perplexity"]
    assert figures["unigram_perplexity"] == pytest.approx(174.5)


@pytest.mark.nightly
@pytest.mark.procs
def test_the_command_prints_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--ps", "1", "--workers", "1", "--steps", "2", "--tied"]
    data = ["--data", str(write_text(tmp_path))]
    with pytest.raises(SystemExit) as stop:
        cli.main(["examples", "lm", *data, *size, "--json"])
    assert not stop.value.code
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert {"perplexity", "unigram_perplexity", "seconds"} <= set(figures)
    assert (figures["example"], figures["tied"]) == ("lm", True)
