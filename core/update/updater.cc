#include "core/update/updater.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/fpu.h"
#include "core/manifest/manifest_keys.h"
#include "core/plugins/cores.h"

namespace strata {

namespace {
// Elements of a part: that is read and written; and whose new weights go through a buffer, so that a few of those fit
// into as many bytes as buffers may have, whatever the model's largest unit is.
constexpr uint64_t kFromDisk = uint64_t{4} << 20, kFromMemory = uint64_t{32} << 20;

// A part is a sub-group, or as much of one as a buffer holds: the device lane's are for kStreamed.
HostLane::Buffers update_buffers(const Settings& settings) {
  const OffloadOptimizerSettings& offload = settings.zero_optimization.offload_optimizer;
  const bool nvme = offload.device == OffloadDevice::kNvme;
  auto part = static_cast<uint64_t>(settings.zero_optimization.sub_group_size);
  std::string why = "sub_group_size is " + value_in_words(settings, "zero_optimization.sub_group_size");
  if (offload.uses_device() && part > DeviceLane::kStreamed) {
    part = DeviceLane::kStreamed;
    why = "beside parts that the device updates it is at most " + std::to_string(part);
  }
  const auto round = [](uint64_t n) { return std::max(kShardElements, n / kShardElements * kShardElements); };
  if (!nvme) return {round(std::min(part, kFromMemory)), 0, 1, 0, false, ""};
  const uint64_t asked = offload.buffer_size > 0 ? static_cast<uint64_t>(offload.buffer_size) : kFromDisk;
  if (asked <= part) why = "in steps of " + std::to_string(kShardElements);
  const auto count = static_cast<uint64_t>(offload.buffer_count);
  const uint64_t ahead = offload.pipeline_read ? count / 2 : 0;
  return {round(std::min(part, asked)), count, ahead, asked, offload.buffer_size > 0, why, offload.pipeline_write};
}
}  // namespace

Updater::Updater(const Registry& registry, const Layout& layout, const Settings& settings, const Device& device,
                 const Gradients& gradients, const Weights& weights, States& states, std::chrono::nanoseconds deadline,
                 Counters& counters, Trace& trace, const std::vector<int>& cpus, FailFn on_failure, LogFn log)
    : unit_steps(registry.units.size()),
      layout_(layout),
      splits_(settings.zero_optimization.offload_optimizer.split_update),
      buffers_(update_buffers(settings)),
      device_(device),
      gradients_(gradients),
      states_(states),
      trace_(trace),
      on_failure_(std::move(on_failure)),
      log_(std::move(log)),
      part_update_(layout, device, gradients, states, counters),
      host_lane_(layout, device, states, weights, part_update_, buffers_, deadline, counters, trace),
      device_lane_(layout, device, states, weights, part_update_, deadline, trace),
      cpus_(cpus),
      share_(splits_ ? settings.zero_optimization.offload_optimizer.split_share : 0),
      thread_([this] {
        bind_this_thread(cpus_);
        work();
      }) {}

Updater::~Updater() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  (void)host_lane_.stream().wait();  // what was enqueued uses memory that goes next
}

void Updater::add_to(Plan* plan) const {
  const bool streams = device_.is_asynchronous();
  plan->add("update buffers", streams ? kCpuTier : kDeviceTier, host_lane_.buffer_bytes(), streams,
            host_lane_.buffer_note());
  plan->add("buffers of streamed state", kDeviceTier, device_lane_.buffer_bytes(splits_));
  plan->add("update factors", streams ? kCpuTier : kDeviceTier, part_update_.bytes(), streams);
}

Status Updater::allocate() {
  STRATA_RETURN_IF_ERROR(part_update_.allocate());
  STRATA_RETURN_IF_ERROR(device_lane_.allocate(splits_));
  if (splits_) STRATA_RETURN_IF_ERROR(joined_.create(device_, 0));
  return host_lane_.allocate();
}

void Updater::submit(UpdateJob job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

Status Updater::join() {
  std::unique_lock lock(mutex_);
  const Span wait(trace_.host, "wait for update", kNoUnit, nullptr, running_ || !jobs_.empty());
  idle_.wait(lock, [this] { return jobs_.empty() && !running_; });
  if (!failure_.ok()) return failure_;
  STRATA_RETURN_IF_ERROR(device_lane_.before(nullptr).during("update"));
  return host_lane_.stream().wait().during("update");
}

void Updater::work() {
  use_default_rounding();
  std::unique_lock lock(mutex_);
  for (;;) {
    // Jobs that were submitted are finished even when the engine is closing.
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    UpdateJob job = std::move(jobs_.front());
    jobs_.pop_front();
    running_ = true;
    Status status = failure_;
    lock.unlock();
    trace_.update.set_step(job.traced);
    trace_.streaming.set_step(job.traced);
    if (status.ok()) {
      status = run(job).during("update of step " + std::to_string(job.step));
      if (!status.ok()) on_failure_(status);
    }
    for (Work& updated : job.updated) {
      if (!status.ok() && !updated.is_set()) updated.failed(status);
    }
    trace_.update.set_step(0);
    trace_.streaming.set_step(0);
    if (job.ends_trace) trace_.leave();
    lock.lock();
    if (failure_.ok()) failure_ = status;
    running_ = false;
    if (jobs_.empty()) idle_.notify_all();
  }
}

Status Updater::run(UpdateJob& job) {
  {
    const Span wait(trace_.update, "wait for agreement", kNoUnit, nullptr, !job.outcome->known.is_set());
    STRATA_RETURN_IF_ERROR(job.outcome->known.wait_enqueued(std::chrono::nanoseconds(-1)));
  }
  if (job.on_known) job.on_known(*job.outcome);
  STRATA_RETURN_IF_ERROR(job.outcome->apply ? apply(job) : skip(job));
  // Units that were left as they are, those of a skipped step included, are as new as everything enqueued so far.
  Marker end;
  STRATA_RETURN_IF_ERROR(everything_so_far(&end));
  for (Work& updated : job.updated) {
    if (!updated.is_set()) updated.enqueued(end);
  }
  return Ok();
}

Status Updater::apply(UpdateJob& job) {
  const Span span(trace_.update, "updates", kNoUnit, &trace_.timings.update);
  // State that the device updated last time may be the host's part now.
  STRATA_RETURN_IF_ERROR(device_lane_.before(nullptr));
  STRATA_RETURN_IF_ERROR(device_lane_.seconds(&last_device_.seconds));
  share_.measured(last_host_, last_device_);
  log_share();
  STRATA_RETURN_IF_ERROR(part_update_.begin(job, unit_steps));
  Side host, device;
  cut(job, &host, &device);
  STRATA_RETURN_IF_ERROR(run_lanes(job, host, device));
  for (size_t u = 0; u < unit_steps.size(); ++u) unit_steps[u] += job.outcome->used[u] ? 1 : 0;
  return Ok();
}

// A unit is new when the last of its lanes is through with it.
Status Updater::run_lanes(UpdateJob& job, const Side& host, const Side& device) {
  Marker start;
  STRATA_RETURN_IF_ERROR(everything_so_far(&start));
  std::vector<std::optional<Marker>> first(job.units.size());
  const UnitDoneFn done = [&](size_t k, const Marker& end) -> Status {
    std::lock_guard lock(joining_);
    if (!host.has[k] || !device.has[k]) {
      job.updated[k].enqueued(end);
      return Ok();
    }
    if (!first[k]) {
      first[k] = end;
      return Ok();
    }
    Marker both;
    STRATA_RETURN_IF_ERROR(first[k]->before(joined_.c()));
    STRATA_RETURN_IF_ERROR(end.before(joined_.c()));
    STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, joined_.c(), &both));
    job.updated[k].enqueued(both);
    return Ok();
  };
  for (size_t k = 0; k < job.units.size(); ++k) {
    if (!host.has[k] && !device.has[k]) job.updated[k].enqueued(start);
  }
  if (device.streams) return run_both(host, device, start, done);
  STRATA_RETURN_IF_ERROR(device_lane_.run(device.parts, start, done));
  return host_lane_.run(host.parts, done);
}

Status Updater::run_both(const Side& host, const Side& device, const Marker& start, const UnitDoneFn& done) {
  Status streamed;
  std::thread lane;
  const auto stream = [&] { streamed = device_lane_.run(device.parts, start, done); };
  STRATA_RETURN_IF_ERROR(begin_thread("streamed state", cpus_, stream, &lane));
  const int64_t began = trace_clock();
  const Status on_host = host_lane_.run(host.parts, done);
  last_host_ = {host.streamable, 1e-9 * static_cast<double>(trace_clock() - began)};
  last_device_ = {device.streamable, 0};
  lane.join();
  return on_host.ok() ? streamed : on_host;
}

// Behind all work of both lanes.
Status Updater::everything_so_far(Marker* out) const {
  STRATA_RETURN_IF_ERROR(device_lane_.before(host_lane_.stream().c()));
  return Marker::at_end_of(device_, host_lane_.stream().c(), out);
}

void Updater::log_share() {
  if (!splits_ || std::abs(share_.share() - logged_share_) < 0.02) return;
  logged_share_ = share_.share();
  log_(STRATA_LOG_DEBUG, "split update: " + std::to_string(100 * logged_share_) +
                             " % of the state in host memory is updated on the device");
}

// The gradient is not finite, or there is none: nothing changes. The first rank that holds the cause says what it is.
Status Updater::skip(UpdateJob& job) {
  if (!job.outcome->any_used_anywhere && layout_.places.world.rank == 0) {
    log_(STRATA_LOG_WARN, "step " + std::to_string(job.step) + " changes nothing: no rank handed over a gradient");
  }
  if (job.outcome->says_why) {
    std::string param = "?";
    STRATA_RETURN_IF_ERROR(gradients_.find_nonfinite(&param));
    log_(STRATA_LOG_WARN, "step " + std::to_string(job.step) + " is skipped: the reduced gradient of param \"" + param +
                              "\" is not finite on rank " + std::to_string(layout_.places.world.rank) +
                              "; weights and moments are unchanged");
  }
  return Ok();
}

bool Updater::is_used(const UpdateJob& job, uint32_t unit) const {
  // The resident unit holds params of all units.
  return static_cast<int>(unit) == layout_.resident ? job.outcome->any_used : job.outcome->used[unit] != 0;
}

// Sub-groups of every used unit in forward order.
void Updater::cut(const UpdateJob& job, Side* host, Side* device) const {
  Spread spread(share_.share());
  for (Side* side : {host, device}) side->has.resize(job.units.size());
  for (size_t k = 0; k < job.units.size(); ++k) {
    const uint32_t u = job.units[k];
    for (uint32_t i = 0; is_used(job, u) && i < layout_.units[u].segments.size(); ++i) {
      if (layout_.units[u].segments[i].trainable) cut_segment(u, i, k, &spread, host, device);
    }
    for (Side* side : {host, device}) {
      if (side->has[k]) side->parts.back().last = true;
    }
  }
}

// What is kept in memory lies between what is read and written, so that the disk works all the time; what the device
// updates lies between the host's parts. A share that is measured is met by whole parts.
void Updater::cut_segment(uint32_t unit, uint32_t segment, size_t position, Spread* spread, Side* host,
                          Side* device) const {
  const uint64_t owned = layout_.owned(layout_.units[unit].segments[segment]).size();
  const uint64_t front = states_.front(unit, segment);
  const bool in_host_memory = states_.places().on_host(unit);
  Range parts[] = {{0, front}, {front, owned}};
  Spread turns(owned > 0 ? static_cast<double>(front) / static_cast<double>(owned) : 0);
  while (parts[0].size() + parts[1].size() > 0) {
    const bool first = parts[0].size() > 0 && (parts[1].size() == 0 || turns.next(buffers_.part));
    Range& from = parts[first ? 0 : 1];
    States::Piece piece{unit, segment, from.begin, std::min(buffers_.part, from.size())};
    from.begin += piece.count;
    piece.streamed = splits_ && in_host_memory && (share_.measures() ? spread->next(piece.count) : first);
    Side* side = states_.on_host(piece) ? host : device;
    side->parts.push_back({piece, position, !side->has[position], false});
    side->has[position] = true;
    side->streams = side->streams || piece.streamed;
    if (in_host_memory) side->streamable += piece.count;
  }
}

}  // namespace strata
