"""The `gradrein` command: its options.

Apart from the package, because importing that imports torch: `gradrein --help` answers at once.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

_FAIL_ON = "exit with 99 if there is one of these findings, such as unsettled,nonfinite; any: any finding"

_VERBOSE = "print every finding with its evidence and every change, not only the most important"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code; `watch` ends as the script ends."""
    options = _parser().parse_args(argv)
    if options.command == "selftest":
        from gradrein import selftest

        return selftest.main(options.device, options.output)
    from gradrein.watch.command.cli import run

    return run(options)


class _ShowVersion(argparse.Action):
    """Print the versions of gradrein, torch and Python, and how clipping runs on the CPU; then exit."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Print and exit."""
        from gradrein.watch.command.versions import versions

        print(versions())
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradrein", description="Find out why a training run is unstable, and stabilise it."
    )
    parser.add_argument("--version", action=_ShowVersion, help="show versions, and whether the C kernel is used")
    commands = parser.add_subparsers(dest="command", required=True)
    watch = commands.add_parser("watch", help="run a training script unchanged, record it, and report what was found")
    watch.add_argument(
        "--clip", metavar="HOW", help='clip gradients at a norm such as 1.0, or by a policy: "auto", "zscore", ...'
    )
    watch.add_argument("--every", type=int, default=1, metavar="N", help="record every N-th step (default: every step)")
    watch.add_argument(
        "--record", metavar="FILE", help="the record to write (default: SCRIPT.gradrein.jsonl, numbered if taken)"
    )
    watch.add_argument(
        "--anomaly", action="store_true", help="stop at the first NaN, and name its operation, module and source line"
    )
    watch.add_argument("--lr-scale", type=float, metavar="F", help="multiply every learning rate by F, such as 0.33")
    watch.add_argument("--steps", type=int, metavar="N", help="end the script after N optimizer steps")
    watch.add_argument("--seed", type=int, metavar="S", help="seed random, numpy and torch before the script begins")
    watch.add_argument(
        "--try",
        dest="trial",
        action="store_true",
        help="run the script as it is, then with the best two or three changes, and compare them",
    )
    watch.add_argument(
        "--time",
        type=float,
        default=1800.0,
        metavar="S",
        help="with --try: time limit in seconds for all runs together (default 1800)",
    )
    watch.add_argument("--verbose", action="store_true", help=_VERBOSE)
    watch.add_argument("--fail-on", metavar="NAMES", help=_FAIL_ON)
    watch.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    watch.add_argument("script", help="the script, or with -m the name of a module")
    watch.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    report = commands.add_parser("report", help="report on a record, and write an HTML page")
    report.add_argument(
        "record",
        nargs="+",
        help="a record, or that of one of several ranks; two runs are compared (before, after)",
    )
    report.add_argument("--json", action="store_true", help="print JSON, write no page")
    report.add_argument("--text", action="store_true", help="print only, write no page")
    report.add_argument("--verbose", action="store_true", help=_VERBOSE)
    report.add_argument("-o", "--output", metavar="FILE", help="the page to write (default: beside the record, .html)")
    report.add_argument("--fail-on", metavar="NAMES", help=_FAIL_ON)
    report.add_argument(
        "--optimizer", type=int, metavar="I", help="report only on this optimizer, if the run has several"
    )
    selftest = commands.add_parser("selftest", help="check and time gradrein on a device, and write one file to attach")
    selftest.add_argument(
        "--device", help="such as cuda, cuda:1, mps or cpu (default: an accelerator, if there is one)"
    )
    selftest.add_argument("-o", "--output", metavar="FILE", help="the file (default: gradrein-selftest-DEVICE.json)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
