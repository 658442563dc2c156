#include "core/states.h"

#include <algorithm>
#include <utility>

namespace strata {

namespace {
constexpr uint64_t kVisitElements = 1u << 18;  // of a piece that `visit` reads at once
}

States::States(const Layout& layout, const Device& device, Optimizers optimizers, const StatePlaces& places,
               const Weights& weights)
    : layout_(layout), device_(device), optimizers_(optimizers), places_(places), weights_(weights) {}

Status States::declare() {
  const bool on_host = places_.offload().kind() != kDeviceTier || !device_.is_asynchronous();
  for (const Unit& u : layout_.units) {
    for (const Segment& s : u.segments) {
      if (!s.trainable || has_layout(s)) continue;
      auto& layout = layouts_[static_cast<size_t>(s.dtype)];
      STRATA_RETURN_IF_ERROR(optimizers_.main->layout(s.dtype, &layout).during("segment " + s.name));
      STRATA_RETURN_IF_ERROR(check_memory(layout, on_host));
      if (optimizers_.on_device) STRATA_RETURN_IF_ERROR(check_on_device(s));
    }
  }
  return Ok();
}

// What one optimizer leaves behind the other goes on with.
Status States::check_on_device(const Segment& s) const {
  strata_optim_layout other;
  STRATA_RETURN_IF_ERROR(optimizers_.on_device->layout(s.dtype, &other).during("plugins.device_optimizer"));
  STRATA_RETURN_IF_ERROR(check_memory(other, false).during("plugins.device_optimizer"));
  const strata_optim_layout& layout = layout_of(s);
  bool same = other.flags == layout.flags && other.array_count == layout.array_count;
  for (uint32_t a = 0; same && a < layout.array_count; ++a) {
    const auto &x = layout.arrays[a], &y = other.arrays[a];
    same = std::string(x.name) == y.name && x.dtype == y.dtype && x.bytes_per_element == y.bytes_per_element;
  }
  if (same) return Ok();
  return {STRATA_FAILED_PRECONDITION,
          "plugins.device_optimizer keeps other state than plugins.optimizer for segment " + s.name +
              ": they have to be two forms of one optimizer, as optim_adamw and optim_adamw_cuda"};
}

Status States::check_memory(const strata_optim_layout& layout, bool on_host) const {
  const strata_device_type wants = layout.memory == 0 ? STRATA_CPU : layout.memory;
  const strata_device_type has = on_host ? STRATA_CPU : device_.type();
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

uint64_t States::bytes_of(uint32_t unit) const {
  uint64_t bytes = 0;
  for (const Segment& s : layout_.units[unit].segments) {
    if (!s.trainable) continue;
    const auto& layout = layout_of(s);
    for (uint32_t a = 0; a < layout.array_count; ++a) {
      bytes += layout_.owned(s).size() * layout.arrays[a].bytes_per_element;
    }
  }
  return bytes;
}

uint64_t States::bytes(TierKind tier) const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) bytes += places_.tier(u).kind() == tier ? bytes_of(u) : 0;
  return bytes;
}

Status States::allocate() {
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    const Tier& tier = places_.tier(u);
    auto& unit = regions_.emplace_back();
    for (const Segment& s : layout_.units[u].segments) {
      auto& arrays = unit.emplace_back();
      if (!s.trainable) continue;
      const auto& layout = layout_of(s);
      for (uint32_t a = 0; a < layout.array_count; ++a) {
        const uint64_t bytes = layout_.owned(s).size() * layout.arrays[a].bytes_per_element;
        STRATA_RETURN_IF_ERROR(tier.alloc(bytes, s.name + " " + layout.arrays[a].name, &arrays.emplace_back()));
        if (tier.kind() == kDeviceTier && bytes > 0) {
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

uint64_t States::array_bytes(const Piece& piece) const {
  const auto& layout = layout_of(segment(piece));
  uint64_t bytes = 0;
  for (uint32_t a = 0; a < layout.array_count; ++a) bytes += piece.count * layout.arrays[a].bytes_per_element;
  return bytes;
}

uint64_t States::buffer_bytes(const Piece& piece) const {
  return (state_in_place(piece) ? 0 : array_bytes(piece)) + (weight_in_place(piece) ? 0 : weight_bytes(piece));
}

void States::point(const Piece& piece, char* buffer, std::vector<void*>* arrays, void** weight) const {
  const Segment& s = segment(piece);
  const auto& layout = layout_of(s);
  arrays->clear();
  for (uint32_t a = 0; a < layout.array_count; ++a) {
    const uint64_t size = layout.arrays[a].bytes_per_element;
    char* there = regions_[piece.unit][piece.segment][a].address();
    arrays->push_back(state_in_place(piece) ? there + piece.begin * size
                                            : std::exchange(buffer, buffer + piece.count * size));
  }
  const OwnedWeights owned = weights_.owned(piece.unit, piece.segment);
  *weight = weight_in_place(piece) ? owned.address + piece.begin * dtype_size(s.dtype) : buffer;
}

Status States::memory_for_updates(bool on_host, uint64_t bytes, Memory* out) const {
  return on_host ? Memory::shared_with_host(device_, bytes, out) : Memory::on_device(device_, bytes, out);
}

// The arrays that are not worked on in place.
Status States::move_arrays(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                           std::vector<Work>* done) const {
  if (state_in_place(piece)) return Ok();
  const Tier& tier = places_.tier(piece.unit);
  const auto& layout = layout_of(segment(piece));
  for (uint32_t a = 0; a < layout.array_count; ++a) {
    const uint64_t size = layout.arrays[a].bytes_per_element, offset = piece.begin * size, bytes = piece.count * size;
    const Region& region = regions_[piece.unit][piece.segment][a];
    char* here = std::exchange(buffer, buffer + bytes);
    if (piece.streamed) {
      char* there = region.address() + offset;
      STRATA_RETURN_IF_ERROR(device_.copy(write ? there : here, write ? here : there, bytes, stream));
      tier.count(write, bytes);
    } else {
      const Work work = Work::create();
      STRATA_RETURN_IF_ERROR(write ? tier.write(region, offset, bytes, here, work.event())
                                   : tier.read(region, offset, bytes, here, work.event()));
      done->push_back(work);  // a transfer that was refused never ends
    }
  }
  return Ok();
}

// The weight lies behind the arrays in a buffer.
Status States::move_weight(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                           std::vector<Work>* done) const {
  if (weight_in_place(piece)) return Ok();
  const uint64_t size = dtype_size(segment(piece).dtype), bytes = piece.count * size;
  char* here = buffer + buffer_bytes(piece) - bytes;
  const OwnedWeights owned = weights_.owned(piece.unit, piece.segment);
  if (!owned.address) {
    const Work work = Work::create();
    const uint64_t offset = owned.offset + piece.begin * size;
    STRATA_RETURN_IF_ERROR(write ? weights_.tier().write(*owned.region, offset, bytes, here, work.event())
                                 : weights_.tier().read(*owned.region, offset, bytes, here, work.event()));
    done->push_back(work);
    return Ok();
  }
  char* there = owned.address + piece.begin * size;
  STRATA_RETURN_IF_ERROR(device_.copy(write ? there : here, write ? here : there, bytes, stream));
  if (!weights_.on_device(piece.unit)) weights_.tier().count(write, bytes);
  if (!done) return Ok();
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &end));
  done->push_back(Work::ending_at(end));
  return Ok();
}

Status States::load(const Piece& piece, char* buffer, bool weight_too, const strata_stream* stream,
                    std::vector<Work>* done) const {
  STRATA_RETURN_IF_ERROR(move_arrays(false, piece, buffer, stream, done));
  const bool is_state = (layout_of(segment(piece)).flags & STRATA_OPTIM_WEIGHT_IS_STATE) != 0;
  return is_state || weight_too ? move_weight(false, piece, buffer, stream, done) : Ok();
}

Status States::store(const Piece& piece, char* buffer, const strata_stream* stream, std::vector<Work>* done) const {
  STRATA_RETURN_IF_ERROR(move_arrays(true, piece, buffer, stream, done));
  return move_weight(true, piece, buffer, stream, done);
}

Status States::visit(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, bool write, const Visitor& fn) {
  const Segment& s = layout_.units[unit].segments[segment];
  const uint64_t end = first + count;
  const bool on_host = places_.on_host(unit);
  Memory& buffer = visit_buffers_[on_host ? 1 : 0];
  if (!in_place({unit, segment}) && buffer.bytes() == 0) {
    STRATA_RETURN_IF_ERROR(memory_for_updates(on_host, 32 * kVisitElements, &buffer));
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
    STRATA_RETURN_IF_ERROR(load(piece, buffer.at(0), write, nullptr, &done));
    STRATA_RETURN_IF_ERROR(wait());
    point(piece, buffer.at(0), &arrays, &args.weight);
    const uint64_t here = std::min(end, piece.begin + piece.count) - first;
    const strata_optim_span span = {first - piece.begin, here, 0, 0};
    args.spans = &span;
    args.span_count = 1;
    args.span_stride = sizeof(span);
    args.weight_dtype = s.dtype;
    args.state = arrays.data();
    STRATA_RETURN_IF_ERROR(fn(args, first));
    if (write) STRATA_RETURN_IF_ERROR(store(piece, buffer.at(0), nullptr, &done));
    STRATA_RETURN_IF_ERROR(wait());
    first += here;
  }
  return Ok();
}

}  // namespace strata
