#include "flights.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "plugin_kit/plugin_kit.h"

namespace comm_nccl {

using strata::plugin_kit::join;

namespace {

// How much longer than its deadline a collective may take: the channel, which knows who is missing, speaks first.
constexpr std::chrono::milliseconds kGrace{300};
constexpr std::chrono::microseconds kSpin{200};
// Ranks end a collective that none of them holds up much closer together than this.
constexpr std::chrono::milliseconds kSettle{250};
constexpr std::chrono::seconds kDrain{2};

}  // namespace

void Fate::seal(const Error& failure) {
  std::lock_guard lock(mutex_);
  if (failure_.ok()) failure_ = failure;
}

Error Fate::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

// The caller's event, set by whoever comes first: its stream, or the end of the instance.
struct Flights::Done {
  Done(const strata_sync_api* api, strata_event* owned) : sync(api), event(owned) { sync->retain(event); }
  ~Done() { sync->release(event); }
  void set(const Error& outcome) {
    if (!was_set.exchange(true)) sync->set(event, outcome.code(), outcome.ok() ? nullptr : outcome.text().c_str());
  }
  const strata_sync_api* const sync;
  strata_event* const event;
  std::atomic<bool> was_set{false};
};

// What a stream's callback needs when the instance is gone.
struct Flights::Arrival {
  std::shared_ptr<Done> done;
  std::shared_ptr<Fate> fate;
  std::string what;

  static void arrived(void* arg, const char* error) {
    const std::unique_ptr<Arrival> self(static_cast<Arrival*>(arg));
    (void)strata::plugin_kit::attempt([&] {
      const Error failure = self->fate->failure();
      if (!failure.ok()) return self->done->set(failure);
      self->done->set(error ? Error(STRATA_INTERNAL, self->what + ": " + error) : Error());
    });
  }
};

Flights::~Flights() {
  for (Flight& flight : flights_) {
    gpu_->forget(flight.begin);
    gpu_->forget(flight.end);
  }
}

uint64_t Flights::add(const std::string& what, cudaEvent_t begin, cudaStream_t stream, int64_t deadline_ns,
                      strata_event* done) {
  Flight flight = {0, what, begin, gpu_->mark(stream), deadline_ns, {}, nullptr};
  if (done) {
    flight.done = std::make_shared<Done>(sync_, done);
    auto arrival = std::make_unique<Arrival>(Arrival{flight.done, fate_, what});
    gpu_->when_reached(stream, Arrival::arrived, arrival.get());
    arrival.release();
  }
  std::lock_guard lock(mutex_);
  flight.number = ++last_;
  flights_.push_back(std::move(flight));
  return last_;
}

Error Flights::look() {
  std::lock_guard lock(mutex_);
  return look_locked();
}

Error Flights::look_locked() {
  const bool sealed = !fate_->failure().ok();  // asked first: what has ended by then ended well
  for (auto flight = flights_.begin(); flight != flights_.end();) {
    if (gpu_->reached(flight->end)) {
      if (sealed) cut_off_.insert(flight->number);
      gpu_->forget(flight->begin);
      gpu_->forget(flight->end);
      flight = flights_.erase(flight);
      continue;
    }
    if (!flight->deadline && gpu_->reached(flight->begin)) {
      flight->deadline.emplace(std::chrono::nanoseconds(flight->deadline_ns) + kGrace);
    }
    if (flight->deadline && flight->deadline->passed()) {
      return {STRATA_DEADLINE_EXCEEDED,
              join(flight->what, ": began on the device and was not done after ", flight->deadline->text())};
    }
    ++flight;
  }
  return {};
}

bool Flights::empty() const {
  std::lock_guard lock(mutex_);
  return flights_.empty();
}

Error Flights::wait(uint64_t number) {
  const Deadline end_of_spin(kSpin);
  for (;;) {
    std::unique_lock lock(mutex_);
    if (Error e = look_locked(); !e.ok()) return e;
    const bool gone =
        std::none_of(flights_.begin(), flights_.end(), [&](const Flight& f) { return f.number == number; });
    if (gone && cut_off_.count(number) == 0) return {};
    const Error sealed = fate_->failure();
    if (!sealed.ok()) {
      stopped_changed_.wait(lock, [this] { return stopped_; });  // bounded: see Communicators::abort
      return sealed;
    }
    if (!end_of_spin.passed()) continue;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Flights::settle() {
  const Deadline end(kSettle);
  while (!end.passed() && (launching_ > 0 || !empty())) {
    if (!look().ok()) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Flights::drain() {
  std::lock_guard lock(mutex_);
  const Deadline end(kDrain);
  bool idle = false;
  while (!idle && !end.passed()) {
    const Error e = strata::plugin_kit::attempt([&] {
      idle = std::all_of(flights_.begin(), flights_.end(), [&](const Flight& f) { return gpu_->reached(f.end); });
    });
    if (!e.ok()) return false;
    if (!idle) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return idle;
}

void Flights::stop(const Error& failure) {
  std::lock_guard lock(mutex_);
  for (const Flight& flight : flights_) {
    if (flight.done) flight.done->set(failure);
  }
  stopped_ = true;
  stopped_changed_.notify_all();
}

}  // namespace comm_nccl
