"""Runs every row of rows.py against the `tessera` command, several at a time.

    Usage: python3 odd_inputs_test.py path/to/tessera [--commands path/to/libhostile_commands.so] [--all] [-k PART_OF_A_NAME] [-v]

If --commands is given, starter.py starts the rows of tessera-train that change no environment variable.

A row is bad if the program crashes or hangs, ends with another exit code, prints "internal error", or prints without
limit. It is also bad if the program does not name the mistake, or changes a file that it must not change. A row is poor
if the exit code is right but the message has no remedy. Poor rows are marked in the table, and at most MOST_POOR of
them are allowed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import rows
import starter

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from free_port import free_port  # noqa: E402
from patience import patient  # noqa: E402

FEWEST_ROWS, MOST_POOR = 271, 10
HANGS_AFTER_S = 60  # seconds on an idle machine (tests/support/patience.py); each row takes less than 5 s
MOST_BYTES = 20_000
NOBODY = 65534
FORKED = {"train", "replay", "serve", "sample", "tokenize", "plan", "simulate", "checkpoint"}  # commands of tessera-train
INPUTS = ["model.json", "strategy.json", "text", "held_out", "weights.pt"]
HINT = re.compile(r"hint:|did you mean|must be|must not|--help|Commands:|--overwrite|want|docs/")


def clean_environment():
    """Returns the environment without variables that the launcher of this test may have set."""
    names = re.compile(r"RANK|WORLD_SIZE|MASTER_|SLURM_|OMPI_|PMI|MV2_|TESSERA_|TORCHELASTIC_|OMP_NUM_THREADS")
    return {name: value for name, value in os.environ.items() if not names.search(name)} | {"OMP_NUM_THREADS": "1"}


def run(command, folder, environment, as_nobody=False):
    """Runs a command and returns (exit code or -signal, stdout, stderr). The code is None if the command hung."""
    drop = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if as_nobody and os.getuid() == 0 else {}
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, start_new_session=True, **drop)
    try:
        out, err = process.communicate(timeout=patient(HANGS_AFTER_S))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        code = None
    return code, out.decode(errors="replace"), err.decode(errors="replace")


def contents(paths):
    return {path: path.read_bytes() for path in paths}


def judge(row, code, out, err):
    """Returns a list of everything that is bad about the result, and whether the row is poor."""
    bad = []
    if code is None:
        return [f"hung for {patient(HANGS_AFTER_S):.0f} s"], False
    if code != row.code:
        bad.append(f"ended with {code}, want {row.code}")
    text = err if row.code != 0 else out
    bad += [f"does not say {says!r}" for says in row.says if says not in text]
    if "internal error" in out + err or "Exception raised from" in out + err:
        bad.append("says 'internal error', or shows a stack")
    if len(out) + len(err) > MOST_BYTES:
        bad.append(f"prints {len(out) + len(err)} bytes")
    if row.code != 0 and not err.strip():
        bad.append("says nothing")
    return bad, row.code != 0 and not HINT.search(err)


def run_row(tessera, forks, row, folder, environment):
    if not forks or row.environment or not row.command or row.command[0] not in FORKED:
        return run([tessera, *row.command], folder, environment, row.as_nobody)
    return forks.run(row.command, folder, environment, NOBODY if row.as_nobody and os.getuid() == 0 else None, patient(HANGS_AFTER_S))


def try_row(tessera, forks, row, work):
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=work) as name:
        folder = pathlib.Path(name)
        for file in INPUTS:
            shutil.copy(work / file, folder / file)
        for file, content in row.files.items():
            (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        if row.prepare:
            row.prepare(folder)
        folder.chmod(0o777)
        kept = [folder / file for file in INPUTS + row.keeps]
        before = contents(kept)
        environment = clean_environment() | {key: str(free_port()) if value == "PORT" else value
                                             for key, value in row.environment.items()}
        code, out, err = run_row(tessera, forks, row, folder, environment)
        bad, poor = judge(row, code, out, err)
        bad += [f"changed {path.name}" for path in kept if not path.is_file() or path.read_bytes() != before[path]]
        bad += [f"left {path}" for path in row.absent if os.path.lexists(folder / path)]
        for locked in folder.rglob("*"):  # this makes it possible to remove the folder
            if locked.is_dir() and not locked.is_symlink():
                locked.chmod(0o755)
    if poor and not row.poor:
        bad.append("has no hint, and is not marked as poor")
    if row.poor and not poor:
        bad.append("is marked as poor, and has a hint")
    return row, bad, time.monotonic() - start, code, out, err


def make_inputs(tessera, work):
    (work / "model.json").write_text(json.dumps(rows.MODEL))
    (work / "strategy.json").write_text(json.dumps(rows.STRATEGY))
    (work / "text").write_text("gather wait release shard unit mesh rank plan step\n" * 400)
    (work / "held_out").write_text("release the shard of the unit\n" * 40)
    done = run([tessera, *rows.TRAIN, "--save-weights", "weights.pt"], work, clean_environment())
    assert done[0] == 0, f"a plain run failed: {done}"


def can_run_as_nobody(tessera):
    if os.getuid() != 0:
        return True
    probe = subprocess.run([tessera, "--version"], user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True)
    return probe.returncode == 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--commands", type=pathlib.Path, help="the library that tests/hostile makes")
    parser.add_argument("-k", default="", help="only rows with this in their name")
    parser.add_argument("--all", action="store_true", help="every value with every key: about 560 rows")
    parser.add_argument("-v", action="store_true", help="show what each row printed")
    parser.add_argument("-j", type=int, default=2 * (os.cpu_count() or 1))
    options = parser.parse_args()
    rows.everything = options.all
    table = rows.all_rows()
    assert len(table) >= FEWEST_ROWS, f"{len(table)} rows, want {FEWEST_ROWS}"
    assert sum(row.poor for row in table) <= MOST_POOR
    chosen = [row for row in table if options.k in row.name]
    failures, slowest = [], []
    forks = starter.Starter(options.commands) if options.commands else None
    with tempfile.TemporaryDirectory(prefix="tessera-odd-") as name:
        work = pathlib.Path(name)
        work.chmod(0o755)
        make_inputs(options.tessera, work)
        try:
            reachable = can_run_as_nobody(options.tessera)
        except PermissionError:
            reachable = False
        skipped = [row for row in chosen if row.as_nobody and not reachable]
        if skipped:
            print(f"{len(skipped)} rows about permissions are skipped: user {NOBODY} cannot reach {options.tessera}")
        with concurrent.futures.ThreadPoolExecutor(options.j) as pool:
            results = pool.map(lambda row: try_row(options.tessera, forks, row, work),
                               [row for row in chosen if row not in skipped])
            for row, bad, seconds, code, out, err in results:
                slowest.append((seconds, row.name))
                if bad:
                    failures.append(row.name)
                if bad or options.v:
                    print(f"{'BAD ' if bad else 'ok  '}{row.name}: {'; '.join(bad)}\n  $ tessera "
                          f"{' '.join(word[:80] for word in row.command)}\n  code {code}, {seconds:.1f} s\n"
                          + "".join(f"  | {line[:400]}\n" for line in (out[-800:] + err[:3000]).splitlines()))
    slowest.sort(reverse=True)
    print(f"{len(chosen)} rows: {len(failures)} bad, {sum(row.poor for row in chosen)} poor; slowest: "
          + ", ".join(f"{name} {seconds:.1f} s" for seconds, name in slowest[:5]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
