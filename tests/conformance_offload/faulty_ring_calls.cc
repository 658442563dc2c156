// io_uring's part of faulty_calls.h, where there is liburing.
#include "faulty_calls.h"
#include "io/ring_calls.h"

namespace strata::test {
namespace {

constexpr uint64_t kWake = UINT64_MAX;  // as in ring_server.cc: no transfer

// Which of the pieces on their way are writes, by the ring and their tag.
class Directions {
 public:
  void set(const io_uring* ring, uint64_t tag, bool write) {
    std::lock_guard lock(mutex_);
    writes_[{ring, tag}] = write;
  }
  bool is_write(const io_uring* ring, uint64_t tag) {
    std::lock_guard lock(mutex_);
    return writes_[{ring, tag}];
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const io_uring*, uint64_t>, bool> writes_;
};

Directions& directions() {
  static Directions* const all = new Directions;  // as faults()
  return *all;
}

int next(io_uring* ring, io_uring_cqe** cqe, bool wait) {
  if (const int error = faults().of(wait ? "wait" : "peek")) return -error;
  const int code = wait ? io_uring_wait_cqe(ring, cqe) : io_uring_peek_cqe(ring, cqe);
  if (code < 0 || io_uring_cqe_get_data64(*cqe) == kWake || (*cqe)->res <= 0) return code;
  const bool write = directions().is_write(ring, io_uring_cqe_get_data64(*cqe));
  bool hung = false;
  if (const int error = faults().of_transfer("completion", write, &hung)) (*cqe)->res = -error;
  if (hung) ++faults().late;
  return code;
}

// Halves what is about to be submitted.
void shorten(io_uring* ring) {
  for (unsigned i = ring->sq.sqe_head; i != ring->sq.sqe_tail; ++i) {
    io_uring_sqe& entry = ring->sq.sqes[i & *ring->sq.kring_mask];
    if (entry.user_data != kWake) entry.len = static_cast<unsigned>(faults().shortened(entry.len));
  }
}

// What is about to be submitted, by its kind.
void count(const io_uring* ring) {
  for (unsigned i = ring->sq.sqe_head; i != ring->sq.sqe_tail; ++i) {
    const io_uring_sqe& entry = ring->sq.sqes[i & *ring->sq.kring_mask];
    const bool fixed = entry.opcode == IORING_OP_READ_FIXED || entry.opcode == IORING_OP_WRITE_FIXED;
    if (entry.user_data == kWake) continue;
    ++(fixed ? faults().fixed : faults().plain);
    directions().set(ring, entry.user_data, entry.opcode == IORING_OP_WRITE || entry.opcode == IORING_OP_WRITE_FIXED);
  }
}

constexpr io::RingCalls kFaulty = {
    [](unsigned entries, io_uring* ring, unsigned flags) {
      const int error = faults().of("setup");
      return error ? -error : io_uring_queue_init(entries, ring, flags);
    },
    [](io_uring* ring, unsigned count) {
      const int error = faults().of("register_files");
      return error ? -error : io_uring_register_files_sparse(ring, count);
    },
    [](io_uring* ring, unsigned index, int fd) {
      const int error = faults().of("update_file");
      return error ? -error : io_uring_register_files_update(ring, index, &fd, 1);
    },
    [](io_uring* ring, unsigned count) {
      const int error = faults().of("register_buffers");
      return error ? -error : io_uring_register_buffers_sparse(ring, count);
    },
    [](io_uring* ring, unsigned index, const iovec* area) {
      const int error = faults().of("update_buffer");
      return error ? -error : io_uring_register_buffers_update_tag(ring, index, area, nullptr, 1);
    },
    [](io_uring* ring) {
      const int error = faults().of("submit");
      if (!error) count(ring);
      if (!error && faults().short_transfers) shorten(ring);
      return error ? -error : io_uring_submit(ring);
    },
    next,
};

}  // namespace
}  // namespace strata::test

namespace strata::io {
const RingCalls& ring_calls() { return test::kFaulty; }
}  // namespace strata::io
