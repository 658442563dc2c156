"""The sample as ranks of mpirun: with comm_mpi it prints the numbers it prints with comm_local.

Skipped when mpirun, the program or the plugin is not there. STRATA_BUILD_DIR names the build directory.
"""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release"))
PROGRAM = BUILD / "bin" / "gpt"
PLUGIN = BUILD / "lib" / "plugins" / "comm_mpi.so"
# Open MPI keeps memory for good, and unloads its modules in MPI_Finalize: leak reports have no names to go by.
ENVIRONMENT = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                            "OPENBLAS_NUM_THREADS": "1",
                            "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=0"}

MANIFEST = """
train_batch_size = 8
gradient_accumulation_steps = 2
steps_per_print = 1
gradient_clipping = 1.0
[bf16]
enabled = true
[optimizer.params]
lr = 1e-3
[zero_optimization]
stage = %d
"""


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
@unittest.skipUnless(PROGRAM.exists(), f"{PROGRAM.name} was not built")
@unittest.skipUnless(PLUGIN.exists(), f"{PLUGIN.name} was not built")
class Mpi(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        (self.dir / "text.txt").write_text("In the beginning was the Word, and the Word was with God. " * 400)

    def train(self, collective, stage, ranks=2):
        """The step lines and the held-out loss that rank 0 prints."""
        manifest = self.dir / "run.toml"
        manifest.write_text(MANIFEST % stage)
        done = subprocess.run(
            ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), PROGRAM, "train", "--manifest",
             manifest, "--text", self.dir / "text.txt", "--size", "tiny", "--threads", "1", "--steps", "6", "--warmup",
             "2", "--eval-samples", "8", "--set", f"plugins.collective={collective}"],
            capture_output=True, text=True, errors="replace", timeout=120, env=ENVIRONMENT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        steps = re.findall(r"step (\d+): loss (\S+) \(rank 0\), grad norm ([^\s,]+)", done.stderr)
        self.assertEqual([step for step, _, _ in steps], ["1", "2", "3", "4", "5", "6"], done.stderr)
        return steps, re.findall(r"held-out loss (\S+)", done.stdout)

    def test_losses_are_those_of_comm_local(self):
        for stage in (1, 3):
            with self.subTest(stage=stage):
                self.assertEqual(self.train("comm_mpi", stage), self.train("comm_local", stage))

    def test_without_mpirun_it_is_a_world_of_one(self):
        manifest = self.dir / "run.toml"
        manifest.write_text(MANIFEST % 3)
        done = subprocess.run(
            [PROGRAM, "train", "--manifest", manifest, "--text", self.dir / "text.txt", "--size", "tiny", "--threads",
             "1", "--steps", "1", "--set", "plugins.collective=comm_mpi"],
            capture_output=True, text=True, errors="replace", timeout=120, env=ENVIRONMENT)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("step 1: loss", done.stderr)


if __name__ == "__main__":
    unittest.main()
