"""`Boat` of docs/write-an-environment.md, which overrides `step` and keeps what `TensorEnv` adds to its state."""

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "write-an-environment.md"
BLOCK = re.search(r"^# my_boat\.py\n.*?(?=^```$)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
assert BLOCK is not None
NAMES: dict[str, Any] = {}
exec(compile(BLOCK[0], str(PAGE), "exec"), NAMES)
Boat = NAMES["Boat"]
