#include "core/stream.h"

namespace strata {

Stream::~Stream() {
  if (device_) device_->api()->stream_destroy(device_->self(), &stream_);
}

Status Stream::create(const Device& device, int32_t priority, StreamTrace* trace) {
  if (!device.is_asynchronous()) return Ok();
  STRATA_RETURN_IF_ERROR(take_failure(device.api()->stream_create(device.self(), priority, &stream_)));
  device_ = &device;
  trace_ = trace;
  return Ok();
}

Status Stream::wait() const {
  return device_ ? take_failure(device_->api()->stream_wait_host(device_->self(), &stream_)) : Ok();
}

Status Stream::wait_for(std::chrono::nanoseconds timeout) const {
  if (!device_) return Ok();
  Event reached = Event::create();
  STRATA_RETURN_IF_ERROR(take_failure(device_->api()->stream_record(device_->self(), &stream_, reached.get())));
  return reached->wait(timeout);
}

struct Marker::Point {
  const Device& device;
  strata_marker* marker = nullptr;
  explicit Point(const Device& d) : device(d) {}
  ~Point() { device.api()->marker_destroy(device.self(), marker); }
};

Status Marker::at_end_of(const Device& device, const strata_stream* stream, Marker* out) {
  out->point_.reset();
  if (!stream || !device.is_asynchronous()) return Ok();
  auto point = std::make_shared<Point>(device);
  STRATA_RETURN_IF_ERROR(take_failure(device.api()->marker_create(device.self(), &point->marker)));
  STRATA_RETURN_IF_ERROR(take_failure(device.api()->marker_record(device.self(), point->marker, stream)));
  out->point_ = std::move(point);
  return Ok();
}

Status Marker::before(const strata_stream* stream) const {
  if (!point_) return Ok();
  const strata_device_api* api = point_->device.api();
  strata_device* self = point_->device.self();
  return take_failure(stream ? api->stream_wait_marker(self, stream, point_->marker)
                             : api->marker_wait_host(self, point_->marker));
}

Work Work::create() {
  Work work;
  work.state_ = std::make_shared<State>();
  return work;
}

Work Work::ending_at(const Marker& end) {
  Work work = create();
  work.enqueued(end);
  return work;
}

void Work::enqueued(const Marker& end) {
  state_->end = end;
  state_->event->set(Ok());
}

void Work::failed(const Status& status) { state_->event->set(status); }

bool Work::is_set() const { return state_->event->is_set(); }

Status Work::wait_enqueued(std::chrono::nanoseconds patience) const { return state_->event->wait(patience); }

Status Work::before(const strata_stream* stream, std::chrono::nanoseconds patience) const {
  STRATA_RETURN_IF_ERROR(wait_enqueued(patience));
  return state_->end.before(stream);
}

Status wait_for_all(std::vector<Work>* work, std::chrono::nanoseconds patience, bool* late) {
  Status first;
  for (const Work& each : *work) {
    const Status status = each.before(nullptr, patience);
    if (first.ok()) first = status;
    *late |= status.code() == STRATA_DEADLINE_EXCEEDED;
  }
  work->clear();
  return first;
}

}  // namespace strata
