#include "core/gradients/host_sums.h"

#include <algorithm>

#include "core/fpu.h"
#include "core/plugins/cores.h"

namespace strata {

namespace {
constexpr char kWhat[] = "gradient sums in host memory";
}

// No more than all the reductions of a micro-batch fill. A slot's fp32 elements are whole norm blocks.
HostSums::Ring HostSums::ring_for(const std::vector<uint64_t>& sizes) {
  Ring ring;
  for (uint64_t size : sizes) ring.slot_bytes = std::max(ring.slot_bytes, std::min(size, kSlotBytes));
  ring.slot_bytes = round_up(ring.slot_bytes, kShardElements * sizeof(float));
  if (ring.slot_bytes == 0) return ring;  // segments without elements
  for (uint64_t size : sizes) ring.slots += round_up(size, ring.slot_bytes) / ring.slot_bytes;
  ring.slots = std::min(ring.slots, kSlots);
  return ring;
}

void HostSums::add_to(Plan* plan, const std::vector<uint64_t>& sizes) {
  plan->add("gradients on their way to sums", kCpuTier, ring_for(sizes).bytes(), true);
}

Status HostSums::allocate(const std::vector<uint64_t>& sizes) {
  ring_ = ring_for(sizes);
  if (ring_.slots == 0) return Ok();
  STRATA_RETURN_IF_ERROR(Memory::shared_with_host(device_, ring_.bytes(), &memory_).during("gradients to sums"));
  slots_.resize(ring_.slots);
  return begin_thread(
      "gradient sums", cpus_, [this] { work(); }, &thread_);
}

HostSums::~HostSums() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Status HostSums::add(const Addend& all, const strata_stream* stream, std::chrono::nanoseconds patience) {
  const uint64_t size = dtype_size(all.dtype), most = ring_.slot_bytes / size;
  for (uint64_t at = 0; at < all.count; at += most) {
    Addend piece = all;
    piece.from += at * size;
    piece.count = std::min(most, all.count - at);
    piece.sum += at;
    if (piece.squares) piece.squares += at / kShardElements;
    STRATA_RETURN_IF_ERROR(add_piece(piece, stream, patience));
  }
  return Ok();
}

Status HostSums::add_piece(Addend piece, const strata_stream* stream, std::chrono::nanoseconds patience) {
  const uint64_t slot = next_++ % ring_.slots;
  if (slots_[slot]) {
    const Span wait(trace_.collective, "wait for sums", piece.unit, nullptr, !slots_[slot].is_set());
    STRATA_RETURN_IF_ERROR(slots_[slot].wait_enqueued(patience).during(kWhat));
  }
  char* to = memory_.at(slot * ring_.slot_bytes);
  STRATA_RETURN_IF_ERROR(device_.copy(to, piece.from, piece.count * dtype_size(piece.dtype), stream));
  piece.from = to;
  Marker copied;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &copied));
  slots_[slot] = last_ = Work::create();
  {
    std::lock_guard lock(mutex_);
    pieces_.push_back({piece, copied, last_, trace_.collective.step()});
  }
  wake_.notify_one();
  return Ok();
}

// Pieces end in their order, and those after a failure with it.
Status HostSums::wait(TraceRow& row, std::chrono::nanoseconds patience) const {
  if (!last_) return Ok();
  const Span wait(row, "wait for sums", kNoUnit, nullptr, !last_.is_set());
  return last_.wait_enqueued(patience).during(kWhat);
}

void HostSums::work() {
  use_default_rounding();
  Status failure;
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !pieces_.empty(); });
    if (stop_) return;
    std::vector<Piece> pieces = next_pieces();
    lock.unlock();
    if (failure.ok()) {
      const std::string& first = layout_.units[pieces.front().addend.unit].name;
      failure = take_in(pieces).during("from unit \"" + first + "\" on");
    }
    for (Piece& piece : pieces) failure.ok() ? piece.done.enqueued({}) : piece.done.failed(failure);
    lock.lock();
  }
}

// No two of them are of the same part of a sum.
std::vector<HostSums::Piece> HostSums::next_pieces() {
  std::vector<Piece> pieces;
  const auto is_next = [this](const Piece& other) { return other.addend.sum == pieces_.front().addend.sum; };
  while (!pieces_.empty() && pieces.size() < kTogether && std::none_of(pieces.begin(), pieces.end(), is_next)) {
    pieces.push_back(std::move(pieces_.front()));
    pieces_.pop_front();
  }
  return pieces;
}

Status HostSums::take_in(const std::vector<Piece>& pieces) {
  trace_.sums.set_step(pieces.front().step);
  {
    const Span wait(trace_.sums, "wait for copy", pieces.front().addend.unit);
    STRATA_RETURN_IF_ERROR(pieces.back().copied.before(nullptr));
  }
  Span span(trace_.sums, "add", pieces.front().addend.unit);
  std::vector<strata_fold_item> items;
  uint64_t bytes = 0;
  for (const auto& [a, copied, done, step] : pieces) {
    items.push_back({sizeof(strata_fold_item), STRATA_ABI_MINOR, a.sum, a.from, a.count, STRATA_F32, a.dtype,
                     a.is_first ? 0u : 1u, 0, a.squares});
    bytes += a.count * dtype_size(a.dtype);
  }
  span.note(bytes);
  return host_.fold(items);
}

}  // namespace strata
