#include "core/weights/shard_reader.h"

#include <algorithm>
#include <utility>

#include "core/plugins/cores.h"

namespace strata {

ShardReader::~ShardReader() {
  stop();
  if (thread_.joinable()) thread_.join();
  for (const Piece& piece : pieces_) end(piece);
  for (const Buffer& buffer : buffers_) (void)buffer.emptied.before(nullptr);
}

Status ShardReader::allocate(uint64_t buffers, uint64_t bytes, const std::vector<int>& cpus) {
  buffers_.resize(buffers);
  for (Buffer& buffer : buffers_) {
    STRATA_RETURN_IF_ERROR(Memory::shared_with_host(device_, bytes, &buffer.memory).during("shard buffers"));
    STRATA_RETURN_IF_ERROR(tier_.register_memory(buffer.memory.at(0), bytes, &buffer.registered.emplace_back()));
    free_.push_back(&buffer);
  }
  return begin_thread(
      "reads of weight shards", cpus, [this] { work(); }, &thread_);
}

void ShardReader::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
}

void ShardReader::expect(const std::string& what, uint32_t unit, const Region& region, Work after) {
  {
    std::lock_guard lock(mutex_);
    requests_.push_back({what, unit, &region, std::move(after), trace_.host.step()});
  }
  wake_.notify_all();
}

void ShardReader::work() {
  for (;;) {
    Request request;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !requests_.empty(); });
      if (stop_) return;
      request = std::move(requests_.front());
      requests_.pop_front();
    }
    trace_.reading.set_step(request.step);
    const Status status = read(request).during(request.what);
    if (status.ok()) continue;
    {
      std::lock_guard lock(mutex_);
      failure_ = status;
    }
    stop();
    return;
  }
}

// The update that writes a shard ends by itself, so that wait has no limit of its own.
Status ShardReader::read(const Request& request) {
  if (request.after) {
    const Span span(trace_.reading, "wait for update", request.unit, nullptr, !request.after.is_set());
    STRATA_RETURN_IF_ERROR(request.after.before(nullptr, std::chrono::nanoseconds(-1)));
  }
  for (uint64_t at = 0; at < request.region->bytes();) {
    Buffer* buffer = take_buffer();
    if (!buffer) return Ok();
    STRATA_RETURN_IF_ERROR(buffer->emptied.before(nullptr));
    const uint64_t bytes = std::min(buffer->memory.bytes(), request.region->bytes() - at);
    const Piece piece{buffer, bytes, Work::create()};
    {
      Span span(trace_.reading, "read", request.unit);
      span.note(bytes);
      STRATA_RETURN_IF_ERROR(tier_.read(*request.region, at, bytes, buffer->memory.at(0), piece.read.event()));
    }
    {
      std::lock_guard lock(mutex_);
      pieces_.push_back(piece);
    }
    wake_.notify_all();
    at += bytes;
  }
  return Ok();
}

// NULL: it is over.
ShardReader::Buffer* ShardReader::take_buffer() {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return stop_ || !free_.empty(); });
  if (stop_) return nullptr;
  Buffer* buffer = free_.front();
  free_.pop_front();
  return buffer;
}

Status ShardReader::take_piece(Piece* out) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [this] { return stop_ || !pieces_.empty(); });
  if (pieces_.empty()) return failure_.ok() ? Status(STRATA_ABORTED, "the engine is closing") : failure_;
  *out = std::move(pieces_.front());
  pieces_.pop_front();
  return Ok();
}

Status ShardReader::bring(const Region& region, char* to, const strata_stream* stream) {
  for (uint64_t at = 0; at < region.bytes();) {
    Piece piece;
    STRATA_RETURN_IF_ERROR(take_piece(&piece));
    const Status brought = take_over(piece, to + at, stream);
    at += piece.bytes;
    {
      std::lock_guard lock(mutex_);
      free_.push_back(piece.buffer);
    }
    wake_.notify_all();
    STRATA_RETURN_IF_ERROR(brought);
  }
  return Ok();
}

void ShardReader::end(const Piece& piece) {
  const Status read = piece.read.before(nullptr, std::chrono::nanoseconds(-1));
  if (read.code() == STRATA_DEADLINE_EXCEEDED) piece.buffer->leave_behind();
}

// A buffer that failed is free only when nothing is read into it any more.
Status ShardReader::take_over(const Piece& piece, char* to, const strata_stream* stream) {
  Status read = piece.read.before(nullptr, deadline_);
  if (!read.ok()) {
    end(piece);
    return read;
  }
  STRATA_RETURN_IF_ERROR(device_.copy(to, piece.buffer->memory.at(0), piece.bytes, stream));
  return Marker::at_end_of(device_, stream, &piece.buffer->emptied);
}

}  // namespace strata
