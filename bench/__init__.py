"""Benchmarks: `torchpod bench SUITE`. Each suite is a module with `main(json_path, **knobs) -> exit status`."""

import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchpod.arguments import Parser, require_writable

if __name__ == "bench":
    raise ImportError("import torchpod.bench, not bench")

# Suite -> module of this package; read when it is asked for, so that one suite never needs what another imports.
SUITES = {
    name: name
    for name in (
        *("agents", "anakin", "brax", "envs", "gpu", "learning", "losses", "lowered", "multiagent", "population"),
        *("replay", "reuse", "scaling", "sebulba"),
    )
}

HAVE_PARTS = tuple(name for name in SUITES if name not in ("reuse", "scaling"))
"""Suites that know `--only`."""


def main(argv: Sequence[str]) -> int:
    """Runs `torchpod bench SUITE [--json FILE] [--quick] [--only NAME]` or `torchpod bench report`.

    The exit status is 1 if a side failed, a peer was slower than its stated figure, the two sides did unequal work or
    learned unlike each other, a row missed its target, or, unless with `--json` or `--quick`, was better by more than a
    tenth when it was last measured on such a machine (a fifth without a peer); 2 if nothing was measured, for want of a
    GPU. SIGTERM ends a suite with its workers.

    Raises:
      ValueError: if an option is not for this suite, or its results could not be written; before anything is measured.
    """
    parser = Parser("torchpod bench", description="Runs one suite of benchmarks.")
    parser.add_argument("suite", choices=[*sorted(SUITES), "report"])
    parser.add_argument("--json", metavar="FILE", help="write the rows here instead of bench/results/")
    parser.add_argument("--quick", action="store_true", help="one size, two short rounds: does it work at all?")
    parser.add_argument(
        "--only",
        metavar="NAME[,NAME]",
        help=f"of {', '.join(HAVE_PARTS)}: the rows, of sebulba the environments, whose names begin so",
    )
    args = parser.parse_args(argv)
    report, harness = (importlib.import_module(f"{__name__}.{name}") for name in ("report", "harness"))
    if not (harness.ROOT / "bench" / "peers").is_dir():
        raise ValueError(
            "torchpod bench measures a checkout, and this is an installed package: clone the repository, and run `make "
            "bench` there."
        )
    if args.suite == "report":
        if others := [x for x in argv if x != "report"]:
            raise ValueError(f"torchpod bench report renders all results and takes no {others[0]}: leave it out.")
        return report.main()
    if args.only is not None and args.suite not in HAVE_PARTS:
        told = f"{', '.join(HAVE_PARTS[:-1])} and {HAVE_PARTS[-1]}"
        raise ValueError(f"--only {args.only!r} is for the suites {told}; {args.suite} is run whole.")
    require_writable("--json", harness.RESULTS / "x.json" if args.json is None else Path(args.json))
    options = {} if args.only is None else {"only": args.only}
    suite = importlib.import_module(f"{__name__}.{SUITES[args.suite]}")
    with _ended_by_sigterm():
        status = suite.main(args.json, quick=args.quick, **options)
    if status == 2:
        return 2
    worse = report.regressed(args.suite) if args.json is None and not args.quick else []
    for sentence in worse:
        print(f"torchpod bench: {sentence}", file=sys.stderr)
    return 1 if status or worse else 0


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is an exception here, or the workers, in sessions of their own, would go on; in the main thread alone."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
