"""Context managers that close at their end."""

from typing import Self


class Closeable:
    """Base of objects with a method `close`, which the end of a `with` statement calls."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the object holds."""
        raise NotImplementedError
