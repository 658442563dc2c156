// layout.h - shard arithmetic: which element of which flat buffer a param is, and who owns it. No memory here.
//
// A unit's params lie in segments, one per (dtype, trainable or frozen, and under model parallelism which ranks count
// it in the norm). Inside a segment they are sorted by optimizer group and each starts at a multiple of 256 bytes. A
// segment is cut into `world` equal shards, each a multiple of 2,048 elements and of 4,096 bytes; what no param covers
// is zeros that no norm, file or count sees.
//
// At stage 3 the params of at most `param_persistence_threshold` elements of all units form one more unit, the
// resident one: its weights stay whole on every rank and are gathered once per step in one call. They have at most
// `model_persistence_threshold` elements together: in the order of registration, one that does not fit is sharded, and
// a smaller one after it may fit. They keep the step count and the used flag of the unit they were registered in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/manifest/settings.h"
#include "core/places.h"
#include "core/registry.h"

namespace strata {

constexpr uint64_t kShardElements = 2048;  // STRATA_NORM_BLOCK: a block of the norm never crosses an owner
constexpr uint64_t kParamAlign = 256;      // bytes

inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// Half-open range of a segment's elements.
struct Range {
  uint64_t begin = 0, end = 0;
  uint64_t size() const { return end - begin; }
};
Range intersect(Range a, Range b);

// Neighbouring params of one group and one registered unit: they take the same scalars.
struct Run {
  Range range;
  uint32_t group = 0;
  uint32_t unit = 0;
};

struct Segment {
  std::string name;  // "layer3/bf16", "layer3/bf16.frozen", "layer3/bf16.replicated"
  strata_dtype dtype = 0;
  bool trainable = false;
  bool counted = true;           // in the norm, by this rank; else it is a copy that another part of the model counts
  std::vector<uint32_t> params;  // owners, in order of their offsets
  std::vector<Run> runs;         // trainable only
  std::vector<Range> gaps;       // what no param covers
  uint64_t elements = 0;         // world * shard
  uint64_t shard = 0;            // elements of one rank's slice
  uint64_t full_bytes() const { return elements * dtype_size(dtype); }
  uint64_t shard_bytes() const { return shard * dtype_size(dtype); }
  Range slice(int rank) const {
    return {shard * static_cast<uint64_t>(rank), shard * (static_cast<uint64_t>(rank) + 1)};
  }
};

struct Unit {
  std::string name;
  std::vector<Segment> segments;
  std::vector<uint32_t> needs;    // other layout units that fetching this one brings (owners of tied params, resident)
  std::vector<uint32_t> feeds;    // layout units that get gradients through this one's params, itself included
  std::vector<uint32_t> feeders;  // the other way round: registered units whose gradients end up here
  uint64_t elements = 0;          // of all segments
  uint64_t trainable_elements = 0;  // of the trainable ones
  uint64_t full_bytes = 0, shard_bytes = 0;
};

struct Layout {
  int stage = 0;
  Places places;
  int rank = 0;  // of the data-parallel group, which shards
  int world = 1;
  std::vector<Unit> units;       // the registered ones, in order; then the resident one if there is one
  int resident = -1;             // its index
  bool offloads_params = false;  // shards of sharded units lie in a tier

  // True when the unit's whole weights stay on every rank, so that a fetch copies nothing.
  bool is_whole(uint32_t unit) const {
    return stage < 3 || (world == 1 && !offloads_params) || static_cast<int>(unit) == resident;
  }
  // What this rank updates and keeps state for.
  Range owned(const Segment& s) const { return stage == 0 ? Range{0, s.elements} : s.slice(rank); }
};

// The param that covers an element of a segment; "" for a gap.
std::string param_at(const Registry& registry, const Segment& segment, uint64_t element);

// Fills in home, segment and offset of the registry's params, too.
Layout make_layout(Registry& registry, const ZeroSettings& zero, const Places& places, bool offloads_params);

}  // namespace strata
