"""dtk and its peers on slow links: `dtk bench` on hosts of their own, once for each link speed.

    python benchmarks/network.py                                     # 1000 and 100 Mbit/s
    python benchmarks/network.py --mbit 100 --model mlp resnet20 --peer torch tf_keras
    python benchmarks/network.py --workers 2 --mbit 0 --steps 20     # processes on loopback

Workers are network namespaces, whose links carry --mbit Mbit/s each way (tc, token bucket). They
share the cores of one machine, and each computes with one thread. What computing takes there is in
the rows of the limits; what is on top of it is the network's, and dtk's or the peer's.

A slow link makes slow steps: without --steps a turn has one for every 100 Mbit/s, and 2 at least;
20 on loopback.

Needs root and iproute2. Writes what `dtk bench` measured on each link (JSON, and a plot where there
is matplotlib), and all tables as one page of Markdown.
"""

import argparse
import importlib.util
import os
from pathlib import Path

import hosts

parser = argparse.ArgumentParser(description="`dtk bench` on links of limited speed.")
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100], help="0: loopback")
parser.add_argument("--model", nargs="+", default=["mlp"], help="of `dtk bench`")
parser.add_argument(
    "--exchange",
    nargs="+",
    default=["none", "fp16", "8bit", "1bit", "block:1024"],
    help="of `dtk bench`; 1024 rows are 8 steps of 4 workers",
)
parser.add_argument("--peer", nargs="*", default=["torch"], help="of `dtk bench`; none for none")
parser.add_argument("--batch-size", type=int, default=32, help="per worker")
parser.add_argument("--steps", type=int, help="of a turn")
parser.add_argument("--rounds", type=int, default=3, help="turns of each")
parser.add_argument("--output", type=Path, default=Path("network"), help="folder of the results")
args = parser.parse_args()


def measure(mbit):
    """`dtk bench` on links of so many Mbit/s; its tables, with a title."""
    name = f"{mbit}mbit" if mbit else "loopback"
    page = args.output / f"{name}.md"
    steps = max(2, (mbit or 2000) // 100) if args.steps is None else args.steps
    options = [f"--batch-size={args.batch_size}", f"--steps={steps}", f"--rounds={args.rounds}"]
    for option in ("model", "exchange", "peer"):
        options += [f"--{option}={value}" for value in getattr(args, option)]
    options += [f"--markdown={page}", f"--json={page.with_suffix('.json')}"]
    if importlib.util.find_spec("matplotlib"):
        options.append(f"--plot={page.with_suffix('.svg')}")
    hosts.dtk("bench", options, args.workers, mbit, hosts.ONE_THREAD, burst=hosts.burst_of(mbit))
    return f"## {title(mbit)}\n\n{page.read_text()}"


def title(mbit):
    link = f"links of {mbit} Mbit/s (tc tbf)" if mbit else "loopback"
    cores = len(os.sched_getaffinity(0))
    return f"{args.workers} workers, {link}, one thread each; {cores} cores in all"


def main():
    args.output.mkdir(parents=True, exist_ok=True)
    pages = []
    for mbit in args.mbit:
        pages.append(measure(mbit))
        print(pages[-1], flush=True)
    (args.output / "network.md").write_text("\n".join(pages))


main()
