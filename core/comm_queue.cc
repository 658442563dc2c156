#include "core/comm_queue.h"

#include <cstring>

#include "core/fpu.h"
#include "core/hash.h"
#include "core/plugins/cores.h"
#include "core/registry.h"

namespace strata {

namespace {
constexpr std::chrono::seconds kLeaveAfter{5};
}

CommQueue::CommQueue(const Device& device, Comms comms, std::chrono::nanoseconds deadline, Counters& counters,
                     Trace& trace, const std::vector<int>& cpus, FailFn on_failure)
    : device_(device),
      comms_(comms),
      deadline_(deadline),
      counters_(counters),
      trace_(trace),
      on_failure_(std::move(on_failure)),
      thread_([this, cpus] {
        bind_this_thread(cpus);
        work();
      }) {}

// Gathers are waited for by the forward pass, reductions by nobody until the step.
Status CommQueue::create_streams() {
  STRATA_RETURN_IF_ERROR(gathers_.create(device_, -1, trace_.add_stream("gathers", trace_.collective)));
  return reductions_.create(device_, 0, trace_.add_stream("reductions", trace_.collective));
}

CommQueue::~CommQueue() {
  std::deque<Entry> dropped;
  const bool stuck = !settle();
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    dropped.swap(queue_);
  }
  wake_.notify_all();
  if (stuck) abort({STRATA_CANCELLED, "a rank closed its engine"});
  for (Entry& e : dropped) e.work.failed({STRATA_CANCELLED, e.op.label + ": the engine is closing"});
  thread_.join();
  release_device();
}

bool CommQueue::settle() {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, kLeaveAfter, [this] { return queue_.empty() && !executing_; });
}

void CommQueue::release_device() {
  for (const Stream* stream : {&gathers_, &reductions_}) {
    if (stream->wait_for(kLeaveAfter).code() != STRATA_DEADLINE_EXCEEDED) continue;
    abort({STRATA_CANCELLED, "a rank closed its engine"});
    (void)stream->wait();  // what was enqueued uses memory that goes next
  }
}

Work CommQueue::submit(CommOp op) {
  Work work = Work::create();
  op.step = trace_.host.step();
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

Status CommQueue::run(CommOp op) {
  return or_fail(submit(std::move(op)).before(nullptr, std::chrono::nanoseconds(-1)));
}

Status CommQueue::flush() {
  STRATA_RETURN_IF_ERROR(run({}));
  STRATA_RETURN_IF_ERROR(or_fail(gathers_.wait()));
  return or_fail(reductions_.wait());
}

void CommQueue::fail(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  on_failure_(status);
  const Axis& world = comms_.places.world;
  if (world.size > 1) abort({status.code(), "rank " + std::to_string(world.rank) + ": " + status.text()});
}

void CommQueue::abort(const Status& why) const {
  comms_.world.api()->abort(comms_.world.self(), why.code(), why.text().c_str());
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
  Timings& t = trace_.timings;
  if (op.kind == CommOp::Kind::kGather) return t.gather;
  return op.kind == CommOp::Kind::kReduceScatter || op.kind == CommOp::Kind::kAllReduce ? t.reduce : t.agree;
}

const Stream& CommQueue::stream_of(const CommOp& op) const {
  switch (op.kind) {
    case CommOp::Kind::kReduceScatter:
    case CommOp::Kind::kAllReduce:
    case CommOp::Kind::kAgree:  // its numbers come from the last reduction
      return reductions_;
    default:
      return gathers_;
  }
}

Status CommQueue::execute(CommOp& op, Marker* end) {
  static constexpr const char* kNames[] = {"gather", "agree", "reduce", "all-reduce", "broadcast", "local"};
  const char* const name = kNames[static_cast<size_t>(op.kind)];
  const Traffic traffic = traffic_of(op);
  trace_.collective.set_step(op.step);
  Span span(trace_.collective, name, op.unit, &time_of(op));
  const strata_stream* stream = stream_of(op).c();
  const auto mark = [&](const char* what, uint64_t bytes = 0) {
    if (op.kind != CommOp::Kind::kAgree) stream_of(op).mark(what, op.unit, bytes, op.label);
  };
  mark(nullptr);
  STRATA_RETURN_IF_ERROR(wait_before(op, stream).during(op.label));
  if (!op.after.empty()) mark("wait for work before it");
  if (op.dropped && *op.dropped) return Marker::at_end_of(device_, stream, end);
  if (op.prepare) STRATA_RETURN_IF_ERROR(op.prepare(stream).during(op.label));
  if (op.prepare) mark("from tier");
  STRATA_RETURN_IF_ERROR((ranks_of(op) == 1 ? alone(op, stream) : launch(op, stream)).during(op.label));
  mark(name, traffic.amount);
  if (traffic.bytes) add(*traffic.bytes, traffic.amount);
  if (traffic.calls) add(*traffic.calls, 1);
  span.note(traffic.amount, op.label);
  if (op.then) {
    const Span arrival(trace_.collective, "take in", op.unit);
    STRATA_RETURN_IF_ERROR(op.then(stream).during(op.label));
    mark("take in");
  }
  return Marker::at_end_of(device_, stream, end);
}

// What an operation waits for on the host are updates; all else is device work by now.
Status CommQueue::wait_before(const CommOp& op, const strata_stream* stream) const {
  for (const Work& work : op.after) {
    const Span wait(trace_.collective, "wait for update", op.unit, nullptr, !work.is_set());
    STRATA_RETURN_IF_ERROR(work.before(stream, 2 * deadline_));
  }
  return Ok();
}

Status CommQueue::wait_for_reductions() const {
  const Span wait(trace_.collective, "wait for reductions", kNoUnit, nullptr, reductions_.c() != nullptr);
  return reductions_.wait_for(patience());
}

// A group of one: what was sent is what arrives, in the type that was asked for.
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
  int64_t waited = 0;
  const bool returns_done = !stream || op.kind == CommOp::Kind::kAgree;
  if (returns_done && op.step != 0) args.waited_ns = &waited;
  const int64_t begin = trace_clock();
  const Status status = call(op, args);
  if (waited > 0) {
    trace_.collective.add({"wait for ranks", begin, begin + waited, op.step, 0, op.unit, {}});
  }
  return status;
}

Status CommQueue::call(const CommOp& op, const strata_coll_args& args) const {
  const Collective& comm = op.everyone ? comms_.world : comms_.group;
  const strata_collective_api* api = comm.api();
  strata_comm* self = comm.self();
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

// What this rank receives from others. An all-reduce is a reduce-scatter and a gather of the result.
CommQueue::Traffic CommQueue::traffic_of(const CommOp& op) const {
  const uint64_t others = ranks_of(op) - 1;
  uint64_t in = 0, out = 0;
  for (const auto& item : op.items) {
    in += item.count * dtype_size(item.in_dtype);
    out += item.count * dtype_size(item.out_dtype);
  }
  switch (op.kind) {
    case CommOp::Kind::kGather:
      return {&counters_.gather_bytes, &counters_.gather_calls, others * in};
    case CommOp::Kind::kReduceScatter:
      return {&counters_.reduce_bytes, &counters_.reduce_calls, others * in};
    case CommOp::Kind::kAllReduce:
      return {&counters_.reduce_bytes, &counters_.reduce_calls, others * (in + out) / (others + 1)};
    case CommOp::Kind::kAgree:
      return {&counters_.agree_bytes, nullptr, others * op.exchange.bytes};
    case CommOp::Kind::kBroadcast:
      return {&counters_.agree_bytes, nullptr, in};
    case CommOp::Kind::kLocal:
      return {};
  }
  return {};
}

}  // namespace strata
