"""A part of a file, to be read by whoever needs it. No numpy here: reward processes read texts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes [start, start + size) of the file `path`."""

    path: str
    start: int
    size: int

    def read(self) -> bytes:
        """Return the bytes. Raises OSError where the file is gone, EOFError where it is shorter."""
        with open(self.path, "rb") as file:
            file.seek(self.start)
            found = file.read(self.size)
        if len(found) != self.size:
            raise EOFError(f"{self.path} ends before byte {self.start + self.size}")
        return found

    def text(self) -> str:
        """Read it as text. Halves of surrogate pairs, which a sampled text may hold, are kept."""
        return self.read().decode("utf-8", "surrogatepass")
