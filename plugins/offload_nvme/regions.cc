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

// `what` is given where it is spare space: for it there is all of the budget.
void Regions::check_budget(const std::string& label, uint64_t bytes, const std::string& what) const {
  const uint64_t taken = what.empty() ? used() : used_beside(0), all = what.empty() ? budget() : settings_.budget;
  if (taken <= all && bytes <= all - taken) return;
  raise(STRATA_RESOURCE_EXHAUSTED, "\"", label, "\": ", bytes, " bytes wanted", what, ", ", taken, " of the budget of ",
        all, " used; ", settings_.budget_reason);
}

strata_region Regions::make(uint64_t bytes, const char* label) {
  auto region = std::make_shared<Region>();
  region->bytes = bytes;
  region->label = label ? label : "unnamed";
  if (bytes == 0) raise(STRATA_INVALID_ARGUMENT, "\"", region->label, "\": 0 bytes");
  check_budget(region->label, bytes, "");
  const uint64_t stripe = settings_.stripe_bytes, block = settings_.block;
  const uint64_t padded = (bytes + block - 1) / block * block;
  const std::vector<size_t> order = deal(padded);
  std::vector<uint64_t> wanted(disks_.size());
  for (size_t i = 0; i < order.size(); ++i) wanted[order[i]] += std::min(stripe, padded - i * stripe);
  try {
    std::vector<std::vector<std::shared_ptr<const Room>>> rooms(disks_.size());
    for (size_t d = 0; d < disks_.size(); ++d) {
      for (uint64_t left = wanted[d]; left > 0;) {
        const Run run = disks_[d]->take(std::min(left, settings_.segment_bytes), true);
        left -= run.bytes;
        for (uint64_t at = 0; at < run.bytes; at += stripe) {
          const Run part = {run.segment, run.offset + at, std::min(stripe, run.bytes - at)};
          rooms[d].push_back(std::make_shared<Room>(disks_[d], part));
        }
      }
    }
    std::vector<size_t> next(disks_.size());
    for (const size_t d : order) region->stripes.push_back(std::move(rooms[d][next[d]++]));
    if (settings_.checksum) {
      region->hashes.assign(padded / block, hash_of(std::vector<char>(block).data(), block));
    }
  } catch (const plugin_kit::Error& e) {
    raise(e.code(), "\"", region->label, "\": ", bytes, " bytes: ", e.text());
  }
  std::lock_guard lock(mutex_);
  regions_.emplace(last_id_ + 1, region);
  used_ += bytes;
  return ++last_id_;
}

// Its bytes from `from` to `to` are about to be written.
void Regions::move_stripe(Region& region, uint64_t stripe, uint64_t from, uint64_t to) const {
  const std::shared_ptr<const Room> old = region.stripes[stripe];
  const Run& run = old->run;
  check_budget(region.label, run.bytes,
               " to write what " + run.segment->path + ", which is linked, holds" +
                   (settings_.spare > 0 ? "" : " (option links = true keeps room for that from the start)"));
  try {
    const auto fresh = std::make_shared<Room>(old->disk, old->disk->take(run.bytes, false));
    while (const uint32_t under_way = old->writes) old->writes.wait(under_way);
    old->disk->copy(run, fresh->run, 0, from);
    old->disk->copy(run, fresh->run, to, run.bytes - to);
    region.stripes[stripe] = fresh;
  } catch (const plugin_kit::Error& e) {
    raise(e.code(), "\"", region.label, "\": fresh room for ", run.bytes, " bytes of ", run.segment->path,
          ", which is linked: ", e.text());
  }
}

// No stripe of this range lies in a linked segment afterwards.
void Regions::make_writable(Region& region, uint64_t offset, uint64_t bytes) const {
  const uint64_t size = settings_.stripe_bytes, end = offset + bytes;
  const Segment* writable = nullptr;
  for (uint64_t at = offset, next = 0; at < end; at = next) {
    const uint64_t stripe = at / size;
    next = std::min(end, (stripe + 1) * size);
    const Room& room = *region.stripes[stripe];
    if (room.run.segment == writable) continue;
    if (room.disk->is_linked(*room.run.segment)) move_stripe(region, stripe, at % size, next - stripe * size);
    writable = region.stripes[stripe]->run.segment;
  }
}

Places Regions::places(Region& region, bool write, uint64_t offset, uint64_t bytes) const {
  Places all;
  const uint64_t size = settings_.stripe_bytes, end = offset + bytes;
  std::lock_guard lock(region.mutex);
  if (write) make_writable(region, offset, bytes);
  const auto first = region.stripes.begin() + static_cast<ptrdiff_t>(offset / size);
  all.rooms.assign(first, first + static_cast<ptrdiff_t>((end - 1) / size - offset / size + 1));
  for (uint64_t at = offset, next = 0; at < end; at = next) {
    next = std::min(end, (at / size + 1) * size);
    const Room* const room = region.stripes[at / size].get();
    const uint64_t place = room->run.offset + at % size;
    Places::Part* const last = all.parts.empty() ? nullptr : &all.parts.back();
    if (last && last->room->run.segment == room->run.segment && last->offset + last->bytes == place) {
      last->bytes += next - at;
    } else {
      all.parts.push_back({room, at, next - at, place});
    }
  }
  for (const auto& room : all.rooms) room->writes += write;
  return all;
}

void Regions::let_go(Places& places, bool write) {
  for (const auto& room : places.rooms) {
    if (write && --room->writes == 0) room->writes.notify_all();
  }
  places = {};
}

bool Regions::drop(strata_region id) {
  std::shared_ptr<Region> region;  // goes without the lock
  std::lock_guard lock(mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end()) return false;
  region = std::move(found->second);
  regions_.erase(found);
  used_ -= region->bytes;
  return true;
}

std::shared_ptr<Region> Regions::find(strata_region id) const {
  std::lock_guard lock(mutex_);
  const auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second;
}

// Of a stripe: the pointer to its room, and the room with the count of who holds it, each with what malloc adds.
uint64_t Regions::host_bytes_per_mib() const {
  constexpr uint64_t kMiB = uint64_t{1} << 20, kStripe = sizeof(std::shared_ptr<const Room>) + sizeof(Room) + 48;
  const uint64_t hashes = settings_.checksum ? kMiB / settings_.block * sizeof(uint64_t) : 0;
  return kMiB / settings_.stripe_bytes * kStripe + hashes;
}

// Regions, and what spare space there is beyond these bytes.
uint64_t Regions::used_beside(uint64_t spare) const {
  uint64_t there = 0;
  for (const Disk* disk : disks_) there += disk->spare_bytes();
  std::lock_guard lock(mutex_);
  return used_ + there - std::min(there, spare);
}

}  // namespace strata::offload_nvme
