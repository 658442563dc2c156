// ring_calls.h - the calls of io_uring that ask the kernel for something, as a table: see calls.h.
#pragma once

#include <liburing.h>

namespace strata::io {

// As the functions of liburing: a negative errno.
struct RingCalls {
  int (*setup)(unsigned entries, io_uring* ring, unsigned flags);
  int (*register_files)(io_uring* ring, unsigned count);  // all of them empty
  int (*update_file)(io_uring* ring, unsigned index, int fd);
  int (*register_buffers)(io_uring* ring, unsigned count);  // all of them empty
  int (*update_buffer)(io_uring* ring, unsigned index, const iovec* area);
  int (*submit)(io_uring* ring);
  // The next completion; -EAGAIN when there is none and `wait` is false.
  int (*next)(io_uring* ring, io_uring_cqe** cqe, bool wait);
};

const RingCalls& ring_calls();

}  // namespace strata::io
