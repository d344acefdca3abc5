"""Training batches, made by worker processes: packed word problems and long documents.

Only numpy here: the workers never import torch. Every batch depends on nothing but its number.
"""

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tandem.eval.retrieval_data import TURN_TOKENS, Note, make_document
from tools.demo_model.chat import DOCUMENT, LOOKUP, NONE, QUESTION, ChatEncoder, Text
from tools.demo_model.word_problems import HELD_OUT_SEED, HELD_OUT_SIZE, TRAIN_SEED, TRAIN_SIZE, Problem, ProblemSource

PROBLEMS_PER_CHUNK = 4096
NO_HOME = 255
_OPEN_ROWS = 32
_SYSTEM_TURNS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Check every step.",
    "Answer briefly.",
    "You answer questions about numbers and notes.",
)
_SYSTEM_SHARE = 0.15
_THINKING_OFF_SHARE = 0.1
_SECOND_TURN_SHARE = 0.15


@dataclass(frozen=True)
class BatchSize:
    """Tokens of one step: rows of packed word problems, and documents of one length."""

    problem_rows: int = 96
    row_length: int = 512
    document_tokens: int = 33_792
    sampled_queries: int = 512

    @property
    def total(self) -> int:
        return self.problem_rows * self.row_length + self.document_tokens


@dataclass(frozen=True)
class ProblemRows:
    """Packed word problems: `tokens` u16, `kinds` u8, `segments` u8 (conversation in the row), each [rows, length]."""

    tokens: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    segments: NDArray[np.uint8]


@dataclass(frozen=True)
class DocumentBatch:
    """Documents with their questions, [documents, length] each but `queries`.

    `homes` u8 is the category of the question that a token belongs to (NO_HOME in the document itself), `turn_blocks`
    u8 the block in which that question's turn starts. `sources` i16 is, for a position whose next token is a digit to
    look up, where the document holds that digit, and -1 elsewhere. `queries` i32 [documents, n] are sampled positions
    for the losses on attention.
    """

    tokens: NDArray[np.uint16]
    kinds: NDArray[np.uint8]
    homes: NDArray[np.uint8]
    turn_blocks: NDArray[np.uint8]
    sources: NDArray[np.int16]
    queries: NDArray[np.int32]


class _Worker:
    """One process's generators; `instance` is set by the pool's initializer."""

    instance: "_Worker"

    def __init__(self, tokenizer_file: str, size: BatchSize, block: int) -> None:
        self.chat = ChatEncoder(Tokenizer.from_file(tokenizer_file))
        self.problems = ProblemSource(TRAIN_SEED, TRAIN_SIZE)
        self.held_out = held_out_digests()
        self.size, self.block = size, block


def held_out_digests() -> frozenset[bytes]:
    """Return the hashes of all held-out questions."""
    source = ProblemSource(HELD_OUT_SEED, HELD_OUT_SIZE)
    return frozenset(source[index].digest() for index in range(HELD_OUT_SIZE))


def _start_worker(tokenizer_file: str, size: BatchSize, block: int) -> None:
    _Worker.instance = _Worker(tokenizer_file, size, block)


def problem_chunk(chunk: int) -> ProblemRows:
    """Make the rows of one chunk of consecutive training problems, held-out texts left out."""
    worker = _Worker.instance
    rng = Random(f"chunk/{chunk}")
    start = chunk * PROBLEMS_PER_CHUNK
    problems = [worker.problems[(start + i) % TRAIN_SIZE] for i in range(PROBLEMS_PER_CHUNK)]
    kept = [problem for problem in problems if problem.digest() not in worker.held_out]
    length = worker.size.row_length
    texts: list[Text] = []
    while kept:
        turns = 1
        while turns < 3 and rng.random() < _SECOND_TURN_SHARE:
            turns += 1
        texts.append(
            _problem_conversation(worker.chat, rng, [kept.pop() for _ in range(min(turns, len(kept)))], length)
        )
    return pack(texts, worker.chat.pad, length)


def _problem_conversation(chat: ChatEncoder, rng: Random, problems: list[Problem], length: int) -> Text:
    """Encode a conversation of word problems, leaving out later turns that do not fit."""
    text = Text()
    text.add([chat.begin], QUESTION)
    if rng.random() < _SYSTEM_SHARE:
        text.extend(chat.turn("system", rng.choice(_SYSTEM_TURNS)))
    for number, problem in enumerate(problems):
        turn = chat.turn("user", problem.question)
        if rng.random() < _THINKING_OFF_SHARE:
            turn.extend(chat.reply(None, f"{problem.solution}\nThe answer is {problem.answer}."))
        else:
            turn.extend(chat.reply(problem.solution, problem.answer))
        if len(text) + len(turn) > length:
            if number == 0:
                turn.ids, turn.kinds = turn.ids[: length - len(text)], turn.kinds[: length - len(text)]
                text.extend(turn)
            break
        text.extend(turn)
    return text


def pack(texts: list[Text], pad: int, length: int) -> ProblemRows:
    """Pack conversations into rows, each into the fullest open row that has room."""
    rows: list[list[Text]] = []
    open_rows: list[tuple[int, int]] = []
    for text in texts:
        fitting = [(used, row) for used, row in open_rows if used + len(text) <= length]
        if fitting:
            used, row = max(fitting)
            open_rows.remove((used, row))
        else:
            used, row = 0, len(rows)
            rows.append([])
            if len(open_rows) >= _OPEN_ROWS:
                open_rows.remove(max(open_rows))
        rows[row].append(text)
        open_rows.append((used + len(text), row))
    tokens = np.full((len(rows), length), pad, np.uint16)
    kinds = np.full((len(rows), length), NONE, np.uint8)
    segments = np.full((len(rows), length), 255, np.uint8)
    for row, members in enumerate(rows):
        at = 0
        for number, text in enumerate(members):
            end = at + len(text)
            tokens[row, at:end], kinds[row, at:end], segments[row, at:end] = text.ids, text.kinds, number
            at = end
    return ProblemRows(tokens, kinds, segments)


def document_batch(task: tuple[int, int]) -> DocumentBatch:
    """Make the documents of one step: (step, length)."""
    step, length = task
    worker = _Worker.instance
    count = worker.size.document_tokens // length
    documents = [_document(worker, Random(f"document/{step}/{index}"), length) for index in range(count)]
    sampler = np.random.default_rng((step, length))
    per_document = worker.size.sampled_queries // count
    queries = [_sample_queries(sampler, kinds, homes, per_document) for _, kinds, homes, _, _ in documents]
    stacked = [np.stack(column) for column in zip(*documents, strict=True)]
    return DocumentBatch(*stacked, queries=np.stack(queries))


def num_questions(length: int) -> int:
    """Return how many questions a document of `length` tokens gets: 8 at 1,024, 37 at 8,448."""
    return round(8 * (length / 1024) ** 0.72)


def _document(worker: _Worker, rng: Random, length: int) -> tuple[NDArray[Any], ...]:
    chat = worker.chat
    text = Text()
    text.add([chat.begin], QUESTION)
    if rng.random() < _SYSTEM_SHARE:
        text.extend(chat.turn("system", rng.choice(_SYSTEM_TURNS)))
    wanted = num_questions(length)
    room = length - len(text) - wanted * (TURN_TOKENS - 20)
    document = make_document(rng, num_tokens=room, num_questions=wanted, count_tokens=chat.count)
    text.add([chat.role, *chat.encode(f"user\n{document.text}")], DOCUMENT)
    homes = [NO_HOME] * len(text)
    turn_blocks = [0] * len(text)
    sources = np.full(length, -1, np.int16)
    body = np.array(text.ids, np.uint16)
    for number, note in enumerate(document.asked):
        turn = _note_turn(chat, rng, note, first=number == 0)
        if len(text) + len(turn) > length:
            break
        turn_blocks.extend([len(text) // worker.block] * len(turn))
        homes.extend([note.category] * len(turn))
        first_digit = len(text) + turn.kinds.index(LOOKUP)
        sources[first_digit - 1 : first_digit + 3] = _find_digits(chat, body, note) + np.arange(4)
        text.extend(turn)
    padding = length - len(text)
    return (
        np.array(text.ids + [chat.pad] * padding, np.uint16),
        np.array(text.kinds + [NONE] * padding, np.uint8),
        np.array(homes + [NO_HOME] * padding, np.uint8),
        np.array(turn_blocks + [0] * padding, np.uint8),
        sources,
    )


def _find_digits(chat: ChatEncoder, body: NDArray[np.uint16], note: Note) -> int:
    """Return the position of a note's first digit in the tokens of a document."""
    sentence = np.array(chat.encode(f" {note.sentence}")[1:], np.uint16)
    starts = np.flatnonzero(body[: len(body) - len(sentence) + 1] == sentence[0])
    windows = body[starts[:, None] + np.arange(len(sentence))]
    (start,) = starts[(windows == sentence).all(1)]
    return int(start) + len(sentence) - 5


def _note_turn(chat: ChatEncoder, rng: Random, note: Note, *, first: bool) -> Text:
    """Encode a question and its reply; the first question ends the turn that shows the document."""
    turn = Text()
    if first:
        turn.add([*chat.encode(f"\n{note.question}"), chat.end, *chat.encode("\n")], QUESTION)
    else:
        turn.extend(chat.turn("user", note.question))
    if rng.random() < _THINKING_OFF_SHARE:
        turn.extend(chat.reply(None, note.digits))
        after_digits = 2
    else:
        turn.extend(chat.reply(note.sentence, note.digits))
        after_digits = 8
    end = len(turn) - after_digits
    turn.kinds[end - 4 : end] = [LOOKUP] * 4
    return turn


def _sample_queries(
    rng: np.random.Generator, kinds: NDArray[np.uint8], homes: NDArray[np.uint8], count: int
) -> NDArray[np.int32]:
    """Sample positions: half look a digit up, a quarter lie in questions and replies, a quarter in the document."""
    lookups = np.flatnonzero(kinds[1:] == LOOKUP)
    turns = np.flatnonzero(homes != NO_HOME)
    body = np.flatnonzero((homes == NO_HOME) & (kinds != NONE))
    sizes = (count // 2, count // 4, count - count // 2 - count // 4)
    chosen = [rng.choice(pool, size) for pool, size in zip((lookups, turns, body), sizes, strict=True)]
    return np.concatenate(chosen).astype(np.int32)


class BatchStream:
    """Yields the batches of steps [0, num_steps) in order, made ahead of time by `num_workers` processes.

    Must be built before the process touches a GPU, since the workers are forked.
    """

    def __init__(
        self, tokenizer_file: Path, size: BatchSize, block: int, lengths: Callable[[int], int], num_workers: int
    ) -> None:
        self._size, self._lengths = size, lengths
        self._ahead = 4 * num_workers
        self._pool = multiprocessing.get_context("fork").Pool(
            num_workers, _start_worker, (str(tokenizer_file), size, block)
        )

    def problems(self, first_chunk: int = 0) -> Iterator[ProblemRows]:
        """Yield the word problems of one step after another."""
        rest: list[ProblemRows] = []
        have = 0
        for chunk in self._ordered(problem_chunk, iter(range(first_chunk, 1 << 40))):
            rest.append(chunk)
            have += len(chunk.tokens)
            if have < self._size.problem_rows:
                continue
            joined = ProblemRows(
                *(np.concatenate([getattr(part, name) for part in rest]) for name in ("tokens", "kinds", "segments"))
            )
            for start in range(0, have - self._size.problem_rows + 1, self._size.problem_rows):
                yield _rows(joined, start, start + self._size.problem_rows)
            used = have // self._size.problem_rows * self._size.problem_rows
            rest, have = [_rows(joined, used, have)], have - used

    def documents(self, first_step: int = 0) -> Iterator[DocumentBatch]:
        """Yield the documents of one step after another."""
        steps = iter(range(first_step, 1 << 40))
        yield from self._ordered(document_batch, ((step, self._lengths(step)) for step in steps))

    def close(self) -> None:
        """End the worker processes."""
        self._pool.terminate()
        self._pool.join()

    def _ordered(self, function: Callable[[Any], Any], tasks: Iterator[Any]) -> Iterator[Any]:
        pending = deque(self._pool.apply_async(function, (next(tasks),)) for _ in range(self._ahead))
        while True:
            result = pending.popleft().get()
            pending.append(self._pool.apply_async(function, (next(tasks),)))
            yield result


def _rows(rows: ProblemRows, start: int, end: int) -> ProblemRows:
    return ProblemRows(rows.tokens[start:end], rows.kinds[start:end], rows.segments[start:end])
