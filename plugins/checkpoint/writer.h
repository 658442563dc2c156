// writer.h - writes blocks of a file on a few threads while the caller fills the next one.
//
// The caller acquires a buffer, fills it, submits it with its file offset, and at the end calls finish. Memory is
// (threads + 1) buffers of kBufferBytes. The first failed write is raised at the next acquire or at finish; an
// unfinished BlockWriter drops what is queued when destroyed, and joins its threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "io/direct_file.h"

namespace strata::checkpoint {

constexpr uint64_t kBufferBytes = uint64_t{4} << 20;  // a multiple of kHashBlock

class BlockWriter {
 public:
  BlockWriter(io::DirectFile& file, const std::string& path, unsigned threads);
  ~BlockWriter();
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  // kBufferBytes for what goes to `offset` of the file: in memory as it is there, so that it can bypass the page cache.
  // Blocks until there is a free buffer.
  char* acquire(uint64_t offset);
  struct Job {
    char* data;              // from acquire, for this offset; free again afterwards
    uint64_t offset, bytes;  // of the file
    uint64_t* hashes;        // when not NULL, gets the XXH3-64 of each kHashBlock
  };
  void submit(const Job& job);
  // The same by the calling thread.
  void write_now(const Job& job);
  void finish();

 private:
  struct Freer {
    void operator()(void* p) const { std::free(p); }
  };
  void work();
  void carry_out(const Job& job, std::unique_lock<std::mutex>& lock);
  void raise_if_failed();

  io::DirectFile& file_;
  const std::string path_;
  std::vector<std::unique_ptr<void, Freer>> memory_;  // kLargestAlignment more than kBufferBytes
  std::mutex mutex_;
  std::condition_variable job_ready_, buffer_ready_;
  std::vector<char*> free_;
  std::deque<Job> queue_;
  bool stopping_ = false;
  int error_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace strata::checkpoint
