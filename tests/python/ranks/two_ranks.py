"""training_test.py runs this program on every rank. It runs one program after another in one process. Usage:
two_ranks.py FOLDER, where FOLDER is for scratch files."""

import pathlib
import runpy
import sys

FOLDER, scratch = pathlib.Path(__file__).resolve().parent, sys.argv[1]
for program, *arguments in (["training_ranks.py"], ["adafactor_ranks.py"], ["activations_ranks.py", scratch],
                            ["buffers_ranks.py", f"{scratch}/meet"], ["loop_ranks.py", scratch]):
    print(program, flush=True)
    sys.argv = [program, *arguments]
    runpy.run_path(str(FOLDER / program), run_name="__main__")
