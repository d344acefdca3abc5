"""A tiny model folder with a tokenizer, for what needs a whole `LLM`."""

import json
from pathlib import Path

from tandem.models import MiniMaxM3Config
from tests.python.engine.byte_tokenizer import byte_tokenizer_json
from tests.python.models.eagle3_support import DraftShape, draft_config, draft_tensors
from tests.python.models.support import Shape, random_weights, text_config, wrapped_config, write_checkpoint

VOCAB_SIZE = 300


def make_checkpoint(folder: Path) -> Path:
    """A random M3 of 4 layers with blocks of 4 tokens and at most 256 positions."""
    shape = Shape(
        layers="dsss", hidden=32, heads=4, kv_heads=2, head_dim=32, block=4, topk=2, experts=4, vocab=VOCAB_SIZE
    )
    text = text_config(shape) | {"max_position_embeddings": 256}
    weights = random_weights(MiniMaxM3Config.from_dict(text), seed=3)
    write_checkpoint(folder, wrapped_config(text), weights)
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[e~["}), encoding="utf-8")
    return folder


def make_drafter(folder: Path, seed: int) -> Path:
    """A random EAGLE 3.1 drafter of that model."""
    shape = DraftShape(hidden=32, heads=4, kv_heads=2, head_dim=32, width=64, vocab=VOCAB_SIZE)
    write_checkpoint(folder, draft_config(shape), draft_tensors(shape, seed), prefix="")
    return folder
