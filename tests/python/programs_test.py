"""What Python programs do around training is right, or a clear error on all ranks."""

import unittest

from launched import launch

# What ends all ranks, with exit code 64, and a part of what it says.
ENDINGS = {
    "written_outside_a_guard": "was written in place outside",
    "moved_to_other_memory": "was given other memory",
    "unfrozen": "call engine.set_trainable",
    "late_post_accumulate_hook": "register it before the Engine is made",
    "hook_that_clears_gradients": "was cleared by a post-accumulate hook of the program",
}


class ProgramsTest(unittest.TestCase):
    def test_programs(self):
        code, output = launch(2, "programs_ranks.py", timeout=500, TESSERA_LOG_LEVEL="error")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("all programs were right"), 2, output)

    def test_what_ends_all_ranks(self):
        for program, text in ENDINGS.items():
            with self.subTest(program):
                code, output = launch(2, "programs_ranks.py", program, timeout=120)
                self.assertEqual(code, 64, output)
                self.assertIn(text, output)


if __name__ == "__main__":
    unittest.main()
