// A queue on io_uring: one thread prepares, submits and collects; an eventfd that the ring itself reads wakes it.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "io/board.h"
#include "io/calls.h"
#include "io/fd.h"
#include "io/ring_calls.h"

namespace strata::io {
namespace {

constexpr unsigned kFiles = 256;                        // registered at most; others are used by their descriptors
constexpr unsigned kBuffers = 1024;                     // parts of registered memory
constexpr unsigned kLeastDepth = 4;                     // less is not worth a ring
constexpr int kMostFailures = 1000;                     // of the ring in a row, a millisecond apart
constexpr uint64_t kWake = UINT64_MAX;                  // the tag of the eventfd's read; pieces have their slot
constexpr uint64_t kLargestBuffer = uint64_t{1} << 30;  // the kernel takes no larger part

class RingServer : public Server {
 public:
  explicit RingServer(std::shared_ptr<Board> board) : board_(std::move(board)) {}
  ~RingServer() override {
    if (ready_) io_uring_queue_exit(&ring_);
  }

  // 0 or an errno. `refused`: what a larger depth failed with.
  int open(unsigned* depth, int* refused) {
    wake_ = Fd(::eventfd(0, EFD_CLOEXEC));
    if (!wake_) return errno;
    int error = 0;
    for (;; *depth /= 2) {
      error = -ring_calls().setup(*depth + 1, &ring_, 0);  // and the eventfd's read
      const bool too_large = error == ENOMEM || error == EAGAIN;
      if (!too_large || *depth / 2 < kLeastDepth) break;
      *refused = error;
    }
    if (error) return error;
    ready_ = true;
    if (ring_calls().register_files(&ring_, kFiles) == 0) free_files_.resize(kFiles);
    for (unsigned i = 0; i < free_files_.size(); ++i) free_files_[i] = static_cast<int>(i);
    no_buffers_ = -ring_calls().register_buffers(&ring_, kBuffers);
    for (unsigned i = 0; !no_buffers_ && i < kBuffers; ++i) free_buffers_.push_back(i);
    board_->set_slots(*depth);
    return 0;
  }

  unsigned threads() const override { return 1; }
  bool wake() override {
    while (calls().eventfd_write(wake_.get(), 1) != 0) {
      if (errno == EINTR) continue;
      board_->fail_all(errno);
      return false;
    }
    return true;
  }

  int attach(int fd) override {
    std::lock_guard lock(files_mutex_);
    if (free_files_.empty()) return -1;
    const int slot = free_files_.back();
    if (ring_calls().update_file(&ring_, static_cast<unsigned>(slot), fd) < 0) return -1;
    free_files_.pop_back();
    return slot;
  }
  void detach(int slot) override {
    std::lock_guard lock(files_mutex_);
    if (slot < 0) return;
    (void)ring_calls().update_file(&ring_, static_cast<unsigned>(slot), -1);
    free_files_.push_back(slot);
  }

  int register_memory(void* memory, uint64_t bytes) override {
    std::lock_guard lock(buffers_mutex_);
    if (no_buffers_) return no_buffers_;
    char* const begin = static_cast<char*>(memory);
    for (uint64_t at = 0; at < bytes; at += kLargestBuffer) {
      const iovec part = {begin + at, std::min(kLargestBuffer, bytes - at)};
      const int error = free_buffers_.empty() ? ENOBUFS : -update_buffer(free_buffers_.back(), &part);
      if (error > 0) {
        forget(begin);
        return error;
      }
      buffers_[begin + at] = {begin, part.iov_len, free_buffers_.back()};
      free_buffers_.pop_back();
    }
    return 0;
  }
  void unregister_memory(void* memory) override {
    std::lock_guard lock(buffers_mutex_);
    forget(static_cast<char*>(memory));
  }

  void serve() override {
    read_wake();
    for (;;) {
      unsigned slot;
      Board::Piece piece;
      while (board_->take(&slot, &piece)) prepare(slot, piece);
      if (board_->is_over()) return;
      if (!submit() || !collect()) return see_out();
    }
  }

 private:
  io_uring_sqe* new_entry() { return io_uring_get_sqe(&ring_); }  // never NULL: there are more than pieces on their way

  void read_wake() {
    io_uring_sqe* entry = new_entry();
    io_uring_prep_read(entry, wake_.get(), &woken_, sizeof(woken_), 0);
    tag(entry, kWake);
  }

  void tag(io_uring_sqe* entry, uint64_t tag) {
    io_uring_sqe_set_data64(entry, tag);
    prepared_.push_back(tag);
  }

  int update_buffer(unsigned slot, const iovec* area) { return ring_calls().update_buffer(&ring_, slot, area); }

  // All parts of the memory that was registered at `begin`.
  void forget(char* begin) {
    const iovec empty = {};
    for (auto part = buffers_.find(begin); part != buffers_.end() && part->second.begin == begin;) {
      (void)update_buffer(part->second.slot, &empty);
      free_buffers_.push_back(part->second.slot);
      part = buffers_.erase(part);
    }
  }

  // The slot of the registered part in which all of a piece lies; -1: there is none.
  int buffer_of(const Board::Piece& piece) {
    std::lock_guard lock(buffers_mutex_);
    auto part = buffers_.upper_bound(piece.data);
    if (part == buffers_.begin()) return -1;
    --part;
    const bool inside = piece.data + piece.bytes <= part->first + part->second.bytes;
    return inside ? static_cast<int>(part->second.slot) : -1;
  }

  void prepare(unsigned slot, const Board::Piece& piece) {
    io_uring_sqe* entry = new_entry();
    const int fd = piece.file < 0 ? piece.fd : piece.file, buffer = buffer_of(piece);
    const auto bytes = static_cast<unsigned>(piece.bytes);
    if (buffer >= 0) {
      (piece.write ? io_uring_prep_write_fixed(entry, fd, piece.data, bytes, piece.offset, buffer)
                   : io_uring_prep_read_fixed(entry, fd, piece.data, bytes, piece.offset, buffer));
    } else {
      (piece.write ? io_uring_prep_write(entry, fd, piece.data, bytes, piece.offset)
                   : io_uring_prep_read(entry, fd, piece.data, bytes, piece.offset));
    }
    if (piece.file >= 0) entry->flags |= IOSQE_FIXED_FILE;
    tag(entry, slot);
  }

  // False when the ring is of no use any more; the board knows the errno then.
  bool submit() {
    while (io_uring_sq_ready(&ring_) > 0) {
      const int sent = ring_calls().submit(&ring_);
      if (sent < 0 && !goes_on(-sent)) return false;
      if (sent < 0 && pieces_in_kernel_ > 0) return true;  // their completions make room
      if (sent < 0) continue;
      for (int i = 0; i < sent; ++i) count_in();
      failures_ = 0;
    }
    return true;
  }

  // The first of what is prepared is the kernel's now.
  void count_in() {
    if (prepared_.front() != kWake) ++pieces_in_kernel_;
    prepared_.pop_front();
  }

  bool collect() {
    io_uring_cqe* entry = nullptr;
    for (bool wait = true;; wait = false) {
      const int error = -ring_calls().next(&ring_, &entry, wait);
      if (error == EAGAIN && !wait) return true;
      if (error) return goes_on(error);
      failures_ = 0;
      if (!take_in(entry)) read_wake();
    }
  }

  // False when it is no piece that came back, but the eventfd's read.
  bool take_in(io_uring_cqe* entry) {
    const uint64_t tag = io_uring_cqe_get_data64(entry);
    const int result = entry->res;
    io_uring_cqe_seen(&ring_, entry);
    if (tag == kWake) return false;
    --pieces_in_kernel_;
    board_->finish(static_cast<unsigned>(tag), result);
    return true;
  }

  // Behind a failure of the ring, and of all requests: what never went to the kernel goes back to the board, and what
  // did when the kernel is through with it, which the ring shows without a call.
  void see_out() {
    for (const uint64_t tag : prepared_) {
      if (tag != kWake) board_->finish(static_cast<unsigned>(tag), -ECANCELED);
    }
    for (io_uring_cqe* entry = nullptr; pieces_in_kernel_ > 0;) {
      if (ring_calls().next(&ring_, &entry, false) == 0) {
        take_in(entry);
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
  }

  // The ring itself failed, and no transfer: whether to try again.
  bool goes_on(int error) {
    if (error == EINTR) return true;
    if (++failures_ < kMostFailures) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return true;
    }
    board_->fail_all(error);
    return false;
  }

  const std::shared_ptr<Board> board_;
  io_uring ring_{};
  bool ready_ = false;
  Fd wake_;
  uint64_t woken_ = 0;
  std::deque<uint64_t> prepared_;  // tags, in the order in which the kernel will take them
  unsigned pieces_in_kernel_ = 0;  // submitted and not collected
  int failures_ = 0;               // of the ring, in a row
  std::mutex files_mutex_;
  std::vector<int> free_files_;
  struct Buffer {
    char* begin;  // of the memory it is a part of
    uint64_t bytes;
    unsigned slot;
  };
  std::mutex buffers_mutex_;
  std::map<const char*, Buffer> buffers_;  // by address
  std::vector<unsigned> free_buffers_;
  int no_buffers_ = 0;  // why the kernel registers none, an errno
};

std::string reason(int error) {
  if (error == EPERM || error == EACCES) return "the kernel forbids io_uring (kernel.io_uring_disabled, or seccomp)";
  if (error == ENOSYS) return "the kernel has no io_uring";
  if (error == ENOMEM) return "io_uring found no memory (RLIMIT_MEMLOCK)";
  if (error == EAGAIN) return kAgainLimits;
  return std::string("io_uring: ") + std::strerror(error);
}

}  // namespace

std::shared_ptr<Server> make_ring_server(std::shared_ptr<Board> board, unsigned depth, std::string* remark) {
  auto server = std::make_shared<RingServer>(std::move(board));
  const unsigned wanted = depth;
  int refused = 0;
  if (const int error = server->open(&depth, &refused)) {
    *remark = reason(error);
    return nullptr;
  }
  if (depth < wanted) {
    *remark = "io_uring of depth " + std::to_string(depth) + ", not " + std::to_string(wanted) + ": " + reason(refused);
  }
  return server;
}

}  // namespace strata::io
