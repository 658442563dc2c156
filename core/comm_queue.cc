#include "core/comm_queue.h"

#include <cstring>

#include "core/fpu.h"
#include "core/registry.h"

namespace strata {

namespace {
constexpr std::chrono::seconds kLeaveAfter{5};
}

CommQueue::CommQueue(const Device& device, const Collective& collective, int world, std::chrono::nanoseconds deadline,
                     Counters& counters, FailFn on_failure)
    : device_(device),
      collective_(collective),
      world_(static_cast<uint64_t>(world)),
      deadline_(deadline),
      counters_(counters),
      on_failure_(std::move(on_failure)),
      thread_([this] { work(); }) {}

// Gathers are waited for by the forward pass, reductions by nobody until the step.
Status CommQueue::create_streams() {
  STRATA_RETURN_IF_ERROR(gathers_.create(device_, -1));
  return reductions_.create(device_, 0);
}

CommQueue::~CommQueue() {
  std::deque<Entry> dropped;
  bool stuck = false;
  {
    std::unique_lock lock(mutex_);
    stuck = !idle_.wait_for(lock, kLeaveAfter, [this] { return queue_.empty() && !executing_; });
    stop_ = true;
    dropped.swap(queue_);
  }
  wake_.notify_all();
  if (stuck) collective_.api()->abort(collective_.self(), STRATA_CANCELLED, "a rank closed its engine");
  for (Entry& e : dropped) e.work.failed({STRATA_CANCELLED, e.op.label + ": the engine is closing"});
  thread_.join();
  release_device();
}

void CommQueue::release_device() {
  for (const Stream* stream : {&gathers_, &reductions_}) {
    if (stream->wait_for(kLeaveAfter).code() != STRATA_DEADLINE_EXCEEDED) continue;
    collective_.api()->abort(collective_.self(), STRATA_CANCELLED, "a rank closed its engine");
    (void)stream->wait();  // what was enqueued uses memory that goes next
  }
}

Work CommQueue::submit(CommOp op) {
  Work work = Work::create();
  uint64_t bytes = op.exchange.bytes;
  for (const auto& item : op.items) bytes += item.count * dtype_size(item.in_dtype);
  const uint64_t parts[] = {static_cast<uint64_t>(op.kind), op.tag, bytes};
  if (op.kind != CommOp::Kind::kLocal) hash_ = fnv1a(parts, sizeof(parts), hash_);
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) {
      work.failed(failure_);
      return work;
    }
    queue_.push_back({std::move(op), work});
  }
  wake_.notify_one();
  return work;
}

Status CommQueue::run(CommOp op) { return submit(std::move(op)).before(nullptr, std::chrono::nanoseconds(-1)); }

Status CommQueue::flush() {
  STRATA_RETURN_IF_ERROR(run({}));
  STRATA_RETURN_IF_ERROR(gathers_.wait());
  return reductions_.wait();
}

void CommQueue::fail(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  on_failure_(status);
  if (world_ > 1) collective_.api()->abort(collective_.self(), status.code(), status.text().c_str());
}

void CommQueue::work() {
  use_default_rounding();
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    Entry entry = std::move(queue_.front());
    queue_.pop_front();
    Status status = failure_;
    executing_ = true;
    lock.unlock();
    Marker end;
    if (status.ok()) {
      status = execute(entry.op, &end);
      if (!status.ok()) {
        fail(status);
      }
    }
    status.ok() ? entry.work.enqueued(end) : entry.work.failed(status);
    entry = {};
    lock.lock();
    executing_ = false;
    idle_.notify_all();
  }
}

std::atomic<uint64_t>& CommQueue::time_of(const CommOp& op) {
  Timings& t = counters_.timings;
  if (op.kind == CommOp::Kind::kGather) return t.gather;
  return op.kind == CommOp::Kind::kReduceScatter || op.kind == CommOp::Kind::kAllReduce ? t.reduce : t.agree;
}

const strata_stream* CommQueue::stream_of(const CommOp& op) const {
  switch (op.kind) {
    case CommOp::Kind::kReduceScatter:
    case CommOp::Kind::kAllReduce:
    case CommOp::Kind::kAgree:  // its numbers come from the last reduction
      return reductions_.c();
    default:
      return gathers_.c();
  }
}

Status CommQueue::execute(CommOp& op, Marker* end) {
  const Timed timed(time_of(op));
  const strata_stream* stream = stream_of(op);
  for (const Work& work : op.after) STRATA_RETURN_IF_ERROR(work.before(stream, 2 * deadline_).during(op.label));
  if (op.prepare) STRATA_RETURN_IF_ERROR(op.prepare(stream).during(op.label));
  STRATA_RETURN_IF_ERROR((world_ == 1 ? alone(op, stream) : launch(op, stream)).during(op.label));
  count(op);
  if (op.then) STRATA_RETURN_IF_ERROR(op.then(stream).during(op.label));
  return Marker::at_end_of(device_, stream, end);
}

// World 1: what was sent is what arrives, in the type that was asked for.
Status CommQueue::alone(const CommOp& op, const strata_stream* stream) {
  if (op.exchange.bytes > 0) std::memcpy(op.exchange.out, op.exchange.in, op.exchange.bytes);
  for (const strata_coll_item& item : op.items) {
    if (item.in == item.out) continue;
    STRATA_RETURN_IF_ERROR(
        device_.cast(item.out, item.out_dtype, item.in, item.in_dtype, item.count, STRATA_ROUND_EVEN, stream));
  }
  return Ok();
}

Status CommQueue::launch(const CommOp& op, const strata_stream* stream) {
  strata_coll_args args{};
  args.struct_size = sizeof(args);
  args.items = op.items.data();
  args.item_count = op.items.size();
  args.item_stride = sizeof(strata_coll_item);
  args.tag = op.tag;
  args.label = op.label.c_str();
  args.root = op.root;
  args.deadline_ns = deadline_.count();
  args.stream = stream;
  const strata_collective_api* api = collective_.api();
  strata_comm* self = collective_.self();
  switch (op.kind) {
    case CommOp::Kind::kGather:
      return take_failure(api->all_gather(self, &args, nullptr));
    case CommOp::Kind::kAgree:
      return take_failure(api->exchange(self, op.exchange.in, op.exchange.out, op.exchange.bytes, &args));
    case CommOp::Kind::kReduceScatter:
      return take_failure(api->reduce_scatter(self, &args, nullptr));
    case CommOp::Kind::kAllReduce:
      return take_failure(api->all_reduce(self, &args, nullptr));
    case CommOp::Kind::kBroadcast:
      return take_failure(api->broadcast(self, &args, nullptr));
    case CommOp::Kind::kLocal:
      return Ok();
  }
  return {STRATA_INTERNAL, "unknown operation"};
}

// What this rank received from others. An all-reduce is a reduce-scatter and a gather of the result.
void CommQueue::count(const CommOp& op) {
  const uint64_t others = world_ - 1;
  uint64_t in = 0, out = 0;
  for (const auto& item : op.items) {
    in += item.count * dtype_size(item.in_dtype);
    out += item.count * dtype_size(item.out_dtype);
  }
  switch (op.kind) {
    case CommOp::Kind::kGather:
      add(counters_.gather_bytes, others * in);
      add(counters_.gather_calls, 1);
      break;
    case CommOp::Kind::kReduceScatter:
      add(counters_.reduce_bytes, others * in);
      add(counters_.reduce_calls, 1);
      break;
    case CommOp::Kind::kAllReduce:
      add(counters_.reduce_bytes, others * (in + out) / world_);
      add(counters_.reduce_calls, 1);
      break;
    case CommOp::Kind::kAgree:
      add(counters_.agree_bytes, others * op.exchange.bytes);
      break;
    case CommOp::Kind::kBroadcast:
      add(counters_.agree_bytes, in);
      break;
    default:
      break;
  }
}

}  // namespace strata
