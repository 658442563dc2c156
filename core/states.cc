#include "core/states.h"

#include <algorithm>

namespace strata {

namespace {
constexpr uint64_t kVisitElements = 1u << 18;  // of a piece that `visit` reads at once
}

States::States(const Layout& layout, const Device& device, const Optimizer& optimizer, const Tier& tier,
               const Weights& weights)
    : layout_(layout), device_(device), optimizer_(optimizer), tier_(tier), weights_(weights) {}

Status States::declare() {
  for (const Unit& u : layout_.units) {
    for (const Segment& s : u.segments) {
      if (!s.trainable || has_layout(s)) continue;
      auto& layout = layouts_[static_cast<size_t>(s.dtype)];
      STRATA_RETURN_IF_ERROR(optimizer_.layout(s.dtype, &layout).during("segment " + s.name));
    }
  }
  return Ok();
}

uint64_t States::bytes() const {
  uint64_t bytes = 0;
  for (const Unit& u : layout_.units) {
    for (const Segment& s : u.segments) {
      if (!s.trainable) continue;
      const auto& layout = layout_of(s);
      for (uint32_t a = 0; a < layout.array_count; ++a) {
        bytes += layout_.owned(s).size() * layout.arrays[a].bytes_per_element;
      }
    }
  }
  return bytes;
}

Status States::allocate() {
  for (const Unit& u : layout_.units) {
    auto& unit = regions_.emplace_back();
    for (const Segment& s : u.segments) {
      auto& arrays = unit.emplace_back();
      if (!s.trainable) continue;
      const auto& layout = layout_of(s);
      for (uint32_t a = 0; a < layout.array_count; ++a) {
        const uint64_t bytes = layout_.owned(s).size() * layout.arrays[a].bytes_per_element;
        STRATA_RETURN_IF_ERROR(tier_.alloc(bytes, s.name + " " + layout.arrays[a].name, &arrays.emplace_back()));
        if (tier_.kind() == kDeviceTier && bytes > 0) {
          STRATA_RETURN_IF_ERROR(device_.zero(arrays.back().address(), bytes));
        }
      }
    }
  }
  return Ok();
}

int States::canonical_index(const Segment& s, const std::string& name) const {
  const auto& layout = layout_of(s);
  for (uint32_t i = 0; i < layout.canonical_count; ++i) {
    if (name == layout.canonical[i]) return static_cast<int>(i);
  }
  return -1;
}

uint64_t States::buffer_bytes(const Segment& s, uint64_t count) const {
  const auto& layout = layout_of(s);
  uint64_t per_element = dtype_size(s.dtype);
  for (uint32_t a = 0; a < layout.array_count; ++a) per_element += layout.arrays[a].bytes_per_element;
  return per_element * count;
}

void States::point(const Piece& piece, char* buffer, std::vector<void*>* arrays, void** weight) const {
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const auto& layout = layout_of(s);
  arrays->clear();
  for (uint32_t a = 0; a < layout.array_count; ++a) {
    const uint64_t size = layout.arrays[a].bytes_per_element;
    char* there = regions_[piece.unit][piece.segment][a].address();
    arrays->push_back(there ? there + piece.begin * size : buffer);
    buffer += piece.count * size;
  }
  const OwnedWeights owned = weights_.owned(piece.unit, piece.segment);
  *weight = owned.address ? owned.address + piece.begin * dtype_size(s.dtype) : buffer;
}

template <class Move>
Status States::transfer(const Piece& piece, char* buffer, bool weight_too, Move move) const {
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const auto& layout = layout_of(s);
  for (uint32_t a = 0; a < layout.array_count; ++a) {
    const uint64_t size = layout.arrays[a].bytes_per_element;
    const Region& region = regions_[piece.unit][piece.segment][a];
    if (!region.address()) STRATA_RETURN_IF_ERROR(move(tier_, region, piece.begin * size, piece.count * size, buffer));
    buffer += piece.count * size;
  }
  const OwnedWeights owned = weights_.owned(piece.unit, piece.segment);
  if (owned.address || !weight_too) return Ok();
  const uint64_t size = dtype_size(s.dtype);
  return move(weights_.tier(), *owned.region, owned.offset + piece.begin * size, piece.count * size, buffer);
}

Status States::load(const Piece& piece, char* buffer, std::vector<Event>* done) const {
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const bool weight_too = (layout_of(s).flags & STRATA_OPTIM_WEIGHT_IS_STATE) != 0;
  return transfer(piece, buffer, weight_too,
                  [&](const Tier& tier, const Region& region, uint64_t offset, uint64_t bytes, char* to) {
                    Event event = Event::create();
                    STRATA_RETURN_IF_ERROR(tier.read(region, offset, bytes, to, event.get()));
                    done->push_back(std::move(event));
                    return Ok();
                  });
}

Status States::store(const Piece& piece, char* buffer, std::vector<Event>* done) const {
  return transfer(piece, buffer, true,
                  [&](const Tier& tier, const Region& region, uint64_t offset, uint64_t bytes, char* from) {
                    Event event = Event::create();
                    STRATA_RETURN_IF_ERROR(tier.write(region, offset, bytes, from, event.get()));
                    done->push_back(std::move(event));
                    return Ok();
                  });
}

Status States::visit(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, bool write, const Visitor& fn) {
  const Segment& s = layout_.units[unit].segments[segment];
  const uint64_t end = first + count;
  if (!in_place(unit) && visit_buffer_.bytes() == 0) {
    STRATA_RETURN_IF_ERROR(Memory::on_device(device_, 32 * kVisitElements, &visit_buffer_));
  }
  while (first < end) {
    Piece piece{unit, segment, first / kShardElements * kShardElements, 0};
    piece.count = std::min(round_up(end, kShardElements) - piece.begin, kVisitElements);
    std::vector<void*> arrays;
    std::vector<Event> done;
    strata_optim_args args{};
    args.struct_size = sizeof(args);
    STRATA_RETURN_IF_ERROR(load(piece, visit_buffer_.at(0), &done));
    if (write && !weights_.addressable(unit) && !(layout_of(s).flags & STRATA_OPTIM_WEIGHT_IS_STATE)) {
      // The part of the piece that fn leaves alone must be stored back as it was.
      const OwnedWeights owned = weights_.owned(unit, segment);
      const uint64_t size = dtype_size(s.dtype);
      void* weight = nullptr;
      point(piece, visit_buffer_.at(0), &arrays, &weight);
      STRATA_RETURN_IF_ERROR(
          weights_.tier().read(*owned.region, owned.offset + piece.begin * size, piece.count * size, weight, nullptr));
    }
    for (Event& e : done) STRATA_RETURN_IF_ERROR(e->wait(std::chrono::nanoseconds(-1)));
    done.clear();
    point(piece, visit_buffer_.at(0), &arrays, &args.weight);
    const uint64_t here = std::min(end, piece.begin + piece.count) - first;
    const strata_optim_span span = {first - piece.begin, here, 0, 0};
    args.spans = &span;
    args.span_count = 1;
    args.span_stride = sizeof(span);
    args.weight_dtype = s.dtype;
    args.state = arrays.data();
    STRATA_RETURN_IF_ERROR(fn(args, first));
    if (write) STRATA_RETURN_IF_ERROR(store(piece, visit_buffer_.at(0), &done));
    for (Event& e : done) STRATA_RETURN_IF_ERROR(e->wait(std::chrono::nanoseconds(-1)));
    first += here;
  }
  return Ok();
}

}  // namespace strata
