#include "writer.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <system_error>

#include "error.h"
#include "model.h"

namespace strata::checkpoint {

static_assert(kBufferBytes % kHashBlock == 0);

BlockWriter::BlockWriter(io::DirectFile& file, const std::string& path, unsigned threads) : file_(file), path_(path) {
  for (unsigned k = 0; k < threads + 1; ++k) {
    memory_.emplace_back(std::aligned_alloc(io::kLargestAlignment, kBufferBytes + io::kLargestAlignment));
    if (!memory_.back()) throw std::bad_alloc();
    free_.push_back(static_cast<char*>(memory_.back().get()));
  }
  try {
    for (unsigned k = 0; k < threads; ++k) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    if (threads_.empty()) raise(STRATA_RESOURCE_EXHAUSTED, "write ", path_, ": cannot start a thread");
  }
}

BlockWriter::~BlockWriter() {
  {
    std::lock_guard lock(mutex_);
    queue_.clear();
    stopping_ = true;
  }
  job_ready_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void BlockWriter::raise_if_failed() {
  if (error_) raise_errno(error_, "write", path_);
}

char* BlockWriter::acquire(uint64_t offset) {
  std::unique_lock lock(mutex_);
  buffer_ready_.wait(lock, [this] { return !free_.empty(); });
  raise_if_failed();
  char* buffer = free_.back();
  free_.pop_back();
  return buffer + offset % io::kLargestAlignment;
}

void BlockWriter::submit(const Job& job) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(job);
  }
  job_ready_.notify_one();
}

void BlockWriter::write_now(const Job& job) {
  std::unique_lock lock(mutex_);
  carry_out(job, lock);
}

void BlockWriter::finish() {
  std::unique_lock lock(mutex_);
  buffer_ready_.wait(lock, [this] { return free_.size() == memory_.size(); });
  raise_if_failed();
}

void BlockWriter::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    job_ready_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Job job = queue_.front();
    queue_.pop_front();
    carry_out(job, lock);
  }
}

void BlockWriter::carry_out(const Job& job, std::unique_lock<std::mutex>& lock) {
  int e = error_;
  lock.unlock();
  for (uint64_t done = 0; job.hashes && done < job.bytes; done += kHashBlock) {
    job.hashes[done / kHashBlock] = XXH3_64bits(job.data + done, std::min(kHashBlock, job.bytes - done));
  }
  if (!e) e = file_.write_at(job.offset, job.data, job.bytes);
  lock.lock();
  if (e && !error_) error_ = e;
  free_.push_back(job.data - job.offset % io::kLargestAlignment);
  buffer_ready_.notify_all();
}

}  // namespace strata::checkpoint
