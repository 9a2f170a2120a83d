"""Benchmarks: `torchpod bench SUITE`. Each suite is a module with `main(json_path, **knobs) -> exit status`."""

import importlib
import sys
from collections.abc import Sequence

from torchpod.arguments import Parser

if __name__ == "bench":
    raise ImportError("import torchpod.bench, not bench")

# Suite -> module of this package; read when it is asked for, so that one suite never needs what another imports.
SUITES = {
    name: name
    for name in (
        *("agents", "anakin", "brax", "envs", "gpu", "losses", "lowered", "multiagent", "population", "replay"),
        "reuse",
        "scaling",
        "sebulba",
    )
}

HAVE_PARTS = ("agents", "anakin", "brax", "envs", "gpu", "losses", "lowered", "multiagent", "replay")
"""Suites that know `--only`."""


def main(argv: Sequence[str]) -> int:
    """Runs `torchpod bench SUITE [--json FILE] [--quick]` or `torchpod bench report`; returns the exit status.

    The status is 1 if a side failed, a peer was slower than its stated figure, the two sides did unequal work, a row
    missed its target, or, unless with `--json` or `--quick`, was better by more than a tenth when it was last measured
    on such a machine (a fifth without a peer).
    """
    parser = Parser("torchpod bench", description="Runs one suite of benchmarks.")
    parser.add_argument("suite", choices=[*sorted(SUITES), "report"])
    parser.add_argument("--json", metavar="FILE", help="write the rows here instead of bench/results/")
    parser.add_argument("--quick", action="store_true", help="one size, two short rounds: does it work at all?")
    parser.add_argument(
        "--only", metavar="NAME[,NAME]", help=f"of {', '.join(HAVE_PARTS)}: the rows whose names begin so"
    )
    args = parser.parse_args(argv)
    if args.only and args.suite not in HAVE_PARTS:
        told = f"{', '.join(HAVE_PARTS[:-1])} and {HAVE_PARTS[-1]}"
        raise ValueError(f"--only {args.only} is for the suites {told}; {args.suite} is run whole.")
    report = importlib.import_module(f"{__name__}.report")
    if args.suite == "report":
        return report.main()
    options = {"only": args.only} if args.only else {}
    suite = importlib.import_module(f"{__name__}.{SUITES[args.suite]}")
    status = suite.main(args.json, quick=args.quick, **options)
    worse = [] if args.json or args.quick else report.regressed(args.suite)
    for sentence in worse:
        print(f"torchpod bench: {sentence}", file=sys.stderr)
    return 1 if status or worse else 0
