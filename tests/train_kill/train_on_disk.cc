// train_on_disk.cc - one rank of a training run on disk, to be killed.
//
//   STRATA_JOB=j STRATA_RANK=0 STRATA_WORLD_SIZE=2 train_on_disk WHAT NVME_PATH CHECKPOINTS STEPS OUT
//
// Goes on from the newest checkpoint, if there is one, saves every second step, and at the end rank 0 writes all bits
// to OUT. Says on stdout what it is about to do, a line each.
#include <signal.h>
#include <sys/prctl.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "tests/train_kill/job.h"

namespace strata::test {
namespace {

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

std::string call(strata_status status) { return status == STRATA_OK ? "" : strata_last_error(); }

std::string train(strata_engine* engine, const Trial& trial, const std::string& root, int steps,
                  const std::string& out) {
  const int rank = strata_rank(engine);
  std::string error = build_model(engine, trial.model);
  int done = 0;
  const std::string newest = newest_checkpoint(root, &done);
  if (error.empty() && done > 0) {
    say("load " + newest);
    error = call(strata_load(engine, root.c_str(), newest.c_str()));
  }
  while (error.empty() && done < steps) {
    say("train");
    error = train_steps(engine, trial, rank, done + 1, done + kSaveEvery);
    done += kSaveEvery;
    if (!error.empty()) return error;
    say("save " + tag_of(done));
    error = call(strata_save(engine, root.c_str(), tag_of(done).c_str()));
  }
  if (!error.empty()) return error;
  say("collect");
  const std::string bits = bits_of(engine, trial.model, &error);
  if (rank == 0 && error.empty()) std::ofstream(out, std::ios::binary) << bits;
  return error;
}

}  // namespace

int run_rank(char** argv) {
  const Trial trial = trial_on_disk(static_cast<OnDisk>(std::atoi(argv[1])), argv[2]);
  std::string error;
  say("open");
  strata_engine* engine = open_rank(trial, "", -1, &error);
  if (engine) error = train(engine, trial, argv[3], std::atoi(argv[4]), argv[5]);
  strata_close(engine);
  say(error.empty() ? "end" : "failed: " + error);
  return error.empty() ? 0 : 1;
}

}  // namespace strata::test

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is ended leaves nobody behind
  return argc == 6 ? strata::test::run_rank(argv) : 2;
}
