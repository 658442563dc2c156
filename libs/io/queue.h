// queue.h - a deep queue of reads and writes of one disk: io_uring where the kernel allows it, else threads that call
// pread and pwrite.
//
// A request is of any size; it is cut into pieces of `block_bytes`, of which `depth` are on their way at a time. Reads
// and writes take turns, each in the order they were asked for. A short transfer is continued, EINTR and EAGAIN are
// tried again, anything else ends the request with its errno, once none of its pieces is on its way any more. A piece
// that the disk does not answer within the deadline makes the queue stuck: every request in it, and every later one,
// ends with ETIMEDOUT. Then alone may the disk still use the request's file and memory, which stay until it answers
// where the request has a share in them.
//
// Where a file is opened with O_DIRECT, its rule holds for offsets, sizes and memory (alignment.h): the queue passes
// them on, and continues short transfers at multiples of `alignment`.
//
// Threads: any may submit. `done` runs on a thread of the queue (or in submit, when the queue is stuck), without locks;
// it must not wait for the queue.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "io/fd.h"

namespace strata::io {

class Board;
class Server;

// What EAGAIN of io_uring itself comes from, as far as a user can do something about it.
constexpr char kAgainLimits[] =
    "no kernel thread or memory for io_uring: RLIMIT_NPROC (ulimit -u), kernel.threads-max, the cgroup's pids.max and "
    "memory.max";

// A file as the queue knows it.
struct QueueFile {
  std::shared_ptr<const Fd> fd;
  int slot = -1;  // among the files registered with io_uring; -1: not among them
};

struct Request {
  bool write = false;
  QueueFile file;
  uint64_t offset = 0;
  char* data = nullptr;
  uint64_t bytes = 0;
  // Called once: 0 or an errno (ENODATA: the file ends before that), and the bytes that moved.
  std::function<void(int error, uint64_t moved)> done;
  std::shared_ptr<const void> memory{};  // keeps `data`; NULL: the caller does
};

class Queue {
 public:
  struct Options {
    unsigned depth = 32;                       // pieces on their way
    uint64_t block_bytes = uint64_t{1} << 20;  // of a piece
    uint64_t alignment = 4096;                 // divides block_bytes
    std::chrono::nanoseconds deadline{300'000'000'000};
    bool use_ring = true;
  };
  explicit Queue(const Options& options);
  // Waits for what was submitted, at most the deadline; what the disk still holds then is left to threads that end when
  // it answers.
  ~Queue();
  Queue(const Queue&) = delete;

  void submit(Request request);
  // submit, and wait: 0 or an errno.
  int transfer(Request request);

  // Returns when nothing is under way and every `done` has returned.
  void drain();

  // How long, of its life, pieces have been on their way.
  std::chrono::nanoseconds busy() const;

  // Registers a file that is used often, where that is possible.
  QueueFile attach(std::shared_ptr<const Fd> fd);
  void detach(const QueueFile& file);
  // Memory that is used often and stays mapped until it is unregistered: transfers within it cost the kernel less. It
  // is locked, and counts against RLIMIT_MEMLOCK. 0 or an errno (ENOTSUP: threads gain nothing by it); without it
  // everything works. Ranges do not overlap, and are not unregistered with transfers under way in them.
  int register_memory(void* memory, uint64_t bytes);
  void unregister_memory(void* memory);

  bool uses_ring() const { return uses_ring_; }
  // Why it is not io_uring, or not of the depth asked for; "" when it is.
  const std::string& remark() const { return remark_; }

 private:
  std::shared_ptr<Board> board_;
  std::shared_ptr<Server> server_;
  std::vector<std::thread> threads_;
  bool uses_ring_ = false;
  std::string remark_;
};

}  // namespace strata::io
