"""Tests hostile files, links, limits of the process, and strangers (processes outside the job) on the network. None of
them may cause a signal, a hang, unlimited use of memory, or a change outside of the folder of a case.

    Usage: python3 hostile_test.py path/to/hostile_commands.so path/to/tessera [--all] [-k PART_OF_A_NAME] [-v] [--list]

Cases come from tables. A case is a place, and a way in which this place is hostile. Only a sample of the cases runs
unless --all or TESSERA_LONG_TESTS is given. The sample has SAMPLE cases, which are chosen so that they cover as many
pairs of a place, a family of ways and a command as possible. A seed decides which cases are drawn.
"""

import argparse
import collections
import itertools
import os
import pathlib
import random
import sys
import tempfile
import time

import machine
from files import file_cases
from limits import limit_cases
from links import link_cases
from machine import MIB
from network import network_cases
from seeds import make_seeds

FEWEST, SAMPLE, SEED = 500, 60, 49


def all_cases():
    cases = [*file_cases(), *link_cases(), *limit_cases(), *network_cases()]
    counts = collections.Counter(case.name for case in cases)
    twice = [name for name, count in counts.items() if count > 1]
    assert not twice, twice
    assert len(cases) >= FEWEST, f"{len(cases)} cases, want {FEWEST}"
    return cases


def pairs_of(case):
    """Returns the pairs of group, place, family and command in this case."""
    return set(itertools.combinations([("group", case.group), ("place", case.place), ("kind", case.kind), ("command", case.command)], 2))


def sample_of(cases):
    """Returns SAMPLE cases. Each next case covers as many new pairs as possible."""
    rng, shown, chosen = random.Random(SEED), set(), []
    left = [(case, pairs_of(case)) for case in rng.sample(cases, len(cases))]
    groups = collections.Counter(case.group for case in cases)
    share = {group: max(SAMPLE // 12, SAMPLE * count // len(cases)) for group, count in groups.items()}
    while left and len(chosen) < SAMPLE:
        open_groups = [group for group in groups if sum(case.group == group for case in chosen) < share[group]] or list(groups)
        case, pairs = max((each for each in left if each[0].group in open_groups), key=lambda each: len(each[1] - shown))
        left = [each for each in left if each[0] is not case]
        shown |= pairs
        chosen.append(case)
    return chosen


def peak_of_nothing(commands):
    process = machine.Process(lambda: commands.run_and_exit(["--version"]))
    while not process.look():
        time.sleep(0.01)
    assert process.end.code == 0, process.end
    return process.end.peak


def make_good(commands, folder):
    def run(words):
        def body():
            os.chdir(folder)
            os.environ["OMP_NUM_THREADS"] = "1"
            commands.run_and_exit(words)
        process = machine.Process(body)
        while not process.look():
            time.sleep(0.01)
        assert process.end.code == 0, f"{words}: {process.end}"
    folder.mkdir()
    make_seeds(folder, run)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("commands")
    parser.add_argument("tessera", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--all", action="store_true", default=bool(os.environ.get("TESSERA_LONG_TESTS")))
    parser.add_argument("-k", default="", help="only cases with this in their name")
    parser.add_argument("-v", action="store_true", help="show what each said")
    parser.add_argument("--list", action="store_true", help="the cases, and nothing runs")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    cases = all_cases()
    whole = len(cases)
    if not options.all and not options.k:
        cases = sample_of(cases)
    cases = [case for case in cases if options.k in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    is_root = os.getuid() == 0
    mounts = machine.can_mount()
    skipped = [case for case in cases if (case.as_nobody and not is_root) or (case.disk and not mounts)]
    cases = [case for case in cases if case not in skipped]
    commands = machine.Commands(options.commands)
    failed, slowest, busiest, highest = [], [], [], []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tessera-hostile-") as name:
        work = pathlib.Path(name)
        work.chmod(0o755)
        make_good(commands, work / "seeds")
        least = peak_of_nothing(commands)
        for case, bad, running in machine.run_all(cases, commands, options.tessera, work / "seeds", work, options.j, least):
            seconds = time.monotonic() - running.begun
            slowest.append((seconds, case.name))
            busiest.append((sum(process.end.cpu for process in running.processes), case.name))
            highest.append((max(process.end.peak for process in running.processes) - least, case.name))
            if bad:
                failed.append(case.name)
            if bad or options.v:
                print(f"{'BAD ' if bad else 'ok  '}{case.name}: {'; '.join(bad)}\n  $ tessera {' '.join(case.words)}", flush=True)
                if running.stranger and running.stranger.data:
                    print(f"  the stranger: {running.stranger.data.decode(errors='replace')[:500]}")
                for rank, process in enumerate(running.processes):
                    print(f"  code {process.end.code}, {seconds:.1f} s\n" + "".join(f"  | {line[:300]}\n" for line in process.end.text[-2500:].splitlines()),
                          end="", flush=True)
    counts = collections.Counter(case.group for case in cases)
    print(f"{len(cases)} of {whole} cases ({', '.join(f'{count} of {group}' for group, count in sorted(counts.items()))}): {len(failed)} bad, "
          f"{len(skipped)} skipped for want of root's rights; {time.monotonic() - begun:.0f} s")
    print("slowest: " + "; ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(slowest, reverse=True)[:5]))
    print("most work: " + "; ".join(f"{name} {seconds:.1f} s" for seconds, name in sorted(busiest, reverse=True)[:5]))
    print("most memory: " + "; ".join(f"{name} {peak / MIB:.0f} MiB" for peak, name in sorted(highest, reverse=True)[:5]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
