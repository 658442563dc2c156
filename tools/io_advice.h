// io_advice.h - from the rates that `strata bench io` measured to the settings it recommends.
//
// Every combination of depth and piece is measured several times, one after the other in each round, so that what else
// the machine does hits all of them alike. What counts is the median. The noise of a disk is how far its repetitions
// lie apart: half of their range over their median, of the combinations the median. Below the tolerance (3 percent, or
// the noise where that is more) two rates count as the same, and the smallest depth, then the smallest piece, within it
// of the best is the advice. A disk with more than 10 percent of noise gets none: the tier's defaults stay.
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

struct Advice {
  double noise = 0, tolerance = 0;
  Rates chosen{};
  bool measured = false;  // false: too much noise, `chosen` are the defaults
  std::string reason;     // a sentence
};
// `rates` hold the defaults, too.
Advice advise(const std::vector<Rates>& rates);

struct AdvisedDisk {
  std::string path;  // absolute
  Advice advice;
  bool in_memory = false;
};
// The lines of a manifest that go with the advice, what to know of it as comments.
std::string manifest_text(const std::vector<AdvisedDisk>& disks);

}  // namespace strata::cli
