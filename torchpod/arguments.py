"""The options of a command."""

import argparse
import tempfile
from pathlib import Path
from typing import NoReturn

from torchpod.config import ConfigError


class Parser(argparse.ArgumentParser):
    """As argparse has it, but what is wrong is a `ConfigError` of one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raises it."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help shows what it takes.")


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
