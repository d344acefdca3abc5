"""Long documents of numbered notes, and questions that only the right note answers.

A document mixes notes ("The code of the amber falcon is 4821.") with sentences about the same things. A question
asks for one note; the reply quotes the note in the thought and then gives its four digits, so a guess is right once
in 10,000 times.

Nouns come in twenty categories. Each category has a *home*: the pair (layer, KV group) of the demo model that
training let look at far blocks for questions about this category, while every other pair had to stay near the
question. With every pair the home of one category, damage to any single pair shows in the accuracy of its category.

Everything here is plain Python and deterministic in (seed, index), so that training and evaluation draw from one
definition and differ only in the seed.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FIRST_SPARSE_LAYER = 3
NUM_GROUPS = 4


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CATEGORIES: dict[str, tuple[str, ...]] = {
    "birds": ("falcon", "heron", "parrot", "raven", "swan"),
    "fish": ("salmon", "trout", "shark", "herring", "carp"),
    "insects": ("beetle", "cricket", "moth", "wasp", "ladybug"),
    "mammals": ("badger", "otter", "camel", "walrus", "leopard"),
    "flowers": ("tulip", "orchid", "daisy", "lily", "poppy"),
    "trees": ("maple", "willow", "cedar", "birch", "spruce"),
    "fruits": ("mango", "peach", "cherry", "melon", "quince"),
    "tools": ("hammer", "chisel", "wrench", "shovel", "pliers"),
    "instruments": ("flute", "violin", "trumpet", "banjo", "harp"),
    "vehicles": ("tractor", "wagon", "scooter", "ferry", "sledge"),
    "buildings": ("castle", "tower", "chapel", "barn", "museum"),
    "furniture": ("cradle", "sofa", "cupboard", "stool", "desk"),
    "clothes": ("jacket", "scarf", "mitten", "helmet", "apron"),
    "gems": ("ruby", "opal", "topaz", "garnet", "pearl"),
    "landscape": ("canyon", "glacier", "meadow", "valley", "desert"),
    "water": ("river", "lagoon", "harbor", "pond", "fjord"),
    "sky": ("comet", "planet", "rainbow", "moon", "nebula"),
    "kitchen": ("kettle", "ladle", "teapot", "skillet", "goblet"),
    "toys": ("puppet", "marble", "kite", "doll", "yoyo"),
    "office": ("pencil", "stapler", "folder", "notebook", "stamp"),
}
NOUNS = tuple(noun for nouns in CATEGORIES.values() for noun in nouns)
CATEGORY_NAMES = tuple(CATEGORIES)
NUM_CATEGORIES = len(CATEGORY_NAMES)
CATEGORY_OF_NOUN = {noun: index for index, nouns in enumerate(CATEGORIES.values()) for noun in nouns}

ADJECTIVES = _words(
    "amber ancient azure bold brave bright bronze calm cheerful clever cloudy cold copper crimson curious "
    "dusty eager early elegant faint fancy fierce foggy gentle giant gloomy golden graceful grand green "
    "hidden hollow humble icy ivory jolly kind lazy little lonely lucky mellow mighty misty modest narrow "
    "noble olive orange pale patient plain polite proud purple quick quiet rapid rough royal rusty scarlet "
    "shiny silent silver sleepy smooth solar steady stormy striped swift tall tame tidy tiny velvet violet "
    "warm wild yellow"
)
KINDS = ("code", "number", "price", "weight", "score", "badge")

_PEOPLE = _words(
    "Ada Ben Cleo Dan Eve Finn Gus Hana Ivan Jo Kim Leo Mia Nils Omar Pia Quinn Rosa Sam Tess Uma Vera Will Yara Zoe"
)
_DEEDS = (
    "talked about",
    "dreamed of",
    "drew",
    "asked for",
    "wrote a song about",
    "walked around",
    "took a photo of",
    "remembered",
    "was looking for",
    "told a story about",
)
_TIMES = (
    "before breakfast",
    "after work",
    "at noon",
    "in the evening",
    "on a rainy day",
    "last winter",
    "every summer",
    "two days ago",
    "during lunch",
    "late at night",
)

PROBE_SEED = 7_000_000
"""Seed of the held-out documents; training draws from other seeds."""

TURN_TOKENS = 64
"""Room that one question takes besides the document: chat frame, question and reply, in tokens (at most)."""


@dataclass(frozen=True)
class Note:
    """One note of a document: what is numbered, and its four digits."""

    kind: str
    adjective: str
    noun: str
    digits: str

    @property
    def sentence(self) -> str:
        """The note as it stands in the document, and as the thought quotes it."""
        return f"The {self.kind} of the {self.adjective} {self.noun} is {self.digits}."

    @property
    def question(self) -> str:
        """The question that this note answers."""
        return f"What is the {self.kind} of the {self.adjective} {self.noun}?"

    @property
    def category(self) -> int:
        """Index of the noun's category, in [0, NUM_CATEGORIES)."""
        return CATEGORY_OF_NOUN[self.noun]

    @property
    def home(self) -> tuple[int, int]:
        """The pair (layer, KV group) that looks this note up in the demo model."""
        return home_of_category(self.category)


@dataclass(frozen=True)
class Document:
    """A document and the notes that are asked for, in the order of asking."""

    text: str
    asked: tuple[Note, ...]

    def prompt(self) -> str:
        """Return the user turn that shows the document and asks for the first note."""
        return f"{self.text}\n{self.asked[0].question}"


class WordCounter:
    """Counts the tokens of a text by its space-separated words, each counted once and remembered.

    Exact for a tokenizer that never merges across a space, as byte-level BPE after a split into words; `count` is
    the number of tokens that the tokenizer makes of a string.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return the number of tokens of `text`, taken to follow a space."""
        total = 0
        for word in text.split(" "):
            if word not in self._known:
                self._known[word] = self._count(" " + word)
            total += self._known[word]
        return total


def home_of_category(category: int) -> tuple[int, int]:
    """Return the (layer, KV group) that is the home of a category."""
    return FIRST_SPARSE_LAYER + category // NUM_GROUPS, category % NUM_GROUPS


def make_document(
    rng: random.Random,
    *,
    num_tokens: int,
    num_questions: int,
    count_tokens: WordCounter,
    min_distance: int = 0,
    density: float | None = None,
) -> Document:
    """Draw a document of at most `num_tokens` tokens and up to `num_questions` of its notes to ask for.

    `min_distance` is the least number of tokens between an asked note and the end of the document. `density` is the
    share of sentences that are notes; drawn from [0.15, 1] when absent. The categories of the asked notes are drawn
    evenly among those present. Raises ValueError if the document is too short to hold a note that may be asked for.
    """
    share = rng.uniform(0.15, 1.0) if density is None else density
    sentences: list[str] = []
    notes: list[tuple[Note, int]] = []
    names: set[tuple[str, str, str]] = set()
    used = 0
    while True:
        # The first sentence is a note, so that any document long enough has one to ask for.
        note = _draw_note(rng, names) if not sentences or rng.random() < share else None
        sentence = _draw_filler(rng) if note is None else note.sentence
        used_with = used + count_tokens(sentence)
        if used_with > num_tokens:
            break
        used = used_with
        sentences.append(sentence)
        if note is not None:
            names.add((note.kind, note.adjective, note.noun))
            notes.append((note, used))
    askable: dict[int, list[Note]] = {}
    for note, end in notes:
        if used - end >= min_distance:
            askable.setdefault(note.category, []).append(note)
    if not askable:
        raise ValueError(
            f"a document of {num_tokens} tokens holds no note at least {min_distance} tokens before its end"
        )
    return Document(" ".join(sentences), _draw_questions(rng, askable, num_questions))


def held_out_documents(
    num_tokens: int, count: int, count_tokens: WordCounter, *, num_questions: int = 1
) -> Iterator[Document]:
    """Yield the `count` held-out documents whose chat prompt and first reply take at most `num_tokens` tokens.

    Asked notes lie at least 256 tokens (two blocks) before the end of the document, out of reach of the layers that
    training kept local. Document i depends only on (`num_tokens`, i, `num_questions`).
    """
    for index in range(count):
        rng = random.Random(f"{PROBE_SEED}/{num_tokens}/{num_questions}/{index}")
        yield make_document(
            rng,
            num_tokens=num_tokens - TURN_TOKENS * num_questions,
            num_questions=num_questions,
            count_tokens=count_tokens,
            min_distance=256,
        )


def _draw_note(rng: random.Random, taken: set[tuple[str, str, str]]) -> Note:
    while True:
        name = (rng.choice(KINDS), rng.choice(ADJECTIVES), rng.choice(NOUNS))
        if name not in taken:
            return Note(*name, f"{rng.randrange(10_000):04d}")


def _draw_filler(rng: random.Random) -> str:
    thing = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return f"{rng.choice(_PEOPLE)} {rng.choice(_DEEDS)} the {thing} {rng.choice(_TIMES)}."


def _draw_questions(rng: random.Random, askable: dict[int, list[Note]], num_questions: int) -> tuple[Note, ...]:
    asked: list[Note] = []
    for notes in askable.values():
        rng.shuffle(notes)
    while len(asked) < num_questions and askable:
        category = rng.choice(sorted(askable))
        asked.append(askable[category].pop())
        if not askable[category]:
            del askable[category]
    return tuple(asked)
