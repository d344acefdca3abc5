"""Speculative decoding in the target's own step: verification, and the drafter's passes over the shared cache."""

from tandem.spec.slots import DraftSlots, extend_slots, extend_token_ids
from tandem.spec.verify import Verified, kept_positions, verify
from tandem.spec.worker import Drafter, DraftWorker, store_drafts

__all__ = [
    "DraftSlots",
    "DraftWorker",
    "Drafter",
    "Verified",
    "extend_slots",
    "extend_token_ids",
    "kept_positions",
    "store_drafts",
    "verify",
]
