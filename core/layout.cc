#include "core/layout.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace strata {

Range intersect(Range a, Range b) {
  const uint64_t begin = std::max(a.begin, b.begin), end = std::min(a.end, b.end);
  return begin < end ? Range{begin, end} : Range{begin, begin};
}

namespace {

// Gives every param of the segment its place, and cuts the segment into shards.
void place(Registry& registry, Segment& s, uint32_t home, uint32_t index, uint64_t world) {
  std::stable_sort(s.params.begin(), s.params.end(), [&](uint32_t a, uint32_t b) {
    const Param &x = registry.params[a], &y = registry.params[b];
    return std::tie(x.group, x.unit) < std::tie(y.group, y.unit);
  });
  const uint64_t align = kParamAlign / dtype_size(s.dtype);
  uint64_t covered = 0;
  for (uint32_t id : s.params) {
    Param& p = registry.params[id];
    p.home = home;
    p.segment = index;
    p.offset = round_up(covered, align);
    if (p.offset > covered) s.gaps.push_back({covered, p.offset});
    covered = p.offset + p.numel;
    if (!s.trainable || p.numel == 0) continue;
    if (!s.runs.empty() && s.runs.back().group == p.group && s.runs.back().unit == p.unit) {
      s.runs.back().range.end = covered;
    } else {
      s.runs.push_back({{p.offset, covered}, p.group, p.unit});
    }
  }
  s.shard = round_up((covered + world - 1) / world, kShardElements);
  s.elements = s.shard * world;
  if (s.elements > covered) s.gaps.push_back({covered, s.elements});
}

// Which ranks hold the same values. The norm counts them once, and its blocks never mix them.
enum Copies { kSplit, kReplicated, kShared };
const char* const kCopiesNames[] = {"", ".replicated", ".shared"};

Copies copies_of(const Param& p, const Places& places) {
  if (p.frozen) return kSplit;  // no gradient, and no norm
  if (p.shared) return kShared;
  return places.tensor.size > 1 && !p.tensor_model_parallel ? kReplicated : kSplit;
}

void finish_unit(Registry& registry, Unit& unit, uint32_t home, std::vector<uint32_t> params, const Places& places) {
  const auto world = static_cast<uint64_t>(places.data.size);
  std::map<std::tuple<strata_dtype, bool, Copies>, Segment> by_kind;  // ordered: the same on every rank
  for (uint32_t id : params) {
    const Param& p = registry.params[id];
    const Copies copies = copies_of(p, places);
    Segment& s = by_kind[{p.dtype, p.frozen, copies}];
    s.dtype = p.dtype;
    s.trainable = !p.frozen;
    s.counted = copies == kSplit || (copies == kReplicated && places.tensor.rank == 0);
    s.params.push_back(id);
  }
  for (auto& [kind, s] : by_kind) {
    s.name = unit.name + "/" + dtype_name(s.dtype) + (s.trainable ? "" : ".frozen") + kCopiesNames[std::get<2>(kind)];
    place(registry, s, home, static_cast<uint32_t>(unit.segments.size()), world);
    unit.elements += s.elements;
    if (s.trainable) unit.trainable_elements += s.elements;
    unit.full_bytes += s.full_bytes();
    unit.shard_bytes += s.shard_bytes();
    unit.segments.push_back(std::move(s));
  }
}

void link_units(const Registry& registry, Layout& layout) {
  auto add = [](std::vector<uint32_t>& list, uint32_t unit) {
    if (std::find(list.begin(), list.end(), unit) == list.end()) list.push_back(unit);
  };
  for (uint32_t u = 0; u < registry.units.size(); ++u) {
    Unit& unit = layout.units[u];
    if (layout.resident >= 0) add(unit.needs, static_cast<uint32_t>(layout.resident));
    for (uint32_t id : registry.units[u].params) {
      const Param& owner = registry.owner_of(id);
      if (owner.home != u) add(unit.needs, owner.home);
      if (owner.frozen) continue;
      add(unit.feeds, owner.home);
      add(layout.units[owner.home].feeders, u);
    }
  }
}

}  // namespace

std::string param_at(const Registry& registry, const Segment& segment, uint64_t element) {
  for (uint32_t id : segment.params) {
    const Param& p = registry.params[id];
    if (element >= p.offset && element < p.offset + p.numel) return p.name;
  }
  return "";
}

Layout make_layout(Registry& registry, const ZeroSettings& zero, const Places& places, bool offloads_params) {
  const auto largest = static_cast<uint64_t>(zero.param_persistence_threshold);
  auto room = static_cast<uint64_t>(zero.model_persistence_threshold);
  Layout layout;
  layout.offloads_params = offloads_params;
  layout.stage = static_cast<int>(zero.stage);
  layout.places = places;
  layout.rank = places.data.rank;
  layout.world = places.data.size;
  std::vector<uint32_t> resident;
  for (uint32_t u = 0; u < registry.units.size(); ++u) {
    std::vector<uint32_t> own;
    for (uint32_t id : registry.units[u].params) {
      const Param& p = registry.params[id];
      if (p.owner != id) continue;  // the storage is laid out where its owner is
      const bool keep = layout.stage == 3 && p.numel <= largest && p.numel <= room;
      if (keep) room -= p.numel;
      (keep ? resident : own).push_back(id);
    }
    Unit unit;
    unit.name = registry.units[u].name;
    finish_unit(registry, unit, u, std::move(own), places);
    layout.units.push_back(std::move(unit));
  }
  if (!resident.empty()) {
    layout.resident = static_cast<int>(layout.units.size());
    Unit unit;
    unit.name = "resident params";
    finish_unit(registry, unit, static_cast<uint32_t>(layout.resident), std::move(resident), places);
    layout.units.push_back(std::move(unit));
  }
  link_units(registry, layout);
  return layout;
}

}  // namespace strata
