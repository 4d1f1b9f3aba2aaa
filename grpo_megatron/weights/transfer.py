"""The wire protocol of weight publishing: trainer ranks to the engine workers of one stream.

    trainer rank 0 ─┐
    trainer rank 5 ─┼─> worker 1 of replica 0 ──> worker 1 of replica 1 ──> ...
    trainer rank 6 ─┘

They form one group (see `carriers`): senders first, then workers. A message (see `publish_plan`)
travels from its sender to the first worker, and from each worker to the next while that one still
loads. Its header (publish, bucket, bytes, status) tells a disagreement or a failed sender; the
digests of its pieces, taken before packing, are compared by every worker. Waits end after
`timeout_s` with an error that names the other."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from grpo_megatron.errors import MismatchError, TransferError
from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.carrier_names import Carrier, LinkKind
from grpo_megatron.weights.carriers import (
    Naming,
    gloo_group,
    listening_store,
    message_device,
    nccl_group,
)
from grpo_megatron.weights.delta import Decoder, Encoder, Envelope
from grpo_megatron.weights.digest import digest_of
from grpo_megatron.weights.gpu_memory import Reach
from grpo_megatron.weights.links import (
    NcclWork,
    ReceivedFromGpu,
    ReceivedThroughHost,
    SentFromGpu,
    SentThroughHost,
)
from grpo_megatron.weights.publish_plan import (
    Bucket,
    Message,
    Part,
    Stream,
    message_key,
)
from grpo_megatron.weights.tensor_entry import TensorEntry, as_bytes

DEFAULT_TIMEOUT_S = 300.0
_AHEAD = 3
"""Buckets that are under way at once on a link, so that it does not rest while one end is late."""
_OK = 0
"""Status in a header: the pieces follow."""
_ABORT = 1
"""Status in a header: the sender has failed, nothing of use follows."""

BucketTensors = list[tuple[TensorEntry, dict[Box, torch.Tensor]]]
"""The tensors of a bucket: for each the boxes that this worker keeps of it."""
LoadParts = Callable[[BucketTensors], object]
"""Takes the tensors of a bucket."""
PlacedNumbers = tuple[Part, Box, torch.Tensor]
"""A piece that has arrived: the part of a tensor that it belongs to, which box of that tensor it
fills, and its numbers, in the shape of the box."""


class StreamGroup:
    """A process's place in the group of one stream. `rank` counts senders, then workers."""

    def __init__(self, stream: Stream, rank: int, carrier: Carrier, timeout_s: float):
        self.rank = rank
        self.carrier: Carrier = carrier
        self.num_senders = len(stream.senders)
        self._names = [f"trainer rank {sender}" for sender in stream.senders]
        self._names += [f"engine worker {worker}" for worker in stream.workers]
        self._timeout_s = timeout_s
        self._group: Any = None
        self._reach: Reach | None = None
        self._under_way: list[Transmission] = []

    @property
    def size(self) -> int:
        """Senders and workers."""
        return len(self._names)

    @property
    def name(self) -> str:
        """This process, as errors call it."""
        return self._names[self.rank]

    def join(self, store: TCPStore, own_host: str) -> None:
        """Wait until all members have joined. Raises TransferError: not within the time limit.

        own_host: the address at which the others reach this process."""
        members = f"{self.num_senders} trainer ranks and {self.size - self.num_senders} workers"
        with Naming(f"{self.name} waiting for {members} to join a weight stream"):
            if self.carrier == "nccl":
                self._group = nccl_group(store, self.rank, self.size, self._timeout_s)
                return
            self._group = gloo_group(store, own_host, self.rank, self.size, self._timeout_s)
            if self.carrier == "ipc":
                self._reach = Reach(store, self.rank, self.size)

    def link(self, source: int, to: int) -> LinkKind:
        """Return how bytes get from one member to another, once all have joined."""
        if self.carrier == "nccl":
            return "nccl"
        if self._reach is not None and self._reach.reads(to, source):
            return "gpu memory"
        return "host memory"

    def links(self) -> Counter[LinkKind]:
        """Count the links over which weights travel: each sender's to the first worker, and each
        worker's to the next."""
        kinds: Counter[LinkKind] = Counter()
        for sender in range(self.num_senders):
            kinds[self.link(sender, self.num_senders)] += 1
        for worker in range(self.num_senders + 1, self.size):
            kinds[self.link(worker - 1, worker)] += 1
        return kinds

    def send(self, data: torch.Tensor, to: int) -> "Transmission":
        """Begin to send; `data` must not change until the answer's `wait`."""
        what = f"{self.name} sending weights to {self._names[to]}"
        work: Any
        with Naming(what):
            match self.link(self.rank, to):
                case "nccl":
                    work = NcclWork(self._group.send([data], to, 0), self._timeout_s)
                case "gpu memory":
                    work = SentFromGpu(self._group, data, to)
                case "host memory":
                    work = SentThroughHost(self._group, data, to)
            return self._begun(work, data, what)

    def receive(self, data: torch.Tensor, source: int) -> "Transmission":
        """Begin to fill `data`, uint8 [bytes]."""
        what = f"{self.name} receiving weights from {self._names[source]}"
        work: Any
        with Naming(what):
            match self.link(source, self.rank):
                case "nccl":
                    work = NcclWork(self._group.recv([data], source, 0), self._timeout_s)
                case "gpu memory":
                    work = ReceivedFromGpu(self._group, data, source)
                case "host memory":
                    work = ReceivedThroughHost(self._group, data, source)
            return self._begun(work, data, what)

    def _begun(self, work: Any, data: torch.Tensor, what: str) -> "Transmission":
        transmission = Transmission(work, data, what)
        unfinished = [other for other in self._under_way if other.is_under_way]
        self._under_way = [*unfinished, transmission]
        return transmission

    def close(self) -> None:
        """Leave: members that wait for this process are told at once.

        With NCCL they notice it by their time limit, and what is under way on this GPU is given up.
        Works keep the group open, and an error's traceback may keep them: they are dropped."""
        for transmission in self._under_way:
            transmission.drop()
        if self.carrier == "nccl" and self._group is not None:
            self._group.abort()
        self._under_way = []
        self._group = None


class Transmission:
    """A message on its way; keeps its bytes alive."""

    def __init__(self, work: Any, data: torch.Tensor, what: str):
        self.data = data
        self._work = work
        self._what = what

    @property
    def is_under_way(self) -> bool:
        """Whether its end was not waited for yet."""
        return self._work is not None

    def wait(self) -> torch.Tensor:
        """Return the bytes once they have arrived, or left. Raises TransferError."""
        work = self._work
        self._work = None
        if work is None:
            return self.data
        with Naming(self._what):
            work.wait()
        return self.data

    def drop(self) -> None:
        """Forget the bytes, wherever they are."""
        self._work = None


class StreamSender:
    """A trainer rank's end of a stream.

    own_host: the address at which the others reach this process, which listens on no other. delta:
    send what changed since the publish before, where that is less (see `delta`).

    Attributes:
        digests: Of each message of the last publish, by `message_key`."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        sender: int,
        own_host: str,
        carrier: Carrier = "gloo",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        delta: bool = False,
    ):
        self.number = number
        self._own_host = own_host
        self._encoder: Encoder | None = None
        if delta:
            self._encoder = Encoder()
        self.group = StreamGroup(stream, stream.senders.index(sender), carrier, timeout_s)
        self.messages: dict[int, Message] = {}
        for index, bucket in enumerate(stream.buckets()):
            for message in bucket.messages:
                if message.sender == sender:
                    self.messages[index] = message
        self.digests: dict[str, str] = {}
        self._timeout = timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None
        self._sending: deque[Transmission] = deque()

    def listen(self) -> tuple[str, int]:
        """Let the members of the stream find each other here; returns host and port."""
        self._store = listening_store(self._own_host, self.group.size, self._timeout)
        return self._own_host, self._store.port

    def join(self, address: tuple[str, int]) -> None:
        """Wait until all members have joined. Raises TransferError: not within the time limit.

        address: what `listen` returned to the first sender."""
        host, port = address
        if self._store is None:
            with Naming(f"{self.group.name} joining weight stream {self.number} ({host}:{port})"):
                self._store = TCPStore(host, port, None, is_master=False, timeout=self._timeout)
        self.group.join(self._store, self._own_host)

    def send(self, publish: int, bucket: int, piece_of: Callable[[str, Box], torch.Tensor]) -> None:
        """Begin to send this rank's message of a bucket, once all but one before have left.

        publish: weight version, on which both sides must agree. piece_of: gives a box of a tensor;
        the numbers may change once this returns. Raises TransferError. What `piece_of` raises is
        raised after the workers were told."""
        message = self.messages.get(bucket)
        if message is None:
            return
        try:
            data = self._pack(message, [publish, bucket, message.num_bytes, _OK], piece_of)
            self.digests[message_key(self.number, bucket, message.sender)] = message_digest(
                message, data
            )
        except BaseException:
            self._abort(message, publish, bucket)
            raise
        parts = self._parts(publish, bucket, data)
        while len(self._sending) >= _AHEAD * len(parts):
            self._sending.popleft().wait()
        for part in parts:
            self._sending.append(self.group.send(part, self.group.num_senders))

    def _parts(self, publish: int, bucket: int, data: torch.Tensor) -> list[torch.Tensor]:
        """Return what is sent of a message, in order."""
        if self._encoder is None:
            return [data]
        envelope, payload = self._encoder.encode(publish, bucket, data)
        return [envelope.data, payload]

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages of a publish."""
        return sum(message.num_bytes for message in self.messages.values())

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that were sent in the last publish."""
        if self._encoder is None:
            return self.num_bytes
        return self._encoder.num_sent_bytes

    def _pack(
        self,
        message: Message,
        header: Sequence[int],
        piece_of: Callable[[str, Box], torch.Tensor],
    ) -> torch.Tensor:
        """Make a message: uint8 [message.num_bytes], where the carrier takes it."""
        data = self._empty(message)
        message.header(data).copy_(torch.tensor(header))
        digests = []
        for (part, box), view in zip(message.pieces, message.views(data), strict=True):
            piece = piece_of(part.tensor.name, box).detach()
            if piece.dtype != view.dtype or piece.shape != view.shape:
                raise MismatchError(
                    f"{self.group.name} has {part.tensor.name!r} {piece.dtype} "
                    f"{tuple(piece.shape)} where the transfer plan has {view.dtype} "
                    f"{tuple(view.shape)}"
                )
            piece = piece.contiguous()
            digests.append(digest_of(piece, part.tensor.name))
            view.copy_(piece)
        if digests:
            message.digests(data).copy_(torch.stack(digests))
        return data

    def _empty(self, message: Message) -> torch.Tensor:
        device = message_device(self.group.carrier)
        return torch.empty(message.num_bytes, dtype=torch.uint8, device=device)

    def finish(self) -> None:
        """Wait until all messages have left. Raises TransferError."""
        while self._sending:
            self._sending.popleft().wait()

    def close(self) -> None:
        """Leave the group."""
        self._sending.clear()
        self._store = None
        self.group.close()

    def _abort(self, message: Message, publish: int, bucket: int) -> None:
        """Tell the workers that nothing more comes, so that they need not wait for a time limit."""
        if self._encoder is None:
            data = self._empty(message)
            message.header(data).copy_(torch.tensor([publish, bucket, message.num_bytes, _ABORT]))
        else:
            data = Envelope.given_up(message_device(self.group.carrier)).data
        with suppress(TransferError):  # they are gone; the first error is raised
            self.finish()
            self.group.send(data, self.group.num_senders).wait()


class StreamReceiver:
    """An engine worker's end of its stream: receives, passes on, loads.

    worker: its number over all replicas. address: of the first sender. own_host: the address at
    which the others reach this process. delta: as the sender has it. Raises TransferError where the
    stream cannot be joined within `timeout_s`.

    Attributes:
        digests: Of each message of the last publish, by `message_key`, as it arrived here.
        changed: Tensors of the last publish of which something else arrived than was sent."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        worker: int,
        address: tuple[str, int],
        own_host: str,
        carrier: Carrier = "gloo",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        delta: bool = False,
    ):
        self.number = number
        self.digests: dict[str, str] = {}
        self.changed: list[str] = []
        self._decoder: Decoder | None = None
        if delta:
            self._decoder = Decoder()
        self._buckets = stream.buckets()
        self._senders = stream.senders
        position = stream.workers.index(worker)
        rank = len(self._senders) + position
        self._group = StreamGroup(stream, rank, carrier, timeout_s)
        self._passing_on: deque[Transmission] = deque()
        self._next: int | None = None
        if position + 1 < len(stream.workers):
            self._next = self._group.rank + 1
        host, port = address
        name = f"weight stream {number} ({host}:{port})"
        with Naming(f"engine worker {worker} joining {name}"):
            timeout = timedelta(seconds=timeout_s)
            store = TCPStore(host, port, None, is_master=False, timeout=timeout)
            self._group.join(store, own_host)

    def receive(self, publish: int, load: LoadParts) -> None:
        """Receive a whole publish, handing each bucket's tensors to `load`.

        `load` may keep them: a message's storage is never written again. Raises TransferError when
        a member died, gave up, hung or sends another publish. The others are told, also of what
        `load` raises."""
        self.digests = {}
        self.changed = []
        try:
            self._receive(publish, load)
        except BaseException:
            self._group.close()  # nobody waits for this worker
            raise

    def _receive(self, publish: int, load: LoadParts) -> None:
        self._passing_on.clear()
        if self._decoder is None:
            self._receive_plain(publish, load)
        else:
            self._receive_delta(self._decoder, publish, load)
        self._wait_until_passed_on(0)

    def _receive_plain(self, publish: int, load: LoadParts) -> None:
        """Receive messages as they are; those of the next buckets are under way meanwhile."""
        arriving: deque[list[Transmission]] = deque()
        for bucket in self._buckets[:_AHEAD]:
            arriving.append(self._begin(bucket))
        for number, bucket in enumerate(self._buckets):
            pieces: list[PlacedNumbers] = []
            for message, transmission in zip(bucket.messages, arriving.popleft(), strict=True):
                expected = [publish, number, message.num_bytes]
                data = self._arrived(message, transmission, expected)
                self._pass_on(data)
                pieces += self._take(message, data, expected)
            self._wait_until_passed_on(_AHEAD * len(self._senders))
            if number + _AHEAD < len(self._buckets):
                arriving.append(self._begin(self._buckets[number + _AHEAD]))
            load(_assembled(bucket, pieces))

    def _receive_delta(self, decoder: Decoder, publish: int, load: LoadParts) -> None:
        """Receive an envelope for each message and what it announces, and make the message of both.

        Nothing is under way before its envelope has come: only that says how much is received."""
        for number, bucket in enumerate(self._buckets):
            pieces: list[PlacedNumbers] = []
            for message in bucket.messages:
                expected = [publish, number, message.num_bytes]
                data = self._decoded(decoder, message, expected)
                pieces += self._take(message, data, expected)
            num_transmissions = 2 * len(self._senders)  # envelopes and payloads of a bucket
            self._wait_until_passed_on(_AHEAD * num_transmissions)
            load(_assembled(bucket, pieces))

    def _wait_until_passed_on(self, left: int) -> None:
        """Wait until at most `left` transmissions are on their way to the next worker."""
        while len(self._passing_on) > left:
            self._passing_on.popleft().wait()

    def _take(
        self, message: Message, data: torch.Tensor, expected: list[int]
    ) -> list[PlacedNumbers]:
        """Check a message, note its digests and return its pieces. expected: publish, bucket,
        bytes."""
        self._check_header(message, expected, data)
        key = message_key(self.number, expected[1], message.sender)
        self.digests[key] = message_digest(message, data)
        taken = []
        found = []
        for (part, box), view in zip(message.pieces, message.views(data), strict=True):
            found.append(digest_of(view, part.tensor.name))
            taken.append((part, box, view))
        is_equal = (torch.stack(found) == message.digests(data)).all(1)
        for (part, _), equal in zip(message.pieces, is_equal.tolist(), strict=True):
            if not equal:
                self.changed.append(part.tensor.name)
        return taken

    def _pass_on(self, data: torch.Tensor) -> None:
        """Begin to send what has arrived to the next worker, if there is one."""
        if self._next is not None:
            self._passing_on.append(self._group.send(data, self._next))

    def _decoded(self, decoder: Decoder, message: Message, expected: list[int]) -> torch.Tensor:
        """Receive an envelope and what follows, pass both on, and make the message of them; one
        whose header says that the sender gave up, where the envelope says so."""
        source = self._source(message)
        envelope = Envelope.empty(message_device(self._group.carrier))
        try:
            self._group.receive(envelope.data, source).wait()
        except TransferError:
            if not envelope.is_given_up:
                raise
        self._pass_on(envelope.data)
        if envelope.is_given_up:
            data = torch.zeros_like(self._room(message.num_bytes))
            message.header(data).copy_(torch.tensor([*expected, _ABORT]))
            return data
        _, _, num_bytes = envelope.values
        payload = self._group.receive(self._room(num_bytes), source).wait()
        self._pass_on(payload)
        publish, bucket, _ = expected
        key = (bucket, message.sender)
        return decoder.decode(key, publish, envelope, payload, message.num_bytes)

    def _room(self, num_bytes: int) -> torch.Tensor:
        """Return the memory where a message can arrive."""
        device = message_device(self._group.carrier)
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def _source(self, message: Message) -> int:
        """Return the member from which a message comes: the worker before this one, or its
        sender."""
        source = self._group.rank - 1
        if source < self._group.num_senders:
            source = self._senders.index(message.sender)
        return source

    def _arrived(
        self, message: Message, transmission: Transmission, expected: list[int]
    ) -> torch.Tensor:
        """Wait for a message. Who gives up leaves right behind saying so, and gloo may report that
        the connection was closed although the last word is there."""
        try:
            return transmission.wait()
        except TransferError:
            if message.header(transmission.data).tolist() != [*expected, _ABORT]:
                raise
            return transmission.data

    def _begin(self, bucket: Bucket) -> list[Transmission]:
        """Begin to receive all messages of a bucket, in their order."""
        begun = []
        for message in bucket.messages:
            room = self._room(message.num_bytes)
            begun.append(self._group.receive(room, self._source(message)))
        return begun

    def _check_header(self, message: Message, expected: list[int], data: torch.Tensor) -> None:
        """Raise TransferError where the sender gave up, or is at another place."""
        *got, status = message.header(data).tolist()
        if status == _OK and got == expected:
            return
        for sent in self._passing_on:  # the workers behind this one learn the reason as well
            with suppress(TransferError):
                sent.wait()
        sender = f"trainer rank {message.sender}"
        if status == _ABORT:
            raise TransferError(f"{sender} failed and gave up publish {got[0]}")
        raise TransferError(
            f"{sender} sends publish, bucket, bytes {got} where {self._group.name} "
            f"expects {expected}"
        )


def message_digest(message: Message, data: torch.Tensor) -> str:
    """Return the digest of the digests in a message, as both sides report it: 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(as_bytes(message.digests(data).cpu()))


def _assembled(bucket: Bucket, pieces: Sequence[PlacedNumbers]) -> BucketTensors:
    """Put the parts of a bucket together; what came in one piece is not copied."""
    of_part: dict[tuple[str, Box], torch.Tensor] = {}
    for part, box, numbers in pieces:
        key = (part.tensor.name, part.box)
        if box == part.box:
            of_part[key] = numbers
            continue
        if key not in of_part:
            of_part[key] = numbers.new_empty(part.box.shape)
        box.view_in(part.box, of_part[key]).copy_(numbers)
    tensors: dict[str, tuple[TensorEntry, dict[Box, torch.Tensor]]] = {}
    for part in bucket.parts:
        name = part.tensor.name
        tensors.setdefault(name, (part.tensor, {}))
        tensors[name][1][part.box] = of_part[name, part.box]
    return list(tensors.values())
