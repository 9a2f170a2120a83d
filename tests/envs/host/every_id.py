"""Steps every registered id of EnvPool or Gymnasium by the contract, which is too long for a test (an hour).

    python -m tests.envs.host.every_id envpool|gymnasium [--only PREFIX] [--skip N] [--jobs J] [--timeout S]

Each id is made, reset and stepped in copies of two environments by `check_env`. It prints an id a line: `ok`, what it
was refused with, or how it ended its process (`died`) or hung (`timeout`); exits with 1 if there is a line of the
last two kinds, or one with an error that is no refusal.
"""

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator

REFUSED = (ValueError, ImportError)
"""What a class of ours raises of what it cannot take."""
BATCH = 8
"""Ids of a process; what comes after one that dies has another."""


def ids(kind: str) -> list[str]:
    """All that are registered."""
    if kind == "envpool":
        import envpool

        return sorted(envpool.list_all_envs())
    import gymnasium

    return sorted(gymnasium.registry)


def play(kind: str, name: str) -> str:
    """`ok`, or what went wrong."""
    from torchpod.envs import host
    from torchpod.testing import ContractError, check_env

    try:
        env = (host.EnvPool if kind == "envpool" else host.Gymnasium)(name)
    except REFUSED as error:
        return f"refused: {error}"
    try:
        check_env(env, num_envs=2, num_steps=20, compile=False)
    except ContractError as error:
        return f"error: breaks the contract: {error}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    finally:
        env.close()
    return "ok"


def child(kind: str, names: list[str], told: int) -> None:
    """Plays them in this process; a line each to a pipe."""
    warnings.simplefilter("ignore")
    os.set_inheritable(told, False)  # a simulator that outlives this process would keep it open
    with open(told, "w", buffering=1) as lines:
        for name in names:
            print(play(kind, name).replace("\n", " "), file=lines)


def played(kind: str, names: list[str], timeout_s: float) -> Iterator[tuple[str, str]]:
    """Each with its line, from as many processes as it takes."""
    while names:
        read, write = os.pipe()
        command = [sys.executable, "-m", __spec__.name, kind, *names, "--child", str(write)]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, pass_fds=(write,), start_new_session=True, **silent)
        os.close(write)
        late = threading.Event()
        with open(read) as lines:
            while names:
                timer = threading.Timer(timeout_s, lambda process=process, late=late: (late.set(), kill(process)))
                timer.start()
                line = lines.readline().strip()
                timer.cancel()
                if late.is_set():
                    line = f"timeout: {timeout_s:g} s"
                ended = late.is_set() or not line
                yield names.pop(0), line or f"died: status {process.wait()}"
                if ended:
                    break
        kill(process)
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["envpool", "gymnasium"])
    parser.add_argument("names", nargs="*", help="these alone")
    parser.add_argument("--only", default="", help="ids that begin so")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for an id")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args.kind, args.names, args.child)
        return 0
    names = args.names or [name for name in ids(args.kind) if name.startswith(args.only)][args.skip :]
    parts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for i in range(0, len(names), BATCH):
        parts.put(names[i : i + BATCH])
    kinds: Counter[str] = Counter()

    def work() -> None:
        while True:
            try:
                part = parts.get_nowait()
            except queue.Empty:
                return
            for name, line in played(args.kind, part, args.timeout):
                kinds[line.partition(":")[0]] += 1
                print(f"{name}\t{line}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(args.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(names)} ids: {', '.join(f'{number} {kind}' for kind, number in kinds.most_common())}")
    return int(not set(kinds) <= {"ok", "refused"})


if __name__ == "__main__":
    sys.exit(main())
