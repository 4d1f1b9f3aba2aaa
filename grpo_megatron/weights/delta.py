"""Messages of a publish as what changed since the one before, exactly, where that is less.

A step of reinforcement learning moves few numbers so far that bfloat16 shows it. Both ends keep the
last message of each bucket in host memory; the sender compares 16-bit words:

    whole     the message
    changes   places of the words that differ (int32), then the words: 6 bytes each

The receiver puts them into its copy and has the message as it would have come: header, digests and
pieces are checked as ever. `ENVELOPE_BYTES` go before, so that the receiver knows what comes."""

import torch

from grpo_megatron.errors import MismatchError

ENVELOPE_BYTES = 24
"""int64 [3]: kind, the publish to which changes apply, bytes that follow."""
_WHOLE = 1
_CHANGES = 2
_GIVEN_UP = 3
_WORD = torch.int16
_PLACE = torch.int32


class Envelope:
    """What comes next, as the bytes that travel: uint8 [ENVELOPE_BYTES]."""

    def __init__(self, data: torch.Tensor):
        self.data = data

    @classmethod
    def of(cls, kind: int, base: int, num_bytes: int, device: torch.device) -> "Envelope":
        """Make one, on the device from which it is sent."""
        values = torch.tensor([kind, base, num_bytes], dtype=torch.int64, device=device)
        return cls(values.view(torch.uint8))

    @classmethod
    def empty(cls, device: torch.device) -> "Envelope":
        """Make one to be filled."""
        return cls(torch.zeros(ENVELOPE_BYTES, dtype=torch.uint8, device=device))

    @classmethod
    def given_up(cls, device: torch.device) -> "Envelope":
        """Make one that says that the sender has failed: nothing follows."""
        return cls.of(_GIVEN_UP, 0, 0, device)

    @property
    def values(self) -> tuple[int, int, int]:
        """Kind, base and bytes that follow."""
        kind, base, num_bytes = self.data.view(torch.int64).tolist()
        return kind, base, num_bytes

    @property
    def is_given_up(self) -> bool:
        """Whether the sender has failed."""
        return self.values[0] == _GIVEN_UP


class Encoder:
    """A sender's memory of its messages.

    Attributes:
        num_bytes: Of the messages of the last publish.
        num_sent_bytes: Of what was sent in their place."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, torch.Tensor]] = {}
        self._publish: int | None = None
        self.num_bytes = 0
        self.num_sent_bytes = 0

    def encode(
        self, publish: int, bucket: int, data: torch.Tensor
    ) -> tuple[Envelope, torch.Tensor]:
        """Return what to send for the message `data`, uint8 [n], of a bucket."""
        kind = _WHOLE
        base = 0
        payload = data
        if bucket in self._before:
            base, before = self._before[bucket]
            changes = _changes(before.to(data.device), data)
            if changes is not None:
                kind = _CHANGES
                payload = changes
        self._before[bucket] = (publish, data.cpu())
        if publish != self._publish:
            self._publish = publish
            self.num_bytes = 0
            self.num_sent_bytes = 0
        self.num_bytes += data.numel()
        self.num_sent_bytes += ENVELOPE_BYTES + payload.numel()
        return Envelope.of(kind, base, payload.numel(), data.device), payload


class Decoder:
    """A receiver's memory of the messages of each bucket and sender."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def decode(
        self,
        key: tuple[int, int],
        publish: int,
        envelope: Envelope,
        payload: torch.Tensor,
        num_bytes: int,
    ) -> torch.Tensor:
        """Return the message, uint8 [num_bytes], in memory of its own.

        key: bucket and sender. Raises MismatchError where changes are to another publish than the
        one that came before, or do not fit."""
        kind, base, _ = envelope.values
        data = payload
        if kind == _CHANGES:
            known, before = self._before.get(key, (None, payload))
            if known != base:
                raise MismatchError(
                    f"changes to publish {base} came where the last one was {known}"
                )
            data = _applied(before.to(payload.device), payload)
        if data.numel() != num_bytes:
            raise MismatchError(f"a message of {data.numel()} bytes came in place of {num_bytes}")
        self._before[key] = (publish, data.cpu())
        return data


def _changes(before: torch.Tensor, data: torch.Tensor) -> torch.Tensor | None:
    """Return what `_applied` makes `data` of; None where that is not less than `data`."""
    words = data.view(_WORD)
    if words.numel() > torch.iinfo(_PLACE).max:
        return None
    places = (words != before.view(_WORD)).nonzero().squeeze(1)
    if places.numel() * (_PLACE.itemsize + _WORD.itemsize) >= data.numel():
        return None
    changed = words[places]
    return torch.cat([places.to(_PLACE).view(torch.uint8), changed.view(torch.uint8)])


def _applied(before: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
    """Return a copy of `before` with `changes`. Raises MismatchError for places that are not
    there."""
    count = changes.numel() // (_PLACE.itemsize + _WORD.itemsize)
    end = count * _PLACE.itemsize
    places = changes[:end].view(_PLACE).long()
    changed = changes[end : end + count * _WORD.itemsize].clone().view(_WORD)
    data = before.clone()
    words = data.view(_WORD)
    if count and (int(places.min()) < 0 or int(places.max()) >= words.numel()):
        raise MismatchError("changes are to places that a message does not have")
    words[places] = changed
    return data
