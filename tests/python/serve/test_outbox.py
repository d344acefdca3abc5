"""What the engine process has to say, while nobody listens and afterwards."""

import random
from collections.abc import Iterator

import pytest
import zmq

from tandem.serve import messages
from tandem.serve.messages import Beat, End, Piece, Pieces
from tandem.serve.outbox import Outbox

Sockets = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """Both ends of a channel that holds two messages or so."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.setsockopt(zmq.RCVHWM, 1)
    push.setsockopt(zmq.SNDHWM, 1)
    pull.bind("inproc://outbox")
    push.connect("inproc://outbox")
    yield push, pull
    context.destroy(linger=0)


def test_pieces_that_nobody_takes_are_joined_and_none_is_lost(sockets: Sockets, py_rng: random.Random) -> None:
    push, pull = sockets
    outbox = Outbox(push)
    said = dict.fromkeys(range(3), "")
    for number in range(5000):
        request = py_rng.randrange(3)
        said[request] += f"{number} "
        outbox.put_piece(Piece(request, f"{number} ", 1, [(number, 0.0, ())]))
    for request in said:
        outbox.put_piece(Piece(request, "", 0, end=End("stop", cached_tokens=request)))
    outbox.put(Beat(7))
    texts, tokens, ends, num_messages, beats = dict.fromkeys(said, ""), [], {}, 0, []
    while len(ends) < 3 or not beats:
        assert pull.poll(10_000), "nothing more comes"
        message = messages.decode_from_engine(pull.recv())
        if isinstance(message, Beat):
            beats.append(message.num_steps)
            continue
        assert isinstance(message, Pieces)
        num_messages += 1
        assert len({piece.request_id for piece in message.pieces}) == len(message.pieces)
        for piece in message.pieces:
            assert piece.request_id not in ends, "a piece after the end"
            texts[piece.request_id] += piece.text
            tokens += [entry[0] for entry in piece.logprobs or []]
            if piece.end is not None:
                ends[piece.request_id] = piece.end.cached_tokens
    assert texts == said
    assert sorted(tokens) == list(range(5000))
    assert ends == {0: 0, 1: 1, 2: 2}
    assert beats == [7]
    # The channel's few messages, one that waited to be sent, and one with all the rest.
    assert num_messages <= 6
    outbox.close()


def test_closing_sends_what_is_left(sockets: Sockets) -> None:
    push, pull = sockets
    outbox = Outbox(push)
    outbox.put_piece(Piece(1, "last words", 2))
    outbox.close()
    assert pull.poll(10_000)
    message = messages.decode_from_engine(pull.recv())
    assert isinstance(message, Pieces)
    assert [piece.text for piece in message.pieces] == ["last words"]
