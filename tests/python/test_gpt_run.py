"""The sample as a program: it trains, resumes bit for bit, exports and generates the same text from both files.

Runs at world size 1 with the tiny model; skipped when the program was not built. STRATA_BUILD_DIR names the build
directory.
"""
import os
import pathlib
import pty
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(os.environ.get("STRATA_BUILD_DIR", ROOT / "build" / "release")) / "bin" / "gpt"

MANIFEST = """
train_batch_size = 4
gradient_accumulation_steps = 2
steps_per_print = 1
gradient_clipping = 1.0
[bf16]
enabled = true
[optimizer.params]
lr = 1e-3
[zero_optimization]
stage = 3
param_persistence_threshold = 1000
"""


@unittest.skipUnless(PROGRAM.exists(), f"{PROGRAM.name} was not built")
class GptRun(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        self.manifest = self.dir / "run.toml"
        self.manifest.write_text(MANIFEST)
        (self.dir / "text.txt").write_text("In the beginning was the Word, and the Word was with God. " * 400)

    def gpt(self, *args, fails=False):
        done = subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True, errors="replace", timeout=100)
        self.assertEqual(done.returncode != 0, fails, done.stdout + done.stderr)
        return done.stderr if fails else (done.stdout, done.stderr)

    def train(self, *args, **kwargs):
        return self.gpt("train", "--manifest", self.manifest, "--text", self.dir / "text.txt", "--size", "tiny",
                        "--threads", 1, "--steps", 12, "--warmup", 3, "--eval-samples", 8, *args, **kwargs)

    @staticmethod
    def losses(text):
        """{step: (loss, gradient norm)}, as the engine logs it, and the final held-out loss."""
        out, log = text
        lines = re.findall(r"step (\d+): loss (\S+), grad norm ([^\s,]+)", log)
        return {int(step): (loss, norm) for step, loss, norm in lines}, re.findall(r"held-out loss (\S+)", out)[-1]

    def on_terminal(self, kind, errors=False):
        """What the program writes to a terminal of this kind; without `errors` its stderr is none, as under mpirun."""
        ours, its = pty.openpty()
        self.addCleanup(os.close, ours)
        command = [PROGRAM, "train", "--manifest", self.manifest, "--text", self.dir / "text.txt", "--size", "tiny",
                   "--threads", "1", "--steps", "3", "--eval-samples", "8"]
        with subprocess.Popen(command, stdout=its, stderr=its if errors else subprocess.DEVNULL,
                              env=dict(os.environ, TERM=kind)) as running:
            os.close(its)
            shown = b""
            try:
                while piece := os.read(ours, 4096):
                    shown += piece
            except OSError:  # the other end is closed
                pass
            self.assertEqual(running.wait(60), 0)
        return shown.replace(b"\r\n", b"\n")

    def test_the_bar_is_for_terminals_that_can_show_it(self):
        self.assertIn(b"\r\x1b[K[", self.on_terminal("xterm", errors=True))
        for plain in (self.on_terminal("dumb", errors=True), self.on_terminal("xterm")):
            self.assertIn(b"held-out loss", plain)
            self.assertNotIn(b"\x1b", plain)
            self.assertNotIn(b"\r", plain)
        out, _ = self.train()
        self.assertNotIn("\x1b", out)
        self.assertNotIn("\r", out)

    def test_a_resumed_run_repeats_the_uninterrupted_one(self):
        whole, held_out = self.losses(self.train("--save", self.dir / "ckpt", "--save-every", 5))
        self.assertEqual(sorted(whole), list(range(1, 13)))
        self.assertLess(float(whole[12][0]), float(whole[1][0]) - 0.5)
        resumed, resumed_held_out = self.losses(self.train("--resume", self.dir / "ckpt", "--tag", "step000005"))
        self.assertEqual(resumed, {step: whole[step] for step in range(6, 13)})
        self.assertEqual(resumed_held_out, held_out)
        only_evaluated = self.train("--resume", self.dir / "ckpt", "--eval")
        self.assertEqual(self.losses(only_evaluated), ({}, held_out))

    def test_weight_file_and_checkpoint_generate_the_same_text(self):
        self.train("--save", self.dir / "ckpt", "--export", self.dir / "gpt.h5")
        common = ("generate", "--prompt", "In the", "--bytes", 80, "--threads", 1)
        from_file, _ = self.gpt(*common, "--weights", self.dir / "gpt.h5")
        from_checkpoint, _ = self.gpt(*common, "--checkpoint", self.dir / "ckpt", "--manifest", self.manifest,
                                      "--size", "tiny")
        self.assertTrue(from_file.startswith("In the"))
        self.assertGreaterEqual(len(from_file), 80)
        self.assertEqual(from_file, from_checkpoint)

    def test_placement_of_gradients_does_not_change_numbers(self):
        usual = self.losses(self.train())
        self.assertEqual(usual, self.losses(self.train("--set", "zero_optimization.contiguous_gradients=false")))

    def test_errors_say_what_is_wrong(self):
        self.assertIn("nowhere", self.train("--resume", self.dir / "nowhere", fails=True))
        self.assertIn("missing.txt", self.gpt("train", "--manifest", self.manifest, "--size", "tiny", "--text",
                                              self.dir / "missing.txt", fails=True))
        self.assertIn("missing.h5", self.gpt("generate", "--weights", self.dir / "missing.h5", fails=True))


if __name__ == "__main__":
    unittest.main()
