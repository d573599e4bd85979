"""A few hundred launches of the kernel in one small process, for compute-sanitizer to watch.

`make sanitize` runs it under memcheck, racecheck and initcheck. The steps are those of tests/cases.py, hostile ones
first, with new values in every round; each is compared with the oracle too. The exit status is 1 when a byte differs.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import jax
from cases import CASES, check_case


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rounds and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", default=5, type=int, metavar="N", help="launches of each case and layout")
    parser.add_argument("--seed", default=0, type=int, help="of the first round")
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases whose names hold this")
    parser.add_argument("--implementation", default="mosaic_gpu", choices=["mosaic_gpu", "xla"])
    args = parser.parse_args(argv)
    print(f"{args.implementation} on {jax.devices()[0].device_kind}, JAX {jax.__version__}, seed {args.seed}")
    cases = [case for case in CASES if args.match in case.name]
    launches = 0
    for case in sorted(cases, key=lambda case: case.tables != "rubbish"):
        for layout in case.layouts:
            for seed in range(args.seed, args.seed + args.rounds):
                try:
                    check_case(args.implementation, dataclasses.replace(case, seed=case.seed + seed), layout)
                except AssertionError as error:
                    print(f"WRONG: {case.name}, {layout}, seed {case.seed + seed}: {error}")
                    return 1
                launches += 1
            print(f"{case.name}, {layout}: {args.rounds} launches agree with the oracle", flush=True)
    print(f"OK: {launches} launches")
    return 0


if __name__ == "__main__":
    sys.exit(main())
