"""programs_test.py runs this program. The programs of programs_ranks.ENDINGS end each of two ranks with exit code 64
and a message."""

import functools

import torch
from forked import run_forked
from programs_ranks import ENDINGS, STRATEGIES, STRATEGY

# A part of the message with which each program ends.
TEXTS = {
    "written_outside_a_guard": "was written in place outside engine.gathered(write=True)",
    "written_through_data": "was written in place outside",
    "written_through_a_tensor_set_over_it": "was written in place outside",
    "written_into_an_array": "parameter head.weight of unit (root) was written through an array or a pointer under engine.gathered()",
    "moved_to_other_memory": "was given other memory",
    "turned_in_its_memory": "first.weight was given other memory, or another view of its own",
    "unfrozen": "call engine.set_trainable",
    "late_post_accumulate_hook": "register it before the Engine is made",
    "hook_that_clears_gradients": "was cleared by a post-accumulate hook of the program",
}

torch.set_num_threads(1)
assert {program.__name__ for program in ENDINGS} == set(TEXTS)
for program in ENDINGS:
    codes, output = run_forked(2, functools.partial(program, {**STRATEGY, **STRATEGIES["private"]}))
    assert codes == [64, 64] and TEXTS[program.__name__] in output, f"{program.__name__} ended with {codes}:\n{output}"
    print(program.__name__, flush=True)
print("all endings were right")
