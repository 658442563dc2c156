#include "regions.h"

#include <xxhash.h>

#include <algorithm>

#include "plugin_kit/plugin_kit.h"

namespace strata::offload_nvme {

using plugin_kit::raise;

uint64_t hash_of(const char* block, uint64_t bytes) { return XXH3_64bits(block, bytes); }

Regions::Regions(const Settings& settings, std::vector<Disk*> disks, std::vector<double> shares)
    : settings_(settings), disks_(std::move(disks)), shares_(std::move(shares)), passes_(disks_.size()) {}

// The disk of each stripe: always the one that is furthest behind its share.
std::vector<size_t> Regions::deal(uint64_t bytes) {
  std::vector<size_t> order;
  for (uint64_t at = 0; at < bytes; at += settings_.stripe_bytes) {
    size_t best = 0;
    for (size_t d = 1; d < disks_.size(); ++d) {
      if (passes_[d] + 1 / shares_[d] < passes_[best] + 1 / shares_[best]) best = d;
    }
    passes_[best] += 1 / shares_[best];
    order.push_back(best);
  }
  return order;
}

strata_region Regions::make(uint64_t bytes, const char* label) {
  auto region = std::make_shared<Region>();
  region->bytes = bytes;
  region->label = label ? label : "unnamed";
  const std::string name = "\"" + region->label + "\": ";
  if (bytes == 0) raise(STRATA_INVALID_ARGUMENT, name, "0 bytes");
  const uint64_t in_use = used();
  if (bytes > settings_.budget - in_use) {
    raise(STRATA_RESOURCE_EXHAUSTED, name, bytes, " bytes wanted, ", in_use, " of the budget of ", settings_.budget,
          " used (option budget_bytes, or the free space at the start)");
  }
  const uint64_t stripe = settings_.stripe_bytes, block = settings_.block;
  const uint64_t padded = (bytes + block - 1) / block * block;
  const std::vector<size_t> order = deal(padded);
  const auto stripe_bytes = [&](size_t i) { return std::min(stripe, padded - i * stripe); };
  std::vector<uint64_t> wanted(disks_.size());
  for (size_t i = 0; i < order.size(); ++i) wanted[order[i]] += stripe_bytes(i);

  std::vector<std::vector<Run>> runs(disks_.size());
  try {
    for (size_t d = 0; d < disks_.size(); ++d) {
      for (uint64_t left = wanted[d]; left > 0; left -= runs[d].back().bytes) {
        runs[d].push_back(disks_[d]->take(std::min(left, settings_.segment_bytes)));
        region->runs.push_back({disks_[d], runs[d].back()});
      }
    }
    if (settings_.checksum) {
      region->hashes.assign(padded / block, hash_of(std::vector<char>(block).data(), block));
    }
    std::vector<std::pair<size_t, uint64_t>> next(disks_.size());  // run, offset in it
    for (size_t i = 0; i < order.size(); ++i) {
      auto& [index, at] = next[order[i]];
      if (at == runs[order[i]][index].bytes) ++index, at = 0;
      const Run& run = runs[order[i]][index];
      const uint64_t n = stripe_bytes(i), offset = run.offset + at;
      at += n;
      Extent* last = region->extents.empty() ? nullptr : &region->extents.back();
      if (last && last->segment == run.segment && last->offset + last->bytes == offset) {
        last->bytes += n;
      } else {
        region->extents.push_back({i * stripe, n, disks_[order[i]], run.segment, offset});
      }
    }
    std::lock_guard lock(mutex_);
    regions_.emplace(last_id_ + 1, region);
    used_ += bytes;
    return ++last_id_;
  } catch (const plugin_kit::Error& e) {
    give_back(*region);
    raise(e.code(), name, bytes, " bytes: ", e.text());
  } catch (...) {
    give_back(*region);
    throw;
  }
}

void Regions::give_back(const Region& region) {
  for (const Region::Held& held : region.runs) held.disk->give(held.run);
}

bool Regions::drop(strata_region id) {
  std::shared_ptr<Region> region;
  {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    if (found == regions_.end()) return false;
    region = found->second;
    regions_.erase(found);
    used_ -= region->bytes;
  }
  give_back(*region);
  return true;
}

std::shared_ptr<Region> Regions::find(strata_region id) const {
  std::lock_guard lock(mutex_);
  const auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second;
}

uint64_t Regions::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace strata::offload_nvme
