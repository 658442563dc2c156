#include "io/load.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>

namespace strata::io {

LoadResult run_load(Queue& queue, const Load& load, std::chrono::nanoseconds length) {
  std::mutex mutex;
  std::condition_variable ended;
  std::vector<char*> places;
  for (unsigned i = 0; i < load.depth; ++i) places.push_back(load.memory.get() + i * load.piece);
  const auto begin = std::chrono::steady_clock::now();
  uint64_t next[2] = {0, 0}, moved = 0;
  int first_error = 0;
  std::unique_lock lock(mutex);
  for (bool writes = load.writes; std::chrono::steady_clock::now() < begin + length && !first_error;
       writes = load.writes && (!load.reads || !writes)) {
    ended.wait(lock, [&] { return !places.empty(); });
    char* const place = places.back();
    places.pop_back();
    const uint64_t room = writes ? load.file_bytes : std::max(*load.written, load.piece);
    const uint64_t offset = next[writes]++ % (room / load.piece) * load.piece;
    if (writes) *load.written = std::max(*load.written, offset + load.piece);
    lock.unlock();
    queue.submit({writes, load.file, offset, place, load.piece,
                  [&, place](int error, uint64_t bytes) {
                    std::lock_guard inner(mutex);
                    if (!first_error) first_error = error;
                    moved += bytes;
                    places.push_back(place);
                    ended.notify_all();
                  },
                  load.memory});
    lock.lock();
  }
  ended.wait(lock, [&] { return places.size() == load.depth; });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return {first_error, static_cast<double>(moved) / took.count()};
}

}  // namespace strata::io
