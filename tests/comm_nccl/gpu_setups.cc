// gpu_setups.cc - the tests of conformance_collective on comm_nccl with GPUs. The tests keep to host memory: a mirror
// takes the buffers of each call to memory of the plugin and back.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "gpus.h"
#include "ranks.h"
#include "reference.h"

namespace strata::test {
namespace {

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}

class GpuMirror : public Mirror {
 public:
  explicit GpuMirror(int gpu) : gpu_(gpu) {}
  ~GpuMirror() override {
    for (void* ptr : host_) std::free(ptr);
  }

  void* alloc(uint64_t bytes) override {
    const uint64_t whole = (bytes / 4096 + 1) * 4096;
    host_.push_back(std::aligned_alloc(4096, whole));
    return std::memset(host_.back(), 0, whole);
  }

  Status call(Peer& peer, Peer::Slot slot, std::vector<strata_coll_item> items, strata_coll_args args) override {
    must(cudaSetDevice(gpu_), "cudaSetDevice");
    ranges_.clear();
    const uint64_t world = static_cast<uint64_t>(peer.base.world);
    const strata_collective_api& api = *peer.api;
    const bool in_per_rank = slot == api.reduce_scatter || slot == api.all_to_all;
    const bool out_per_rank = slot == api.all_gather || slot == api.all_to_all;
    for (strata_coll_item& item : items) {
      const uint64_t in = item.count * element_size(item.in_dtype) * (in_per_rank ? world : 1);
      const uint64_t out = item.count * element_size(item.out_dtype) * (out_per_rank ? world : 1);
      add(item.in, in, item.out, out);
    }
    reserve(peer);
    std::vector<char> staged(bytes_);
    for (const Range& r : ranges_) std::memcpy(&staged[r.at], r.host, r.bytes);
    must(cudaMemcpy(device_, staged.data(), bytes_, cudaMemcpyDefault), "copying inputs");
    std::vector<strata_coll_item> there = items;
    for (strata_coll_item& item : there) {
      item.in = place(item.in);
      item.out = place(item.out);
    }
    args.items = there.data();
    const Status status = take_failure(slot(peer.comm, &args, nullptr));
    must(cudaMemcpy(staged.data(), device_, bytes_, cudaMemcpyDefault), "copying outputs");
    for (const Range& r : ranges_) std::memcpy(r.host, &staged[r.at], r.bytes);
    return status;
  }

 private:
  struct Range {
    char* host;
    uint64_t bytes;
    uint64_t at;
  };

  // Buffers that overlap stay together.
  void add(const void* in, uint64_t in_bytes, void* out, uint64_t out_bytes) {
    char* a = static_cast<char*>(const_cast<void*>(in));
    char* b = static_cast<char*>(out);
    if (a && b && a < b + out_bytes && b < a + in_bytes) {
      char* begin = std::min(a, b);
      push(begin, static_cast<uint64_t>(std::max(a + in_bytes, b + out_bytes) - begin));
    } else {
      push(a, in_bytes);
      push(b, out_bytes);
    }
  }
  void push(char* host, uint64_t bytes) {
    if (host && bytes > 0) ranges_.push_back({host, bytes, 0});
  }

  // Ranges of several items may share an input: one range for all that touch.
  void reserve(Peer& peer) {
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& x, const Range& y) { return x.host < y.host; });
    std::vector<Range> merged;
    for (const Range& r : ranges_) {
      if (!merged.empty() && r.host <= merged.back().host + merged.back().bytes) {
        const auto end = std::max(r.host + r.bytes, merged.back().host + merged.back().bytes);
        merged.back().bytes = static_cast<uint64_t>(end - merged.back().host);
      } else {
        merged.push_back(r);
      }
    }
    ranges_ = merged;
    uint64_t total = 0;
    for (Range& r : ranges_) {
      r.at = total;
      total += (r.bytes + 255) / 256 * 256;
    }
    bytes_ = total;
    if (total <= room_) return;
    if (device_) peer.api->free(peer.comm, device_);
    must(take_failure(peer.api->alloc(peer.comm, 2 * total, &device_)).ok() ? cudaSuccess : cudaErrorMemoryAllocation,
         "alloc");
    room_ = 2 * total;
  }

  char* place(const void* host) const {
    const char* at = static_cast<const char*>(host);
    for (auto r = std::upper_bound(ranges_.begin(), ranges_.end(), at,
                                   [](const char*p, const Range&range) { return p < range.host; });
         r != ranges_.begin();) {
      --r;
      if (at <= r->host + r->bytes) return static_cast<char*>(device_) + r->at + (at - r->host);
      break;
    }
    return nullptr;
  }

  const int gpu_;
  std::vector<void*> host_;
  std::vector<Range> ranges_;
  void* device_ = nullptr;
  uint64_t bytes_ = 0, room_ = 0;
};

}  // namespace

std::vector<Setup> all_setups(const std::vector<int>& worlds) {
  std::vector<Setup> setups;
  for (bool threads : {true, false}) {
    for (int world : worlds) {
      if (world > std::max(2, gpus_here())) continue;
      setups.push_back({"comm_nccl", threads, world, [] { return Options().set("deterministic_reduce", true); },
                        [](int rank) { return std::make_unique<GpuMirror>(rank); }});
    }
  }
  return setups;
}

}  // namespace strata::test
