"""How fast a run is and how much memory it takes, measured in a process of its own. Read run/loops.py first.

`measure` starts `python -m torchpod.commands.probe`, holds it to its memory, and reads the answer that it prints. That
one builds the loop that `torchpod train` would build, and runs it for some seconds after everything is compiled.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from torchpod.compose import load
from torchpod.config import TrainConfig
from torchpod.distributed import init
from torchpod.host_memory import children, private_bytes, status_bytes
from torchpod.makers import make_agent, make_env
from torchpod.run.loops import make_loop, reports
from torchpod.watched import HostError, close_all, sentence

CPU_SHARE, CUDA_SHARE = 0.8, 0.9
"""Of the memory that is free when a search begins: what its probes may take, unless they are told."""
_LOOK_S = 0.05
"""Between two looks at the memory of a probe."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc", "alloc_failed")


class Answer(NamedTuple):
    """What a probe found."""

    verdict: Literal["fits", "out of memory", "refused"]
    """"refused": the settings cannot work, and `why` says why not."""
    env_steps_per_s: float = 0.0
    """Of whole iterations, updates included; transitions of all members, without resets."""
    compile_s: float = 0.0
    """Before the first iteration: left out of the rate."""
    memory_bytes: int = 0
    """The most at any one time: what the allocator of a GPU gave out, or what the processes of the probe held for
    themselves, without the files that they map."""
    limit_bytes: int = 0
    """What it was held to."""
    cpu_share: float = 1.0
    """What part of the wall time Anakin's one thread had a core; well below 1, other work had it the rest of the time.
    1 where that cannot be told: on a GPU, with actor threads, with several threads."""
    minibatch_rows: int = 0
    """What `algo.learner.chunk_rows` cuts: rows of agents, of the policy that has most. 0 where it changes nothing."""
    why: str = ""


class ProbeError(ValueError):
    """A probe failed, and not for want of memory; the message is its own."""


def measure(overrides: Sequence[str], *, seconds: float, limit: int | None, on_cpu: bool) -> Answer:
    """Runs one probe to its end, in a process of its own.

    Args:
      overrides: of the run, in the grammar of the command line.
      seconds: how long to measure, after compilation and a first call to the device.
      limit: bytes; None: `CUDA_SHARE` of what is free on the GPU. On a CPU a probe that takes more is stopped.
      on_cpu: whether the limit is one of the host's memory.

    Raises:
      ProbeError: if it failed for another reason than memory.
    """
    command = [sys.executable, "-m", "torchpod.commands.probe", json.dumps([list(overrides), seconds, limit])]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err, start_new_session=True)
        try:
            while process.poll() is None:
                if on_cpu and limit is not None and (held := private_bytes(process.pid)) > limit:
                    return Answer("out of memory", memory_bytes=held, limit_bytes=limit, why="stopped at the limit")
                time.sleep(_LOOK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # with what it has started: compilers, workers
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdin:
                process.stdin.close()
        out.seek(0)
        err.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("{")]
        told = [line.strip() for line in err.read().splitlines() if line.strip()]
    if lines:
        fields = json.loads(lines[-1])
        if "error" in fields:
            raise ProbeError(fields["error"])
        return Answer(**fields)
    if process.returncode == -signal.SIGKILL:  # by the kernel: nobody else did
        return Answer("out of memory", why="killed by the system")
    if os.environ.get("TORCHPOD_TRACEBACK") == "1":
        print("\n".join(told), file=sys.stderr)
    end = f"by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else f"({process.returncode})"
    raise ProbeError(f"a probe ended {end}: {told[-1] if told else 'it said nothing'}")


# --- The process of the probe -----------------------------------------------------------------------------------------


def main(argument: str) -> None:
    """Prints one line of JSON."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    with contextlib.suppress(OSError):  # if memory ends after all, the kernel takes this process and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    print(json.dumps(answer(*json.loads(argument))), flush=True)
    os._exit(0)  # threads and workers of environments are not waited for


def answer(overrides: Sequence[str], seconds: float, limit: int | None) -> dict[str, Any]:
    """What `measure` asks for, in this process: the fields of an `Answer`, or `error`."""
    try:
        return _probe(load(overrides), seconds, limit)._asdict()
    except Exception as error:
        if os.environ.get("TORCHPOD_TRACEBACK") == "1":
            traceback.print_exc()
        return _told(error)


def _end_with_the_parent() -> None:
    """Waits until the other end of standard input is closed, which the end of the parent does."""
    os.read(0, 1)
    os._exit(1)


def _probe(config: TrainConfig, seconds: float, limit: int | None) -> Answer:
    """Trains until `seconds` have been measured."""
    ranks, device = init(config.device)
    torch.set_num_threads(config.threads or 1)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        limit = limit or int(CUDA_SHARE * free)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    env = make_env(config.env)
    loop = make_loop(config, env, make_agent(config.algo, env.spec), ranks, device)
    compile_s, before, env_steps, wall_s, began = None, 0, 0, 0.0, 0.0
    with contextlib.closing(reports(config, loop, loop.init(config.seed), until=sys.maxsize)) as calls:
        for report, _ in calls:
            now = int(np.sum(report.env_steps))
            if compile_s is None:  # the first call fills caches, queues and replay
                compile_s, began = report.compile_s, time.process_time()
            else:
                env_steps, wall_s = env_steps + now - before, wall_s + report.wall_s
            before = now
            if wall_s >= seconds:
                break
        cpu_s = time.process_time() - began
        alone = device.type == "cpu" and config.loop.name == "anakin" and torch.get_num_threads() == 1
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _most_held()
    close_all([env])
    return Answer(
        "fits",
        env_steps_per_s=env_steps / wall_s,
        compile_s=compile_s or 0.0,
        memory_bytes=memory,
        limit_bytes=limit or 0,
        cpu_share=min(1.0, cpu_s / wall_s) if alone else 1.0,
        minibatch_rows=0 if loop.agent.replayed else loop.learner.dealer.minibatch_rows,
    )


def _most_held() -> int:
    """The most that this process has held for itself so far, and what its workers hold now."""
    own = os.getpid()
    return status_bytes(own, "VmHWM") - status_bytes(own, "RssFile") + sum(map(private_bytes, children(own)))


def _told(error: Exception) -> dict[str, Any]:
    """An exception as the fields of an `Answer`, or as `error`."""
    chain: list[BaseException] = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(cause)
    for each in chain:
        if isinstance(each, MemoryError) or any(text in str(each).lower() for text in _OUT_OF_MEMORY):
            return Answer("out of memory", why=sentence(each).splitlines()[0])._asdict()
    if isinstance(error, ValueError):
        return Answer("refused", why=str(error))._asdict()
    if isinstance(error, HostError | OSError | ImportError) and str(error):
        return {"error": str(error)}
    return {"error": f"{sentence(error)} TORCHPOD_TRACEBACK=1 shows where."}


if __name__ == "__main__":
    main(sys.argv[1])
