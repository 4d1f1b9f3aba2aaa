"""Images of a run or of a recorded step: files named by the digests of their bytes."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from grpo_megatron.errors import DataError
from grpo_megatron.files import link_or_copy, sync
from grpo_megatron.images import digest_of

IMAGES = "images"
"""The folder's name, in a run and in each recorded step."""


class ImageFolder:
    """Keeps every image once. Files are whole, and never change."""

    def __init__(self, path: Path):
        self.path = path
        self._kept: set[str] = set()

    def keep(self, content: bytes) -> str:
        """Write the bytes of an image, unless the folder has them; returns their digest. What an
        earlier process left is read once, and replaced where it is damaged.

        Not durably: a run that begins anew keeps them again. Threads may keep the same image."""
        digest = digest_of(content)
        if digest not in self._kept:
            self._write_unless_there(self.path / digest, content)
            self._kept.add(digest)
        return digest

    def _write_unless_there(self, file: Path, content: bytes) -> None:
        if file.exists() and file.read_bytes() == content:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as partial:
            partial.write(content)
        Path(partial.name).replace(file)

    def read(self, digest: str) -> bytes:
        """The bytes of an image. DataError where they are not there, or are others."""
        file = self.path / digest
        remedy = "delete the step; it is sampled anew"
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read an image: {error}", where=str(file), remedy=remedy
            ) from error
        if digest_of(content) != digest:
            raise DataError("the image is not the one of its name", where=str(file), remedy=remedy)
        return content

    def link_to(self, other: "ImageFolder", digests: Iterable[str]) -> None:
        """Give some images names in another folder, durably; bytes are copied only where the file
        system has no hard links. DataError where one is missing."""
        other.path.mkdir(parents=True, exist_ok=True)
        for digest in sorted(set(digests)):
            target = other.path / digest
            if target.exists():
                continue
            try:
                sync(self.path / digest)
                link_or_copy(self.path / digest, target)
            except FileNotFoundError as error:
                raise DataError(
                    f"the image {digest} is not there",
                    where=str(self.path),
                    remedy="start the run anew: it keeps the images of its prompts there",
                ) from error
        sync(other.path)
