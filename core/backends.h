// backends.h - C++ faces of the plugin tables: Status instead of codes, RAII instead of close, no logic.
//
// Each object owns one open plugin instance. Tables come from PluginSet, so every slot can be called.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/plugins/event.h"
#include "core/plugins/host.h"
#include "core/status.h"
#include "strata/iface/checkpoint.h"
#include "strata/iface/collective.h"
#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "strata/iface/optimizer.h"

namespace strata {

// Where leak checkers find what is never to be freed.
inline void keep_for_good(const void* what) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<const void*>;
  std::lock_guard lock(mutex);
  kept->push_back(what);
}

// An open instance: table and self, closed when it goes.
template <class Api, class Self>
class Instance {
 public:
  Instance() = default;
  Instance(const Instance&) = delete;
  Instance& operator=(const Instance&) = delete;
  ~Instance() { close(); }

  Status open(const Api* api, const strata_open_args& args) {
    close();
    Self* self = nullptr;
    STRATA_RETURN_IF_ERROR(take_failure(api->open(&args, &self)));
    api_ = api;
    self_ = self;
    return Ok();
  }
  void close() {
    if (self_) left_open_ ? keep_for_good(self_) : api_->close(self_);
    self_ = nullptr;
  }
  // What it would free is still in use, and nobody can say for how long: it is not closed when this goes.
  void leave_open() const { left_open_ = true; }
  explicit operator bool() const { return self_ != nullptr; }
  const Api* api() const { return api_; }
  Self* self() const { return self_; }

 protected:
  const Api* api_ = nullptr;
  Self* self_ = nullptr;

 private:
  mutable std::atomic<bool> left_open_{false};
};

template <class Caps, class Api, class Self>
Status read_caps(const Api* api, Self* self, Caps* caps) {
  *caps = {};
  caps->struct_size = sizeof(Caps);
  return take_failure(api->caps(self, caps));
}

// Operations without a stream are done when the call returns, on every device.
class Device : public Instance<strata_device_api, strata_device> {
 public:
  // Reads what it is; after open.
  Status inspect(strata_device_caps* out) {
    STRATA_RETURN_IF_ERROR(read_caps(api_, self_, out));
    type_ = out->type;
    id_ = out->device_id;
    return Ok();
  }
  strata_device_type type() const { return type_; }
  int32_t id() const { return id_; }
  // Work is enqueued on streams, and its memory is not the host's.
  bool is_asynchronous() const { return type_ != STRATA_CPU; }

  Status alloc(uint64_t bytes, void** out) const { return take_failure(api_->alloc(self_, bytes, out)); }
  void free(void* p) const { api_->free(self_, p); }
  Status copy(void* dst, const void* src, uint64_t bytes, const strata_stream* stream = nullptr) const {
    return take_failure(api_->copy(self_, dst, src, bytes, stream ? stream : cpu_stream()));
  }
  Status zero(void* dst, uint64_t bytes, const strata_stream* stream = nullptr) const {
    return take_failure(api_->fill(self_, dst, 0, bytes, stream ? stream : cpu_stream()));
  }
  Status cast(void* dst, strata_dtype to, const void* src, strata_dtype from, uint64_t count, strata_rounding rounding,
              const strata_stream* stream = nullptr) const {
    return take_failure(api_->cast(self_, dst, to, src, from, count, rounding, stream ? stream : cpu_stream()));
  }
  Status accumulate(float* dst, const void* src, strata_dtype from, uint64_t count,
                    const strata_stream* stream = nullptr) const {
    return take_failure(api_->accumulate(self_, dst, src, from, count, stream ? stream : cpu_stream()));
  }
  // A device that does not do many at once does them one by one.
  Status fold(const std::vector<strata_fold_item>& items, const strata_stream* stream = nullptr) const {
    if (items.empty()) return Ok();
    const strata_stream* on = stream ? stream : cpu_stream();
    const strata_status code = api_->fold(self_, items.data(), items.size(), sizeof(strata_fold_item), on);
    if (code != STRATA_UNIMPLEMENTED) return take_failure(code);
    for (const strata_fold_item& i : items) {
      STRATA_RETURN_IF_ERROR(i.adds ? accumulate(static_cast<float*>(i.dst), i.src, i.src_dtype, i.count, on)
                                    : cast(i.dst, i.dst_dtype, i.src, i.src_dtype, i.count, STRATA_ROUND_EVEN, on));
      if (i.squares) STRATA_RETURN_IF_ERROR(square_sums(i.dst, i.dst_dtype, i.count, i.squares, on));
    }
    return Ok();
  }
  Status square_sums(const void* src, strata_dtype dtype, uint64_t count, double* sums,
                     const strata_stream* stream = nullptr) const {
    return take_failure(api_->square_sums(self_, src, dtype, count, sums, stream ? stream : cpu_stream()));
  }
  Status find_nonfinite(const void* src, strata_dtype dtype, uint64_t count, int64_t* index) const {
    return take_failure(api_->find_nonfinite(self_, src, dtype, count, index, cpu_stream()));
  }

 private:
  static const strata_stream* cpu_stream() {
    static const strata_stream stream = {sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CPU, 0, nullptr};
    return &stream;
  }
  strata_device_type type_ = STRATA_CPU;
  int32_t id_ = 0;
};

class Collective : public Instance<strata_collective_api, strata_comm> {
 public:
  Status caps(strata_collective_caps* out) const { return read_caps(api_, self_, out); }
  // `out` goes before this does.
  Status split(int32_t colour, int32_t key, const strata_coll_args& args, Collective* out) const {
    out->close();
    strata_comm* part = nullptr;
    STRATA_RETURN_IF_ERROR(take_failure(api_->split(self_, colour, key, &args, &part)));
    out->api_ = api_;
    out->self_ = part;
    return Ok();
  }
  // A rank alone has nobody to share memory with: what would be the collective's comes from the device.
  void use_memory_of(const Device& device) { memory_of_ = &device; }
  const Device* memory_of() const { return memory_of_; }

 private:
  const Device* memory_of_ = nullptr;
};

class Optimizer : public Instance<strata_optimizer_api, strata_optim> {
 public:
  Status layout(strata_dtype dtype, strata_optim_layout* out) const {
    *out = {};
    out->struct_size = sizeof(*out);
    return take_failure(api_->layout(self_, dtype, out));
  }
  Status scalars(const strata_optim_group& group, uint64_t step, float* out) const {
    return take_failure(api_->scalars(self_, &group, step, out));
  }
  Status step(const strata_optim_args& args) const { return take_failure(api_->step(self_, &args, nullptr)); }
  Status export_array(const strata_optim_args& args, uint32_t index, float* out) const {
    return take_failure(api_->export_array(self_, &args, index, out));
  }
  Status import_array(const strata_optim_args& args, uint32_t index, const float* in) const {
    return take_failure(api_->import_array(self_, &args, index, in));
  }
};

using Offload = Instance<strata_offload_api, strata_offload>;
using Checkpoint = Instance<strata_checkpoint_api, strata_ckpt>;

// Memory of the device plugin or of the collective, freed when it goes.
class Memory {
 public:
  Memory() = default;
  Memory(Memory&& o) noexcept { swap(o); }
  Memory& operator=(Memory&& o) noexcept {
    swap(o);
    return *this;
  }
  ~Memory() {
    if (device_ && pinned_) device_->api()->free_pinned(device_->self(), data_);
    if (device_ && !pinned_) device_->free(data_);
    if (collective_) collective_->api()->free(collective_->self(), data_);
  }

  static Status on_device(const Device& device, uint64_t bytes, Memory* out) {
    Memory m;
    STRATA_RETURN_IF_ERROR(device.alloc(bytes, &m.data_));
    m.device_ = &device;
    m.bytes_ = bytes;
    *out = std::move(m);
    return Ok();
  }
  // Memory that both the host and the device's work can read and write.
  static Status shared_with_host(const Device& device, uint64_t bytes, Memory* out) {
    if (!device.is_asynchronous()) return on_device(device, bytes, out);
    Memory m;
    STRATA_RETURN_IF_ERROR(take_failure(device.api()->alloc_pinned(device.self(), bytes, &m.data_)));
    m.device_ = &device;
    m.pinned_ = true;
    m.bytes_ = bytes;
    *out = std::move(m);
    return Ok();
  }
  // Memory that can be gathered into and reduced from. Zeros.
  static Status for_collectives(const Collective& collective, uint64_t bytes, Memory* out) {
    if (const Device* device = collective.memory_of()) {
      STRATA_RETURN_IF_ERROR(on_device(*device, bytes, out));
      return bytes > 0 ? device->zero(out->at(0), bytes) : Ok();
    }
    Memory m;
    if (bytes > 0) {
      STRATA_RETURN_IF_ERROR(take_failure(collective.api()->alloc(collective.self(), bytes, &m.data_)));
      m.collective_ = &collective;
    }
    m.bytes_ = bytes;
    *out = std::move(m);
    return Ok();
  }

  char* at(uint64_t offset) const { return static_cast<char*>(data_) + offset; }
  uint64_t bytes() const { return bytes_; }
  // Of the device: stays for good, as a disk that answers late may write to it.
  void leave_behind() {
    if (device_) device_->leave_open();
    device_ = nullptr;
  }

 private:
  void swap(Memory& o) {
    std::swap(device_, o.device_);
    std::swap(pinned_, o.pinned_);
    std::swap(collective_, o.collective_);
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
  }
  const Device* device_ = nullptr;
  bool pinned_ = false;
  const Collective* collective_ = nullptr;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace strata
