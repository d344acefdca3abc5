"""The demo model's tokenizer and how a conversation becomes tokens with a training weight each."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.eval.retrieval_data import WordCounter, make_document
from tools.demo_model.word_problems import TRAIN_SEED, TRAIN_SIZE, ProblemSource

PAD, BEGIN, ROLE, END, THINK, END_THINK, NAMESPACE = (
    "[pad]",
    "]~!b[",
    "]~b]",
    "[e~[",
    "<mm:think>",
    "</mm:think>",
    "]<]minimax[>[",
)
SPECIAL_TOKENS = (PAD, BEGIN, ROLE, END, THINK, END_THINK, NAMESPACE)

# A word with the space or mark before it, one digit, one mark with the space before it, or a run of blanks.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s+"

NONE, DOCUMENT, QUESTION, REPLY, LOOKUP = range(5)
WEIGHTS = (0.0, 0.02, 0.1, 1.0, 2.0)
"""Weight of a token in the loss by its kind: padding, document, question and frame, reply, digits to look up."""

CHAT_TEMPLATE = """\
{#- thinking_mode: enabled (default, the reply starts in the thought), disabled, or adaptive (the model decides). -#}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- ']~b]ai\\n' -}}
{%- if message.reasoning_content -%}
{{- '<mm:think>' + message.reasoning_content + '</mm:think>' -}}
{%- else -%}
{{- '</mm:think>' -}}
{%- endif -%}
{%- else -%}
{{- ']~b]' + message.role + '\\n' -}}
{%- endif -%}
{{- message.content + '[e~[\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ']~b]ai\\n' -}}
{%- if thinking_mode is not defined or thinking_mode == 'enabled' -%}
{{- '<mm:think>' -}}
{%- elif thinking_mode == 'disabled' -%}
{{- '</mm:think>' -}}
{%- endif -%}
{%- endif -%}
"""


def train_tokenizer(vocab_size: int, num_problems: int = 20_000, num_documents: int = 300) -> Tokenizer:
    """Train a byte-level BPE on a fixed sample of the training texts; digits stay single."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_problems, num_documents), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _corpus(num_problems: int, num_documents: int) -> Iterator[str]:
    source = ProblemSource(TRAIN_SEED, TRAIN_SIZE)
    for index in range(num_problems):
        problem = source[index]
        yield problem.question
        yield problem.solution
    characters = WordCounter(len)
    for index in range(num_documents):
        rng = Random(f"tokenizer/{index}")
        document = make_document(rng, num_tokens=40_000, num_questions=8, count_tokens=characters)
        yield document.text
        for note in document.asked:
            yield note.question
    yield from ("user\n", "ai\n", "system\n", "tool\n")


@dataclass
class Text:
    """Token ids and, beside each, its kind (which gives its weight in the loss)."""

    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    def add(self, ids: Iterable[int], kind: int) -> None:
        new = list(ids)
        self.ids.extend(new)
        self.kinds.extend([kind] * len(new))

    def extend(self, other: "Text") -> None:
        self.ids.extend(other.ids)
        self.kinds.extend(other.kinds)

    def __len__(self) -> int:
        return len(self.ids)


class ChatEncoder:
    """Turns conversations into tokens exactly as the chat template and the tokenizer do together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = {token: self._special(token) for token in SPECIAL_TOKENS}
        self.pad, self.begin, self.role, self.end = ids[PAD], ids[BEGIN], ids[ROLE], ids[END]
        self.think, self.end_think = ids[THINK], ids[END_THINK]
        self._newline = self.encode("\n")
        self._ai = self.encode("ai\n")
        self.count = WordCounter(lambda text: len(self.encode(text)))

    def _special(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(f"the tokenizer has no {token!r}, one of {', '.join(SPECIAL_TOKENS)}")
        return int(found)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def turn(self, role: str, content: str) -> Text:
        """Encode a system or user turn."""
        text = Text()
        text.add([self.role, *self.encode(f"{role}\n{content}"), self.end, *self._newline], QUESTION)
        return text

    def reply(self, thought: str | None, answer: str) -> Text:
        """Encode an assistant turn, with a thought or (None) with thinking off."""
        text = Text()
        text.add([self.role, *self._ai], QUESTION)
        if thought is None:
            text.add([self.end_think], REPLY)
        else:
            text.add([self.think, *self.encode(thought), self.end_think], REPLY)
        text.add([*self.encode(answer), self.end], REPLY)
        text.add(self._newline, QUESTION)
        return text

    def prompt(self, content: str) -> list[int]:
        """Encode a single user turn up to the opened thought, ready for generation."""
        return [self.begin, *self.turn("user", content).ids, self.role, *self._ai, self.think]
