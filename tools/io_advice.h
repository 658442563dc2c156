// io_advice.h - from the rates that `strata bench io` measured to the settings it recommends.
//
// Every combination of depth and piece is measured several times, one after the other in each round, so that what else
// the machine does hits all of them alike. What counts is the median. The noise of a disk is how far its repetitions
// lie apart: half of their range over their median, of the combinations the median. Below the tolerance (3 percent, or
// the noise where that is more) two rates count as the same. The tier's defaults stay where they are as good as the
// best, and on a disk with more than 10 percent of noise. Elsewhere the smallest depth, then the smallest piece, within
// the tolerance of the best is the candidate, and the advice if the pipeline of an update runs faster with it, too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace strata::cli {

struct Rates {
  unsigned depth;
  uint64_t piece;
  double read, write, mixed;  // bytes per second; medians
  double spread;              // of the mixed ones: half of the range, over the median
};

struct Round {
  double read, write, mixed;
};
// Of at least one round.
Rates rates_of(unsigned depth, uint64_t piece, const std::vector<Round>& rounds);

constexpr double kLeastTolerance = 0.03, kMostNoise = 0.10;
constexpr unsigned kDefaultDepth = 32;  // of offload_nvme
constexpr uint64_t kDefaultPiece = uint64_t{1} << 20;

// Bytes per second of the pipeline (io_pipeline.h) with the candidate and with the defaults, by turns.
struct PipelineRound {
  double candidate, by_default;
};

struct Advice {
  double noise = 0, tolerance = 0;
  Rates by_default{}, candidate{};  // the same where nothing is better
  bool measured = false;            // false: too much noise
  std::string reason;               // a sentence
  PipelineRound pipeline{};         // medians
  bool faster = false;              // the pipeline is, with the candidate

  const Rates& chosen() const { return faster ? candidate : by_default; }
  bool has_candidate() const { return candidate.depth != by_default.depth || candidate.piece != by_default.piece; }
};
// `rates` hold the defaults, too.
Advice advise(const std::vector<Rates>& rates);
// The pipeline has the last word. At least one round.
Advice confirm(Advice advice, const std::vector<PipelineRound>& rounds);

// A step reads and writes 12 bytes of state per param, 10 with a split master.
struct StepSeconds {
  double full, split;
};
StepSeconds seconds_per_billion(double bytes_per_s);

struct AdvisedDisk {
  std::string path;  // absolute
  Advice advice;
  bool in_memory = false;
  uint64_t file_system = 0;  // its number; 0: not known
};
// The lines of a manifest that go with the advice, what to know of it as comments.
std::string manifest_text(const std::vector<AdvisedDisk>& disks);

}  // namespace strata::cli
