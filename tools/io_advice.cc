#include "tools/io_advice.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace strata::cli {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::vector<double> each(const std::vector<Round>& rounds, double Round::*kind) {
  std::vector<double> values;
  for (const Round& round : rounds) values.push_back(round.*kind);
  return values;
}

std::string percent(double part) { return std::to_string(std::lround(part * 100)) + " %"; }

// As a basic string of TOML.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

// Shares of the disks: their mixed rates in MB/s, or all the same where that is what they measure as.
std::string weights_of(const std::vector<AdvisedDisk>& disks) {
  double least = disks[0].advice.chosen.mixed, most = least, tolerance = 0;
  for (const AdvisedDisk& disk : disks) {
    least = std::min(least, disk.advice.chosen.mixed);
    most = std::max(most, disk.advice.chosen.mixed);
    tolerance = std::max(tolerance, disk.advice.tolerance);
  }
  const bool same = least >= (1 - tolerance) * most;
  std::string text;
  for (const AdvisedDisk& disk : disks) {
    const auto rate = static_cast<int64_t>(disk.advice.chosen.mixed / 1e6 + 1);
    text += (text.empty() ? "" : ", ") + std::to_string(same ? 1 : rate);
  }
  return text;
}

}  // namespace

Rates rates_of(unsigned depth, uint64_t piece, const std::vector<Round>& rounds) {
  const std::vector<double> mixed = each(rounds, &Round::mixed);
  const auto [least, most] = std::minmax_element(mixed.begin(), mixed.end());
  const double middle = median(mixed);
  return {depth,
          piece,
          median(each(rounds, &Round::read)),
          median(each(rounds, &Round::write)),
          middle,
          (*most - *least) / 2 / middle};
}

Advice advise(const std::vector<Rates>& rates) {
  Advice advice;
  std::vector<double> spreads;
  double most = 0, least = INFINITY;
  for (const Rates& r : rates) {
    spreads.push_back(r.spread);
    most = std::max(most, r.mixed);
    least = std::min(least, r.mixed);
  }
  advice.noise = median(spreads);
  advice.tolerance = std::max(kLeastTolerance, advice.noise);
  const double enough = (1 - advice.tolerance) * most;
  advice.measured = advice.noise <= kMostNoise;
  std::vector<Rates> good;
  for (const Rates& r : rates) {
    const bool is_default = r.depth == kDefaultDepth && r.piece == kDefaultPiece;
    if (advice.measured ? r.mixed >= enough : is_default) good.push_back(r);
  }
  advice.chosen = *std::min_element(good.begin(), good.end(), [](const Rates& a, const Rates& b) {
    return std::pair(a.depth, a.piece) < std::pair(b.depth, b.piece);
  });
  const std::string noise = "the noise is " + percent(advice.noise);
  if (!advice.measured) {
    advice.reason = noise + ", too much to compare: the defaults stay; measure longer, or on a quiet machine";
  } else if (least >= enough) {
    advice.reason = noise + ", and all lie within " + percent(advice.tolerance) + " of the best: any will do";
  } else {
    advice.reason = noise + "; the smallest depth, then piece, within " + percent(advice.tolerance) + " of the best";
  }
  return advice;
}

std::string manifest_text(const std::vector<AdvisedDisk>& disks) {
  unsigned depth = 1;
  uint64_t piece = 0;
  std::string remarks, paths;
  for (const AdvisedDisk& disk : disks) {
    depth = std::max(depth, disk.advice.chosen.depth);
    piece = std::max(piece, disk.advice.chosen.piece);
    paths += (paths.empty() ? "" : ", ") + disk.path;
    if (disk.in_memory) remarks += "# " + disk.path + " lies in RAM (tmpfs): this measures no disk\n";
    remarks += "# " + disk.path + ": " + disk.advice.reason + "\n";
  }
  std::string text = remarks +
                     "# put these keys into the sections that are there: a manifest names each section once\n"
                     "# [zero_optimization.offload_param] with device = \"nvme\" needs the same nvme_path\n"
                     "[zero_optimization.offload_optimizer]\ndevice = \"nvme\"\nnvme_path = " +
                     quoted(paths) + "\n\n[plugin.offload_nvme]\nqueue_depth = " + std::to_string(depth) +
                     "\nblock_bytes = " + std::to_string(piece) + "\n";
  if (disks.size() > 1) text += "weights = \"" + weights_of(disks) + "\"\n";
  return text;
}

}  // namespace strata::cli
