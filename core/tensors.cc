#include "core/tensors.h"

#include <algorithm>
#include <cstring>

namespace strata {

Tensors::Tensors(const Registry& registry, const Layout& layout, const Device& device, const Collective& collective,
                 CommQueue& queue, Weights& weights, const Gradients& gradients, States& states)
    : registry_(registry),
      layout_(layout),
      device_(device),
      collective_(collective),
      queue_(queue),
      weights_(weights),
      gradients_(gradients),
      states_(states) {}

Status Tensors::allocate() {
  STRATA_RETURN_IF_ERROR(Memory::for_collectives(collective_, kPieceBytes, &staging_).during("tensor staging"));
  STRATA_RETURN_IF_ERROR(Memory::on_device(device_, kPieceBytes, &native_).during("tensor staging"));
  return Memory::shared_with_host(device_, kPieceBytes, &host_).during("tensor staging");
}

std::vector<Tensors::Piece> Tensors::cut(const Param& p) const {
  const Segment& s = layout_.units[p.home].segments[p.segment];
  const uint64_t most = kPieceBytes / sizeof(float);
  std::vector<Piece> pieces;
  for (uint64_t at = 0; at < p.numel;) {
    const uint64_t begin = p.offset + at;
    const uint64_t owner = begin / s.shard;
    const uint64_t end = std::min({p.offset + p.numel, (owner + 1) * s.shard, begin + most});
    pieces.push_back({{begin, end}, at, static_cast<int>(owner)});
    at += end - begin;
  }
  return pieces;
}

Status Tensors::check_tensor(const Param& p, const strata_tensor& t, bool fp32_only) const {
  const std::string who = "param \"" + p.name + "\"";
  bool same = t.ndim == static_cast<int32_t>(p.shape.size());
  for (int32_t i = 0; same && i < t.ndim; ++i) same = t.shape && t.shape[i] == p.shape[static_cast<size_t>(i)];
  if (!same) {
    return {STRATA_INVALID_ARGUMENT, who + ": the tensor's shape " + shape_text(t.shape, t.ndim) +
                                         " is not the param's " +
                                         shape_text(p.shape.data(), static_cast<int32_t>(p.shape.size()))};
  }
  if (t.dtype != STRATA_F32 && (fp32_only || t.dtype != p.dtype)) {
    return {STRATA_INVALID_ARGUMENT,
            who + ": the tensor must be fp32" +
                (fp32_only || p.dtype == STRATA_F32 ? "" : std::string(" or ") + dtype_name(p.dtype)) + ", not " +
                dtype_name(t.dtype)};
  }
  if (t.device_type != STRATA_CPU) {
    return {STRATA_INVALID_ARGUMENT, who + ": device_type of the tensor is " + std::to_string(t.device_type) +
                                         "; set STRATA_CPU (1), it must lie in CPU memory"};
  }
  if (!t.data && p.numel > 0) return {STRATA_INVALID_ARGUMENT, who + ": the tensor's data is NULL"};
  return Ok();
}

Status Tensors::broadcast(const Param& p, const Piece& piece, strata_dtype dtype, int root) {
  if (layout_.world == 1) return Ok();
  CommOp op;
  op.kind = CommOp::Kind::kBroadcast;
  op.root = root;
  op.tag = (5ull << 32) | (static_cast<uint64_t>(root) << 40) | p.owner;
  op.label = "transfer of param \"" + p.name + "\"";
  op.items.push_back(coll_item(staging_.at(0), dtype, staging_.at(0), dtype, piece.segment.size()));
  return queue_.run(std::move(op));
}

// ---- writing -----------------------------------------------------------------------------------------------------

Status Tensors::check_write(uint32_t param, const strata_tensor* value, int32_t root) const {
  const Param& p = registry_.owner_of(param);
  if (root < 0 || root >= layout_.world) {
    return {STRATA_INVALID_ARGUMENT, "param \"" + p.name + "\": there is no rank " + std::to_string(root)};
  }
  if (root != layout_.rank) return Ok();
  if (!value) return {STRATA_INVALID_ARGUMENT, "param \"" + p.name + "\": the root passes no value"};
  return check_tensor(p, *value, false);
}

Status Tensors::write(uint32_t param, const strata_tensor* value, int32_t root) {
  const Param& p = registry_.owner_of(param);
  const bool mine = root == layout_.rank;
  for (const Piece& piece : cut(p)) {
    // Values travel as fp32, which holds every weight dtype exactly.
    if (mine) {
      const char* from = static_cast<const char*>(value->data) + piece.begin * dtype_size(value->dtype);
      STRATA_RETURN_IF_ERROR(device_.copy(native_.at(0), from, piece.segment.size() * dtype_size(value->dtype)));
      STRATA_RETURN_IF_ERROR(device_.cast(staging_.at(0), STRATA_F32, native_.at(0), value->dtype, piece.segment.size(),
                                          STRATA_ROUND_EVEN));
    }
    STRATA_RETURN_IF_ERROR(broadcast(p, piece, STRATA_F32, root));
    STRATA_RETURN_IF_ERROR(keep(p, piece));
  }
  return weights_.invalidate(p.home);
}

// Stores the staged fp32 values: this rank's part of the state, and the weight wherever this rank holds it.
Status Tensors::keep(const Param& p, const Piece& piece) {
  const Segment& s = layout_.units[p.home].segments[p.segment];
  if (layout_.is_whole(p.home)) {
    char* weight = weights_.whole(p.home, p.segment) + piece.segment.begin * dtype_size(s.dtype);
    STRATA_RETURN_IF_ERROR(
        device_.cast(weight, s.dtype, staging_.at(0), STRATA_F32, piece.segment.size(), STRATA_ROUND_AWAY));
  }
  const Range owned = layout_.owned(s), part = intersect(owned, piece.segment);
  if (part.size() == 0) return Ok();
  const char* from = staging_.at((part.begin - piece.segment.begin) * sizeof(float));
  const uint64_t first = part.begin - owned.begin;
  if (s.trainable && states_.canonical_index(s, "master") >= 0) {
    STRATA_RETURN_IF_ERROR(device_.copy(host_.at(0), from, part.size() * sizeof(float)));
    return import_owned(p.home, p.segment, "master", first, part.size(), host_.at(0));
  }
  STRATA_RETURN_IF_ERROR(device_.cast(native_.at(0), s.dtype, from, STRATA_F32, part.size(), STRATA_ROUND_AWAY));
  STRATA_RETURN_IF_ERROR(device_.copy(host_.at(0), native_.at(0), part.size() * dtype_size(s.dtype)));
  return import_weight(p.home, p.segment, first, part.size(), host_.at(0));
}

// Calls fn(begin, elements) for pieces of fp32 that fit the staging buffers.
template <class Fn>
Status Tensors::in_pieces(uint64_t count, Fn fn) {
  const uint64_t most = kPieceBytes / sizeof(float);
  for (uint64_t at = 0; at < count; at += most) STRATA_RETURN_IF_ERROR(fn(at, std::min(most, count - at)));
  return Ok();
}

Status Tensors::find_array(uint32_t unit, uint32_t segment, const std::string& array, uint32_t* index) const {
  const Segment& s = layout_.units[unit].segments[segment];
  const int found = s.trainable ? states_.canonical_index(s, array) : -1;
  if (found < 0) return {STRATA_NOT_FOUND, "segment " + s.name + " has no array \"" + array + "\""};
  *index = static_cast<uint32_t>(found);
  return Ok();
}

Status Tensors::import_owned(uint32_t unit, uint32_t segment, const std::string& array, uint64_t first, uint64_t count,
                             const void* in) {
  const auto* from = static_cast<const char*>(in);
  if (array == "weight") return import_weight(unit, segment, first, count, from);
  uint32_t index = 0;
  STRATA_RETURN_IF_ERROR(find_array(unit, segment, array, &index));
  if (states_.places().on_host(unit)) return import_array(unit, segment, index, first, count, from);
  return in_pieces(count, [&](uint64_t at, uint64_t n) {
    STRATA_RETURN_IF_ERROR(device_.copy(native_.at(0), from + at * sizeof(float), n * sizeof(float)));
    return import_array(unit, segment, index, first + at, n, native_.at(0));
  });
}

Status Tensors::import_array(uint32_t unit, uint32_t segment, uint32_t index, uint64_t first, uint64_t count,
                             const char* values) {
  return states_.visit(unit, segment, first, count, true, [&](const strata_optim_args& args, uint64_t at) {
    return states_.optimizer({unit, segment})
        .import_array(args, index, reinterpret_cast<const float*>(values) + (at - first));
  });
}

Status Tensors::import_whole(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, const void* in) {
  const uint64_t size = dtype_size(layout_.units[unit].segments[segment].dtype);
  return device_.copy(weights_.whole(unit, segment) + first * size, in, count * size);
}

Status Tensors::import_weight(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, const char* in) {
  const Segment& s = layout_.units[unit].segments[segment];
  const OwnedWeights owned = weights_.owned(unit, segment);
  const uint64_t size = dtype_size(s.dtype);
  if (owned.address) return device_.copy(owned.address + first * size, in, count * size);
  return move_weight(true, unit, *owned.region, owned.offset + first * size, count * size, const_cast<char*>(in));
}

Status Tensors::move_weight(bool write, uint32_t unit, const Region& region, uint64_t offset, uint64_t bytes,
                            char* memory) {
  for (uint64_t at = 0; at < bytes; at += kPieceBytes) {
    const uint64_t n = std::min(kPieceBytes, bytes - at);
    char *here = memory + at, *staged = host_.at(0);
    if (write && here != staged) std::memcpy(staged, here, n);
    STRATA_RETURN_IF_ERROR(weights_.tier(unit).move_now(write, region, offset + at, n, &host_));
    if (!write && here != staged) std::memcpy(here, staged, n);
  }
  return Ok();
}

// ---- reading -----------------------------------------------------------------------------------------------------

Status Tensors::check_read(uint32_t param, const std::string& array, const strata_tensor& out) const {
  const Param& p = registry_.owner_of(param);
  const Segment& s = layout_.units[p.home].segments[p.segment];
  const bool weight = array == "weight";
  if (!weight && (!s.trainable || (array != "grad" && states_.canonical_index(s, array) < 0))) {
    return {STRATA_NOT_FOUND, "param \"" + p.name + "\" has no array \"" + array + "\""};
  }
  if (array == "grad" && !gradients_.memory().has_reduced(p.home)) {
    return {
        STRATA_FAILED_PRECONDITION,
        "the memory of gradients is the host's (gradient_memory): it is borrowed by the first gradient and went back "
        "with the fetches after strata_step"};
  }
  return check_tensor(p, out, !weight);
}

Status Tensors::read(uint32_t param, const std::string& array, const strata_tensor& out) {
  const Param& p = registry_.owner_of(param);
  const Segment& s = layout_.units[p.home].segments[p.segment];
  const bool weight = array == "weight", grad = array == "grad";
  if (grad) STRATA_RETURN_IF_ERROR(gradients_.flush());  // reductions under way end first
  const strata_dtype dtype = weight ? s.dtype : STRATA_F32;
  for (const Piece& piece : cut(p)) {
    const Range owned = layout_.owned(s), part = intersect(owned, piece.segment);
    if (part.size() == piece.segment.size()) {
      STRATA_RETURN_IF_ERROR(
          export_owned(p.home, p.segment, array, part.begin - owned.begin, part.size(), host_.at(0)));
      STRATA_RETURN_IF_ERROR(device_.copy(staging_.at(0), host_.at(0), part.size() * dtype_size(dtype)));
    }
    if (layout_.stage > 0) STRATA_RETURN_IF_ERROR(broadcast(p, piece, dtype, piece.owner));
    char* to = static_cast<char*>(out.data) + piece.begin * dtype_size(out.dtype);
    STRATA_RETURN_IF_ERROR(
        device_.cast(native_.at(0), out.dtype, staging_.at(0), dtype, piece.segment.size(), STRATA_ROUND_EVEN));
    STRATA_RETURN_IF_ERROR(device_.copy(to, native_.at(0), piece.segment.size() * dtype_size(out.dtype)));
  }
  return Ok();
}

Status Tensors::export_owned(uint32_t unit, uint32_t segment, const std::string& array, uint64_t first, uint64_t count,
                             void* out) {
  auto* to = static_cast<char*>(out);
  if (array == "weight") return export_weight(unit, segment, first, count, to);
  if (array == "grad") return export_grad(unit, segment, first, count, to);
  uint32_t index = 0;
  STRATA_RETURN_IF_ERROR(find_array(unit, segment, array, &index));
  if (states_.places().on_host(unit)) return export_array(unit, segment, index, first, count, to);
  return in_pieces(count, [&](uint64_t at, uint64_t n) {
    STRATA_RETURN_IF_ERROR(export_array(unit, segment, index, first + at, n, native_.at(0)));
    return device_.copy(to + at * sizeof(float), native_.at(0), n * sizeof(float));
  });
}

Status Tensors::export_array(uint32_t unit, uint32_t segment, uint32_t index, uint64_t first, uint64_t count,
                             char* values) {
  return states_.visit(unit, segment, first, count, false, [&](const strata_optim_args& args, uint64_t at) {
    return states_.optimizer({unit, segment})
        .export_array(args, index, reinterpret_cast<float*>(values) + (at - first));
  });
}

// Widened on the device, wherever the reduced gradient lies.
Status Tensors::export_grad(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, char* out) {
  const strata_dtype dtype = gradients_.owned_dtype(layout_.units[unit].segments[segment]);
  const char* from = gradients_.owned(unit, segment) + first * dtype_size(dtype);
  return in_pieces(count, [&](uint64_t at, uint64_t n) {
    STRATA_RETURN_IF_ERROR(device_.copy(native_.at(0), from + at * dtype_size(dtype), n * dtype_size(dtype)));
    STRATA_RETURN_IF_ERROR(device_.cast(staging_.at(0), STRATA_F32, native_.at(0), dtype, n, STRATA_ROUND_EVEN));
    return device_.copy(out + at * sizeof(float), staging_.at(0), n * sizeof(float));
  });
}

Status Tensors::export_weight(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, char* out) {
  const Segment& s = layout_.units[unit].segments[segment];
  const OwnedWeights owned = weights_.owned(unit, segment);
  const uint64_t size = dtype_size(s.dtype);
  if (owned.address) return device_.copy(out, owned.address + first * size, count * size);
  return move_weight(false, unit, *owned.region, owned.offset + first * size, count * size, out);
}

}  // namespace strata
