"""Requests with a grammar: their text follows it and is the same however the engine runs; neighbours are free."""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from tandem import LLM
from tandem.engine.errors import InvalidParameterError
from tandem.engine.grammar import Grammar, GrammarCompiler
from tandem.engine.outputs import RequestOutput
from tandem.engine.params import SamplingParams
from tandem.engine.request import Request
from tandem.engine.tokenizer import Tokenizer
from tandem.msa import AttentionBackend
from tandem.spec import Drafter, DraftWorker
from tests.python.engine.byte_tokenizer import SPECIALS, byte_tokenizer_json
from tests.python.engine.checkpoint import make_checkpoint
from tests.python.engine.test_speculation import OTHERS, PROMPT, VOCAB_SIZE, ScriptedWorker, pair
from tests.python.engine.tiny_m3 import Speculation, TinyRig, Variation, make_rig

CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789-;:,.{}[]"+*/=!?()_<'
REGEX = Grammar("regex", r"([a-f]{3}-[0-9]{2};){3}\[[xyz]+\]")
SCHEMA = Grammar.json_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["yes", "no"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
)
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SEEDED = SamplingParams(temperature=1.2, top_p=0.9, seed=7, repetition_penalty=1.1, max_tokens=40)
MODES = {"greedy": GREEDY, "seeded": SEEDED}
GRAMMARS = {"regex": REGEX, "schema": SCHEMA}


@lru_cache
def tokenizer() -> Tokenizer:
    """One token per character; 64 ids in all."""
    description = json.loads(byte_tokenizer_json())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
    description["model"]["vocab"] = vocab
    assert len(vocab) <= VOCAB_SIZE
    return Tokenizer(json.dumps(description))


def params_of(mode: str, grammar: str) -> SamplingParams:
    return replace(MODES[mode], grammar=GRAMMARS[grammar])


def plain_rig(variation: Variation) -> TinyRig:
    return make_rig(pair().target, variation, tokenizer=tokenizer())


@lru_cache
def alone(mode: str, grammar: str) -> RequestOutput:
    output = plain_rig(Variation(enable_prefix_cache=False)).generate(PROMPT, params_of(mode, grammar))
    assert output.error is None
    return output


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("mode", MODES)
def test_the_text_follows_the_grammar_and_ends_with_it(mode: str, grammar: str) -> None:
    output = alone(mode, grammar)
    assert output.finish_reason == "stop"
    if grammar == "regex":
        assert re.fullmatch(REGEX.source, output.text)
    else:
        value = json.loads(output.text)
        assert isinstance(value["a"], int)
        assert value["b"] in ("yes", "no")


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft_len", [0, 1, 3, 7])
def test_speculation_overlap_and_chunks_change_nothing(mode: str, grammar: str, overlap: bool, draft_len: int) -> None:
    variation = Variation(chunk=9, overlap=overlap)
    rig = make_rig(pair().target, variation, speculation=Speculation(pair().drafter, draft_len), tokenizer=tokenizer())
    for _ in range(2):  # cold, then after a prefix hit
        output = rig.generate(PROMPT, params_of(mode, grammar))
        assert output.error is None
        assert (output.token_ids, output.finish_reason) == (alone(mode, grammar).token_ids, "stop")


def scripted_rig(variation: Variation, text: Sequence[int], draft_len: int, script: Sequence[int]) -> TinyRig:
    """Each round's first drafts are right, as many as the script says; the next one is wrong."""

    def make_worker(drafter: Drafter, attention: AttentionBackend, most: int) -> DraftWorker:
        return ScriptedWorker(drafter, attention, most, [*PROMPT, *text], script)

    speculation = Speculation(pair().drafter, draft_len, make_worker)
    return make_rig(pair().target, variation, speculation=speculation, tokenizer=tokenizer())


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_pattern_of_two_rounds_of_accepted_drafts_gives_the_same_text(grammar: str, overlap: bool) -> None:
    expected = alone("seeded", grammar)
    for script in itertools.product(range(4), repeat=2):
        rig = scripted_rig(Variation(overlap=overlap), expected.token_ids, 3, script)
        output = rig.generate(PROMPT, params_of("seeded", grammar))
        assert (output.token_ids, output.finish_reason) == (expected.token_ids, "stop")
        assert (output.rounds.num_accepted > 0) == any(script)


@pytest.mark.parametrize("overlap", [False, True])
def test_neighbours_are_free_and_preemption_changes_nothing(overlap: bool) -> None:
    free = [plain_rig(Variation()).generate(prompt, SEEDED).token_ids for prompt in OTHERS]
    rig = make_rig(
        pair().target,
        Variation(num_slots=9, chunk=24, overlap=overlap),
        speculation=Speculation(pair().drafter, 3),
        tokenizer=tokenizer(),
    )
    others = [rig.submit(prompt, SEEDED) for prompt in OTHERS]
    bound = [
        rig.submit(PROMPT, replace(params_of(mode, grammar), priority=1)) for mode in MODES for grammar in GRAMMARS
    ]
    rig.run()
    assert [other.output.token_ids for other in others] == free
    expected = [alone(mode, grammar).token_ids for mode in MODES for grammar in GRAMMARS]
    assert [each.output.token_ids for each in bound] == expected
    assert sum(each.output.num_preemptions for each in [*others, *bound]) > 0


def test_text_before_the_start_token_is_free() -> None:
    close = tokenizer().token_id("</mm:think>")
    assert close is not None
    bound = replace(SEEDED, skip_special_tokens=False, logit_bias={close: 2.0}, max_tokens=50)
    bound = replace(bound, grammar=replace(REGEX, starts_after="</mm:think>"))
    rig, num_closed = plain_rig(Variation()), 0
    for seed in range(8):
        free = rig.generate(PROMPT, replace(bound, seed=seed, grammar=None))
        output = rig.generate(PROMPT, replace(bound, seed=seed))
        thought, closer, answer = output.text.partition("</mm:think>")
        assert free.text.startswith(thought + closer)
        if closer and output.finish_reason == "stop":
            num_closed += bool(thought)
            assert re.fullmatch(REGEX.source, answer)
    assert num_closed >= 2


def test_stop_strings_and_the_length_limit_still_end_a_request() -> None:
    params = params_of("greedy", "regex")
    stopped = plain_rig(Variation()).generate(PROMPT, replace(params, stop="-"))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "-")
    assert re.fullmatch("[a-f]{3}", stopped.text)
    cut = plain_rig(Variation()).generate(PROMPT, replace(params, max_tokens=5))
    assert cut.finish_reason == "length"
    assert alone("greedy", "regex").text.startswith(cut.text)


def test_the_end_of_the_grammar_is_an_end_where_the_models_own_is_ignored() -> None:
    open_ended = Grammar("regex", "[a-f]+")
    (end,) = tokenizer().end_ids
    for ignore_eos in (False, True):
        params = replace(SEEDED, grammar=open_ended, logit_bias={end: 3.0}, ignore_eos=ignore_eos)
        output = plain_rig(Variation()).generate(PROMPT, params)
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == end
        assert re.fullmatch("[a-f]+", output.text)


def test_a_round_that_is_not_kept_leaves_the_grammar_where_it_was() -> None:
    """As for a row whose sequence lost its seat while its step was in flight."""
    tokens = alone("greedy", "regex").token_ids
    compiler = GrammarCompiler(tokenizer(), VOCAB_SIZE, tokenizer().end_ids)
    request = Request(
        0,
        None,
        PROMPT,
        GREEDY,
        seed=0,
        max_tokens=40,
        end_ids=tokenizer().end_ids,
        tokenizer=tokenizer(),
        sink=lambda delta: None,
        stream=False,
        grammar=compiler.matcher(REGEX),
    )
    first = request.take(tokens[:6])
    request.settle(tokens[:6], first, 6, None)
    for kept in (0, 3):
        taken = request.take(tokens[6:12])
        request.settle(tokens[6:12], taken, kept, None)
        expected = compiler.matcher(REGEX)
        for token in tokens[: 6 + kept]:
            expected.advance(token)
        assert np.array_equal(request.grammar_masks(0), expected.masks([]))


def test_what_cannot_go_on_fails_alone() -> None:
    rig = plain_rig(Variation())
    letters = [token for token in range(VOCAB_SIZE) if token not in tokenizer().end_ids]
    stuck = rig.submit(PROMPT, replace(GREEDY, grammar=REGEX, logit_bias=dict.fromkeys(letters, float("-inf"))))
    fine = rig.submit(PROMPT, params_of("greedy", "regex"))
    rig.run()
    assert stuck.output.finish_reason == "error"
    assert "grammar" in (stuck.output.error or "")
    assert fine.output.token_ids == alone("greedy", "regex").token_ids


def test_a_grammar_that_cannot_be_is_refused_when_submitted() -> None:
    rig = plain_rig(Variation())
    with pytest.raises(InvalidParameterError, match="regex"):
        rig.submit(PROMPT, replace(GREEDY, grammar=Grammar("regex", "(")))
    with pytest.raises(InvalidParameterError, match="nowhere"):
        rig.submit(PROMPT, replace(GREEDY, grammar=replace(REGEX, starts_after="<nowhere>")))
    with pytest.raises(InvalidParameterError, match="tokenizer"):
        make_rig(pair().target, Variation()).submit(PROMPT, replace(GREEDY, grammar=REGEX))
    assert not rig.engine.step()


def test_a_malformed_grammar_among_many_requests_is_refused_before_any_runs(tmp_path: Path) -> None:
    with LLM(make_checkpoint(tmp_path)) as llm:
        params = [GREEDY, replace(GREEDY, grammar=Grammar("regex", "("))]
        with pytest.raises(InvalidParameterError, match="regex"):
            llm.generate(["a", "b"], params)
        assert llm.stats().scheduler.num_submitted == 0
