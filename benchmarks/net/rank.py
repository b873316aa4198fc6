#!/usr/bin/env python3
"""One rank on a host of scripts/net_lab. This program runs a command, stores its output, and counts the bytes that the
host's link carries in the timed steps. It uses the standard library only.

    rank.py --folder DIR --first A --last B -- COMMAND...

{rank} in an argument of COMMAND becomes the rank's number. DIR/rank.N.out and .err are the output of rank N's command.
DIR/rank.N.json is written when the command has ended:

    {"code", "ended", "link": {"sent", "received"} or null}

link: bytes of the host's link, all its ranks together and with all headers, between the ends of steps A and B. Steps
are counted from 1, in DIR/metrics.0.jsonl, which rank 0 writes. Only a host's first rank counts these bytes; the other
ranks write null. All hosts see the files of this machine.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

POLL_S = 0.02  # a step takes a fraction of a second, and no transfer is under way at its end


def link_bytes(link):
    """Returns {"sent", "received"} of this host's link, since the link was made."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == link:
            numbers = numbers.split()
            return {"sent": int(numbers[8]), "received": int(numbers[0])}
    raise SystemExit(f"rank: no link {link} here")


class StepCounter:
    """Counts the steps of a metrics file that another process writes."""

    def __init__(self, path):
        self._path = path
        self._file = None
        self._rest = ""
        self.steps = 0

    def look(self):
        if self._file is None:
            if not self._path.exists():
                return
            self._file = open(self._path)
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        self.steps += sum("step" in json.loads(line) for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--last", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    rank = os.environ["RANK"]
    stem = f"rank.{rank}"
    with open(options.folder / f"{stem}.out", "w") as out, open(options.folder / f"{stem}.err", "w") as err:
        process = subprocess.Popen([word.replace("{rank}", rank) for word in options.command[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    before = after = None
    if os.environ["LOCAL_RANK"] == "0":
        counter = StepCounter(options.folder / "metrics.0.jsonl")
        while process.poll() is None and after is None:
            time.sleep(POLL_S)
            counter.look()
            if before is None and counter.steps >= options.first:
                before = link_bytes(os.environ["GLOO_SOCKET_IFNAME"])
            if counter.steps >= options.last:
                after = link_bytes(os.environ["GLOO_SOCKET_IFNAME"])
    code = process.wait()
    link = {way: after[way] - before[way] for way in before} if after else None
    (options.folder / f"{stem}.json").write_text(json.dumps({"code": code, "ended": time.time(), "link": link}))
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
