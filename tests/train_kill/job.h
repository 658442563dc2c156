// job.h - a training run on disk as both see it: the processes that are killed, and the test that kills them.
#pragma once

#include <string>

#include "tests/train/harness.h"

namespace strata::test {

// What of a run lies on disk, and how it is moved.
enum class OnDisk { kState, kStateByThreads, kStateAndParams };

// A made-up model whose update is mostly transfers: a few MB of state in several units.
Model model_on_disk();
// Two ranks, a process each, stage 3.
Trial trial_on_disk(OnDisk what, const std::string& nvme_path);

// Forward, backward and step, as often as it takes until `last`; `first` is 1 for a fresh model. Empty, or an error.
std::string train_steps(strata_engine* engine, const Trial& trial, int rank, int first, int last);
// All bits of weights and state, as text that can be compared.
std::string bits_of(strata_engine* engine, const Model& model, std::string* error);

constexpr int kSaveEvery = 2;
// The newest checkpoint in a directory, its tag and its step; "" and 0: none.
std::string newest_checkpoint(const std::string& root, int* step);
std::string tag_of(int step);

}  // namespace strata::test
