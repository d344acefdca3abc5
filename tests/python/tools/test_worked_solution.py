"""Word problems' solutions, rewritten so that each step is small."""

import pytest

from tools.demo_model.word_problems import plain_number, worked_solution


@pytest.mark.parametrize(
    ("given", "rewritten"),
    [
        ("It costs 53 x 25 = 1325 in all.\n#### 1325", "It costs 53 x 25 = 1250+75=1325 in all."),
        ("It costs 16 x £9.75 = £156 now.\n#### 156", "It costs 16 x £9.75 = 97.5+58.5=£156 now."),
        ("She has 30 * 7 = 210.", "She has 30 * 7 = 210."),
        ("They paid £54 + £154 + £144 = £352 to us.", "They paid £54 + £154 + £144 = 208+144=£352 to us."),
        ("There are 20-5-10 = 5 left.", "There are 20-5-10 = 15-10=5 left."),
        ("He had 6 because 2 * 3 = 6", "2 * 3 = 6. He had 6."),
        ("George spent £7.5 because 10 x 0.75 = 7.5", "10 x 0.75 = 7.5. George spent £7.5."),
        ("So it is 24.0 and 0.33333333 more.", "So it is 24 and 0.333 more."),
    ],
)
def test_a_solution_is_worked_out_where_a_step_is_long(given: str, rewritten: str) -> None:
    assert worked_solution(given) == rewritten


@pytest.mark.parametrize(
    "text", ["It is 27 x 0.667 = 18 litres.", "Then 10 + 20 + 30 = 61 in all.", "They paid 53 x 25 = 1325."]
)
def test_a_calculation_that_does_not_add_up_or_ends_its_sentence_is_left_alone(text: str) -> None:
    assert worked_solution(text) == text


@pytest.mark.parametrize(
    ("given", "plain"), [("28.0", "28"), ("0.12345", "0.123"), ("35000", "35000"), ("1/2", "1/2"), ("100", "100")]
)
def test_numbers_are_short(given: str, plain: str) -> None:
    assert plain_number(given) == plain
