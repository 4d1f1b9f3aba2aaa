"""Messages as changes: exact, refused where they do not fit, never more than the message."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.delta import ENVELOPE_BYTES, Decoder, Encoder, Envelope

KEY = (0, 0)
HOST = torch.device("cpu")


def message(words: list[int]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int16).view(torch.uint8)


@given(st.lists(st.lists(st.integers(-3, 3), min_size=24, max_size=24), min_size=1, max_size=5))
def test_what_is_decoded_is_what_was_encoded(publishes):
    encoder = Encoder()
    decoder = Decoder()
    for number, words in enumerate(publishes):
        data = message(words)
        envelope, payload = encoder.encode(number, 0, data)
        assert payload.numel() <= data.numel()
        found = decoder.decode(KEY, number, envelope, payload, data.numel())
        assert torch.equal(found, data)
        assert encoder.num_sent_bytes == ENVELOPE_BYTES + payload.numel()
        assert encoder.num_bytes == data.numel()


def test_one_word_of_many_costs_six_bytes_and_an_envelope():
    encoder = Encoder()
    words = [0] * 1000
    encoder.encode(1, 0, message(words))
    words[7] = 1
    _, payload = encoder.encode(2, 0, message(words))
    assert payload.numel() == 6
    assert encoder.num_sent_bytes == 6 + ENVELOPE_BYTES and encoder.num_bytes == 2000


def test_changes_to_another_publish_are_refused():
    encoder = Encoder()
    decoder = Decoder()
    words = [0] * 100
    envelope, payload = encoder.encode(1, 0, message(words))
    decoder.decode(KEY, 1, envelope, payload, 200)
    encoder.encode(2, 0, message(words))  # which the decoder never saw
    envelope, payload = encoder.encode(3, 0, message([1, *words[1:]]))
    with pytest.raises(MismatchError, match="changes to publish 2 came where the last one was 1"):
        decoder.decode(KEY, 3, envelope, payload, 200)


def test_places_that_are_not_there_and_other_lengths_are_refused():
    decoder = Decoder()
    whole = Envelope.of(1, 0, 8, HOST)
    with pytest.raises(MismatchError, match="a message of 8 bytes came in place of 200"):
        decoder.decode(KEY, 1, whole, message([0] * 4), 200)
    decoder.decode(KEY, 1, whole, message([0] * 4), 8)
    place = torch.tensor([4], dtype=torch.int32).view(torch.uint8)
    beyond = torch.cat([place, message([1])])
    before = torch.cat([torch.tensor([-1], dtype=torch.int32).view(torch.uint8), message([1])])
    for changes in (beyond, before):
        with pytest.raises(MismatchError, match="places that a message does not have"):
            decoder.decode(KEY, 2, Envelope.of(2, 1, 6, HOST), changes, 8)
    with pytest.raises(MismatchError, match="a message of 8 bytes came in place of 6"):
        decoder.decode(KEY, 2, whole, message([0] * 4), 6)


def test_a_message_stays_as_it_came_when_the_next_one_comes():
    """An engine may keep it."""
    encoder = Encoder()
    decoder = Decoder()
    found = []
    for number in range(3):
        envelope, payload = encoder.encode(number, 0, message([number] + [0] * 9))
        found.append(decoder.decode(KEY, number, envelope, payload, 20))
    assert [int(data[0]) for data in found] == [0, 1, 2]
