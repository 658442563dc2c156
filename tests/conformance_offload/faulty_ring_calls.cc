// io_uring's part of faulty_calls.h, where there is liburing.
#include "faulty_calls.h"
#include "io/ring_calls.h"

namespace strata::test {
namespace {

constexpr uint64_t kWake = UINT64_MAX;  // as in ring_server.cc: no transfer

int next(io_uring* ring, io_uring_cqe** cqe, bool wait) {
  if (const int error = faults().of(wait ? "wait" : "peek")) return -error;
  const int code = wait ? io_uring_wait_cqe(ring, cqe) : io_uring_peek_cqe(ring, cqe);
  if (code < 0 || io_uring_cqe_get_data64(*cqe) == kWake || (*cqe)->res <= 0) return code;
  if (const int error = faults().of_transfer("completion")) (*cqe)->res = -error;
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
    if (entry.user_data != kWake) ++(fixed ? faults().fixed : faults().plain);
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
