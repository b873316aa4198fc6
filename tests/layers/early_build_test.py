"""Tests that a failed build ends the set-up in the background, with all processes that the set-up has started."""

import pathlib
import shutil
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The set-up's child takes the place of pip. The replacement of cmake fails once that child runs.
SETUP = '#!/usr/bin/env bash\n[ "$1" = --no-torch ] && exit\nsh -c "echo \\$\\$ >started; exec sleep 600"\n'
CMAKE = "#!/usr/bin/env bash\nuntil [ -s started ]; do sleep 0.01; done\nexit 3\n"


class EarlyBuild(unittest.TestCase):
    def test_build_that_fails_ends_what_the_set_up_has_started(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / ".venv/bin").mkdir(parents=True)
            (folder / "scripts").mkdir()
            shutil.copy(ROOT / "scripts/early_build", folder / "scripts")
            for path, text in {"scripts/setup": SETUP, ".venv/bin/cmake": CMAKE}.items():
                (folder / path).write_text(text)
                (folder / path).chmod(0o755)
            self.assertEqual(subprocess.run(["scripts/early_build", "release", "--tests"], cwd=folder, check=False).returncode, 3)
            child = pathlib.Path("/proc") / (folder / "started").read_text().strip()
            for _ in range(1000):
                if not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2].split()[:1]:
                    return
                time.sleep(0.01)
            self.fail("the child of the set-up still runs")


if __name__ == "__main__":
    unittest.main()
