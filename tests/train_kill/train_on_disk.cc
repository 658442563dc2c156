// train_on_disk.cc - one rank of a training run on disk, to be killed.
//
//   STRATA_JOB=j STRATA_RANK=0 STRATA_WORLD_SIZE=2 train_on_disk WHAT NVME_PATH CHECKPOINTS STEPS OUT TAG
//
// Goes on from the newest checkpoint, if there is one, saves every second step, and at the end rank 0 writes all bits
// to OUT. Checkpoints have a tag each, or all of them TAG. Says on stdout what it is about to do, a line each.
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

// The newest of many, or the only one there ever is. *done: its steps; 0 when there is none.
std::string load(strata_engine* engine, const std::string& root, const std::string& only_tag, int* done) {
  std::string newest = newest_checkpoint(root, done);
  if (only_tag.empty() && *done == 0) return "";
  say("load " + newest);
  const strata_status status = strata_load(engine, root.c_str(), newest.empty() ? nullptr : newest.c_str());
  if (status == STRATA_NOT_FOUND && !only_tag.empty()) return "";
  strata_step_info info;
  STRATA_INIT(&info);
  std::string error = call(status);
  if (error.empty()) error = call(strata_get_step_info(engine, &info));
  *done = static_cast<int>(info.steps);
  return error;
}

std::string train(strata_engine* engine, const Trial& trial, const std::string& root, int steps, const std::string& out,
                  const std::string& only_tag) {
  const int rank = strata_rank(engine);
  std::string error = build_model(engine, trial.model);
  int done = 0;
  if (error.empty()) error = load(engine, root, only_tag, &done);
  if (done > 0 && !only_tag.empty()) say("loaded " + std::to_string(done));
  while (error.empty() && done < steps) {
    say("train");
    error = train_steps(engine, trial, rank, done + 1, done + kSaveEvery);
    done += kSaveEvery;
    if (!error.empty()) return error;
    say("save " + tag_of(done));
    const std::string tag = only_tag.empty() ? tag_of(done) : only_tag;
    error = call(strata_save(engine, root.c_str(), tag.c_str()));
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
  if (engine) error = train(engine, trial, argv[3], std::atoi(argv[4]), argv[5], argv[6]);
  strata_close(engine);
  say(error.empty() ? "end" : "failed: " + error);
  return error.empty() ? 0 : 1;
}

}  // namespace strata::test

int main(int argc, char** argv) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is ended leaves nobody behind
  return argc == 7 ? strata::test::run_rank(argv) : 2;
}
