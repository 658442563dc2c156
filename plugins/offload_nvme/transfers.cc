#include "transfers.h"

#include <algorithm>
#include <cstring>
#include <future>

#include "host_memory/host_memory.h"
#include "plugin_kit/os_error.h"
#include "plugin_kit/plugin_kit.h"

namespace strata::offload_nvme {

using plugin_kit::Error;
using plugin_kit::join;
using plugin_kit::raise;

namespace {
constexpr uint64_t kBuffer = host_memory::kHugePage;  // mapped at a multiple of its size: aligned for any disk
}

struct Transfers::Job {
  std::shared_ptr<Region> region;
  bool write;
  uint64_t offset, bytes;  // whole blocks of the region
  char* buffer;
  EndFn ended;
  Places places;
  std::atomic<uint64_t> left;  // parts
  std::mutex mutex;
  Error error;  // the first; before others, that a disk has not answered: the host then knows that it may do so yet

  std::string text(const std::string& rest) const {
    return join("\"", region->label, "\", ", bytes, " bytes at offset ", offset, ": ", rest);
  }
};

Transfers::Transfers(const strata_host* host, const Regions& regions, uint64_t memory_alignment)
    : host_(host),
      regions_(regions),
      sync_(plugin_kit::host_interface<strata_sync_api>(host, STRATA_HOST_SYNC)),
      block_(regions.block()),
      memory_alignment_(memory_alignment) {
  if (!sync_) raise(STRATA_FAILED_PRECONDITION, "the host lacks " STRATA_HOST_SYNC);
}

uint64_t Transfers::host_bytes() { return kBuffer; }

void Transfers::move(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes, char* buffer,
                     strata_event* done) {
  const uint64_t end = offset + bytes;
  uint64_t first = (offset + block_ - 1) / block_ * block_, last = end / block_ * block_;
  const bool is_straight =
      first < last && reinterpret_cast<uintptr_t>(buffer + (first - offset)) % memory_alignment_ == 0;
  if (!is_straight) first = last = end;
  if (offset < first) by_buffer(write, region, offset, first - offset, buffer);
  if (last < end) by_buffer(write, region, last, end - last, buffer + (last - offset));
  if (!done) {
    if (first < last) move_now(write, region, first, last - first, buffer + (first - offset), nullptr);
    return;
  }
  if (first == last) {
    sync_->set(done, STRATA_OK, nullptr);
    return;
  }
  sync_->retain(done);  // the host may stop waiting before the disk answers
  const auto ended = [this, done](const Error& error) {
    sync_->set(done, error.code(), error.ok() ? nullptr : error.text().c_str());
    sync_->release(done);
  };
  try {
    start(write, region, first, last - first, buffer + (first - offset), nullptr, ended);
  } catch (...) {
    sync_->release(done);
    throw;
  }
}

void Transfers::start(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes, char* buffer,
                      std::shared_ptr<const void> memory, EndFn ended) {
  auto job = std::make_shared<Job>();
  job->region = region;
  job->write = write;
  job->offset = offset, job->bytes = bytes;
  job->buffer = buffer;
  job->ended = std::move(ended);
  job->places = regions_.places(*region, write, offset, bytes);
  for (uint64_t at = 0; write && !region->hashes.empty() && at < bytes; at += block_) {
    region->hashes[(offset + at) / block_] = hash_of(buffer + at, block_);
  }
  job->left = job->places.parts.size();
  in_flight_.fetch_add(1, std::memory_order_relaxed);
  // The last of them may end, and the job with it, before this returns.
  const std::vector<Places::Part> parts = job->places.parts;
  for (const Places::Part& part : parts) {
    part.room->disk->queue().submit(
        {write, part.room->run.segment->file, part.offset, buffer + (part.begin - offset), part.bytes,
         [this, job, part](int error, uint64_t moved) { end_part(job, part, error, moved); }, memory});
  }
}

// The last part to end ends the job.
void Transfers::end_part(const std::shared_ptr<Job>& job, const Places::Part& part, int error, uint64_t moved) {
  if (error) {
    std::lock_guard lock(job->mutex);
    if (job->error.ok() || error == ETIMEDOUT) {
      job->error = {
          plugin_kit::status_of_errno(error),
          job->text(join(job->write ? "write " : "read ", part.room->run.segment->path, ", ", part.bytes, " bytes at ",
                         part.offset, ", ", moved, " moved: ", part.room->disk->text_of(error)))};
    }
  }
  if (job->left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (!job->write && job->error.ok()) compare_hashes(job.get());
  // Before anybody is told: what he frees then is gone at once.
  Regions::let_go(job->places, job->write);
  job->region.reset();
  in_flight_.fetch_sub(1, std::memory_order_relaxed);
  job->ended(job->error);
}

void Transfers::compare_hashes(Job* job) const {
  const std::vector<uint64_t>& hashes = job->region->hashes;
  for (uint64_t at = 0; !hashes.empty() && at < job->bytes; at += block_) {
    const uint64_t here = job->offset + at;
    if (hashes[here / block_] == hash_of(job->buffer + at, block_)) continue;
    const auto& parts = job->places.parts;
    const auto& part = *std::prev(std::upper_bound(
        parts.begin(), parts.end(), here, [](uint64_t x, const Places::Part& each) { return x < each.begin; }));
    job->error = {STRATA_DATA_LOSS,
                  job->text(join("the ", block_, " bytes at ", part.offset + (here - part.begin), " of ",
                                 part.room->run.segment->path, " are not what was written there (checksum)"))};
  }
}

void Transfers::move_now(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes,
                         char* buffer, std::shared_ptr<const void> memory) {
  std::promise<Error> ended;
  start(write, region, offset, bytes, buffer, std::move(memory),
        [&ended](const Error& error) { ended.set_value(error); });
  const Error error = ended.get_future().get();
  if (!error.ok()) throw error;
}

void Transfers::by_buffer(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes,
                          char* memory) {
  std::lock_guard lock(buffer_mutex_);
  if (!buffer_) {
    buffer_ = host_memory::allocate_shared(kBuffer);
    if (!buffer_) raise(STRATA_RESOURCE_EXHAUSTED, "the system refused ", kBuffer, " bytes");
    const bool is_whole = offset % block_ == 0 && bytes % block_ == 0;
    host_->log(
        host_->ctx, STRATA_LOG_INFO, "offload_nvme",
        join("\"", region->label, "\": ", bytes, " bytes at offset ", offset, ": ",
             is_whole ? join("the buffer at ", static_cast<void*>(memory), " is not aligned to ", memory_alignment_)
                      : join("they are no whole blocks of ", block_),
             "; such transfers, as of checkpoints, are copied, and slower")
            .c_str());
  }
  try {
    for (const uint64_t end = offset + bytes; offset < end;) {
      const uint64_t from = offset / block_ * block_;
      const uint64_t here = std::min(end, from + kBuffer);
      const uint64_t to = (here + block_ - 1) / block_ * block_;
      if (!write || from < offset || here < to) move_now(false, region, from, to - from, buffer_.get(), buffer_);
      char* const place = buffer_.get() + (offset - from);
      std::memcpy(write ? place : memory, write ? memory : place, here - offset);
      if (write) move_now(true, region, from, to - from, buffer_.get(), buffer_);
      memory += here - offset;
      offset = here;
    }
  } catch (const Error& error) {
    if (error.code() == STRATA_DEADLINE_EXCEEDED) buffer_.reset();  // its disk may still use it; others go on
    throw;
  }
}

}  // namespace strata::offload_nvme
