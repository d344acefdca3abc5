"""Generated documents: what may be asked of them, and that they depend on nothing but their number."""

import random

import pytest

from tandem.eval.retrieval_data import (
    CATEGORY_OF_NOUN,
    NOUNS,
    NUM_CATEGORIES,
    WordCounter,
    held_out_documents,
    home_of_category,
    make_document,
)


def words() -> WordCounter:
    return WordCounter(lambda text: 1)


def test_the_same_number_gives_the_same_document_and_another_gives_another() -> None:
    first, second = held_out_documents(1024, 2, words())
    again, _ = held_out_documents(1024, 2, words())
    assert first == again
    assert first != second


def test_asked_notes_stand_in_the_document_once_and_far_enough_from_its_end() -> None:
    for document in held_out_documents(1024, 20, words(), num_questions=4):
        assert len(document.asked) == 4
        for note in document.asked:
            name = note.sentence.removesuffix(f"{note.digits}.")
            assert document.text.count(name) == 1
            after = document.text.split(note.sentence, 1)[1]
            assert len(after.split()) >= 256


def test_a_document_keeps_within_its_tokens() -> None:
    rng = random.Random(5)
    for num_tokens in (50, 333, 1000):
        document = make_document(rng, num_tokens=num_tokens, num_questions=1, count_tokens=words())
        assert num_tokens - 12 <= len(document.text.split()) <= num_tokens


def test_even_a_document_of_few_notes_has_one_to_ask_for() -> None:
    for seed in range(50):
        document = make_document(
            random.Random(seed), num_tokens=100, num_questions=3, count_tokens=words(), density=0.0
        )
        assert len(document.asked) == 1


def test_a_document_too_short_for_a_far_note_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 256 tokens before its end"):
        make_document(random.Random(1), num_tokens=200, num_questions=1, count_tokens=words(), min_distance=256)


def test_every_category_has_five_nouns_and_a_home_of_its_own() -> None:
    assert sorted(CATEGORY_OF_NOUN[noun] for noun in NOUNS) == sorted(5 * list(range(NUM_CATEGORIES)))
    assert len({home_of_category(category) for category in range(NUM_CATEGORIES)}) == NUM_CATEGORIES
