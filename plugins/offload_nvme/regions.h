// regions.h - the index: which bytes of which segment of which disk each region is.
//
// A region is cut into stripes of `stripe_bytes`, dealt out to the disks in proportion to their weights, so that any
// long piece of it uses all of them at once. What a disk gets of a new region is one run of a segment, or several where
// it is longer than a segment may be; of these each stripe holds its own part. A write to a stripe in a segment that
// somebody links moves the stripe first: it gets fresh room, what the write leaves of it is copied, and the old bytes
// stay as they are.
//
// Budgets count the bytes asked for, and spare space (disk.h); room is taken in whole blocks. Where links are
// announced, regions leave a part of the budget to spare space.
//
// Threads: `make` and `drop` come from one caller at a time; the others may run beside them.
#pragma once

#include <mutex>
#include <unordered_map>

#include "disk.h"
#include "strata/iface/offload.h"

namespace strata::offload_nvme {

struct Region {
  uint64_t bytes = 0;
  std::string label;
  std::vector<uint64_t> hashes;  // of each block, where checksums are asked for
  std::mutex mutex;              // of `stripes`
  std::vector<std::shared_ptr<const Room>> stripes;
};

// Where the bytes of a transfer lie. They stay there until it lets go.
struct Places {
  struct Part {
    const Room* room;       // that it begins in
    uint64_t begin, bytes;  // of the region
    uint64_t offset;        // in the segment
  };
  std::vector<Part> parts;
  std::vector<std::shared_ptr<const Room>> rooms;
};

class Regions {
 public:
  struct Settings {
    uint64_t stripe_bytes = uint64_t{1} << 20;   // a multiple of the block
    uint64_t segment_bytes = uint64_t{1} << 30;  // a multiple of the stripe
    uint64_t block = 4096;
    uint64_t budget = 0;
    uint64_t spare = 0;         // of the budget, what regions do not take
    std::string budget_reason;  // as in strata_offload_caps
    bool checksum = false;
  };
  // `shares` of the disks add up to 1.
  Regions(const Settings& settings, std::vector<Disk*> disks, std::vector<double> shares);

  strata_region make(uint64_t bytes, const char* label);
  bool drop(strata_region id);                           // false: there is none
  std::shared_ptr<Region> find(strata_region id) const;  // NULL: there is none

  // Of whole blocks. For a write, no segment among them is linked; with parts of a stripe to move, this waits for the
  // disk. Raises RESOURCE_EXHAUSTED.
  Places places(Region& region, bool write, uint64_t offset, uint64_t bytes) const;
  static void let_go(Places& places, bool write);

  // Host memory of the index and the checksums of a MiB of regions, rounded up.
  uint64_t host_bytes_per_mib() const;

  uint64_t used() const { return used_beside(settings_.spare); }  // of budget()
  uint64_t budget() const { return settings_.budget - settings_.spare; }
  const std::string& budget_reason() const { return settings_.budget_reason; }
  uint64_t block() const { return settings_.block; }

 private:
  std::vector<size_t> deal(uint64_t bytes);
  uint64_t used_beside(uint64_t spare) const;
  void check_budget(const std::string& label, uint64_t bytes, const std::string& what) const;
  void make_writable(Region& region, uint64_t offset, uint64_t bytes) const;
  void move_stripe(Region& region, uint64_t stripe, uint64_t from, uint64_t to) const;

  const Settings settings_;
  const std::vector<Disk*> disks_;
  const std::vector<double> shares_;
  std::vector<double> passes_;  // how much each disk has been given, over its share
  mutable std::mutex mutex_;
  std::unordered_map<strata_region, std::shared_ptr<Region>> regions_;
  strata_region last_id_ = 0;
  uint64_t used_ = 0;
};

// XXH3-64 of a block.
uint64_t hash_of(const char* block, uint64_t bytes);

}  // namespace strata::offload_nvme
