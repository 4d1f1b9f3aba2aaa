"""A publish that arrives in host memory while the engine decodes, to be loaded in a pause."""

from collections import deque
from collections.abc import Iterator
from threading import Thread

import torch

from grpo_megatron.weights.transfer import BucketTensors, StreamReceiver


class StagedPublish:
    """Receives publish `number` in a thread of its own, which begins at once.

    Of the receiver's messages none is copied: they stay until `take` has given them away. Only
    messages in host memory may come so: a GPU has no room beside its weights, and two groups of
    NCCL on one GPU may wait for each other."""

    def __init__(self, receiver: StreamReceiver, number: int):
        self.number = number
        self._receiver = receiver
        self._buckets: deque[BucketTensors] = deque()
        self._error: Exception | None = None
        self._thread = Thread(target=self._receive, name="staged-publish", daemon=True)
        self._thread.start()

    def take(self) -> Iterator[BucketTensors]:
        """Wait until all has come, and yield the tensors of bucket after bucket, each once.

        Raises what ended the transfer."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        while self._buckets:
            yield self._buckets.popleft()

    def _receive(self) -> None:
        try:
            with torch.no_grad():
                self._receiver.receive(self.number, self._buckets.append)
        except Exception as error:  # whatever it is: half a publish is none
            self._error = error
