#include "tools/io_advice.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <sstream>
#include <tuple>

namespace strata::cli {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

template <class R>
std::vector<double> each(const std::vector<R>& rounds, double R::*kind) {
  std::vector<double> values;
  for (const R& round : rounds) values.push_back(round.*kind);
  return values;
}

std::string percent(double part) { return std::to_string(std::lround(part * 100)) + " %"; }

std::string words(const Rates& setting) {
  return "depth " + std::to_string(setting.depth) + ", " + std::to_string(setting.piece / 1024) + " KiB";
}

// At least three digits of it.
std::string digits(double value) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(value < 10 ? 2 : value < 100 ? 1 : 0) << value;
  return text.str();
}

// As a basic string of TOML.
std::string toml_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

// Shares of the disks: their mixed rates in MB/s, or all the same where that is what they measure as.
std::string weights_of(const std::vector<AdvisedDisk>& disks) {
  double least = disks[0].advice.chosen().mixed, most = least, tolerance = 0;
  for (const AdvisedDisk& disk : disks) {
    least = std::min(least, disk.advice.chosen().mixed);
    most = std::max(most, disk.advice.chosen().mixed);
    tolerance = std::max(tolerance, disk.advice.tolerance);
  }
  const bool same = least >= (1 - tolerance) * most;
  std::string text;
  for (const AdvisedDisk& disk : disks) {
    const auto rate = static_cast<int64_t>(disk.advice.chosen().mixed / 1e6 + 1);
    text += (text.empty() ? "" : ", ") + std::to_string(same ? 1 : rate);
  }
  return text;
}

// Of disks that ask for different settings each was measured with its own only.
Rates setting_of(const std::vector<AdvisedDisk>& disks, std::string* remarks) {
  const Rates& first = disks[0].advice.chosen();
  for (const AdvisedDisk& disk : disks) {
    if (words(disk.advice.chosen()) == words(first)) continue;
    *remarks += "# the disks ask for different settings: the defaults stay\n";
    return disk.advice.by_default;
  }
  return first;
}

// Pairs of paths that are no two disks.
std::string shared_file_systems(const std::vector<AdvisedDisk>& disks) {
  std::string remarks;
  for (size_t i = 0; i < disks.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      if (disks[i].file_system == 0 || disks[i].file_system != disks[k].file_system) continue;
      remarks += "# " + disks[k].path + " and " + disks[i].path +
                 " lie on one file system: they share its room and its speed, and one of them is enough\n";
    }
  }
  return remarks;
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
  double most = 0;
  for (const Rates& r : rates) {
    spreads.push_back(r.spread);
    most = std::max(most, r.mixed);
    if (r.depth == kDefaultDepth && r.piece == kDefaultPiece) advice.by_default = r;
  }
  advice.noise = median(spreads);
  advice.tolerance = std::max(kLeastTolerance, advice.noise);
  advice.measured = advice.noise <= kMostNoise;
  advice.candidate = advice.by_default;
  advice.reason = "the noise is " + percent(advice.noise);
  const double enough = (1 - advice.tolerance) * most;
  if (!advice.measured) {
    advice.reason += ", too much to compare: the defaults stay; measure longer, or on a quiet machine";
  } else if (advice.by_default.mixed >= enough) {
    advice.reason += "; the defaults are within " + percent(advice.tolerance) + " of the best: they stay";
  } else {
    const auto order = [&](const Rates& r) { return std::tuple(r.mixed < enough, r.depth, r.piece); };
    advice.candidate = *std::min_element(rates.begin(), rates.end(),
                                         [&](const Rates& a, const Rates& b) { return order(a) < order(b); });
    advice.reason += "; the smallest depth, then piece, within " + percent(advice.tolerance) + " of the best";
  }
  return advice;
}

Advice confirm(Advice advice, const std::vector<PipelineRound>& rounds) {
  advice.pipeline = {median(each(rounds, &PipelineRound::candidate)), median(each(rounds, &PipelineRound::by_default))};
  advice.faster = advice.has_candidate() && advice.pipeline.candidate > advice.pipeline.by_default;
  if (!advice.has_candidate()) return advice;
  if (advice.faster) {
    advice.reason += ", and the pipeline runs " + percent(advice.pipeline.candidate / advice.pipeline.by_default - 1) +
                     " faster than by default";
  } else {
    advice.reason +=
        " is " + words(advice.candidate) + ", but the pipeline runs no faster with that: the defaults stay";
  }
  return advice;
}

StepSeconds seconds_per_billion(double bytes_per_s) { return {24e9 / bytes_per_s, 20e9 / bytes_per_s}; }

std::string manifest_text(const std::vector<AdvisedDisk>& disks) {
  std::string remarks = shared_file_systems(disks), paths;
  const Rates setting = setting_of(disks, &remarks);
  for (const AdvisedDisk& disk : disks) {
    const bool by_default = words(setting) == words(disk.advice.by_default);
    const double rate = by_default ? disk.advice.pipeline.by_default : disk.advice.pipeline.candidate;
    const StepSeconds seconds = seconds_per_billion(rate);
    paths += (paths.empty() ? "" : ", ") + disk.path;
    if (disk.in_memory) remarks += "# " + disk.path + " lies in RAM (tmpfs): this measures no disk\n";
    remarks += "# " + disk.path + ": " + disk.advice.reason + "\n# " + disk.path + ": the pipeline reaches " +
               digits(rate / 1e6) + " MB/s: an update takes " + digits(seconds.full) + " s per 1e9 params, " +
               digits(seconds.split) + " with state_layout = \"split\"\n";
  }
  std::string text = remarks +
                     "# put these keys into the sections that are there: a manifest names each section once\n"
                     "# [zero_optimization.offload_param] with device = \"nvme\" needs the same nvme_path\n"
                     "[zero_optimization.offload_optimizer]\ndevice = \"nvme\"\nnvme_path = " +
                     toml_string(paths) + "\n\n[plugin.offload_nvme]\nqueue_depth = " + std::to_string(setting.depth) +
                     "\nblock_bytes = " + std::to_string(setting.piece) + "\n";
  if (disks.size() > 1) text += "weights = \"" + weights_of(disks) + "\"\n";
  return text;
}

}  // namespace strata::cli
