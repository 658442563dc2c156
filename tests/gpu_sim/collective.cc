// collective.cc - strata.collective/1 as NCCL does it, over a collective that works on host memory.
//
// A collective is numbered at its call and enqueued on its stream. Its worker waits until every earlier number of this
// rank is done, copies the inputs into memory of the wrapped collective, runs it there, copies the outputs back and
// sets `done`. So all ranks have one order however their streams are scheduled; and, as with NCCL, streams that wait
// for each other against that order stop until the deadline. The deadline counts from when the stream gets there.
//
// Calls that are the host's business (exchange, barrier) have a second instance of the wrapped collective, under the
// job's name with "-x", and never wait for enqueued work. Their tags say how many collectives were called before, so
// that the ranks' order of all calls is compared.
//
// The first failure stays: queued collectives end with it, later calls return it. Both instances are told, so that the
// other ranks fail, too; one that hears of it through the instance that did not fail itself has CANCELLED with the
// text.
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "collective_kit/call.h"
#include "collective_kit/slots.h"
#include "gpu.h"
#include "interfaces.h"
#include "wrapped_comm.h"

using gpu_sim::Gpu;
using gpu_sim::HostMemory;
using gpu_sim::WrappedComm;
using strata::collective_kit::Call;
using strata::collective_kit::Deadline;
using strata::collective_kit::Error;
using strata::collective_kit::Item;
using strata::collective_kit::Op;
using strata::plugin_kit::attempt;
using strata::plugin_kit::join;

namespace {

// One collective, from its call to its end.
struct Work {
  Work(const Call& read, const strata_coll_args& args, int64_t deadline)
      : call(read), tag(args.tag), label(args.label ? args.label : ""), deadline_ns(deadline) {}

  const Call call;
  const uint64_t tag;
  const std::string label;
  const int64_t deadline_ns;
  std::shared_ptr<strata_event> done;
};

WrappedComm::Slot slot_of(Op op) {
  using Api = strata_collective_api;
  static constexpr WrappedComm::Slot slots[] = {nullptr,          &Api::all_gather, &Api::reduce_scatter,
                                                &Api::all_reduce, &Api::broadcast,  &Api::all_to_all};
  return slots[static_cast<int>(op)];
}

// An empty item has no address.
void copy(void* dst, const void* src, uint64_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

uint64_t padded(uint64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

struct strata_comm : strata::collective_kit::Comm {
  static constexpr char kName[] = "gpu_sim";
  Error open(const strata_open_args& args);
  void leave();
  void caps(strata_collective_caps* out) const;
  Error alloc(uint64_t bytes, void** out);
  Error free(void* ptr);
  Error run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done);
  Error fail(const Error& mine, const Error& others);
  std::string who() const { return join("rank ", caps_.rank); }
  // For the slot, which is none of collective_kit's.
  Error exchange_on_host(const void* in, void* out, uint64_t bytes, const strata_coll_args* args);

 private:
  Error failure();
  uint64_t unfinished();
  template <class Body>
  Error on_host(const strata_coll_args& args, Body body);
  void finish(Work& work);
  Error execute(const Work& work);
  Error wait_turn(const Work& work, const Deadline& deadline);
  Error move(const Work& work, const Deadline& deadline);
  Error stage(const Call& call, std::vector<strata_coll_item>* items, std::vector<char*>* outputs);
  Error reserve(uint64_t bytes);

  const strata_sync_api* sync_ = nullptr;
  std::shared_ptr<Gpu> gpu_;
  WrappedComm data_, control_;
  strata_collective_caps caps_{};
  std::string job_;

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t submitted_ = 0;
  uint64_t finished_ = 0;
  uint64_t turn_ = 0;  // the last number that is done, while nothing failed
  Error failure_;

  char* staging_ = nullptr;  // memory of data_, of whose turn it is
  uint64_t staging_bytes_ = 0;
};

Error strata_comm::open(const strata_open_args& args) {
  sync_ = strata::plugin_kit::host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
  if (!sync_) return {STRATA_FAILED_PRECONDITION, "the host has no " STRATA_HOST_SYNC};
  const std::string wraps = strata::plugin_kit::Options(args.options).text("wraps", "comm_local");
  if (wraps == kName) return {STRATA_INVALID_ARGUMENT, "option wraps names gpu_sim itself"};
  if (Error e = data_.open(wraps, args); !e.ok()) return e;
  caps_.struct_size = sizeof(caps_);
  if (Error e = data_.caps(&caps_); !e.ok()) return e;
  job_ = caps_.job;
  caps_.job = job_.c_str();

  strata_open_args control = args;
  const std::string control_job = job_ + "-x";
  control.job = control_job.c_str();
  control.rank = caps_.rank;
  control.world = caps_.world;
  control.local_rank = caps_.local_rank;
  control.local_world = caps_.local_world;
  if (Error e = control_.open(wraps, control); !e.ok()) return e;
  gpu_ = Gpu::attach(args.job ? args.job : "", caps_.local_rank, gpu_sim::read_settings(args.options));
  return {};
}

// Others are not waited for: what is not done ends with an error.
void strata_comm::leave() {
  if (!gpu_) return;
  if (!in_child()) {
    if (const uint64_t left = unfinished(); left > 0) {
      const Error closed(STRATA_CANCELLED, join("closed before ", left, " of its collectives were done"));
      (void)fail(closed, closed);
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finished_ == submitted_; });
  }
  control_.close();
  data_.close();
  gpu_->memory().free_all_of(this);
}

void strata_comm::caps(strata_collective_caps* out) const {
  const uint32_t size = out->struct_size;
  *out = caps_;
  out->struct_size = size;
  out->flags |= STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT;
  out->memory = STRATA_CUDA;
}

Error strata_comm::alloc(uint64_t bytes, void** out) {
  *out = gpu_->memory().alloc(bytes, 4096, 0, this);
  return {};
}

Error strata_comm::free(void* ptr) {
  if (gpu_->memory().free(ptr)) return {};
  return {STRATA_INVALID_ARGUMENT, "free of a pointer that is not allocated: ignored"};
}

// --- failing --------------------------------------------------------------------------------------------------------

Error strata_comm::failure() {
  std::lock_guard lock(mutex_);
  return failure_;
}

uint64_t strata_comm::unfinished() {
  std::lock_guard lock(mutex_);
  return submitted_ - finished_;
}

Error strata_comm::fail(const Error& mine, const Error&) {
  {
    std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = mine;
    changed_.notify_all();
  }
  const Error kept = failure();
  data_.abort(kept);
  control_.abort(kept);
  return kept;
}

// --- the host's business --------------------------------------------------------------------------------------------

template <class Body>
Error strata_comm::on_host(const strata_coll_args& args, Body body) {
  const std::string label = join(args.label ? args.label : "", ", after ", submitted_, " enqueued");
  strata_coll_args placed = args;
  placed.label = label.c_str();
  placed.tag ^= submitted_ << 40;
  placed.stream = nullptr;
  return body(placed);
}

Error strata_comm::exchange_on_host(const void* in, void* out, uint64_t bytes, const strata_coll_args* args) {
  if (Error e = check_process(); !e.ok()) return e;
  const Error e = attempt([&]() -> Error {
    if (Error kept = failure(); !kept.ok()) return kept;
    if (!args || !STRATA_HAS(args, strata_coll_args, stream)) {
      return {STRATA_INVALID_ARGUMENT, "an exchange without arguments, or with a short struct"};
    }
    return on_host(*args, [&](const strata_coll_args& placed) { return control_.exchange(in, out, bytes, placed); });
  });
  return e.ok() ? e : fail(e, e);
}

// --- the course of a collective -------------------------------------------------------------------------------------

Error strata_comm::run(Op op, const strata_coll_args& args, const Deadline&, strata_event* done) {
  if (Error e = failure(); !e.ok()) return e;
  if (op == Op::kBarrier)
    return on_host(args, [&](const strata_coll_args& placed) { return control_.barrier(placed); });
  Call call(caps_.rank, caps_.world);
  if (Error e = call.read(submitted_ + 1, op, args); !e.ok()) return e;
  const int64_t given = args.deadline_ns;
  const auto work = std::make_shared<Work>(call, args, given > 0 ? std::min(given, deadline_ns) : deadline_ns);
  const std::shared_ptr<gpu_sim::Stream> stream = gpu_->find_stream(args.stream);
  if (!stream) {
    {
      std::lock_guard lock(mutex_);
      ++submitted_;
    }
    Error e = execute(*work);
    return e.ok() ? strata::plugin_kit::set_done(host, done) : e;
  }
  if (done) {
    sync_->retain(done);
    work->done = {done, sync_->release};
  }
  std::lock_guard lock(mutex_);  // the worker cannot end it before it is counted
  stream->push([this, work] { finish(*work); });
  ++submitted_;
  return {};
}

void strata_comm::finish(Work& work) {
  const std::shared_ptr<strata_event> done = std::move(work.done);
  const strata_sync_api* sync = sync_;
  const Error e = execute(work);
  // From here on this may be gone: `leave` waits for the collective only.
  if (done) sync->set(done.get(), e.code(), e.text().c_str());
}

Error strata_comm::execute(const Work& work) {
  const Deadline deadline = Deadline::after(work.deadline_ns);
  Error e = attempt([&] {
    Error late = wait_turn(work, deadline);
    return late.ok() ? move(work, deadline) : late;
  });
  if (!e.ok()) e = fail(e, e);
  std::lock_guard lock(mutex_);
  if (e.ok()) turn_ = work.call.number;
  ++finished_;
  changed_.notify_all();
  return e;
}

Error strata_comm::wait_turn(const Work& work, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  const uint64_t before = work.call.number - 1;
  changed_.wait_until(lock, deadline.point(), [&] { return turn_ == before || !failure_.ok(); });
  if (!failure_.ok() || turn_ == before) return failure_;
  return {STRATA_DEADLINE_EXCEEDED, join(work.call.what, ": its stream waited ", deadline.text(), " for call ",
                                         turn_ + 1, " of this rank, which is on another stream and not done")};
}

Error strata_comm::move(const Work& work, const Deadline& deadline) {
  const Call& call = work.call;
  std::vector<strata_coll_item> items;
  std::vector<char*> outputs;
  const Error staged = attempt([&] { return stage(call, &items, &outputs); });
  if (!staged.ok()) return {staged.code(), call.what + ": " + staged.text()};
  const strata_coll_args args = {sizeof(args),
                                 STRATA_ABI_MINOR,
                                 items.data(),
                                 items.size(),
                                 sizeof(strata_coll_item),
                                 work.tag,
                                 work.label.c_str(),
                                 call.root,
                                 0,
                                 std::max<int64_t>(1, deadline.left_ns()),
                                 nullptr,
                                 nullptr};
  if (Error e = data_.call(slot_of(call.op), args); !e.ok()) return e;
  for (size_t k = 0; k < items.size(); ++k) copy(outputs[k], items[k].out, call.out_bytes(call.items[k]));
  return {};
}

// Brings the inputs into memory of the wrapped collective. `outputs` is where its results belong.
Error strata_comm::stage(const Call& call, std::vector<strata_coll_item>* items, std::vector<char*>* outputs) {
  if (Error broken = gpu_->failure(); !broken.ok()) return broken;
  uint64_t bytes = 0;
  for (const Item& item : call.items) bytes += padded(call.in_bytes(item)) + padded(call.out_bytes(item));
  if (Error e = reserve(bytes); !e.ok()) return e;
  char* place = staging_;
  for (const Item& item : call.items) {
    const uint64_t in_bytes = call.reads_input_of(caps_.rank) ? call.in_bytes(item) : 0;
    char* in = place;
    char* out = in + padded(in_bytes);
    place = out + padded(call.out_bytes(item));
    copy(in, gpu_->memory().resolve(item.in, in_bytes, HostMemory::kAny), in_bytes);
    outputs->push_back(gpu_->memory().resolve(item.out, call.out_bytes(item), HostMemory::kAny));
    items->push_back({sizeof(strata_coll_item), STRATA_ABI_MINOR, in, out, item.count, item.in_dtype, item.out_dtype});
  }
  return {};
}

Error strata_comm::reserve(uint64_t bytes) {
  if (bytes <= staging_bytes_) return {};
  if (staging_) data_.free(staging_);
  staging_ = nullptr;
  staging_bytes_ = 0;
  void* fresh = nullptr;
  if (Error e = data_.alloc(2 * bytes, &fresh); !e.ok()) return e;
  staging_ = static_cast<char*>(fresh);
  staging_bytes_ = 2 * bytes;
  return {};
}

namespace gpu_sim {
namespace {

strata_status STRATA_CALL comm_exchange(strata_comm* self, const void* in, void* out, uint64_t bytes,
                                        const strata_coll_args* args) {
  return strata::plugin_kit::guard(self->host, strata_comm::kName,
                                   [&] { return self->exchange_on_host(in, out, bytes, args); });
}

}  // namespace

const strata_collective_api collective_table = [] {
  strata_collective_api table = strata::collective_kit::Slots<strata_comm>::table;
  table.exchange = comm_exchange;
  return table;
}();

}  // namespace gpu_sim
