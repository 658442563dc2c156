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
      STRATA_RETURN_IF_ERROR(check_memory(layout));
    }
  }
  return Ok();
}

Status States::check_memory(const strata_optim_layout& layout) const {
  const strata_device_type wants = layout.memory == 0 ? STRATA_CPU : layout.memory;
  const strata_device_type has = on_host() ? STRATA_CPU : device_.type();
  if (wants == has) return Ok();
  if (wants == STRATA_CPU) {
    return {STRATA_FAILED_PRECONDITION,
            "plugins.optimizer updates host memory and the optimizer state is on the device: "
            "choose a plugin for that device, or zero_optimization.offload_optimizer.device "
            "= \"cpu\""};
  }
  return {STRATA_FAILED_PRECONDITION, "plugins.optimizer updates memory of a device (type " + std::to_string(wants) +
                                          ") and the optimizer state is in host memory: choose one for host memory, as "
                                          "optim_adamw, or zero_optimization.offload_optimizer.device = \"none\""};
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
  *weight = weight_in_place(piece.unit) ? owned.address + piece.begin * dtype_size(s.dtype) : buffer;
}

Status States::memory_for_updates(uint64_t bytes, Memory* out) const {
  return on_host() ? Memory::shared_with_host(device_, bytes, out) : Memory::on_device(device_, bytes, out);
}

// Calls move(region, offset in it, bytes, place in the buffer) for arrays that are not addressable.
template <class Move>
Status States::move_arrays(const Piece& piece, char* buffer, Move move) const {
  const auto& layout = layout_of(layout_.units[piece.unit].segments[piece.segment]);
  for (uint32_t a = 0; a < layout.array_count; ++a) {
    const uint64_t size = layout.arrays[a].bytes_per_element;
    const Region& region = regions_[piece.unit][piece.segment][a];
    if (!region.address()) STRATA_RETURN_IF_ERROR(move(region, piece.begin * size, piece.count * size, buffer));
    buffer += piece.count * size;
  }
  return Ok();
}

// The weight lies behind the arrays in a buffer.
Status States::move_weight(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                           std::vector<Work>* done) const {
  if (weight_in_place(piece.unit)) return Ok();
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const uint64_t size = dtype_size(s.dtype), bytes = piece.count * size;
  char* here = buffer + buffer_bytes(s, piece.count) - bytes;
  const OwnedWeights owned = weights_.owned(piece.unit, piece.segment);
  if (!weights_.on_device(piece.unit)) {
    const Work& work = done->emplace_back(Work::create());
    const uint64_t offset = owned.offset + piece.begin * size;
    return write ? weights_.tier().write(*owned.region, offset, bytes, here, work.event())
                 : weights_.tier().read(*owned.region, offset, bytes, here, work.event());
  }
  char* there = owned.address + piece.begin * size;
  STRATA_RETURN_IF_ERROR(device_.copy(write ? there : here, write ? here : there, bytes, stream));
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &end));
  done->push_back(Work::ending_at(end));
  return Ok();
}

Status States::load(const Piece& piece, char* buffer, bool weight_too, const strata_stream* stream,
                    std::vector<Work>* done) const {
  STRATA_RETURN_IF_ERROR(
      move_arrays(piece, buffer, [&](const Region& region, uint64_t offset, uint64_t bytes, char* to) {
        return tier_.read(region, offset, bytes, to, done->emplace_back(Work::create()).event());
      }));
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const bool is_state = (layout_of(s).flags & STRATA_OPTIM_WEIGHT_IS_STATE) != 0;
  return is_state || weight_too ? move_weight(false, piece, buffer, stream, done) : Ok();
}

Status States::store(const Piece& piece, char* buffer, const strata_stream* stream, std::vector<Work>* done) const {
  STRATA_RETURN_IF_ERROR(
      move_arrays(piece, buffer, [&](const Region& region, uint64_t offset, uint64_t bytes, char* from) {
        return tier_.write(region, offset, bytes, from, done->emplace_back(Work::create()).event());
      }));
  return move_weight(true, piece, buffer, stream, done);
}

Status States::visit(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, bool write, const Visitor& fn) {
  const Segment& s = layout_.units[unit].segments[segment];
  const uint64_t end = first + count;
  if (!in_place(unit) && visit_buffer_.bytes() == 0) {
    STRATA_RETURN_IF_ERROR(memory_for_updates(32 * kVisitElements, &visit_buffer_));
  }
  while (first < end) {
    Piece piece{unit, segment, first / kShardElements * kShardElements, 0};
    piece.count = std::min(round_up(end, kShardElements) - piece.begin, kVisitElements);
    std::vector<void*> arrays;
    std::vector<Work> done;
    const auto wait = [&done] {
      for (const Work& work : done) STRATA_RETURN_IF_ERROR(work.before(nullptr, std::chrono::nanoseconds(-1)));
      done.clear();
      return Ok();
    };
    strata_optim_args args{};
    args.struct_size = sizeof(args);
    // What fn leaves alone of the piece must be stored back as it was.
    STRATA_RETURN_IF_ERROR(load(piece, visit_buffer_.at(0), write, nullptr, &done));
    STRATA_RETURN_IF_ERROR(wait());
    point(piece, visit_buffer_.at(0), &arrays, &args.weight);
    const uint64_t here = std::min(end, piece.begin + piece.count) - first;
    const strata_optim_span span = {first - piece.begin, here, 0, 0};
    args.spans = &span;
    args.span_count = 1;
    args.span_stride = sizeof(span);
    args.weight_dtype = s.dtype;
    args.state = arrays.data();
    STRATA_RETURN_IF_ERROR(fn(args, first));
    if (write) STRATA_RETURN_IF_ERROR(store(piece, visit_buffer_.at(0), nullptr, &done));
    STRATA_RETURN_IF_ERROR(wait());
    first += here;
  }
  return Ok();
}

}  // namespace strata
