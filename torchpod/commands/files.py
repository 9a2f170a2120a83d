"""Files that a command writes: looked at before the work, and there whole or as they were before."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torchpod.config import ConfigError


def require_writable(option: str, path: Path) -> None:
    """That a file can be written, before there is something to lose; its folder is made.

    Raises:
      ConfigError: if it cannot.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written ({error.strerror or error}); name a file in a folder that you may "
            "write to."
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place when the block ends; if that fails, all is as it was.

    Raises:
      OSError: names `path`.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield part
        part.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):  # as where its folder is a file
            part.unlink()
