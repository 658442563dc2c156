// io_uring's own calls.
#include "io/ring_calls.h"

namespace strata::io {
namespace {

constexpr RingCalls kSystem = {
    io_uring_queue_init,
    io_uring_register_files_sparse,
    [](io_uring* ring, unsigned index, int fd) { return io_uring_register_files_update(ring, index, &fd, 1); },
    io_uring_register_buffers_sparse,
    [](io_uring* ring, unsigned index, const iovec* area) {
      return io_uring_register_buffers_update_tag(ring, index, area, nullptr, 1);
    },
    io_uring_submit,
    [](io_uring* ring, io_uring_cqe** cqe, bool wait) {
      return wait ? io_uring_wait_cqe(ring, cqe) : io_uring_peek_cqe(ring, cqe);
    },
};

}  // namespace

const RingCalls& ring_calls() { return kSystem; }

}  // namespace strata::io
