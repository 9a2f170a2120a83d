"""Where the time of an iteration goes: the functions of a program, timed call by call (`anakin_worker --profile`)."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torchpod.compile import Compiler
from torchpod.kernels.cpu_calls import Unroll
from torchpod.kernels.inductor import Compiled


class Clock(Compiler):
    """A compiler whose functions keep the time of their calls: where an iteration goes."""

    def __init__(self, enabled: bool, population: int = 1) -> None:
        super().__init__(enabled, population)
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """See `Compiler`."""
        compiled = super().__call__(fn, **options)
        return _Timed(compiled, self.seconds.setdefault(fn.__qualname__, []))

    def recorded(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """See `Compiler`. What is one call keeps the time of that; else its parts keep theirs."""
        recorded, seconds = super().recorded(fn), self.seconds.setdefault(fn.__qualname__, [])

        def timed(*args: Any) -> Any:
            before, began = self._num_calls(), time.perf_counter()
            result = recorded(*args)
            elapsed = time.perf_counter() - began
            if self._num_calls() == before:
                seconds.append(elapsed)
            return result

        return timed

    def _num_calls(self) -> int:
        return sum(map(len, self.seconds.values()))

    def table(self, wall_s: float) -> str:
        """Share, calls and microseconds per call of each function within the last `wall_s` seconds of calls."""
        lines, rest = [], wall_s
        for name, all_calls in sorted(self.seconds.items(), key=lambda item: -sum(item[1])):
            total = sum(all_calls)
            rest -= total
            if all_calls:
                lines.append(
                    f"{total / wall_s:6.1%} {len(all_calls):7d} x {1e6 * total / len(all_calls):9.1f} us  {name}"
                )
        return "\n".join([*lines, f"{rest / wall_s:6.1%} between the calls"])


class _Timed(Compiled):
    """A compiled function that keeps the time of its calls, and of unrolls as if they were one."""

    def __init__(self, compiled: Callable[..., Any], seconds: list[float]) -> None:
        self._compiled, self._seconds = compiled, seconds

    def __call__(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self._compiled(*args)
        self._seconds.append(time.perf_counter() - began)
        return result

    def loop(self, args: tuple[Any, ...]) -> Any:
        looped = self._compiled.loop(args) if isinstance(self._compiled, Compiled) else None
        if looped is None:
            return None
        loop, inputs = looped
        return _TimedLoop(loop, self._seconds), inputs


class _TimedLoop(NamedTuple):
    loop: Unroll
    seconds: list[float]

    def run(self, *args: Any) -> Any:
        began = time.perf_counter()
        result = self.loop.run(*args)
        self.seconds.append(time.perf_counter() - began)
        return result
