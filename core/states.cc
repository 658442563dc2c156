#include "core/states.h"

#include <algorithm>
#include <utility>

namespace strata {

namespace {
constexpr uint64_t kVisitElements = 1u << 18;  // of a piece that `visit` reads at once

strata_device_type memory_of(const strata_optim_layout& layout) {
  return layout.memory == 0 ? STRATA_CPU : layout.memory;
}
constexpr uint64_t kBounceBytes = 4u << 20;  // of weights between disk and device
}  // namespace

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
  if (memory_of(other) != device_.type()) {
    return {STRATA_FAILED_PRECONDITION,
            "plugins.device_optimizer updates memory of device type " + std::to_string(memory_of(other)) +
                ", and its part of the optimizer state is on the device, of type " + std::to_string(device_.type()) +
                ": choose a plugin for that device, as optim_adamw_cuda"};
  }
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
  const strata_device_type wants = memory_of(layout);
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

uint64_t States::bytes_of(uint32_t unit, bool front) const {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < layout_.units[unit].segments.size(); ++i) {
    const Segment& s = layout_.units[unit].segments[i];
    if (!s.trainable) continue;
    const uint64_t owned = layout_.owned(s).size(), in_front = places_.front(unit, i);
    const auto& layout = layout_of(s);
    for (uint32_t a = 0; a < layout.array_count; ++a) {
      bytes += (front ? in_front : owned - in_front) * layout.arrays[a].bytes_per_element;
    }
  }
  return bytes;
}

uint64_t States::bytes(TierKind tier) const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    bytes += places_.tier(u).kind() == tier ? bytes_of(u, false) : 0;
    bytes += tier == kCpuTier ? bytes_of(u, true) : 0;
  }
  return bytes;
}

uint64_t States::front_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) bytes += bytes_of(u, true);
  return bytes;
}

StatePlaces::Sizes States::sizes() const {
  StatePlaces::Sizes sizes;
  for (const Unit& u : layout_.units) {
    auto& unit = sizes.emplace_back();
    for (const Segment& s : u.segments) unit.push_back(s.trainable ? layout_.owned(s).size() : 0);
  }
  return sizes;
}

uint64_t States::bounce_bytes() const {
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    if (optimizers_.on_device && device_.is_asynchronous() && !weights_.addressable(u)) return kBounceBytes;
  }
  return 0;
}

uint64_t States::visit_bytes(bool on_host) const { return largest_buffer(kVisitElements, on_host).bytes; }

// Of a front that is kept in memory only the weight may have to pass through a buffer.
States::Buffer States::largest_buffer(uint64_t elements, bool on_host) const {
  Buffer largest;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    for (uint32_t i = 0; i < layout_.units[u].segments.size() && places_.on_host(u) == on_host; ++i) {
      const Segment& s = layout_.units[u].segments[i];
      for (const uint64_t begin : {uint64_t{0}, front(u, i)}) {
        const Piece piece{u, i, begin, std::min(elements, layout_.owned(s).size() - begin)};
        const uint64_t bytes = s.trainable ? buffer_bytes(piece) : 0;
        if (bytes > largest.bytes) largest = {bytes, piece.count};
      }
    }
  }
  return largest;
}

Status States::allocate(Streams streams) {
  const uint32_t front_flags = streams == Streams::kNothing ? STRATA_REGION_HOST_ONLY : 0;
  const uint32_t flags = streams == Streams::kAny ? 0 : STRATA_REGION_HOST_ONLY;
  for (const bool on_host : {false, true}) {
    Memory* buffer = &visit_buffers_[on_host ? 1 : 0];
    STRATA_RETURN_IF_ERROR(memory_for_updates(on_host, visit_bytes(on_host), buffer).during("state staging"));
  }
  STRATA_RETURN_IF_ERROR(Memory::shared_with_host(device_, bounce_bytes(), &bounce_).during("weight bounce"));
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    const Tier& tier = places_.tier(u);
    auto& unit = arrays_.emplace_back();
    for (uint32_t i = 0; i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      Arrays& arrays = unit.emplace_back();
      if (!s.trainable) continue;
      const auto& layout = layout_of(s);
      const uint64_t owned = layout_.owned(s).size(), in_front = places_.front(u, i);
      for (uint32_t a = 0; a < layout.array_count; ++a) {
        const std::string label = s.name + " " + layout.arrays[a].name;
        const uint64_t size = layout.arrays[a].bytes_per_element, bytes = (owned - in_front) * size;
        STRATA_RETURN_IF_ERROR(tier.alloc(bytes, label, &arrays.rest.emplace_back(), flags));
        if (tier.kind() == kDeviceTier && bytes > 0) {
          STRATA_RETURN_IF_ERROR(device_.zero(arrays.rest.back().address(), bytes));
        }
        if (in_front == 0) continue;
        Region& region = arrays.front.emplace_back();
        STRATA_RETURN_IF_ERROR(places_.front_tier().alloc(in_front * size, label, &region, front_flags));
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

States::Place States::place(const Piece& piece, uint32_t array) const {
  const Arrays& arrays = arrays_[piece.unit][piece.segment];
  const uint64_t size = layout_of(segment(piece)).arrays[array].bytes_per_element;
  if (in_front(piece)) return {arrays.front[array], piece.begin * size};
  return {arrays.rest[array], (piece.begin - front(piece.unit, piece.segment)) * size};
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
    const Place there = place(piece, a);
    const uint64_t bytes = piece.count * layout.arrays[a].bytes_per_element;
    arrays->push_back(state_in_place(piece) ? there.region.address() + there.offset
                                            : std::exchange(buffer, buffer + bytes));
  }
  const OwnedWeights owned = weights_.owned(piece.unit, piece.segment);
  *weight = weight_in_place(piece) ? owned.address + piece.begin * dtype_size(s.dtype) : buffer;
}

Status States::memory_for_updates(bool on_host, uint64_t bytes, Memory* out) const {
  return on_host ? Memory::shared_with_host(device_, bytes, out) : Memory::on_device(device_, bytes, out);
}

Status States::register_buffer(const Memory& memory, std::vector<Registration>* out) const {
  const Tier& state = places_.offload();
  const uint64_t whole = memory.bytes() / 4096 * 4096;
  STRATA_RETURN_IF_ERROR(state.register_memory(memory.at(0), whole, &out->emplace_back()));
  // One instance of a plugin serves both.
  if (weights_.offload().kind() == state.kind()) return Ok();
  return weights_.offload().register_memory(memory.at(0), whole, &out->emplace_back());
}

// The arrays that are not worked on in place.
Status States::move_arrays(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                           std::vector<Work>* done) const {
  if (state_in_place(piece)) return Ok();
  const Tier& tier = places_.tier(piece.unit);
  const auto& layout = layout_of(segment(piece));
  for (uint32_t a = 0; a < layout.array_count; ++a) {
    const auto [region, offset] = place(piece, a);
    const uint64_t bytes = piece.count * layout.arrays[a].bytes_per_element;
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
    const Tier& tier = weights_.tier(piece.unit);
    const uint64_t offset = owned.offset + piece.begin * size;
    if (!on_host(piece)) return move_through_host(write, *owned.region, offset, bytes, here, stream);
    const Work work = Work::create();
    STRATA_RETURN_IF_ERROR(write ? tier.write(*owned.region, offset, bytes, here, work.event())
                                 : tier.read(*owned.region, offset, bytes, here, work.event()));
    done->push_back(work);
    return Ok();
  }
  char* there = owned.address + piece.begin * size;
  STRATA_RETURN_IF_ERROR(device_.copy(write ? there : here, write ? here : there, bytes, stream));
  if (!weights_.on_device(piece.unit)) weights_.tier(piece.unit).count(write, bytes);
  if (!done) return Ok();
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &end));
  done->push_back(Work::ending_at(end));
  return Ok();
}

// Weights on disk that the device updates: in small pieces, and done on return.
Status States::move_through_host(bool write, const Region& region, uint64_t offset, uint64_t bytes, char* here,
                                 const strata_stream* stream) const {
  for (uint64_t at = 0; at < bytes; at += kBounceBytes) {
    const uint64_t n = std::min(kBounceBytes, bytes - at);
    if (!write) STRATA_RETURN_IF_ERROR(weights_.offload().move_now(false, region, offset + at, n, &bounce_));
    STRATA_RETURN_IF_ERROR(write ? device_.copy(bounce_.at(0), here + at, n, stream)
                                 : device_.copy(here + at, bounce_.at(0), n, stream));
    Marker copied;
    STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &copied));
    STRATA_RETURN_IF_ERROR(copied.before(nullptr));
    if (write) STRATA_RETURN_IF_ERROR(weights_.offload().move_now(true, region, offset + at, n, &bounce_));
  }
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
  Memory& buffer = visit_buffers_[places_.on_host(unit) ? 1 : 0];
  while (first < end) {
    Piece piece{unit, segment, first / kShardElements * kShardElements, 0};
    piece.count = std::min(round_up(end, kShardElements) - piece.begin, kVisitElements);
    if (in_front(piece)) piece.count = std::min(piece.count, front(unit, segment) - piece.begin);
    std::vector<void*> arrays;
    std::vector<Work> done;
    // A transfer that was refused does not end those begun before it.
    const auto wait = [&](const Status& begun) {
      bool late = false;
      const Status ended = wait_for_all(&done, std::chrono::nanoseconds(-1), &late);
      if (late) buffer.leave_behind();
      return begun.ok() ? ended : begun;
    };
    strata_optim_args args{};
    args.struct_size = sizeof(args);
    // What fn leaves alone of the piece must be stored back as it was.
    STRATA_RETURN_IF_ERROR(wait(load(piece, buffer.at(0), write, nullptr, &done)));
    point(piece, buffer.at(0), &arrays, &args.weight);
    const uint64_t here = std::min(end, piece.begin + piece.count) - first;
    const strata_optim_span span = {first - piece.begin, here, 0, 0};
    args.spans = &span;
    args.span_count = 1;
    args.span_stride = sizeof(span);
    args.weight_dtype = s.dtype;
    args.state = arrays.data();
    STRATA_RETURN_IF_ERROR(fn(args, first));
    STRATA_RETURN_IF_ERROR(wait(write ? store(piece, buffer.at(0), nullptr, &done) : Ok()));
    first += here;
  }
  return Ok();
}

}  // namespace strata
