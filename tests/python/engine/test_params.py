"""Sampling parameters: each rule refuses by naming the field, the value and what is allowed."""

import dataclasses
import math

import pytest

from tandem.engine.errors import InvalidParameterError, InvalidTokenIdError
from tandem.engine.params import SamplingParams

REFUSED = [
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e39),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.inf),
    ("repetition_penalty", 1e39),
    ("repetition_penalty", 1e-46),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1.0]),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("ignore_eos", 1),
    ("detokenize", "no"),
    ("skip_special_tokens", None),
    ("include_stop_str_in_output", 0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("max_tokens", 0),
    ("max_tokens", 2.0),
    ("priority", 2**31),
    ("cache_salt", ""),
    ("cache_salt", 5),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)
    assert caught.value.allowed in str(caught.value)


def test_values_at_the_edges_are_accepted() -> None:
    params = SamplingParams(
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=1.0,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -math.inf, 5: 100},
        seed=2**64 - 1,
        logprobs=0,
        stop="end",
        min_tokens=4,
        max_tokens=4,
    )
    assert params.greedy
    assert params.stop_strings == ("end",)
    assert params.logit_bias == {0: -math.inf, 5: 100.0}


def test_parameters_cannot_change_after_they_were_checked() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    with pytest.raises(TypeError):
        params.logit_bias[1] = 0.0


def test_stop_strings_need_text() -> None:
    with pytest.raises(InvalidParameterError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=2)


@pytest.mark.parametrize("token_id", [-1, 257, 2**31])
def test_ids_outside_the_vocabulary_are_refused_where_they_stand(token_id: int) -> None:
    with pytest.raises(InvalidTokenIdError) as caught:
        SamplingParams(logit_bias={token_id: 1.0}).check_vocabulary(257)
    assert (caught.value.field, caught.value.token_id) == ("logit_bias", token_id)
    with pytest.raises(InvalidTokenIdError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[5, token_id]).check_vocabulary(257)
    SamplingParams(logit_bias={256: 1.0}, stop_token_ids=[0]).check_vocabulary(257)
